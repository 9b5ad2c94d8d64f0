"""The combinations of module mode and gradients are four, and workloads try each."""

from __future__ import annotations

import pytest
from fault_harness import BACKWARD, FORWARD, Planted, seeded, verdict_of

from accelcheck.core.case import Mode, Verdict
from accelcheck.selftest.faults.layers import norms_follow_gradients
from accelcheck.selftest.faults.plant import nothing
from accelcheck.verify.oracle import Store

SEEN = [("saliency", BACKWARD), ("frozen-backbone", FORWARD), ("frozen-backbone", BACKWARD)]


@pytest.mark.parametrize(("name", "mode"), SEEN)
def test_a_norm_that_follows_gradients_in_place_of_its_mode_fails(name: str, mode: Mode, store: Store) -> None:
    assert verdict_of(store, Planted(nothing), seeded(name), mode).verdict is Verdict.PASS
    assert verdict_of(store, Planted(norms_follow_gradients(1.0)), seeded(name), mode).verdict is Verdict.FAIL


@pytest.mark.parametrize("name", ["saliency", "frozen-backbone"])
@pytest.mark.parametrize("training", [True, False])
def test_a_workload_keeps_the_mode_of_its_norm(name: str, training: bool) -> None:
    module = seeded(name).problem(0).module.train(training)
    (norm,) = (layer for layer in module.modules() if type(layer).__name__ == "BatchNorm1d")
    assert norm.training is (name == "frozen-backbone")
