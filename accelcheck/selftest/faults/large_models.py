"""Faults of what large models use: experts, fused losses, control flow, block-scaled formats, Muon, regional code."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from accelcheck.core.case import Mode
from accelcheck.devices import torch_names
from accelcheck.selftest.faults.base import Change, alike, derived, fault, single, trained, variant
from accelcheck.selftest.faults.plant import calling, spoiling
from accelcheck.selftest.faults.sowing import fresh_code, replacing, swapped
from accelcheck.techniques.compilation import regional
from accelcheck.techniques.fused import kernels
from accelcheck.techniques.fused.kernels import KERNELS
from accelcheck.techniques.fused.packages import TECHNIQUES as PACKAGES
from accelcheck.techniques.quantization.float8_training import TECHNIQUES as FLOAT8
from accelcheck.techniques.quantization.microscaling import TECHNIQUES as BLOCKS
from accelcheck.techniques.quantization.microscaling import BlockScaledLinear
from accelcheck.workloads.base import Program
from accelcheck.workloads.large_models import GroupedExperts, VocabularyLoss


def grouped(wrong: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Any:
    """Changes rows, weights and ends of every grouped product."""
    return lambda _: swapped(kernels, "grouped_mm", lambda plain, *given: plain(*wrong(*given)))


def of_part(kind: type[nn.Module], method: str, wrong: Callable[..., Tensor]) -> Callable[[float], Change]:
    """Computes ``wrong(plain, *inputs)`` in place of a method that a technique gives to parts of a module."""

    def change(program: Program) -> None:
        for part in program.module.modules():
            if isinstance(part, kind):
                setattr(part, method, partial(wrong, getattr(part, method)))

    return lambda _: change


of_loss = partial(of_part, VocabularyLoss, "loss")


def over_all(plain: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """The mean is over all targets, with those that are ignored."""
    out: Tensor = plain(hidden, target) * ((target >= 0).sum() / len(target))
    return out


def last_lost(plain: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """The gradient of the last row of a chunk is lost."""
    out: Tensor = plain(torch.cat([hidden[:-1], hidden[-1:].detach()]), target)
    return out


def scaled(plain: Any, x: Tensor) -> Tensor:
    """The last row of a kernel's result is 0.4 % too large."""
    out: Tensor = plain(x)
    return torch.cat([out[:-1], out[-1:] * 1.00390625])


def second_late(plain: Any, x: Tensor, positions: Tensor) -> Tensor:
    """The second token is rotated like the third."""
    out: Tensor = plain(x, torch.where(positions == 1, 2, positions))
    return out


def passed(plain: Any, x: Tensor) -> Tensor:
    """A norm has the gradient of the identity."""
    out: Tensor = plain(x.detach()) + (x - x.detach())
    return out


def gates_swapped(plain: Any, x: Tensor) -> Tensor:
    """A gated unit takes the gate for the factor, and the factor for the gate."""
    (layer,) = plain.args
    out: Tensor = plain.func(SimpleNamespace(gate=layer.up, up=layer.gate, down=layer.down), x)
    return out


