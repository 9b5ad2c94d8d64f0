"""The operators of torch, each called with the samples of torch's own description of it (OpInfo): ``op-NAME``.

`torch.testing._internal.common_methods_invocations.op_db` is the list that PyTorch's own tests go through. To import it takes 3 s, so
that names and dtypes come from a stored file, which ``python benchmarks/torch_operators.py`` writes. Nothing that OpInfo says of
tolerances is used: a sample counts if FP64 gives finite numbers, the same ones twice, and its gradients if these are finite.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import itertools
import json
import random
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.core.case import Mode, stable_seed
from accelcheck.devices.torch_names import TorchDispatchMode, UnknownTorchError, pytree
from accelcheck.workloads.problem import TRANSLATORS, Problem, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

FILE = Path(__file__).with_name("torch_operators.json")
SAMPLES = 10
"""Most samples of an operator where it stands alone; of each dtype that is not floating a third. Where there are more, these are drawn from them."""
FEW = 2
"""Most samples of an operator in a bundle."""
NEAR = 24
"""The first samples of an operator, among which those of a bundle are chosen."""
BUNDLE = 24
"""Most operators of a bundle."""
ELEMENTS = 2**14
"""Most elements of the tensors of a sample."""
SCALARS = (bool, int, float, complex, str, slice, torch.dtype, torch.memory_format, torch.layout, type(None), type(...))
LARGE = frozenset({"nn.functional.grid_sample"})
"""Operators whose reference inputs have more than `ELEMENTS`."""
STANDARD = frozenset({"unary", "binary", "reduction", "index", "pooling", "loss"})
"""Families whose bundles compile-static runs at level 2."""
UNSTEADY = frozenset({"linalg"})
"""Families with operators that have the trait ``unsteady``."""
FLOATING = ("float32", "bfloat16", "float16")
FURTHER = ("complex64", "int64", "uint8", "bool")

_Leaves: TypeAlias = tuple[list[Any], pytree.TreeSpec]
_Origin: TypeAlias = "tuple[str, torch.dtype, int]"
"""The operator, dtype and number of a sample."""


@dataclass(frozen=True)
class Hole:
    """Stands for a tensor among the arguments of a call: its place among the inputs, and whether they hold a complex one's parts."""

    place: int
    is_complex: bool


class Mark(enum.Enum):
    """Stands for an argument that follows the inputs: their device, or the float32 that is float64 where inputs are."""

    DEVICE = "device"
    FLOAT = "float32"


