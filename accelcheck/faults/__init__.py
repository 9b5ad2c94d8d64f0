"""Defects that verdicts must catch, and correct variants that they must pass: what `accelcheck selftest` plants. One file a family."""
