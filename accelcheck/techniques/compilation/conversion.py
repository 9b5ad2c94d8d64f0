"""Conversion: the module becomes something else ahead of time, and that runs in its place. What all such techniques share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.torchscript import count_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload
    from accelcheck.workloads.probes import Probe

RUNTIME_WORKLOADS = frozenset(
    [
        "elementwise-5",
        "elementwise-bound",
        "elementwise-product",
        "mlp",
        "matmul",
        "cnn",
        "attention-causal",
        "attention-empty-row",
        "transformer-block",
        "digits-mlp",
        "digits-cnn",
        "digits-vit",
    ]
)
"""What runtimes of other projects are tried with: one of each kind, and three where they are known to differ (NaN in a maximum,
subnormal numbers, a query that sees no key). Each conversion takes a second or more."""
RUNTIME_EARLY = frozenset({"elementwise-bound", "elementwise-product", "attention-empty-row"})
"""Of them, what would otherwise come at level 4."""


class Converted:
    """What is called in a module's place: it counts its calls, and whether the module's own code ran nevertheless.

    Args:
        module: What it was made of. Converting is over: it may have entered the module's forward.
        run: Called with the module's inputs.

    Attributes:
        calls: How often it ran.
        entries: Python forwards of the module that were entered.
    """

    kind = "converted module"
    """What it is, in a word or two."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.run = run
        self.calls = 0
        self.entries: list[str] = []
        count_entries(module, self.entries)

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        return self.run(*inputs)

    def evidence(self) -> Iterable[Evidence]:
        """What shows that it ran, and that it ran alone."""
        yield Evidence(f"calls of the {self.kind} >= 1", self.calls, engaged=self.calls >= 1)
        entered = ", ".join(sorted(set(self.entries)))
        yield Evidence("Python forwards entered = 0", entered or 0, engaged=not entered)


class Conversion(Technique):
    """A technique whose `prepare` converts the module, in evaluation mode and with its weights, for the sizes at hand."""

    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})
    # Converters refuse Python control flow on data: it cannot be captured in one graph, as documented.
    excludes = frozenset({"branching"})
    bakes = True
    workloads: frozenset[str]
    """Names of those that it is tried with."""

    def accepts(self, workload: Workload) -> bool:
        """See `workloads`."""
        return super().accepts(workload) and workload.name in self.workloads

    def admits(self, probe: Probe) -> bool:
        """What was converted for fixed sizes is not asked for others."""
        return not probe.reshapes

    @abstractmethod
    def converted(self, program: Program, device: Device) -> Converted:
        """What is called in the place of `program.module`, which is in evaluation mode, for sizes like its inputs'."""

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode
        program.module.eval()
        with torch.no_grad():
            program.call = self.converted(program, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del log, mode, device
        call = program.call
        if isinstance(call, Converted):
            yield from call.evidence()
        else:
            yield Evidence("the call is what the module was converted to", type(call).__name__, engaged=False)
