"""The arithmetic precisions, as numbers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

UNIT_ROUNDOFF: Mapping[str, float] = MappingProxyType(
    {
        "float64": 2.0**-53,
        "float32": 2.0**-24,
        "tf32": 2.0**-11,
        "float16": 2.0**-11,
        "bfloat16": 2.0**-8,
    }
)
"""u = 2**-p for p significant bits, the implicit one counted: rounding to nearest errs by at most u, relatively.

IEEE 754-2019 for the first and the last but one; TF32 keeps 10 fraction bits (NVIDIA A100 whitepaper), bfloat16 7.
"""

SMALLEST_SUBNORMAL: Mapping[str, float] = MappingProxyType(
    {
        "float64": 2.0**-1074,
        "float32": 2.0**-149,
        "tf32": 2.0**-136,
        "float16": 2.0**-24,
        "bfloat16": 2.0**-133,
    }
)
"""Spacing of numbers around zero: the absolute error that rounding makes there is at most half of it."""

ACCUMULATOR = "float32"
"""What correct kernels of every precision here accumulate in (float64 accumulates in itself)."""

INEXACT_ULPS = 2.0
"""Error in units in the last place granted to fused and transcendental operators, where basic arithmetic and contractions
get the half unit of correct rounding. The CUDA C++ Programming Guide's table of FP32 functions lists 1 to 2 for exp, log,
erf, tanh, rsqrt and their like; SLEEF, behind PyTorch's CPU vectors, promises 1.0."""

SLACK = 2.0
"""A candidate may err twice as much as eager or the rounding samples do: the factor of FlashAttention's tests."""
