"""Recompilation by Dynamo: guards, streams of sizes, branches on data, and values that change between calls.

The graphs of each call are counted exactly, and the result of every call is judged.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import Compilation, compilations, graph_breaks, graphs, resolved_backend
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability, entered
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads import stream
from accelcheck.workloads.base import Program, Workload

FEED = "feed"
"""Key in `Program.extras` of the `CountedCalls`."""

LIMIT = 2
"""Limit of compilations of one function in `dynamo-stream-limit`; torch's own is 8."""

RECOMPILATIONS = 64
"""Limit of compilations of one function in `dynamo-stale`, which may compile for each pair of a size and a value."""


class CountedCalls:
    """Calls a compiled network for one input after the other, and counts in `runs` the graphs of each call."""

    def __init__(self, network: Callable[..., Any]) -> None:
        self.network = network
        self.runs: list[list[int]] = []

    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        self.runs.append([])
        return tuple(self.call(number, x) for number, x in enumerate(inputs))

    def call(self, number: int, x: Tensor) -> Any:
        """Makes the call with this number, counted from 0 in each run."""
        before = graphs()
        out = self.network(x)
        self.runs[-1].append(graphs() - before)
        return out


@dataclass(eq=False)
class Streamed(Compilation):
    """Network of a stream under ``torch.compile``: called for one input after the other, as in a server.

    `arguments` are those of ``torch.compile``; without ``backend``, that of `backend_for` is used. `settings` are those
    of ``torch._dynamo.config`` during a case.
    """

    name: str
    promise: str
    arguments: Mapping[str, Any]
    workloads: frozenset[str]
    early: frozenset[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    family = "dynamo"
    requires = frozenset({"stream"})
    source = (
        "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html"
    )
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})

    def capability(self, device: Device) -> Capability:
        return SUPPORTED if "backend" in self.arguments else compiler_capability(device)

    def backend(self, device: Device) -> str:
        """Returns the name of the backend on a device."""
        return str(self.arguments.get("backend") or backend_for(device))

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        # At the limit of recompilations Dynamo silently runs eagerly: an error, unless `settings` say otherwise.
        settings = {"fail_on_recompile_limit_hit": True, **self.settings}
        self.held.enter_context(torch_names.dynamo_config.patch(**settings))
        # A cached graph brings its program's guards, and so further graphs: github.com/pytorch/pytorch/issues/194001.
        self.held.enter_context(torch_names.inductor_config.patch(force_disable_caches=True))
        network = torch.compile(network_of(program), **{**self.arguments, "backend": self.backend(device)})
        program.extras[FEED] = feed = self.feed(program, network)
        program.call = feed if hasattr(program.module, "net") else lambda x: feed(x)[0]  # of no stream

    def feed(self, program: Program, network: Callable[..., Any]) -> CountedCalls:
        """Makes the object that calls the compiled network."""
        return CountedCalls(network)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        feed: CountedCalls = program.extras[FEED]
        wanted, used = self.backend(device), resolved_backend(feed.network)
        yield Evidence(f"backend is {wanted}", used, engaged=used == wanted)
        calls = f"compiled regions entered in {len(program.inputs)} calls"
        yield exactly(calls, entered(log).total(), self.entries(program))
        yield from self.counts(program, feed.runs[0])
        if self.settled:
            yield exactly("graphs compiled when the same kinds came again", sum(feed.runs[-1]), 0)

    settled = True
    """True if a later run with inputs of the same kinds must compile no graph."""

    def entries(self, program: Program) -> int:
        """Returns the number of compiled regions that a run must enter: one per call, unless overridden."""
        return len(program.inputs)

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        """Yields evidence from the number of graphs that each call of the first run compiled."""
        raise NotImplementedError(f"{type(self).__name__}.counts: say how many graphs the calls may compile")


class StaticStream(Streamed):
    """Exactly one graph for each kind of input."""

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        kinds = news(program.inputs)
        wanted = [int(kind != "known") for kind in kinds]
        told = ", ".join(f"{kind} {count}" for kind, count in zip(kinds, compiled, strict=True))
        yield Evidence(f"graphs compiled by each call = {', '.join(map(str, wanted))}", told, compiled == wanted)


