"""Peaks of memory on the CPU against figures worked out by hand, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accelcheck.checks.speed import Contender
from accelcheck.checks.trial import Trial
from accelcheck.core.case import Case, Mode
from accelcheck.devices.cpu import Cpu
from accelcheck.measure.memory import in_memory, peak
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.mlp import Mlp

BATCH, WIDTH = 64, 1024
ONE = BATCH * WIDTH * 4
"""Bytes of an activation."""
GENERATOR = 5056
"""Bytes of the CPU generator's state, which checkpointing keeps for each block."""


@pytest.fixture
def contender(tmp_path: Path) -> Callable[[str, Callable[[torch.Generator, int], Problem], Mode], Contender]:
    def made(technique: str, make: Callable[[torch.Generator, int], Problem], mode: Mode) -> Contender:
        case = Case(technique, "by-hand", "cpu", "float32", mode, 1)
        workload = Workload("by-hand", "Made here.", make)
        result = Contender(Trial(case, Matrix.load().techniques[technique], workload, Cpu(), Store(tmp_path)))
        result.call()
        result.call()
        result.program.module.zero_grad(set_to_none=True)
        return result

    return made


def measured(contender: Contender) -> int:
    result = peak(Cpu(), contender.call).bytes
    assert result is not None
    return result


class Tanhs(nn.Module):
    """So many hyperbolic tangents: each saves its output for the backward pass, and nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = torch.tanh(x)
        return x


class Scaled(nn.Module):
    def __init__(self, blocks: int, each: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([Tanhs(each) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def tanhs(generator: torch.Generator, extent: int, *, blocks: int, each: int) -> Problem:
    return Problem(
        Scaled(blocks, each),
        (torch.randn(BATCH, WIDTH, generator=generator),),
        target=torch.zeros(()),
        loss=lambda out, _: out.sum(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
    )


@pytest.mark.parametrize(("blocks", "each"), [(2, 3), (4, 4), (3, 8)])
def test_a_checkpointed_training_step(contender: Callable[..., Contender], blocks: int, each: int) -> None:
    make = partial(tanhs, blocks=blocks, each=each)
    scalars = 2 * 4  # the loss, and the gradient that backward begins with
    # Every output is saved; the gradient of one is beside them. The sum's gradient is expanded: it takes nothing.
    plain = (blocks * each + 1) * ONE + scalars
    # Every block's input is saved; one block's outputs are made again, and the gradient of one is beside them.
    checkpointed = (blocks + each + 1) * ONE + blocks * GENERATOR + scalars
    assert measured(contender("eager", make, Mode.TRAIN)) == plain
    assert measured(contender("checkpoint-non-reentrant", make, Mode.TRAIN)) == checkpointed
    # The outputs made again are held to the end of the block's backward pass, where the last is freed otherwise.
    assert measured(contender("checkpoint-reentrant", make, Mode.TRAIN)) == checkpointed + ONE


def test_an_in_place_forward_pass(contender: Callable[..., Contender]) -> None:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(Mlp(32, WIDTH, 10), (torch.randn(BATCH, 32, generator=generator),))

    # The second hidden layer: its input, what its linear gives, what its ReLU gives; in place the last two are one.
    assert measured(contender("eager", make, Mode.FORWARD)) == 3 * ONE
    assert measured(contender("inplace", make, Mode.FORWARD)) == 2 * ONE


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="torch is built without fbgemm")
def test_an_int8_layer(contender: Callable[..., Contender]) -> None:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(nn.Sequential(nn.Linear(WIDTH, 32)), (torch.randn(BATCH, WIDTH, generator=generator),))

    outputs = BATCH * 32 * 4
    assert measured(contender("eager", make, Mode.FORWARD)) == outputs
    # The int32 sums, and the FP32 outputs made of them; the kernel quantizes its input into memory of its own.
    assert measured(contender("int8-dynamic-fbgemm", make, Mode.FORWARD)) == 2 * outputs


def test_int8_weights_take_a_quarter_and_five_bytes_a_row(contender: Callable[..., Contender]) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install torchao")

    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(
            nn.Sequential(nn.Linear(WIDTH, 32, bias=False)), (torch.randn(BATCH, WIDTH, generator=generator),)
        )

    def weights(technique: str) -> int:
        program = contender(technique, make, Mode.FORWARD).program
        module = program.call if isinstance(program.call, nn.Module) else program.module
        return sum(in_memory(value) for value in module.state_dict().values())

    assert weights("eager") == 32 * WIDTH * 4
    # A byte a weight; a scale of four bytes a row, and a zero point of one.
    assert weights("int8-torchao-weight-only") == 32 * WIDTH + 32 * (4 + 1)
