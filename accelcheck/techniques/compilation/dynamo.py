"""How Dynamo decides to compile again: guards, streams of sizes, branches on data, and values that change between calls.

Its graphs are counted exactly, and every call is judged, also those with another size or a changed value between.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import compilations, forget, graph_breaks, graphs, resolved_backend
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability, entered
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.workloads import stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload

FEED = "feed"
"""Key in `Program.extras` of the `CountedCalls` of a run."""

LIMIT = 2
"""Compilations of one function that `dynamo-stream-limit` allows; torch's own limit is 8."""


RECOMPILATIONS = 64
"""Those that `dynamo-stale` allows: sizes times values, where neither becomes dynamic."""


class CountedCalls:
    """Calls what was compiled, for one input after the other, and knows how many graphs each call made.

    Attributes:
        network: What was compiled.
        runs: Of each run, the number of graphs that each call compiled.
    """

    def __init__(self, network: Callable[..., Any]) -> None:
        self.network = network
        self.runs: list[list[int]] = []

    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        self.runs.append([])
        return tuple(self.call(number, x) for number, x in enumerate(inputs))

    def one(self, x: Tensor) -> Any:
        """Of a network that is no stream."""
        (out,) = self(x)
        return out

    def call(self, number: int, x: Tensor) -> Any:
        """The call of a number."""
        del number
        before = graphs()
        out = self.network(x)
        self.runs[-1].append(graphs() - before)
        return out


