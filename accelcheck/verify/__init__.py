"""Verification: oracle, views, budgets, metadata.

Pure functions of tensors: nothing here knows pytest, a device or a clock.
"""
