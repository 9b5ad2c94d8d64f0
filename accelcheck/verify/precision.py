"""Arithmetic precisions as numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

UNIT_ROUNDOFF: Mapping[str, float] = MappingProxyType(
    {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
)
"""Relative rounding error bound u = 2**-p for p significant bits, the implicit one counted.

IEEE 754-2019 for the first and the last but one; TF32 keeps 10 fraction bits (NVIDIA A100 whitepaper), bfloat16 7.
"""

SMALLEST_SUBNORMAL: Mapping[str, float] = MappingProxyType(
    {"float64": 2.0**-1074, "float32": 2.0**-149, "tf32": 2.0**-136, "float16": 2.0**-24, "bfloat16": 2.0**-133}
)
"""Spacing of numbers around zero; rounding errs there by at most half of it."""

ACCUMULATOR = "float32"
"""Precision that correct kernels accumulate in (float64 accumulates in itself).

Float8 products are the exception: see `FLOAT8_UNITS`.
"""


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """Sums products of float8 numbers in steps.

    Each step aligns some products and the sum so far to the largest exponent, cuts them off toward zero after some
    fraction bits, adds them exactly, and cuts off the sum.

    Attributes:
        fraction: Bits after the point of the largest term that the others keep.
        kept: Fraction bits of the sum that is carried on: 23 for FP32.
        terms: Products that are added in one step.
        promoted: Products after which the sum is added to one in FP32 and restarts from 0; 0 for never.
    """

    name: str
    fraction: int
    kept: int
    terms: int
    promoted: int


FLOAT8_UNITS: Mapping[tuple[int, int], MatrixUnit] = MappingProxyType(
    {
        (8, 9): MatrixUnit("Ada: sums of 14 bits, added up in FP32 every 128 products", 13, 13, 16, 128),
        (9, 0): MatrixUnit("Hopper: sums of 14 bits, added up in FP32 every 128 products", 13, 13, 32, 128),
        (10, 0): MatrixUnit("Blackwell: sums in FP32, cut off", 25, 23, 32, 0),
        (10, 3): MatrixUnit("Blackwell: sums in FP32, cut off", 25, 23, 32, 0),
        (12, 0): MatrixUnit("Blackwell RTX: sums in FP32, cut off", 25, 23, 32, 0),
        (12, 1): MatrixUnit("Blackwell RTX: sums in FP32, cut off", 25, 23, 32, 0),
    }
)
"""Float8 matrix units by CUDA compute capability. Other chips are held to sums in FP32.

"Around 14 bits" on Hopper: DeepSeek-V3, arXiv:2412.19437, sections 3.3.2 and 3.5.2; "FP22" (8 exponent and 13 fraction
bits) on Ada and Hopper: SageAttention2, arXiv:2411.10958. Fraction bits, terms and rounding of all: MMA-Sim,
arXiv:2511.10909, whose model gives the bits of the chips (mmasim/simulator/nv.py). With ``use_fast_accum=False``
libraries promote sums to FP32 at intervals (cuBLAS, CUBLASLT_MATMUL_DESC_FAST_ACCUM): CUTLASS after 4 instructions of
32 products, DeepSeek-V3 after 128.
"""

INEXACT_ULPS = 2.0
"""Error in units in the last place granted to fused and transcendental operators; basic arithmetic and contractions get
the half unit of correct rounding. The CUDA C++ Programming Guide's table of FP32 functions lists 1 to 2 for exp, log,
erf, tanh, rsqrt and their like; SLEEF, behind PyTorch's CPU vectors, promises 1.0."""

SLACK = 2.0
"""Factor over the errors of eager or the rounding samples that a candidate may show, as in FlashAttention's tests."""
