"""Custom Dynamo backend that captures each graph, prints it, and runs it or passes it to another backend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import record_function

Runnable = Callable[..., Any]

CALL = "captured {stage} graph"
"""Name of the profiler event for each call of a captured graph."""


@dataclass(frozen=True)
class Node:
    """Operation of a graph: name in the printed code, name of its target, dtype of its result (None if no tensor)."""

    name: str
    target: str
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Captured:
    """Record of a graph, since backends change or free the graph itself: its stage, readable code, and operations.

    The stage is ``dynamo``, or AOTAutograd's ``forward`` or ``backward``. Operations are in order, without placeholders
    and output. `fed` is True if there was one example input for each placeholder.
    """

    stage: str
    text: str
    nodes: tuple[Node, ...]
    fed: bool

    @property
    def readable(self) -> bool:
        """True if the text names every operation."""
        return bool(self.text) and all(node.name in self.text for node in self.nodes)


class Capture:
    """Backend that records each graph in `graphs`, in order, and runs Dynamo's graphs.

    With `differentiates`, it runs AOTAutograd's forward and backward graphs instead, captured too. With `inner`, the
    name of a backend, that one compiles Dynamo's graphs after they are captured, whatever `differentiates` says.
    """

    def __init__(self, *, differentiates: bool = False, inner: str | None = None) -> None:
        self.differentiates = differentiates
        self.inner = inner
        self.graphs: list[Captured] = []
        self.__name__ = "capture" if inner is None else f"capture, then {inner}"

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Runnable:
        from accelcheck.devices.torch_names import aot_autograd, lookup_backend

        self.keep("dynamo", graph, inputs)
        if self.inner is not None:
            backend: Runnable = lookup_backend(self.inner)
        elif self.differentiates:
            backend = aot_autograd(fw_compiler=self.compiler("forward"), bw_compiler=self.compiler("backward"))
        else:
            return self.running("dynamo", graph)
        made: Runnable = backend(graph, inputs)
        return made

    def compiler(self, stage: str) -> Runnable:
        """Makes the compiler of a stage's graphs, for AOTAutograd."""
        from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # torch leaves it untyped

        def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Runnable:
            self.keep(stage, graph, inputs)
            boxed: Runnable = make_boxed_func(self.running(stage, graph))
            return boxed

        return compile_graph

    def running(self, stage: str, graph: fx.GraphModule) -> Runnable:
        """Makes a function that runs a captured graph inside a profiler event."""
        name = CALL.format(stage=stage)

        def run(*args: Any) -> Any:
            with record_function(name):
                return graph.forward(*args)

        return run

    def keep(self, stage: str, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        """Appends a record of a graph to `graphs`."""
        calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
        nodes = tuple(Node(node.name, called(node), _dtype(node)) for node in calls)
        placeholders = len(graph.graph.find_nodes(op="placeholder"))
        text = graph.print_readable(print_output=False)
        self.graphs.append(Captured(stage, text, nodes, placeholders == len(inputs)))

    def of(self, stage: str) -> list[Captured]:
        """Returns the captured graphs of a stage."""
        return [graph for graph in self.graphs if graph.stage == stage]


def called(node: fx.Node) -> str:
    """Returns the name of a node's target, such as ``linear``, ``_enter_autocast`` or ``addmm.default``."""
    return str(getattr(node.target, "__name__", node.target))


def _dtype(node: fx.Node) -> torch.dtype | None:
    # Dynamo stores the example under one name, AOTAutograd under another.
    value = node.meta.get("example_value", node.meta.get("val"))
    return value.dtype if isinstance(value, Tensor) else None
