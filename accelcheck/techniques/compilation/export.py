"""``torch.export``: the whole module as one graph, made ahead of time, for fixed sizes or, via a file, dynamic ones."""

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.conversion import Converted
from accelcheck.techniques.observe import Log, at_least, exactly, none_of
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Probe

RESIZED = frozenset(
    "elementwise-5 mlp cnn attention-causal attention-ragged transformer-block mean-pool digits-mlp".split()
)
WORKLOADS = RESIZED | frozenset(
    """slicing index-add custom-function straight-through dropout train-mlp train-transformer digits-cnn
    digits-vit""".split()
)
"""One or two workloads of each kind: the graph runs eager's operators, so that only tracing differs."""


class Exported(Converted):
    """Runs the graph of an exported or loaded program of a module, as the module `graph`."""

    kind = "exported program"

    def __init__(self, program: ExportedProgram, module: nn.Module) -> None:
        self.program = program
        self.graph = program.module()
        super().__init__(module, self.graph)
        self.own = [*module.parameters()]

    def evidence(self) -> Iterable[Evidence]:
        yield from super().evidence()
        operators = sum(node.op == "call_function" for node in self.program.graph.nodes)
        yield at_least("operators in the exported graph", operators)
        graphs_own = {id(parameter) for parameter in self.graph.parameters()}
        shared = sum(id(parameter) in graphs_own for parameter in self.own)
        yield exactly("parameters shared with the module", shared, len(self.own))


class Saved:
    """Exports a module at its first call with all sizes dynamic, saves and loads the program, and runs the loaded one.

    The first call is a warm-up run, so that the judged run has sizes that were not traced.

    The loaded graph uses the parameters and buffers of `module`. `size` is that of the saved program in bytes, `unlike`
    names the parameters and buffers that were loaded with other bits or not at all; `sizes` has the input shapes.
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
        # AUTO: export finds which sizes must be equal to each other or to a parameter's.
        shapes = tuple(dict.fromkeys(range(v.dim()), Dim.AUTO) if isinstance(v, Tensor) else None for v in inputs)
        # Detached: examples are saved with the program, and some devices cannot load tensors that require gradients.
        examples = tuple(v.detach() if isinstance(v, Tensor) else v for v in inputs)
        file = io.BytesIO()
        torch.export.save(torch.export.export(self.module, examples, dynamic_shapes=shapes), file)
        self.size = file.getbuffer().nbytes
        file.seek(0)
        loaded = Exported(torch.export.load(file), self.module)
        own, read = self.module.state_dict(keep_vars=True), loaded.graph.state_dict()
        self.unlike = [name for name, tensor in own.items() if name not in read or not torch.equal(read[name], tensor)]
        # From here on the graph uses the module's own tensors: they get the gradients, and their updates count.
        loaded.graph.load_state_dict(own, assign=True)
        return loaded

    @property
    def dynamic(self) -> int:
        """Number of symbolic sizes of the loaded program's inputs."""
        nodes = () if self.loaded is None else self.loaded.program.graph.nodes
        values = (node.meta.get("val") for node in nodes if node.op == "placeholder")
        return sum(isinstance(size, torch.SymInt) for v in values if isinstance(v, Tensor) for size in v.shape)


class Export(Technique):
    """``torch.export.export`` and ``ExportedProgram.module()``, for fixed sizes."""

    name = "export"
    family = "export"
    promise = "The exported graph of a module computes the module's outputs and gradients."
    source = "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/export.html"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN, Mode.RANDOM, Mode.ACCURACY})
    # Export refuses Python control flow on data, as documented: GuardOnDataDependentSymNode.
    excludes = frozenset({"branching"})
    workloads = WORKLOADS

    def admits(self, probe: Probe) -> bool:
        """Refuses probes with other sizes: fixed programs refuse these, and dynamic ones 0 and 1, as documented."""
        return not probe.reshapes

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        # The graph keeps the training flag that the module has when it is exported.
        program.module.train(mode is not Mode.FORWARD)
        program.call = self.exported(program)

    def exported(self, program: Program) -> Exported | Saved:
        """Makes the object that is called in place of the module."""
        return Exported(torch.export.export(program.module, program.inputs), program.module)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        graph = program.call.loaded if isinstance(program.call, Saved) else program.call
        if isinstance(graph, Exported):
            yield from graph.evidence()
        else:
            yield Evidence("the call is an exported program", type(program.call).__name__, engaged=False)


class DecomposedExport(Export):
    """``ExportedProgram.run_decompositions()``: the graph in core ATen operators, which other runtimes are given."""

    name = "export-decomposed"
    promise = "The exported graph, decomposed into core ATen operators, computes the module's outputs."
    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})
    workloads = frozenset({"mlp", "cnn", "transformer-block"})

    def exported(self, program: Program) -> Exported:
        exported = torch.export.export(program.module, program.inputs)
        return Exported(exported.run_decompositions(), program.module)


class DynamicExport(Export):
    """Single program for all sizes, saved to a file and loaded again."""

    name = "export-dynamic"
    promise = "One exported program for all sizes, saved and loaded, computes the module's outputs and gradients."
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.ACCURACY})
    requires = frozenset({"resizable"})
    workloads = RESIZED
    resizing = True
    warmups = 2

    def exported(self, program: Program) -> Saved:
        return Saved(program.module)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        saved = program.call
        if not isinstance(saved, Saved):
            return
        yield at_least("dynamic sizes of the inputs", saved.dynamic)
        yield at_least("sizes served by one program", len(saved.sizes), self.warmups + 1)
        weights = sum(tensor.nbytes for tensor in program.module.state_dict().values())
        yield Evidence(f"bytes of the saved program > {weights}, its weights'", saved.size, saved.size > weights)
        yield none_of("weights read back with other bits", saved.unlike)


TECHNIQUES: tuple[Technique, ...] = (Export(), DecomposedExport(), DynamicExport())
