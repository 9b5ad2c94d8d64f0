"""A fault whose path looks like accelcheck's text stays as it is in journal, ledger, suggestion, cause, message."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from journal_harness import journal, record

from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.expectations.ledger import Ledger, hold
from accelcheck.report import ledger_stubs
from accelcheck.report.causes import causes
from accelcheck.report.message import explain
from accelcheck.report.run import load

if TYPE_CHECKING:
    from accelcheck.report.run import DeviceRun

TODAY = dt.date(2026, 11, 23)
FAULT = Fault(FaultKind.VIEW, "out['a: b']", "row", "draw 1", measured=4e-6, allowed=1e-6, place="[3, :]")
PATHS = ["out['a: b']", "out['view row: expected 1, got 2']", "out['x [draw 2]']", "out['*']", 'out["quote\' \\ é"]']


@pytest.fixture(params=PATHS)
def fault(request: pytest.FixtureRequest) -> Fault:
    return replace(FAULT, path=request.param)


@pytest.fixture
def run(fault: Fault, tmp_path: Path) -> DeviceRun:
    """The run of a journal whose only case fails with the fault alone."""
    failed = replace(record("eager", Verdict.FAIL), faults=(fault,))
    return load([journal(tmp_path / "a.jsonl", failed)])[0]


def test_a_journal_gives_the_fault_that_was_written(run: DeviceRun, fault: Fault) -> None:
    assert run.records[0].faults == (fault,)


def test_a_suggested_entry_expects_this_fault_and_no_other(run: DeviceRun, fault: Fault, tmp_path: Path) -> None:
    lines, count = ledger_stubs.suggest([run], Ledger(), TODAY, lambda _: {})
    assert count == 1
    (tmp_path / "new.toml").write_text("\n".join(lines).replace("TODO", "done"))
    ledger = Ledger.load((tmp_path / "new.toml",))
    (failed,) = run.records
    assert hold(failed, ledger).verdict is Verdict.XFAIL
    for other in (
        replace(fault, path="out"),
        replace(fault, draw=""),
        replace(fault, view="column"),
        replace(fault, measured=7e-6),
    ):
        assert hold(replace(failed, faults=(other,)), ledger).verdict is Verdict.FAIL


def test_its_cause_is_wrong_outputs(run: DeviceRun) -> None:
    assert [cause.title for cause in causes([run])] == ["mlp: wrong values in outputs"]


def test_its_message_has_the_whole_path(run: DeviceRun, fault: Fault) -> None:
    assert f"  {fault.path}: view row at [3, :] [draw 1]: expected " in explain(run.records[0])
