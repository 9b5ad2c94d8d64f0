"""Claims about single operators: memory layout, memory saved in place, and products on accelerators beside the host."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.devices import devices
from accelcheck.devices.base import Device
from accelcheck.experiments.claims.applied import techniques
from accelcheck.experiments.claims.catalogue import What
from accelcheck.experiments.claims.experiment import Contest, Experiment, Side
from accelcheck.experiments.curve import WrongError
from accelcheck.measure.memory import held
from accelcheck.verify.precision import UNIT_ROUNDOFF

Operator = Callable[..., Tensor]


@dataclass(frozen=True)
class Strided(Experiment):
    """An operator on a tensor that is not contiguous, beside the same values in a contiguous tensor.

    Attributes:
        swapped: Two dimensions of the first operand that are swapped in memory.
        depth: Number of products that an element of the result sums; 0 for no sum, where the result must be exact.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    swapped: tuple[int, int]
    operator: Operator
    depth: int
    gives: frozenset[What] = frozenset({What.EXTRA_TIME})

    def answer(self, device: Device) -> Capability:
        if not device.has("strided"):
            return unsupported(Code.NO_FEATURE, f"{device.name} does not declare strided: its tensors have one layout")
        return super().answer(device)

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        dense, *others = drawn(device, *self.shapes)
        strided = dense.transpose(*self.swapped).contiguous().transpose(*self.swapped)
        with torch.no_grad():
            check(self.operator, (strided, *others), self.depth)
            yield Contest(
                Side(partial(self.operator, dense, *others), device),
                Side(partial(self.operator, strided, *others), device),
            )
            check(self.operator, (strided, *others), self.depth)


@dataclass(frozen=True)
class InPlace(Experiment):
    """An operator that overwrites its input or an intermediate result, beside one that does not.

    `saving` may overwrite the first operand. `depth` is the number of products that an element of the result sums.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    plain: Operator
    saving: Operator
    depth: int
    gives: frozenset[What] = frozenset({What.MEMORY})

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        operands = drawn(device, *self.shapes)
        with torch.no_grad():
            expected = self.plain(*operands)
            result = self.saving(operands[0].clone(), *operands[1:])
            if not torch.equal(result, expected):
                raise WrongError(f"{self.name}: expected the bits of the operator out of place, got others")
            check(self.plain, operands, self.depth)
            del expected, result
            size = held(operands)
            yield Contest(
                Side(partial(self.plain, *operands), device, size), Side(partial(self.saving, *operands), device, size)
            )


def drawn(device: Device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal operands, FP32, from a fixed seed."""
    generator = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, generator=generator).to(device.torch_device()) for shape in shapes]


def check(operator: Operator, operands: Sequence[Tensor], depth: int) -> None:
    """Compare an operator's result with FP64; a `WrongError` where the error is larger than rounding explains.

    A sum of `depth` products, in any order, errs by at most ``depth u / (1 - depth u)`` times the sum of their
    magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, 2002, eq. 3.5); a following ReLU amplifies none.
    """
    exact = [operand.cpu().double() for operand in operands]
    error = (operator(*operands).cpu().double() - operator(*(value.clone() for value in exact))).abs()
    unit = UNIT_ROUNDOFF["float32"]
    # One rounding more than products, for the term that is added to the sum.
    part = (depth + 1) * unit / (1 - (depth + 1) * unit) if depth else unit
    allowed = part * operator(*(value.abs() for value in exact))
    beyond = error > allowed
    if bool(beyond.any()) or not bool(error.isfinite().all()):
        raise WrongError(f"expected errors of {float(allowed.max()):.2g} at most, got {float(error.max()):.2g}")


def _copied(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)


_convolution = partial(functional.conv2d, padding=1)
_IMAGES = ((8, 32, 64, 64), (32, 32, 3, 3))
_TAPS = 32 * 3 * 3
_LONG = ((65536, 64), (64, 64))
_VECTOR = ((1024, 1024),)

SIDE = 10000
"""Side of CuPy's and NumPy's square matrices, as published."""
ROWS = 16
"""Number of rows of a product that are compared with FP64."""
LEFT, RIGHT = (2048, 2048), (2048, 1024)
"""Shapes of XLA's operands, as published."""


class CupyMatmul(Experiment):
    """CuPy on the GPU, NumPy on its host."""

    name = "cupy-matmul"
    gives = frozenset({What.SPEED_UP})

    def answer(self, device: Device) -> Capability:
        return techniques()["cupy-zero-copy"].answer(device)

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        cupy: Any = import_module("cupy")
        host = devices()["cpu"]
        a, b = drawn(host, (SIDE, SIDE), (SIDE, SIDE))
        here = a.numpy(), b.numpy()
        there = tuple(cupy.asarray(value) for value in here)

        def multiplied(left: Tensor, right: Tensor) -> Tensor:
            if left.dtype == torch.float64:
                return left @ right
            product: Tensor = torch.from_numpy(cupy.asnumpy(cupy.asarray(left.numpy()) @ there[1]))
            return product

        check(multiplied, (a[:ROWS], b), SIDE)
        yield Contest(Side(lambda: here[0] @ here[1], host), Side(lambda: there[0] @ there[1], device))


class XlaMatmul(Experiment):
    """An XLA device, and eager torch on the CPU of its host."""

    name = "xla-matmul"
    gives = frozenset({What.SPEED_UP})

    def answer(self, device: Device) -> Capability:
        if not device.has("xla"):
            return unsupported(Code.NO_BACKEND, f"{device.name} does not compile with XLA")
        return SUPPORTED

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        host = devices()["cpu"]
        here, there = drawn(host, LEFT, RIGHT), drawn(device, LEFT, RIGHT)
        check(torch.matmul, there, LEFT[1])
        with torch.no_grad():
            yield Contest(Side(lambda: here[0] @ here[1], host), Side(lambda: there[0] @ there[1], device))
        check(torch.matmul, there, LEFT[1])


EXPERIMENTS: tuple[Experiment, ...] = (
    Strided("non-contiguous-matmul", ((1024, 1024), (1024, 1024)), (0, 1), torch.matmul, 1024),
    Strided("non-contiguous-convolution", _IMAGES, (2, 3), _convolution, _TAPS),
    Strided("non-contiguous-transpose", ((2048, 2048),), (0, 1), _copied, 0),
    InPlace("inplace-add", _VECTOR, lambda x: x + 1.0, lambda x: x.add_(1.0), 0),
    InPlace("inplace-relu", _VECTOR, lambda x: x.relu(), lambda x: x.relu_(), 0),
    InPlace("inplace-matmul", _LONG, lambda a, b: (a @ b).relu(), lambda a, b: (a @ b).relu_(), _LONG[1][0]),
    InPlace(
        "inplace-convolution",
        _IMAGES,
        lambda x, w: _convolution(x, w).relu(),
        lambda x, w: _convolution(x, w).relu_(),
        _TAPS,
    ),
    CupyMatmul(),
    XlaMatmul(),
)
