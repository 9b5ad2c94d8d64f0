"""Targets of user-owned models: a tensor, or several in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accelcheck.devices.torch_names import pytree
from accelcheck.workloads.nested import OwnModelError
from accelcheck.workloads.signatures import Target, tensors_in

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Structure:
    """Structure of a target of several tensors, and the numbers and texts beside them; None is in a tensor's place."""

    containers: Any
    others: tuple[Any, ...]
    tensors: frozenset[int]

    def __call__(self, target: Target) -> Any:
        """Target as its owner gave it, of tensors in order."""
        given = iter(tensors_in(target))
        leaves = [next(given) if place in self.tensors else other for place, other in enumerate(self.others)]
        return pytree.tree_unflatten(leaves, self.containers)


def taken_apart(target: Any, where: str) -> tuple[Target, Structure | None]:
    """Returns the tensors of a target, and its structure unless it is one tensor or None.

    Raises:
        OwnModelError: It has no tensor, or something that is neither a tensor, a number nor a text.
    """
    if target is None or isinstance(target, Tensor):
        return target, None
    leaves, containers = pytree.tree_flatten(target)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise OwnModelError(
                f"{where}: target: expected tensors, numbers and texts in tuples, lists and dicts, got "
                f"{type(leaf).__name__}"
            )
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    if not tensors:
        raise OwnModelError(
            f"{where}: target: expected a tensor, or tensors in a container, got {type(target).__name__}"
        )
    others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    places = frozenset(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return tensors, Structure(containers, others, places)


def check_alike(structures: Sequence[Structure | None]) -> None:
    """Raises `OwnModelError` if the target of a batch differs from the first one's in more than its tensors."""
    for number, structure in enumerate(structures):
        if structure != structures[0]:
            raise OwnModelError(
                f"batch {number}: target: expected containers, numbers and texts as in batch 0: one loss sees them all"
            )
