"""Expectations of a device: ledgers, users' limits, must-pass lists, statements about chips, ceilings of budgets.

Files and their readers, which run no case and import no torch.
"""
