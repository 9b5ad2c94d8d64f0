"""FlashAttention beside unfused attention: time, error against FP64, and memory over the length."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.core.capability import Capability
from accelcheck.core.case import Mode
from accelcheck.core.units import size
from accelcheck.devices.base import Device
from accelcheck.experiments.claims.applied import techniques, trial
from accelcheck.experiments.claims.catalogue import Measured, What
from accelcheck.experiments.claims.experiment import Contest, Experiment, Side, allocated
from accelcheck.experiments.curve import WrongError
from accelcheck.verify.judge import judge
from accelcheck.verify.oracle import FIRST
from accelcheck.workloads.attention import Attention
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import normal

HEADS, WIDTH = 8, 64
LENGTH = 1024
LENGTHS = (1024, 2048, 4096)
TECHNIQUE = "sdpa-flash"


def _problem(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Attention(), tuple(normal(generator, 1, HEADS, LENGTH, WIDTH) for _ in range(3)))


WORKLOAD = Workload("claim-attention", f"Attention of {HEADS} heads of {WIDTH} over {LENGTH} positions.", _problem)


class ForcedFlash(Experiment):
    """torch's FlashAttention, with its backend forced."""

    name = "flash-attention"
    gives = frozenset({What.SPEED_UP, What.ERROR, What.GROWTH})

    def answer(self, device: Device) -> Capability:
        return techniques()[TECHNIQUE].answer(device)

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        # The kernel for GPUs takes half precision only.
        dtype = "float16" if device.has("torch-cuda") else "float32"
        with trial(techniques()[TECHNIQUE], WORKLOAD, device, Mode.FORWARD, dtype) as judged, torch.no_grad():
            inputs = judged.program(judged.case.seed).inputs
            reference = judged.store.get(judged.case, judged.technique, WORKLOAD, FIRST)
            yield Contest(
                Side(partial(written_out, *inputs), device),
                Side(partial(flash, *inputs), device),
                {
                    What.ERROR: lambda: _error(flash(*inputs), reference.truth["out"]),
                    What.GROWTH: lambda: _growth(device, dtype),
                },
            )
            faults = judge({"out": flash(*inputs).cpu()}, reference).faults
            if faults:
                raise WrongError(f"{judged.case.id}: after timing: {faults[0]}")


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by FlashAttention; fails where it is not available."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(q, k, v)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Unfused attention, with a matrix of scores."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    return torch.softmax(scores, dim=-1) @ v


def _error(out: Tensor, truth: Tensor) -> Measured:
    error = float((out.cpu().double() - truth).norm() / truth.norm())
    return Measured.exactly(error, f"in {str(out.dtype).removeprefix('torch.')}")


def _growth(device: Device, dtype: str) -> Measured:
    peaks = []
    for length in LENGTHS:
        inputs = [
            torch.ones(1, HEADS, length, WIDTH, dtype=getattr(torch, dtype), device=device.torch_device())
            for _ in range(3)
        ]
        flash(*inputs)
        peaks.append(allocated(device, partial(flash, *inputs)))
    most = max(after / before for before, after in itertools.pairwise(peaks))
    listed = ", ".join(f"{size(count)} at {length}" for length, count in zip(LENGTHS, peaks, strict=True))
    return Measured.exactly(most, listed)


EXPERIMENTS: tuple[Experiment, ...] = (ForcedFlash(),)
