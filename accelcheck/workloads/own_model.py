"""Workloads from models of other people: any module or function with example inputs, in whatever structure it takes and gives them.

The model stays the caller's: each problem has a copy. Draw 0 has the caller's parameters and inputs; further draws shuffle the
elements of each parameter and of each floating-point input, which keeps their sizes, ranges and distributions.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode, stable_seed
from accelcheck.core.registry import unknown
from accelcheck.devices.torch_names import pytree
from accelcheck.workloads.base import Loss, OptimizerMaker, Problem, Workload, flatten
from accelcheck.workloads.inspection import found_traits, without_gradient
from accelcheck.workloads.traits import TRAITS

Step: TypeAlias = tuple[bool, Any]
"""To a part of a value: whether it is an attribute or an item, and its name, key or index."""
SAMPLE, FEW = 1000, 2
"""Of so many elements of an input, a mask has so few values."""
NAME = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
"""Pattern of a workload's name, which is part of case ids."""


class OwnModelError(ValueError):
    """A model or its inputs cannot be checked; the message names the object and says what to do."""


def workload_of(
    model: Callable[..., Any],
    inputs: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    name: str = "model",
    loss: Loss | None = None,
    target: Tensor | None = None,
    optimizer: OptimizerMaker | None = None,
    steps: int = 4,
    traits: frozenset[str] | None = None,
) -> Workload:
    """A workload from a model and example inputs.

    Args:
        model: A module, or a function of tensors; on the CPU, in FP32. It is copied for each problem, and never changed.
        inputs: Its positional arguments: tensors, and whatever nests tensors and is registered with torch's pytree.
        keywords: Its keyword arguments.
        name: Part of case ids: small letters and digits, with points and dashes between.
        loss: ``loss(output, target)`` returns a 0-D tensor. With `target` and `optimizer`, for mode ``train``.
        target: Second argument of `loss`.
        optimizer: Makes an optimizer of a list of parameters.
        steps: Number of optimizer steps.
        traits: As `Workload.traits`; found by inspection unless given.

    Raises:
        OwnModelError: It cannot be checked: no tensor goes in or comes out, something is not on the CPU, a copy cannot be made.
        UnknownNameError: A trait does not exist.
    """
    if not NAME.fullmatch(name):
        raise OwnModelError(f"name {name!r}: expected small letters and digits, with points and dashes between")
    for trait in traits or ():
        if trait not in TRAITS:
            raise unknown("trait", trait, sorted(TRAITS))
    if not isinstance(inputs, tuple):
        raise OwnModelError(
            f"inputs: expected a tuple of the positional arguments, got {type(inputs).__name__}; for one argument give (x,)"
        )
    trains = [part for part in (loss, target, optimizer) if part is not None]
    if len(trains) not in {0, 3}:
        raise OwnModelError("training needs a loss, a target and an optimizer: give all three, or none")
    module, flat = _adapted(model, inputs, keywords or {})
    _check_host(module, flat)
    problem = Problem(module, flat, target, loss, optimizer, steps)
    seen = frozenset(found_traits(_copied(problem))) if traits is None else traits
    idle = without_gradient(_copied(problem))
    return Workload(
        name,
        f"{_title(model)} with {sum(parameter.numel() for parameter in module.parameters()):,} parameters.",
        Redrawn(problem, stable_seed(name)),
        modes=frozenset(_modes(problem)),
        traits=seen | ({"training"} if trains else set()),
        idle=idle,
        given=True,
    )


@dataclass(frozen=True)
class Redrawn:
    """Makes the problems of a model of other people: see the module.

    Attributes:
        problem: The caller's, which is copied.
        seed: Of draw 0.
    """

    problem: Problem
    seed: int

    def __call__(self, generator: torch.Generator, extent: int) -> Problem:
        """As `Workload.make`."""
        del extent
        problem = _copied(self.problem)
        if generator.initial_seed() == self.seed:
            return problem
        with torch.no_grad():
            for parameter in problem.module.parameters():
                parameter.copy_(_shuffled(parameter, generator))
        inputs = tuple(_shuffled(value, generator) if _free(value) else value for value in problem.inputs)
        return dataclasses.replace(problem, inputs=inputs)


def _shuffled(value: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(value.numel(), generator=generator)
    return value.detach().reshape(-1)[order].reshape(value.shape).clone()


def _free(value: Any) -> bool:
    """Whether elements may change places: not those of masks, which have few values or infinite ones."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and bool(value.isfinite().all())
        and len(set(value.detach().reshape(-1)[:SAMPLE].tolist())) > FEW
    )


class Adapted(nn.Module):
    """A model as a module of tensors alone: takes the tensors of its arguments in order, gives those of its result.

    Args:
        model: A module or a function.
        arguments: Its positional and keyword arguments; what is no tensor in them stays as it is.
        places: Where the tensors are in its result: see `tensors_of`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
        places: Sequence[tuple[Step, ...]],
    ) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = pytree.tree_flatten(arguments)
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._inputs = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._outputs = list(places)

    def forward(self, *tensors: Tensor) -> Any:
        leaves = list(self._constants)
        for place, tensor in zip(self._inputs, tensors, strict=True):
            leaves[place] = tensor
        inputs, keywords = pytree.tree_unflatten(leaves, self._structure)
        result = self.model(*inputs, **keywords)
        # Steps that were found once, and no search: compilers follow these.
        out = tuple(_at(result, place) for place in self._outputs)
        return out[0] if len(out) == 1 else out


