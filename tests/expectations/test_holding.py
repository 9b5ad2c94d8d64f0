"""A verdict held against the ledger: a failure that is known whole is expected, and nothing new hides behind it."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Known, Record
from accelcheck.expectations.ledger import MOST_FAULTS, Entry, Ledger, hold

CASE = Case("eager", "mlp", "toy", "float32", Mode.FORWARD, 1)
DAY = dt.date(9999, 1, 1)


def entry(view: str = "row", at_most: float = 2.0, reason: str = "rounds twice") -> Entry:
    globs = (view,)
    return Entry(("eager/*",), Verdict.FAIL, at_most, reason, "link", "owner", DAY, kind=FaultKind.VIEW, view=globs)


ERROR = Entry(("eager/*",), Verdict.ERROR, "LookupError", "no kernel yet", "link", "owner", DAY, match="no kernel")
ROW, COLUMN = entry(), entry("column", reason="bias after rounding")


def view(name: str = "row", size: float = 1.5) -> Fault:
    return Fault(FaultKind.VIEW, "out", name, measured=size, allowed=1.0)


def fail(*faults: Fault) -> Record:
    return Record(CASE, Verdict.FAIL, faults=faults)


def error(text: str, code: str = "") -> Record:
    return Record(CASE, Verdict.ERROR, code=code, reason=text, traceback="a traceback")


def held(record: Record, *entries: Entry) -> Record:
    return hold(record, Ledger(entries))


def test_a_failure_of_which_every_fault_is_known_is_expected() -> None:
    record = held(fail(view("row"), view("column"), view("row")), ROW, COLUMN)
    assert record.verdict is Verdict.XFAIL
    assert record.reason == "rounds twice (link); bias after rounding (link)"
    assert [fault.view for fault in record.faults] == ["row", "column", "row"]


def test_only_entries_that_explain_a_fault_are_reasons() -> None:
    record = held(fail(view("row")), ROW, COLUMN)
    assert record.reason == "rounds twice (link)"
    assert [known.reason for known in record.known] == ["rounds twice"]


def test_a_new_fault_in_a_known_case_fails_it() -> None:
    record = fail(view("row"), view("gain"))
    assert held(record, ROW) == record


def test_a_fault_that_has_grown_fails_the_case_and_says_by_how_much() -> None:
    record = held(fail(view("row", 40.0), view("column")), entry(at_most=12.5), COLUMN)
    assert record.verdict is Verdict.FAIL
    assert record.known == (Known(Verdict.FAIL, 12.5, "rounds twice", "link", view("row", 40.0)),)
    assert "expected at most 12.5 times the budget, got 40 (rounds twice)" in record.why


def test_the_entry_that_allows_most_is_named_of_a_fault_that_has_grown() -> None:
    record = held(fail(view("row", 40.0)), entry(at_most=1.0, reason="one"), entry(at_most=30.0, reason="other"))
    assert [known.reason for known in record.known] == ["other"]
    assert held(fail(view("row", 40.0)), entry(at_most=1.0), entry(at_most=41.0)).verdict is Verdict.XFAIL


def test_a_fault_with_a_size_outgrows_an_entry_without_one() -> None:
    record = held(fail(view("row", 1.1)), entry(at_most=0.0))
    assert record.verdict is Verdict.FAIL
    assert "covers faults without a size only" in record.why


def test_a_pass_that_is_expected_to_fail_says_what_was_expected() -> None:
    record = held(Record(CASE, Verdict.PASS, compared=1), ROW, ERROR)
    assert record.verdict is Verdict.XPASS
    assert [(known.verdict, known.reason) for known in record.known] == [
        (Verdict.FAIL, "rounds twice"),
        (Verdict.ERROR, "no kernel yet"),
    ]
    assert "the ledger expects fail: rounds twice" in record.why


def test_an_exception_is_expected_by_its_first_line_and_kept_as_a_fault() -> None:
    record = held(error("LookupError: no kernel for this\nand a tensor: 1.0"), ERROR)
    assert (record.verdict, record.reason, record.traceback) == (Verdict.XFAIL, "no kernel yet (link)", "")
    assert record.faults == (Fault(FaultKind.RAISED, "run", "LookupError", got="no kernel for this"),)
    assert held(error("LookupError: other\nno kernel"), ERROR).verdict is Verdict.ERROR


def test_an_exception_of_another_class_is_not_expected_and_says_so() -> None:
    record = held(error("OSError: no kernel"), ERROR)
    assert record.verdict is Verdict.ERROR
    assert "expected LookupError, got OSError" in record.why


def test_an_exception_of_one_draw_is_expected_as_that_of_a_case() -> None:
    raised = Fault(FaultKind.RAISED, "run", "LookupError", "draw 1", got="no kernel")
    assert held(fail(raised), ERROR).verdict is Verdict.XFAIL
    assert held(fail(view(), raised), ERROR, ROW).verdict is Verdict.XFAIL
    assert held(fail(replace(raised, view="OSError")), ERROR).verdict is Verdict.FAIL


def test_what_is_no_failure_of_the_case_is_not_expected() -> None:
    for verdict in (Verdict.CRASH, Verdict.HANG, Verdict.DEVICE_LOST, Verdict.UNSUPPORTED):
        record = Record(CASE, verdict, reason="LookupError: no kernel")
        assert held(record, ERROR, ROW) == record
    assert held(fail(), ROW).verdict is Verdict.FAIL
    assert held(error("LookupError: no kernel", "no-evidence"), ERROR).verdict is Verdict.ERROR


def test_what_no_entry_covers_stays_as_it_is() -> None:
    record = fail(view())
    assert held(record, replace(ROW, cases=("export/*",))) is record


def test_the_faults_that_are_kept_of_an_expected_failure_are_bounded() -> None:
    record = held(fail(*[view()] * 500), ROW)
    assert (record.verdict, len(record.faults)) == (Verdict.XFAIL, MOST_FAULTS)


def test_an_expected_failure_shows_a_fault_of_each_path() -> None:
    last = replace(view(), path="out[9]")
    record = held(fail(*[view()] * 500, last), replace(ROW, path=("*",)))
    assert record.verdict is Verdict.XFAIL
    assert record.faults == (view(), last, *[view()] * (MOST_FAULTS - 2))


def test_what_is_known_travels_through_json() -> None:
    for record in (held(fail(view("row", 40.0)), ROW), held(error("OSError: no kernel"), ERROR)):
        assert record.known
        assert Record.from_json(record.as_json()) == record
