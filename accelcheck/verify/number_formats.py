"""Number formats, decoded and rounded in exact arithmetic, to judge a device's conversions and operations. No torch.

A number is a `fractions.Fraction`; other values are ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TypeAlias

Value: TypeAlias = "Fraction | str"
"""Number, or ``nan``, ``inf``, ``-inf``."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Integers in two's complement of a width in bits."""

    bits: int

    @property
    def lowest(self) -> int:
        """Smallest number."""
        return -(1 << self.bits - 1)

    @property
    def highest(self) -> int:
        """Largest number."""
        return (1 << self.bits - 1) - 1

    def decode(self, code: int) -> Value:
        """Number of a bit pattern."""
        return Fraction(code - (1 << self.bits) if code >> self.bits - 1 else code)

    def wrapped(self, number: int) -> Fraction:
        """Number without the bits above the width."""
        return Fraction((number - self.lowest) % (1 << self.bits) + self.lowest)


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Binary floating-point numbers with subnormal numbers: those of IEEE 754, and formats of 8 and 4 bits.

    Attributes:
        bits: Width in bits.
        exponent: Bits of the exponent.
        infinite: True if the largest exponent means infinities and NaN; otherwise numbers use that exponent too.
        undefined: True if there is a NaN, which is the pattern of all ones without infinities.
    """

    bits: int
    exponent: int
    infinite: bool = True
    undefined: bool = True

    @property
    def fraction(self) -> int:
        """Stored bits of the significand."""
        return self.bits - self.exponent - 1

    @property
    def precision(self) -> int:
        """Bits of the significand, the implicit one counted."""
        return self.fraction + 1

    @property
    def least(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << self.exponent - 1)

    @property
    def smallest(self) -> Fraction:
        """Smallest positive normal number."""
        return Fraction(2) ** self.least

    @property
    def largest(self) -> Fraction:
        """Largest number."""
        top = (1 << self.exponent) - 1 - int(self.infinite)
        ones = (1 << self.fraction) - 1 - int(self.undefined and not self.infinite)
        return (1 + Fraction(ones, 1 << self.fraction)) * Fraction(2) ** (top - 1 + self.least)

    def decode(self, code: int) -> Value:
        """Value of a bit pattern; both zeros are 0."""
        sign = -1 if code >> self.bits - 1 else 1
        exponent = code >> self.fraction & (1 << self.exponent) - 1
        fraction = code & (1 << self.fraction) - 1
        if exponent == (1 << self.exponent) - 1:
            if self.infinite:
                return "nan" if fraction else "inf" if sign > 0 else "-inf"
            if self.undefined and fraction == (1 << self.fraction) - 1:
                return "nan"
        part = Fraction(fraction, 1 << self.fraction)
        if exponent == 0:
            return sign * part * self.smallest
        return sign * (1 + part) * Fraction(2) ** (exponent - 1 + self.least)

    def rounded(self, number: Fraction) -> Value:
        """Nearest number, ties to even; beyond the largest one an infinity, or NaN in formats without infinities."""
        if not number:
            return Fraction(0)
        size = abs(number)
        # Exponent of the leading bit: floor(log2(size)), exactly.
        power = size.numerator.bit_length() - size.denominator.bit_length()
        power -= size < Fraction(2) ** power
        spacing = Fraction(2) ** (max(power, self.least) - self.fraction)
        nearest = round(number / spacing) * spacing  # Python rounds a Fraction half to even
        if abs(nearest) <= self.largest:
            return nearest
        if not self.infinite:
            return "nan"
        return "inf" if nearest > 0 else "-inf"

    def subnormal(self, value: Value) -> bool:
        """True if a device that flushes subnormal numbers may take this one for 0."""
        return isinstance(value, Fraction) and 0 < abs(value) < self.smallest


Format: TypeAlias = "IntegerFormat | FloatFormat"

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "float64": FloatFormat(64, 11),
        "float32": FloatFormat(32, 8),
        "float16": FloatFormat(16, 5),
        "bfloat16": FloatFormat(16, 8),
        "float8_e5m2": FloatFormat(8, 5),
        "float8_e4m3fn": FloatFormat(8, 4, infinite=False),
        "float4_e2m1fn": FloatFormat(4, 2, infinite=False, undefined=False),
        "int64": IntegerFormat(64),
        "int32": IntegerFormat(32),
        "int16": IntegerFormat(16),
        "int8": IntegerFormat(8),
        "int4": IntegerFormat(4),
    }
)
"""Formats by torch's names without prefix; `float4_e2m1fn` is one number of ``float4_e2m1fn_x2``.

IEEE 754-2019 for the first three; bfloat16: 8 exponent bits; float8: arXiv:2209.05433; float4: OCP Microscaling 1.0.
"""
