"""Gives a user-owned model the random numbers that it draws as inputs, so that all runs have the same ones."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.workloads.probes import quieted

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.workloads.problem import Problem

NUMBERS = "bernoulli multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm".split()
"""Functions of torch that draw. Those of `torch.Tensor`, such as ``normal_``, cannot be replaced while compiled."""
DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()
"""Functions of `torch.nn.functional` that drop nothing in a `Drawing`, as modules of dropout do."""


class _Numbers:
    """State of the replaced functions: `given` numbers to hand out, or a list of `drawn` ones to add to."""

    given: tuple[Tensor, ...] | None = None
    taken = 0
    drawn: list[Tensor] | None = None
    dropped = False


_NUMBERS = _Numbers()


class Drawing(nn.Module):
    """Model with further inputs: the random numbers that it draws, in order. Without them it draws itself.

    Replaces functions of torch in this process, as no mode can that compilers follow; elsewhere they draw as before.
    """

    def __init__(self, model: nn.Module, inputs: int) -> None:
        super().__init__()
        self.model, self.inputs, self.is_given = model, inputs, False
        _replace()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _replace()

    def forward(self, *tensors: Tensor) -> Any:
        if not self.is_given:
            return self.model(*tensors)
        _NUMBERS.given, _NUMBERS.taken = tensors[self.inputs :], 0
        try:
            return self.model(*tensors[: self.inputs])
        finally:
            _NUMBERS.given = None


def draws(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Returns True if a module draws numbers or drops elements by functions, in training or evaluation mode."""
    _replace()
    try:
        with torch.random.fork_rng(devices=[]):
            return bool(_drawn(module, inputs)) or _NUMBERS.dropped
    except Exception:  # noqa: BLE001 - a model may need more than one sample in training
        return False


def given(problem: Problem) -> Problem:
    """Problem of a `Drawing` with its random numbers, from torch's generator; other problems as they are."""
    module = problem.module
    if not isinstance(module, Drawing):
        return problem
    inputs, *further = (
        (*batch, *_drawn(module.model, batch)) for batch in (problem.inputs, *(inputs for inputs, _ in problem.further))
    )
    module.is_given = True
    batches = tuple((batch, target) for batch, (_, target) in zip(further, problem.further, strict=True))
    return dataclasses.replace(problem, inputs=inputs, further=batches)


def _drawn(module: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Numbers that one pass draws, in the mode that draws more."""
    most: list[Tensor] = []
    _NUMBERS.dropped = False
    for training in (True, False):
        _NUMBERS.drawn = []
        own = tuple(value.clone() if isinstance(value, Tensor) else value for value in inputs)
        try:
            with torch.no_grad():
                quieted_copy(module).train(training)(*own)
            most = max(most, _NUMBERS.drawn, key=len)
        finally:
            _NUMBERS.drawn = None
    return most


def quieted_copy(module: nn.Module) -> nn.Module:
    """Copy of a module whose modules of dropout drop nothing."""
    from accelcheck.workloads.problem import Problem

    return quieted(Problem(copy.deepcopy(module), ())).module


def _replace() -> None:
    for owner, names, made in ((torch, NUMBERS, _numbers), (nn.functional, DROPOUTS, _kept)):
        for name in names:
            original = getattr(owner, name)
            if original.__module__ != __name__:
                setattr(owner, name, made(original))


def _numbers(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    like = original.__name__.endswith("_like")

    def numbers(*args: Any, **keywords: Any) -> Tensor:
        if keywords.get("generator") is not None:  # as simulated rounding errors have
            return original(*args, **keywords)
        if _NUMBERS.given is not None:
            value = _NUMBERS.given[_NUMBERS.taken]
            _NUMBERS.taken += 1
            return value.to(keywords.get("dtype") or args[0].dtype) if like else value
        value = original(*args, **keywords)
        if _NUMBERS.drawn is not None:
            _NUMBERS.drawn.append(value.detach().clone())
        return value

    return numbers


def _kept(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kept(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002, FBT001, FBT002
        if _NUMBERS.given is not None:
            return input
        _NUMBERS.dropped |= training and p > 0 and _NUMBERS.drawn is not None
        return original(input, p, training, inplace)

    return kept
