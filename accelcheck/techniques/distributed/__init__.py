"""Data-parallel training: DDP and FSDP2, communication hooks and their oracles, resharding, elastic restarts.

Ranks are real processes; how processes are started and asked is in `accelcheck.techniques.processes`.
"""
