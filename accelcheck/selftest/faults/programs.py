"""Faults of translations that one operator, or operands of one dtype, do not show."""

from collections.abc import Callable

import torch
from torch import fx

from accelcheck.selftest.faults.base import PlantedFault, alike, single
from accelcheck.selftest.faults.sowing import calls_of, exported


def overflow_kept(graph: fx.Graph) -> int:
    """A negative number is joined before it wraps around in its eight bits. The join is in 32 bits."""
    chosen = [
        node
        for node in calls_of(graph, "neg")
        if node.meta["val"].dtype in {torch.int8, torch.uint8} and set(node.users) <= set(calls_of(graph, "cat"))
    ]
    for node in chosen:
        (operand,) = node.all_input_nodes
        with graph.inserting_before(node):
            node.replace_input_with(operand, graph.call_function(torch.ops.aten.to.dtype, (operand, torch.int32)))
    return len(chosen)


def _is_constant(node: fx.Node) -> bool:
    return node.op != "placeholder" and all(map(_is_constant, node.all_input_nodes))


def scan_untyped(graph: fx.Graph) -> int:
    """A scan of a constant has lost its dtype argument."""
    chosen = [node for node in calls_of(graph, "cumsum") if node.kwargs and _is_constant(node)]
    for node in chosen:
        node.kwargs = {}
    return len(chosen)


def copy_late(graph: fx.Graph) -> int:
    """A copy from one input to another comes after the last write to its source."""
    chosen = calls_of(graph, "copy_")
    last = next(node for node in graph.nodes if node.op == "output")
    for node in chosen:
        node.replace_all_uses_with(node.all_input_nodes[0])
        last.prepend(node)
    return len(chosen)


def zero_unsigned(graph: fx.Graph) -> int:
    """A minimum of two zeros has no sign."""
    chosen = calls_of(graph, "minimum", "maximum")
    for node in chosen:
        users = list(node.users)
        with graph.inserting_after(node):
            unsigned = graph.call_function(torch.ops.aten.add.Scalar, (node, 0.0))
        for user in users:
            user.replace_input_with(node, unsigned)
    return len(chosen)


def _fault(name: str, workload: str, edit: Callable[[fx.Graph], int]) -> PlantedFault:
    made = alike(technique="export", seeds=2)(name, edit)
    return made(single(workload), around=exported(edit))


FAULTS = (
    _fault("export-overflow-kept", "overflow-1", overflow_kept),
    _fault("export-scan-untyped", "constant-1", scan_untyped),
    _fault("export-copy-late", "mutation-1", copy_late),
    _fault("export-zero-unsigned", "sign-1", zero_unsigned),
)
