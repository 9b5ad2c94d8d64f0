"""What articles promise, as data, and the experiments that measure it on a device.

The promises are in ``claims.toml``; a new kind of measurement is one more module with its `EXPERIMENTS`.
"""
