"""Whether a workload's maker gives the same problem for the same seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accelcheck.workloads.base import Problem


def differing(make: Callable[[], Problem]) -> list[str]:
    """Names of the parameters, buffers, inputs and target, such as ``input[0]``, that two calls make differently."""
    first, second = _tensors(make()), _tensors(make())
    return [
        name
        for name in [*first, *(second.keys() - first.keys())]
        if name not in first or name not in second or not _same(first[name], second[name])
    ]


def _tensors(problem: Problem) -> Mapping[str, Tensor]:
    given = {f"input[{index}]": value for index, value in enumerate(problem.inputs)} | {"target": problem.target}
    named = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    return {**named, **dict(problem.module.named_parameters()), **dict(problem.module.named_buffers())}


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.allclose(one.detach(), other.detach(), rtol=0.0, atol=0.0, equal_nan=True))
