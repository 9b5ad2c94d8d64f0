from __future__ import annotations

from typing import Any

import pytest
import torch
from technique_harness import StubDevice, agrees, differences, engaged, named, plain, run, trained, workload
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.techniques.memory.checkpoint import TECHNIQUES
from accelcheck.workloads.base import Problem, Program

TORCH = [technique for technique in TECHNIQUES if technique.name != "checkpoint-xla"]
XLA = named(TECHNIQUES, "checkpoint-xla")


class Stack(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def stack(norm: bool = False) -> Problem:
    torch.manual_seed(0)
    return trained(Stack(norm), torch.randn(6, 8), torch.randn(6, 8))


@pytest.mark.parametrize("technique", TORCH, ids=lambda technique: technique.name)
@pytest.mark.parametrize("mode", [Mode.BACKWARD, Mode.TRAIN])
def test_blocks_are_recomputed_with_the_same_result(technique: Any, mode: Mode) -> None:
    ran = agrees(technique, stack, mode, tolerance=0.0)
    assert ran.evidence[0].observed == 6 * (3 if mode is Mode.TRAIN else 1)


@pytest.mark.parametrize("technique", TORCH, ids=lambda technique: technique.name)
def test_batch_norm_statistics_are_updated_twice(technique: Any) -> None:
    """Torch repeats a block's side effects when it recomputes the block. The engine's verdict is then `fail`."""
    ran = engaged(technique, stack(norm=True), Mode.BACKWARD)
    different = differences(ran.result, plain(stack(norm=True), Mode.BACKWARD))
    assert different
    assert all(path.startswith("buffer:blocks.") for path in different)
    assert ran.result["buffer:blocks.0.1.num_batches_tracked"].item() == 2


def test_a_run_that_stores_activations_fails_the_evidence() -> None:
    class Storing(type(named(TECHNIQUES, "checkpoint-reentrant"))):  # type: ignore[misc]  # a class all the same
        def checkpointing(self) -> Any:
            return lambda function, *args: function(*args)

    ran = run(Storing("checkpoint-none", "", reentrant=True), stack(), Mode.BACKWARD)
    assert [entry.engaged for entry in ran.evidence] == [False, False]


def test_blocks_that_are_no_module_list_are_an_error() -> None:
    with pytest.raises(TypeError, match="the trait `blocks` needs a list of modules of one class"):
        run(TORCH[0], trained(nn.Linear(8, 8), torch.randn(6, 8), torch.randn(6, 8)), Mode.BACKWARD)


def test_capability_by_device() -> None:
    assert XLA.capability(StubDevice("cpu")).code is Code.NO_BACKEND
    assert XLA.capability(StubDevice("xla")).ok
    # torch.utils.checkpoint fails on xla: the ledger has these failures, and `capability` must not hide them.
    assert all(technique.capability(StubDevice("xla")).ok for technique in TORCH)
    assert all(Mode.FORWARD not in technique.modes for technique in TECHNIQUES)
    assert not XLA.accepts(workload("linear"))


class Gated(nn.Module):
    """The second block is skipped for inputs below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[0](x)
        return self.blocks[1](out) if float(x.mean()) > 0 else out


@pytest.mark.parametrize("technique", TORCH, ids=lambda technique: technique.name)
def test_other_inputs_may_take_another_path_through_the_blocks(technique: Any) -> None:
    program = Program.of(trained(Gated(), torch.ones(6, 8), torch.randn(6, 8)))
    technique.prepare(program, Mode.BACKWARD, StubDevice())
    seen = []
    for inputs in (torch.ones(6, 8), -torch.ones(6, 8)):
        program.inputs = (inputs,)
        for reset in program.resets:
            reset()
        with technique.watch("cpu") as log:
            program.run(Mode.BACKWARD)
        seen.append([entry.engaged for entry in technique.evidence(program, log, Mode.BACKWARD, StubDevice())])
    assert seen == [[True, True], [True]]