@dataclass(eq=False, kw_only=True)
class BoundedStream(Streamed):
    """Number of graphs that does not grow with the number of sizes; with `specialises`, the first one has its own."""

    specialises: bool

    def capability(self, device: Device) -> Capability:
        if self.specialises and device.has("torch-xla"):
            return unsupported(
                Code.NO_FEATURE,
                "torch_xla sets torch._dynamo.config.automatic_dynamic_shapes to False when it is imported; without "
                "dynamic=True each size is then compiled separately (https://github.com/pytorch/xla/pull/5285)",
            )
        return super().capability(device)

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        made, first = sum(compiled), int(self.specialises)
        most = paths(program) + first
        sizes = len({tuple(x.shape) for x in program.inputs})
        claim = f"graphs compiled over {sizes} sizes from {1 + first} to {most}"
        engaged = 1 + first <= made <= most
        reasons = [str(record.recompile_reason) for record in compilations() if record.recompile_reason]
        yield Evidence(claim, made if engaged else f"{made}: {'; '.join(reasons)}", engaged=engaged)


class LimitedStream(StaticStream):
    """Dynamo stops compiling at its limit: known kinds of input run compiled, others eagerly."""

    def entries(self, program: Program) -> int:
        compiled = list(dict.fromkeys(map(_kind, program.inputs)))[:LIMIT]
        return sum(_kind(x) in compiled for x in program.inputs)

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        yield Evidence(f"graphs compiled = {LIMIT}, the limit", sum(compiled), engaged=sum(compiled) == LIMIT)
        reasons = (str(record.fail_reason) for record in compilations() if record.fail_reason is not None)
        yield exactly("functions at the limit of recompilation", sum("limit" in reason for reason in reasons), 1)


class BranchStream(Streamed):
    """Branch on data that breaks the graph; the code before it and both sides after it are compiled."""

    settled = False  # other data may take a side that has not been compiled

    def entries(self, program: Program) -> int:
        return 2 * len(program.inputs)  # before the branch, and after it

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        yield at_least("graph breaks", graph_breaks())
        yield at_least("graphs compiled", sum(compiled), 2)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        sides = entered(log, lambda record: str(record.co_name).startswith("torch_dynamo_resume_in"))
        yield exactly("continuations entered", len(sides), paths(program))


class StaleStream(Streamed):
    """Changes the module between the calls of a stream, and back; every result must follow.

    In every second call one of these has changed: a Python attribute, a global, the values of a parameter, or the
    parameter object. Each change doubles the output exactly; half of it is compared with the unchanged module's output.
    """

    modes = frozenset({Mode.FORWARD})  # gradients would belong to another parameter, or fail
    settled = False  # in the next run, a size comes with another change

    def refusal(self, workload: Workload) -> str:
        return super().refusal(workload) or "changes attributes that its own network has"

    def feed(self, program: Program, network: Callable[..., Any]) -> CountedCalls:
        return ChangingCalls(network, network_of(program))

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        made, most = sum(compiled), len(program.inputs)
        yield Evidence(f"graphs compiled from 2 to {most}", made, engaged=2 <= made <= most)


