"""Turns every reduced-precision mode of torch off and on again, and measures whether FP32 matmuls are exact FP32.

torch >= 2.9 keeps two sets of switches: the legacy ones (`torch.set_float32_matmul_precision`, ``allow_tf32``) and a
table of ``fp32_precision`` by backend and operator, where ``none`` inherits from the row above. A legacy setter writes
its own flag and rows of the table, a new one only its row, and a legacy getter raises when the two disagree. So the
table is emptied top down, which makes each row readable as it was stored and lets the legacy flags be read whatever
their state; setting goes the other way: legacy flags first, rows last.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

# Parents before children: the order in which rows can be read as stored.
_ROWS = (
    ("generic", "all"),
    *(("cuda", op) for op in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", op) for op in ("all", "matmul", "conv", "rnn")),
)
_SIZE = 512  # above the thresholds at which tensor cores and oneDNN's bf16 kernels are chosen


@dataclass(frozen=True, slots=True)
class MatmulState:
    """Every switch of torch that lets a matmul, convolution or reduction be less precise than its dtype.

    Attributes:
        rows: ``fp32_precision`` as stored, in the order of the table.
        legacy: `torch.get_float32_matmul_precision`.
        cudnn: ``torch.backends.cudnn.allow_tf32``.
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
    """A context with every reduced-precision mode off. It restores each switch afterwards. Not thread-safe."""
    found = read_state()
    try:
        _write(found.strict(), found)
        yield
    finally:
        _write(found, None)


def read_state() -> MatmulState:
    """All switches as stored, also in states for which torch's own getters raise."""
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
    _write(state, state)
    return state


def write_state(state: MatmulState) -> None:
    """Set all switches as a state has them stored."""
    _write(state, None)


def _cudnn_flag() -> bool:
    # With empty rows the getter answers False, or raises because the flag is True and the rows are not.
    try:
        return bool(_c("_get_cudnn_allow_tf32")())
    except RuntimeError:
        for op in ("conv", "rnn"):
            _c("_set_fp32_precision_setter")("cuda", op, "tf32")
        return bool(_c("_get_cudnn_allow_tf32")())


def _write(state: MatmulState, current: MatmulState | None) -> None:
    """Set all switches; flags only where they differ from `current`, since some setters warn on some builds."""
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
    import torch

    # The public spellings raise in mixed states, and that of torch.backends.mkldnn writes another backend's row.
    function: Callable[..., Any] = getattr(torch._C, name)  # noqa: SLF001 - see above
    return function


@contextmanager
def _quiet() -> Iterator[None]:
    # torch 2.9 warns at each legacy call, and at some setters on builds where they have no effect.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def matmul_error(device: torch.device | str, multiply: Callable[[Tensor, Tensor], Tensor] | None = None) -> float:
    """Largest relative error of FP32 products of matrices whose entries need 12 significant bits.

    Rows are constant, 1024.5 and up in steps of one, and the other operand is all ones: every product and partial sum
    is exact in FP32 in any order, so an FP32 multiplication gives 0.0. TF32 (11 bits) gives 2**-11, bf16 (8 bits)
    2**-8.2. Both sides of the product are tried.

    Args:
        device: Where to multiply.
        multiply: Function that multiplies two float32 matrices; `torch.matmul` by default.
    """
    import torch

    values = 1024.5 + torch.arange(_SIZE, dtype=torch.float64)
    matrix = values.unsqueeze(1).expand(_SIZE, _SIZE).to(torch.float32).contiguous()
    ones = torch.ones(_SIZE, _SIZE)
    exact = (values * _SIZE).unsqueeze(1)
    function = torch.matmul if multiply is None else multiply
    left = function(matrix.to(device), ones.to(device)).cpu()
    right = function(ones.to(device), matrix.t().contiguous().to(device)).cpu()
    return max(_worst(left, exact), _worst(right.t(), exact))


def accumulation_error(
    device: torch.device | str, dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor] | None = None
) -> float:
    """Largest relative error of low-precision products whose sums FP32 accumulation gets exactly.

    Even rows hold one 2048 and 4096 ones: added one by one in FP16, nothing after 2048 counts. Odd rows begin with
    eight times +2048 and end with eight times -2048, with a few ones between: partial sums kept in FP16 or bf16,
    between tensor-core steps or split-K parts, lose the ones. All entries and results are exact in `dtype`.

    Args:
        device: Where to multiply.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        multiply: Function that multiplies two matrices of `dtype`; `torch.matmul` by default.

    Returns:
        0.0 when sums are kept in FP32.
    """
    import torch

    rows, depth = 128, 8192
    matrix = torch.zeros(rows, depth, dtype=torch.float64)
    for row in range(rows):
        if row % 2 == 0:
            matrix[row, 1 : 2 * 4096 : 2] = 1
            matrix[row, row] = 2048
        else:
            # 1280 ones in all, a number that bf16 has; how many of them a part of the sum sees differs by row.
            matrix[row, 8 : 8 + 5 * (640 + row) : 5] = 1
            matrix[row, depth // 2 + 512 : depth // 2 + 512 + 5 * (640 - row) : 5] = 1
            matrix[row, :8] = 2048
            matrix[row, -8:] = -2048
    exact = matrix.sum(dim=1, keepdim=True)
    function = torch.matmul if multiply is None else multiply
    ones = torch.ones(depth, rows, dtype=dtype)
    return _worst(function(matrix.to(dtype).to(device), ones.to(device)).cpu(), exact)


def _worst(result: Tensor, exact: Tensor) -> float:
    error = ((result.double() - exact) / exact).abs().max().item()
    return float(error) if error == error else float("inf")  # noqa: PLR0124 - NaN is not equal to itself
