"""Matrix products on accelerators beside the host: CuPy beside NumPy, XLA beside torch on the CPU."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.devices import devices
from accelcheck.experiments.claims.applied import techniques
from accelcheck.experiments.claims.catalogue import What
from accelcheck.experiments.claims.experiment import Contest, Experiment, Side
from accelcheck.experiments.claims.tensors import check, drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from accelcheck.devices.base import Device

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


EXPERIMENTS: tuple[Experiment, ...] = (CupyMatmul(), XlaMatmul())
