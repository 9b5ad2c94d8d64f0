"""Finds where compiled code goes wrong: compiles the captured graph up to one operator after the other.

A compiler fuses operators, so a value in the middle may never exist. A cut is the graph up to an operator, with all
that the rest needs as its results. The first cut whose results exceed the budget of the operators before it names the
operator, and the kernel that computes it.
"""

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from accelcheck.checks.trial import Trial
from accelcheck.core.fault import Fault
from accelcheck.devices.torch_names import OpOverload
from accelcheck.explain.parts import GraphPart, PartShrinker, SmallestPart, kept
from accelcheck.verify.oracle_runs import twice
from accelcheck.workloads.probes import Draw


@dataclass(frozen=True)
class Region:
    """The first cut of a compiled graph that is wrong.

    Attributes:
        stage: ``forward`` or ``backward``.
        operator: The last operator of the cut, such as ``aten::sin``.
        number: Its position in the graph, from 0, and the number of operators.
        line: Source line in the model; empty where torch does not say.
        smallest: Fewest of its operators that are wrong; None where none of its results is wrong alone.
    """

    stage: str
    operator: str
    number: tuple[int, int]
    line: str
    faults: tuple[Fault, ...]
    smallest: SmallestPart | None = None


@dataclass(frozen=True)
class Graph:
    """A captured graph, and the inputs of its first call."""

    stage: str
    module: fx.GraphModule
    inputs: tuple[Any, ...]


def region(trial: Trial, draw: Draw, seconds: float = math.inf) -> Region | str:
    """Find the first wrong cut, and shrink it for some seconds; a sentence where none is found."""
    technique = trial.technique
    arguments = getattr(getattr(technique, "base", technique), "arguments", None)
    if arguments is None:
        return f"{technique.name} does not say how it compiles: its code is not taken apart"
    try:
        problem = draw.problem(trial.workload, trial.case.seed, trial.case.dtype)
        program = trial.place(problem, draw.seed(trial.case.seed))
        program.twice = twice(technique, trial.workload, trial.case.mode)
        technique.prepare(program, trial.case.mode, trial.device)
        graphs: list[Graph] = []
        program.call = torch.compile(program.module, backend=_backend(graphs), dynamic=False)
        trial.device.seed(trial.case.seed)
        program.run(trial.case.mode)
        for graph in graphs:
            if (wrong := _first_wrong(graph, arguments, seconds)) is not None:
                return wrong
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        message = str(error).partition("\n")[0]
        return f"the graph cannot be captured, or not be compiled in parts: {type(error).__name__}: {message}"
    finally:
        technique.finish()
        trial.state.restore()
    return "each captured graph is right when it is compiled by itself with these inputs"


def _backend(graphs: list[Graph]) -> Any:
    """Make a backend that runs AOTAutograd's graphs as they are, and keeps them."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # torch leaves it untyped

    from accelcheck.devices.torch_names import aot_autograd

    def compiler(stage: str) -> Callable[..., Any]:
        def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            seen: list[Graph] = []

            def run(*args: Any) -> Any:
                if not seen:
                    seen.append(Graph(stage, module, tuple(kept(value) for value in args)))
                    graphs.append(seen[0])
                return module.forward(*args)

            return make_boxed_func(run)

        return compile_graph

    return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))


def _first_wrong(graph: Graph, arguments: Mapping[str, Any], seconds: float) -> Region | None:
    """Bisect the cuts: those before the first wrong operator are right, and those after it wrong."""
    nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
    places = [place for place, node in enumerate(nodes) if _computes(node)]
    whole = GraphPart(_cut(graph.module, len(nodes)), graph.inputs)
    if not places or not (faults := whole.found(arguments).faults):
        return None
    low, high = -1, len(places) - 1
    while high - low > 1:
        middle = (low + high) // 2
        part = GraphPart(_cut(graph.module, places[middle] + 1), graph.inputs)
        part_faults = part.found(arguments).faults
        low, high, faults, whole = (low, middle, part_faults, part) if part_faults else (middle, high, faults, whole)
    node = nodes[places[high]]
    smallest = None
    with contextlib.suppress(Exception):  # memory, or a node that is no operator: the cut is known all the same
        wrong = next(place for place in range(len(graph.module.graph.nodes)) if f"out[{place}]" == faults[0].path)
        smallest = PartShrinker(arguments, seconds).shrink(whole, wrong)
    name = str(node.target.name()).partition(".")[0]
    return Region(graph.stage, name, (places[high], len(nodes)), _line(node), faults, smallest)


def _computes(node: fx.Node) -> bool:
    target = node.target
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    floating = any(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in tensors)
    return isinstance(target, OpOverload) and not target.is_view and floating


def _cut(module: fx.GraphModule, count: int) -> fx.GraphModule:
    """Cut the graph after its first `count` operators; its results are all that is needed beyond them."""
    cut, made = fx.Graph(), dict[fx.Node, fx.Node]()
    done = 0
    for node in module.graph.nodes:
        if node.op == "output" or (node.op == "call_function" and done == count):
            break
        made[node] = cut.node_copy(node, lambda input_node: made[input_node])
        done += node.op == "call_function"
    live = [
        copy
        for node, copy in made.items()
        if node.op == "call_function" and any(user not in made for user in node.users)
        if isinstance(node.meta.get("val"), Tensor)
    ]
    cut.output(tuple(live))
    return fx.GraphModule(module, cut)


def _line(node: fx.Node) -> str:
    """The innermost line of the model in a node's stack trace."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or node.stack_trace or ""))
    own = [(file, line) for file, line in lines if "/torch/" not in file]
    file, line = (own or lines or [("", "")])[-1]
    return f"{file.rpartition('/')[2]}:{line}" if file else ""
