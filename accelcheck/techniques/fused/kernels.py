"""Grouped products of experts against a loop over them, and losses that never hold all logits of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from accelcheck.core.capability import BY_TRIAL, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.large_models import GroupedExperts, VocabularyLoss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Program, Workload

ROWS, ALIGN = 16, 8
"""Rows of logits in a chunk of the loss, and of which a padded group has a multiple."""
_DOCS = "https://docs.pytorch.org/docs/main/generated/torch.nn.functional."


def grouped_mm(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiplies groups of rows, which end at `ends`, by a matrix each; later rows and their gradients are undefined.

    The gradient of the result needs memory of its own: torch refuses an expanded one, such as a sum's.
    """
    product: Any = getattr(torch.nn.functional, "grouped_mm", None) or vars(torch)["_grouped_mm"]
    out: Tensor = product(rows, weights, offs=ends)
    return out


def by_groups(layer: GroupedExperts, rows: Tensor, ends: Tensor) -> Tensor:
    """Computes `GroupedExperts.forward` by two grouped products; the module masks undefined rows before and after."""
    ends = ends.to(torch.int32)
    return grouped_mm(silu(grouped_mm(rows, layer.up, ends)), layer.down, ends)


def by_padded_groups(layer: GroupedExperts, rows: Tensor, ends: Tensor) -> Tensor:
    """Computes `GroupedExperts.forward` with groups filled up by zeros to multiples of `ALIGN` rows."""
    sizes = ends.diff(prepend=ends.new_zeros(1))
    filled = ((sizes + ALIGN - 1) // ALIGN * ALIGN).cumsum(0)
    number, most = torch.arange(len(rows), device=rows.device), len(rows) + ALIGN * len(ends)
    group = (number.unsqueeze(1) >= ends).sum(1)
    begins = torch.cat([filled - filled.diff(prepend=filled.new_zeros(1)) - ends + sizes, filled.new_tensor([most])])
    places = (number + begins[group]).clamp(max=most)  # dropped rows share the last place, after all groups
    return by_groups(layer, rows.new_zeros(most + 1, rows.shape[1]).index_add(0, places, rows), filled)[places]


def by_chunks(layer: VocabularyLoss, hidden: Tensor, target: Tensor) -> Tensor:
    """Computes `VocabularyLoss.loss` by torch's fused loss, in chunks of `ROWS`."""
    options: Any = torch.nn.LinearCrossEntropyOptions
    fused: Any = torch.nn.functional.linear_cross_entropy
    out: Tensor = fused(hidden, layer.head.weight, target, options=options(batch_chunk_size=ROWS, chunking_method=None))
    return out


@dataclass(eq=False, kw_only=True)
class FusedKernel(Technique):
    """Replaces a method of a part of the module.

    Attributes:
        name, promise, source, workloads, dtypes: The same as of every technique.
        part, method: Class of the part, and name of its method.
        function: Function of the part and the method's arguments.
        operator, calls: Name of the fused operator, and its number of calls forward and in each training step.
        never: Pattern of the operators that it takes the place of.
        example: Function that tries the operator on a device, and returns a tensor of ones.
    """

    name: str
    promise: str
    source: str
    workloads: frozenset[str]
    part: type[nn.Module]
    method: str
    function: Callable[..., Tensor]
    operator: str
    calls: tuple[int, int]
    never: str
    example: Callable[[torch.device], Tensor]
    dtypes: tuple[str, ...] = ("float32",)
    family = "fused"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    differentiates_twice = False

    def refusal(self, workload: Workload) -> str:
        own = workload.name in self.workloads
        return super().refusal(workload) or ("" if own else f"replaces the {self.part.__name__} of its own workloads")

    def capability(self, device: Device) -> Capability:
        if device.has("torch-xla") and self.part is GroupedExperts:
            return unsupported(
                Code.NO_FEATURE, "torch_xla 2.9 has no aten::_grouped_mm, and ends the process that asks"
            )
        try:
            got = self.example(device.torch_device()).cpu()
        except (RuntimeError, AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"torch {torch.__version__} has no {self.operator} on {device.name}: {str(error).splitlines()[0]}"
            return unsupported(Code.NO_FEATURE, reason, tried=True)
        if not bool((got == 1).all()):
            raise RuntimeError(f"{device.name}: {self.operator} of an example: expected ones, got {got.tolist()}")
        return BY_TRIAL

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        parts = [part for part in program.module.modules() if isinstance(part, self.part)]
        if not parts:
            reason = f"the module has no accelcheck.workloads.large_models.{self.part.__name__}"
            raise Unsupported(unsupported(Code.NO_EFFECT, reason))
        for part in parts:
            setattr(part, self.method, partial(self.function, part))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        least = self.calls[mode is not Mode.FORWARD] * (program.steps if mode is Mode.TRAIN else 1)
        yield at_least(f"calls of {self.operator}", log.count(self.operator), least)
        yield exactly(f"calls of {self.never}", log.count(self.never), 0)


def _sixteenths(place: torch.device) -> Tensor:
    rows, weights = torch.ones(8, 16, device=place), torch.full((3, 16, 16), 0.0625, device=place)
    return grouped_mm(rows, weights, torch.tensor([3, 3, 8], dtype=torch.int32, device=place))


def _even(place: torch.device) -> Tensor:
    head = VocabularyLoss(2, 2).to(place).requires_grad_(requires_grad=False)
    head.head.weight.zero_()
    target = torch.zeros(4, dtype=torch.int64, device=place)
    return (by_chunks(head, torch.ones(4, 2, device=place), target) / 0.6931472).round(decimals=4)


_experts = partial(
    FusedKernel, source=f"{_DOCS}grouped_mm.html", workloads=frozenset({"grouped-experts"}), part=GroupedExperts,
    method="forward", operator="aten::_grouped_mm", calls=(2, 6), never="aten::bmm", example=_sixteenths,
    dtypes=("float32", "bfloat16"),
)  # fmt: skip
_loss = partial(
    FusedKernel, source=f"{_DOCS}linear_cross_entropy.html", part=VocabularyLoss,
    workloads=frozenset({"vocabulary-loss", "train-vocabulary"}), method="loss", calls=(1, 1),
    operator="torch_nn::_linear_cross_entropy_batch_chunked", never="aten::(nll_loss_forward|_log_softmax)",
    example=_even,
)  # fmt: skip

TECHNIQUES: tuple[Technique, ...] = (
    _experts(name="moe-grouped-mm", promise="One product for all experts equals a loop over them.", function=by_groups),
    _experts(
        name="moe-grouped-mm-padded", function=by_padded_groups,
        promise="Groups of tokens filled up to whole tiles give what a loop over the experts gives."),
    _loss(
        name="linear-cross-entropy", function=by_chunks,
        promise="Head and loss in chunks give the loss and gradients of both, without all logits."),
)  # fmt: skip
