"""Checks of 4-bit dtypes, two numbers a byte, simulated by other dtypes: torch has no operations for them."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from accelcheck.checks.platform.tries import Tries, absent, refuse
from accelcheck.verify.number_formats import FORMATS, FloatFormat, IntegerFormat

NATIVE = {"int4": "int4", "float4": "float4_e2m1fn_x2"}
"""Dtypes of torch itself, which hold bytes and have next to no operations."""
FORMAT = {"int4": "int4", "float4": "float4_e2m1fn"}
NEEDED = ("copied", "unpacked", "packed", "added", "multiplied", "summed", "matrix product")
SIDE = 16
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between neighbours of float4's 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def packed(tries: Tries, name: str, codes: Sequence[int]) -> None:
    """Tries a dtype of 4 bits.

    Raises:
        Unsupported: The device lacks an operation that the simulation needs.
    """
    form = FORMATS[FORMAT[name]]
    place = tries.device.torch_device()
    pairs = [(low, high) for low in codes for high in codes]
    held = [low | high << 4 for low, high in pairs]
    host = torch.tensor(held, dtype=torch.uint8)
    native: torch.dtype | None = getattr(torch, NATIVE[name], None)
    if native is not None:  # for information: only the simulation is judged
        tries.bits(f"copied as torch.{NATIVE[name]}", lambda: host.view(native).to(place), NATIVE[name], held)
    tries.note("simulated", "two numbers a byte, in uint8; arithmetic in float32")
    tries.bits("copied", lambda: host.to(place), "uint8", held)
    if not tries.refused.get("copied"):
        low, high = ([(form.decode(pair[side]),) for pair in pairs] for side in (0, 1))
        tries.attempt("unpacked", lambda: _unpacked(name, host.to(place))[0], "float32", low)
        tries.attempt("unpacked, high half", lambda: _unpacked(name, host.to(place))[1], "float32", high)
        exact = torch.tensor([float(value) for (value,) in low])
        # Only float4's pattern of -0 does not follow from its value.
        doubled = [(0 if low_code == 8 and name == "float4" else low_code) * 17 for low_code, _ in pairs]
        tries.bits("packed", lambda: _packed(name, exact.to(place), exact.to(place)), "uint8", doubled)
        for label, work in (("added", torch.add), ("multiplied", torch.mul)):
            _pairwise(tries, name, label, host, [(x, y) for (x,), (y,) in zip(low, high, strict=True)], work)
        _reduced(tries, name, host, [value for (value,) in low])
    if (lacking := absent(tries, NEEDED)) and not tries.faults:
        raise refuse(name, tries.device, lacking)


def _unpacked(name: str, held: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks both halves of each byte to FP32."""
    byte = held.to(torch.float32)  # not by bits: some backends have no shifts
    low, high = _low_part(byte, 16), torch.floor(byte * 0.0625)
    if name == "float4":
        return _float4(low), _float4(high)
    # Two's complement: the highest of four bits counts -8.
    return _low_part(low + 8, 16) - 8, _low_part(high + 8, 16) - 8


def _low_part(number: Tensor, power: int) -> Tensor:
    """Computes a number modulo a power of two, exactly, by operators that every backend has."""
    return number - power * torch.floor(number * (1 / power))


def _float4(number: Tensor) -> Tensor:
    """Decodes 1 sign bit, 2 exponent bits and 1 fraction bit."""
    sign = 1 - 2 * (number >= 8).to(torch.float32)
    size = _low_part(number, 8)
    exponent, fraction = torch.floor(size * 0.5), _low_part(size, 2)
    power = 1 + (exponent > 1).to(torch.float32) + 2 * (exponent > 2).to(torch.float32)  # 2 ** (exponent - 1)
    normal = (1 + 0.5 * fraction) * power
    return sign * torch.where(exponent > 0, normal, 0.5 * fraction)


def _packed(name: str, low: Tensor, high: Tensor) -> Tensor:
    """Packs two FP32 tensors to bytes: int4 wraps around, float4 rounds to nearest, ties to even, and saturates."""
    low_code, high_code = (_low_part(half, 16) if name == "int4" else _float4_code(half) for half in (low, high))
    return (low_code + 16 * high_code).to(torch.uint8)


def _float4_code(number: Tensor) -> Tensor:
    size = torch.where(number < 0, number * -1, number)
    code = torch.zeros_like(size)
    for index, boundary in enumerate(_BOUNDARIES):  # the neighbour of even code takes the tie
        code = code + (size > boundary if index % 2 == 0 else size >= boundary).to(torch.float32)
    return code + 8 * (number < 0).to(torch.float32) * (code > 0).to(torch.float32)


def _pairwise(
    tries: Tries,
    name: str,
    label: str,
    host: Tensor,
    values: Sequence[tuple[Fraction | str, Fraction | str]],
    work: Callable[[Tensor, Tensor], Tensor],
) -> None:
    form = FORMATS[FORMAT[name]]
    expected = []
    for left, right in values:
        assert isinstance(left, Fraction)
        assert isinstance(right, Fraction)
        exact = left + right if label == "added" else left * right
        if isinstance(form, IntegerFormat):
            expected.append((form.wrapped(int(exact)),))
        else:
            assert isinstance(form, FloatFormat)
            value = form.rounded(max(-form.largest, min(form.largest, exact)))
            expected.append((value if isinstance(value, Fraction) else exact,))

    def computed() -> Tensor:
        low, high = _unpacked(name, host.to(tries.device.torch_device()))
        result = work(low, high)
        return _unpacked(name, _packed(name, result, result))[0]

    tries.attempt(label, computed, "float32", expected)


def _reduced(tries: Tries, name: str, host: Tensor, values: Sequence[Fraction | str]) -> None:
    """Tries the sum of the low halves and the square of their 16 x 16 matrix; FP32 is exact for both."""
    numbers = [Fraction(value) for value in values]
    tries.attempt("summed", lambda: _low(tries, name, host).sum(), "float32", [(sum(numbers, Fraction(0)),)])
    product = [
        (sum((numbers[row * SIDE + k] * numbers[k * SIDE + column] for k in range(SIDE)), Fraction(0)),)
        for row, column in itertools.product(range(SIDE), repeat=2)
    ]

    def squared() -> Tensor:
        matrix = _low(tries, name, host).reshape(SIDE, SIDE)
        return matrix @ matrix

    tries.attempt("matrix product", squared, "float32", product)


def _low(tries: Tries, name: str, host: Tensor) -> Tensor:
    return _unpacked(name, host.to(tries.device.torch_device()))[0]
