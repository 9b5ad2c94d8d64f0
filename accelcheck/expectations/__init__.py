"""What is expected of a device: the ledgers of known failures, and limits that people set on time and memory.

TOML files and their readers; nothing here runs a case or imports torch.
"""
