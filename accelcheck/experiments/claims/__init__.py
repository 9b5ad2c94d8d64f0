"""Published claims as data, and the experiments that measure them on a device.

The claims are in ``claims.toml``. For a new kind of measurement, add a module that lists its `EXPERIMENTS`.
"""
