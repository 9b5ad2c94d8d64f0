"""Communication hooks of DistributedDataParallel, in real processes: a user's own, 16 bits, PowerSGD, top-k, 8 bits.

Hooks that compress give other results than plain averaging, by design. Each is judged by an FP64 oracle that compresses
in the same way (`accelcheck.techniques.distributed.hook_oracles`), with FP32's budget. Error feedback loses nothing,
which is checked exactly.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from accelcheck.core.case import Evidence
from accelcheck.techniques.base import Technique
from accelcheck.techniques.distributed import compression
from accelcheck.techniques.distributed.data_parallel import SMALL_BUCKET, DataParallel, Size, listed, trained, whole
from accelcheck.techniques.distributed.ddp import Exchange, HookedAveraging, Replicated
from accelcheck.techniques.distributed.hook_oracles import Halves, Integers, Largest, LowRank, Scheme, shared_out
from accelcheck.techniques.distributed.strategy import RankReport
from accelcheck.workloads.base import Program

Hook = Callable[[], Exchange]

HOOKS = "https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html"
SHARE = 1 / 8
"""Part of the gradient that top-k sends."""
THIN = 1
"""Rank of PowerSGD's products: torch's default."""
RATE = 2.0
"""Smallest saving for which PowerSGD compresses a matrix: torch's default."""


class Hooked(DataParallel):
    """Communication hook that is called in place of the all-reduce."""

    def __init__(
        self, name: str, hook: Hook, size: Size, promise: str, source: str = HOOKS, *, bucket_mb: float | None = None
    ) -> None:
        super().__init__(name, 2, lambda: Replicated(bucket_mb=bucket_mb, exchange=hook()), promise, source, size=size)

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        calls = [answer.facts["hook calls"] for answer in answers]
        yield Evidence(f"hook calls of each rank >= {program.steps}", listed(calls), min(calls) >= program.steps)


class Asynchronous(Hooked):
    """Hook that divides when the all-reduce is done."""

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        calls, averaged = ([answer.facts[fact] for answer in answers] for fact in ("hook calls", "averaged"))
        claim = f"buckets averaged in a future = hook calls: {listed(calls)}"
        yield Evidence(claim, listed(averaged), engaged=averaged == calls)


class Lossless(Hooked):
    """Hook with the invariant that sent parts and residual of each rank and parameter add up to the gradients."""

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        counts = [(rank, *item) for rank, answer in enumerate(answers) for item in answer.facts["lost"].items()]
        lost = [f"{name} x{count} of rank {rank}" for rank, name, count in counts]
        accounts = {answer.facts["accounts"] for answer in answers}
        claim = "elements whose sum sent and residual are not the sum of their gradients = 0"
        yield Evidence(claim, ", ".join(lost) or 0, engaged=not lost and accounts == {len(trained(program))})


class Compressed(Hooked):
    """Hook that rounds or drops, and an FP64 oracle whose exchange, made by `scheme`, does the same."""

    level = 3  # each has an oracle of its own, which computes every rank's part
    early = frozenset({"train-mlp", "train-bags"})

    def __init__(
        self, name: str, hook: Hook, scheme: Callable[[], Scheme], size: Size, promise: str, source: str = HOOKS
    ) -> None:
        super().__init__(name, hook, size, promise, source)
        self.scheme = scheme

    @property
    def oracle(self) -> str:
        return f"float64 with gradients as of {self.name}"

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return shared_out(module, self.world, self.scheme())

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        sent, plain = sum(answers[0].sent), 4 * program.steps * sum(p.numel() for p in trained(program))
        yield Evidence(f"bytes sent by rank 0 < {plain}, those of whole gradients", sent, engaged=sent < plain)


class FedBack(Lossless, Compressed):
    """Hook that compresses with error feedback."""


def top_k(shapes: Sequence[torch.Size], step: int) -> int:
    """Returns the bytes of a top-k step: 4 for an element, and 4 for its index."""
    return 8 * compression.largest(SHARE, sum(shape.numel() for shape in shapes))


def eight_bits(shapes: Sequence[torch.Size], step: int) -> int:
    """Returns the bytes of an 8-bit step: one an element, and the scale of the bucket."""
    return sum(shape.numel() for shape in shapes) + 4


def low_rank(rank: int, rate: float) -> Size:
    """Makes the `Size` of PowerSGD's steps."""

    def size(shapes: Sequence[torch.Size], step: int) -> int:
        thin = [0 if step < compression.PLAIN_STEPS else compression.worthwhile(shape, rank, rate) for shape in shapes]
        return 4 * sum(count or shape.numel() for count, shape in zip(thin, shapes, strict=True))

    return size


_ASYNC = (
    "A hook that sums asynchronously and divides in the future's callback averages as DistributedDataParallel does."
)
_HALF = "Gradients are rounded to {}, divided, and added up in it: half the bytes."
_THIN = "A product of thin matrices is the mean gradient seen through one column space; what it misses is sent later."
_FULL = "With as high a rank as a matrix can have, PowerSGD is plain averaging."
_TOP_K = f"An {round(1 / SHARE)}th of the elements, the largest, are sent, and the others later: none is lost."
_INT8 = "Gradients are sent as 8-bit multiples of a scale; what rounding drops is sent later."
_POWER, _FED_BACK, _ROUNDED = compression.PowerSgd, compression.ErrorFeedback, compression.HalfPrecision
_MEMORY, _BYTES = "https://arxiv.org/abs/1809.07599", "https://arxiv.org/abs/1901.09847"

TECHNIQUES: tuple[Technique, ...] = (
    Asynchronous("ddp-async", HookedAveraging, whole(4), _ASYNC, bucket_mb=SMALL_BUCKET),
    *(
        Compressed(f"ddp-{name}-hook", partial(_ROUNDED, dtype), partial(Halves, dtype), whole(2), _HALF.format(word))
        for name, word, dtype in (("fp16", "float16", torch.float16), ("bf16", "bfloat16", torch.bfloat16))
    ),
    FedBack("ddp-powersgd", partial(_POWER, THIN, RATE), partial(LowRank, THIN, RATE), low_rank(THIN, RATE), _THIN),
    Lossless("ddp-powersgd-full", partial(_POWER, 2**20, 0.0), low_rank(2**20, 0.0), _FULL),
    FedBack("ddp-topk", partial(_FED_BACK, compression.TopK(SHARE)), partial(Largest, SHARE), top_k, _TOP_K, _MEMORY),
    FedBack("ddp-int8", partial(_FED_BACK, compression.Int8()), Integers, eight_bits, _INT8, _BYTES),
)
