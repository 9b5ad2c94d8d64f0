"""Checks of dtypes: making, copying, casting, adding, multiplying and reducing tensors equals exact arithmetic.

Integers must be exact, also where they wrap around. Casts, sums and products of two floating-point numbers must be
correctly rounded; a device may flush subnormal numbers to 0. Longer sums and matrix products are of integers so small
that every partial sum is exact in any order: their rounding is judged by the workloads ``matmul`` and ``reductions``.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from accelcheck.checks.platform.packed import packed
from accelcheck.checks.platform.tries import Accepted, Tries, absent, of_patterns, refuse
from accelcheck.checks.trial import Finding, Trial
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import scaled_mm
from accelcheck.verify.number_formats import FORMATS, FloatFormat, Format, IntegerFormat, Value

SIDE = 16
"""Rows, columns and terms of matrix products, as `torch._scaled_mm` takes them."""
TERMS = 64
"""Number of terms of a sum."""
ZERO = Fraction(0)
PREFIX = "dtype-"
"""Prefix of the names of dtype workloads."""
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
CASTS = "cast from float32", "cast to float32"
NEEDED = ("made", "copied", *CASTS, "added", "multiplied", "summed")
"""Operations without which a device does not have a dtype."""
NEEDED_OF_FLOAT8 = ("made", "copied", *CASTS)
"""Needed operations of float8: torch itself has few others."""


def verify(trial: Trial) -> Finding:
    """Tries a dtype.

    Raises:
        Unsupported: The device refuses an operation without which it does not have the dtype.
    """
    name = trial.case.workload.removeprefix(PREFIX)
    codes = [int(code) for code in trial.problem(trial.case.seed).inputs[0].tolist()]
    with trial.device.strict_float32():
        if name == "float8":
            return _float8(trial.device, codes)
        tries = Tries(trial.device, name)
        if name in {"int4", "float4"}:
            packed(tries, name, codes)
        else:
            _tried(tries, name, [code & (1 << FORMATS[name].bits) - 1 for code in codes], _products)
            # A dtype with faults exists: its faults are reported, not missing operations.
            if (lacking := absent(tries, NEEDED)) and not tries.faults:
                raise refuse(name, tries.device, lacking)
    return tries.finding()


def _tried(
    tries: Tries, name: str, codes: Sequence[int], products: Callable[[Tries, str, Sequence[int]], None]
) -> None:
    _moves(tries, name, codes)
    if not tries.refused:
        for operations in (_casts, _elementwise, _reductions, products):
            operations(tries, name, codes)


def _float8(device: Device, codes: Sequence[int]) -> Finding:
    """Tries both float8 formats of torch: one is enough, and neither may be wrong."""
    both = []
    for name in FLOAT8:
        tries = Tries(device, name)
        both.append(tries)
        _tried(tries, name, codes, _scaled_products)
    lacking = [reasons for tries in both if (reasons := absent(tries, NEEDED_OF_FLOAT8))]
    together = Tries(device, "float8")
    for tries in both:
        together.evidence += tries.evidence
        together.faults += tries.faults
        together.compared += tries.compared
    if len(lacking) == len(FLOAT8) and not together.faults:
        raise refuse("float8", device, lacking[0])
    return together.finding()


def _moves(tries: Tries, name: str, codes: Sequence[int]) -> None:
    """Makes tensors on the device; copies them there, back, and on it."""
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        tries.refused["made"] = f"torch {torch.__version__} has no torch.{name}"
        return
    place, host = tries.device.torch_device(), of_patterns(codes, FORMATS[name], dtype)
    tries.bits("made", lambda: torch.zeros(TERMS, dtype=dtype, device=place), name, [0] * TERMS)
    if "made" not in tries.refused:
        tries.bits("copied", lambda: host.to(place), name, codes)
        tries.bits("copied on the device", lambda: host.to(place).clone(), name, codes)


def _casts(tries: Tries, name: str, codes: Sequence[int]) -> None:
    form, dtype = FORMATS[name], getattr(torch, name)
    place, host = tries.device.torch_device(), of_patterns(codes, form, dtype)
    single = FORMATS["float32"]
    values = [form.decode(code) for code in codes]
    # float32 itself is also cast from float64, which rounds.
    for source in ("float32", *(["float64"] if name == "float32" else [])):
        given = _for_casting(form, values, FORMATS[source])
        numbers = torch.tensor([float(value) for value in given], dtype=getattr(torch, source))
        tries.attempt(
            f"cast from {source}",
            lambda numbers=numbers: numbers.to(place).to(dtype),  # type: ignore[misc]  # the default's type
            name,
            [_cast(value, form) for value in given],
        )
    expected = [_cast(value, single) for value in values]
    tries.attempt("cast to float32", lambda: host.to(place).to(torch.float32), "float32", expected)
    if isinstance(form, IntegerFormat) and form.bits < 64:
        wide = torch.tensor([*(code * 2654435761 for code in range(-TERMS, TERMS)), form.highest + 1, form.lowest - 1])
        wrapped = [(form.wrapped(int(number)),) for number in wide.tolist()]
        tries.attempt("cast from int64", lambda: wide.to(place).to(dtype), name, wrapped)


def _for_casting(form: Format, values: Sequence[Value], source: Format) -> list[Fraction]:
    """Returns source numbers to cast: values of the format, and points between and halfway between neighbours."""
    assert isinstance(source, FloatFormat)
    numbers = [value for value in values if isinstance(value, Fraction)]
    if isinstance(form, IntegerFormat):
        # Casting floats beyond the range, or rounded out of it at its end, is undefined.
        kept = [value + part for value in numbers for part in (ZERO, Fraction(1, 4)) if abs(value) < 1 << form.bits - 2]
    elif form.precision > source.precision:
        kept = [rounded for value in numbers if isinstance(rounded := source.rounded(value), Fraction)]
    else:
        inside = [value for value in numbers if form.smallest <= abs(value) < form.largest / 2]
        halves = [Fraction(2) ** (math.frexp(abs(value))[1] - form.precision - 1) for value in inside]
        points = zip(inside, halves, strict=True)
        kept = [value + part * half for value, half in points for part in (0, 1, Fraction(3, 2))]
        kept += [ZERO, form.largest]
    return [value for value in kept if source.rounded(value) == value and not source.subnormal(value)]


def _cast(value: Value, form: Format) -> Accepted:
    if isinstance(form, IntegerFormat):
        return (Fraction(math.trunc(value)),) if isinstance(value, Fraction) else ()
    return _accepted(form, (value,), lambda number: number)


def _accepted(
    form: FloatFormat, operands: Sequence[Value], exact: Callable[..., Fraction], of: FloatFormat | None = None
) -> Accepted:
    """Lists the right results of an exact operation: correctly rounded, also with subnormal numbers flushed to 0.

    Infinities, NaN and overflow of a format without infinities are not judged. The operands' format is `form` or `of`.
    """
    own = form if of is None else of
    if not all(isinstance(operand, Fraction) for operand in operands):
        return (operands[0],) if len(operands) == 1 and form.infinite else ()
    flushed = ZERO
    tiny = [own.subnormal(operand) or form.subnormal(operand) for operand in operands]
    choices = [(operand, flushed) if small else (operand,) for operand, small in zip(operands, tiny, strict=True)]
    accepted: dict[Value, None] = {}
    for numbers in itertools.product(*choices):
        value = form.rounded(exact(*numbers))
        accepted[value] = None
        if form.subnormal(value) or abs(exact(*numbers)) < form.smallest:
            accepted[flushed] = None
    return () if "nan" in accepted else tuple(accepted)


def _elementwise(tries: Tries, name: str, codes: Sequence[int]) -> None:
    form, dtype = FORMATS[name], getattr(torch, name)
    # Each pairs with two others, so that sums and products have all sizes, overflow, and are odd and even.
    pairs = [(code, codes[(index + step) % len(codes)]) for step in (1, 10) for index, code in enumerate(codes)]
    a, b = (of_patterns([pair[side] for pair in pairs], form, dtype) for side in (0, 1))
    values = [(form.decode(left), form.decode(right)) for left, right in pairs]
    place = tries.device.torch_device()
    for label, work in (("added", operator.add), ("multiplied", operator.mul)):
        expected = [_result(form, pair, work) for pair in values]
        tries.attempt(label, lambda work=work: work(a.to(place), b.to(place)), name, expected)  # type: ignore[misc]


def _result(form: Format, pair: tuple[Value, Value], work: Callable[..., Fraction]) -> Accepted:
    if isinstance(form, FloatFormat):
        return _accepted(form, pair, work)
    left, right = pair
    assert isinstance(left, Fraction)
    assert isinstance(right, Fraction)
    return (form.wrapped(int(work(left, right))),)


def _small(form: Format, codes: Sequence[int], count: int, most: int) -> list[int]:
    """Derives `count` integers of magnitude at most `most` from the bit patterns."""
    limit = min(most, form.highest) if isinstance(form, IntegerFormat) else most
    # A multiplicative hash spreads patterns that differ in high bits alone.
    return [(codes[i % len(codes)] * 2654435761 + i * 40503) % (2 * limit + 1) - limit for i in range(count)]


def _reductions(tries: Tries, name: str, codes: Sequence[int]) -> None:
    form, dtype = FORMATS[name], getattr(torch, name)
    place, host = tries.device.torch_device(), of_patterns(codes, form, dtype)
    if isinstance(form, IntegerFormat):
        values = [form.decode(code) for code in codes]
        total = IntegerFormat(64).wrapped(sum(int(value) for value in values))
        tries.attempt("summed", lambda: host.to(place).sum(), "int64", [(total,)])  # torch sums integers in int64
        tries.attempt("largest", lambda: host.to(place).max(), name, [(max(values),)])
        return
    numbers = _small(form, codes, TERMS, max(1, (1 << form.precision) // TERMS))
    terms = torch.tensor([float(number) for number in numbers], dtype=torch.float64).to(dtype)
    tries.attempt("summed", lambda: terms.to(place).sum(), name, [_exactly(form, sum(numbers))])
    tries.attempt("largest", lambda: terms.to(place).max(), name, [(Fraction(max(numbers)),)])


def _exactly(form: FloatFormat, number: int) -> Accepted:
    """Accepts any value for formats of few bits, whose partial sums are not exact in every order."""
    return (Fraction(number),) if form.precision > 7 else ()


def _matrices(form: Format, codes: Sequence[int], most: int) -> tuple[list[int], list[int], list[int]]:
    """Makes two square matrices, by rows, and their product."""
    numbers = _small(form, codes, 2 * SIDE * SIDE, most)
    left, right = numbers[: SIDE * SIDE], numbers[SIDE * SIDE :]
    product = [
        sum(left[row * SIDE + k] * right[k * SIDE + column] for k in range(SIDE))
        for row, column in itertools.product(range(SIDE), repeat=2)
    ]
    return left, right, product


def _products(tries: Tries, name: str, codes: Sequence[int]) -> None:
    form, dtype, place = FORMATS[name], getattr(torch, name), tries.device.torch_device()
    whole = isinstance(form, IntegerFormat)
    most = form.highest if isinstance(form, IntegerFormat) else math.isqrt((1 << form.precision) // SIDE)
    left, right, product = _matrices(form, codes, most)
    made = torch.int64 if whole else torch.float64
    a, b = (torch.tensor(numbers, dtype=made).reshape(SIDE, SIDE).to(dtype) for numbers in (left, right))
    expected = [(form.wrapped(number) if isinstance(form, IntegerFormat) else Fraction(number),) for number in product]
    tries.attempt("matrix product", lambda: a.to(place) @ b.to(place), name, expected)


def _scaled_products(tries: Tries, name: str, codes: Sequence[int]) -> None:
    """Tries float8's scaled matrix product, with e4m3fn alone: chips multiply e5m2 only with e4m3fn."""
    if name != "float8_e4m3fn":
        return
    place = tries.device.torch_device()
    left, right, product = _matrices(FORMATS[name], codes, 3)

    def multiplied() -> Tensor:
        a, b = (torch.tensor(m, dtype=torch.float32).reshape(SIDE, SIDE).to(torch.float8_e4m3fn) for m in (left, right))
        scale = torch.ones((), device=place)
        columns = b.t().contiguous().to(place).t()  # as the chips take it
        output: Tensor = scaled_mm(a.to(place), columns, scale_a=scale, scale_b=scale, out_dtype=torch.float32)
        return output

    tries.attempt("scaled matrix product", multiplied, "float32", [(Fraction(number),) for number in product])
