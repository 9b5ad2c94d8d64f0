"""Constant folding: a graph pass for inductor, as users write them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Iterable


class FoldConstants(CustomGraphPass):
    """Computes once, while compiling, what no input goes into.

    For ATen graphs that AOTAutograd has made functional: what writes is a node that says so, and is left alone.

    Attributes:
        sizes: Nodes before and after, of each graph that the pass has met.
    """

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self._identity = uuid.uuid4().hex

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        before = len(graph.nodes)
        self.change(graph)
        graph.lint()
        self.sizes.append((before, len(graph.nodes)))

    def change(self, graph: fx.Graph) -> None:
        """What the pass does."""
        module = graph.owning_module
        if module is None:
            raise ValueError("constants are kept by the module of a graph: expected a graph that has one")
        values = constants(graph.nodes)
        for node, value in values.items():
            # A constructor alone is as short as the constant; what only folded nodes use is not needed.
            if node.all_input_nodes and any(user not in values for user in node.users):
                name = f"_folded_{node.name}"
                module.register_buffer(name, value)
                with graph.inserting_before(node):
                    constant = graph.get_attr(name)
                constant.meta.update(node.meta)
                node.replace_all_uses_with(constant)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """What inductor's caches tell the pass by: its source, and this very pass.

        A graph that came from a cache would not meet the pass, and nothing would show that it ran.
        """
        return get_hash_for_files((__file__,)), type(self).__qualname__, self._identity


def constants(nodes: Iterable[fx.Node]) -> dict[fx.Node, Tensor]:
    """The values of all nodes that depend on nothing but constants, in order: real tensors on the nodes' own devices."""
    values: dict[fx.Node, Tensor] = {}
    with _disable_current_modes():  # the compiler traces with tensors that hold no values
        for node in nodes:
            if pure(node) and all(source in values for source in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # `pure` saw that it is an operator
    return values


def pure(node: fx.Node) -> bool:
    """Whether a node gives one tensor of a known size, and does nothing else: it neither writes nor draws."""
    operator, value = node.target, node.meta.get("val")
    return (
        isinstance(operator, OpOverload)
        and not operator._schema.is_mutable  # noqa: SLF001 - torch offers no other question
        and torch.Tag.nondeterministic_seeded not in operator.tags
        and isinstance(value, Tensor)
        and all(isinstance(size, int) for size in value.shape)
    )