@dataclass(frozen=True)
class SampleCall:
    """One call of an operator.

    Attributes:
        label: The operator, dtype and number of the sample, such as ``add float32 3``.
        function: The operator.
        leaves: The leaves of its arguments: `Hole`, `Mark`, and values that are no tensors.
        spec: Structure of the arguments: the input, further ones, and those by keyword.
        process: OpInfo's function of the output that takes out what is free, such as the signs of eigenvectors.
        writes: Whether it writes to its arguments, which are then copied first.
        smooth: Whether it has gradients, and they are finite.
        empty: Whether its results have no elements.
    """

    label: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    process: Callable[[Any], Any]
    writes: bool = False
    smooth: bool = True
    empty: bool = False

    def __call__(self, anchor: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors that the operator returns; complex ones as pairs of real numbers, and numbers as tensors."""
        leaves = [_filled(leaf, anchor, tensors, copied=self.writes) for leaf in self.leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(_comparable(self.process(self.function(first, *args, **kwargs)), anchor))

    def moved(self, by: int) -> SampleCall:
        """The same call with its inputs at other places."""
        leaves = (Hole(leaf.place + by, leaf.is_complex) if isinstance(leaf, Hole) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))


def _filled(leaf: Any, anchor: Tensor, tensors: Sequence[Tensor], *, copied: bool) -> Any:
    if leaf is Mark.DEVICE:
        return anchor.device
    if leaf is Mark.FLOAT:
        return torch.float64 if anchor.dtype == torch.float64 else torch.float32
    if not isinstance(leaf, Hole):
        return leaf
    tensor = tensors[leaf.place].clone() if copied else tensors[leaf.place]
    return torch.view_as_complex(tensor) if leaf.is_complex else tensor


def _comparable(out: Any, anchor: Tensor) -> Iterator[Tensor]:
    for value in pytree.tree_leaves(out):
        if isinstance(value, (bool, int, float)):
            yield torch.as_tensor(value, device=anchor.device)
        elif isinstance(value, Tensor) and _plain(value):
            yield torch.stack([value.real, value.imag], -1) if value.is_complex() else value


def _plain(value: Tensor) -> bool:
    # No question for the type: where a graph is captured, tensors are of another.
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


class Calls(nn.Module):
    """Calls operators. Its first input, one number, is there for its dtype and device; the others are the tensors of all samples.

    Returns the results by label: in training mode, of the calls alone that have gradients.
    """

    def __init__(self, calls: Sequence[SampleCall]) -> None:
        super().__init__()
        self.calls = tuple(calls)

    def forward(self, anchor: Tensor, *tensors: Tensor) -> dict[str, tuple[Tensor, ...]]:
        return {call.label: call(anchor, tensors) for call in self.calls if call.smooth or not self.training}

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of its calls."""
        return tuple(call.label for call in self.calls)

    def without(self, labels: frozenset[str]) -> Calls:
        """The calls of other labels."""
        return Calls([call for call in self.calls if call.label not in labels])


@functools.cache
def database() -> Mapping[str, Any]:
    """OpInfo by the operator's name, with that of its variant where it has one, as in ``div.floor_rounding``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
    return {info.name + (f".{info.variant_test_name}" if info.variant_test_name else ""): info for info in entries}


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds for the three generators that OpInfo draws from; they are put back afterwards."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@functools.lru_cache(64)
def _drawn(name: str, dtype: torch.dtype, seed: int, reach: int) -> list[Any]:
    """OpInfo's first samples of an operator, with the values of a seed.

    Reference inputs, where an operator has them, are more: further sizes, and values that are large, small or not finite. Those of
    complex numbers take seconds to make, and of bool there are none.

    Args:
        name: In `database`.
        dtype: Dtype of the samples.
        seed: Seed of their values.
        reach: Most samples.
    """
    info = database()[name]
    further = getattr(info, "reference_inputs_func", None) if dtype not in {torch.complex64, torch.bool} else None
    # Not `sample_inputs`: it sets a seed of its own, so that every draw has the same numbers, and looks for a test on the stack.
    samples_of = info.sample_inputs_func if further is None or name in LARGE else further
    with _seeded(seed):
        return list(itertools.islice(samples_of(info, "cpu", dtype, requires_grad=False), reach))


def _flat(sample: Any) -> _Leaves:
    return pytree.tree_flatten((sample.input, sample.args, sample.kwargs))


def _fits(leaves: Sequence[Any]) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return (
        sum(tensor.numel() for tensor in tensors) <= ELEMENTS
        and all(type(tensor) is Tensor and _plain(tensor) for tensor in tensors)
        and all(isinstance(leaf, (Tensor, torch.device, *SCALARS)) or callable(leaf) for leaf in leaves)
    )


def _open(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The leaves with `Hole` and `Mark` in place of what varies, and the tensors, real."""
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


def tried(call: SampleCall, tensors: Sequence[Tensor]) -> SampleCall | str:
    """The call as FP64 and float32 show it: whether it writes and, if `smooth`, has finite gradients; where it is of no use, why, in a few words."""
    wide = [value.double() if value.is_floating_point() else value.clone() for value in tensors]
    versions = [value._version for value in wide]  # noqa: SLF001 - torch has no public name for it
    anchor = torch.ones(1, dtype=torch.float64)
    try:
        # Attention by its definition: its kernels are said to draw random numbers whether they do or not.
        with torch.no_grad(), _seeded(1), sdpa_kernel(SDPBackend.MATH), _Draws() as draws:
            first = call(anchor, wide)
        writes = any(  # batch norm writes to statistics without a word
            value._version != version or not torch.equal(value.nan_to_num(), before.nan_to_num().to(value.dtype))  # noqa: SLF001
            for value, version, before in zip(wide, versions, tensors, strict=True)
        )
        call = replace(call, writes=writes)
        wide = [value.double() if value.is_floating_point() else value.clone() for value in tensors]
        with torch.no_grad(), _seeded(2):
            second = call(anchor, wide)
    except Exception as error:  # noqa: BLE001 - OpInfo has samples that an operator refuses
        return f"raises {type(error).__name__}"
    if not first:
        return "returns no dense tensors"
    if draws.seen or any(
        len(first) != len(second) or one.shape != other.shape or not _same(one, other)
        for one, other in zip(first, second, strict=False)
    ):
        return "is random"
    if not _finite(first):
        return "is not finite"
    narrow = [value.clone() for value in tensors]
    with torch.no_grad(), _seeded(1):
        if not _finite(call(anchor.float(), narrow)):
            return "is not finite in float32"
    smooth = call.smooth and _smooth(call, anchor, wide) and _smooth(call, anchor.float(), narrow)
    return replace(call, smooth=smooth, empty=not any(out.numel() for out in first))


def _finite(results: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(out).all()) for out in results)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Sees whether an operator draws random numbers, also from a seed that OpInfo sets."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare two results, but for the last bits, which may follow from where memory begins."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def _smooth(call: SampleCall, anchor: Tensor, wide: Sequence[Tensor]) -> bool:
    """Compute the gradients, to see that they exist and are finite."""
    wide = [value.detach().clone().requires_grad_(value.is_floating_point()) for value in wide]
    try:
        outs = [out for out in call(anchor, wide) if out.requires_grad]
        gradients = torch.autograd.grad(
            outs,
            [value for value in wide if value.requires_grad],
            [torch.ones_like(out) for out in outs],
            allow_unused=True,
        )
        there = [gradient for gradient in gradients if gradient is not None]
        return bool(there) and _finite(there)
    except Exception:  # noqa: BLE001 - an operator without a derivative raises one of several, a sparse one has no isfinite
        return False


