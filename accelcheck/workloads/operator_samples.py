"""Samples of torch's operators from torch's own description of them (OpInfo), and the problems that they make.

PyTorch's own tests use the list `torch.testing._internal.common_methods_invocations.op_db`. Its tolerances are not
used: `accelcheck.workloads.operator_trials` selects the samples.
"""

import functools
import importlib
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from accelcheck.core.case import stable_seed
from accelcheck.devices.torch_names import UnknownTorchError, pytree
from accelcheck.workloads.operator_calls import (
    CASTS,
    CHOOSERS,
    Calls,
    Cast,
    Chooser,
    Hole,
    Mark,
    SampleCall,
    Written,
    WrittenOut,
    plain,
)
from accelcheck.workloads.operator_options import SHOWN, Order, with_options
from accelcheck.workloads.operator_trials import seeded, tried
from accelcheck.workloads.operator_variants import LAYOUTS, MIXED, OPTIONS, WRITTEN, changed
from accelcheck.workloads.problem import Problem

HALF = ("bfloat16", "float16")
FEW = 2
"""Most samples of an operator in a bundle."""
NEAR = 24
"""First samples of an operator, from which a bundle chooses."""
ELEMENTS = 2**14
"""Most elements of the tensors of a sample."""
SCALARS = (bool, int, float, complex, str, slice, torch.dtype, torch.memory_format, torch.layout, type(None), type(...))
LARGE = frozenset({"nn.functional.grid_sample"})
"""Operators whose reference inputs have more than `ELEMENTS`."""
COUNTED = frozenset({"nn.functional.embedding_bag"})
"""Operators whose gradients, scaled by frequency, the CPU and its oracle divide by another index's count:
https://github.com/pytorch/pytorch/issues/190063."""
_STRUCTURE = re.compile(r"gradcheck_wrapper_(hermitian|triangular)_input|<lambda>")
"""Names of OpInfo's functions that give a matrix the structure that an operator needs."""

_Leaves: TypeAlias = tuple[list[Any], pytree.TreeSpec]
_Samples: TypeAlias = list[tuple[int, SampleCall, list[Tensor]]]
"""Numbers, calls and inputs of samples."""
_Origin: TypeAlias = "tuple[str, torch.dtype, int]"
"""Operator, dtype and number of a sample."""


@functools.cache
def database() -> Mapping[str, Any]:
    """OpInfo by operator, including the variant's name where there is one, as in ``div.floor_rounding``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    return {info.name + (f".{info.variant_test_name}" if info.variant_test_name else ""): info for info in entries}


def structured(info: Any) -> Callable[..., Any]:
    """Wraps an operator of triangular or Hermitian matrices, as OpInfo says, so that unread elements change no result.

    Derivatives by unread elements are a convention, in which forward and reverse mode differ.
    """
    wrapper = info.gradcheck_wrapper
    standard = importlib.import_module("torch.testing._internal.opinfo.core").OpInfo.__dataclass_fields__
    # OpInfo's function keeps the other triangle than the one triangular_solve reads.
    plain = wrapper is standard["gradcheck_wrapper"].default or info.name == "triangular_solve"
    if plain or not _STRUCTURE.match(wrapper.__name__):
        return cast("Callable[..., Any]", info.op)
    return functools.partial(wrapper, info.op)


@functools.lru_cache(64)
def _drawn(name: str, dtype: torch.dtype, seed: int, reach: int, *, options: bool) -> list[Any]:
    """First samples of an operator in OpInfo, with the values of a seed, and with `options` those that these add.

    Reference inputs, where an operator has them, add sizes, and large, small or non-finite values. Complex ones take
    seconds to make, as all of them do, and bool has none. `reach` is the largest number of samples.
    """
    info = database()[name]
    slow = options or dtype in {torch.complex64, torch.bool}
    further = None if slow else getattr(info, "reference_inputs_func", None)
    # Not `sample_inputs`, which seeds itself, so that all draws would be equal, and looks for a test on the stack.
    samples_of = info.sample_inputs_func if further is None or name in LARGE else further
    with seeded(seed):
        samples = list(itertools.islice(samples_of(info, "cpu", dtype, requires_grad=False), reach))
    # Large ones would stay in memory.
    return (
        [sample if _fits(_flat(sample)[0]) else None for sample in with_options(info, samples)] if options else samples
    )


def _flat(sample: Any) -> _Leaves:
    """Leaves of a sample's arguments, with the device if no tensor among them implies it."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    if any(isinstance(leaf, Tensor | torch.device) or leaf == "cpu" for leaf in leaves):
        return leaves, spec
    return pytree.tree_flatten((sample.input, sample.args, {**sample.kwargs, "device": "cpu"}))