def pair_left(plain: Any, x: Tensor, positions: Tensor) -> Tensor:
    """The last pair of elements is not rotated."""
    left = torch.arange(x.shape[-1], device=x.device) % (x.shape[-1] // 2) == x.shape[-1] // 2 - 1
    return torch.where(left, x, plain(x, positions))


@replacing(KERNELS, "launch")
def block_left(plain: Any, kernel: Any, x: Tensor) -> Tensor:
    """The last block of a user's kernel is not launched."""
    return torch.cat([plain(kernel, x.flatten()[:-128]), torch.zeros_like(x.flatten()[:128])]).reshape(x.shape)


def scales_turned(program: Program) -> None:
    """Scales of blocks are those of the next row."""
    for layer in program.call.modules():  # type: ignore[union-attr]  # a module, as this technique makes it
        if isinstance(layer, BlockScaledLinear):
            layer.held.scale.copy_(layer.held.scale.view(torch.uint8).roll(1, 0).view(layer.held.scale.dtype))


@replacing("torchao.prototype.mx_formats.mx_tensor:MXTensor", "to_mx")
def rounded_down(plain: Any, x: Tensor, elements: Any, block: int, how: Any) -> Any:
    """Scales that are powers of two are rounded down. The largest elements are cut off."""
    return plain(x, elements, block, type(how).FLOOR)


@replacing("torchao.float8.float8_linear", "hp_tensor_to_float8_dynamic")
def grown(plain: Any, x: Tensor, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
    """Gradients that are cast to float8 are a sixteenth too large."""
    return plain(x * 1.0625 if dtype == torch.float8_e5m2 else x, dtype, *args, **options)


def without(**options: Any) -> Callable[[float], Change]:
    """Changes options of Muon."""

    def spoil(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update({name: value for name, value in options.items() if name in group})

    return spoiling(spoil)


def first_block(strength: float) -> AbstractContextManager[Any]:
    """The graph of a block has the weights of the first block as constants."""

    def wrong(plain: Any, block: nn.Module, run: Any, kinds: list[Any]) -> Any:
        first.append(block)
        forward = plain(block, run, kinds)

        def called(*inputs: Any) -> Any:
            held = {name: value.data for name, value in block.named_parameters()}
            for name, value in first[0].named_parameters():
                block.get_parameter(name).data = value.data
            try:
                return forward(*inputs)
            finally:
                for name, kept in held.items():
                    block.get_parameter(name).data = kept

        return called

    first: list[nn.Module] = []
    return swapped(regional, "recorded", wrong)


def by_masks(module: Any, x: Tensor, choice: Tensor) -> Tensor:
    """Every expert computes all tokens. A mask selects."""
    layer: GroupedExperts = module.experts
    one_hot = nn.functional.one_hot(choice.flatten(), len(layer.up))
    place = ((one_hot.cumsum(0) - 1) * one_hot).sum(1)
    taken = module.router(x).softmax(-1).gather(1, choice) * (place < 12).reshape(choice.shape)
    weights = torch.zeros(len(x), len(layer.up), dtype=x.dtype, device=x.device).scatter_add(1, choice, taken)
    every = torch.einsum("ekw,enk->enw", layer.down, silu(torch.einsum("nk,ekw->enw", x, layer.up)))
    return torch.einsum("enw,ne->nw", every, weights)


def by_logsumexp(module: Any, x: Tensor, target: Tensor) -> Tensor:
    """The loss is a difference of logarithms."""
    logits = module.head(torch.tanh(module.body(x)))[target >= 0]
    own = logits.gather(1, target[target >= 0].unsqueeze(1)).squeeze(1)
    out: Tensor = (logits.logsumexp(1) - own).mean()
    return out


group = alike(technique="moe-grouped-mm", absent={"bfloat16": "planted in float32: the same product"})
mx = alike(technique="mxfp8", exists=BLOCKS[0].capability)
interpreted = alike(seeds=1)
triton = alike(technique="triton-custom-op", exists=kernels.TECHNIQUES[-2].answer, seeds=1)
NORM, GATE, TURN = PACKAGES[2:5]
MOE, LOSS = ((single("grouped-experts"), derived("grouped-experts")), derived("vocabulary-loss"))

FAULTS = (
    group("experts-group-short", "A group ends one row too early, and the next one begins there.")(
        MOE, around=grouped(lambda rows, weights, ends: (rows, weights, ends - (ends == ends[0]).to(ends.dtype)))
    ),
    group("experts-next-weights", "Groups are multiplied by the matrices of the next expert.")(
        MOE, around=grouped(lambda rows, weights, ends: (rows, weights.roll(1, 0), ends))
    ),
    fault("loss-counts-ignored", over_all)(LOSS, of_loss(over_all), technique="linear-cross-entropy"),
    fault("loss-gradient-lost", last_lost)(LOSS, of_loss(last_lost), technique="linear-cross-entropy"),
    *(
        fault(f"{technique.name}-{word}", wrong)(LOSS, of_loss(wrong), technique=technique, exists=technique.answer)
        for technique in PACKAGES
        if technique.part is VocabularyLoss and "float32" in technique.dtypes
        for word, wrong in (("counts", over_all), ("gradient", last_lost))
    ),
    *(
        interpreted(f"{technique.name}-{word}", wrong)(
            cell, of_part(technique.part, technique.method, wrong), technique=technique, exists=technique.answer
        )
        for technique, word, wrong, cell in (
            (NORM, "gradient", passed, derived("decoder")),
            (NORM, "scale", scaled, single("decoder")),
            (GATE, "sides", gates_swapped, single("decoder")),
            (GATE, "scale", scaled, single("decoder")),
            (TURN, "pair", pair_left, single("decoder")),
            (TURN, "position", second_late, single("decoder")),
        )
    ),
    triton("triton-block-left")(single("elementwise-5"), around=block_left),
    triton("triton-gradient-passed", "A user's operator has the gradient of the identity.")(
        single("elementwise-5", Mode.BACKWARD),
        around=lambda _: fresh_code(replacing(KERNELS, "slope")(lambda _, x: torch.ones_like(x))(1.0)),
    ),
    fault("cond-sides-swapped", "The branches of a condition are swapped.")(
        single("control-cond"),
        around=lambda _: swapped(torch, "cond", lambda plain, test, yes, no, given: plain(test, no, yes, given)),
        technique="torch-cond",
    ),
    fault("scan-reversed", "A scan begins with the last row.")(
        (single("control-scan"), derived("control-scan")),
        around=lambda _: swapped(torch_names, "scan", lambda plain, *given: plain(*given, reverse=True)),
        technique="torch-scan",
    ),
    mx("block-scales-turned", scales_turned)(single("mlp-blocks"), lambda _: scales_turned),
    mx("block-scales-rounded-down")(single("mlp-blocks"), around=rounded_down),
    fault("float8-gradients-grown")(
        derived("mlp-blocks"), around=grown, technique=FLOAT8[0], exists=FLOAT8[0].capability
    ),
    fault("muon-without-decay", "Muon leaves out the decay of weights.")(
        trained("train-mlp"), without(weight_decay=0.0), technique="muon", seeds=1
    ),
    fault("muon-other-coefficients", "The last coefficient of Muon's iteration is 1 % too large.")(
        trained("train-mlp"), without(ns_coefficients=(3.4445, -4.775, 2.052)), technique="muon", seeds=1
    ),
    fault("regional-first-weights")(single("mlp-blocks"), around=first_block, technique="compile-regional", seeds=1),
)

VARIANTS = (
    variant("experts-by-masks", by_masks)(MOE, lambda: calling(by_masks)),
    variant("loss-by-logsumexp", by_logsumexp)(LOSS, lambda: calling(by_logsumexp)),
)
