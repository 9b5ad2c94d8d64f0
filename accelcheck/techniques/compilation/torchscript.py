"""TorchScript: scripted, traced, frozen and optimised modules. Deprecated by torch, but still in use."""

import sys
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import pytree, recursive
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, ProfilerLog, at_least, exactly, none_of
from accelcheck.workloads.base import Program

ENTRIES = "python forward entries"
"""Key in `Program.extras` of a list to which every call of a Python forward appends the module's class name."""


class TorchScript(Technique):
    """Runs the module in the TorchScript interpreter, with the parameters and buffers of the original."""

    family = "torchscript"
    source = "https://docs.pytorch.org/docs/stable/jit.html"
    watch = ProfilerLog
    # The profiling executor observes the first run, optimises in the second, and then runs the optimised plan.
    warmups = 2

    def capability(self, device: Device) -> Capability:
        if sys.version_info >= (3, 14):
            return unsupported(Code.WRONG_VERSION, "TorchScript does not support Python 3.14 and later")
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        # A script module has its own training flag, which it takes from the original when it is made.
        program.module.train(mode is not Mode.FORWARD)
        with deprecations_silenced():
            program.call = self.scripted(program)
        entries = program.extras[ENTRIES] = list[str]()
        count_entries(program.module, entries)

    @abstractmethod
    def scripted(self, program: Program) -> Any:
        """Makes the script module from `program.module`, which is in the mode (training or evaluation) of the run."""

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        script = script_of(program.call)
        kind = type(program.call).__name__ if script is None else type(script).__name__
        yield Evidence("the call is a ScriptModule", kind, engaged=script is not None)
        # Includes the warm-up runs: none of them may fall back to Python.
        yield none_of("Python forwards entered", sorted(set(program.extras[ENTRIES])))
        yield at_least("calls of the interpreter", log.count("forward"))
        if script is None:
            return
        yield at_least("optimised execution plans", execution_plans(script))
        training = mode is not Mode.FORWARD and program.module.training  # some modules stay in evaluation mode
        flag = getattr(script, "training", False)  # freezing removes the attribute, which is then False
        yield Evidence(f"training flag is {training}", str(flag), engaged=flag == training)
        if mode is not Mode.FORWARD:
            own = [parameter.data_ptr() for parameter in program.module.parameters()]
            used = {parameter.data_ptr() for parameter in script.parameters()}  # these get the gradients
            yield exactly("parameters shared with the original", sum(address in used for address in own), len(own))

    def finish(self) -> None:
        # Scripts of one class share compiled methods and earlier cases' profiles. With a new store, a case's plan, and
        # the last bits of its results, do not depend on the cases before it.
        recursive.concrete_type_store = recursive.ConcreteTypeStore()


class Script(TorchScript):
    """``torch.jit.script``: compiled from the Python source of ``forward``."""

    name = "jit-script"
    promise = "A module compiled from its source to TorchScript computes what Python computes."
    requires = frozenset({"scriptable"})

    def scripted(self, program: Program) -> Any:
        return torch.jit.script(program.module)


