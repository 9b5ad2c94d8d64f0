"""Data-parallel training: DDP and FSDP2, communication hooks and their oracles, resharding, elastic restarts.

Ranks are real processes; `accelcheck.techniques.processes` starts them.
"""
