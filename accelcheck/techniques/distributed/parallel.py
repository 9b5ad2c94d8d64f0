"""Data-parallel training: ranks take shards of a batch, and a real collective averages their gradients.

All ranks live in one process. They share the parameters, since replicas are equal after every step; each has its own
shard, backward pass, thread and gloo process group. Batch-norm statistics would be each rank's own.
"""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

RANKS = "ranks"
"""Key in `Program.extras` of the `Ranks` of a run."""

PATIENCE = dt.timedelta(seconds=60)
"""Seconds that a rank waits for the others. All are in this process, so that only a defect makes them late."""

HALF_LIMIT = torch.finfo(torch.float16).max
"""Largest FP16 number. A larger one is sent as this, and the rest becomes residual."""


class Wire:
    """Gloo process groups of all ranks, with counts of their traffic.

    Attributes:
        world: Number of ranks.
        collectives: Calls by each rank.
        sent: Bytes that each rank sent by collectives.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.collectives = [0] * world
        self.sent = [0] * world
        self._pool = ThreadPoolExecutor(world, thread_name_prefix="rank")
        store = distributed.HashStore()  # type: ignore[attr-defined]  # torch's annotations leave it out
        # Each group waits in its constructor until it is connected with all others.
        join: Callable[[int], Any] = lambda rank: distributed.ProcessGroupGloo(store, rank, world, PATIENCE)  # noqa: E731 - one expression
        self._groups = list(self._pool.map(join, range(world)))

    def together(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """``work(rank)`` by all ranks at once, each in its thread."""
        return list(self._pool.map(work, range(self.world)))

    def reduce(self, rank: int, bucket: Tensor) -> Tensor:
        """The sum of all ranks' buckets, on the CPU; called by every rank."""
        total = bucket.cpu().clone()
        self._count(rank, total)
        self._groups[rank].allreduce([total]).wait()
        return total

    def gather(self, rank: int, bucket: Tensor) -> list[Tensor]:
        """All ranks' buckets, on the CPU, by rank; called by every rank."""
        own = bucket.cpu()
        self._count(rank, own)
        buckets = [torch.empty_like(own) for _ in range(self.world)]
        self._groups[rank].allgather([buckets], [own]).wait()
        return buckets

    def close(self) -> None:
        """End the ranks."""
        self._pool.shutdown()
        self._groups.clear()

    def _count(self, rank: int, bucket: Tensor) -> None:
        self.collectives[rank] += 1
        self.sent[rank] += bucket.nbytes