def _fits(leaves: Sequence[Any]) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        sum(tensor.numel() for tensor in tensors) <= ELEMENTS
        and all(type(tensor) is Tensor and plain(tensor) for tensor in tensors)
        and all(isinstance(leaf, (Tensor, torch.device, *SCALARS)) or callable(leaf) for leaf in leaves)
    )


def _open(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Leaves with `Hole` and `Mark` in place of varying arguments, and the tensors, as real numbers."""
    opened, tensors = list[Any](), list[Tensor]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            opened.append(Hole(len(tensors), leaf.is_complex()))
            tensors.append(_real(leaf.detach()))
        elif isinstance(leaf, torch.device) or leaf == "cpu":
            opened.append(Mark.DEVICE)
        else:
            opened.append(Mark.FLOAT if leaf is torch.float32 else leaf)
    return tuple(opened), tensors


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.resolve_neg()


class CalledOperator(NamedTuple):
    """Operator of `database`, with dtypes of its samples and of the cases, as called by a workload.

    `variants` are changes of samples, one for each; empty for OpInfo's own samples.
    """

    name: str
    dtypes: tuple[str, ...]
    gradients: bool = True
    variants: tuple[str, ...] = ()
    cases: tuple[str, ...] = ("float32",)


@dataclass(frozen=True)
class Template:
    """Calls of some operators, the same in every draw: places among `inputs`, the tensors of the trials.

    `origins` has the sample of each call; `left` the number of samples left out, by reason.
    """

    calls: tuple[SampleCall, ...]
    inputs: tuple[Tensor, ...]
    origins: tuple[_Origin, ...]
    left: Mapping[str, int]


@functools.lru_cache(16)
def template(operators: tuple[CalledOperator, ...], most: int) -> Template:
    """Template of those operators that this torch describes; raises `UnknownTorchError` if there is none.

    Each has `most` samples of a floating dtype at most, and a third as many of each other dtype.
    """
    known = [operator for operator in operators if operator.name in database()]
    if not known:
        names = ", ".join(operator.name for operator in operators)
        raise UnknownTorchError(f"this torch describes no operator {names}")
    calls, inputs, origins, left = list[SampleCall](), list[Tensor](), list[_Origin](), Counter[str]()
    for operator in known:
        for word in operator.dtypes:
            for place, call, tensors in _chosen(operator, word, most, left):
                calls.append(call.moved(len(inputs)))
                inputs += tensors
                origins.append((operator.name, getattr(torch, word), place))
    return Template(tuple(calls), tuple(inputs), tuple(origins), left)


def _chosen(operator: CalledOperator, word: str, most: int, left: Counter[str]) -> _Samples:
    """Useful samples, at most one of which has results without elements."""
    name, info, dtype = operator.name, database()[operator.name], getattr(torch, word)
    usable: _Samples = []
    for variant in operator.variants or ("",):
        function = _function(name, variant)
        if function is None:
            continue
        drawn = _samples(name, dtype, stable_seed(name), most, variant)
        several = {"": most, OPTIONS: SHOWN}.get(variant, 1)
        kept = several if dtype.is_floating_point else -(-several // 3)
        chosen, empty = _Samples(), _Samples()
        order = Order(info, drawn, stable_seed(name), shows=variant == OPTIONS)
        for place in order:
            kind = f"{variant} {word}" if variant and dtype != torch.float32 else variant or word
            call, tensors = _called(operator, function, drawn[place], f"{name} {kind} {place}", variant)
            tested, values = _tested(call, tensors, operator.cases) if call else ("", [])
            if isinstance(tested, str):
                left[tested] += bool(call)
                continue
            (empty if tested.empty else chosen).append((place, tested, values))
            if not tested.empty:
                order.show(place)
            if len(chosen) == kept:
                break
        usable += [*chosen, *empty[:1]][-kept:] if kept > 1 else [*chosen, *empty][:1]
    return usable


def _function(name: str, variant: str) -> Callable[..., Any] | None:
    """Function that a variant calls; None if the operator has none."""
    info = database()[name]
    # The function that gives a matrix its structure makes a tensor with other strides.
    function = info.op if variant in LAYOUTS else structured(info)
    if variant in WRITTEN:
        layout, out = WRITTEN[variant]
        if not (info.supports_out if out else info.inplace_variant):
            return None
        function = WrittenOut(layout, function) if out else Written(layout, info.inplace_variant)
    wrapper = Chooser if name in CHOOSERS else Cast if name in CASTS else None
    return wrapper(name, function) if wrapper else function


def _called(
    operator: CalledOperator, function: Callable[..., Any], sample: Any, label: str, variant: str
) -> tuple[SampleCall | None, list[Tensor]]:
    """Call of a sample, and its tensors; no call if these are too large, or not dense."""
    if not sample:
        return None, []
    leaves, spec = _flat(sample)
    if not _fits(leaves):
        return None, []
    info = database()[operator.name]
    counts = operator.name in COUNTED and sample.kwargs.get("scale_grad_by_freq")
    opened, tensors = _open(leaves)
    smooth = operator.gradients and info.supports_autograd and not counts
    process = sample.output_process_fn_grad
    return SampleCall(label, function, opened, spec, process, smooth=smooth, variant=variant), tensors


def _tested(
    call: SampleCall, tensors: list[Tensor], cases: Sequence[str], like: Sequence[Tensor] | None = None
) -> tuple[SampleCall | str, list[Tensor]]:
    """Call after `tried`, or a reason why it is useless, with the variant's first usable inputs, or the last ones.

    With `like`, the usable inputs of another draw, only inputs of their dtypes, shapes and strides are tried.
    """
    tested: SampleCall | str = "has nothing to change"
    inputs = tensors
    for changed_inputs in changed(tensors, call.variant):
        inputs = [_rounded(value, HALF if call.variant in MIXED else cases) for value in changed_inputs]
        if like is None or (len(inputs) == len(like) and all(map(_alike, inputs, like))):
            tested = tried(call, inputs, cases, counted=like is not None)
        if isinstance(tested, SampleCall):
            break
    return tested, inputs


def _rounded(value: Tensor, cases: Sequence[str]) -> Tensor:
    """Value rounded to a number of all dtypes of the cases."""
    if value.is_floating_point():
        for word in cases:
            value = value if word == "float32" else value.to(getattr(torch, word)).float()
    return value


def _samples(name: str, dtype: torch.dtype, seed: int, most: int, variant: str) -> list[Any]:
    """Samples to choose from: few for a bundle, since to make more takes longer than to judge them."""
    options = variant == OPTIONS
    return _drawn(name, dtype, seed, NEAR if most <= FEW and not options else 10**6, options=options)


@functools.lru_cache(16)
def _values(operators: tuple[CalledOperator, ...], most: int, seed: int) -> tuple[Tensor, ...]:
    """Inputs of a draw: its own where they have the template's shapes and pass the trials, else the template's."""
    made = template(operators, most)
    cases = {operator.name: operator.cases for operator in operators}
    values = list(made.inputs)
    start = 0
    for call, (name, dtype, place) in zip(made.calls, made.origins, strict=True):
        end = start + sum(isinstance(leaf, Hole) for leaf in call.leaves)
        drawn = _samples(name, dtype, seed, most, call.variant)
        _, tensors = _open(_flat(drawn[place])[0] if place < len(drawn) and drawn[place] else [])
        if len(tensors) == end - start:
            drawn_call, tensors = _tested(call.moved(-start), tensors, cases[name], values[start:end])
            if isinstance(drawn_call, SampleCall) and drawn_call.smooth == call.smooth:
                values[start:end] = tensors
        start = end
    return tuple(values)


def make(generator: torch.Generator, extent: int, *, operators: tuple[CalledOperator, ...], most: int) -> Problem:
    values = _values(operators, most, generator.initial_seed())
    return Problem(Calls(template(operators, most).calls), (torch.ones(1), *map(_copied, values)))


def _copied(value: Tensor) -> Tensor:
    """Copies a tensor with its strides and offset; `Tensor.clone` would make it dense."""
    size = value.untyped_storage().nbytes() // value.element_size()
    return value.as_strided((size,), (1,), 0).clone().as_strided(value.shape, value.stride(), value.storage_offset())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
