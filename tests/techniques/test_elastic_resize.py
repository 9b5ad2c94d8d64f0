"""Agents join and leave: in its own file, since it takes as long as all other tests of elastic training together."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_harness import bench, case, seeded
from technique_harness import named

from accelcheck.core.case import Mode, Verdict
from accelcheck.devices import devices
from accelcheck.techniques.distributed.elastic.restarts import TECHNIQUES
from accelcheck.verify.oracle import Store


@pytest.mark.slow
def test_two_ranks_become_three_and_two_again(tmp_path: Path) -> None:
    technique, thing = named(TECHNIQUES, "elastic-resize"), seeded("train-mlp")
    record = bench(Store(tmp_path), technique, thing, devices()["cpu"]).run(
        case(thing, Mode.TRAIN, technique=technique.name)
    )
    assert record.verdict is Verdict.PASS, record.why
    seen = {entry.claim.partition(":")[0]: entry.observed for entry in record.evidence}
    assert seen["ranks that took each step"] == "2, 3, 3, 2"
    assert seen["first steps of the groups of ranks"] == "0, 1, 3"
    assert seen["exit codes of agents that left"] == "-9"
    assert seen["agents that stayed = 2"] == 2
