"""Turns every reduced-precision mode of torch off and on again, and measures if FP32 matmuls are exact FP32.

torch >= 2.9 keeps two sets of switches: the legacy ones (`torch.set_float32_matmul_precision`, ``allow_tf32``) and a
table of ``fp32_precision`` by backend and operator, where ``none`` inherits from the row above. A legacy setter writes
its own flag and rows of the table, a new one only its row, and a legacy getter raises when the two disagree. So reading
empties the table top down, after which each row and legacy flag reads as stored; writing sets legacy flags first.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from accelcheck.devices import torch_names
from accelcheck.devices._late_torch import torch

# Parents before children: the order in which rows can be read as stored.
_ROWS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
)
FLOAT32_LIMIT = 4 * 2.0**-24
"""Largest relative error of products that are exact in FP32: 0 is expected, TF32 errs 2**-11. A few units are left to
devices that multiply in split halves."""
_SIZE = 512  # above the thresholds at which tensor cores and oneDNN's bf16 kernels are chosen


@dataclass(frozen=True, slots=True)
class MatmulState:
    """Every switch of torch that lets a matmul, convolution or reduction be less precise than its dtype.

    Attributes:
        rows: Stored values of ``fp32_precision``, in the order of the table.
        legacy: Value of `torch.get_float32_matmul_precision`.
        cudnn: Value of ``torch.backends.cudnn.allow_tf32``.
        flags: The other switches, by the name of their getter in ``torch._C`` without ``_get_``; a tuple of its values.
    """

    rows: tuple[str, ...]
    legacy: str
    cudnn: bool
    flags: tuple[tuple[str, tuple[bool, ...]], ...]

    def strict(self) -> MatmulState:
        """The state with every reduced-precision mode off."""
        # The second value of a cuBLAS reduction flag allows split-K, which FP32 partial sums do not harm.
        flags = tuple((name, (False, *values[1:])) for name, values in self.flags)
        return replace(self, rows=("ieee",) * len(_ROWS), legacy="highest", cudnn=False, flags=flags)


_FLAGS = (
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "math_sdp_allow_fp16_bf16_reduction",
    "cpu_allow_fp16_reduced_precision_reduction",
    "onednn_allow_tf32",  # None where torch is built without Intel GPUs
)


@contextmanager
def strict_matmul() -> Iterator[None]:
    """A context with every reduced-precision mode off. Not thread-safe."""
    before = read_state()
    try:
        write_state(before.strict(), before)
        yield
    finally:
        write_state(before)


def read_state() -> MatmulState:
    """All stored switches, also in states for which torch's own getters raise."""
    rows: list[str] = []
    with _quiet():
        for row in _ROWS:
            rows.append(_c("_get_fp32_precision_getter")(*row))
            _c("_set_fp32_precision_setter")(*row, "none")
        legacy: str = _c("_get_float32_matmul_precision")()
        cudnn = _cudnn_flag()
    flags: list[tuple[str, tuple[bool, ...]]] = []
    for name in _FLAGS:
        value: Any = _c(f"_get_{name}")()
        if value is not None:
            flags.append((name, value if isinstance(value, tuple) else (value,)))
    state = MatmulState(tuple(rows), legacy, cudnn, tuple(flags))
    write_state(state, state)
    return state


def _cudnn_flag() -> bool:
    # With empty rows the getter answers False, or raises because the flag is True and the rows are not.
    try:
        return bool(_c("_get_cudnn_allow_tf32")())
    except RuntimeError:
        for op in ("conv", "rnn"):
            _c("_set_fp32_precision_setter")("cuda", op, "tf32")
        return bool(_c("_get_cudnn_allow_tf32")())


def write_state(state: MatmulState, current: MatmulState | None = None) -> None:
    """Sets all switches; flags only where they differ from `current`, since some setters warn on some builds."""
    with _quiet():
        _c("_set_float32_matmul_precision")(state.legacy)
        _c("_set_cudnn_allow_tf32")(state.cudnn)
        for row, precision in zip(_ROWS, state.rows, strict=True):
            _c("_set_fp32_precision_setter")(*row, precision)
        known = dict(current.flags) if current is not None else {}
        for name, values in state.flags:
            if known.get(name) != values:
                _c(f"_set_{name}")(*values)


def _c(name: str) -> Callable[..., Any]:
    # The public spellings raise in mixed states, and that of torch.backends.mkldnn writes another backend's row.
    function: Callable[..., Any] = torch_names.found("torch._C", name)
    return function


@contextmanager
def _quiet() -> Iterator[None]:
    # torch 2.9 warns at each legacy call, and at some setters on builds where they have no effect.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True, slots=True)
