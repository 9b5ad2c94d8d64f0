"""A part of a captured graph that is wrong when it is compiled: as few operators, sizes and numbers as still show the fault."""

from __future__ import annotations

import math
import operator
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from accelcheck.devices.torch_names import OpOverload
from accelcheck.explain.budgets import OperatorFinding
from accelcheck.explain.calls import OperatorCall, aside, copied, mapped, widened
from accelcheck.explain.holding import judged, named, nearest
from accelcheck.explain.smallest import SEED, cut, filled_tensor, listed
from accelcheck.verify.operators import is_float
from accelcheck.verify.precision import UNIT_ROUNDOFF
from accelcheck.verify.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SECONDS = 40.0
"""That shrinking takes at most, beyond the step in progress: a step compiles."""


def result_path(place: int) -> str:
    """The path of a result of a part, by its position."""
    return f"out[{place}]"


@dataclass(frozen=True)
class GraphPart:
    """A graph of operators, and its inputs.

    Attributes:
        module: Returns a tuple of tensors.
        inputs: On the device; those of a captured graph may be numbers too.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]

    def found(self, arguments: Mapping[str, Any]) -> OperatorFinding:
        """What its results show when it is compiled.

        Args:
            arguments: Of ``torch.compile``.

        Raises:
            Exception: What the compiler raises.
        """
        torch.compiler.reset()
        with torch.no_grad():
            out = torch.compile(self.module, **arguments)(*(kept(one) for one in self.inputs))
        places = {result_path(place): place for place, one in enumerate(out) if is_float(one)}
        own = {path: out[place].detach().cpu() for path, place in places.items()}
        dtypes = {node: _dtypes(value) for node, value in self.values().items()}

        def computed(interpreter: Wide) -> dict[str, Tensor]:
            made = interpreter.run(*(widened(one) for one in self.inputs))
            return {path: made[place].to(torch.float64) for path, place in places.items()}

        def sample(number: int, generator: torch.Generator) -> Mapping[str, Tensor]:
            return computed(RoundedGraph(self.module, dtypes, generator))

        judgements, references = {}, {}
        with aside():
            truth = computed(Wide(self.module))
            for dtype in dict.fromkeys(named(one.dtype) for one in own.values()):
                some = {
                    path: one
                    for path, one in own.items()
                    if named(one.dtype) == dtype and not nearest(one, truth[path])
                }
                if some:
                    judgements[dtype], references[dtype] = judged(some, truth, dtype, sample)
        faults = tuple(fault for one in judgements.values() for fault in one.faults)
        return OperatorFinding(faults, judgements, references)

    def values(self) -> dict[fx.Node, Any]:
        """What each node gives when the part is not compiled."""
        recording = _Recording(self.module)
        with torch.no_grad():
            recording.run(*(kept(one) for one in self.inputs))
        return recording.values

    def operators(self) -> list[fx.Node]:
        """Its calls, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class SmallestPart:
    """A wrong part alone.

    Attributes:
        part: Its one result is wrong.
        finding: What it shows.
        values: As of `accelcheck.explain.smallest.Smallest`.
        steps: As there.
        arguments: Of ``torch.compile``.
    """

    part: GraphPart
    finding: OperatorFinding
    values: str
    steps: int
    arguments: Mapping[str, Any]