class CalledOperator(NamedTuple):
    """An operator as a workload calls it.

    Attributes:
        name: In `database`.
        dtypes: Dtypes of its samples.
        gradients: Whether it is differentiated.
    """

    name: str
    dtypes: tuple[str, ...]
    gradients: bool = True


@dataclass(frozen=True)
class Template:
    """The calls of some operators, the same in every draw.

    Attributes:
        calls: With their places among `inputs`.
        inputs: The tensors that they were tried with.
        origins: CalledOperator, dtype and number of the sample of each call.
        left: Number of samples that are left out, by reason.
    """

    calls: tuple[SampleCall, ...]
    inputs: tuple[Tensor, ...]
    origins: tuple[_Origin, ...]
    left: Mapping[str, int]


@functools.lru_cache(16)
def template(operators: tuple[CalledOperator, ...], most: int) -> Template:
    """The template of some operators.

    Args:
        operators: Described ones, and others, which are left out.
        most: Most samples of a floating dtype; of each other dtype a third.

    Raises:
        UnknownTorchError: This version of torch has none of them.
    """
    known = [operator for operator in operators if operator.name in database()]
    if not known:
        raise UnknownTorchError(
            f"this torch describes no operator {', '.join(operator.name for operator in operators)}"
        )
    calls, inputs, origins, left = list[SampleCall](), list[Tensor](), list[_Origin](), Counter[str]()
    for operator in known:
        for word in operator.dtypes:
            for place, call, tensors in _chosen(operator, word, most, left):
                calls.append(call.moved(len(inputs)))
                inputs += tensors
                origins.append((operator.name, getattr(torch, word), place))
    return Template(tuple(calls), tuple(inputs), tuple(origins), left)


