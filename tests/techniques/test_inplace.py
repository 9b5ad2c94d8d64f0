from __future__ import annotations

import pytest
import torch
from technique_harness import MODES, StubDevice, differences, engaged, named, plain, run, trained
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.techniques.memory.inplace import TECHNIQUES
from accelcheck.workloads.base import Problem

INPLACE = named(TECHNIQUES, "inplace")


def activations() -> Problem:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Hardtanh(), nn.BatchNorm1d(8), nn.SiLU())
    return trained(module, torch.randn(6, 8), torch.randn(6, 8))


@pytest.mark.parametrize("mode", MODES)
def test_activations_overwrite_their_inputs(mode: Mode) -> None:
    ran = engaged(INPLACE, activations(), mode)
    assert ran.log.count("aten::(relu_|hardtanh_|silu_)") == 3 * (3 if mode is Mode.TRAIN else 1)
    # Bitwise, including the statistics, which counting operators beforehand must not change.
    other = plain(activations(), mode)
    assert all(torch.equal(ran.result[path], other[path]) for path in other)
    assert not differences(ran.result, other, 0.0)


def test_the_count_draws_nothing_random() -> None:
    def problem() -> Problem:
        torch.manual_seed(0)
        return Problem(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU()), (torch.randn(6, 8),)
        )

    expected = plain(problem(), Mode.BACKWARD)
    assert not differences(run(INPLACE, problem(), Mode.BACKWARD).result, expected, 0.0)


def test_autograd_refuses_to_overwrite_what_it_saved() -> None:
    """ReLU saves its output for the backward pass, and in-place dropout overwrites it: torch raises an error."""
    problem = Problem(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5)), (torch.randn(6, 8),))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(INPLACE, problem, Mode.BACKWARD)


def test_an_ignored_flag_fails_the_evidence() -> None:
    class Deaf(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.ReLU gives it
            return input.relu()

    ran = run(INPLACE, Problem(nn.Sequential(nn.Linear(4, 4), Deaf()), (torch.randn(2, 4),)))
    assert len(ran.missing()) == 2


def test_without_strides_no_in_place_operators_are_needed() -> None:
    ran = engaged(INPLACE, activations(), device=StubDevice(features=()))
    assert not any("beyond" in entry.claim for entry in ran.evidence)
