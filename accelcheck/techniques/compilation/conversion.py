"""Base of conversions: techniques that convert the module ahead of time and run the result in its place."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.layouts import sparse
from accelcheck.techniques.base import Holding, Unsupported
from accelcheck.techniques.compilation.torchscript import count_entries
from accelcheck.techniques.observe import Log, at_least, none_of
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Probe

RUNTIME_WORKLOADS = frozenset(
    """elementwise-5 elementwise-bound elementwise-product mlp matmul cnn attention-causal attention-empty-row
    transformer-block digits-mlp digits-cnn digits-vit""".split()
)
"""Workloads of runtimes of other projects: one of each kind, and three on which runtimes are known to differ (NaN in a
maximum, subnormal numbers, a query that sees no key). Few, since a conversion takes a second or more."""
RUNTIME_EARLY = frozenset({"elementwise-bound", "elementwise-product", "attention-empty-row"})
"""Members of `RUNTIME_WORKLOADS` that would otherwise run at level 4."""


class Converted:
    """Replaces a module by its converted form, `run`. Counts calls, and calls of the module's own Python code.

    Make the instance after the conversion, which may call the module's forward. `entries` has the class names of the
    original's submodules whose Python forward was called; it should stay empty.
    """

    kind = "converted module"
    """Name of the converted form in evidence."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.run = run
        self.calls = 0
        self.entries: list[str] = []
        count_entries(module, self.entries)

    def __call__(self, *inputs: Any) -> Any:
        self.calls += 1
        return self.run(*inputs)

    def reset(self) -> None:
        """Resets the counts, for a run that is judged."""
        self.calls = 0
        self.entries.clear()

    def evidence(self) -> Iterable[Evidence]:
        """Yields evidence that it ran, and that the module's own code did not."""
        yield at_least(f"calls of the {self.kind}", self.calls)
        yield none_of("Python forwards entered", sorted(set(self.entries)))


class Conversion(Holding):
    """Technique that converts the module, in evaluation mode and with its weights, for the sizes of its inputs."""

    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})
    # Converters refuse Python control flow on data, as documented: it cannot be captured in one graph.
    excludes = frozenset({"branching"})
    bakes = True

    def admits(self, probe: Probe) -> bool:
        """Refuses probes with other sizes: the conversion is for fixed ones."""
        return not probe.reshapes

    @abstractmethod
    def converted(self, program: Program, device: Device) -> Converted:
        """Converts `program.module`, which is in evaluation mode, for the sizes of `program.inputs`."""

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.module.eval()
        with torch.no_grad():
            program.call = converted = self.converted(program, device)
        if isinstance(converted, Converted):
            program.resets.append(converted.reset)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        call = program.call
        if isinstance(call, Converted):
            yield from call.evidence()
        else:
            yield Evidence("the call is the converted module", type(call).__name__, engaged=False)


class RuntimeConversion(Conversion):
    """Conversion for a runtime with its own arrays: its results have no gaps, and its inputs stay as they are."""

    keeps_strides = False
    own_memory = True
    workloads = RUNTIME_WORKLOADS

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if program.writes:
            raise Unsupported(unsupported(Code.NO_FEATURE, "the module writes to its inputs, and a runtime does not"))
        if any(isinstance(value, Tensor) and sparse(value) for value in program.inputs):
            raise Unsupported(unsupported(Code.NO_FEATURE, "an input is sparse, and a runtime takes dense arrays"))
        super().prepare(program, mode, device)
