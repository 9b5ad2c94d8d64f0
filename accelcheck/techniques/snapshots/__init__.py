"""Saving and restoring a training, also in another process. Checkpoints in shards are in `distributed`."""
