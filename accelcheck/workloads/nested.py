"""Tensors nested in containers, dataclasses, and objects such as the caches of language models."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from accelcheck.core.foreign import ForeignCodeError
from accelcheck.devices.torch_names import pytree

Step: TypeAlias = tuple[bool, Any]
"""Step to a part of a value: True for an attribute, False for an item, and its name, key or index."""
Place: TypeAlias = tuple[Step, ...]
"""Steps to a tensor."""


class OwnModelError(ForeignCodeError):
    """Unsuitable model or inputs; the message names the object and a remedy."""


def tensors_of(value: Any) -> Iterator[tuple[Place, Tensor]]:
    """Yields every tensor of a result, with its place in containers, dataclasses, and objects such as caches.

    Raises:
        OwnModelError: It holds something that cannot be compared, such as a text; the message has its path.
    """
    yield from _walk(value, (), set())


def _walk(value: Any, place: Place, above: set[int]) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
        return
    if id(value) in above or value is None:
        return
    children = _children(value)
    if children is None:
        if any(attribute for attribute, _ in place):
            return  # an object may hold anything besides tensors, such as a size
        raise OwnModelError(
            f"{written(place)}: expected tensors, or containers and dataclasses of them; got {type(value).__name__}, "
            "which cannot be compared: check a function that returns the tensors alone"
        )
    for step, child in children:
        yield from _walk(child, (*place, step), above | {id(value)})


def _children(value: Any) -> list[tuple[Step, Any]] | None:
    """Parts of a value with the steps to them; None for a value without parts."""
    if isinstance(value, Mapping):
        return [((False, key), child) for key, child in value.items()]
    if isinstance(value, (tuple, list)):
        return [((False, index), child) for index, child in enumerate(value)]
    if isinstance(value, (str, bytes, bool, int, float, complex, type)) or not hasattr(value, "__dict__"):
        return None
    return [((True, name), child) for name, child in sorted(vars(value).items())]


def written(place: Place) -> str:
    """Steps in Python's notation, such as ``out['cache'].layers[0].keys``."""
    return "out" + "".join(f".{name}" if attribute else f"[{name!r}]" for attribute, name in place)


def at(value: Any, place: Place) -> Any:
    """Part of a value at a place."""
    for attribute, name in place:
        value = getattr(value, name) if attribute else value[name]
    return value


@dataclass(frozen=True)
class Rebuilt:
    """Rebuilds a model's return value, the template, with other tensors at these places."""

    template: Any
    places: Sequence[Place]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Value with these tensors, one for each place."""
        if self.places == [()]:
            return tensors[0]
        leaves, structure = pytree.tree_flatten(self.template)
        if [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)] == [id(at(self.template, p)) for p in self.places]:
            given = iter(tensors)  # compilers follow this
            return pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], structure)
        # A copy that treats each tensor of the template as copied already.
        known = {id(at(self.template, place)): tensor for place, tensor in zip(self.places, tensors, strict=True)}
        return copy.deepcopy(self.template, known)
