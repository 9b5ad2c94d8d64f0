"""Mixture of experts by grouped products, against a loop over the experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from accelcheck.core.capability import BY_TRIAL, Capability, Code, unsupported
from accelcheck.core.case import Mode
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import at_least, exactly, operators
from accelcheck.workloads.large_models import Experts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.core.case import Evidence
    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies groups of rows, which end at `ends`, by a matrix each; rows after the last group are undefined.

    So are their gradients. The gradient of the result must have strides: torch refuses an expanded one, as of a sum.
    """
    product: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm")  # noqa: B009
    out: Tensor = product(rows, weights, offs=ends)
    return out


def by_groups(experts: Experts, rows: Tensor, ends: Tensor) -> Tensor:
    """Computes `Experts.forward` by two grouped products. Undefined rows stay: the layer masks before and after."""
    ends = ends.to(torch.int32)
    return grouped_mm(silu(grouped_mm(rows, experts.up, ends)), experts.down, ends)


def by_padded_groups(experts: Experts, rows: Tensor, ends: Tensor, align: int = 8) -> Tensor:
    """Computes `Experts.forward` with groups filled up with rows of zeros to multiples of `align`, as kernels ask."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    filled = (sizes + align - 1) // align * align
    number = torch.arange(len(rows), device=rows.device)
    group = (number.unsqueeze(1) >= ends).sum(1)
    shift = (filled.cumsum(0) - filled) - (ends - sizes)
    places = torch.where(group < len(ends), number + shift[group.clamp(max=len(ends) - 1)], len(rows) * 2)
    places = places.clamp(max=len(rows) + align * len(ends))  # dropped rows share the last place, after all groups
    wide = rows.new_zeros(len(rows) + align * len(ends) + 1, rows.shape[1]).index_add(0, places, rows)
    return by_groups(experts, wide, filled.cumsum(0))[places]


class GroupedExperts(Technique):
    """Replaces the forward of each layer of experts."""

    family = "fused"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.grouped_mm.html"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})
    dtypes = ("float32", "bfloat16")
    workloads = frozenset({"experts"})
    differentiates_twice = False

    def __init__(self, name: str, promise: str, forward: Any) -> None:
        self.name, self.promise, self.forward = name, promise, forward

    def capability(self, device: Device) -> Capability:
        """Tries one product of three groups, one of them empty."""
        rows, ends = torch.ones(8, 16), torch.tensor([3, 3, 8], dtype=torch.int32)
        try:
            place = device.torch_device()
            got = grouped_mm(rows.to(place), torch.ones(3, 16, 16).to(place), ends.to(place)).cpu()
        except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
            reason = f"{device.name} multiplies no groups: {str(error).splitlines()[0]}"
            return unsupported(Code.NO_FEATURE, reason, tried=True)
        if not bool((got == 16).all()):
            raise RuntimeError(f"{device.name}: grouped products of 16 ones: expected 16, got {got.unique().tolist()}")
        return BY_TRIAL

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        layers = [part for part in program.module.modules() if isinstance(part, Experts)]
        if not layers:
            reason = "the module has no layer of experts of `accelcheck.workloads.large_models`"
            raise Unsupported(unsupported(Code.NO_EFFECT, reason))
        for layer in layers:
            layer.forward = partial(self.forward, layer)  # type: ignore[method-assign]  # on this instance alone

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = 2 if mode is Mode.FORWARD else 6
        yield at_least("grouped products (aten::_grouped_mm)", log.count("aten::_grouped_mm"), wanted)
        yield exactly("products of the router and its gradients alone", _products(log), 1 if wanted == 2 else 3)


def _products(log: Log) -> int:
    return operators(log).count("aten::(mm|addmm)")


TECHNIQUES: tuple[Technique, ...] = (
    GroupedExperts("moe-grouped-mm", "One grouped product for all experts equals a loop over the experts.", by_groups),
    GroupedExperts(
        "moe-grouped-mm-padded", "Groups filled up with zeros to whole tiles give what a loop gives.", by_padded_groups
    ),
)
