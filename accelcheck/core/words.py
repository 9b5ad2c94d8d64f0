"""The values of options that their help texts name. Every pytest start imports this module, so it imports nothing."""

from __future__ import annotations

LEVELS = (1, 2, 3, 4)
"""smoke, standard, full, soak."""
DTYPES = ("float32", "bfloat16", "float16")
"""Storage dtypes that a case may have."""
