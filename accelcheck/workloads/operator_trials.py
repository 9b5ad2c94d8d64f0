"""Trials of sample calls: FP64 must give finite numbers, twice the same ones, and narrower dtypes similar ones."""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.devices.torch_names import TorchDispatchMode, pytree
from accelcheck.workloads import own_file
from accelcheck.workloads.operator_calls import SampleCall
from accelcheck.workloads.operator_variants import LONG, MIXED, RESIZED, SCALED, SHIFTED, UNUSUAL

NEARBY = (1 - 2**-12, 1 + 2**-12)
"""Factors of inputs that must not move NaN and infinities of a result: near a pole, rounding would move them too."""
RESULTS = 2**16
"""Most elements of a resized sample's results."""
FEW_ELEMENTS = 64
"""Most elements of a sample's tensors whose results are not counted, since they are few."""
UNROUNDED = frozenset(
    "_to_copy _unsafe_view abs cat clamp clone copy_ flip gather index_select neg repeat stack where".split()
)
"""Operators besides views whose float16 results are numbers of float16 inputs."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the three generators that OpInfo draws from, restores them afterwards, and hides warnings."""
    with own_file.seeded(seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tried(
    call: SampleCall, tensors: Sequence[Tensor], dtypes: Sequence[str] = ("float32",), *, counted: bool = False
) -> SampleCall | str:
    """Call with the facts that FP64 and narrower dtypes show, or a reason in a few words why it is useless.

    The facts are whether it writes and, if `smooth`, has finite gradients. With special values, results may be infinite
    or NaN where FP64's are, also for inputs that are a little larger or smaller. Results are not
    counted again (`counted`) where inputs of the same shapes passed.
    """
    if not counted and call.variant in {*RESIZED, *LONG} and _results(call, tensors) > RESULTS:
        return f"has more than {RESULTS} results"
    anchor = torch.ones(1, dtype=torch.float64)
    widely = _run_widely(call, anchor, tensors)
    if isinstance(widely, str):
        return widely
    call, first, wide = widely
    if call.variant not in UNUSUAL and not _finite(first):
        return "is not finite"
    smooth = call.smooth and _smooth(call, anchor, wide)
    around = [] if call.variant not in UNUSUAL else [(f"float64 of inputs times {factor}", factor) for factor in NEARBY]
    for word, factor in (*((word, 1.0) for word in dtypes), *around):
        dtype = getattr(torch, word, torch.float64)
        narrow = [(value * factor).to(dtype) if value.is_floating_point() else value.clone() for value in tensors]
        if not _alike_in(call, anchor.to(dtype), narrow, first):
            return f"raises, or differs, in {word}"
        smooth = smooth and (bool(around) or _smooth(call, anchor.to(dtype), narrow))
    return replace(call, smooth=smooth, empty=not any(out.numel() for out in first))


def _results(call: SampleCall, tensors: Sequence[Tensor]) -> float:
    """Number of the results' elements, by meta tensors, which need no memory; infinite without a meta kernel."""
    if sum(tensor.numel() for tensor in tensors) <= FEW_ELEMENTS:
        return 0
    try:
        with torch.no_grad(), seeded(1):
            results = call(torch.ones(1, device="meta"), [tensor.to("meta") for tensor in tensors])
        return sum(out.numel() for out in results)
    except Exception:  # noqa: BLE001 - of many kinds
        return math.inf


def _run_widely(
    call: SampleCall, anchor: Tensor, tensors: Sequence[Tensor]
) -> tuple[SampleCall, tuple[Tensor, ...], list[Tensor]] | str:
    """Runs a call twice in FP64: the call with its writes, results and inputs, or a reason why it is useless."""
    wide = [value.double() if value.is_floating_point() else value.clone() for value in tensors]
    versions = [value._version for value in wide]  # noqa: SLF001 - torch has no public name for it
    try:
        # Attention by its definition: its kernels are tagged random even where they are not.
        with torch.no_grad(), seeded(1), sdpa_kernel(SDPBackend.MATH), _Watch() as watch:
            first = call(anchor, wide)
        writes = any(  # batch norm writes statistics without declaring it
            value._version != version  # noqa: SLF001 - torch has no public name for it
            or not torch.equal(value.nan_to_num(), before.nan_to_num().to(value.dtype))
            for value, version, before in zip(wide, versions, tensors, strict=True)
        )
        call = replace(call, writes=writes)
        wide = [value.double() if value.is_floating_point() else value.clone() for value in tensors]
        with torch.no_grad(), seeded(2):
            second = call(anchor, wide)
    except Exception as error:  # noqa: BLE001 - OpInfo has samples that an operator refuses
        return f"raises {type(error).__name__}"
    if not first:
        return "returns no dense tensors"
    if watch.draws or any(
        len(first) != len(second) or one.shape != other.shape or not _same(one, other)
        for one, other in zip(first, second, strict=False)
    ):
        return "is random"
    if watch.float16 and call.variant in MIXED:
        return "rounds to float16 in between, which a compiler need not"
    return call, first, wide


def _alike_in(call: SampleCall, anchor: Tensor, tensors: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Runs an operator in the anchor's dtype, and compares NaN and infinities with the expected ones.

    Tiny numbers may underflow in between, and those of an expanded tensor cancel: such results must be close too.
    """
    close = _close if call.variant in {*SCALED, *SHIFTED, "expanded"} else lambda *_: True
    try:
        with torch.no_grad(), seeded(1):
            results = call(anchor, tensors)
            return all(map(_alike_pattern, expected, results)) and all(map(close, expected, results))
    except Exception:  # noqa: BLE001 - many operators have no kernel for half precision
        return False


def _alike_pattern(one: Tensor, other: Tensor) -> bool:
    """Compares the places of NaN and infinities of two results."""
    return one.shape == other.shape and all(
        torch.equal(kind(one), kind(other)) for kind in (torch.isnan, torch.isposinf, torch.isneginf)
    )


def _close(one: Tensor, other: Tensor) -> bool:
    """Compares two results by their norms, to eight bits."""
    if not one.is_floating_point():
        return True
    return bool(torch.linalg.vector_norm(one - other.double()) <= 2**-8 * torch.linalg.vector_norm(one.double()))


def _finite(results: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(out).all()) for out in results)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Detects operators that draw random numbers, even from a seed of OpInfo's, or round to float16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.draws = False
        self.float16 = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        out = func(*args, **(kwargs or {}))
        computes = not func.is_view and func.overloadpacket.__name__ not in UNROUNDED
        leaves = pytree.tree_leaves(out) if computes else ()
        self.float16 = self.float16 or any(isinstance(leaf, Tensor) and leaf.dtype == torch.float16 for leaf in leaves)
        return out


def _same(one: Tensor, other: Tensor) -> bool:
    """Compares two results except for the last bits, which may depend on memory addresses."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-9, atol=1e-12, equal_nan=True)


def _smooth(call: SampleCall, anchor: Tensor, wide: Sequence[Tensor]) -> bool:
    """True if the gradients exist and are finite."""
    wide = [value.detach().clone().requires_grad_(value.is_floating_point()) for value in wide]
    try:
        outs = [out for out in call(anchor, wide) if out.requires_grad]
        gradients = torch.autograd.grad(
            outs,
            [value for value in wide if value.requires_grad],
            [torch.ones_like(out) for out in outs],
            allow_unused=True,
        )
        present = [gradient for gradient in gradients if gradient is not None]
        return bool(present) and _finite(present)
    except Exception:  # noqa: BLE001 - operators without a derivative raise one of several
        return False