def _chosen(
    operator: CalledOperator, word: str, most: int, left: Counter[str]
) -> list[tuple[int, SampleCall, list[Tensor]]]:
    """The number, call and inputs of samples that are of use; at most one of them has results without elements."""
    name, info, dtype = operator.name, database()[operator.name], getattr(torch, word)
    smooth = operator.gradients and info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    drawn = _drawn(name, dtype, stable_seed(name), _reach(most))
    kept = most if dtype.is_floating_point else -(-most // 3)
    chosen, empty = list[tuple[int, SampleCall, list[Tensor]]](), list[tuple[int, SampleCall, list[Tensor]]]()
    for place in random.Random(stable_seed(name)).sample(range(len(drawn)), len(drawn)):  # noqa: S311 - no secret
        leaves, spec = _flat(drawn[place])
        if not _fits(leaves):
            continue
        opened, tensors = _open(leaves)
        process = drawn[place].output_process_fn_grad
        call = tried(SampleCall(f"{name} {word} {place}", info.op, opened, spec, process, smooth=smooth), tensors)
        if isinstance(call, str):
            left[call] += 1
        else:
            (empty if call.empty else chosen).append((place, call, tensors))
        if len(chosen) == kept:
            break
    return [*chosen, *empty[:1]][-kept:] if kept > 1 else [*chosen, *empty][:1]


def _reach(most: int) -> int:
    """The samples among which to choose: to make those that come after them takes longer than to judge a few."""
    return NEAR if most <= FEW else 10**6


@functools.lru_cache(16)
def _values(operators: tuple[CalledOperator, ...], most: int, seed: int) -> tuple[Tensor, ...]:
    """The inputs of a draw: its own where they have the shapes of the template's, and are as good; the template's elsewhere."""
    made = template(operators, most)
    values = list(made.inputs)
    start = 0
    for call, (name, dtype, place) in zip(made.calls, made.origins, strict=True):
        end = start + sum(isinstance(leaf, Hole) for leaf in call.leaves)
        drawn = _drawn(name, dtype, seed, _reach(most))
        _, tensors = _open(_flat(drawn[place])[0] if place < len(drawn) else [])
        if len(tensors) == end - start and all(map(_alike, tensors, values[start:end])):
            drawn_call = tried(call.moved(-start), tensors)
            if isinstance(drawn_call, SampleCall) and drawn_call.smooth == call.smooth:
                values[start:end] = tensors
        start = end
    return tuple(values)


def _make(generator: torch.Generator, extent: int, *, operators: tuple[CalledOperator, ...], most: int) -> Problem:
    values = _values(operators, most, generator.initial_seed())
    return Problem(Calls(template(operators, most).calls), (torch.ones(1), *map(_copied, values)))


def _copied(value: Tensor) -> Tensor:
    """A copy with the same strides and offset; `Tensor.clone` would make it dense."""
    size = value.untyped_storage().nbytes() // value.element_size()
    return value.as_strided((size,), (1,), 0).clone().as_strided(value.shape, value.stride(), value.storage_offset())


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType({"floating": FLOATING, "further": FURTHER})
"""The dtypes of the samples of a workload: those in which a case may run, or further ones, which a case in float32 has."""


def alone(name: str, part: str, entry: Mapping[str, Any], family: str) -> Workload:
    """The workload of a part of an operator."""
    operator = _operator(name, part, entry)
    return Workload(
        f"op-{name}" if part == "floating" else f"op-{name}-{part}",
        f"torch's operator {name}, with its samples of {', '.join(operator.dtypes)}.",
        partial(_make, operators=(operator,), most=SAMPLES),
        level=4,
        modes=frozenset({Mode.FORWARD, Mode.BACKWARD} if operator.gradients else {Mode.FORWARD}),
        dtypes=frozenset({"float32"}),
        traits=frozenset({"domain", "unsteady"} if family in UNSTEADY else {"domain"}),
        techniques=frozenset({"eager", "compile-static"}),
        divisible=True,
        given=True,
    )


def _operator(name: str, part: str, entry: Mapping[str, Any]) -> CalledOperator:
    words = tuple(entry["dtypes"])
    return CalledOperator(name, words[:1] if part == "floating" else words, entry["gradients"])


def bundles(stored: Mapping[str, Mapping[str, Any]]) -> Iterator[Workload]:
    """Workloads of up to `BUNDLE` operators of a family each: one graph for a compiler, in place of one for each operator."""
    for part in PARTS:
        families: dict[str, list[CalledOperator]] = {}
        for name, entry in stored.items():
            if part in entry and not entry[part].keys() & {"left", "apart"}:
                families.setdefault(entry["family"], []).append(_operator(name, part, entry[part]))
        for family, members in families.items():
            count = -(-len(members) // BUNDLE)
            for number in range(count):
                operators = tuple(members[number::count])
                kind = family if part == "floating" else f"{family}-{part}"
                yield Workload(
                    f"ops-{kind}-{number + 1}",
                    f"torch's operators {', '.join(operator.name for operator in operators)}, with a few samples each.",
                    partial(_make, operators=operators, most=FEW),
                    level=2,
                    modes=frozenset(
                        {Mode.FORWARD, Mode.BACKWARD}
                        if any(operator.gradients for operator in operators)
                        else {Mode.FORWARD}
                    ),
                    dtypes=frozenset({"float32"}),
                    traits=frozenset({"domain", "unsteady"} if family in UNSTEADY else {"domain"}),
                    techniques=frozenset(TRANSLATORS),
                    levels={**TRANSLATORS, "compile-static": 2 if kind in STANDARD else 3},
                    divisible=True,
                    given=True,
                )


def _workloads() -> Iterator[Workload]:
    stored: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    for name, entry in stored.items():
        for part in PARTS:
            if part in entry and "left" not in entry[part]:
                yield alone(name, part, entry[part], entry["family"])
    yield from bundles(stored)


WORKLOADS = tuple(_workloads())
