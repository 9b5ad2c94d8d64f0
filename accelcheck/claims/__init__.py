"""What articles promise, as data, and the experiments that measure it here. Above qualify, below report."""
