"""Tensors in whatever nests them: containers, dataclasses, and objects such as the caches of language models."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from accelcheck.core.foreign import ForeignCodeError
from accelcheck.devices.torch_names import pytree

Step: TypeAlias = tuple[bool, Any]
"""To a part of a value: whether it is an attribute or an item, and its name, key or index."""
Place: TypeAlias = tuple[Step, ...]
"""The steps to a tensor."""


class OwnModelError(ForeignCodeError):
    """A model or its inputs cannot be checked; the message names the object and says what to do."""


def tensors_of(value: Any) -> Iterator[tuple[Place, Tensor]]:
    """Every tensor of a result, with the steps that lead to it: of containers, dataclasses, and objects such as caches.

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
            return  # of an object, such as a size: what is no tensor there is its own affair
        raise OwnModelError(
            f"{written(place)}: expected tensors, or containers and dataclasses of them; got {type(value).__name__}, which cannot "
            "be compared: check a function that returns the tensors alone"
        )
    for step, child in children:
        yield from _walk(child, (*place, step), above | {id(value)})


def _children(value: Any) -> list[tuple[Step, Any]] | None:
    """Parts of a value with the steps to them; None of what has none."""
    if isinstance(value, Mapping):
        return [((False, key), child) for key, child in value.items()]
    if isinstance(value, (tuple, list)):
        return [((False, index), child) for index, child in enumerate(value)]
    if isinstance(value, (str, bytes, bool, int, float, complex, type)) or not hasattr(value, "__dict__"):
        return None
    return [((True, name), child) for name, child in sorted(vars(value).items())]


def written(place: Place) -> str:
    """Steps as one writes them down, such as ``out['cache'].layers[0].keys``."""
    return "out" + "".join(f".{name}" if attribute else f"[{name!r}]" for attribute, name in place)


def at(value: Any, place: Place) -> Any:
    """What is at a place."""
    for attribute, name in place:
        value = getattr(value, name) if attribute else value[name]
    return value


@dataclass(frozen=True)
class Rebuilt:
    """Makes values like one that a model has given, of other tensors.

    Attributes:
        template: The value.
        places: Where its tensors are.
    """

    template: Any
    places: Sequence[Place]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """A value of these tensors, one for each place."""
        if self.places == [()]:
            return tensors[0]
        leaves, structure = pytree.tree_flatten(self.template)
        if [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)] == [id(at(self.template, p)) for p in self.places]:
            given = iter(tensors)  # compilers follow this
            return pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in leaves], structure)
        # A copy that finds each tensor of the template among what it has copied already.
        known = {id(at(self.template, place)): tensor for place, tensor in zip(self.places, tensors, strict=True)}
        return copy.deepcopy(self.template, known)
