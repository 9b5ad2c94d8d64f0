"""What a run takes: figures of memory. Above devices, below techniques."""
