"""examples/approximation: each scheme passes against its own oracle, and nothing else does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fault_harness import faults, verdict_of
from torch import nn

from accelcheck.core.case import SCHEME, Mode, Verdict
from accelcheck.workloads.own_model import workload_of

if TYPE_CHECKING:
    from accelcheck.verify.oracle import Store

FILE = Path(__file__).parents[2] / "examples" / "approximation" / "conftest.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("approximation_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judged(technique: Any, store: Store) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    return verdict_of(store, technique, workload_of(net, (torch.randn(8, 32),)), Mode.FORWARD)


def test_each_scheme_passes_and_shows_its_distance_from_the_model(example: Any, store: Store) -> None:
    for technique in example.pytest_accel_techniques():
        record = judged(technique, store)
        assert record.verdict is Verdict.PASS, record.why
        (cost,) = [figure.measured for figure in record.figures if figure.view == SCHEME]
        row = next(figure for figure in record.figures if figure.view == "row")
        assert cost > 3 * row.measured


@pytest.mark.slow
def test_an_approximation_without_an_oracle_of_its_own_fails(example: Any, store: Store) -> None:
    for technique in example.pytest_accel_techniques():
        technique.oracle = "float64"
        assert "view row" in faults(judged(technique, store))["out"]


def test_a_product_of_parts_that_lacks_one_fails(example: Any, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    technique = example.SplitProducts()
    parts = example._parts

    def lossy(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high, low = parts(x)
        return high, low if x.dtype is torch.float64 else low * 0  # wrong in FP32, right in the oracle

    monkeypatch.setattr(example, "_parts", lossy)
    assert "view row" in faults(judged(technique, store))["out"]
