"""What a run takes: clocks, paired statistics, baselines, memory, launches. Above devices, below techniques."""
