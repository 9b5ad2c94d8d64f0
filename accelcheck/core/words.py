"""The values of options that their help texts name. Every pytest start imports this module, so it imports nothing."""

from __future__ import annotations

LEVELS = (1, 2, 3, 4)
"""smoke, standard, full, soak."""
DTYPES = ("float32", "bfloat16", "float16")
"""Storage dtypes that a case may have."""
EFFORTS = ("auto", "full", "least")
"""How much is computed to judge somebody's own model: by its size, all that is usual, or as little as can be."""
SECONDS = (300.0, 900.0, 1800.0, 7200.0)
"""Seconds that a case may take, by its level."""


def seconds_of(level: int, patience: float) -> float:
    """Seconds that a case may take: of its level, times the `patience` of its technique."""
    return SECONDS[LEVELS.index(level)] * patience
