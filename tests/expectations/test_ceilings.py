"""Ceilings of budgets: read by schema, compared by key and view, and shown at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fault_harness import Planted, built_in, case, passed, verdict_of

from accelcheck.core.case import Figure, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.expectations import ceilings
from accelcheck.expectations.ceilings import CeilingError, above, key, parsed, stored, written
from accelcheck.report.terminal import _above
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.verify.views import GATES

NAME = key("matmul", "float32", "forward", "float32", "float64")


def test_what_is_written_is_read_again() -> None:
    result = {NAME: {"row": 1e-6, "tail": 12.0}, key("mlp", "float32", "backward", "bfloat16", "float64"): {"row": 0.1}}
    assert parsed(written(result)) == result


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object with 'schema': 1"),
        ('{"schema": 2, "ceilings": {}}', "expected an object with 'schema': 1"),
        ('{"schema": 1, "ceilings": {"matmul": {}}}', "'matmul': expected workload/dtype/mode/precision/oracle"),
        (json.dumps({"schema": 1, "ceilings": {NAME: {"row": "x"}}}), "'row' is 'x'; expected a finite number"),
        (json.dumps({"schema": 1, "ceilings": {NAME: {"row": -1.0}}}), "'row' is -1.0; expected a finite number"),
        (json.dumps({"schema": 1, "ceilings": {NAME: {"row": True}}}), "'row' is True; expected a finite number"),
        ('{"schema": 1, "ceilings": {"a/b/c/d/e": {"row": 1e999}}}', "'row' is inf; expected a finite number"),
    ],
)
def test_a_malformed_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(CeilingError, match=message):
        parsed(text)


def test_the_stored_ceilings_are_of_the_matrix() -> None:
    matrix = Matrix.load()
    assert len(stored()) > 300
    for name, views in stored().items():
        workload, dtype, mode, _, _ = name.split("/")
        assert Mode(mode) in matrix.workloads[workload].modes, name
        assert dtype in matrix.workloads[workload].dtypes, name
        assert views.keys() == GATES, name


def test_a_budget_is_above_where_it_is_beyond_the_headroom() -> None:
    budgets = {"out": {"row": 2.1, "tail": 3.0}, "grad:weight": {"row": 1.0, "tail": 1.0}}
    assert list(above(NAME, budgets, {NAME: {"row": 1.0, "tail": 2.0}})) == [("out", "row", 2.1, 1.0)]
    assert list(above(NAME, budgets, {NAME: {"row": 1.1}})) == []
    assert list(above("another/float32/forward/float32/float64", budgets, {NAME: {"row": 1.0}})) == []


def test_a_run_that_needs_a_larger_budget_says_so_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = built_in()["matmul"]
    assert not _above([verdict_of(Store(tmp_path), Planted(nothing), workload)])
    lower = {NAME: {view: limit / 3 for view, limit in stored()[NAME].items()}}
    monkeypatch.setattr(ceilings, "stored", lambda: lower)
    record = passed(Store(tmp_path), Planted(nothing), workload)
    title, *lines = _above([record])
    assert "larger budgets than were ever stored" in title
    assert any(line.startswith(f"  {record.case.id}: out: budget of row is ") for line in lines)


def test_workloads_of_users_have_no_ceilings_and_are_not_mentioned() -> None:
    figure = Figure("out", "row", 1.0, 0.5, "", gates=False)
    assert not _above([Record(case(built_in()["matmul"]), Verdict.PASS, figures=(figure,))])
    assert not list(above("mine/float32/forward/float32/float64", {"out": {"row": 1e9}}, stored()))
