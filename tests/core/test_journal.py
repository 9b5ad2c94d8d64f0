"""The journal: what is written is read back, line by line, whatever ended the run."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_harness import started

from accelcheck.core import journal as journals
from accelcheck.core.case import Case, Evidence, Figure, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import OLDER, SCHEMA, Journal, JournalError, Record
from accelcheck.core.journal_reading import read, sections

ROOT = Path(__file__).parents[2]
CASE = Case("amp-bf16", "cnn", "cpu", "float32", Mode.BACKWARD, 2)
RECORD = Record(
    case=CASE,
    verdict=Verdict.FAIL,
    code="",
    reason="out: view row\nout[1]['ü\u2028\x85']: shape",
    evidence=(Evidence("ops >= 1", 3, engaged=True), Evidence("dtype", "bfloat16", engaged=False)),
    figures=(Figure("out", "row", 0.5, 0.25, "[3, :]", gates=True), Figure("out", "bias", 0.0, 1.0, "", gates=False)),
    compared=640,
    eager_excess=0.75,
    seconds={"oracle": 0.5, "run": 0.0625},
    traceback="Traceback\n  line",
    faults=(
        Fault(FaultKind.VIEW, "out['a: ü\u2028']", "row", "draw 1", measured=math.inf, allowed=1e-6, place="[3, :]"),
        Fault(FaultKind.RAISED, "run", "LookupError", got="no kernel"),
    ),
    runs=(Verdict.FAIL, Verdict.PASS),
)


def written(path: Path, *records: Record, end: bool = True) -> Path:
    journal = Journal(path)
    journal.header({"torch": "2.13.0"})
    for record in records:
        journal.case(record.as_json())
    if end:
        journal.end({"verdicts": {"fail": len(records)}, "exit": 1})
    return path


def changed(**fields: Any) -> str:
    return json.dumps(RECORD.as_json() | fields)


def test_records_make_the_round_trip(tmp_path: Path) -> None:
    header, records = read(written(tmp_path / "run.jsonl", RECORD, replace(RECORD, verdict=Verdict.PASS, reason="")))
    assert header == {"kind": "run", "schema": SCHEMA, "torch": "2.13.0"}
    assert records == [RECORD, replace(RECORD, verdict=Verdict.PASS, reason="")]


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_make_the_round_trip(number: float, tmp_path: Path) -> None:
    record = replace(
        RECORD,
        figures=(Figure("out", "row", number, 0.0, "", gates=True),),
        evidence=(Evidence("error", number, engaged=True),),
        eager_excess=number,
    )
    (back,) = read(written(tmp_path / "run.jsonl", record))[1]
    assert str(back) == str(record)  # NaN is no number that equals itself
    assert back == record or math.isnan(number)
    assert back.figures[0].within is (number == -math.inf)


def test_every_line_is_strict_json_and_ascii(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", replace(RECORD, eager_excess=math.inf))
    lines = path.read_bytes().decode("ascii").split("\n")
    assert lines.pop() == ""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert [json.loads(line, parse_constant=refuse)["kind"] for line in lines] == ["run", "case", "end"]


def test_a_case_carries_its_id_and_seed() -> None:
    data = RECORD.as_json()
    assert data["case"]["id"] == CASE.id
    assert data["case"]["seed"] == CASE.seed


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_last_line_that_was_cut_is_left_out(kept: int, tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", RECORD, end=False)
    with path.open("a") as file:
        file.write(changed()[:kept])
    assert read(path)[1] == [RECORD]


def test_a_journal_that_was_cut_in_its_header_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "ru')
    assert read(path) == ({}, [])


HEADER = json.dumps({"kind": "run", "schema": SCHEMA})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (changed()[:40], "not JSON"),
        ("", "not JSON"),
        ("\xff", "not JSON"),
        ("[" * 100_000, "Expected `object`, got `array`"),
        ("[]", "Expected `object`, got `array`"),
        ('{"kind": "case"}', "missing required field `case`"),
        ('{"kind": "note"}', "field 'kind' is 'note'; expected run, case, resumed or end"),
        (changed(verdict="fine"), "Invalid enum value 'fine' - at `$.verdict`"),
        (
            changed(case={**RECORD.as_json()["case"], "mode": "sideways"}),
            "Invalid enum value 'sideways' - at `$.case.mode`",
        ),
        (changed(compared=-1), "field 'compared' is -1"),
        (
            changed(compared=0).replace('"compared": 0', '"compared": ' + "9" * 4300),
            "field 'compared' is a larger number",
        ),
        (changed(compared="many"), "not a case record"),
        (changed(compared=0).replace('"compared": 0', '"compared": 1e999'), "not a case record"),
        (
            changed(evidence=[{"claim": "c", "observed": 1, "engaged": "maybe"}]),
            "Expected `bool`, got `str` - at `$.evidence[0].engaged`",
        ),
        (
            changed(evidence=[{"claim": "c", "observed": [], "engaged": True}]),
            "got `array` - at `$.evidence[0].observed`",
        ),
        (
            changed(figures=[{**RECORD.as_json()["figures"][0], "gates": 7}]),
            "Expected `bool`, got `int` - at `$.figures[0].gates`",
        ),
        (changed(figures=[{**RECORD.as_json()["figures"][0], "measured": "much"}]), "not a case record"),
        (changed(figures=7), "not a case record"),
        (changed(seconds=[]), "not a case record"),
    ],
    ids=range(19),
)
def test_any_other_garbage_is_refused_with_file_and_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f"{HEADER}\n{line}\n{changed()}\n", encoding="latin-1")
    with pytest.raises(JournalError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert message in str(raised.value)


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, str(SCHEMA), None])
def test_another_schema_is_refused(schema: object, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"kind": "run", "schema": schema}) + "\n")
    with pytest.raises(JournalError, match=rf"run.jsonl:1: schema .*; this accelcheck reads {OLDER} and {SCHEMA}"):
        read(path)


def test_a_journal_of_the_version_before_is_read_with_its_lines_as_faults(tmp_path: Path) -> None:
    path, stored = tmp_path / "older.jsonl", ROOT / "tests" / "journals" / "toy.jsonl"
    raw = [json.loads(line) for line in stored.read_text().splitlines()]
    raw[0]["schema"] = OLDER
    for case, record in zip((line for line in raw if line["kind"] == "case"), read(stored)[1], strict=True):
        if case.pop("faults", ()):
            case["reason"] = record.why
    path.write_text("".join(f"{json.dumps(line)}\n" for line in raw))
    header, records = read(path)
    assert header["schema"] == OLDER
    reasons = [line["reason"] for line in raw if line["kind"] == "case" and line["verdict"] == "fail"]
    failures = [record for record in records if record.verdict is Verdict.FAIL]
    assert [record.why for record in failures] == reasons
    assert not any(record.reason for record in failures)
    assert {fault.kind for record in failures for fault in record.faults} == {FaultKind.OTHER}
    others = [record for record in records if record.verdict is not Verdict.FAIL]
    assert not any(record.faults for record in others)
    assert any(record.reason for record in others)


def test_each_run_of_a_merged_journal_is_read_by_its_own_version(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    failed = changed(verdict="fail", reason="out: wrong", faults=[])
    path.write_text("".join(f"{HEADER.replace(str(SCHEMA), str(schema))}\n{failed}\n" for schema in (OLDER, SCHEMA)))
    older, newer = (section.records[0] for section in sections(path))
    assert (older.reason, older.faults) == ("", (Fault(FaultKind.OTHER, "out: wrong"),))
    assert (newer.reason, newer.faults) == ("out: wrong", ())


def test_records_without_a_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(f"{changed()}\n")
    with pytest.raises(JournalError, match=r"run.jsonl:1: field 'kind' is 'case'; expected run in the first line"):
        read(path)


def test_a_journal_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"none.jsonl cannot be read: No such file"):
        read(tmp_path / "none.jsonl")


def test_a_journal_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"cannot be written: .*; give --accel-journal a path"):
        Journal(tmp_path / "file" / "run.jsonl")


def test_the_folder_of_a_journal_is_made_and_an_old_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    written(path, RECORD, RECORD)
    written(path, RECORD)
    assert len(read(path)[1]) == 1


def test_every_line_is_there_as_soon_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path)
    journal.header({})
    assert len(path.read_text().splitlines()) == 1
    journal.case(RECORD.as_json())
    assert read(path)[1] == [RECORD]


def test_a_run_waits_for_the_last_children_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    program = f"""import fcntl, os, time
file = os.open({str(path)!r}, os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(0.5)"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        Journal(path).close()


def test_two_runs_cannot_write_to_one_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "ENDING", 0.1)
    path = tmp_path / "run.jsonl"
    first = Journal(path)
    first.header({})
    with pytest.raises(JournalError, match=r"another run is writing to the journal .*run\.jsonl: give each run one"):
        Journal(path)
    first.case(RECORD.as_json())
    first.end({})
    assert read(path)[1] == [RECORD]
    Journal(path).close()


