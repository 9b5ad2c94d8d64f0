"""Effort of judging an owner's model: by its size, stated, and enough to catch faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Planted, case, failed, observed, passed, seeded
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.checks.remarks import REDUCED
from accelcheck.core.case import EFFORTS, Mode
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.eager import Eager
from accelcheck.verify.effort import FULL, LEAST, PART, Size, choose, size_of, told
from accelcheck.verify.oracle import Store
from accelcheck.verify.reference import OracleError
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.own_model import workload_of

MODES = (FORWARD, BACKWARD, TRAIN)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path, effort="least")


class Net(nn.Module):
    """A convolution, batch norm, ReLU, pooling, and two linear layers with GELU between: 12,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16 * 4 * 4, 40)
        self.head = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.adaptive_avg_pool2d(torch.relu(self.norm(self.conv(x))), 4)
        result: Tensor = self.head(functional.gelu(self.hidden(x.flatten(1))))
        return result


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def own(seed: int = 0) -> Workload:
    torch.manual_seed(seed)
    return workload_of(
        Net(),
        (torch.randn(8, 3, 12, 12),),
        name=f"net-{seed}",
        loss=functional.cross_entropy,
        target=torch.arange(8),
        optimizer=momentum,
    )


def size(parameters: int = 10, operations: float = 0.0, elements: float = 0.0, steps: int = 4) -> Size:
    return Size(parameters, operations, elements, steps)


def test_the_size_of_a_problem_is_what_a_forward_pass_computes() -> None:
    measured_size = Size(**size_of(Problem(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), (torch.ones(3, 6),))))
    assert measured_size == Size(parameters=35, operations=2.0 * 3 * 6 * 5, elements=2.0 * 3 * 5, steps=4)


def test_the_effort_falls_with_the_work_and_never_with_the_time() -> None:
    small, middle, large = (size(operations=work) for work in (1e9, 2e10, 1e11))
    assert [choose("auto", item, FORWARD) for item in (small, middle, large)] == [FULL, PART, LEAST]
    assert choose("auto", middle, BACKWARD) == choose("auto", middle, TRAIN) == LEAST
    assert choose("auto", size(parameters=10**7), FORWARD) == FULL
    assert choose("auto", size(parameters=10**7), TRAIN) == choose("auto", size(parameters=10**9), FORWARD) == LEAST


def test_an_option_asks_for_all_or_for_the_least_whatever_the_size() -> None:
    assert choose("full", size(operations=1e15), TRAIN) == FULL
    assert choose("least", size(), FORWARD) == LEAST


def test_built_in_workloads_have_the_usual_effort_whatever_is_asked(tmp_path: Path) -> None:
    workload = seeded("mlp")
    for word in EFFORTS:
        assert Store(tmp_path, effort=word).effort(case(workload), workload) == FULL


def test_small_models_have_the_usual_effort_and_no_remark(tmp_path: Path) -> None:
    workload = own()
    assert Store(tmp_path).effort(case(workload), workload) == FULL
    record = passed(Store(tmp_path), Planted(nothing), workload)
    assert REDUCED not in {entry.claim for entry in record.evidence}


def test_what_was_reduced_is_stated_with_the_size(tmp_path: Path) -> None:
    large = size(parameters=25_600_000, operations=1.64e10, elements=6.5e7)
    assert told(LEAST, large, TRAIN, "auto") == (
        "2 of 4 draws, 2 of 6 samples of rounding errors, 2 of 4 steps, no judgement over all draws together, "
        "no probes: "
        "25.6 million parameters, 16.4 billion operations and 65 million elements a pass"
    )
    record = passed(Store(tmp_path, effort="least"), Planted(nothing), own(), TRAIN)
    assert observed(record, REDUCED).startswith("2 of 4 draws, 2 of 6 samples of rounding errors, 2 of 4 steps")
    assert observed(record, REDUCED).endswith("--accel-effort=least")


def test_the_least_effort_takes_two_draws_two_samples_and_two_steps(store: Store) -> None:
    seen: list[Tensor] = []

    def look(program: Program) -> None:
        def call(*inputs: Tensor) -> Any:
            seen.append(inputs[0].clone())
            return program.module(*inputs)

        program.call = call

    passed(store, Planted(look), own(), TRAIN)
    assert len(seen) == 2 * 3  # two draws and a rerun
    reference = store.get(case(own(), TRAIN), Planted(nothing), own())
    assert sorted(path for path in reference.truth if path.startswith("loss")) == ["loss[0]", "loss[1]"]
    assert len(reference.leanings["loss[0]"]["gain"]) == 3  # one of them rounds to nearest


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mode", MODES)
def test_eager_passes_with_the_least_effort_whatever_the_seed(store: Store, mode: Mode) -> None:
    for seed in range(4):
        workload = own(seed)
        passed(store, Eager(), workload, mode)


def scaled(program: Program) -> None:
    """One layer's output is 1 % too large."""
    layer = program.module.get_submodule("hidden")
    program.call = _called(program, lambda: layer.register_forward_hook(lambda *args: args[-1] * 1.01))


def stale_row(program: Program) -> None:
    """The last sample of a layer's output is left out."""
    layer = program.module.get_submodule("head")
    keep = torch.ones(8, 1)
    keep[-1] = 0
    program.call = _called(program, lambda: layer.register_forward_hook(lambda *args: args[-1] * keep))


def tf32(program: Program) -> None:
    """Operands of one product keep 10 fraction bits."""

    def rounded(x: Tensor) -> Tensor:
        bits = (x.detach().contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
        return x + (bits.view(torch.float32) - x.detach())

    layer = program.module.get_submodule("hidden")

    def hook(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        assert isinstance(module, nn.Linear)
        return functional.linear(rounded(inputs[0]), rounded(module.weight), module.bias)

    program.call = _called(program, lambda: layer.register_forward_hook(hook))


def _called(program: Program, hook: Any) -> Any:
    def call(*inputs: Any) -> Any:
        handle = hook()
        try:
            return program.module(*inputs)
        finally:
            handle.remove()

    return call


class Loses(torch.optim.SGD):
    """Leaves the bias of the convolution's norm as it is."""

    def __init__(self, parameters: Any) -> None:
        kept = list(parameters)
        super().__init__([parameter for index, parameter in enumerate(kept) if index != 3], lr=0.05, momentum=0.9)


def lost_update(program: Program) -> None:
    program.optimizer = Loses


FAULTS = {
    **{(change, mode): None for change in (scaled, stale_row, tf32) for mode in MODES},
    (lost_update, TRAIN): None,
}


@pytest.mark.parametrize(
    ("change", "mode"),
    FAULTS,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.slow(after=3)
def test_the_least_effort_catches(store: Store, change: Any, mode: Mode) -> None:
    for seed in range(2):
        failed(store, Planted(change), own(seed), mode)


def test_a_random_model_is_refused_with_the_least_effort_too(store: Store) -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.empty_like(x).normal_()

    workload = replace(workload_of(Noisy(), (torch.ones(4, 4),), name="noisy", traits=frozenset()), idle=frozenset())
    with pytest.raises(OracleError, match="is random"):
        store.get(case(workload), Planted(nothing), workload)
