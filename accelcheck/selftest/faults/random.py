"""Faults of dropout: scale, rate, seed and dependent masks; and a correct dropout with another generator."""

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import dropout as plain_dropout

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, fault, variant
from accelcheck.selftest.faults.plant import always, changing, wrapping
from accelcheck.workloads.base import Program

Drop = Callable[[Tensor, float, int], Tensor]

GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""The constants of SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit numbers."""


def dropping(drop: Drop, *, evaluating: bool = False) -> Change:
    """Replace the dropout of every layer by ``drop(x, rate, place)``, where `evaluating` in evaluation mode too.

    The place is the number of the layer in the pass.
    """

    def call(plain: Any, *inputs: Any) -> Any:
        places = itertools.count()

        def dropout(  # torch's own signature
            x: Tensor,
            p: float = 0.5,
            training: bool = True,  # noqa: FBT001, FBT002
            inplace: bool = False,  # noqa: FBT001, FBT002
        ) -> Tensor:
            return drop(x, p, next(places)) if training or evaluating else x

        with mock.patch.object(functional, "dropout", dropout):
            return plain(*inputs)

    return wrapping(call)


def masked(x: Tensor, draws: Tensor, rate: float, scale: float) -> Tensor:
    """`x` where uniform `draws` are at or above `rate`, rescaled."""
    return x * (draws >= rate).to(x.device) * scale


def unscaled(strength: float) -> Change:
    """Kept elements are not, or not fully, divided by the probability of keeping them."""
    return dropping(lambda x, rate, _: plain_dropout(x, rate) * (1.0 - strength * rate))


def other_rate(strength: float) -> Change:
    """The rate is larger than asked for, by this share. The scale is right."""
    return dropping(lambda x, rate, _: masked(x, torch.rand(x.shape), rate * (1.0 + strength), 1.0 / (1.0 - rate)))


def drawing(draw: Callable[[Tensor, int], Tensor]) -> Change:
    """Replace the uniform draws by ``draw(x, place)``, with the right rate and scale."""
    return dropping(lambda x, rate, place: masked(x, draw(x, place), rate, 1.0 / (1.0 - rate)))


def unseeded(strength: float) -> Change:
    """The same seed gives another mask. No seed sets its generator."""
    generator = torch.Generator().manual_seed(1)
    return drawing(lambda x, _: torch.rand(x.shape, generator=generator))


@always(drawing)
def repeated(x: Tensor, place: int) -> Tensor:
    """Every call has the same mask. The generator's state is read and not advanced."""
    return torch.rand(x.shape, generator=torch.Generator().manual_seed(torch.initial_seed() + place))


def shared(strength: float) -> Change:
    """All layers of a step have the same mask. The generator's offset comes from the step, not from the layer."""
    drawn: list[Tensor] = []

    def draw(x: Tensor, place: int) -> Tensor:
        if place == 0:
            drawn[:] = [torch.rand(x.shape)]
        return drawn[0]

    return drawing(draw)


def in_evaluation(strength: float) -> Change:
    """Evaluation mode drops."""
    return dropping(lambda x, rate, _: plain_dropout(x, rate), evaluating=True)


def neighbours(share: float) -> Change:
    """Neighbours share one draw; the strength is the share of such pairs."""

    def draw(x: Tensor, place: int) -> Tensor:
        draws = torch.rand(x.shape)
        follows = (torch.rand(x.shape) < share) & (torch.arange(x.shape[-1]) % 2 == 1)
        return torch.where(follows, draws.roll(1, -1), draws)

    return drawing(draw)


