"""Calls models whose forward pass asks for derivatives, such as forces of an energy or a residual of an equation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.devices.torch_names import pytree


class Deriving(nn.Module):
    """A module of tensors that always sees gradient mode, and requires gradients of the inputs at `places`.

    Where gradient mode is off, its results are detached.
    """

    def __init__(self, model: nn.Module, places: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self._places = tuple(places)

    def forward(self, *tensors: Tensor) -> Any:
        outside = torch.is_grad_enabled()
        inputs = list(tensors)
        with torch.enable_grad():
            for place in self._places:
                if not inputs[place].requires_grad:
                    inputs[place] = inputs[place].detach().requires_grad_()
            result = self.model(*inputs)
        return result if outside else pytree.tree_map_only(Tensor, Tensor.detach, result)


def called(model: Callable[..., Any], inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, bool]:
    """Returns a call's result without gradients, and whether the model asks for derivatives, so that it needs them."""
    try:
        with torch.no_grad():
            return model(*inputs, **keywords), False
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        out = model(*inputs, **keywords)
    return pytree.tree_map_only(Tensor, Tensor.detach, out), True
