"""Samples of operators with options that OpInfo's few samples lack, and the choice of samples that show most options.

Options are arguments other than the first. Each one takes other values of its type, one at a time: flags are turned,
words replaced by others of their group, numbers by negative, zero and larger ones, sizes by uneven ones, tensors left
out or replaced by a number. An operator refuses some of these samples; trials leave them out.
"""

import contextlib
import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelcheck.workloads.operator_calls import plain

UNCHANGED = frozenset(
    "device layout pin_memory memory_format generator requires_grad out driver size_average reduce".split()
)
"""Options that change no number, or are deprecated."""
SHOWN = 12
"""Most samples with options of an operator and a floating dtype."""
TRIED = 64
"""Most samples that are tried for them."""
BASES = 3
"""Samples whose options are changed: the first ones whose first tensors differ in their number of dimensions."""
LARGEST = 2**11
"""Most elements of the first tensor of such a sample."""
WORDS = (
    ("none", "mean", "sum", "prod", "amax", "amin", "max"),
    ("constant", "reflect", "replicate", "circular"),
    ("zeros", "border", "reflection"),
    ("ortho", "forward", "backward"),
    ("left", "right"),
    ("tanh", "none"),
    ("floor", "trunc"),
    ("same", "valid"),
    ("ij", "xy"),
    ("bilinear", "nearest", "bicubic", "linear", "trilinear", "area", "nearest-exact"),
    ("fro", "nuc"),
    ("L", "U"),
    ("reduced", "complete", "r"),
    tuple(f"{word}use_mm_for_euclid_dist{end}" for word, end in (("", "_if_necessary"), ("", ""), ("donot_", ""))),
)
"""Groups of words that an option may be."""
SPATIAL = frozenset("kernel_size stride padding dilation output_padding output_size scale_factor size".split())
"""Options with a number for each dimension after batch and channels."""


class _Argument(NamedTuple):
    """Argument of a call: name, place (-1 if by keyword), value, and the type that a signature states."""

    name: str
    place: int
    value: Any
    kind: str


def with_options(info: Any, samples: Sequence[Any]) -> list[Any]:
    """OpInfo's samples, and some of them again with each option changed."""
    bases = dict[tuple[int, int], Any]()
    for sample in samples:
        first = _first(sample.input)
        if first is not None and plain(first) and first.numel() <= LARGEST:
            bases.setdefault((first.dim(), len(sample.args)), sample)
    changed = list(samples)
    for sample in islice(bases.values(), BASES):
        arguments = _arguments(info, sample)
        for argument in arguments:
            changed += (_with(sample, argument, value) for value in _others(argument, sample))
    return changed


class Order:
    """Order in which samples are tried: a random one, or first those that show most options not yet shown."""

    def __init__(self, info: Any, samples: Sequence[Any], seed: int, *, shows: bool) -> None:
        places = range(len(samples))
        self._places = random.Random(seed).sample(places, len(places))  # noqa: S311 - no secret
        self._features = {place: features(info, samples[place]) for place in self._places if shows and samples[place]}
        self._shown: set[str] = set()

    def __iter__(self) -> Iterator[int]:
        remaining = dict(self._features)
        if not remaining:
            yield from self._places
        for _ in range(min(TRIED, len(remaining))):
            place = max(remaining, key=lambda place: len(remaining[place] - self._shown))
            if not remaining.pop(place) - self._shown:
                return
            yield place

    def show(self, place: int) -> None:
        """Counts the options of a sample as shown."""
        self._shown |= self._features.get(place, frozenset())


def features(info: Any, sample: Any) -> frozenset[str]:
    """Facts of a sample's arguments that its results may depend on: dimensions, and the kind of each option's value."""
    return frozenset(f"{name} {word}" for name, _, value, _ in _arguments(info, sample) for word in _kinds(value))


def _first(value: Any) -> Tensor | None:
    """First tensor of an argument, which may be a list."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, Tensor) else None


def _arguments(info: Any, sample: Any) -> list[_Argument]:
    """Arguments of a sample, and the options of the operator's signature that it leaves at their defaults."""
    given = (sample.input, *sample.args)
    parameters: Mapping[str, tuple[str, Any]] = next(
        (
            found
            for found in _signatures(info.op, info.aten_name)
            if len(found) >= len(given) and sample.kwargs.keys() <= found.keys()
        ),
        {},
    )
    names = list(parameters)[: len(given)]
    named = names or [str(place) for place in range(len(given))]
    arguments = [
        _Argument(name, place, value, parameters.get(name, ("", None))[0])
        for place, (name, value) in enumerate(zip(named, given, strict=True))
    ]
    left = {name: default for name, (_, default) in parameters.items() if name not in names} | sample.kwargs
    return arguments + [_Argument(name, -1, value, parameters.get(name, ("", None))[0]) for name, value in left.items()]


