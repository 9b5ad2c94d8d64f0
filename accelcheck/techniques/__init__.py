"""Acceleration techniques: a package a family, each module with its `TECHNIQUES`.

On top are only the base class, the observation of runs, the matrix of cases, and the techniques without a family:
`eager`, the reference, and `platform`.
"""
