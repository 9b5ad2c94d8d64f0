"""Number formats, decoded and rounded in exact arithmetic: what a device's conversions and operations are held against. No torch.

A number is a `fractions.Fraction`. A value that is none is ``"nan"``, ``"inf"`` or ``"-inf"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Value: TypeAlias = "Fraction | str"
"""A number, or ``nan``, ``inf``, ``-inf``."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Integers in two's complement.

    Attributes:
        bits: Width.
    """

    bits: int

    @property
    def lowest(self) -> int:
        """The smallest number."""
        return -(1 << self.bits - 1)

    @property
    def highest(self) -> int:
        """The largest number."""
        return (1 << self.bits - 1) - 1

    def decode(self, code: int) -> Value:
        """The number of a bit pattern."""
        return Fraction(code - (1 << self.bits) if code >> self.bits - 1 else code)

    def wrapped(self, number: int) -> Fraction:
        """The number that is left when all bits above the width are dropped."""
        return Fraction((number - self.lowest) % (1 << self.bits) + self.lowest)


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Binary floating-point numbers with subnormal numbers, as IEEE 754 has them, and the formats of 8 and 4 bits beside it.

    Attributes:
        bits: Width.
        exponent: Bits of the exponent.
        infinite: Whether there are infinities, with the largest exponent; if not, numbers use that exponent too.
        undefined: Whether there is a NaN: without infinities it is the pattern of all ones.
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
        """The smallest positive normal number."""
        return Fraction(2) ** self.least

    @property
    def largest(self) -> Fraction:
        """The largest number."""
        top = (1 << self.exponent) - 1 - int(self.infinite)
        ones = (1 << self.fraction) - 1 - int(self.undefined and not self.infinite)
        return (1 + Fraction(ones, 1 << self.fraction)) * Fraction(2) ** (top - 1 + self.least)

    def decode(self, code: int) -> Value:
        """The value of a bit pattern; both zeros are 0."""
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
        """The nearest number, ties to even. Beyond the largest number: an infinity, or NaN in formats without infinities."""
        if not number:
            return Fraction(0)
        size = abs(number)
        # Exponent of the leading bit: floor(log2(size)), exactly.
        power = size.numerator.bit_length() - size.denominator.bit_length()
        power -= size < Fraction(2) ** power
        spacing = Fraction(2) ** (max(power, self.least) - self.fraction)
        found = round(number / spacing) * spacing  # Python rounds a Fraction half to even
        if abs(found) <= self.largest:
            return found
        if not self.infinite:
            return "nan"
        return "inf" if found > 0 else "-inf"

    def subnormal(self, value: Value) -> bool:
        """Whether a device that flushes subnormal numbers may take this one for 0."""
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
"""By torch's names, without its prefix; `float4_e2m1fn` is one number of ``float4_e2m1fn_x2``.

IEEE 754-2019 for the first three; bfloat16: 8 exponent bits; float8: arXiv:2209.05433; float4: OCP Microscaling Formats (MX) 1.0.
"""
