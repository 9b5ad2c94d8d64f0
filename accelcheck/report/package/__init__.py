"""Packages for a qualification: journals with the files that judged them, in one file that shows alterations.

A package is a tar archive without compression (`archive`), whose first member lists all others with their SHA-256
(`manifest`). Each journal has a hash chain of its lines (`chain`); the manifest may be signed (`signing`). No torch.
"""
