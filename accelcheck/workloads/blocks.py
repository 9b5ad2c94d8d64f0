"""Blocks of a model: the list of equal parts that it calls in turn, under any name."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def blocks_of(module: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """Returns the list `blocks`, or else the longest list of two or more modules of one class with parameters."""
    own = getattr(module, "blocks", None)
    if isinstance(own, nn.ModuleList):
        return own
    lists = [part for part in module.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and _equal(part)]
    return max(lists, key=len, default=None)


def _equal(parts: nn.ModuleList | nn.Sequential) -> bool:
    kinds = {type(part) for part in parts}
    return len(parts) > 1 and len(kinds) == 1 and all(any(True for _ in part.parameters()) for part in parts)


@contextlib.contextmanager
def called_twice(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Calls every block of a module twice inside a context, and uses the second result.

    Checkpointing calls blocks again: one that changes its arguments, such as a cache, gives another result then.

    Yields:
        Blocks called with activations first, in order, filled as the module runs. Tables called with indices, such as a
        recommender's, are left out: there is nothing before them to checkpoint.
    """
    seen: list[nn.Module] = []

    def twice(block: nn.Module, forward: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_floating_point():
            seen.append(block)
        forward(*inputs, **keywords)
        return forward(*inputs, **keywords)

    blocks = list(blocks_of(module) or ())
    for block in blocks:
        block.forward = functools.partial(twice, block, block.forward)
    try:
        yield seen
    finally:
        for block in blocks:
            del block.forward
