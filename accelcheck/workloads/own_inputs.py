"""Inputs of somebody's own model: drawn anew, and at other sizes.

A kernel that is wrong for every batch that 8 does not divide is right at a batch of 8.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.plain import text
from accelcheck.workloads.base import is_inexact
from accelcheck.workloads.nested import OwnModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from accelcheck.workloads.problem import Problem

SAMPLE, FEW = 1000, 2
"""Of so many elements of an input, a mask has so few values."""
AXES = 2
"""Number of leading dimensions that are tried: the batch, and the length of a sequence."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Problems of one model at other sizes than its example's.

    Attributes:
        problems: By a label that names the size, such as ``dimension 0 = 9``; the first one matters most.
        refused: Reasons why dimensions keep their sizes; empty where all that were looked for vary.
    """

    problems: Mapping[str, Problem]
    refused: tuple[str, ...] = ()


def redrawn(value: Tensor, generator: torch.Generator) -> Tensor:
    """A floating-point input with its elements in another order; masks and integers as they are."""
    return shuffled(value, generator) if _free(value) else value


def shuffled(value: Tensor, generator: torch.Generator) -> Tensor:
    """A copy with the elements in another order."""
    order = torch.randperm(value.numel(), generator=generator)
    return value.detach().reshape(-1)[order].reshape(value.shape).clone()


def _free(value: Tensor) -> bool:
    """Whether elements may change places: not those of masks, which have few values or infinite ones."""
    return (
        is_inexact(value)
        and bool(value.isfinite().all())
        and len(set(value.detach().reshape(-1)[:SAMPLE].tolist())) > FEW
    )


def found(problem: Problem, seed: int) -> Sizes:
    """Sizes that a model accepts, of the dimensions that all its inputs share.

    Each such dimension of n elements is tried with n + 1, then with n - 1. The first problem has all dimensions that vary at their
    new sizes; in the second one the first dimension has one element. Rows beyond the last one repeat the first ones, and
    floating-point inputs are shuffled, so that no row equals another.

    Args:
        problem: At the example's sizes.
        seed: Decides the order of the shuffled elements.
    """
    shapes = [value.shape for value in problem.inputs if isinstance(value, Tensor) and value.dim()]
    shared = min(map(len, shapes), default=0)
    refused = [] if shared else ["inputs have no dimension"]
    new: dict[int, int] = {}
    for axis in range(min(shared, AXES)):
        if len(present := {shape[axis] for shape in shapes}) > 1:
            refused.append(f"dimension {axis} differs between inputs: {', '.join(map(str, sorted(present)))}")
            continue
        (size,) = present
        raised = ""
        for other in (size + 1, size - 1):
            raised = raised or "it has one element" if other < 1 else _raised(resized(problem, {axis: other}, seed))
            if not raised:
                new[axis] = other
                break
        else:
            refused.append(f"dimension {axis} of {size} cannot vary: {raised}")
    tried = [new, *([{0: 1}] if 0 in new and shapes[0][0] > 1 else [])]
    problems = {label(sizes): resized(problem, sizes, seed) for sizes in tried if sizes}
    accepted = {name: other for name, other in problems.items() if not _raised(other)}
    return Sizes(accepted, tuple(refused))


def label(sizes: Mapping[int, int]) -> str:
    """Names the sizes of some dimensions."""
    return ", ".join(f"dimension {axis} = {size}" for axis, size in sizes.items())


def resized(problem: Problem, sizes: Mapping[int, int], seed: int) -> Problem:
    """The problem with dimensions of its inputs at other sizes, without a target."""
    generator = torch.Generator().manual_seed(seed)

    def changed(value: Tensor) -> Tensor:
        for axis, size in sizes.items():
            value = value.index_select(axis, torch.arange(size) % value.shape[axis])
        return redrawn(value, generator)

    inputs = tuple(changed(value) if isinstance(value, Tensor) and value.dim() else value for value in problem.inputs)
    return _untrained(problem, inputs)


def named(problem: Problem, inputs: Iterable[tuple[Tensor, ...]]) -> Sizes:
    """Sizes that the owner of a model gives, by the example inputs of each.

    Raises:
        OwnModelError: The model raises with some of them.
    """
    problems = {f"sizes[{number}]": _untrained(problem, tensors) for number, tensors in enumerate(inputs)}
    for name, other in problems.items():
        if raised := _raised(other):
            raise OwnModelError(f"{name}: the model raised {raised}")
    return Sizes(problems)


def _untrained(problem: Problem, inputs: tuple[Any, ...]) -> Problem:
    return dataclasses.replace(problem, inputs=inputs, target=None, loss=None, optimizer=None, further=())


def _raised(problem: Problem) -> str:
    """Returns what a copy of the model raises, in a line; empty where it runs."""
    module = copy.deepcopy(problem.module).eval()
    inputs = (value.clone() if isinstance(value, Tensor) else value for value in problem.inputs)
    try:
        with torch.no_grad():
            module(*inputs)
    except Exception as error:  # noqa: BLE001 - a model may raise anything
        return f"{type(error).__name__}: {next(iter(text(error).splitlines()), '')}"
    return ""
