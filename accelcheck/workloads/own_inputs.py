"""Redraws and resizes inputs of a user-owned model: a kernel may be wrong only for batches not divisible by 8."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from accelcheck.core.plain import text
from accelcheck.devices.layouts import entries, sparse
from accelcheck.devices.torch_names import pytree
from accelcheck.workloads.base import duplicate, is_inexact
from accelcheck.workloads.nested import OwnModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.workloads.problem import Problem
    from accelcheck.workloads.signatures import Target

SAMPLE, FEW = 1000, 2
"""Number of elements sampled from an input, and most distinct values of a mask among them."""
AXES = 2
"""Number of leading dimensions that are resized: batch and sequence length."""
EXTENT = 3
"""Most elements that are added: techniques for all sizes warm up with up to 2 more than n + 1."""


@dataclasses.dataclass(frozen=True)
class OtherProblems:
    """Problems of one model at other sizes than its example's.

    Attributes:
        problems: Problems by a label of the size, such as ``dimension 0 = 9``; the first one matters most.
        growing: Dimensions of more than one element that may grow; compilers specialise on those of one.
        refused: Reasons why tried dimensions keep their sizes.
    """

    problems: Mapping[str, Problem]
    growing: tuple[int, ...] = ()
    refused: tuple[str, ...] = ()


def found_sizes(problem: Problem, seed: int) -> OtherProblems:
    """Finds sizes that a model accepts, for the dimensions that all its inputs share.

    Each such dimension of n elements is tried with n + 1 and n + `EXTENT`, or else with n - 1. The first problem has
    all dimensions that vary at n + 1 or n - 1; in the second one the first dimension has one element. Added rows repeat
    the first ones, and floating-point inputs are shuffled, so that no row equals another. While a dimension is tried,
    the others have one element if the model accepts that, which saves time. If they cannot all vary at once, each does
    alone. The seed decides the order of the shuffled elements.
    """
    shapes = [value.shape for value in problem.inputs if isinstance(value, Tensor) and value.dim()]
    shared = min(map(len, shapes), default=0)
    refused = [] if shared else ["inputs have no dimension"]
    present = {axis: {shape[axis] for shape in shapes} for axis in range(min(shared, AXES))}
    sizes = {axis: next(iter(extents)) for axis, extents in present.items() if len(extents) == 1}

    ones: dict[int, int] = {}

    def raised(axis: int, size: int) -> str:
        small = ones and _raised(resized(problem, {**ones, axis: size}, seed))
        return _raised(resized(problem, {axis: size}, seed)) if small or not ones else ""

    ones |= {axis: 1 for axis, size in sizes.items() if size > 1 and not raised(axis, 1)}
    new: dict[int, int] = {}
    growing: list[int] = []
    for axis, extents in present.items():
        if axis not in sizes:
            refused.append(f"dimension {axis} differs between inputs: {', '.join(map(str, sorted(extents)))}")
            continue
        size = sizes[axis]
        if not (reason := raised(axis, size + 1)):
            new[axis] = size + 1
            growing += [axis] * (size > 1 and not raised(axis, size + EXTENT))
        elif size > 1 and not raised(axis, size - 1):
            new[axis] = size - 1
        else:
            refused.append(f"dimension {axis} of {size} cannot vary: {reason}")

    def accepted(tried: Iterable[Mapping[int, int]]) -> dict[str, Problem]:
        problems = {label(changed): _untrained(resized(problem, changed, seed)) for changed in tried if changed}
        return {name: other for name, other in problems.items() if not _raised(other)}

    together = accepted([new])
    apart = accepted({axis: size} for axis, size in new.items()) if new and not together else {}
    # A square matrix plus its transpose takes one row, by broadcasting, and none more than it has.
    alone = 0 in new and 0 in ones and (len(new) == 1 or not _raised(resized(problem, {0: new[0]}, seed)))
    single = accepted([{0: 1}] if alone else [])
    if not together or (growing and _raised(grown(problem, growing, EXTENT, seed))):
        growing = []
    return OtherProblems({**together, **apart, **single}, tuple(growing), tuple(refused))


def grown(problem: Problem, axes: Iterable[int], extent: int, seed: int) -> Problem:
    """Adds `extent` elements to dimensions of the inputs, and of targets of the same size there."""
    shape = next(value.shape for value in problem.inputs if isinstance(value, Tensor) and value.dim())
    return resized(problem, {axis: shape[axis] + extent for axis in axes}, seed)


def redrawn(value: Tensor, generator: torch.Generator) -> Tensor:
    """Shuffles a floating-point input, or the entries of a sparse one; returns masks and integers unchanged."""
    if not sparse(value):
        return shuffled(value, generator) if _free(value) else value
    copied = value.clone()
    entries(copied).copy_(redrawn(entries(value), generator))
    return copied


def shuffled(value: Tensor, generator: torch.Generator) -> Tensor:
    """Copies a tensor with its elements in another order."""
    order = torch.randperm(value.numel(), generator=generator)
    return value.detach().reshape(-1)[order].reshape(value.shape).clone()


def _free(value: Tensor) -> bool:
    """Returns True if elements may change places: not in masks, which have few values or infinite ones."""
    return (
        is_inexact(value)
        and bool(value.isfinite().all())
        and len(set(value.detach().reshape(-1)[:SAMPLE].tolist())) > FEW
    )


def label(sizes: Mapping[int, int]) -> str:
    """Names the sizes of some dimensions."""
    return ", ".join(f"dimension {axis} = {size}" for axis, size in sizes.items())


def resized(problem: Problem, sizes: Mapping[int, int], seed: int) -> Problem:
    """Resizes dimensions of the inputs, and of targets of the same size there."""
    generator = torch.Generator().manual_seed(seed)

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        for axis, size in () if sparse(value) else sizes.items():
            value = value.index_select(axis, torch.arange(size) % value.shape[axis])
        return redrawn(value, generator)

    def followed(target: Target, inputs: Sequence[Any]) -> Target:
        shape = next(value.shape for value in inputs if isinstance(value, Tensor) and value.dim())

        def one(target: Tensor) -> Tensor:
            for axis, size in sizes.items():
                if target.dim() > axis and target.shape[axis] == shape[axis]:
                    target = target.index_select(axis, torch.arange(size) % shape[axis])
            return target

        return cast("Target", pytree.tree_map_only(Tensor, one, target))

    batches = ((problem.inputs, problem.target), *problem.further)
    (inputs, target), *further = ((tuple(map(changed, inputs)), followed(target, inputs)) for inputs, target in batches)
    return dataclasses.replace(problem, inputs=inputs, target=target, further=tuple(further))


def named_sizes(problem: Problem, inputs: Iterable[tuple[Tensor, ...]]) -> OtherProblems:
    """Makes problems of sizes given by example inputs; raises `OwnModelError` if the model raises with some of them."""
    problems = {
        f"sizes[{number}]": _untrained(dataclasses.replace(problem, inputs=tensors))
        for number, tensors in enumerate(inputs)
    }
    for name, other in problems.items():
        if raised := _raised(other):
            raise OwnModelError(f"{name}: the model raised {raised}")
    return OtherProblems(problems)


def _untrained(problem: Problem) -> Problem:
    return dataclasses.replace(problem, target=None, loss=None, optimizer=None, further=())


def _raised(problem: Problem) -> str:
    """Returns a line about an exception of a copy of the model or of its loss; empty if they run."""
    module = duplicate(problem.module).eval()
    inputs = (value.clone() if isinstance(value, Tensor) else value for value in problem.inputs)
    try:
        with torch.no_grad():
            out = module(*inputs)
            if problem.loss is not None and problem.target is not None:
                problem.loss(out, problem.target)
    except Exception as error:  # noqa: BLE001 - a model may raise anything
        return f"{type(error).__name__}: {next(iter(text(error).splitlines()), '')}"
    return ""