@functools.lru_cache(256)
def _signatures(operator: Callable[..., Any], aten: str) -> tuple[dict[str, tuple[str, Any]], ...]:
    """Type and default of each parameter by its name, for each signature of an operator."""
    return tuple(_found_signatures(operator, aten))


def _found_signatures(operator: Callable[..., Any], aten: str) -> Iterator[dict[str, tuple[str, Any]]]:
    with contextlib.suppress(ValueError):  # builtin functions have none
        found = [*inspect.signature(operator).parameters.values()]
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
            defaults = {one.name: None if one.default is one.empty else one.default for one in found}
            yield {one.name: (str(one.annotation), defaults[one.name]) for one in found}
    for name in (aten, getattr(operator, "__name__", "")):
        packet = getattr(torch.ops.aten, name or "_", None)
        for overload in packet.overloads() if packet is not None else ():
            schema = getattr(packet, overload)._schema  # noqa: SLF001 - torch has no public schema
            if not any(argument.is_out for argument in schema.arguments):
                yield {argument.name: (str(argument.type), argument.default_value) for argument in schema.arguments}


def _others(argument: _Argument, sample: Any) -> list[Any]:
    """Other values of an argument."""
    name, place, value, kind = argument
    first = _first(sample.input)
    spatial = max(1, first.dim() - 2) if first is not None else 1
    others: list[Any] = []
    if name in UNCHANGED:
        others = []
    elif isinstance(value, Tensor):
        number = value.numel() and place in {0, 1} and plain(value)
        others = ([value.reshape(-1)[0].item()] if number else []) + ([None] if place else [])
    elif isinstance(value, bool):
        others = [not value]
    elif isinstance(value, str):
        others = [word for group in WORDS if value in group for word in group]
    elif isinstance(value, int | float) and name in SPATIAL and spatial > 1:
        others = [tuple(value + (axis == spatial - 1) for axis in range(spatial)), value + 1]
    elif isinstance(value, int):
        others = [0, 1, 2] if name.endswith("mode") else [-1, 0, 1, 2, 5]
    elif isinstance(value, float):
        others = [-1.5, 0.0, 0.5, 3.0]
    elif isinstance(value, list | tuple) and value and all(isinstance(number, int | float) for number in value):
        changed = (
            [*value[:-1], value[-1] + 1],
            [value[0] + 1, *value[1:]],
            value[: -1 if name.startswith("dim") else None],
        )
        others = [type(value)(numbers) for numbers in changed]
    elif value is None:
        others = _given(name, kind, first, spatial)
    return [other for other in others if type(other) is not type(value) or other != value]


def _given(name: str, kind: str, first: Tensor | None, spatial: int) -> list[Any]:
    """Values of an option that is not given."""
    kind = kind.lower()
    if "tensor" in kind and "list" not in kind and first is not None and first.dim():
        # A weight is of the first tensor's shape, or of one of its dimensions.
        shapes = dict.fromkeys([tuple(first.shape), *((size,) for size in first.shape)])
        return [torch.linspace(0.25, 2.0, torch.Size(shape).numel()).reshape(shape) for shape in shapes]
    if "dtype" in name:
        return [torch.float32, torch.int32] if first is not None and not first.is_floating_point() else []
    if "str" in kind:
        return [word for group in WORDS[:5] for word in group]
    words: list[tuple[bool, list[Any]]] = [
        ("bool" in kind, [True, False]),
        ("int" in kind and "list" not in kind, [0, 1, 3]),
        ("list" in kind or "tuple" in kind, [(0,), (-1,), (0, -1), tuple(range(3, 3 + spatial))]),
        ("float" in kind or "number" in kind or "scalar" in kind, [0.25, 1.5]),
    ]
    return [value for stated, values in words if stated for value in values]


def _with(sample: Any, argument: _Argument, value: Any) -> Any:
    """A copy of a sample with another value of an argument."""
    changed = copy.copy(sample)
    if argument.place == 0:
        changed.input = value
    elif argument.place > 0:
        changed.args = (*sample.args[: argument.place - 1], value, *sample.args[argument.place :])
    else:
        changed.kwargs = {**sample.kwargs, argument.name: value}
    return changed


def _kinds(value: Any) -> Iterator[str]:
    """Kinds of a value, such as ``2d``, ``True``, ``negative``, or ``uneven``."""
    if isinstance(value, Tensor):
        yield f"{value.dim()}d {value.dtype}{'' if value.numel() else ', empty'}"
    elif isinstance(value, bool) or value is None or isinstance(value, str | torch.dtype):
        yield str(value)
    elif isinstance(value, int | float):
        size = str(value) if value in {0, 1} else "fraction" if abs(value) < 1 else "large"
        yield f"{type(value).__name__} {'negative' if value < 0 else size}"
    elif isinstance(value, complex):
        yield "complex"
    elif isinstance(value, list | tuple):
        yield f"{len(value)} uneven" if len({str(element) for element in value}) > 1 else f"{len(value)} even"
        for element in value:
            for kind in _kinds(element):
                yield f"of {kind}"
