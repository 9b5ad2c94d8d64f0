"""Faults of attention: masks, their alignment and empty rows, and the scale."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.selftest.faults.base import Cell, Change, backward, fault
from accelcheck.selftest.faults.compute import attention, causal
from accelcheck.selftest.faults.plant import always, backwards, calling


def leaking(count: float, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries of the last whole tile see the key after it. They are the last `count`."""
    query = torch.arange(q.size(-2), device=q.device).unsqueeze(-1)
    key = torch.arange(k.size(-2), device=k.device)
    last = k.size(-2) - 1
    return attention(q, k, v, (key <= query) | ((key == last) & (query >= last - count)))


def shifted(by: float, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query sees one key more, or one less, than it should. The first one always sees a key."""
    seen = causal(q.size(-2), k.size(-2), q.device, int(by))
    first = torch.arange(k.size(-2), device=k.device) == 0
    return attention(q, k, v, seen | (first & ~seen.any(-1, keepdim=True)))


def padded(more: float, module: Any, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """One key of the padding is seen, or the last key is not. Sequences are taken to be `more` keys longer."""
    seen = torch.arange(k.size(2), device=k.device) < (lengths + int(more)).unsqueeze(-1)
    return attention(q, k, v, seen[:, None, None, :])


def bottom_right(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal masks end at the last key, where torch has them begin at the first."""
    return attention(q, k, v, causal(q.size(-2), k.size(-2), q.device, k.size(-2) - q.size(-2)))


def top_left(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A mask that lets the last query see the last key is taken for torch's causal one. The mask is ignored."""
    return attention(q, k, v, causal(q.size(-2), k.size(-2), q.device))


def plain_softmax(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query that sees no key gets NaN. Its softmax is 0 / 0."""
    return attention(q, k, v, mask, weigh=lambda scores: scores.softmax(-1))


def finite_mask(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A query that sees no key gets the mean of all values. The lowest finite number stands for -inf."""
    lowest = torch.finfo(torch.float32).min
    return attention(q, k, v, mask, weigh=lambda scores: scores.clamp(min=lowest).softmax(-1))


def rescaled(error: float, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores are scaled by a factor that is off."""
    return attention(q, k, v, causal(q.size(-2), k.size(-2), q.device) if module.causal else None, factor=1.0 + error)


def _forward(function: Callable[..., Tensor]) -> Callable[[float], Change]:
    return lambda strength: calling(partial(function, strength))


def _backward(function: Callable[..., Tensor]) -> Callable[[float], Change]:
    return lambda strength: backwards(partial(function, strength))


_SCALES = (0.05, 0.01, 0.003)
_ROUNDED_SCORES = {
    ("bfloat16", 0.003): "unfused attention may round scores to bfloat16, by up to 2**-8 = 0.39 % of each"
}

FAULTS = (
    fault("causal-leak", leaking)(Cell("attention-65"), _forward(leaking), (16.0, 1.0), number=1),
    fault("causal-leak-backward", "The backward pass has queries of the last whole tile see the key after it.")(
        backward("attention-65"), _backward(leaking), (16.0, 1.0), number=1
    ),
    fault("mask-off-by-one", shifted)(Cell("attention-causal"), _forward(shifted), (1.0, -1.0), number=2),
    fault(
        "mask-off-by-one-backward", "In the backward pass each query sees one key more, or one less, than it should."
    )(backward("attention-causal"), _backward(shifted), (1.0, -1.0), number=2),
    fault("length-off-by-one", padded)(Cell("attention-ragged"), _forward(padded), (1.0, -1.0), number=2),
    fault("causal-from-bottom-right")(Cell("attention-cross-causal"), always(calling)(bottom_right), number=3),
    fault("causal-from-bottom-right-backward", "In the backward pass causal masks end at the last key.")(
        backward("attention-cross-causal"), always(backwards)(bottom_right), number=3
    ),
    fault("causal-from-top-left")(Cell("attention-cross-right"), always(calling)(top_left), number=3),
    fault("masked-row-nan")(Cell("attention-empty-row"), always(calling)(plain_softmax), number=4),
    fault("masked-row-mean")(Cell("attention-empty-row"), always(calling)(finite_mask), number=4),
    fault("masked-row-backward", "A query that sees no key has the gradients of one that sees all.")(
        backward("attention-empty-row"), always(backwards)(finite_mask), number=4
    ),
    fault("softmax-scale", rescaled)(Cell("attention-causal"), _forward(rescaled), _SCALES, number=5),
    fault("softmax-scale-backward", "The backward pass scales scores by a factor that is off.")(
        backward("attention-causal"), _backward(rescaled), _SCALES, number=5, hidden=_ROUNDED_SCORES
    ),
)
