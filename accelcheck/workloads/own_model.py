"""Makes workloads from user-owned models: any module or function with example inputs, of any nesting.

Each problem has a copy of the model. Draw 0 has the caller's parameters and inputs; further draws shuffle the elements
of each parameter and of each floating-point input, which keeps their sizes, ranges and distributions.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelcheck.core.case import DTYPES, Mode, stable_seed
from accelcheck.core.registry import unknown
from accelcheck.devices.layouts import entries
from accelcheck.devices.torch_names import pytree
from accelcheck.workloads import own_derivatives, own_inputs, own_random
from accelcheck.workloads.base import Batch, OptimizerMaker, Problem, Workload, duplicate, in_dtype, is_inexact
from accelcheck.workloads.dispatch import layer_by_layer
from accelcheck.workloads.inspection import alike, found_traits
from accelcheck.workloads.nested import OwnModelError, Place, Rebuilt, at, tensors_of
from accelcheck.workloads.own_targets import Structure, check_alike, taken_apart
from accelcheck.workloads.own_task import Metric, OwnTask
from accelcheck.workloads.problem import TRAITS, OtherSizes
from accelcheck.workloads.signatures import Target, tensors_in

STEPS = 4
"""Default number of optimizer steps of a training."""
NAME = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
"""Pattern of a workload's name, which is part of case ids."""


def workload_of(
    model: Callable[..., Any],
    inputs: tuple[Any, ...] = (),
    keywords: Mapping[str, Any] | None = None,
    *,
    name: str = "model",
    loss: Callable[..., Tensor] | None = None,
    target: Any = None,
    batches: Iterable[Any] | None = None,
    optimizer: OptimizerMaker | None = None,
    steps: int = STEPS,
    sizes: Sequence[Any] | None = None,
    estimators: Iterable[str] = (),
    traits: frozenset[str] | None = None,
) -> Workload:
    """Makes a workload from a model and example inputs.

    Args:
        model: Module or function of tensors, on the CPU, in FP32. It is copied for each problem, and never changed.
        inputs: Positional arguments: tensors, and nested structures of tensors that torch's pytree knows.
        keywords: Keyword arguments.
        name: Part of case ids: small letters and digits, with points and dashes between.
        loss: Function ``loss(output, target)`` of the model's output that returns a 0-D tensor. With `optimizer`, for
            mode ``train``.
        target: Second argument of `loss`: a tensor, or tensors in tuples, lists and dicts.
        batches: Pairs of input and target, as of a `DataLoader`, in place of `inputs`, `keywords` and `target`; one
            optimizer step each, cyclically; at most `steps` are taken. An input is a tensor, a tuple of arguments or a
            mapping of keyword arguments. A batch that is a mapping is an input without a target.
        optimizer: Function that makes an optimizer of a list of parameters.
        steps: Number of optimizer steps.
        sizes: Example inputs of other sizes, each a tuple as `inputs` or a mapping as `keywords`, at which outputs and
            gradients are judged too; by default sizes that `own_inputs.found_sizes` finds.
        estimators: Names of custom autograd functions whose gradients are meant to differ from finite differences, such
            as a reversal of gradients. Flat functions, such as rounding, need no name.
        traits: Traits as of `Workload.traits`; found by inspection unless given.

    Raises:
        OwnModelError: It has no tensor input or output, something is not on the CPU, or copying fails.
        UnknownNameError: A trait does not exist.
    """
    _check_words(name, traits)
    examples = [Example(inputs, keywords or {}, target)]
    if batches is not None:
        if inputs or keywords or target is not None:
            raise OwnModelError("batches: they have inputs and targets: give no inputs, keywords or target beside them")
        examples = _examples(batches, steps)
    problem, rebuilt, structure = _problem(model, examples)
    trains = loss is not None or optimizer is not None
    if trains and (loss is None or optimizer is None or (target is None and batches is None)):
        raise OwnModelError(
            "training needs a loss, an optimizer, and a target or batches: give all three, or none of them"
        )
    if problem.target is not None and loss is None:
        raise OwnModelError("target: expected a loss and an optimizer beside it: training needs all three")
    if loss is not None:
        first, targeted = problem.inputs[0], problem.target is not None
        problem = dataclasses.replace(
            problem,
            target=problem.target if targeted else torch.zeros(len(first) if first.dim() else 1),
            loss=OwnLoss(loss, rebuilt, structure, targeted=targeted),
            optimizer=optimizer,
        )
    problem = own_random.apart(dataclasses.replace(problem, steps=steps))
    seen = frozenset(found_traits(own_random.given(_copied(problem)))) if traits is None else traits
    seed = stable_seed(name)
    if sizes is None:
        others = own_inputs.found_sizes(problem, seed)
    else:
        others = own_inputs.named_sizes(problem, _other_inputs(sizes, problem.inputs))
    workload = Workload(
        name,
        f"{_title(model, problem)}.",
        Redrawn(problem, seed, others.growing),
        modes=frozenset(_modes(problem)),
        traits=seen
        | ({"training"} if trains else set())
        | ({"batches"} if problem.further else set())
        | ({"resizable"} if others.growing and traits is None else set()),
        dtypes=_dtypes(problem),
        sizes=OtherSizes({}),
        estimators=frozenset(estimators),
        given=True,
    )
    made = {
        label: dataclasses.replace(
            workload, name=f"{name}~{stable_seed(label):08x}", make=Redrawn(other, seed, others.growing)
        )
        for label, other in others.problems.items()
    }
    return dataclasses.replace(workload, sizes=OtherSizes(made, others.refused))


