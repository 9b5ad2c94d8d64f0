"""Switches random modules off, where a case compares numbers: two implementations draw other masks, and both are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from accelcheck.devices.torch_names import dropout_base

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcheck.workloads.base import Problem


def random_modules(module: nn.Module) -> dict[str, str]:
    """The modules that draw random numbers in training: what each is, by its name."""
    return {name or "the module itself": str(part) for name, part, _ in _dropping(module)}


def quieted(problem: Problem) -> Problem:
    """The same problem, its random modules changed in place so that they drop nothing."""
    for _, part, rate in _dropping(problem.module):
        setattr(part, rate, 0.0)
    return problem


def _dropping(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Name, module, and the attribute that holds its rate, of each that drops anything."""
    for name, part in module.named_modules():
        rate = "p" if isinstance(part, dropout_base) else "dropout"
        if isinstance(part, (dropout_base, nn.MultiheadAttention, nn.RNNBase)) and getattr(part, rate) > 0:
            yield name, part, rate