class PartShrinker:
    """Makes a part smaller while it fails.

    Args:
        arguments: Of ``torch.compile``.
        seconds: Most time, if less than `SECONDS`.
    """

    def __init__(self, arguments: Mapping[str, Any], seconds: float = math.inf) -> None:
        self.arguments = arguments
        self._end = time.monotonic() + min(seconds, SECONDS)
        self._steps = 0

    def shrink(self, part: GraphPart, wrong: int) -> SmallestPart | None:
        """The smallest part that fails; None where none with one result alone does.

        Args:
            part: That fails.
            wrong: Position of the result that is wrong.
        """
        whole = last(part, wrong, len(part.operators()))
        finding = self.failing(whole)
        if finding is None:
            return None
        best, values = whole, "given"
        count, total = 1, len(whole.operators())
        while count < total:
            fewer = last(whole, 0, count)
            if (again := self._tried(fewer)) is not None:
                best, finding = fewer, again
                break
            count *= 2
        for size in sorted({size for one in best.inputs for size in one.shape if size > 1}, reverse=True):
            for wanted in (1, 2, size // 2):
                if wanted < size and (again := self._tried(smaller := resized(best, size, wanted))) is not None:
                    best, finding = smaller, again
                    break
        for kind in ("ones", "normal"):
            other = GraphPart(best.module, tuple(filled(best.inputs, kind)))
            if (again := self._tried(other)) is not None:
                best, finding, values = other, again, kind
                break
        return SmallestPart(best, finding, values, self._steps, self.arguments)

    def failing(self, part: GraphPart) -> OperatorFinding | None:
        """What a part shows where it is wrong; None where it is right, or cannot be compiled or judged."""
        try:
            found = part.found(self.arguments)
        except Exception:  # noqa: BLE001 - sizes that do not fit raise anything
            return None
        return found if found.faults else None

    def _tried(self, part: GraphPart) -> OperatorFinding | None:
        if time.monotonic() > self._end:
            return None
        self._steps += 1
        return self.failing(part)


def last(part: GraphPart, wrong: int, count: int) -> GraphPart:
    """The last `count` operators that lead to one result of a part; what they need of others is an input."""
    values = part.values()
    (output,) = (node for node in part.module.graph.nodes if node.op == "output")
    target = output.args[0][wrong]
    needed = set[fx.Node]()
    waiting = [target]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    calls = [node for node in part.operators() if node in needed][-count:]
    # One of several results is taken from the operator that made them, which must be there too.
    makers = {one for node in calls if node.target is operator.getitem for one in node.all_input_nodes}
    chosen = [node for node in part.operators() if node in makers or node in calls]
    graph, made, inputs = fx.Graph(), dict[fx.Node, Any](), list[Tensor]()
    for node in chosen:
        for one in node.all_input_nodes:
            if one in made or one in chosen:
                continue
            value = values[one]
            made[one] = graph.placeholder(f"t{len(inputs)}") if isinstance(value, Tensor) else value
            if isinstance(value, Tensor):
                inputs.append(value)
    for node in chosen:
        made[node] = graph.create_node(
            "call_function",
            node.target,
            fx.map_arg(node.args, lambda one: made[one]),
            fx.map_arg(node.kwargs, lambda one: made[one]),
            name=node.name,
        )
    graph.output((made[target],))
    return GraphPart(fx.GraphModule(torch.nn.Module(), graph), tuple(inputs))


def resized(part: GraphPart, old: int, new: int) -> GraphPart:
    """The part with all dimensions of one size cut to another, and the numbers in lists that name it."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in part.module.graph.nodes:
        made[node] = graph.node_copy(node, lambda one: made[one])
        if node.op == "call_function":
            made[node].args = tuple(listed(one, old, new) for one in made[node].args)
    with aside():
        inputs = tuple(cut(one, old, new) for one in part.inputs)
    return GraphPart(fx.GraphModule(torch.nn.Module(), graph), inputs)


def filled(inputs: Sequence[Tensor], values: str) -> Iterator[Tensor]:
    """Inputs with other floating-point numbers: see `accelcheck.explain.smallest.filled`."""
    generator = torch.Generator().manual_seed(SEED)
    for one in inputs:
        yield filled_tensor(one, values, generator) if one.is_floating_point() else one


class _Recording(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        self.values[n] = kept(out)  # a later operator may write to it
        return out


class Wide(fx.Interpreter):
    """Runs a graph in FP64 on the CPU."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Operators in FP64; anything else, such as taking one of several results, as it is."""
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        return OperatorCall(target, mapped(args, lambda one: one), kwargs).widened().run()


class RoundedGraph(Wide):
    """Runs a graph in FP64 with random rounding errors: of each operator in the dtype of its own results, to which these are rounded too.

    Args:
        module: The graph.
        dtypes: Of what each node gives.
        generator: Of the errors.
    """

    def __init__(
        self, module: fx.GraphModule, dtypes: Mapping[fx.Node, Sequence[torch.dtype | None]], generator: torch.Generator
    ) -> None:
        super().__init__(module)
        self.dtypes, self.generator = dtypes, generator

    def run_node(self, n: fx.Node) -> Any:
        """As `torch.fx.Interpreter`."""
        dtypes = self.dtypes[n]
        lowest = next((named(one) for one in dtypes if one is not None and named(one) in UNIT_ROUNDOFF), "")
        if n.op != "call_function" or not lowest:
            return super().run_node(n)
        with Rounding(lowest, lowest, self.generator):
            out = super().run_node(n)
        if not isinstance(out, (tuple, list)):
            return _rounded(out, dtypes[0])
        return type(out)(_rounded(one, dtype) for one, dtype in zip(out, dtypes, strict=True))


def _rounded(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype).to(torch.float64) if is_float(value) and dtype is not None else value


def _dtypes(value: Any) -> list[torch.dtype | None]:
    """Of each floating-point tensor in what a node gives; None for anything else."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [one.dtype if is_float(one) else None for one in values]


def kept(value: Any) -> Any:
    """A copy of a tensor; anything else as it is."""
    return copied(value.detach()) if isinstance(value, Tensor) else value