class Streamed(Technique):
    """The network of a stream under ``torch.compile``: called for one input after the other, as a server does.

    Args:
        name: The variant's name.
        promise: As `Technique.promise`.
        arguments: Of ``torch.compile``. Without a backend, the one that generates code for the device is taken.
        workloads: Names of the streams that show it.
        early: As `Technique.early`.
        settings: Of ``torch._dynamo.config``, for the length of a case.
    """

    family = "dynamo"
    source = (
        "https://docs.pytorch.org/docs/stable/user_guide/torch_compiler/compile/programming_model.recompilation.html"
    )
    watch = ProfilerLog
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})
    warmups = 1  # the run that compiles: what is judged is the second one
    differentiates_twice = False  # as under every other technique that compiles

    def __init__(
        self,
        name: str,
        promise: str,
        *,
        arguments: Mapping[str, Any],
        workloads: frozenset[str],
        early: frozenset[str],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.promise = promise
        self.arguments = MappingProxyType(dict(arguments))
        self.workloads = workloads
        self.early = early
        self.settings = MappingProxyType(dict(settings))
        self._held = ExitStack()

    def capability(self, device: Device) -> Capability:
        return SUPPORTED if "backend" in self.arguments else compiler_capability(device)

    def backend(self, device: Device) -> str:
        """What compiles on a device."""
        return str(self.arguments.get("backend") or backend_for(device))

    def accepts(self, workload: Workload) -> bool:
        """The streams whose calls show what it promises."""
        return super().accepts(workload) and workload.name in self.workloads

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode
        forget()
        self._held.enter_context(_configured(self.settings))
        network = torch.compile(network_of(program), **{**self.arguments, "backend": self.backend(device)})
        program.extras[FEED] = feed = self.feed(program, network)
        program.call = feed if hasattr(program.module, "net") else feed.one

    def feed(self, program: Program, network: Callable[..., Any]) -> CountedCalls:
        """What calls the compiled network."""
        del program
        return CountedCalls(network)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del mode
        feed: CountedCalls = program.extras[FEED]
        wanted, used = self.backend(device), resolved_backend(feed.network)
        yield Evidence(f"backend is {wanted}", used, engaged=used == wanted)
        wanted_entries, ran = self.entries(program), entered(log).total()
        claim = f"compiled regions entered in {len(program.inputs)} calls = {wanted_entries}"
        yield Evidence(claim, ran, engaged=ran == wanted_entries)
        yield from self.counts(program, feed.runs[0])
        if self.settled:
            again = sum(feed.runs[-1])
            yield Evidence("graphs compiled when the same kinds came again = 0", again, engaged=again == 0)

    settled = True
    """Whether a second run with inputs of the same kinds has all its graphs."""

    def entries(self, program: Program) -> int:
        """How often a run enters compiled code: once a call, where that runs as one graph."""
        return len(program.inputs)

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        """What the number of graphs that each call of the first run compiled shows."""
        raise NotImplementedError(f"{type(self).__name__}.counts: say how many graphs the calls may compile")

    def finish(self) -> None:
        self._held.close()
        forget()


class StaticStream(Streamed):
    """A graph for each kind of input, and no more."""

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        found = ", ".join(map(str, compiled))
        wanted = ", ".join(str(int(what != "known")) for what in news(program.inputs))
        told = ", ".join(f"{what} {count}" for what, count in zip(news(program.inputs), compiled, strict=True))
        yield Evidence(f"graphs compiled by each call = {wanted}", told, engaged=found == wanted)


class Bounded(Streamed):
    """A number of graphs that does not grow with the number of sizes.

    Args:
        specialises: Whether the first size has a graph of its own.
    """

    def __init__(self, *args: Any, specialises: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.specialises = specialises

    def capability(self, device: Device) -> Capability:
        if self.specialises and device.type == "xla":
            return unsupported(
                Code.NO_FEATURE,
                "torch_xla sets torch._dynamo.config.automatic_dynamic_shapes to False when it is imported: without "
                "dynamic=True each size is compiled for itself (https://github.com/pytorch/xla/pull/5285)",
            )
        return super().capability(device)

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        made, first = sum(compiled), int(self.specialises)
        most = paths(program) + first
        sizes = len({tuple(x.shape) for x in program.inputs})
        claim = f"graphs compiled over {sizes} sizes from {1 + first} to {most}"
        yield Evidence(claim, made, engaged=1 + first <= made <= most)


class Limited(StaticStream):
    """At the limit Dynamo compiles no more: known kinds run compiled, others eagerly."""

    def entries(self, program: Program) -> int:
        compiled = list(dict.fromkeys(map(_kind, program.inputs)))[:LIMIT]
        return sum(_kind(x) in compiled for x in program.inputs)

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        del program
        made = sum(compiled)
        yield Evidence(f"graphs compiled = {LIMIT}, the limit", made, engaged=made == LIMIT)
        reached = at_limit()
        yield Evidence("functions at the limit of recompilation = 1", reached, engaged=reached == 1)


class Branch(Streamed):
    """A branch on data ends a graph; code before and after it is compiled, on both sides."""

    settled = False  # other data may go where none went before

    def entries(self, program: Program) -> int:
        return 2 * len(program.inputs)  # before the branch, and after it

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        del program
        broken = graph_breaks()
        yield Evidence("graph breaks >= 1", broken, engaged=broken >= 1)
        made = sum(compiled)
        yield Evidence("graphs compiled >= 2", made, engaged=made >= 2)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        sides = len(entered(log, lambda record: str(record.co_name).startswith("torch_dynamo_resume_in")))
        wanted = paths(program)
        yield Evidence(f"continuations entered = {wanted}", sides, engaged=sides == wanted)


class Stale(Streamed):
    """Between the calls of a stream the module changes, and changes back: each result follows.

    Every second call finds another Python attribute, another global, a parameter changed in place, or a parameter
    replaced. Each change doubles the output, exactly; halved, it is what it is without.
    """

    modes = frozenset({Mode.FORWARD})  # gradients of a changed parameter are another's, or forbidden
    settled = False  # a size meets another change in the next run

    def feed(self, program: Program, network: Callable[..., Any]) -> CountedCalls:
        return Restless(network, network_of(program))

    def counts(self, program: Program, compiled: list[int]) -> Iterable[Evidence]:
        made, most = sum(compiled), len(program.inputs)
        yield Evidence(f"graphs compiled from 2 to {most}", made, engaged=2 <= made <= most)


class Restless(CountedCalls):
    """Changes the module for every second call.

    Args:
        network: What was compiled.
        module: What it was compiled from: a `accelcheck.workloads.stream.Centred`.
    """

    def __init__(self, network: Callable[..., Any], module: nn.Module) -> None:
        super().__init__(network)
        if not isinstance(module, stream.Centred):
            raise TypeError(f"expected the network of stream-lengths, got {type(module).__name__}")
        self.module = module
        self.changes = (attribute, other_global, in_place, replaced)

    def call(self, number: int, x: Tensor) -> Any:
        if number % 2 == 0:
            return super().call(number, x)
        # Each run another change at the same size: code that is kept by size alone would not be found out otherwise.
        change = self.changes[(number // 2 + len(self.runs)) % len(self.changes)]
        with change(self.module):
            return super().call(number, x) * 0.5


@contextmanager
def attribute(module: stream.Centred) -> Iterator[None]:
    """Within it a Python number of the module is twice what it was."""
    module.scale *= 2
    try:
        yield
    finally:
        module.scale /= 2


@contextmanager
def other_global(module: stream.Centred) -> Iterator[None]:
    """Within it a global that the module reads is twice what it was."""
    del module
    stream.GAIN *= 2
    try:
        yield
    finally:
        stream.GAIN /= 2


@contextmanager
def in_place(module: stream.Centred) -> Iterator[None]:
    """Within it the elements of a parameter are twice what they were."""
    module.head.data.mul_(2)
    try:
        yield
    finally:
        module.head.data.mul_(0.5)


@contextmanager
def replaced(module: stream.Centred) -> Iterator[None]:
    """Within it another parameter is in the place of one, twice its size."""
    kept = module.head
    module.head = nn.Parameter(2 * kept.detach())
    try:
        yield
    finally:
        module.head = kept


def network_of(program: Program) -> nn.Module:
    """What is compiled: the network of a stream, else the module."""
    network = getattr(program.module, "net", program.module)
    if not isinstance(network, nn.Module):
        raise TypeError(f"expected a module as the network of the stream, got {type(network).__name__}")
    return network


def paths(program: Program) -> int:
    """Ways through the network that its inputs may choose, as it says itself."""
    return int(getattr(network_of(program), "paths", 1))


def news(inputs: tuple[Tensor, ...]) -> list[str]:
    """Of each input what is new, against all before and the first one: ``first``, ``dtype``, ``rank``, ``shape``, ``known``."""
    found: list[str] = []
    for number, x in enumerate(inputs):
        if any(_kind(x) == _kind(earlier) for earlier in inputs[:number]):
            found.append("known")
        elif not number:
            found.append("first")
        elif x.dtype != inputs[0].dtype:
            found.append("dtype")
        else:
            found.append("shape" if x.dim() == inputs[0].dim() else "rank")
    return found


def at_limit() -> int:
    """Functions that Dynamo gave up compiling since `forget`, at the limit of recompilations."""
    reasons = (str(record.fail_reason) for record in compilations() if record.fail_reason is not None)
    return sum("limit" in reason for reason in reasons)


def _kind(x: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return x.dtype, tuple(x.shape)


def _configured(settings: Mapping[str, Any]) -> AbstractContextManager[Any]:
    from torch._dynamo import config

    # At the limit of recompilations new kinds run eagerly, unseen; only where that is asked for it may happen.
    held: AbstractContextManager[Any] = config.patch(**{"fail_on_recompile_limit_hit": True, **settings})
    return held


_LENGTHS = frozenset({"stream-lengths", "stream-sides"})
_TOKENS = frozenset({"stream-tokens"})

TECHNIQUES: tuple[Technique, ...] = (
    StaticStream(
        "dynamo-guards",
        "Another dtype, rank or shape is compiled anew, and nothing else is.",
        arguments={"backend": "aot_eager", "dynamic": False},
        workloads=_TOKENS,
        early=_TOKENS,
    ),
    StaticStream(
        "dynamo-stream-static",
        "Without dynamic shapes each size has a graph of its own, and keeps it.",
        arguments={"backend": "aot_eager", "dynamic": False},
        workloads=_LENGTHS,
        early=frozenset({"stream-lengths"}),
    ),
    Bounded(
        "dynamo-stream-automatic",
        "From the second size on one graph serves all that follow.",
        arguments={},
        workloads=_LENGTHS,
        early=frozenset({"stream-lengths"}),
        settings={"automatic_dynamic_shapes": True},  # torch_xla switches it off for all devices of the process
        specialises=True,
    ),
    Bounded(
        "dynamo-stream-dynamic",
        "With dynamic shapes one graph serves all sizes that go the same way.",
        arguments={"dynamic": True},
        workloads=_LENGTHS,
        early=frozenset({"stream-lengths"}),
        specialises=False,
    ),
    Limited(
        "dynamo-stream-limit",
        "Beyond the limit of recompilations new sizes run eagerly, known ones compiled.",
        arguments={"backend": "aot_eager", "dynamic": False},
        workloads=_LENGTHS,
        early=frozenset({"stream-lengths"}),
        settings={"recompile_limit": LIMIT, "fail_on_recompile_limit_hit": False},
    ),
    Branch(
        "dynamo-branch",
        "A branch on data breaks the graph, and each side gives what eager gives.",
        arguments={"backend": "aot_eager"},
        workloads=frozenset({"stream-signs", "dynamic-depth"}),
        early=frozenset({"stream-signs"}),
    ),
    Stale(
        "dynamo-stale",
        "Sizes, attributes, globals and parameters that change between calls, and change back, are followed.",
        arguments={"backend": "aot_eager"},
        workloads=_LENGTHS,
        early=frozenset({"stream-lengths"}),
        settings={"recompile_limit": RECOMPILATIONS},
    ),
)
