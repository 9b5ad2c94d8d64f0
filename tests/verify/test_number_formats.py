"""Number formats in exact arithmetic: every bit pattern and every rounding as the hardware and torch have them."""

from __future__ import annotations

import random
import struct
from fractions import Fraction

import pytest
import torch

from accelcheck.checks.platform.tries import of_patterns
from accelcheck.verify.number_formats import FORMATS, FloatFormat, IntegerFormat

FLOATS = {name: form for name, form in FORMATS.items() if isinstance(form, FloatFormat)}


@pytest.mark.parametrize(("name", "code"), [("float32", "<f"), ("float64", "<d"), ("float16", "<e")])
def test_patterns_are_those_of_ieee_754(name: str, code: str) -> None:
    form = FORMATS[name]
    drawn = random.Random(name)
    for _ in range(2000):
        pattern = drawn.getrandbits(form.bits)
        value = struct.unpack(code, pattern.to_bytes(form.bits // 8, "little"))[0]
        number = form.decode(pattern)
        assert number == (str(value) if isinstance(number, str) else Fraction(value)), hex(pattern)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8_pattern_is_the_one_that_torch_reads(name: str) -> None:
    form = FORMATS[name]
    values = of_patterns(range(256), form, getattr(torch, name)).float().tolist()
    for pattern, value in enumerate(values):
        number = form.decode(pattern)
        assert number == (str(value) if isinstance(number, str) else Fraction(value)), hex(pattern)


def test_float4_is_that_of_mx() -> None:
    form = FORMATS["float4_e2m1fn"]
    assert [form.decode(code) for code in range(8)] == [Fraction(x) / 2 for x in (0, 1, 2, 3, 4, 6, 8, 12)]
    assert [form.decode(code) for code in range(8, 16)] == [-Fraction(x) / 2 for x in (0, 1, 2, 3, 4, 6, 8, 12)]


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [
        ("float16", 65504.0, 2.0**-14),
        ("bfloat16", 3.3895313892515355e38, 2.0**-126),
        ("float8_e4m3fn", 448.0, 2.0**-6),
        ("float8_e5m2", 57344.0, 2.0**-14),
        ("float4_e2m1fn", 6.0, 1.0),
    ],
)
def test_the_range_is_the_one_that_the_format_states(name: str, largest: float, smallest: float) -> None:
    assert (float(FLOATS[name].largest), float(FLOATS[name].smallest)) == (largest, smallest)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_numbers_are_rounded_to_nearest_even_as_torch_rounds_them(name: str) -> None:
    form, dtype = FLOATS[name], getattr(torch, name)
    drawn = random.Random(name)
    numbers = [drawn.uniform(-2, 2) * 2.0 ** drawn.randint(form.least - form.fraction - 2, 120) for _ in range(3000)]
    numbers += [
        1 + 2.0**-form.precision,
        1 + 3 * 2.0**-form.precision,
        float(form.largest) * (1 + 2.0**-form.precision),
    ]
    rounded = torch.tensor(numbers, dtype=torch.float64).to(dtype).double().tolist()
    for number, value in zip(numbers, rounded, strict=True):
        values = form.rounded(Fraction(number))
        assert (values if isinstance(values, str) else float(values)) == (
            str(value) if isinstance(values, str) else value
        )


@pytest.mark.parametrize(
    ("bits", "number", "wrapped"), [(8, 128, -128), (8, -129, 127), (4, 9, -7), (64, 1 << 63, -(1 << 63))]
)
def test_integers_wrap_around(bits: int, number: int, wrapped: int) -> None:
    assert IntegerFormat(bits).wrapped(number) == wrapped