class ChangingCalls(CountedCalls):
    """Changes the module that was compiled, a `accelcheck.workloads.stream.Centred`, for every second call."""

    def __init__(self, network: Callable[..., Any], module: nn.Module) -> None:
        super().__init__(network)
        if not isinstance(module, stream.Centred):
            raise TypeError(f"expected the network of stream-lengths, got {type(module).__name__}")
        self.module = module
        self.changes = (
            lambda module: mock.patch.object(module, "scale", module.scale * 2),
            lambda _: mock.patch.object(stream, "GAIN", stream.GAIN * 2),
            in_place,
            replaced,
        )

    def call(self, number: int, x: Tensor) -> Any:
        if number % 2 == 0:
            return super().call(number, x)
        # In each run a size comes with another change, which shows code that is kept by size alone.
        change = self.changes[(number // 2 + len(self.runs)) % len(self.changes)]
        with change(self.module):
            return super().call(number, x) * 0.5


@contextmanager
def in_place(module: stream.Centred) -> Iterator[None]:
    """Doubles a parameter in place inside the context."""
    module.head.data.mul_(2)
    try:
        yield
    finally:
        module.head.data.mul_(0.5)


@contextmanager
def replaced(module: stream.Centred) -> Iterator[None]:
    """Replaces a parameter by another one with doubled values inside the context."""
    kept = module.head
    module.head = nn.Parameter(2 * kept.detach())
    try:
        yield
    finally:
        module.head = kept


def network_of(program: Program) -> nn.Module:
    """Returns the module that is compiled: the network of a stream, or the workload's module if it is no stream."""
    network = getattr(program.module, "net", program.module)
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected a module as the network of the stream, got {type(network).__name__}")
    return network


def paths(program: Program) -> int:
    """Returns the number of branches that inputs can take, which the network declares as ``paths``; 1 by default."""
    return int(getattr(network_of(program), "paths", 1))


def news(inputs: tuple[Tensor, ...]) -> list[str]:
    """Tells for each input ``first``, ``known`` (kind came before), or what is new: ``dtype``, ``rank``, ``shape``."""
    names: list[str] = []
    for number, x in enumerate(inputs):
        if any(_kind(x) == _kind(earlier) for earlier in inputs[:number]):
            names.append("known")
        elif not number:
            names.append("first")
        elif x.dtype != inputs[0].dtype:
            names.append("dtype")
        else:
            names.append("shape" if x.dim() == inputs[0].dim() else "rank")
    return names


def _kind(x: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return x.dtype, tuple(x.shape)


_LENGTHS, _EARLY = frozenset({"stream-lengths", "stream-sides"}), frozenset({"stream-lengths"})
_TOKENS = frozenset({"stream-tokens"})
_STATIC = {"backend": "aot_eager", "dynamic": False}

TECHNIQUES: tuple[Technique, ...] = (
    StaticStream(
        "dynamo-guards", "A new dtype, rank or shape is compiled again, and nothing else is.",
        arguments=_STATIC, workloads=_TOKENS, early=_TOKENS),
    StaticStream(
        "dynamo-stream-static", "Without dynamic shapes each size is compiled once, to its own graph.",
        arguments=_STATIC, workloads=_LENGTHS, early=_EARLY),
    BoundedStream(
        "dynamo-stream-automatic", "One dynamic graph, compiled for the second size, serves all following sizes.",
        arguments={}, workloads=_LENGTHS, early=_EARLY, specialises=True,
        settings={"automatic_dynamic_shapes": True}),  # importing torch_xla sets it to False for the whole process
    BoundedStream(
        "dynamo-stream-dynamic", "With dynamic shapes one graph serves all sizes that take the same branch.",
        arguments={"dynamic": True}, workloads=_LENGTHS, early=_EARLY, specialises=False),
    LimitedStream(
        "dynamo-stream-limit", "Beyond the limit of recompilations, new sizes run eagerly and known ones compiled.",
        arguments=_STATIC, workloads=_LENGTHS, early=_EARLY,
        settings={"recompile_limit": LIMIT, "fail_on_recompile_limit_hit": False}),
    BranchStream(
        "dynamo-branch", "A branch on data breaks the graph, and both sides compute what eager computes.",
        arguments={"backend": "aot_eager"},
        workloads=frozenset({"stream-signs", "dynamic-depth"}), early=frozenset({"stream-signs"})),
    StaleStream(
        "dynamo-stale",
        "Results follow sizes, attributes, globals and parameters that change between calls and change back.",
        arguments={"backend": "aot_eager"}, workloads=_LENGTHS, early=_EARLY,
        settings={"recompile_limit": RECOMPILATIONS}),
)  # fmt: skip
