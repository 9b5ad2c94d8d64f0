"""Calls models whose forward pass asks for derivatives, such as forces of an energy or a residual of an equation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelcheck.devices.torch_names import pytree


class Called(NamedTuple):
    """Result of a call, detached; whether it needs gradient mode, and whether it made inputs require gradients."""

    out: Any
    derives: bool
    requires: bool


class Deriving(nn.Module):
    """A module of tensors that may ask for derivatives by its inputs.

    Inputs of `places` require gradients. If it `derives`, it always sees gradient mode. Where gradient mode is off, its
    results are detached. That it makes an input require gradients leaves the caller's tensors as they are.
    """

    def __init__(self, model: nn.Module, places: Sequence[int], *, derives: bool) -> None:
        super().__init__()
        self.model = model
        self._places = frozenset(places)
        self._derives = derives

    def forward(self, *tensors: Tensor) -> Any:
        outside = torch.is_grad_enabled()
        with torch.set_grad_enabled(outside or self._derives):
            inputs = [value if value.requires_grad else value.detach() for value in tensors]
            for place in self._places:
                if not inputs[place].requires_grad:
                    inputs[place].requires_grad_()
            result = self.model(*inputs)
        return result if outside else pytree.tree_map_only(Tensor, Tensor.detach, result)


def called(model: Callable[..., Any], inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Called:
    """Calls a model without gradients, or with them if it asks for derivatives without them in vain."""
    leaves = [leaf for leaf in pytree.tree_leaves((inputs, dict(keywords))) if isinstance(leaf, Tensor)]
    before, derives = [leaf.requires_grad for leaf in leaves], False
    try:
        with torch.no_grad():
            out = model(*inputs, **keywords)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        derives = True
        with torch.enable_grad():
            out = model(*inputs, **keywords)
    requires = before != [leaf.requires_grad for leaf in leaves]
    return Called(pytree.tree_map_only(Tensor, Tensor.detach, out), derives, requires)