class Products:
    """Errors of products whose terms and sums are exact in FP32, in any order.

    Attributes:
        error: Largest relative error: 0 for FP32, 2**-11 for TF32, 2**-8.2 for bfloat16; infinite where one is NaN.
        reading: Pattern and place of the errors, in one sentence.
    """

    error: float
    reading: str

    @property
    def exact(self) -> bool:
        """True when they are products in FP32."""
        return self.error <= FLOAT32_LIMIT


def products(
    device: torch.device | str, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
) -> Products:
    """Errors of products of matrices whose entries need 12 significant bits.

    Rows are constant, 1024.5 and up in steps of one, and the other operand is all ones: every product and partial sum
    is exact in FP32 in any order, so an FP32 multiplication gives 0.0. TF32 (11 bits) gives 2**-11, bf16 (8 bits)
    2**-8.2, and both err in every element. Both sides of the product are tried.

    `multiply` multiplies two float32 matrices on the device; `torch.matmul` by default.
    """
    values = 1024.5 + torch.arange(_SIZE, dtype=torch.float64)
    matrix = values.unsqueeze(1).expand(_SIZE, _SIZE).to(torch.float32).contiguous()
    ones = torch.ones(_SIZE, _SIZE)
    exact = (values * _SIZE).unsqueeze(1).expand(_SIZE, _SIZE)
    function = torch.matmul if multiply is None else multiply
    errors: dict[str, torch.Tensor] = {}
    for side, left, right, wanted in (
        ("left", matrix, ones, exact),
        ("right", ones, matrix.t().contiguous(), exact.t()),
    ):
        got = function(left.to(device), right.to(device)).cpu()
        if got.shape != wanted.shape:
            return Products(math.inf, f"the shape is {tuple(got.shape)}, not {tuple(wanted.shape)}")
        errors[side] = (got.double() - wanted) / wanted
    readings = {side: _reading(error) for side, error in errors.items()}
    worst = max(math.inf if bool(e.isnan().any()) else float(e.abs().max()) for e in errors.values())
    if readings["left"] == readings["right"]:
        return Products(worst, readings["left"])
    sides = (f"with the 12-bit operand on the {side}: {reading}" for side, reading in readings.items())
    return Products(worst, "; ".join(sides))


def _reading(error: torch.Tensor) -> str:
    """The pattern of relative errors ``(rows, columns)`` of a product, in one sentence."""
    size = error.nan_to_num(nan=torch.inf).abs()
    wrong, worst = size > FLOAT32_LIMIT, float(size.max())
    if not bool(wrong.any()):
        return "exact"
    if bool(wrong.all()):
        # Omitted terms of a sum are the same part of every element; a rounded operand errs by another part of each.
        lost = -float(error.mean()) * _SIZE
        if worst < 1 and float(error.max() - error.min()) <= FLOAT32_LIMIT:
            whole = abs(lost - round(lost)) < 0.01
            terms = f", as if {lost:.0f} of {_SIZE} terms of each sum were left out" if whole else ""
            return f"wrong by {-lost / _SIZE:.3g} in every element{terms}"
        if worst <= 2.0**-11:
            return f"errs up to {worst:.3g} in every element, as TF32 does (2**-11)"
        if worst <= 2.0**-8:
            return f"errs up to {worst:.3g} in every element, as bfloat16 does (2**-8)"
    lost_ones = int(error.isnan().sum())
    nan = f", {lost_ones} of them NaN" if lost_ones else ""
    return f"wrong by up to {worst:.3g} in {int(wrong.sum())} of {wrong.numel()} elements{nan}: {_place(wrong)}"


def _place(wrong: torch.Tensor) -> str:
    """The rows and columns of wrong elements, in words."""
    rows, columns = (wrong.any(other).nonzero().flatten().tolist() for other in (1, 0))
    pairs = zip((rows, columns), wrong.shape, strict=True)
    where = ["all" if len(indices) == size else _listed(indices, size) for indices, size in pairs]
    full = int(wrong.sum()) == len(rows) * len(columns)
    return f"rows {where[0]}; columns {where[1]}{'' if full else ' (not all of them)'}"


def _listed(indices: list[int], size: int) -> str:
    """Numbers below `size`, as ranges or with their stride."""
    steps = {after - before for before, after in itertools.pairwise(indices)}
    first, last, count = indices[0], indices[-1], len(indices)
    if count == 1:
        return f"{first}{', the last' if first == size - 1 else ''}"
    if steps == {1}:
        return f"{first} to {last}{f', the last {count}' if last == size - 1 else ''}"
    if len(steps) == 1:
        return f"{first} to {last} in steps of {steps.pop()}"
    return f"{', '.join(map(str, indices[:4]))}{f' and {count - 4} more' if count > 4 else ''}"