def repeating_rows(rows: float) -> Change:
    """Masks of rows repeat after this number of rows."""

    def draw(x: Tensor, place: int) -> Tensor:
        return torch.rand(int(rows), x.shape[-1]).repeat(len(x) // int(rows) + 1, 1)[: len(x)]

    return drawing(draw)


class Recomputed(torch.autograd.Function):
    """A checkpoint that does not restore the generator, so that the recomputed block has another mask."""

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        again = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(again)
        torch.autograd.backward(out, gradients)
        return None, again.grad


@always(changing)
def recomputed(program: Program) -> None:
    """A recomputed block has another mask. The generator's state of the forward pass is not restored."""
    for name, block in program.module.named_modules():
        if name.startswith("blocks.") and name.count(".") == 1:
            block.forward = functools.partial(_again, block.forward)


def _again(plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return plain(x)
    out: Tensor = Recomputed.apply(plain, x)  # type: ignore[no-untyped-call]  # torch annotates Function only in part
    return out


def attending(drop: Callable[[Tensor, float], Tensor]) -> Change:
    """Unfused attention with another dropout of its weights: ``drop(weights, rate)``."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float) -> Tensor:
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        return (drop(weights, dropout_p) if dropout_p else weights) @ v

    def call(plain: Any, *inputs: Any) -> Any:
        with mock.patch.object(functional, "scaled_dot_product_attention", attention):
            return plain(*inputs)

    return wrapping(call)


def unscaled_attention(strength: float) -> Change:
    """Kept attention weights are not divided by the probability of keeping them."""
    return attending(lambda weights, rate: plain_dropout(weights, rate) * (1.0 - strength * rate))


@always(attending)
def shared_heads(weights: Tensor, rate: float) -> Tensor:
    """All heads of attention have the same mask."""
    kept = torch.rand(weights.shape[0], 1, *weights.shape[2:]) >= rate
    return weights * kept.to(weights.device) / (1.0 - rate)


def splitmix(count: int, seed: int) -> Tensor:
    """Uniform numbers of ``[0, 1)`` with 24 bits, FP32 ``(count,)``: SplitMix64 of consecutive counters in int64."""
    z = (torch.arange(count, dtype=torch.int64) + 1) * GOLDEN + seed
    z = (z ^ _right(z, 30)) * FIRST
    z = (z ^ _right(z, 27)) * SECOND
    return _right(z ^ _right(z, 31), 40).float() / 2**24


def _right(z: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: zeros come in, not the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@always(drawing)
def counted(x: Tensor, place: int) -> Tensor:
    """Masks of a counter-based generator, SplitMix64. A number of the global generator keys each mask."""
    return splitmix(x.numel(), int(torch.randint(-(2**62), 2**62, ()))).view(x.shape)


def dropped_weights() -> Change:
    """Unfused attention with dropout. Weights go through the plain dropout operator."""
    return attending(plain_dropout)


RANDOM = Mode.RANDOM
ALONE, BLOCKS, ATTENTION = (Cell(name, RANDOM) for name in ("dropout", "dropout-blocks", "attention-dropout"))

FAULTS = (
    fault("dropout-not-rescaled")(ALONE, unscaled, strengths=(1.0, 0.3), number=23),
    fault("attention-dropout-not-rescaled")(ATTENTION, unscaled_attention, number=23),
    fault("dropout-rate-wrong")(ALONE, other_rate, strengths=(1.0, 0.1), number=23),
    fault("dropout-unseeded")(ALONE, unseeded, number=23),
    fault("dropout-repeated")(ALONE, repeated, number=23),
    fault("dropout-in-evaluation")(ALONE, in_evaluation, number=23),
    fault("dropout-neighbours-alike")(ALONE, neighbours, strengths=(1.0, 0.1), number=24),
    fault("dropout-rows-repeat")(ALONE, repeating_rows, strengths=(1.0, 256.0), number=24),
    fault("dropout-layers-alike")(BLOCKS, shared, number=24),
    fault("dropout-heads-alike")(ATTENTION, shared_heads, number=24),
    fault("recompute-draws-anew")(BLOCKS, recomputed, number=25),
)

VARIANTS = (
    variant("dropout-by-counter")((ALONE, BLOCKS), counted),
    variant("attention-dropout-in-products")(ATTENTION, dropped_weights),
)
