"""``torch.export``: the whole module as one graph, made ahead of time; with dynamic sizes, and by way of a file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.conversion import Converted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload
    from accelcheck.workloads.probes import Probe

RESIZED = frozenset(
    [
        "elementwise-5",
        "mlp",
        "cnn",
        "attention-causal",
        "attention-ragged",
        "transformer-block",
        "mean-pool",
        "digits-mlp",
    ]
)
WORKLOADS = RESIZED | {
    "slicing",
    "index-add",
    "custom-function",
    "straight-through",
    "dropout",
    "train-mlp",
    "train-transformer",
    "digits-cnn",
    "digits-vit",
}
"""One or two of each kind: the graph runs eager's operators, so what tells workloads apart is what tracing meets in them."""


class Exported(Converted):
    """A program's graph.

    Args:
        program: What was exported, or loaded.
        module: What it was made of.

    Attributes:
        graph: The module that runs the program.
    """

    kind = "exported program"

    def __init__(self, program: ExportedProgram, module: nn.Module) -> None:
        self.program = program
        self.graph = program.module()
        super().__init__(module, self.graph)
        self.own = [*module.parameters()]

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        operators = sum(node.op == "call_function" for node in self.program.graph.nodes)
        yield Evidence("operators in the exported graph >= 1", operators, engaged=operators >= 1)
        there = {id(parameter) for parameter in self.graph.parameters()}
        shared = sum(id(parameter) in there for parameter in self.own)
        yield Evidence(f"parameters shared with the module = {len(self.own)}", shared, engaged=shared == len(self.own))


class Saved:
    """A module that is exported at its first call with every size dynamic, saved, loaded, and run from the loaded program.

    The first call is a warm-up's, so that what is judged has sizes that no tracing has seen.

    Attributes:
        module: The loaded graph computes with its parameters and buffers.
        loaded: The loaded program, after the first call.
        size: Bytes of the saved program.
        unlike: Parameters and buffers that were read back with other bits, or not at all.
        sizes: The input shapes that it was called with.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.loaded: Exported | None = None
        self.size = 0
        self.unlike: list[str] = []
        self.sizes: set[tuple[torch.Size, ...]] = set()

    def __call__(self, *inputs: Any) -> Any:
        if self.loaded is None:
            self.loaded = self._loaded(inputs)
        self.sizes.add(tuple(value.shape for value in inputs if isinstance(value, Tensor)))
        return self.loaded(*inputs)

    def _loaded(self, inputs: tuple[Any, ...]) -> Exported:
        # AUTO: export finds out which sizes are tied to each other or to a parameter's.
        shapes = tuple(dict.fromkeys(range(v.dim()), Dim.AUTO) if isinstance(v, Tensor) else None for v in inputs)
        # Detached: examples are saved along, and some devices cannot read back those that want gradients.
        examples = tuple(v.detach() if isinstance(v, Tensor) else v for v in inputs)
        file = io.BytesIO()
        torch.export.save(torch.export.export(self.module, examples, dynamic_shapes=shapes), file)
        self.size = file.getbuffer().nbytes
        file.seek(0)
        loaded = Exported(torch.export.load(file), self.module)
        own, read = self.module.state_dict(keep_vars=True), loaded.graph.state_dict()
        self.unlike = [name for name, tensor in own.items() if name not in read or not torch.equal(read[name], tensor)]
        # The caller's own tensors from here on: gradients land on them, and their updates are seen.
        loaded.graph.load_state_dict(own, assign=True)
        return loaded

    @property
    def dynamic(self) -> int:
        """Sizes of the loaded program's inputs that are symbols."""
        nodes = () if self.loaded is None else self.loaded.program.graph.nodes
        values = (node.meta.get("val") for node in nodes if node.op == "placeholder")
        return sum(isinstance(size, torch.SymInt) for v in values if isinstance(v, Tensor) for size in v.shape)


class Export(Technique):
    """``torch.export.export`` and ``ExportedProgram.module()``, for the sizes at hand."""

    name = "export"
    family = "export"
    promise = "A graph of the whole module, made ahead of time, computes and differentiates as the module does."
    source = "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/export.html"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN, Mode.RANDOM, Mode.ACCURACY})
    # Export refuses Python control flow on data: GuardOnDataDependentSymNode, as documented.
    excludes = frozenset({"branching"})

    def accepts(self, workload: Workload) -> bool:
        """See `WORKLOADS`."""
        return super().accepts(workload) and workload.name in WORKLOADS

    def admits(self, probe: Probe) -> bool:
        """A program for fixed sizes refuses others, and one for dynamic sizes those of 0 and 1: as documented."""
        return not probe.reshapes

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del device
        # The graph keeps the training flag that it was made with.
        program.module.train(mode is not Mode.FORWARD)
        program.call = self.exported(program)

    def exported(self, program: Program) -> Exported | Saved:
        """What is called in the module's place."""
        return Exported(torch.export.export(program.module, program.inputs), program.module)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del log, mode, device
        graph = exported_graph(program.call)
        if graph is None:
            yield Evidence("the call is an exported program", type(program.call).__name__, engaged=False)
        else:
            yield from graph.evidence()


class DynamicExport(Export):
    """One program for all sizes, by way of a file."""

    name = "export-dynamic"
    promise = "One program for all sizes, saved and loaded again, computes and differentiates as the module does."
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.ACCURACY})
    requires = frozenset({"resizable"})
    resizing = True
    warmups = 2

    def accepts(self, workload: Workload) -> bool:
        """See `RESIZED`."""
        return super().accepts(workload) and workload.name in RESIZED

    def exported(self, program: Program) -> Saved:
        return Saved(program.module)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        saved = program.call
        if not isinstance(saved, Saved):
            return
        yield Evidence("dynamic sizes of the inputs >= 1", saved.dynamic, engaged=saved.dynamic >= 1)
        least = self.warmups + 1
        yield Evidence(f"sizes served by one program >= {least}", len(saved.sizes), engaged=len(saved.sizes) >= least)
        weights = sum(tensor.nbytes for tensor in program.module.state_dict().values())
        yield Evidence(
            f"bytes of the saved program > {weights}, its weights'", saved.size, engaged=saved.size > weights
        )
        unlike = ", ".join(saved.unlike)
        yield Evidence("weights read back with other bits = 0", unlike or 0, engaged=not unlike)


def exported_graph(call: Any) -> Exported | None:
    """The exported program behind a program's call, if there is one."""
    found = call.loaded if isinstance(call, Saved) else call
    return found if isinstance(found, Exported) else None


TECHNIQUES: tuple[Technique, ...] = (Export(), DynamicExport())
