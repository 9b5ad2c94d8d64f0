"""Values that follow from integers and numbers alone: eager's own decide what is cast to an integer or compared."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from accelcheck.devices.torch_names import pytree
from accelcheck.verify import operators
from accelcheck.workloads.base import is_inexact


class Unrounded:
    """Values without rounding errors of tensors that no parameter or input enters, such as the logarithm of a distance.

    A model casts them to indices, or compares them. With rounding errors, one at an edge, where a distance is a power of
    two, would be on either side, and everything that follows with it: so a decision is that of the values themselves.
    """

    def __init__(self) -> None:
        self._plain: Any = WeakTensorKeyDictionary()

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rounded: Callable[..., Any]) -> Any:
        """Calls an operator: `rounded` where results are inexact, and with the values themselves where they decide."""
        name, _, written, _ = operators.facts(func)
        if name == "lift_fresh" and is_inexact(args[0]):  # `torch.tensor` of numbers
            self._plain[args[0]] = args[0].clone()
        if written is None and args and is_inexact(args[0]) and args[0] not in self._plain:
            return rounded(func, args, kwargs)  # most of all calls
        flat, tree = pytree.tree_flatten((args, kwargs))
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn or not all(value in self._plain for value in filter(is_inexact, flat)):
            self._forget(args[place] if place < len(args) else kwargs.get(name) for place, name in written or ())
            return rounded(func, args, kwargs)
        again, named = pytree.tree_unflatten([self._plain.get(v, v) if is_inexact(v) else v for v in flat], tree)
        plain = func(*again, **named)
        if not any(map(is_inexact, leaves := pytree.tree_leaves(plain))):
            return plain
        results = rounded(func, args, kwargs)
        for result, value in zip(pytree.tree_leaves(results), leaves, strict=True):
            if is_inexact(result):
                self._plain[result] = value
        return results

    def _forget(self, written: Iterable[Any]) -> None:
        """Forgets tensors in the memory of others, to which something else was written."""
        for memory in {_memory(value) for value in filter(is_inexact, pytree.tree_leaves(list(written)))}:
            for value in [value for value in self._plain if _memory(value) == memory]:
                del self._plain[value]


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata if value.layout == torch.strided else id(value)  # noqa: SLF001 - the object's
