"""The pytest side: hooks, options, run configuration, controller, what plugins registered, pytest-benchmark's adapter.

Nothing here imports torch at its top, since every pytest run of everyone who has accelcheck installed imports `hooks`.
"""