def _other_inputs(sizes: Sequence[Any], first: tuple[Any, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yields the tensors of example inputs of other sizes; raises `OwnModelError` where dtypes or number differ."""
    for number, example in enumerate(sizes):
        if not isinstance(example, (tuple, Mapping)):
            raise OwnModelError(
                f"sizes[{number}]: expected a tuple of positional arguments or a mapping of keyword arguments, got "
                f"{type(example).__name__}"
            )
        tensors = tuple(leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor))
        kinds, wanted = ([str(value.dtype) for value in values] for values in (tensors, first))
        if kinds != wanted:
            raise OwnModelError(
                f"sizes[{number}]: expected tensors of {', '.join(wanted)}; got {', '.join(kinds) or 'none'}"
            )
        yield tensors


def task_of(
    model: Callable[..., Any],
    data: Iterable[Any],
    metric: Metric,
    *,
    max_drop: float = 0.01,
    name: str = "model",
    traits: frozenset[str] | None = None,
) -> OwnTask:
    """Makes a workload for mode ``accuracy`` from a trained model, held-out data and a metric.

    Args:
        model: Same as of `workload_of`.
        data: Pairs of input and target, as `batches` of `workload_of`; all of them are used.
        metric: Function ``metric(output, target)`` that returns a score for each sample of a batch, ``(n,)`` bool or
            floating-point, larger is better; or one number for the batch, which gives no interval.
        max_drop: Largest allowed drop of the mean score.
        name: Same as of `workload_of`.
        traits: Same as of `workload_of`.

    Raises:
        OwnModelError, UnknownNameError: See `workload_of`; also if `max_drop` is no number from 0 to 1.
    """
    _check_words(name, traits)
    if not 0.0 < max_drop <= 1.0:
        raise OwnModelError(
            f"max_drop: expected a part of the score above 0 and at most 1, such as 0.01, got {max_drop}"
        )
    problem, rebuilt, structure = _problem(model, _examples(data, None), always=True)
    return OwnTask(
        name,
        f"{_title(model, problem)} and a metric.",
        Redrawn(problem, stable_seed(name)),
        modes=frozenset({Mode.ACCURACY}),
        traits=frozenset(found_traits(own_random.given(_copied(problem)))) if traits is None else traits,
        dtypes=_dtypes(problem),
        sizes=OtherSizes({}),
        given=True,
        metric=metric,
        rebuilt=rebuilt,
        max_drop=max_drop,
        structure=structure,
    )


def _check_words(name: str, traits: frozenset[str] | None) -> None:
    if not NAME.fullmatch(name):
        raise OwnModelError(f"name {name!r}: expected small letters and digits, with points and dashes between")
    for trait in traits or ():
        if trait not in TRAITS:
            raise unknown("trait", trait, sorted(TRAITS))


class Example(NamedTuple):
    """Arguments of one call of a model, and its target: the second argument of the loss or the metric, if any."""

    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    target: Any


def _problem(
    model: Callable[..., Any], examples: Sequence[Example], *, always: bool = False
) -> tuple[Problem, Rebuilt | None, Structure | None]:
    """Returns the problem of a model without a loss, the function to model outputs, and the target's structure."""
    first, *further = examples
    if not isinstance(first.inputs, tuple):
        raise OwnModelError(
            f"inputs: expected a tuple of the positional arguments, got {type(first.inputs).__name__}; for one "
            "argument give (x,)"
        )
    module, tensors, rebuilt, written = _adapted(model, first.inputs, first.keywords, always=always)
    targets, structures = zip(*(taken_apart(x.target, f"batch {i}") for i, x in enumerate(examples)), strict=True)
    check_alike(structures)
    batches = tuple(
        _batch(number, example, target, (*tensors, *tensors_in(targets[0])))
        for number, (example, target) in enumerate(zip(further, targets[1:], strict=True), 1)
    )
    if own_random.draws(module, tensors):
        module = own_random.Drawing(module, len(tensors))
    problem = Problem(module, tensors, targets[0], further=batches, writes=written)
    _check_host(problem)
    return problem, rebuilt, structures[0]


def _examples(given: Iterable[Any], most: int | None) -> list[Example]:
    """Lists at most `most` batches; raises `OwnModelError` without any, or if one is neither a pair nor a mapping."""
    if isinstance(given, (str, bytes, Tensor, Mapping)) or not isinstance(given, Iterable):
        raise OwnModelError(
            f"batches: expected pairs of input and target, such as [(x, y)], got {type(given).__name__}"
        )
    examples: list[Example] = []
    for number, batch in enumerate(itertools.islice(given, most)):
        pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        if not pair and not isinstance(batch, Mapping):
            raise OwnModelError(
                f"batch {number}: expected a pair of input and target, or a mapping of keyword arguments, got "
                f"{type(batch).__name__}{f' of {len(batch)}' if isinstance(batch, (tuple, list)) else ''}"
            )
        taken, target = batch if pair else (batch, None)
        if isinstance(taken, Mapping):
            examples.append(Example((), taken, target))
        else:
            examples.append(Example(tuple(taken) if isinstance(taken, (tuple, list)) else (taken,), {}, target))
    if not examples:
        raise OwnModelError("batches: expected at least one pair of input and target, got none")
    return examples


def _batch(number: int, example: Example, target: Target, first: Sequence[Tensor]) -> Batch:
    """Returns a further batch's tensors; raises `OwnModelError` if dtypes or shapes are not those of the first one."""
    inputs, keywords, _ = example
    tensors = tuple(leaf for leaf in pytree.tree_leaves((inputs, dict(keywords))) if isinstance(leaf, Tensor))
    own = [*tensors, *tensors_in(target)]

    def kinds(given: Sequence[Tensor]) -> list[str]:
        return [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in given]

    if kinds(own) != kinds(first):
        raise OwnModelError(
            f"batch {number}: expected tensors as in batch 0, {', '.join(kinds(first))}; got {', '.join(kinds(own))}: "
            "leave out the last batch if it is smaller, as drop_last=True of a DataLoader does; give one batch where "
            "sizes differ by nature"
        )
    return tensors, target


@dataclass(frozen=True)
class OwnLoss:
    """User's loss of a model's output, which `rebuilt` makes of its tensors; the target is None unless `targeted`.

    A target of several tensors has a structure.
    """

    loss: Callable[..., Tensor]
    rebuilt: Rebuilt | None
    structure: Structure | None
    targeted: bool

    def __call__(self, out: Any, target: Target) -> Tensor:
        """0-D."""
        if self.rebuilt is not None:
            out = self.rebuilt(out if isinstance(out, tuple) else (out,))
        if self.structure is not None:
            target = self.structure(target)
        return self.loss(out, target if self.targeted else None)


@dataclass(frozen=True)
class Redrawn:
    """Makes copies of a user-owned model's problem by draw, with other numbers unless the seed is that of draw 0.

    The dimensions `growing` grow by the extent.
    """

    problem: Problem
    seed: int
    growing: tuple[int, ...] = ()

    def __call__(self, generator: torch.Generator, extent: int) -> Problem:
        """Makes a problem, as `Workload.make`."""
        problem = _copied(self.problem)
        if extent and self.growing:
            problem = own_inputs.grown(problem, self.growing, extent, self.seed)
        if generator.initial_seed() == self.seed:
            return own_random.given(problem)
        with torch.no_grad():
            for parameter in problem.module.parameters():
                entries(parameter).copy_(own_inputs.shuffled(entries(parameter), generator))
        inputs = tuple(own_inputs.redrawn(value, generator) for value in problem.inputs)
        return own_random.given(dataclasses.replace(problem, inputs=inputs))


class Adapted(nn.Module):
    """A model as a module of tensors alone: takes the tensors of its arguments in order, gives those of its result.

    Other values among the positional and keyword arguments stay as they are. `places` are those of the tensors in the
    result: see `accelcheck.workloads.nested.tensors_of`.
    """

    def __init__(
        self, model: Callable[..., Any], arguments: tuple[tuple[Any, ...], Mapping[str, Any]], places: Sequence[Place]
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
        out = tuple(at(result, place) for place in self._outputs)
        return out[0] if len(out) == 1 else out


def _adapted(
    model: Callable[..., Any], inputs: tuple[Any, ...], keywords: Mapping[str, Any], *, always: bool = False
) -> tuple[nn.Module, tuple[Any, ...], Rebuilt | None, frozenset[int]]:
    """Returns a module of the model, its flat inputs, the function to model outputs, and indices of written inputs.

    The module is the model itself if it takes tensors by position and returns tensors, unless `always`; else `Adapted`.
    """
    if not callable(model):
        raise OwnModelError(f"model: expected a module or a function, got {type(model).__name__}")
    tensors = tuple(leaf for leaf in pytree.tree_leaves((inputs, dict(keywords))) if isinstance(leaf, Tensor))
    if not tensors:
        raise OwnModelError("inputs: expected tensors among the arguments, got none")
    tried = _duplicate(model, "model")
    if isinstance(tried, nn.Module):
        tried.eval()
    given, named = _duplicate(inputs, "inputs"), _duplicate(dict(keywords), "keywords")
    own = [leaf for leaf in pytree.tree_leaves((given, named)) if isinstance(leaf, Tensor)]
    versions = [leaf._version for leaf in own]  # noqa: SLF001 - torch has no public name for it
    try:
        out, derives, requires = own_derivatives.called(tried, given, named)
    except Exception as error:
        raise OwnModelError(f"model: raised {type(error).__name__} with the inputs given: {error}") from error
    places = [place for place, _ in tensors_of(out)]
    if not places:
        raise OwnModelError(f"out: expected tensors, got none in {type(out).__name__}")
    written = frozenset(place for place, leaf in enumerate(own) if leaf._version != versions[place])  # noqa: SLF001
    _check_padding(tried, inputs, keywords, [at(out, place) for place in places])
    plain = isinstance(model, nn.Module) and not keywords and len(tensors) == len(inputs) and _flat(out)
    if plain and (not always or places == [()]):
        module: Any = model  # `plain` is true of modules alone
        rebuilt = None
    else:
        module, rebuilt = Adapted(model, (inputs, dict(keywords)), places), Rebuilt(out, places)
    if derives or requires:
        required = [place for place, leaf in enumerate(tensors) if leaf.requires_grad]
        module = own_derivatives.Deriving(module, required, derives=derives)
    return module, tensors, rebuilt, written


def _check_padding(
    model: Callable[..., Any], inputs: tuple[Any, ...], keywords: Mapping[str, Any], out: Sequence[Tensor]
) -> None:
    """Raises `OwnModelError` if the fast path of encoder layers fills padding with zeros, unlike training mode."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    nested = [
        name or "model" for name, part in parts if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor
    ]
    if not nested:
        return
    with torch.no_grad(), layer_by_layer():
        plain = [tensor for _, tensor in tensors_of(model(*inputs, **keywords))]
    if not all(map(alike, plain, out)):
        raise OwnModelError(
            f"{nested[0]}: nn.TransformerEncoder with enable_nested_tensor=True fills padded positions with zeros in "
            "evaluation mode, unlike in training and where it is compiled, so that these cannot agree: give it "
            "enable_nested_tensor=False"
        )


def _flat(out: Any) -> bool:
    """Returns True for tensors in plain containers, which every technique returns unchanged."""
    if type(out) is dict:
        return all(map(_flat, out.values()))
    return all(map(_flat, out)) if type(out) in {tuple, list} else isinstance(out, Tensor)


def _check_host(problem: Problem) -> None:
    named = [*problem.module.named_parameters(), *problem.module.named_buffers()]
    named += [(f"input[{index}]", value) for index, value in enumerate(problem.inputs)]
    named += [("target", value) for value in tensors_in(problem.target)]
    for name, tensor in named:
        if tensor.device.type != "cpu" or tensor.dtype != (own := in_dtype(tensor, torch.float32)):
            dtype, wanted = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, own))
            raise OwnModelError(
                f"{name}: expected it on the CPU in {wanted}, got {dtype} on {tensor.device}: accelcheck moves and "
                "casts copies"
            )


def _duplicate(value: Any, what: str) -> Any:
    try:
        return duplicate(value)
    except Exception as error:
        raise OwnModelError(
            f"{what}: cannot be copied: {type(error).__name__}: {error}; each case has a copy of its own: take out "
            "what copy.deepcopy refuses, or give its class a `__deepcopy__`"
        ) from error


def _copied(problem: Problem) -> Problem:
    inputs = tuple(value.detach().clone() for value in problem.inputs)
    target = pytree.tree_map_only(Tensor, lambda value: value.detach().clone(), problem.target)
    return dataclasses.replace(problem, module=_duplicate(problem.module, "model"), inputs=inputs, target=target)


def _dtypes(problem: Problem) -> frozenset[str]:
    """Returns all dtypes of cases, or FP32 alone with complex tensors, which half precision lacks."""
    tensors = (*problem.module.parameters(), *problem.module.buffers(), *problem.inputs)
    return frozenset({"float32"} if any(tensor.is_complex() for tensor in tensors) else DTYPES)


def _modes(problem: Problem) -> Iterator[Mode]:
    yield Mode.FORWARD
    leaves = [value for value in problem.inputs if is_inexact(value)]
    if leaves or any(parameter.requires_grad for parameter in problem.module.parameters()):
        yield Mode.BACKWARD
    timed = not problem.writes  # a call after others has other inputs
    if timed:
        yield Mode.SPEED
    if problem.loss is not None:
        yield from (Mode.TRAIN, Mode.TRAIN_SPEED) if timed else (Mode.TRAIN,)


def _title(model: Callable[..., Any], problem: Problem) -> str:
    kind = type(model).__name__
    name = kind if isinstance(model, nn.Module) else getattr(model, "__name__", kind)
    numbers = ", whose random numbers are inputs" if isinstance(problem.module, own_random.Drawing) else ""
    return f"{name} with {sum(parameter.numel() for parameter in problem.module.parameters()):,} parameters{numbers}"
