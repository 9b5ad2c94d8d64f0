"""The wrong part of a compiled graph alone: as few operators, sizes and numbers as still show the fault."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accelcheck.devices.torch_names import OpOverload
from accelcheck.explain.budgets import OperatorFinding, by_dtype
from accelcheck.explain.calls import OperatorCall, aside, copied, mapped, widened
from accelcheck.explain.holding import judged, named, nearest
from accelcheck.explain.smallest import SEED, cut, filled_tensor, listed
from accelcheck.verify.operators import is_float
from accelcheck.verify.precision import UNIT_ROUNDOFF
from accelcheck.verify.rounding import Rounding

SECONDS = 40.0
"""Most time for shrinking, beyond the step in progress, which compiles."""


@dataclass(frozen=True)
class GraphPart:
    """A graph that returns a tuple of tensors, and its inputs on the device; a captured graph also has numbers."""

    module: fx.GraphModule
    inputs: tuple[Any, ...]

    def found(self, arguments: Mapping[str, Any]) -> OperatorFinding:
        """Compile the part by arguments of ``torch.compile``, which may raise, run it, and judge its results."""
        torch.compiler.reset()
        with torch.no_grad():
            out = torch.compile(self.module, **arguments)(*(kept(tensor) for tensor in self.inputs))
        places = {f"out[{place}]": place for place, tensor in enumerate(out) if is_float(tensor)}
        own = {path: out[place].detach().cpu() for path, place in places.items()}
        dtypes = {node: _dtypes(value) for node, value in self.values().items()}

        def computed(interpreter: Wide) -> dict[str, Tensor]:
            made = interpreter.run(*(widened(tensor) for tensor in self.inputs))
            return {path: made[place].to(torch.float64) for path, place in places.items()}

        def sample(number: int, generator: torch.Generator) -> Mapping[str, Tensor]:
            return computed(RoundedGraph(self.module, dtypes, generator))

        with aside():
            truth = computed(Wide(self.module))
            unlike = {path: tensor for path, tensor in own.items() if not nearest(tensor, truth[path])}
            return by_dtype(unlike, lambda some, dtype: judged(some, truth, dtype, sample))

    def values(self) -> dict[fx.Node, Any]:
        """Run the part without compiling it; the value of each node."""
        recording = _Recording(self.module)
        with torch.no_grad():
            recording.run(*(kept(value) for value in self.inputs))
        return recording.values

    def operators(self) -> list[fx.Node]:
        """Calls of the graph, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class SmallestPart:
    """A wrong part alone, with one result, which is wrong; `values` and `steps` are as in `Smallest`."""

    part: GraphPart
    finding: OperatorFinding
    values: str
    steps: int
    arguments: Mapping[str, Any]


class PartShrinker:
    """Makes a part smaller while it fails, for at most `SECONDS`; compiles it by arguments of ``torch.compile``."""

    def __init__(self, arguments: Mapping[str, Any], seconds: float = math.inf) -> None:
        self.arguments = arguments
        self._end = time.monotonic() + min(seconds, SECONDS)
        self._steps = 0

    def shrink(self, part: GraphPart, wrong: int) -> SmallestPart | None:
        """Find the smallest part that fails, with one wrong result; None where none with one result alone does."""
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
        for size in sorted({size for tensor in best.inputs for size in tensor.shape if size > 1}, reverse=True):
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
        """Judge a part; None where it is right, or cannot be compiled or judged."""
        try:
            finding = part.found(self.arguments)
        except Exception:  # noqa: BLE001 - sizes that do not fit raise anything
            return None
        return finding if finding.faults else None

    def _tried(self, part: GraphPart) -> OperatorFinding | None:
        if time.monotonic() > self._end:
            return None
        self._steps += 1
        return self.failing(part)


def last(part: GraphPart, wrong: int, count: int) -> GraphPart:
    """Cut out the last `count` operators that lead to one result of a part; values from other operators are inputs."""
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
    # The operator that made several results must be there too, where one of them is used.
    makers = {source for node in calls if node.target is operator.getitem for source in node.all_input_nodes}
    chosen = [node for node in part.operators() if node in makers or node in calls]
    graph, made, inputs = fx.Graph(), dict[fx.Node, Any](), list[Tensor]()
    for node in chosen:
        for source in node.all_input_nodes:
            if source in made or source in chosen:
                continue
            value = values[source]
            made[source] = graph.placeholder(f"t{len(inputs)}") if isinstance(value, Tensor) else value
            if isinstance(value, Tensor):
                inputs.append(value)
    for node in chosen:
        args = fx.map_arg(node.args, lambda source: made[source])
        kwargs = fx.map_arg(node.kwargs, lambda source: made[source])
        made[node] = graph.create_node("call_function", node.target, args, kwargs, name=node.name)
    graph.output((made[target],))
    return GraphPart(fx.GraphModule(torch.nn.Module(), graph), tuple(inputs))


def resized(part: GraphPart, old: int, new: int) -> GraphPart:
    """Change all dimensions of one size to another, and the numbers in lists that name it."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in part.module.graph.nodes:
        made[node] = graph.node_copy(node, lambda value: made[value])
        if node.op == "call_function":
            made[node].args = tuple(listed(value, old, new) for value in made[node].args)
    with aside():
        inputs = tuple(cut(value, old, new) for value in part.inputs)
    return GraphPart(fx.GraphModule(torch.nn.Module(), graph), inputs)


def filled(inputs: Sequence[Tensor], values: str) -> Iterator[Tensor]:
    """Fill floating-point inputs with other numbers: see `accelcheck.explain.smallest.filled`."""
    generator = torch.Generator().manual_seed(SEED)
    for tensor in inputs:
        yield filled_tensor(tensor, values, generator) if tensor.is_floating_point() else tensor


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
        """Run operators in FP64; anything else, such as taking one of several results, as it is."""
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        return OperatorCall(target, mapped(args, lambda argument: argument), kwargs).widened().run()


class RoundedGraph(Wide):
    """Runs a graph in FP64 with random rounding errors of each operator in the dtype of its own results."""

    def __init__(
        self, module: fx.GraphModule, dtypes: Mapping[fx.Node, Sequence[torch.dtype | None]], generator: torch.Generator
    ) -> None:
        super().__init__(module)
        self.dtypes, self.generator = dtypes, generator

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, then round its results to their dtypes."""
        dtypes = self.dtypes[n]
        lowest = next((named(part) for part in dtypes if part is not None and named(part) in UNIT_ROUNDOFF), "")
        if n.op != "call_function" or not lowest:
            return super().run_node(n)
        with Rounding(lowest, lowest, self.generator):
            out = super().run_node(n)
        if not isinstance(out, (tuple, list)):
            return _rounded(out, dtypes[0])
        return type(out)(_rounded(part, dtype) for part, dtype in zip(out, dtypes, strict=True))


def _rounded(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype).to(torch.float64) if is_float(value) and dtype is not None else value


def _dtypes(value: Any) -> list[torch.dtype | None]:
    """Dtypes of the floating-point tensors in a node's value; None for anything else."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [part.dtype if is_float(part) else None for part in values]


def kept(value: Any) -> Any:
    """Copy a tensor; anything else stays as it is."""
    return copied(value.detach()) if isinstance(value, Tensor) else value
