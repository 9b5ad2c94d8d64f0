"""Faults of translations that need more than one operator, or operands of different kinds, to show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from accelcheck.selftest.faults.base import PlantedFault, row, single
from accelcheck.selftest.faults.sowing import calls_of, exported

if TYPE_CHECKING:
    from collections.abc import Callable

HALVES = (torch.float16, torch.bfloat16)


def _given(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def overflow_kept(graph: fx.Graph) -> int:
    """A negative number is joined before it wraps around in its eight bits. The join is in 32 bits."""
    chosen = [node for node in calls_of(graph, "neg", "mul") if _given(node).dtype in {torch.int8, torch.uint8}]
    chosen = [node for node in chosen if {user.name.partition("_")[0] for user in node.users} == {"cat"}]
    for node in chosen:
        with graph.inserting_before(node):
            node.replace_input_with(wide := node.all_input_nodes[0], _converted(graph, wide, torch.int32))
    return len(chosen)


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return graph.call_function(torch.ops.aten.to.dtype, (node, dtype))


def scan_untyped(graph: fx.Graph) -> int:
    """A scan of a constant has lost its dtype argument."""
    chosen = [node for node in calls_of(graph, "cumsum") if "dtype" in node.kwargs and not _reads_input(node)]
    for node in chosen:
        node.kwargs = {}
    return len(chosen)


def _reads_input(node: fx.Node) -> bool:
    return any(other.op == "placeholder" or _reads_input(other) for other in node.all_input_nodes)


def copy_late(graph: fx.Graph) -> int:
    """A copy from one input to another comes after the last write to its source."""
    chosen = calls_of(graph, "copy_")
    last = next(node for node in graph.nodes if node.op == "output")
    for node in chosen:
        if not node.users:
            last.prepend(node)
    return len(chosen)


def number_rounded(graph: fx.Graph) -> int:
    """A number of float32 is rounded to half precision before it is added to a tensor of half precision."""
    chosen = [
        node
        for node in calls_of(graph, "add", "sub", "mul")
        if len(node.all_input_nodes) == 2
        and {_given(value).dim() for value in node.all_input_nodes} > {0}
        and any(_given(value).dtype in HALVES for value in node.all_input_nodes if _given(value).dim())
    ]
    for node in chosen:
        (number,) = (value for value in node.all_input_nodes if not _given(value).dim())
        (half,) = (value for value in node.all_input_nodes if _given(value).dim())
        with graph.inserting_before(node):
            node.replace_input_with(number, _converted(graph, number, _given(half).dtype))
    return len(chosen)


def zero_unsigned(graph: fx.Graph) -> int:
    """A minimum of two zeros has no sign."""
    chosen = calls_of(graph, "minimum", "maximum")
    for node in chosen:
        with graph.inserting_after(node):
            unsigned = graph.call_function(torch.ops.aten.add.Scalar, (node, 0.0))
        node.replace_all_uses_with(unsigned, delete_user_cb=lambda user, own=unsigned: user is not own)
    return len(chosen)


def _fault(name: str, workload: str, edit: Callable[[fx.Graph], int]) -> PlantedFault:
    made = row(PlantedFault, technique="export", seeds=2)(name, edit)
    return made(single(workload), around=lambda _: exported(edit))


FAULTS = (
    _fault("export-overflow-kept", "overflow-1", overflow_kept),
    _fault("export-scan-untyped", "constant-1", scan_untyped),
    _fault("export-copy-late", "mutation-1", copy_late),
    _fault("export-number-rounded", "mixture-1", number_rounded),
    _fault("export-zero-unsigned", "sign-1", zero_unsigned),
)
