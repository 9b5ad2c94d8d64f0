"""Saving and restoring a training: snapshot files, and another process that resumes from them."""
