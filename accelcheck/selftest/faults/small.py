"""Faults of what is small: the views that measure with the size of a whole tensor do not see them."""

from __future__ import annotations

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, fault
from accelcheck.selftest.faults.plant import replacing

_BOTH = (Mode.FORWARD, Mode.BACKWARD)


def smallest_column(factor: float) -> Change:
    """Multiplies the column of the smallest norm."""

    def spoiled(out: Tensor) -> Tensor:
        return torch.where(
            torch.arange(out.shape[-1], device=out.device) == out.norm(dim=0).argmin(), factor * out, out
        )

    return replacing(out=spoiled)


def ranked(factor: float, first: int, count: int) -> Change:
    """Multiplies elements of each row by their rank among the row's sizes."""

    def spoiled(out: Tensor) -> Tensor:
        ranks = out.abs().argsort(-1).argsort(-1)
        return torch.where((ranks >= first) & (ranks < first + count), factor * out, out)

    return replacing(out=spoiled)


FAULTS = (
    fault("small-channel-negative", "The smallest channel of a result has the other sign.")(
        tuple(Cell("scaled-channels", mode) for mode in _BOTH), lambda _: smallest_column(-1.0)
    ),
    fault("small-channel-zero", "The smallest channel of a result is zero.")(
        tuple(Cell("scaled-channels", mode) for mode in _BOTH), lambda _: smallest_column(0.0)
    ),
    fault(
        "small-probabilities-too-large", "Five of the 512 probabilities of each row, all of them small, are too large."
    )((Cell("softmax-peaked"),), lambda strength: ranked(1.0 + strength, 200, 5), strengths=(100.0, 1.0)),
    fault("small-probabilities-flushed", "The smallest four of the 512 probabilities of each row are zero.")(
        (Cell("softmax-peaked"),), lambda _: ranked(0.0, 0, 4)
    ),
)
