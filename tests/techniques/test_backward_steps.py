"""Optimizer steps in the backward pass, and checkpoints that store contractions."""

from __future__ import annotations

from typing import Any

import pytest
from fault_harness import built_in
from technique_harness import agrees, differences, plain, run
from torch.utils.checkpoint import CheckpointPolicy

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.parallel import FAULTS
from accelcheck.techniques.memory import selective
from accelcheck.techniques.optimizers.in_backward import InBackward
from accelcheck.workloads.base import Program


@pytest.mark.parametrize("name", ["train-gated-depth", "train-mlp", "train-nesterov"])
def test_steps_in_hooks_train_as_steps_after_the_pass(name: str) -> None:
    agrees(InBackward(), lambda: built_in()[name].problem(0), Mode.TRAIN, tolerance=0.0)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.name.startswith("backward")], ids=lambda f: f.name
)
def test_a_step_that_is_skipped_or_repeated_shows(fault: Any) -> None:
    ran = run(Planted(InBackward(), fault.plant(1.0)), built_in()["train-mlp"].problem(0), Mode.TRAIN)
    assert ran.engaged, ran.missing()  # it is the values that are wrong
    assert differences(ran.result, plain(built_in()["train-mlp"].problem(0), Mode.TRAIN), 1e-4)


def test_a_training_that_steps_after_the_pass_has_no_evidence() -> None:
    def after(program: Program) -> None:
        program.optimizer, program.advance = built_in()["train-mlp"].problem(0).optimizer, None
        for parameter in program.module.parameters():
            hooks: Any = parameter._post_accumulate_grad_hooks
            hooks.clear()

    ran = run(Planted(InBackward(), after), built_in()["train-mlp"].problem(0), Mode.TRAIN)
    assert len(ran.missing()) == 3


@pytest.mark.parametrize(("name", "mode"), [("mlp-blocks", Mode.BACKWARD), ("train-transformer", Mode.TRAIN)])
def test_stored_contractions_give_the_same_gradients(name: str, mode: Mode) -> None:
    agrees(selective.Selective(), lambda: built_in()[name].problem(0), mode, tolerance=1e-6)


def test_contractions_that_are_computed_again_fail_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective, "policy", lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    ran = run(selective.Selective(), built_in()["mlp-blocks"].problem(0), Mode.BACKWARD)
    assert [claim.partition(" =")[0] for claim in ran.missing()] == ["contractions"]