def test_a_journal_that_is_a_symbolic_link_is_refused_and_what_it_names_is_kept(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(JournalError, match="is a symbolic link: give --accel-journal the file itself"):
        Journal(tmp_path / "run.jsonl")
    assert (tmp_path / "precious").read_text() == "kept"


def test_what_is_resumed_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path, RECORD)
    with path.open("a") as file:
        file.write('{"kind": "ca')
    journal = Journal(path, resumed=True)
    journal.case(RECORD.as_json())
    journal.close()
    assert read(path)[1] == [RECORD, RECORD]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    journal = Journal(path)
    journal.header({})
    journal.case(RECORD.as_json())
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JournalError, match="cannot be written: No space left on device"):
        journal.case(RECORD.as_json())
    monkeypatch.undo()
    journal.close()
    assert read(path)[1] == [RECORD]
    assert path.read_bytes().endswith(b"}\n")


WRITER = """
import json, sys
from pathlib import Path
from accelcheck.core.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.header({})
record = json.loads(sys.argv[2])
while True:
    journal.case(record)
    print(flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system cannot kill a process")
def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER, str(path), changed()]
    with started(command, stdout=subprocess.PIPE, env=environment) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
        writer.kill()
    assert writer.returncode == -signal.SIGKILL
    _, records = read(path)
    assert len(records) >= 20
    assert set(map(repr, records)) == {repr(RECORD)}
