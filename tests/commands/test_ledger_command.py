"""`accelcheck ledger` names faults by file, entry and field; suggestions hold once a person wrote the reasons."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import journal_harness
import pytest

from accelcheck import cli
from accelcheck.commands import ledger as command
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Record
from accelcheck.expectations.ledger import Ledger, LedgerError, hold, shown
from accelcheck.report import ledger_check, ledger_stubs
from accelcheck.report.run import load

TODAY = dt.date(2026, 11, 23)
IDS = {
    f"{technique}/mlp/{device}/float32/forward"
    for technique in ("eager", "export", "jit-trace")
    for device in ("cpu", "xla")
}
VIEW = Fault(FaultKind.VIEW, "out", "row", measured=4e-6, allowed=1e-6, place="[3, :]")
GROWN = replace(VIEW, measured=8e-6, place="[0, :]")
PATTERN = Fault(FaultKind.PATTERN, "out", "NaN", "nan[0]", "10 of them", "0", measured=3, place="[3, 0]")
DTYPE = Fault(FaultKind.METADATA, "out", "dtype", "", "float32", "float64")
RAISED = "RuntimeError: Could not run 'aten::x' (a+b) with 3 arguments from the 'toy' backend"
IN_A_DRAW = Fault(FaultKind.RAISED, "run", "RuntimeError", "draw 2", got=RAISED.partition(": ")[2])


def entry(**changes: Any) -> str:
    fields = {
        "cases": '["eager/mlp/cpu/float32/forward"]',
        "verdict": '"fail"',
        "kind": '"view"',
        "path": '"out"',
        "view": '"row"',
        "at-most": "6.0",
        "reason": '"sums in half precision"',
        "link": '"docs/findings.md"',
        "owner": '"somebody"',
        "expires": "2027-11-30",
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    if "match" in fields:
        fields = {name: value for name, value in fields.items() if name not in {"kind", "path", "view"}}
    return "\n".join(["[[entry]]", *(f"{name} = {value}" for name, value in fields.items())]) + "\n"


def ledger(path: Path, *entries: str) -> Path:
    path.write_text("schema = 3\n" + "\n".join(entries))
    return path


def record(technique: str, verdict: Verdict, *shown: str | Fault) -> Record:
    """A record with texts as its reason, and faults."""
    case = Case(technique, "mlp", "cpu", "float32", Mode.FORWARD, 1)
    reason = "\n".join(part for part in shown if isinstance(part, str))
    return Record(case, verdict, reason=reason, faults=tuple(part for part in shown if isinstance(part, Fault)))


def raised(verdict: Verdict, reason: str, text: str) -> Record:
    """A record of a case whose exception the ledger expects."""
    kind, _, words = text.partition(": ")
    return record("eager", verdict, reason, Fault(FaultKind.RAISED, "run", kind, got=words))


def journal(path: Path, *records: Record) -> Path:
    return journal_harness.journal(path, *records, started="2026-11-20T10:00:00+00:00")


def checked(path: Path, *records: Record) -> tuple[list[str], list[str]]:
    result = ledger_check.check([path], IDS, TODAY, records or None)
    return result.wrong, result.notes


def test_a_malformed_file_is_said_and_the_others_are_read(tmp_path: Path) -> None:
    bad, good = ledger(tmp_path / "a.toml", entry(owner="1")), ledger(tmp_path / "b.toml", entry())
    result = ledger_check.check([bad, good], IDS, TODAY)
    (line,) = result.wrong
    assert line.startswith(f"{bad}: entry 1: field 'owner': expected a text")
    assert result.entries == 1


@pytest.mark.parametrize(
    ("expires", "wrong", "note"),
    [
        ("2026-11-23", "entry 1: expired on 2026-11-23", ""),
        ("2026-12-23", "", "entry 1: expires in 30 days, on 2026-12-23"),
        ("2026-12-24", "", ""),
    ],
)
def test_entries_that_have_expired_or_will_soon_are_named(expires: str, wrong: str, note: str, tmp_path: Path) -> None:
    result = checked(ledger(tmp_path / "a.toml", entry(expires=expires)))
    for message, expected in zip(result, (wrong, note), strict=True):
        assert len(message) == bool(expected)
        assert expected in "".join(message)


def test_a_pattern_of_no_case_is_named_with_the_nearest(tmp_path: Path) -> None:
    path = ledger(tmp_path / "a.toml", entry(cases='["eager/*", "jit-trac/mlp/cpu/float32/forward"]'))
    wrong, _ = checked(path)
    (line,) = wrong
    assert line.startswith(
        f"{path}: entry 1: field 'cases': 'jit-trac/mlp/cpu/float32/forward' is no case of the matrix;"
    )
    assert line.endswith("the nearest is jit-trace/mlp/cpu/float32/forward")


def test_entries_with_the_same_pattern_for_a_case_overlap(tmp_path: Path) -> None:
    path = ledger(tmp_path / "a.toml", entry(), entry(cases='["eager/*"]'), entry(cases='["export/*"]'))
    _, notes = checked(path)
    assert notes == [
        (
            f"{path}: entry 2: overlaps {path}: entry 1: both have kind = 'view', path = 'out', view = 'row' for "
            f"eager/mlp/cpu/float32/forward"
        )
    ]


def test_entries_that_expect_one_line_overlap(tmp_path: Path) -> None:
    path = ledger(tmp_path / "a.toml", entry(), entry(path='"o*"'))
    _, notes = checked(path, record("eager", Verdict.XFAIL, "sums (docs/findings.md)", VIEW))
    assert notes == [
        f"{path}: entry 2: overlaps {path}: entry 1: both expect, in eager/mlp/cpu/float32/forward: {VIEW}"
    ]


def test_an_entry_that_no_case_shows_is_idle(tmp_path: Path) -> None:
    path = ledger(tmp_path / "a.toml", entry(), entry(cases='["export/mlp/*/float32/forward"]'))
    wrong, notes = checked(path, record("eager", Verdict.PASS), record("export", Verdict.PASS))
    assert wrong == [
        (
            f"{path}: entry 1: idle: of its 1 cases 1 ran, such as eager/mlp/cpu/float32/forward, and none shows it: "
            f"remove it"
        )
    ]
    assert notes == [
        f"{path}: entry 2: idle: of its 2 cases 1 ran, such as export/mlp/cpu/float32/forward, and none shows it"
    ]


@pytest.mark.parametrize(
    "shown",
    [
        (),
        (record("eager", Verdict.XFAIL, "sums (docs/findings.md)", VIEW),),
        (record("eager", Verdict.FAIL, VIEW),),
        (record("eager", Verdict.UNSUPPORTED, "no kernel"),),
        (record("eager", Verdict.XFAIL, "other (docs/findings.md)", *[DTYPE] * 20),),
        (record("jit-trace", Verdict.PASS),),
    ],
)
def test_an_entry_is_not_idle_where_it_is_shown_or_cannot_be_known(shown: tuple[Record, ...], tmp_path: Path) -> None:
    assert checked(ledger(tmp_path / "a.toml", entry()), *shown) == ([], [])


def test_an_error_that_was_expected_is_no_idle_entry(tmp_path: Path) -> None:
    path = ledger(tmp_path / "a.toml", entry(verdict='"error"', match="'aten::x'", at_most='"RuntimeError"'))
    assert checked(path, raised(Verdict.XFAIL, "no kernel (docs/findings.md)", RAISED)) == ([], [])


def test_a_size_far_larger_than_seen_is_named(tmp_path: Path) -> None:
    path = ledger(tmp_path / "a.toml", entry(at_most="41.0"))
    _, notes = checked(path, record("eager", Verdict.XFAIL, "sums (docs/findings.md)", VIEW))
    assert notes == [f"{path}: entry 1: field 'at-most': 41, and the largest size seen is 4"]


def test_ledgers_of_seeds_are_not_held_against_journals(tmp_path: Path) -> None:
    assert checked(ledger(tmp_path / "cpu-seeds.toml", entry()), record("eager", Verdict.PASS)) == ([], [])


def suggested(tmp_path: Path, *records: Record, known: Ledger | None = None) -> tuple[str, int]:
    runs = load([journal(tmp_path / "a.jsonl", *records)])
    lines, count = ledger_stubs.suggest(runs, known or Ledger(), TODAY, lambda _: {})
    return "\n".join(lines) + "\n", count


FAILURES = (
    record("eager", Verdict.FAIL, VIEW, PATTERN),
    record("export", Verdict.FAIL, GROWN, DTYPE, IN_A_DRAW),
    record("jit-trace", Verdict.ERROR, RAISED, "and more of its text"),
)


def test_a_suggestion_is_refused_until_a_person_has_written_it_and_then_holds(tmp_path: Path) -> None:
    stub, count = suggested(tmp_path, *FAILURES)
    assert count == 4
    path = tmp_path / "new.toml"
    path.write_text(stub)
    with pytest.raises(LedgerError, match=r"new\.toml: entry 1: field 'reason': expected a text, and no TODO"):
        Ledger.load((path,))
    for name in ("reason", "link", "owner"):
        stub = "\n".join(f'{name} = "written"' if line.startswith(f"{name} = ") else line for line in stub.splitlines())
        path.write_text(stub + "\n")
    written = Ledger.load((path,))
    for failure in FAILURES:
        assert hold(failure, written).verdict is Verdict.XFAIL
    # And nothing else: another tensor, a larger fault, a case that was not seen.
    for other in (replace(VIEW, path="loss"), replace(GROWN, measured=80e-6), replace(VIEW, path="xout")):
        assert hold(replace(FAILURES[0], faults=(other,)), written).verdict is Verdict.FAIL
    assert written.covering("eager/cnn/cpu/float32/forward", TODAY) == ()


def test_a_suggestion_has_sizes_by_their_rule_and_the_date_of_its_run(tmp_path: Path) -> None:
    stub, _ = suggested(tmp_path, *FAILURES)
    assert stub.count("expires = 2027-05-19") == 4
    assert "at-most = 12\n" in stub  # 1.5 times the larger of two views
    assert "at-most = 3\n" in stub  # a number of elements, exactly
    assert "at-most = 0\n" in stub  # metadata have no size
    assert 'at-most = "RuntimeError"\n' in stub
    assert '"eager/mlp/cpu/float32/forward",\n  "export/mlp/cpu/float32/forward",' in stub


def test_what_a_ledger_expects_is_not_suggested(tmp_path: Path) -> None:
    known = Ledger.load((ledger(tmp_path / "known.toml", entry()),))
    stub, count = suggested(tmp_path, record("eager", Verdict.FAIL, VIEW, DTYPE), known=known)
    assert count == 1
    assert 'kind = "view"' not in stub


def test_an_infinite_size_is_left_to_a_person(tmp_path: Path) -> None:
    stub, _ = suggested(tmp_path, record("eager", Verdict.FAIL, replace(VIEW, measured=math.nan)))
    assert 'at-most = "TODO: the size is infinite' in stub


def test_a_crash_is_named_and_has_no_entry(tmp_path: Path) -> None:
    stub, count = suggested(tmp_path, record("eager", Verdict.CRASH, "died of SIGSEGV"))
    assert count == 0
    assert "# crash, which no ledger can expect: eager/mlp/cpu/float32/forward" in stub


@pytest.mark.parametrize(
    "line", [RAISED, str(VIEW), str(PATTERN), "a.b*c (d|e) [f]{2} ^$ 1.5e-3 'quoted' \"q\"", "\t'\\ é \x7f", "x" * 900]
)
def test_a_pattern_matches_its_line_and_is_toml(line: str, tmp_path: Path) -> None:
    failure = record("eager", Verdict.ERROR, f"RuntimeError: {line}")
    stub, _ = suggested(tmp_path, failure)
    (tmp_path / "new.toml").write_text(stub.replace("TODO", "done"))
    (result,) = Ledger.load((tmp_path / "new.toml",)).entries
    assert result.match.startswith("^")
    (fault,) = shown(load([tmp_path / "a.jsonl"])[0].records[0])
    assert result.explains(fault)


@pytest.mark.slow
def test_the_commands_read_files_and_journals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = journal(tmp_path / "a.jsonl", *(replace(failure) for failure in FAILURES))
    assert cli.main(["ledger", "suggest", str(failing)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# Suggested from a run.")
    assert "5 entries" in printed.err
    path = tmp_path / "new.toml"
    path.write_text(printed.out)
    assert cli.main(["ledger", "check", str(path)]) == 1
    assert "field 'reason': expected a text, and no TODO" in capsys.readouterr().out
    good = ledger(tmp_path / "b.toml", entry(cases='["eager/mlp/vendor/float32/forward"]'))
    assert cli.main(["ledger", "check", str(good), "--journal", str(failing)]) == 0
    assert "1 ledgers, 1 entries: 0 to change" in capsys.readouterr().out
    passing = journal(tmp_path / "c.jsonl", record("eager", Verdict.PASS))
    assert cli.main(["ledger", "suggest", str(passing)]) == 5
    assert cli.main(["ledger", "suggest", str(tmp_path / "none")]) == 4
    assert cli.main(["ledger", "check", "--journal", str(tmp_path / "none")]) == 4


@pytest.mark.slow
def test_accelchecks_own_ledgers_have_nothing_to_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_today", lambda: TODAY)  # their expiry is no matter of a change
    status = cli.main(["ledger", "check"])
    assert status == 0, capsys.readouterr().out
