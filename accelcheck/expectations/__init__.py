"""Expectations of a device: ledgers of known failures, and limits that users set on time and memory.

TOML files and their readers. They run no case and import no torch.
"""
