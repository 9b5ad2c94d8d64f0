"""Optimizer states in bfloat16: states between steps, the oracle, and faults that exceed rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import failed, passed, seeded, verdict_of
from technique_harness import StubDevice, engaged, mlp, plain, run, workload
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Change, Planted
from accelcheck.selftest.faults.plant import nothing, rounded_to, truncated_to
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.optimizers.state import TECHNIQUES, HalfStates, KeptStates, RoundedStates
from accelcheck.techniques.quantization.emulation import nearest
from accelcheck.verify import effort, oracle
from accelcheck.verify.oracle import Store
from accelcheck.verify.oracle_runs import Source
from accelcheck.workloads.base import Problem, Program

(TECHNIQUE,) = TECHNIQUES
DEVICE = StubDevice()
DEVICE.dtypes = frozenset({"float32", "bfloat16"})


def problem(make: Callable[[Any], torch.optim.Optimizer]) -> Problem:
    made = mlp()
    return Problem(made.module, made.inputs, target=made.target, loss=made.loss, optimizer=make, steps=3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


@pytest.mark.parametrize(("make", "states"), [(momentum, 4), (adam, 8)])
def test_states_are_half_between_steps_and_parameters_are_not(make: Any, states: int) -> None:
    ran = engaged(TECHNIQUE, problem(make), Mode.TRAIN)
    claims = {entry.claim: entry.observed for entry in ran.evidence}
    assert claims["optimizer states >= 4"] == states
    made = ran.program.extras["optimizer whose states are kept"].made
    kept = [value for state in made.state.values() for name, value in state.items() if name != "step"]
    assert {value.dtype for value in kept} == {torch.bfloat16}
    exact = plain(problem(make), Mode.TRAIN)
    apart = max(float((ran.result[path] - exact[path]).abs().max()) for path in exact)
    assert 0.0 < apart < 1e-3


def test_step_counts_are_not_converted() -> None:
    ran = run(TECHNIQUE, problem(adam), Mode.TRAIN)
    made = ran.program.extras["optimizer whose states are kept"].made
    assert {float(state["step"]) for state in made.state.values()} == {3.0}


def test_an_optimizer_without_states_has_nothing_to_keep() -> None:
    with pytest.raises(Unsupported, match="SGD keeps no states as it is set here"):
        run(TECHNIQUE, problem(lambda parameters: torch.optim.SGD(parameters, lr=0.05)), Mode.TRAIN)


def test_states_that_stay_in_float32_fail_the_evidence() -> None:
    program = Program.of(problem(momentum))
    TECHNIQUE.prepare(program, Mode.TRAIN, DEVICE)
    assert isinstance(program.optimizer, KeptStates)
    program.optimizer.narrow = lambda state: state
    with TECHNIQUE.watch("cpu") as log:
        program.run(Mode.TRAIN)
    missing = [entry.claim for entry in TECHNIQUE.evidence(program, log, Mode.TRAIN, DEVICE) if not entry.engaged]
    assert missing == ["states are bfloat16", "bytes of states are half of FP32's", "states widened before a step >= 8"]


def test_the_oracle_rounds_as_a_cast_does_and_flips_at_ties() -> None:
    drawn = torch.randn(32, generator=torch.Generator().manual_seed(0))

    def one(make: Any) -> Tensor:
        parameter = nn.Parameter(torch.zeros(64, dtype=torch.float64))
        parameter.grad = torch.cat([1.0 + 2.0**-8 * torch.arange(32), drawn]).double()
        optimizer = make([parameter])
        optimizer.step()
        state: Tensor = optimizer.state[parameter]["momentum_buffer"]
        return state

    rounded = RoundedStates(momentum, torch.bfloat16)
    exact = one(momentum)
    assert torch.equal(one(rounded), exact.bfloat16().double())
    rounded.flips = torch.Generator().manual_seed(0)
    flipped = one(rounded)
    moved = flipped != nearest(exact, torch.bfloat16)
    assert 2 <= int(moved[1:32:2].sum()) <= 14, "every other one of the first lies at a tie"
    assert not bool(moved[0:32:2].any())
    assert not bool(moved[32:].any())


def narrowing(narrow: Callable[[Tensor], Tensor]) -> Change:
    def change(program: Program) -> None:
        assert isinstance(program.optimizer, KeptStates)
        program.optimizer.narrow = narrow

    return change


def uncorrected(program: Program) -> None:
    """Uses a step count of a hundred thousand, so that the bias of moments towards 0 is not corrected."""
    assert isinstance(program.optimizer, KeptStates)
    make = program.optimizer.make

    def later(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)

        def ahead(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for state in optimizer.state.values():
                state["step"] += 1e5 * (state["step"] < 1e5)

        optimizer.register_step_pre_hook(ahead)
        return optimizer

    program.optimizer.make = later


FAULTS: dict[str, tuple[Change, str]] = {
    "four bits": (narrowing(lambda state: rounded_to(4, state.float()).bfloat16()), "train-mlp"),
    "seven bits": (narrowing(lambda state: rounded_to(7, state.float()).bfloat16()), "train-mlp"),
    "truncated": (narrowing(lambda state: truncated_to(8, state.float()).bfloat16()), "train-mlp"),
    "no bias correction": (uncorrected, "train-transformer"),
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("change", "name"), FAULTS.values(), ids=FAULTS)
def test_faults_of_states_fail_by_their_values(change: Change, name: str, store: Store) -> None:
    record = failed(store, Planted(TECHNIQUE, change), seeded(name), Mode.TRAIN)
    assert "parameter:" in record.why
    assert "not engaged" not in record.why


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_technique_itself_passes(number: int, store: Store) -> None:
    passed(store, Planted(TECHNIQUE, nothing), seeded("train-mlp", number), Mode.TRAIN)


def test_the_oracle_flips_only_in_runs_with_rounding_errors() -> None:
    seen: list[bool] = []

    class Watching(RoundedStates):
        def __call__(self, parameters: Any) -> torch.optim.Optimizer:
            seen.append(self.flips is not None)
            return super().__call__(parameters)

    class Watched(HalfStates):
        def emulate_optimizer(self, make: Any) -> Any:
            return Watching(make, self.dtype)

    reference = oracle.compute(Source(seeded("train-mlp"), Watched(), 0, "float32", Mode.TRAIN))
    assert seen == [False, False] + [True] * effort.SAMPLES  # the exact run is repeated
    assert reference.budgets


@pytest.mark.slow
def test_states_kept_in_float32_fail(store: Store) -> None:
    """Values fail, not only evidence: exact states differ from the oracle's by more than rounding errors."""
    record = verdict_of(store, Planted(TECHNIQUE, narrowing(lambda state: state)), seeded("train-mlp"), Mode.TRAIN)
    assert "parameter:" in record.why


def test_it_needs_the_dtype_and_a_training() -> None:
    assert TECHNIQUE.capability(DEVICE).ok
    narrow = StubDevice()
    narrow.dtypes = frozenset({"float32"})
    assert HalfStates().capability(narrow).code is Code.NO_DTYPE
    assert not TECHNIQUE.accepts(workload("linear"))
    assert TECHNIQUE.accepts(seeded("train-transformer"))


def test_a_program_without_an_optimizer_is_an_error() -> None:
    program = Program.of(Problem(nn.Linear(2, 2), (torch.zeros(1, 2),)))
    with pytest.raises(TypeError, match="expected a program with an optimizer"):
        TECHNIQUE.prepare(program, Mode.TRAIN, DEVICE)
