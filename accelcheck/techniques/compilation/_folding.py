"""Constant folding, as an example of a user's graph pass for inductor."""

import uuid
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from accelcheck.devices.torch_names import CustomGraphPass, OpOverload, disable_current_modes, get_hash_for_files


class FoldConstants(CustomGraphPass):
    """Replaces expressions that depend on no input by their values, computed once while compiling.

    For functional ATen graphs, as AOTAutograd makes them. Nodes that write to a tensor are declared so, and left alone.
    `sizes` has the numbers of nodes before and after the pass, for each graph.
    """

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self._identity = uuid.uuid4().hex

    def __call__(self, graph: fx.Graph) -> None:
        """Changes a graph in place."""
        before = len(graph.nodes)
        self.change(graph)
        graph.lint()
        self.sizes.append((before, len(graph.nodes)))

    def change(self, graph: fx.Graph) -> None:
        """Folds constants in a graph, in place. Raises `ValueError` if no module, which stores them, owns the graph."""
        module = graph.owning_module
        if module is None:
            owner = "expected a graph with an owning module"
            raise ValueError(f"constants are stored in the module that owns a graph: {owner}")
        values = constants(graph.nodes)
        for node, value in values.items():
            # Keep constructors, which are as short as a constant, and skip values that only folded nodes use.
            if node.all_input_nodes and any(user not in values for user in node.users):
                name = f"_folded_{node.name}"
                module.register_buffer(name, value)
                with graph.inserting_before(node):
                    constant = graph.get_attr(name)
                constant.meta.update(node.meta)
                node.replace_all_uses_with(constant)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Returns the key in inductor's caches: source and instance, so that no cached graph bypasses the pass."""
        return get_hash_for_files((__file__,)), type(self).__qualname__, self._identity


def constants(nodes: Iterable[fx.Node]) -> dict[fx.Node, Tensor]:
    """Computes the values of all nodes that depend on constants alone, in graph order, as tensors on their devices."""
    values: dict[fx.Node, Tensor] = {}
    with disable_current_modes():  # the compiler traces with fake tensors, which have no values
        for node in nodes:
            if pure(node) and all(source in values for source in node.all_input_nodes):
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # `pure` found an operator
    return values


def pure(node: fx.Node) -> bool:
    """Returns whether a node only computes one tensor of static size: it writes to none and draws no random numbers."""
    operator, value = node.target, node.meta.get("val")
    return (
        isinstance(operator, OpOverload)
        and not operator._schema.is_mutable  # noqa: SLF001 - torch has no public name for it
        and torch.Tag.nondeterministic_seeded not in operator.tags
        and isinstance(value, Tensor)
        and all(isinstance(size, int) for size in value.shape)
    )
