"""A technique of your own that is a kernel: nn.Linear by an operator in C++, in eager mode and within torch.compile.

Run it in this folder; the first case compiles the kernel, which takes half a minute:

    $ pytest --pyargs accelcheck.suite --accel-device=cpu --accel-technique='precise-linear*' --accel-workload=mlp

It prints, among other lines:

    technique                cpu
    precise-linear           2 pass
    precise-linear-compiled  2 pass

Beside it, test_operator.py checks the operator itself with torch.library.opcheck.
"""

from __future__ import annotations

import shutil
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from accelcheck.api import (
    SUPPORTED,
    Capability,
    Code,
    Device,
    Evidence,
    Log,
    Mode,
    ProfilerLog,
    Program,
    Technique,
    unavailable,
    unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

OPERATOR = "example::precise_linear"
REGION = "Torch-Compiled Region.*"
"""Pattern of the profiler's events where compiled code was entered."""


def computed_by(operator: Callable[[Tensor, Tensor, Tensor], Tensor], layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's output, computed by the operator."""
    bias = layer.bias if layer.bias is not None else layer.weight.new_zeros(layer.out_features)
    return operator(x.flatten(0, -2), layer.weight, bias).view(*x.shape[:-1], layer.out_features)


class PreciseLinear(Technique):
    """Every ``nn.Linear`` of the module is computed by the operator, whose sums are in double precision."""

    name = "precise-linear"
    family = "example"
    promise = "A linear layer by a kernel in C++ has the values, the gradients and the shapes of torch's."
    source = "https://docs.pytorch.org/tutorials/advanced/custom_ops_landing_page.html"
    requires = frozenset({"linear"})
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    packages: Mapping[str, str] = MappingProxyType({"ninja": "pip install ninja"})  # torch builds extensions with it
    watch: ClassVar[type[Log]] = ProfilerLog
    warmups = 1
    compiled = False

    def capability(self, device: Device) -> Capability:
        if not device.has("host"):
            return unsupported(Code.NO_BACKEND, f"the kernel is for the CPU, not for {device.name}")
        if shutil.which("g++") is None:
            return unavailable(Code.NO_PACKAGE, "no C++ compiler", "install g++")
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        from precise_linear import operator

        built = operator()  # here, so that no run waits for it, and torch.compile sees the operator alone
        for layer in program.module.modules():
            if isinstance(layer, nn.Linear):
                layer.forward = partial(computed_by, built, layer)  # type: ignore[method-assign]  # of this one alone

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        layers = sum(isinstance(layer, nn.Linear) for layer in program.module.modules())
        calls = log.count(OPERATOR)
        yield Evidence(f"calls of {OPERATOR} >= {layers}", calls, engaged=calls >= layers)
        products = log.count("aten::(addmm|linear)")
        yield Evidence("linear layers of torch's own = 0", products, engaged=products == 0)


class CompiledPreciseLinear(PreciseLinear):
    """The same within one graph of ``torch.compile``: the operator stays a node of it, and runs when the graph does."""

    name = "precise-linear-compiled"
    promise = "torch.compile captures the operator without a break, and calls it in the compiled code."
    differentiates_twice = False

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        torch.compiler.reset()
        # aot_eager compiles forward and backward graphs and runs them with eager kernels: no second C++ compilation.
        program.call = torch.compile(program.module, backend="aot_eager", fullgraph=True)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        entered = log.count(REGION)
        yield Evidence("compiled regions entered >= 1", entered, engaged=entered >= 1)

    def finish(self) -> None:
        torch.compiler.reset()


def pytest_accel_techniques() -> list[Technique]:
    """Register both."""
    return [PreciseLinear(), CompiledPreciseLinear()]
