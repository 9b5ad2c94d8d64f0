"""Extensions of ``torch.compile`` that users write: a backend, and a pass over inductor's graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.capture import CALL, Capture
from accelcheck.techniques.compilation.compile import Compilation, compiled, inductor_capability, inductor_graphs
from accelcheck.techniques.compilation.regions import entered
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.base import Program

if TYPE_CHECKING:
    from accelcheck.techniques.compilation._folding import FoldConstants

CAPTURE = "capture"
"""Key in `Program.extras` of the `Capture` backend."""
PASS = "pass"  # noqa: S105 - a graph pass, not a password
"""Key in `Program.extras` of the `FoldConstants` pass."""


class UserBackend(Compilation):
    """User's backend that captures each graph, prints it, and runs it with eager kernels.

    In forward mode it runs Dynamo's graphs; in modes with gradients, AOTAutograd's forward and backward graphs.
    """

    name = "compile-user-backend"
    family = "compile"
    workloads = frozenset(  # one of each kind
        "elementwise-5 mlp train-mlp residual-block transformer-block index-select dynamic-depth".split()
    )
    promise = (
        "A user's backend gets each captured graph, readable and runnable, and the function that it returns is run."
    )
    source = "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/torch.compiler_custom_backends.html"
    level = 2
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})

    def backend(self, mode: Mode) -> Capture:
        """Makes the user's backend."""
        return Capture(differentiates=mode is not Mode.FORWARD)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        program.extras[CAPTURE] = backend = self.backend(mode)
        program.call = torch.compile(program.module, backend=backend)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        backend: Capture = program.extras[CAPTURE]
        runs = program.steps if mode is Mode.TRAIN else 1
        stages = ("dynamo",) if mode is Mode.FORWARD else ("forward", "backward")
        for stage in dict.fromkeys(("dynamo", *stages)):
            captured = backend.of(stage)
            yield at_least(f"{stage} graphs captured", len(captured))
            least = min((len(graph.nodes) for graph in captured), default=0)
            yield at_least(f"operations in the smallest {stage} graph", least)
        for stage in stages:
            yield at_least(f"calls of captured {stage} graphs", log.count(CALL.format(stage=stage)), runs)
        yield at_least("lines printed", sum(len(graph.text.splitlines()) for graph in backend.graphs))
        yield exactly("printed graphs that lack an operation", sum(not graph.readable for graph in backend.graphs), 0)
        yield exactly("graphs without an example of each input", sum(not graph.fed for graph in backend.graphs), 0)
        yield at_least("compiled regions entered", entered(log).total(), runs)


class FxPass(Compilation):
    """Inductor with a constant-folding pass, which runs before its own passes over forward and backward graphs."""

    name = "compile-fx-pass"
    family = "compile"
    promise = "A user's pass over the graph that inductor compiles makes it smaller and keeps its results."
    source = "https://github.com/pytorch/pytorch/blob/main/torch/_inductor/custom_graph_pass.py"
    level = 2
    early = frozenset({"spectrum"})
    dtypes = ("float32", "bfloat16")
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})
    requires = frozenset({"constants"})
    capability = staticmethod(inductor_capability)

    def make(self) -> FoldConstants:
        """Makes the user's pass."""
        from accelcheck.techniques.compilation._folding import FoldConstants

        return FoldConstants()

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        program.extras[PASS] = folding = self.make()
        program.call = torch.compile(
            program.module, backend="inductor", dynamic=False, options={"post_grad_custom_pre_pass": folding}
        )

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from compiled(log, mode, "inductor")
        folding: FoldConstants = program.extras[PASS]
        met, made = len(folding.sizes), inductor_graphs()
        yield Evidence(f"graphs that met the pass = {made}, all of inductor's", met, engaged=met == made)
        smaller = sum(after < before for before, after in folding.sizes)
        told = ", ".join(f"{before} nodes to {after}" for before, after in folding.sizes)
        yield Evidence("graphs that the pass made smaller >= 1", told or "none", engaged=smaller >= 1)


TECHNIQUES: tuple[Technique, ...] = (UserBackend(), FxPass())
