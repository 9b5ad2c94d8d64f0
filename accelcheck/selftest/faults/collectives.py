"""Faults of gradient exchange between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Change, fault, single
from accelcheck.techniques.distributed.parallel import RANKS, Averaging, CompressedAveraging, Compressor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from accelcheck.techniques.distributed.parallel import Ranks
    from accelcheck.workloads.base import Program

TRAINING = (single("train-mlp", Mode.TRAIN),)


def ranks(edit: Callable[[Ranks], None]) -> Change:
    """A change to a program's ranks."""

    def change(program: Program) -> None:
        edit(program.extras[RANKS])

    return change


def weighing(weigh: Callable[[Sequence[int]], list[float]]) -> Change:
    """Weighs the ranks' gradients by `weigh` of their numbers of samples."""

    def edit(these: Ranks) -> None:
        these.weigh = weigh

    return ranks(edit)


def summed(sizes: Sequence[int]) -> list[float]:
    return [1.0] * len(sizes)


def alike(sizes: Sequence[int]) -> list[float]:
    return [1.0 / len(sizes)] * len(sizes)


def without_last(sizes: Sequence[int]) -> list[float]:
    return [size / sum(sizes[:-1]) for size in sizes[:-1]] + [0.0]


class Unreduced(Averaging):
    """Does not pass the last bucket to the collective.

    Args:
        plain: Exchange that it is planted in.
        share: Part of the gradient that is in the last bucket.
    """

    def __init__(self, plain: Averaging, share: float) -> None:
        super().__init__(plain.wire)
        self.share = share

    def __call__(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
        received = super().__call__(gradients, weights)
        last = max(1, int(len(received[0]) * self.share))
        for mine, own in zip(received, gradients, strict=True):
            mine[-last:] = own[-last:].cpu()
        return received


def unreduced(strength: float) -> Change:
    def edit(these: Ranks) -> None:
        these.exchange = Unreduced(these.exchange, strength)

    return ranks(edit)


class Forgetful(Compressor):
    """Compresses without error feedback: the part that is not sent is lost."""

    def compress(self, gradient: Tensor) -> Tensor:
        sent = super().compress(gradient)
        self.residual = None
        return sent


class Repeating(Compressor):
    """Adds the residual of the step before, and keeps it for the next step too."""

    def compress(self, gradient: Tensor) -> Tensor:
        before = self.residual
        sent = super().compress(gradient)
        if before is not None and self.residual is not None:
            self.residual = self.residual + before
        return sent


def compressing(make: Callable[[], Compressor]) -> Change:
    def edit(these: Ranks) -> None:
        if not isinstance(these.exchange, CompressedAveraging):
            raise TypeError(f"expected ranks that compress, got {type(these.exchange).__name__}")
        these.exchange.make = make

    return ranks(edit)


FAULTS = (
    *(
        fault(f"ddp-sum-for-mean-{world}", f"{world} ranks add their gradients and do not divide.")(
            TRAINING, lambda _: weighing(summed), number=32, technique=f"data-parallel-{world}", emulated=True
        )
        for world in (2, 3)
    ),
    fault("ddp-uneven-shards", "Ranks with unequal numbers of samples have equal weights.")(
        TRAINING, lambda _: weighing(alike), technique="data-parallel-3", emulated=True
    ),
    fault("ddp-rank-left-out", "The last rank's gradient never arrives.")(
        TRAINING, lambda _: weighing(without_last), technique="data-parallel-3", emulated=True
    ),
    fault("ddp-bucket-unreduced", "The last bucket is not reduced: each rank goes on with its own gradient.")(
        TRAINING, unreduced, strengths=(0.5, 0.001), technique="data-parallel-2", emulated=True
    ),
    fault("no-error-feedback", "What compression drops of a gradient is lost.")(
        TRAINING, lambda _: compressing(Forgetful), number=33, technique="data-parallel-compressed", emulated=True
    ),
    fault("error-feedback-repeated", "What compression dropped is sent again and again.")(
        TRAINING, lambda _: compressing(Repeating), number=33, technique="data-parallel-compressed", emulated=True
    ),
)
