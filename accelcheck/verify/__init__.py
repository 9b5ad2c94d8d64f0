"""Verification: oracle, views, budgets, metadata.

Pure functions of tensors: nothing here knows pytest or a clock, or computes on a device under test.
"""
