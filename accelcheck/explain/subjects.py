"""What scripts are about: an operator, or a part of a compiled graph, as source."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from accelcheck.explain.calls import aside
from accelcheck.explain.parts import SmallestPart, kept
from accelcheck.explain.source import NotWrittenError, Tensors, expression, literal, overload

if TYPE_CHECKING:
    from accelcheck.explain.calls import OperatorCall
    from accelcheck.explain.smallest import Smallest

WIDE = "w = [one.double() if one.is_floating_point() else one.clone() for one in t]"
ROOM = 4
"""Lines that a script has for the operators of a graph."""


class OperatorSubject:
    """An operator: see `accelcheck.explain.script.Subject`."""

    def __init__(self, smallest: Smallest) -> None:
        self.call, self.finding = smallest.call, smallest.finding
        self.name = smallest.call.func.name()
        self.tensors = Tensors(smallest.call.tensors(), smallest.values)

    def truth(self, path: str) -> list[str]:
        """By the operator itself where the CPU has such a kernel in FP64, else from the file."""
        if self.has_kernel(path):
            with aside():
                lines = _picked(self.call.widened(), path, "w")
            lines[-1] = lines[-1].replace("got =", "truth =")
            return [WIDE, *lines]
        found = next(one.truth[path] for one in self.finding.references.values() if path in one.truth)
        self.tensors.data["truth"] = found
        shape = list(found.shape)
        return [f'truth = read("truth").reshape({shape})  # FP64, of its parts: the CPU has no such operator']

    def has_kernel(self, path: str) -> bool:
        """Whether the CPU has the operator in FP64."""
        with aside():
            try:
                copy = self.call.widened()
                return path in copy.results(copy.run())
            except Exception:  # noqa: BLE001 - no such kernel: whatever it raises
                return False

    def calls(self, path: str) -> list[str]:
        """One call."""
        return _picked(self.call, path, "t")

    def dtype(self, path: str) -> torch.dtype:
        """Of the result."""
        with aside():
            copy = self.call.kept()
        return copy.results(copy.run())[path].dtype


class PartSubject:
    """A part of a graph, compiled: see `accelcheck.explain.script.Subject`.

    Raises:
        NotWrittenError: An argument of ``torch.compile`` is no plain value, or a node no operator.
    """

    def __init__(self, smallest: SmallestPart) -> None:
        self.part, self.finding = smallest.part, smallest.finding
        self.tensors = Tensors(smallest.part.inputs, smallest.values)
        self.name = ", ".join(dict.fromkeys(_said(node) for node in smallest.part.operators() if _operator(node)))
        self.words = [f"{name}={_plain(one)}" for name, one in smallest.arguments.items()]
        self.body = _body(smallest.part.module)

    def truth(self, path: str) -> list[str]:
        """By the same operators."""
        return [*self.body, WIDE, *self._meaning("torch.float64", '"cpu"'), "truth = f(*w)"]

    def calls(self, path: str) -> list[str]:
        """Compiled."""
        return [*self._meaning("dtype", "device"), f"got = torch.compile({', '.join(['f', *self.words])})(*t)"]

    def _meaning(self, dtype: str, device: str) -> list[str]:
        """What ``real`` and ``place`` mean, where the function uses them."""
        used = any("real(" in line or "=place" in line for line in self.body)
        return [f"real, place = (lambda dtype: {dtype}), {device}"] if used else []

    def dtype(self, path: str) -> torch.dtype:
        """Of the result."""
        with torch.no_grad():
            (out,) = self.part.module(*map(kept, self.part.inputs))
        found: torch.dtype = out.dtype
        return found


def _picked(call: OperatorCall, path: str, name: str) -> list[str]:
    """Lines that run the call and take one of its results as `got`: what it returned, or the argument that it wrote to."""
    written = dict(call.written())
    if path not in written:
        return [f"got = {expression(call, name)}{path.removeprefix('out')}"]
    number = next(place for place, one in enumerate(call.tensors()) if one is written[path])
    return [expression(call, name), f"got = {name}[{number}]"]


def _body(module: fx.GraphModule) -> list[str]:
    """The function ``f``; dtypes and devices of operators go through ``real`` and ``place``, so that it computes in FP64 on the CPU too."""
    names = {node: f"v{number}" for number, node in enumerate(module.graph.nodes)}
    takes = [names[node] for node in module.graph.nodes if node.op == "placeholder"]
    steps = [f"{names[node]} = {_called(node, names)}" for node in module.graph.nodes if node.op == "call_function"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    steps.append(f"return {names[output.args[0][0]]}")
    each = -(-len(steps) // ROOM)
    lines = [f"    {'; '.join(steps[start : start + each])}" for start in range(0, len(steps), each)]
    return [f"def f({', '.join(takes)}):", *lines]


def _called(node: fx.Node, names: dict[fx.Node, str]) -> str:
    def said(one: Any) -> str:
        if isinstance(one, fx.Node):
            return names[one]
        if isinstance(one, (list, tuple)):
            return f"[{', '.join(map(said, one))}]"
        if isinstance(one, torch.dtype):
            return f"real({one})" if one.is_floating_point else str(one)
        return "place" if isinstance(one, torch.device) else literal(one)

    if node.target is operator.getitem:
        return f"{said(node.args[0])}[{said(node.args[1])}]"
    if not _operator(node):
        raise NotWrittenError(f"{node.target} is no operator")
    words = [*map(said, node.args), *(f"{name}={said(one)}" for name, one in node.kwargs.items())]
    return f"{overload(node.target)}({', '.join(words)})"


def _operator(node: fx.Node) -> bool:
    return hasattr(node.target, "_schema")


def _said(node: fx.Node) -> str:
    return str(node.target.name()).partition(".")[0]  # type: ignore[union-attr]  # of an operator


def _plain(value: Any) -> str:
    if isinstance(value, (str, bool, int, float)) or value is None:
        return repr(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_plain(name)}: {_plain(one)}' for name, one in value.items())}}}"
    raise NotWrittenError(f"torch.compile gets {value!r}, which has no name")
