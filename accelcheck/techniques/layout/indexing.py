"""Indexing operators in place of each other: index tensors in brackets, and index_select or gather."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.layout.aliasing import CopyLog, copy_log, written_through
from accelcheck.techniques.observe import Log
from accelcheck.workloads.base import Program

BRACKETS = "aten::index"
SELECTIONS = "aten::(index_select|gather)"
"""Pattern of the operators of indexing functions. Operators of the backward pass have other names."""

_PLAIN = "copies of the plain module"
Functions = Mapping[Any, Callable[..., Tensor]]


class ReplacedFunctions(TorchFunctionMode):
    """Replaces functions of torch by others, which get the same arguments."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


class Indexing(Technique):
    """Replaces functions of torch, and so all indexing of one kind, in workloads with a trait.

    `replaced` is a pattern of operators that must not be dispatched any more, `used` of those in their place.
    """

    family = "indexing"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})
    dtypes = ("float32", "bfloat16", "float16")
    watch = CopyLog

    def __init__(
        self, name: str, source: str, promise: str, trait: str, replaced: str, used: str, functions: Functions
    ) -> None:
        self.name, self.source, self.promise = name, source, promise
        self.requires = frozenset({trait})
        self.replaced, self.used, self.functions = replaced, used, functions

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        with torch.no_grad(), CopyLog(device.type) as plain:
            program.module(*program.inputs)
        program.extras[_PLAIN] = plain.copied(self.replaced).total()
        program.around = lambda: ReplacedFunctions(self.functions)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        plain: int = program.extras[_PLAIN]
        left, calls, made = log.count(self.replaced), log.count(self.used), copy_log(log).copied(self.used).total()
        yield Evidence(f"{self.replaced} dispatched = 0, of {plain} in the plain module", left, left == 0 < plain)
        yield Evidence(f"copies by {self.used} = {calls}, its calls", made, engaged=made == calls >= 1)
        written = [changed for _, changed in written_through(program)]
        claim = "elements of the input that change when the results are overwritten = 0"
        yield Evidence(claim, sum(written), engaged=bool(written) and not any(written))


def _by_selection(x: Tensor, key: Any) -> Tensor:
    """Computes ``x[key]`` by index_select, which takes no negative index, and gather; `Unsupported` for other keys."""
    keys = key if isinstance(key, tuple) else (key,)
    places = [place for place, part in enumerate(keys) if isinstance(part, Tensor)]
    if not places:
        return x[key]
    first, *others = (keys[place] for place in places)
    whole = all(part == slice(None) for part in keys if not isinstance(part, Tensor))
    if whole and not others and first.dim() == 1:
        return x.index_select(places[0], first)
    if whole and places == [0, 1]:
        if first.dim() == 2 and first.size(1) == 1 and others[0].dim() == 1:
            return x.index_select(0, first.flatten()).index_select(1, others[0])
        if first.shape == others[0].shape and first.dim() == 1 and x.dim() == 2:
            return x.index_select(0, first).gather(1, others[0].unsqueeze(1)).squeeze(1)
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else part for part in keys]
    reason = f"no combination of index_select and gather is implemented for the key {shapes}"
    raise Unsupported(unsupported(Code.NO_FEATURE, reason))


def _select_by_brackets(x: Tensor, dim: int, index: Tensor) -> Tensor:
    before: list[Any] = [slice(None)] * (dim % x.dim())
    return x[(*before, index)]


def _gather_by_brackets(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Gathers by brackets: tensors of positions, in the shape of `index`, index the other dimensions.

    These positions are made on the host. If they were made on the device, XLA would fold them into the backward pass's
    scatter while compiling, which takes seconds for a thousand elements.
    """
    counted = torch.meshgrid(*(torch.arange(size) for size in index.shape), indexing="ij")
    return x[tuple(index if place == dim % x.dim() else grid.to(x.device) for place, grid in enumerate(counted))]


_DOCS = "https://docs.pytorch.org/docs/stable"
_SELECTING = "index_select and gather copy the same elements as index tensors in brackets."
_INDEXING = "Index tensors in brackets copy the same elements as index_select and gather."
_BRACKETS: Functions = {Tensor.__getitem__: _by_selection}
_CALLS: Functions = {
    **dict.fromkeys((torch.index_select, Tensor.index_select), _select_by_brackets),
    **dict.fromkeys((torch.gather, Tensor.gather), _gather_by_brackets),
}

TECHNIQUES: tuple[Technique, ...] = tuple(
    Indexing(name, f"{_DOCS}/{page}.html", promise, trait, replaced, used, functions)
    for name, page, promise, trait, replaced, used, functions in (
        ("index-select", "generated/torch.index_select", _SELECTING, "index-tensors", BRACKETS, SELECTIONS, _BRACKETS),
        ("index-advanced", "tensors", _INDEXING, "index-operators", SELECTIONS, BRACKETS, _CALLS),
    )
)
