"""Compiled autograd: the backward pass of an eager module, captured as a graph and compiled when it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import INDUCTOR_GRAPH, inductor_capability, reset_compiler
from accelcheck.techniques.observe import ProfilerLog, at_least

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.core.capability import Capability
    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program


class CompiledAutograd(Technique):
    """Backward passes within ``torch._dynamo.compiled_autograd``, compiled by inductor."""

    name = "compiled-autograd"
    family = "compile"
    promise = "A backward pass that is captured whole and compiled gives the same gradients as autograd's."
    source = "https://docs.pytorch.org/tutorials/intermediate/compiled_autograd_tutorial.html"
    level = 3
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN})
    workloads = frozenset({"custom-function", "shared-layer", "train-mlp"})
    watch = ProfilerLog
    warmups = 1
    differentiates_twice = False

    def capability(self, device: Device) -> Capability:
        return inductor_capability(device)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        from torch._dynamo import compiled_autograd

        reset_compiler()
        compiler = torch.compile(backend="inductor")
        program.within = lambda: compiled_autograd._enable(compiler)  # noqa: SLF001 - the tutorial's, without `_` before 2.6

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        from torch._dynamo.utils import counters

        yield at_least("backward passes captured", counters["compiled_autograd"]["captures"])
        yield at_least("inductor graphs called", log.count(INDUCTOR_GRAPH), program.steps if mode is Mode.TRAIN else 1)

    def finish(self) -> None:
        reset_compiler()


TECHNIQUES: tuple[Technique, ...] = (CompiledAutograd(),)
