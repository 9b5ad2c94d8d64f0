"""NumPy in place of torch's matrix products: an independent implementation, whose results must agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import CONTRACTION, operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Result

    Array = NDArray[np.floating[Any]]

COMPUTED = "contractions by NumPy"
WORKLOADS = frozenset(
    {
        "matmul",
        "matmul-empty",
        "matmul-expanded",
        "matmul-long",
        "matmul-one",
        "matmul-sliced",
        "matmul-transposed",
        "mlp",
        "mlp-blocks",
        "train-mlp",
    }
)
"""Workloads with products of different shapes and strides, in one layer and in several."""


def _sum(bias: Array, product: Array, *, beta: float = 1.0, alpha: float = 1.0) -> Array:
    """``beta * bias + alpha * product``. As in torch, the bias is ignored if beta is 0, also where it is NaN."""
    return alpha * product if beta == 0 else beta * bias + alpha * product


PRODUCTS: dict[str, Callable[..., Array]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot"), np.matmul),
    **dict.fromkeys(
        ("aten::addmm", "aten::addmv", "aten::baddbmm"),
        lambda bias, left, right, **factors: _sum(bias, left @ right, **factors),
    ),
    "aten::addbmm": lambda bias, left, right, **factors: _sum(bias, (left @ right).sum(0), **factors),
}
"""NumPy's function for each operator that it replaces."""


class _NumpyProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Computes matrix products with NumPy, below autograd, so that it includes those of the backward pass."""

    def __init__(self, computed: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._computed = computed

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, _, overload = func.name().partition(".")
        if name not in PRODUCTS or overload:
            return func(*args, **(kwargs or {}))
        self._computed[name] += 1
        arrays = [value.detach().numpy() if isinstance(value, Tensor) else value for value in args]
        with np.errstate(all="ignore"):  # no warnings for NaN and infinities, which are checked in the results
            out = np.asarray(PRODUCTS[name](*arrays, **(kwargs or {})), dtype=arrays[0].dtype)
        return torch.from_numpy(np.ascontiguousarray(out)).reshape(out.shape)


class NumpyMatmul(Technique):
    """Every matrix product of the workload, forward and backward, computed by NumPy on the memory of torch's tensors.

    Only on the CPU: elsewhere every operand would have to leave the device. Other devices are compared with the FP64 oracle,
    which runs on the CPU; this technique compares the CPU's products with NumPy's.
    """

    name = "matmul-numpy"
    family = "interop"
    works_on = frozenset({"linear", "matmul"})
    excludes = frozenset({"attention", "conv"})  # NumPy has none of torch's kernels for them
    workloads = WORKLOADS
    promise = "NumPy's matrix products of the same operands equal torch's up to rounding."
    source = "https://numpy.org/doc/stable/reference/generated/numpy.matmul.html"
    dtypes = ("float32", "float16")
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})

    def capability(self, device: Device) -> Capability:
        if not device.has("host"):
            return unsupported(
                Code.NO_FEATURE, f"NumPy computes in host memory: every operand would have to leave {device.name}"
            )
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        computed: Counter[str] = Counter()
        program.extras[COMPUTED] = computed
        program.resets.append(computed.clear)

        def run(program: Program, mode: Mode) -> Result:
            with _NumpyProducts(computed):
                return replace(program, elsewhere=None).run(mode)

        program.elsewhere = run

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        computed: Counter[str] = program.extras[COMPUTED]
        least = 1 if mode is Mode.FORWARD else 2
        yield Evidence(f"contractions by NumPy >= {least}", computed.total(), engaged=computed.total() >= least)
        own = operators(log).count(CONTRACTION)
        yield Evidence("contractions by torch = 0", own, engaged=own == 0)


TECHNIQUES: tuple[Technique, ...] = (NumpyMatmul(),)
