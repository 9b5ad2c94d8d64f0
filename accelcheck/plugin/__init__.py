"""The pytest plugin: hooks, options, run configuration, controller, registered things, adapter for pytest-benchmark.

No module of this package imports torch at import: every pytest run where accelcheck is installed imports `hooks`.
"""