class Averaging:
    """Each rank's gradient, times its weight, summed over ranks by an all-reduce."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def begin(self) -> None:
        """Called when a training begins."""
        return

    def __call__(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
        """Each rank's gradient after the exchange, from all ranks' gradients (flat, of one size) and weights. On the CPU."""
        return self.wire.together(lambda rank: self.wire.reduce(rank, gradients[rank] * weights[rank]))


class Compressor:
    """Rounds a rank's gradients to FP16, and adds the rounding error to the next gradient (error feedback).

    Attributes:
        residual: The part that was not sent yet, FP32, flat; None before the first step.
    """

    def __init__(self) -> None:
        self.residual: Tensor | None = None

    def compress(self, gradient: Tensor) -> Tensor:
        """The FP16 tensor to send for an FP32 gradient, of the same shape."""
        wanted = gradient if self.residual is None else gradient + self.residual
        sent = wanted.clamp(-HALF_LIMIT, HALF_LIMIT).half()
        self.residual = wanted - sent.float()
        return sent


class Account:
    """The gradients that one rank should have sent, and what it sent: FP64 on the CPU, independent of the compressor."""

    def __init__(self, elements: int) -> None:
        self.true, self.sent, self.size = (torch.zeros(elements, dtype=torch.float64) for _ in range(3))

    def add(self, gradient: Tensor, residual: Tensor | None, sent: Tensor) -> None:
        """One step: the gradient, the residual before it, and the sent tensor."""
        true = gradient.cpu().double()
        self.true += true
        self.sent += sent.cpu().double()
        self.size += true.abs() if residual is None else true.abs() + residual.cpu().double().abs()

    def unbalanced(self, residual: Tensor | None) -> Tensor:
        """Elements for which sent parts and residual do not add up to the gradients: bool, of the gradient's shape.

        A step adds gradient and residual in FP32, which rounds by at most 2**-24 of their sizes; the FP16
        rounding error of the sum is an FP32 number, so that its subtraction is exact. Twice that is allowed.
        """
        left = torch.zeros_like(self.true) if residual is None else residual.cpu().double()
        return (self.sent + left - self.true).abs() > 2 * 2.0**-24 * self.size


class CompressedAveraging(Averaging):
    """Each rank's gradient in FP16 with error feedback, gathered by all ranks and averaged in FP32.

    Attributes:
        compressors: One a rank.
        accounts: One a rank; empty before the first step.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self.make: Callable[[], Compressor] = Compressor
        self.begin()

    def begin(self) -> None:
        self.compressors = [self.make() for _ in range(self.wire.world)]
        self.accounts: list[Account] = []

    def __call__(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> list[Tensor]:
        self.accounts = self.accounts or [Account(gradient.numel()) for gradient in gradients]

        def exchange(rank: int) -> Tensor:
            before = self.compressors[rank].residual
            sent = self.compressors[rank].compress(gradients[rank].float())
            self.accounts[rank].add(gradients[rank], before, sent)
            received = self.wire.gather(rank, sent)
            parts = [part.float() * weight for part, weight in zip(received, weights, strict=True)]
            return torch.stack(parts).sum(0)

        return self.wire.together(exchange)

    def unbalanced(self) -> list[Tensor]:
        """By rank: see `Account`."""
        return [a.unbalanced(c.residual) for a, c in zip(self.accounts, self.compressors, strict=True)]


class Ranks:
    """One program's ranks: how they share a batch, weigh their gradients and exchange them.

    Attributes:
        wire: Between them.
        exchange: Of their gradients.
        weigh: The weight of each rank's gradient, from the number of samples that each has.
        disagreeing: Exchanges, in this training, after which not all ranks had the same gradient.
        steps: Taken in this training.
    """

    def __init__(self, program: Program, wire: Wire, exchange: Averaging) -> None:
        self.program = program
        self.wire = wire
        self.exchange = exchange
        self.weigh: Callable[[Sequence[int]], list[float]] = by_samples
        self.disagreeing = 0
        self.steps = 0

    def step(self, number: int) -> Tensor:
        """See `Program.backpropagate`. The loss is that of the whole batch."""
        if number == 0:
            self.exchange.begin()
            self.reset()
        self.steps += 1
        parameters = [parameter for parameter in self.program.module.parameters() if parameter.requires_grad]
        sizes, losses, gradients = [], [], []
        for inputs, target in self.shards():
            for parameter in parameters:
                parameter.grad = None
            loss = self.program.training_loss(inputs, target)
            loss.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
            sizes.append(len(target))
            losses.append(loss.detach())
            gradients.append(torch.cat([_gradient(parameter).flatten() for parameter in parameters]))
        self.program.synchronize()  # ranks read what they send: a lazy device must have computed it
        received = self.exchange(gradients, self.weigh(sizes))
        self.disagreeing += any(not torch.equal(received[0], other) for other in received[1:])
        self._spread(parameters, received[0])
        return torch.stack([loss * (size / sum(sizes)) for loss, size in zip(losses, sizes, strict=True)]).sum()

    def reset(self) -> None:
        """Count from 0."""
        self.disagreeing = self.steps = 0
        self.wire.collectives, self.wire.sent = [0] * self.wire.world, [0] * self.wire.world

    def shards(self) -> list[tuple[tuple[Any, ...], Tensor]]:
        """Inputs and target of each rank: see `shards`."""
        return shards(self.program.inputs, self.program.target, self.wire.world)

    @staticmethod
    def _spread(parameters: Sequence[Tensor], flat: Tensor) -> None:
        pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).to(device=parameter.device, dtype=parameter.dtype)


def shards(inputs: tuple[Any, ...], target: Tensor | None, world: int) -> list[tuple[tuple[Any, ...], Any]]:
    """Inputs and target of each rank: nearly equal parts of the batch, the first dimension of every tensor; None where there is no target.

    Raises:
        Unsupported: There are fewer samples than ranks, or tensors of different first dimensions.
    """
    sizes = {len(value) for value in (*inputs, target) if isinstance(value, Tensor)}
    if len(sizes) != 1 or min(sizes) < world:
        reason = f"a batch for {world} ranks: expected inputs and a target of one first size, at least {world}; got {sorted(sizes)}"
        raise Unsupported(unsupported(Code.NO_FEATURE, reason))
    parts = [
        value.tensor_split(world) if isinstance(value, Tensor) else (value,) * world for value in (*inputs, target)
    ]
    return [(tuple(given), wanted) for *given, wanted in zip(*parts, strict=True)]


