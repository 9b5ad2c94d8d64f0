"""Right and wrong strategies for the ranks of a pool, in a module that ranks can import. No test by itself."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from accelcheck.core.case import Mode
from accelcheck.devices.cpu import Cpu
from accelcheck.techniques.distributed.compression import ErrorFeedback, Int8
from accelcheck.techniques.distributed.ddp import Accumulating, HookedAveraging, Replicated
from accelcheck.techniques.distributed.strategy import Strategy
from accelcheck.workloads.base import Problem, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.techniques.distributed.ddp import Bucket, Future
    from accelcheck.workloads.base import Program


class ByHand(Strategy):
    """Averages gradients without DistributedDataParallel, which takes seconds to import."""

    def prepare(self, program: Program) -> None:
        del program

    def backpropagate(self, program: Program, weight: float) -> Tensor:
        loss = super().backpropagate(program, weight)
        for parameter in program.module.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
        return loss

    def facts(self, program: Program) -> dict[str, Any]:
        return {"rank": distributed.get_rank(), "samples": len(program.inputs[0])}


class Raising(ByHand):
    """Rank 1 raises; rank 0 waits for it in a collective."""

    def prepare(self, program: Program) -> None:
        if distributed.get_rank() == 1:
            raise ValueError("rank 1 does not like this")
        distributed.barrier()


class Dying(ByHand):
    """Rank 1 says a last word and is killed; rank 0 waits for it in a collective."""

    def prepare(self, program: Program) -> None:
        if distributed.get_rank() == 1:
            print("the last word", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        distributed.barrier()


class Summing(HookedAveraging):
    """Fault 32: ranks add their gradients and do not divide."""

    def mean(self, total: Tensor, world: int) -> Tensor:
        return total


class Apart(Replicated):
    """Ranks never exchange gradients."""

    def backpropagate(self, program: Program, weight: float) -> Tensor:
        with self.ddp.no_sync():
            return super().backpropagate(program, weight)


class Forgetful(ErrorFeedback):
    """Fault 33: what the codec drops is lost."""

    def keep(self, parameters: Sequence[Tensor], dropped: Sequence[Tensor]) -> None:
        del parameters, dropped


class ByPlace(ErrorFeedback):
    """Residuals stay at their place in the bucket, though the bucket is made anew after the first step."""

    def __init__(self, codec: Any) -> None:
        super().__init__(codec)
        self.order: list[Tensor] = []

    def __call__(self, bucket: Bucket) -> Future:
        if self.residuals and list(map(id, bucket.parameters())) != list(map(id, self.order)):
            flat = torch.cat([self.residuals[parameter] for parameter in self.order])
            pieces = torch.split(flat, [parameter.numel() for parameter in bucket.parameters()])
            self.residuals = dict(zip(bucket.parameters(), pieces, strict=True))
        self.order = list(bucket.parameters())
        return super().__call__(bucket)


class Truncating(Int8):
    """Rounds towards zero."""

    def encode(self, wanted: Tensor) -> Sequence[Tensor]:
        scale = (wanted.abs().amax() / 127).clamp(min=torch.finfo(wanted.dtype).tiny)
        return (wanted / scale).trunc().to(torch.int8), scale.reshape(1)


class Early(Accumulating):
    """Exchanges after each micro-batch, and so averages the first one's gradient twice: the values stay right."""

    def apart(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class Broken(Cpu):
    """A device that ranks cannot open."""

    def open(self) -> None:
        raise RuntimeError("no such device")


class Scale(nn.Module):
    """``x * (v + w)``, with as many weights as fill two buckets; ``(batch, 1)`` to ``(batch, 64)``."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.full((64,), 8.0))
        self.w = nn.Parameter(torch.full((64,), 8.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.v + self.w)


def mean(out: Tensor, target: Tensor) -> Tensor:
    """The mean of each sample's sum, whatever the target."""
    return out.sum(1).mean()


def unit(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """A step is the gradient."""
    return torch.optim.SGD(parameters, lr=1.0)


def ranked(world: int) -> Workload:
    """Rank r has the gradient r, of weights that are 8: two steps take off twice the mean."""

    def make(generator: torch.Generator, extent: int) -> Problem:
        x = torch.arange(world, dtype=torch.float32).repeat_interleave(2).unsqueeze(1)
        return Problem(Scale(), (x,), target=torch.zeros(len(x), 1), loss=mean, optimizer=unit, steps=2)

    return Workload(
        f"ranked-{world}", "Rank r has gradient r.", make, 1, frozenset({Mode.TRAIN}), frozenset({"training"})
    )


def small() -> Workload:
    """Two layers of unlike sizes, seven samples, six steps."""
    return Workload("small", "A small training.", _small, 1, frozenset({Mode.TRAIN}), frozenset({"training"}))


def _small(generator: torch.Generator, extent: int) -> Problem:
    module = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    x, target = torch.randn(7, 12, generator=generator), torch.randn(7, 5, generator=generator)
    return Problem(module, (x,), target=target, loss=nn.functional.mse_loss, optimizer=fast, steps=6)


def fast(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """A learning rate at which six steps go far."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
