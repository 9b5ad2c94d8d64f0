"""The acceleration techniques: a package a family, each module with its `TECHNIQUES`.

On top are only the base class, the observation of runs, and the reference, eager; machinery lives in the package of its family.
"""
