"""The acceleration techniques, one file a family, each with its `TECHNIQUES`."""
