"""Gives a user-owned model the random numbers that it draws as inputs, so that all runs have the same ones."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from accelcheck.devices import torch_names
from accelcheck.devices.torch_names import dropout_base
from accelcheck.workloads.base import duplicate
from accelcheck.workloads.probes import quieted
from accelcheck.workloads.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NUMBERS = "bernoulli multinomial normal poisson rand rand_like randint randint_like randn randn_like randperm".split()
"""Functions of torch that draw. Methods of tensors, such as ``normal_``, cannot be replaced in compiled code."""
DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()
"""Functions of `torch.nn.functional` that drop nothing in a `Drawing`, as modules of dropout do."""

_OWN = ("torch", "accelcheck")
"""Packages whose modules keep the functions that they imported by name."""


class _Numbers:
    """Numbers that the replaced functions hand out, or a list that they add theirs to."""

    given: tuple[Tensor, ...] | None = None
    taken = 0
    drawn: list[Tensor] | None = None
    dropped = needed = False


_NUMBERS = _Numbers()


class Drawing(nn.Module):
    """Model with further inputs: the random numbers that it draws, in order. Until they are given it draws itself.

    Functions of torch are replaced in this process, since compilers follow no mode; elsewhere they draw as before.
    """

    def __init__(self, model: nn.Module, inputs: int) -> None:
        super().__init__()
        self.model, self.inputs, self.is_given = model, inputs, False
        _replace(needed=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _replace(needed=True)

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
    _replace(needed=_NUMBERS.needed)
    try:
        with torch.random.fork_rng(devices=[]):
            return bool(_drawn(module, inputs)) or _NUMBERS.dropped
    except Exception:  # noqa: BLE001 - a model may need more than one sample in training
        return False
    finally:
        if not _NUMBERS.needed:  # scripts know torch's own functions alone
            _exchange(
                {f: f.__wrapped__ for owner, name, _ in _REPLACED if hasattr(f := getattr(owner, name), "__wrapped__")}
            )


def apart(problem: Problem) -> Problem:
    """Lets dropout return copies where the model writes to its results.

    Dropout that drops nothing returns its input, which the backward pass may need as it was.
    """
    dropping = any(map(_drops, problem.module.modules()))
    if not dropping or not _overwrites(quieted(Problem(duplicate(problem.module), problem.inputs))):
        return problem
    module = duplicate(problem.module)
    for part in filter(_drops, module.modules()):
        part.register_forward_hook(_copy)
    return dataclasses.replace(problem, module=module)


def _drops(part: nn.Module) -> bool:
    return isinstance(part, dropout_base) and part.p > 0 and not part.inplace


def _overwrites(problem: Problem) -> bool:
    """Returns True if a forward pass in training writes to a tensor that the backward pass needs as it was.

    Changes the problem's module.
    """
    module = problem.module.train()
    inputs = [value.detach().clone() if isinstance(value, Tensor) else value for value in problem.inputs]
    kept: list[tuple[Tensor, int]] = []

    def keep(value: Tensor) -> Tensor:
        kept.append((value, value._version))  # noqa: SLF001 - torch has no public name for it
        return value

    try:  # no backward pass: this process may fork, and autograd's threads do not follow
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), saved_tensors_hooks(keep, lambda value: value):
            module(*inputs)
    except Exception:  # noqa: BLE001 - a model may raise anything
        return False
    return any(value._version != version for value, version in kept)  # noqa: SLF001


def _copy(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.clone() if output is inputs[0] else output


def given(problem: Problem) -> Problem:
    """Problem of a `Drawing` with its random numbers, from torch's generator; other problems as they are."""
    module = problem.module
    if not isinstance(module, Drawing):
        return problem
    inputs = (*problem.inputs, *_drawn(module.model, problem.inputs))
    further = tuple(((*batch, *_drawn(module.model, batch)), target) for batch, target in problem.further)
    module.is_given = True
    return dataclasses.replace(problem, inputs=inputs, further=further)


def _drawn(module: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Numbers that one pass draws, in the mode that draws more."""
    found: list[list[Tensor]] = []
    _NUMBERS.dropped = False
    try:
        for training in (True, False):
            found.append([])
            _NUMBERS.drawn = found[-1]
            own = quieted(Problem(*copy.deepcopy((module, inputs))))
            with torch.no_grad():
                own.module.train(training)(*own.inputs)
    finally:
        _NUMBERS.drawn = None
    return max(found, key=len)


def _replace(*, needed: bool) -> None:
    if needed and not _NUMBERS.needed:
        torch_names.dynamo_functions()  # it takes these names' functions for operators: let it see torch's own first
    _NUMBERS.needed = needed
    _exchange(
        {
            original: functools.wraps(original, (), ())(made(original))
            for owner, name, made in _REPLACED
            if not hasattr(original := getattr(owner, name), "__wrapped__")
        }
    )


def _exchange(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Put other functions in the place of torch's, also where a module outside of torch imported them by name."""
    by_identity = {id(old): new for old, new in functions.items()}
    outside = [module for name, module in tuple(sys.modules.items()) if name.partition(".")[0] not in _OWN]
    for module in (torch, nn.functional, *outside) if functions else ():
        if isinstance(module, ModuleType):  # libraries put other things there too
            held = {name: by_identity[id(v)] for name, v in tuple(vars(module).items()) if id(v) in by_identity}
            vars(module).update(held)


def _numbers(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    like = original.__name__.endswith("_like")

    def numbers(*args: Any, **keywords: Any) -> Tensor:
        own = keywords.get("generator") is not None  # as simulated rounding errors have
        if _NUMBERS.given is not None and not own:
            value = _NUMBERS.given[_NUMBERS.taken]
            _NUMBERS.taken += 1
            return value.to(keywords.get("dtype") or args[0].dtype) if like else value
        value = original(*args, **keywords)
        if _NUMBERS.drawn is not None and not own:
            _NUMBERS.drawn.append(value.detach().clone())
        return value

    return numbers


def _kept(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kept(  # torch's own signature
        input: Tensor,  # noqa: A002
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002
        inplace: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        if _NUMBERS.given is not None:
            return input
        if _NUMBERS.drawn is not None and training and p > 0:
            _NUMBERS.dropped = True
        return original(input, p, training, inplace)

    return kept


_REPLACED = [*((torch, name, _numbers) for name in NUMBERS), *((nn.functional, name, _kept) for name in DROPOUTS)]