def tensors_of(value: Any) -> Iterator[tuple[tuple[Step, ...], Tensor]]:
    """Every tensor of a result, with the steps that lead to it: of containers, dataclasses, and objects such as caches.

    Raises:
        OwnModelError: It holds something that cannot be compared, such as a text; the message has its path.
    """
    yield from _walk(value, (), set())


def _walk(value: Any, place: tuple[Step, ...], above: set[int]) -> Iterator[tuple[tuple[Step, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
        return
    if id(value) in above or value is None:
        return
    children = _children(value)
    if children is None:
        if any(attribute for attribute, _ in place):
            return  # of an object, such as a size: what is no tensor there is its own affair
        raise OwnModelError(
            f"{written(place)}: expected tensors, or containers and dataclasses of them; got {type(value).__name__}, which cannot "
            "be compared: check a function that returns the tensors alone"
        )
    for step, child in children:
        yield from _walk(child, (*place, step), above | {id(value)})


def _children(value: Any) -> list[tuple[Step, Any]] | None:
    """Parts of a value with the steps to them; None of what has none."""
    if isinstance(value, Mapping):
        return [((False, key), child) for key, child in value.items()]
    if isinstance(value, (tuple, list)):
        return [((False, index), child) for index, child in enumerate(value)]
    if isinstance(value, (str, bytes, bool, int, float, complex, type)) or not hasattr(value, "__dict__"):
        return None
    return [((True, name), child) for name, child in sorted(vars(value).items())]


def written(place: tuple[Step, ...]) -> str:
    """Steps as one writes them down, such as ``out['cache'].layers[0].keys``."""
    return "out" + "".join(f".{name}" if attribute else f"[{name!r}]" for attribute, name in place)


def _at(value: Any, place: tuple[Step, ...]) -> Any:
    for attribute, name in place:
        value = getattr(value, name) if attribute else value[name]
    return value


def _adapted(
    model: Callable[..., Any], inputs: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model itself where it takes tensors by position and gives tensors; else an `Adapted` one. And the flat inputs."""
    if not callable(model):
        raise OwnModelError(f"model: expected a module or a function, got {type(model).__name__}")
    tensors = tuple(leaf for leaf in pytree.tree_leaves((inputs, dict(keywords))) if isinstance(leaf, Tensor))
    if not tensors:
        raise OwnModelError("inputs: expected tensors among the arguments, got none")
    tried = _duplicate(model, "model")
    if isinstance(tried, nn.Module):
        tried.eval()
    try:
        with torch.no_grad():
            out = tried(*_duplicate(inputs, "inputs"), **_duplicate(dict(keywords), "keywords"))
    except Exception as error:
        raise OwnModelError(f"model: raised {type(error).__name__} with the inputs given: {error}") from error
    places = [place for place, _ in tensors_of(out)]
    if not places:
        raise OwnModelError(f"out: expected tensors, got none in {type(out).__name__}")
    if isinstance(model, nn.Module) and not keywords and len(tensors) == len(inputs) and _flat(out):
        return model, tensors
    return Adapted(model, (inputs, dict(keywords)), places), tensors


def _flat(out: Any) -> bool:
    try:
        return isinstance(out, (Tensor, tuple, list, dict)) and all(True for _ in flatten(out))
    except TypeError:
        return False


def _check_host(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    named = [*module.named_parameters(), *module.named_buffers()]
    named += [(f"input[{index}]", value) for index, value in enumerate(inputs)]
    for name, tensor in named:
        if tensor.device.type != "cpu" or (tensor.is_floating_point() and tensor.dtype != torch.float32):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise OwnModelError(
                f"{name}: expected it on the CPU in float32, got {dtype} on {tensor.device}: accelcheck moves and casts copies"
            )


def _duplicate(value: Any, what: str) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise OwnModelError(f"{what}: cannot be copied: {type(error).__name__}: {error}") from error


def _copied(problem: Problem) -> Problem:
    inputs = tuple(value.detach().clone() for value in problem.inputs)
    return dataclasses.replace(problem, module=_duplicate(problem.module, "model"), inputs=inputs)


def _modes(problem: Problem) -> Iterator[Mode]:
    yield Mode.FORWARD
    leaves = [value for value in problem.inputs if value.is_floating_point()]
    if leaves or any(parameter.requires_grad for parameter in problem.module.parameters()):
        yield Mode.BACKWARD
    yield Mode.SPEED
    if problem.loss is not None:
        yield from (Mode.TRAIN, Mode.TRAIN_SPEED)


def _title(model: Callable[..., Any]) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", type(model).__name__)