def by_samples(sizes: Sequence[int]) -> list[float]:
    """Each rank's share of the samples: the mean over all is then the mean of the joined batch, of uneven shards too."""
    return [size / sum(sizes) for size in sizes]


class ParallelStep(Technique):
    """A training step of several ranks, equal to that of one process on the joined batch.

    Args:
        world: Number of ranks.
    """

    family = "parallel"
    timed = False
    source = "https://docs.pytorch.org/docs/stable/notes/ddp.html"
    modes = frozenset({Mode.TRAIN})
    requires = frozenset({"training"})
    # Each rank normalises by its own shard, as torch's DistributedDataParallel does: other results, by design.
    excludes = frozenset({"batchnorm"})

    def __init__(self, world: int) -> None:
        self.world = world
        self.name = f"data-parallel-{world}"
        self.promise = f"{world} ranks that average their gradients train as one process on the joined batch does."
        self._held = ExitStack()

    def capability(self, device: Device) -> Capability:
        """Gloo sums on the CPU: gradients of other devices are moved there and back."""
        if not (distributed.is_available() and distributed.is_gloo_available()):
            return unsupported(
                Code.WRONG_VERSION, f"torch {torch.__version__} is built without torch.distributed's gloo"
            )
        return SUPPORTED

    def exchange(self, wire: Wire) -> Averaging:
        """The exchange of gradients."""
        return Averaging(wire)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        wire = Wire(self.world)
        self._held.callback(wire.close)
        ranks = Ranks(program, wire, self.exchange(wire))
        program.extras[RANKS] = ranks
        program.backpropagate = ranks.step
        program.resets.append(ranks.reset)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        ranks: Ranks = program.extras[RANKS]
        wire, elements = ranks.wire, sum(p.numel() for p in program.module.parameters() if p.requires_grad)
        yield Evidence(f"ranks = {self.world}", wire.world, engaged=wire.world == self.world)
        yield Evidence(
            f"collectives by each rank = {program.steps}, one a step",
            ", ".join(map(str, wire.collectives)),
            engaged=set(wire.collectives) == {program.steps},
        )
        least = elements * program.steps * self.width
        yield Evidence(
            f"bytes sent by each rank = {least}",
            ", ".join(map(str, wire.sent)),
            engaged=set(wire.sent) == {least},
        )
        yield Evidence(
            "steps after which ranks had different gradients = 0", ranks.disagreeing, engaged=ranks.disagreeing == 0
        )

    width = 4
    """Bytes a gradient element takes on the wire."""

    def finish(self) -> None:
        self._held.close()


class CompressedDataParallel(ParallelStep):
    """Two ranks that send FP16. That error feedback loses nothing is an invariant, which is checked exactly.

    For each parameter, sent parts and residual over all steps add up to the sum of the gradients. Results are those of FP16
    gradients: a step may be off by FP16's rounding, which later steps correct.
    """

    width = 2

    def __init__(self, world: int = 2) -> None:
        super().__init__(world)
        self.name = "data-parallel-compressed"
        self.promise = "Gradients sent in FP16 with error feedback lose nothing: what was not sent yet is sent later."

    def precision(self, dtype: str) -> str:
        return "float16"

    def exchange(self, wire: Wire) -> Averaging:
        return CompressedAveraging(wire)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        exchange = program.extras[RANKS].exchange
        if not isinstance(exchange, CompressedAveraging):
            raise TypeError(f"the program's exchange was replaced after prepare: {type(exchange).__name__}")
        named = [(name, p.numel()) for name, p in program.module.named_parameters() if p.requires_grad]
        lost: dict[str, int] = {}
        for places in exchange.unbalanced():
            for (name, _), piece in zip(named, torch.split(places, [count for _, count in named]), strict=True):
                if bool(piece.any()):
                    lost[name] = lost.get(name, 0) + int(piece.sum())
        yield Evidence(
            "elements whose sum sent and residual are not the sum of their gradients = 0",
            ", ".join(f"{name} x{count}" for name, count in lost.items()) or 0,
            engaged=not lost and bool(exchange.accounts),
        )


def _gradient(parameter: Tensor) -> Tensor:
    """Zeros where a shard did not reach the parameter: all ranks send the same elements."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


TECHNIQUES: tuple[Technique, ...] = (ParallelStep(2), ParallelStep(3), CompressedDataParallel())