class Trace(TorchScript):
    """``torch.jit.trace``: recorded from one run, with the control flow that Python took for the traced inputs."""

    name = "jit-trace"
    promise = "Operators recorded from one run compute what Python computes, for other inputs of the same shapes."
    excludes = frozenset({"branching"})

    def scripted(self, program: Program) -> Any:
        # Only tensors can be traced: other inputs become constants, as for any user of tracing.
        bound = BoundModule(program.module, program.inputs).train(program.module.training)
        # Tracing runs the module: it may write to copies, and its changes to buffers are undone.
        places = [place for place, value in enumerate(program.inputs) if isinstance(value, Tensor)]
        inputs = program.inputs
        tensors = tuple(inputs[place].clone() if place in program.writes else inputs[place] for place in places)
        buffers = {name: buffer.detach().clone() for name, buffer in program.module.named_buffers()}
        # mypy: torch does not annotate it.
        traced = torch.jit.trace(bound, tensors, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, buffer in program.module.named_buffers():
                buffer.copy_(buffers[name])
        return Traced(traced, bound.structure)


class Frozen(TorchScript):
    """``torch.jit.freeze`` of a script in evaluation mode: parameters become constants of the graph."""

    name = "jit-freeze"
    bakes = True
    promise = "A frozen graph, whose parameters are constants that may be folded, computes what Python computes."
    requires = frozenset({"scriptable"})
    modes = frozenset({Mode.FORWARD, Mode.ACCURACY})

    def scripted(self, program: Program) -> Any:
        return torch.jit.freeze(torch.jit.script(program.module))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        script = script_of(program.call)
        if script is not None:
            yield none_of("parameters read from the module (prim::GetAttr)", dict.fromkeys(attributes(script)))


class Optimized(Frozen):
    """``torch.jit.optimize_for_inference``: a frozen graph with folded batch norms, fused and packed operators."""

    name = "jit-optimize"
    promise = "A frozen graph that is optimised for inference computes what Python computes."

    def scripted(self, program: Program) -> Any:
        return torch.jit.optimize_for_inference(torch.jit.script(program.module))


class BoundModule(nn.Module):
    """Module with its non-tensor arguments fixed: a function of tensors alone."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.module = module
        self.constants = {i: value for i, value in enumerate(inputs) if not isinstance(value, Tensor)}

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        count = len(tensors) + len(self.constants)
        arguments = [self.constants[i] if i in self.constants else next(given) for i in range(count)]
        leaves, self.structure = pytree.tree_flatten(self.module(*arguments))
        return tuple(leaves)  # the tracer takes no mapping of results that differ in type


class Traced:
    """Traced module, called with all arguments of the original; restores the structure of the original's results."""

    def __init__(self, script: torch.jit.ScriptModule, structure: pytree.TreeSpec) -> None:
        self.script = script
        self.structure = structure

    def __call__(self, *inputs: Any) -> Any:
        leaves = self.script(*(value for value in inputs if isinstance(value, Tensor)))
        return pytree.tree_unflatten(leaves, self.structure)


def script_of(call: Any) -> torch.jit.ScriptModule | None:
    """Returns the script module that a `Program.call` runs; None if it is something else."""
    script = call.script if isinstance(call, Traced) else call
    return script if isinstance(script, torch.jit.ScriptModule) else None


def execution_plans(script: torch.jit.ScriptModule) -> int:
    """Counts the optimised plans of the executor of ``forward``: 0 until its profiling runs are complete."""
    try:
        return len(script.get_debug_state().execution_plans)
    except RuntimeError:  # raised while no plan exists
        return 0


def attributes(script: torch.jit.ScriptModule) -> Iterator[str]:
    """Yields the names of tensor attributes that the graph still reads from the module."""
    graph: Any = script.inlined_graph  # bound from C++; the stub lacks most of it
    for node in graph.findAllNodes("prim::GetAttr"):
        if node.output().type().isSubtypeOf(torch_names.TensorType.get()):
            yield str(node.s("name"))


def count_entries(module: nn.Module, entries: list[str]) -> None:
    """Appends to `entries` the class name of any submodule whose Python forward is called, in calls from now on.

    Script modules made before do not call these hooks.
    """

    def entered(part: nn.Module, inputs: Any) -> None:
        entries.append(type(part).__name__)

    for part in module.modules():
        part.register_forward_pre_hook(entered)


@contextmanager
def deprecations_silenced() -> Iterator[None]:
    """Silences the warnings that TorchScript is deprecated, and that tracing fixes Python values."""
    # mypy: torch documents TracerWarning at this address, and does not export it.
    tracer: type[Warning] = torch.jit.TracerWarning  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, tracer):
            warnings.filterwarnings("ignore", category=category)
        yield


TECHNIQUES: tuple[Technique, ...] = (Script(), Trace(), Frozen(), Optimized())
