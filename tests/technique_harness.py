"""Helpers for tests: run a technique on a small problem as the engine does, on a stub device. Contains no tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device, Fingerprint
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, Operator, OperatorLog
from accelcheck.workloads.base import Problem, Program, Result, Workload


class StubDevice(Device):
    """The CPU, with a device type, features and a matmul error that the test chooses."""

    name = "stub"

    def __init__(
        self,
        kind: str = "cpu",
        features: Sequence[str] = ("strided", "autocast-bfloat16", "autocast-float16"),
        error: Callable[[], float] | None = None,
    ) -> None:
        self.type = kind
        self.features = frozenset(features)
        self._error = error

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.name, "stub", 1)

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        return

    def float32_error(self) -> float:
        return super().float32_error() if self._error is None else self._error()


@dataclass(frozen=True)
class Ran:
    """Result, evidence, program and log of a run."""

    result: Result
    evidence: tuple[Evidence, ...]
    program: Program
    log: Log

    @property
    def engaged(self) -> bool:
        return bool(self.evidence) and all(entry.engaged for entry in self.evidence)

    def missing(self) -> list[str]:
        return [f"{entry.claim}: {entry.observed}" for entry in self.evidence if not entry.engaged]


def run(
    technique: Technique,
    problem: Problem,
    mode: Mode = Mode.FORWARD,
    device: Device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Ran:
    """Prepare, run, collect evidence and finish, in the engine's order."""
    place = StubDevice() if device is None else device
    try:
        with place.strict_float32():
            program = Program.of(problem, dtype=dtype)
            technique.prepare(program, mode, place)
            with technique.watch(place.type) as log:
                result = program.run(mode)
            evidence = tuple(technique.evidence(program, log, mode, place))
    finally:
        technique.finish()
    return Ran(result, evidence, program, log)


def plain(problem: Problem, mode: Mode = Mode.FORWARD, dtype: torch.dtype = torch.float32) -> Result:
    """The result of the problem without a technique."""
    return Program.of(problem, dtype=dtype).run(mode)


def differences(left: Result, right: Result, tolerance: float = 1e-5) -> list[str]:
    """Paths that only one result has, or whose values differ by more than `tolerance` of the largest value."""
    unlike = sorted(left.keys() ^ right.keys())
    for path in sorted(left.keys() & right.keys()):
        a, b = left[path].double(), right[path].double()
        if a.shape != b.shape or not bool(((a - b).abs() <= tolerance * max(1.0, float(b.abs().max()))).all()):
            unlike.append(path)
    return unlike


def engaged(technique: Technique, problem: Problem, *more: Any, **options: Any) -> Ran:
    """Calls `run`, and asserts that nothing is missing in the evidence."""
    ran = run(technique, problem, *more, **options)
    assert ran.engaged, ran.missing()
    return ran


def agrees(
    technique: Technique,
    make: Callable[[], Problem],
    mode: Mode = Mode.FORWARD,
    device: Device | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> Ran:
    """Runs a technique and asserts that it is `engaged`, with the result of the same problem without it."""
    ran = engaged(technique, make(), mode, device, dtype)
    assert not differences(ran.result, plain(make(), mode, dtype), tolerance)
    return ran


def named(techniques: Sequence[Technique], name: str) -> Technique:
    """The technique with this name."""
    return next(technique for technique in techniques if technique.name == name)


MODES = (Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN)
"""Modes in which `run` runs a program."""


def workload(*traits: str, modes: frozenset[Mode] = frozenset(MODES)) -> Workload:
    """A workload that has traits and cannot make a problem."""

    def make(generator: torch.Generator, extent: int) -> Problem:
        raise AssertionError("this workload only has traits")

    return Workload("stub", "A stub.", make, modes=modes, traits=frozenset(traits))


def seen(device_type: str, *operators: str) -> OperatorLog:
    """A log with these operators, as if they had been dispatched on a device of this type."""
    log = OperatorLog(device_type)
    fact = ((torch.float32, True, device_type),)
    log.operators += [Operator(name, fact, fact) for name in operators]
    return log


def mlp(seed: int = 0) -> Problem:
    """Two linear layers with a ReLU between, with all that training needs."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return trained(module, torch.randn(8, 16), torch.randn(8, 4))


def trained(module: nn.Module, value: Tensor, target: Tensor) -> Problem:
    """A problem of one input with a mean squared loss and three steps of SGD."""
    return Problem(
        module,
        (value,),
        target=target,
        loss=squared,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        steps=3,
    )


def squared(out: Any, target: Tensor) -> Tensor:
    """Mean squared error in FP32, whatever the output's dtype."""
    loss: Tensor = (out.float() - target).square().mean()
    return loss


class Attention(nn.Module):
    """torch's attention, with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)
