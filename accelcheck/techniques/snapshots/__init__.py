"""Saving and restoring a training: snapshot files, and another process that resumes from them.

Checkpoints that several ranks write in shards are in `accelcheck.techniques.distributed.resharding`.
"""
