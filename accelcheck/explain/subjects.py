"""Subjects of scripts: an operator, or a part of a compiled graph, as source."""

import operator
from typing import Any

import torch
from torch import fx

from accelcheck.explain.calls import OperatorCall, aside
from accelcheck.explain.parts import SmallestPart, kept
from accelcheck.explain.smallest import Smallest
from accelcheck.explain.source import NotWrittenError, Tensors, expression, literal, overload

WIDE = "w = [one.double() if one.is_floating_point() else one.clone() for one in t]"
ROOM = 4
"""Lines of a script for the operators of a graph."""


class OperatorSubject:
    """An operator as an `accelcheck.explain.script.Subject`."""

    def __init__(self, smallest: Smallest) -> None:
        self.call, self.finding = smallest.call, smallest.finding
        self.name = smallest.call.func.name()
        self.tensors = Tensors(smallest.call.tensors(), smallest.values)

    def truth(self, path: str) -> list[str]:
        """Lines that use the operator itself where the CPU has it in FP64, else read the file."""
        if self.has_kernel(path):
            with aside():
                lines = _picked(self.call.widened(), path, "w")
            lines[-1] = lines[-1].replace("got =", "truth =")
            return [WIDE, *lines]
        truth = next(reference.truth[path] for reference in self.finding.references.values() if path in reference.truth)
        self.tensors.data["truth"] = truth
        shape = list(truth.shape)
        return [f'truth = read("truth").reshape({shape})  # FP64, of its parts: the CPU has no such operator']

    def has_kernel(self, path: str) -> bool:
        """True if the CPU has the operator in FP64."""
        with aside():
            try:
                copy = self.call.widened()
                return path in copy.results(copy.run())
            except Exception:  # noqa: BLE001 - a missing kernel may raise anything
                return False

    def calls(self, path: str) -> list[str]:
        """Lines that call the operator once."""
        return _picked(self.call, path, "t")

    def dtype(self, path: str) -> torch.dtype:
        """Dtype of the result."""
        with aside():
            copy = self.call.kept()
        return copy.results(copy.run())[path].dtype


class PartSubject:
    """A compiled part of a graph as an `accelcheck.explain.script.Subject`.

    A `NotWrittenError` where an argument of ``torch.compile`` is no plain value, or a node no operator.
    """

    def __init__(self, smallest: SmallestPart) -> None:
        self.part, self.finding = smallest.part, smallest.finding
        self.tensors = Tensors(smallest.part.inputs, smallest.values)
        operators: list[Any] = [node for node in smallest.part.operators() if _operator(node)]
        self.name = ", ".join(dict.fromkeys(node.target.name().partition(".")[0] for node in operators))
        self.words = [f"{name}={_plain(value)}" for name, value in smallest.arguments.items()]
        self.body = _body(smallest.part.module)

    def truth(self, path: str) -> list[str]:
        """Lines that use the same operators in FP64."""
        return [*self.body, WIDE, *self._meaning("torch.float64", '"cpu"'), "truth = f(*w)"]

    def calls(self, path: str) -> list[str]:
        """Lines that compile and call the function."""
        return [*self._meaning("dtype", "device"), f"got = torch.compile({', '.join(['f', *self.words])})(*t)"]

    def _meaning(self, dtype: str, device: str) -> list[str]:
        """Lines that define ``real`` and ``place``, where the function uses them."""
        used = any("real(" in line or "=place" in line for line in self.body)
        return [f"real, place = (lambda dtype: {dtype}), {device}"] if used else []

    def dtype(self, path: str) -> torch.dtype:
        """Dtype of the result."""
        with torch.no_grad():
            (out,) = self.part.module(*map(kept, self.part.inputs))
        dtype: torch.dtype = out.dtype
        return dtype


def _picked(call: OperatorCall, path: str, name: str) -> list[str]:
    """Lines that run the call and take one result as `got`: a returned value, or an argument that it wrote to."""
    written = dict(call.written())
    if path not in written:
        return [f"got = {expression(call, name)}{path.removeprefix('out')}"]
    number = next(place for place, tensor in enumerate(call.tensors()) if tensor is written[path])
    return [expression(call, name), f"got = {name}[{number}]"]


def _body(module: fx.GraphModule) -> list[str]:
    """Write the function ``f``; its dtypes and devices are ``real`` and ``place``, so that it computes in FP64 too."""
    names = {node: f"v{number}" for number, node in enumerate(module.graph.nodes)}
    takes = [names[node] for node in module.graph.nodes if node.op == "placeholder"]
    steps = [f"{names[node]} = {_called(node, names)}" for node in module.graph.nodes if node.op == "call_function"]
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    steps.append(f"return {names[output.args[0][0]]}")
    each = -(-len(steps) // ROOM)
    lines = [f"    {'; '.join(steps[start : start + each])}" for start in range(0, len(steps), each)]
    return [f"def f({', '.join(takes)}):", *lines]


def _called(node: fx.Node, names: dict[fx.Node, str]) -> str:
    def source(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(source, value))}]"
        if isinstance(value, torch.dtype):
            return f"real({value})" if value.is_floating_point else str(value)
        return "place" if isinstance(value, torch.device) else literal(value)

    if node.target is operator.getitem:
        return f"{source(node.args[0])}[{source(node.args[1])}]"
    if not _operator(node):
        raise NotWrittenError(f"{node.target} is no operator")
    words = [*map(source, node.args), *(f"{name}={source(value)}" for name, value in node.kwargs.items())]
    return f"{overload(node.target)}({', '.join(words)})"


def _operator(node: fx.Node) -> bool:
    return hasattr(node.target, "_schema")


def _plain(value: Any) -> str:
    if isinstance(value, (str, bool, int, float)) or value is None:
        return repr(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_plain(name)}: {_plain(item)}' for name, item in value.items())}}}"
    raise NotWrittenError(f"torch.compile gets {value!r}, which has no name")
