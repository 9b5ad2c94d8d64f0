"""Grouped products of experts against a loop over them, losses that never hold all logits, users' Triton kernels."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from accelcheck.core.capability import BY_TRIAL, SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.devices.base import Device
from accelcheck.devices.packages import installed
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import Compilation, compiled, inductor_capability, reset_compiler
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.base import Program, Workload
from accelcheck.workloads.elementwise import Swish
from accelcheck.workloads.large_models import GroupedExperts, VocabularyLoss

ROWS, ALIGN = 16, 8
"""Rows of logits in a chunk of the loss, and of which a padded group has a multiple."""
KERNELS = "accelcheck.techniques.fused._swish"  # imported late: it imports triton
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
        name, promise, source, workloads, dtypes, packages: The same as of every technique.
        part, method: Class of the part, and name of its method.
        function: Function of the part and the method's arguments, or its name.
        operator, calls: Name of the fused operator, and its number of calls forward and in each training step.
        never: Pattern of the operators that it takes the place of.
        example: Function that tries `function` on a device, and returns a tensor of ones.
        exists: Capability of a device to have it, before it is tried.
    """

    name: str
    promise: str
    source: str
    workloads: frozenset[str]
    part: type[nn.Module]
    method: str
    function: Callable[..., Tensor] | str
    operator: str
    calls: tuple[int, int]
    never: str
    example: Callable[[Callable[..., Tensor], torch.device], Tensor]
    dtypes: tuple[str, ...] = ("float32",)
    packages: Mapping[str, str] = field(default_factory=dict)
    exists: Callable[[Device], Capability] = lambda _: SUPPORTED
    family = "fused"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    differentiates_twice = False

    def refusal(self, workload: Workload) -> str:
        own = workload.name in self.workloads
        return super().refusal(workload) or ("" if own else f"replaces the {self.part.__name__} of its own workloads")

    def capability(self, device: Device) -> Capability:
        """Tries the operator where it exists; `answer` tells of a package that is absent."""
        own = self.exists(device)
        if own.verdict is Verdict.UNSUPPORTED:
            return own
        if not own.ok or not all(map(installed, self.packages)):
            return replace(own, tried=True)
        try:
            got = self.example(self.loaded(), device.torch_device()).cpu()
        except (RuntimeError, AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"torch {torch.__version__} has no {self.operator} on {device.name}: {str(error).splitlines()[0]}"
            return unsupported(Code.NO_FEATURE, reason, tried=True)
        if not bool((got == 1).all()):
            raise RuntimeError(f"{device.name}: {self.operator} of an example: expected ones, got {got.tolist()}")
        return BY_TRIAL

    def loaded(self) -> Callable[..., Tensor]:
        """Returns the function, whose module may be imported only now."""
        found: Callable[..., Tensor] = resolve_name(self.function) if isinstance(self.function, str) else self.function
        return found

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        parts = [part for part in program.module.modules() if isinstance(part, self.part)]
        if not parts:
            reason = f"the module has no {self.part.__module__}.{self.part.__name__}"
            raise Unsupported(unsupported(Code.NO_EFFECT, reason))
        for part in parts:
            setattr(part, self.method, partial(self.loaded(), part))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        least = self.calls[mode is not Mode.FORWARD] * (program.steps if mode is Mode.TRAIN else 1)
        yield at_least(f"calls of {self.operator}", log.count(self.operator), least)
        yield exactly(f"calls of {self.never}", log.count(self.never), 0)


class UserKernel(FusedKernel, Compilation):
    """Replaces it by an operator with a kernel of ours, and compiles the module."""

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        reset_compiler()
        program.call = torch.compile(program.module, backend="inductor", dynamic=False)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield from compiled(log, mode, "inductor")


def _not_xla(device: Device) -> Capability:
    reason = "torch_xla 2.9 has no aten::_grouped_mm, and ends the process that asks"
    return unsupported(Code.NO_FEATURE, reason) if device.has("torch-xla") else SUPPORTED


def _triton(device: Device, *, interpreted: bool) -> Capability:
    if device.has("inductor-triton") or (interpreted and device.has("host")):
        return inductor_capability(device)
    advice = "use triton-custom-op, which its interpreter runs on the host"
    return unsupported(Code.NO_BACKEND, f"Triton compiles for GPUs, not for {device.name}", advice)


def _sixteenths(_: Callable[..., Tensor], place: torch.device) -> Tensor:
    rows, weights = torch.ones(8, 16, device=place), torch.full((3, 16, 16), 0.0625, device=place)
    return grouped_mm(rows, weights, torch.tensor([3, 3, 8], dtype=torch.int32, device=place))


def even(function: Callable[..., Tensor], place: torch.device) -> Tensor:
    """Tries a loss of `VocabularyLoss` on two words of the same score; returns one."""
    head = VocabularyLoss(2, 2).to(place).requires_grad_(requires_grad=False)
    head.head.weight.zero_()
    target = torch.zeros(4, dtype=torch.int64, device=place)
    return (function(head, torch.ones(4, 2, device=place), target) / 0.6931472).round(decimals=4)


_experts = partial(
    FusedKernel, source=f"{_DOCS}grouped_mm.html", workloads=frozenset({"grouped-experts", "speed-experts"}),
    part=GroupedExperts, method="forward", operator="aten::_grouped_mm", calls=(2, 6), never="aten::bmm", example=_sixteenths,
    dtypes=("float32", "bfloat16"), exists=_not_xla,
)  # fmt: skip
_kernel = partial(
    UserKernel, workloads=frozenset({"elementwise-5", "elementwise-30"}), part=Swish,
    method="forward", never="aten::silu", calls=(1, 1),
    example=lambda function, place: function(None, torch.full((3, 50), 1.2784645, device=place)).round(decimals=5),
    source="https://docs.pytorch.org/tutorials/recipes/torch_compile_user_defined_triton_kernel_tutorial.html",
    packages={"triton": "pip install 'accelcheck[triton]'"},
)  # fmt: skip

TECHNIQUES: tuple[Technique, ...] = (
    _experts(name="moe-grouped-mm", promise="One product for all experts equals a loop over them.", function=by_groups),
    _experts(
        name="moe-grouped-mm-padded", function=by_padded_groups,
        promise="Groups of tokens filled up to whole tiles give what a loop over the experts gives."),
    FusedKernel(
        name="linear-cross-entropy", function=by_chunks, source=f"{_DOCS}linear_cross_entropy.html", example=even,
        part=VocabularyLoss, method="loss", workloads=frozenset({"vocabulary-loss", "train-vocabulary"}), calls=(1, 1),
        operator="torch_nn::_linear_cross_entropy_batch_chunked", never="aten::(nll_loss_forward|_log_softmax)",
        promise="Head and loss in chunks give the loss and gradients of both, without all logits."),
    _kernel(
        name="triton-custom-op", function=f"{KERNELS}:by_operator", operator="accelcheck::silu",
        exists=partial(_triton, interpreted=True),
        promise="A user's Triton kernel in an operator that the compiler does not enter gives what eager's gives."),
    _kernel(
        name="triton-op", function=f"{KERNELS}:by_traced_operator", exists=partial(_triton, interpreted=False),
        operator="swish_kernel.*",
        promise="A user's Triton kernel that the compiler takes into its graph gives what eager's operator gives."),
)  # fmt: skip
