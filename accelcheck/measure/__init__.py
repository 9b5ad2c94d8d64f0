"""How time and memory are measured: clocks, paired statistics, baselines, memory, kernel launches, timing processes.

Whether a result is right belongs in `accelcheck.verify`; nothing here knows a technique.
"""
