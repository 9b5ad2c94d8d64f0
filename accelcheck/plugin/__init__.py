"""The pytest plugin: hooks, options, run configuration, controller, registered devices and techniques, adapter for pytest-benchmark.

No module of this package imports torch at import: every pytest run where accelcheck is installed imports `hooks`.
"""
