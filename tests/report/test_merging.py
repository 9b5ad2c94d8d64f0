"""Journals are merged whole or not at all, to the same bytes in any order; differences are named."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from journal_harness import EPYC, STORED, journal, record

from accelcheck import cli
from accelcheck.core.case import Figure, Verdict
from accelcheck.core.journal import SCHEMA, JournalError, Record
from accelcheck.core.journal_reading import case, lines, outline
from accelcheck.report import merging
from accelcheck.report.merging import DifferentDevicesError, MergeError, merge
from accelcheck.report.run import load


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "merged.jsonl"


def test_a_merged_journal_says_what_its_journals_say(output: Path) -> None:
    paths = [STORED / "cpu" / "level1.jsonl", STORED / "xla" / "level1.jsonl"]
    merged = merge(paths, output)
    assert [run.records for run in load([output])] == [run.records for run in load(paths)]
    assert merged.cases == sum(len(run.records) for run in load(paths))
    assert merged.notes == ()


def test_any_order_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [
        journal(tmp_path / "a.jsonl", record("eager"), started="2026-11-23T12:00:00+00:00"),
        journal(tmp_path / "b.jsonl", record("amp-bf16")),
        journal(tmp_path / "c.jsonl", record("eager", device="xla"), fingerprint=replace(EPYC, device="xla")),
    ]
    names = set()
    for order in itertools.permutations(paths):
        merge(order, tmp_path / "merged.jsonl")
        names.add((tmp_path / "merged.jsonl").read_bytes())
    assert names == {b"".join(paths[index].read_bytes() for index in (1, 0, 2))}


def test_a_run_that_is_given_twice_or_is_in_a_merged_journal_is_taken_once(tmp_path: Path, output: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    other = journal(tmp_path / "b.jsonl", record("amp-bf16"))
    first = merge([path, other, path], output)
    assert first.notes == (f"{path}: taken once: the same run as {path}",)
    again = merge([output, other], tmp_path / "again.jsonl")
    assert len(again.parts) == 2
    assert "taken once: the same run as" in again.notes[0]
    assert (tmp_path / "again.jsonl").read_bytes() == output.read_bytes()


def test_the_beginning_of_a_run_that_went_on_is_left_out(tmp_path: Path, output: Path) -> None:
    begun = journal(tmp_path / "begun.jsonl", record("eager"), end=False)
    whole = journal(tmp_path / "whole.jsonl", record("eager"), record("amp-bf16"))
    merged = merge([begun, whole], output)
    assert output.read_bytes() == whole.read_bytes()
    assert merged.notes == (f"{begun}: left out: it is the beginning of the run in {whole}",)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fingerprint": replace(EPYC, chip="Xeon")}, "fingerprint.chip 'AMD EPYC' and 'Xeon'"),
        (
            {"fingerprint": replace(EPYC, versions={"torch": "2.9.0"})},
            "fingerprint.versions.torch '2.13.0' and '2.9.0'",
        ),
        (
            {"fingerprint": replace(EPYC, environment={"OMP_NUM_THREADS": "1"})},
            "fingerprint.environment.OMP_NUM_THREADS nothing and '1'",
        ),
        ({"accelcheck": "0.2.0"}, "accelcheck '0.1.0' and '0.2.0'"),
        ({"python": "3.12.0"}, "python '3.11.7' and '3.12.0'"),
        (
            {"must_pass": {"cpu": {"class": "cpu", "version": 2, "sha256": "b2"}}},
            "must_pass.class nothing and 'cpu'; must_pass.version nothing and '2'; must_pass.sha256 nothing and 'b2'",
        ),
    ],
)
def test_what_differs_is_kept_apart_or_not(changed: dict[str, Any], said: str, tmp_path: Path, output: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    other = journal(tmp_path / "b.jsonl", record("eager"), started="2026-11-23T12:00:00+00:00", **changed)
    assert merge([other, path], output).notes == (f"kept apart: cpu in {path} and in {other}: {said}",)
    assert len(load([output])) == 2
    output.unlink()
    with pytest.raises(DifferentDevicesError) as raised:
        merge([path, other], output, same_device=True)
    assert said in str(raised.value)
    assert not output.exists()


def test_shards_of_one_device_are_merged_as_the_same_device(tmp_path: Path, output: Path) -> None:
    paths = [journal(tmp_path / f"{name}.jsonl", record(name)) for name in ("eager", "amp-bf16")]
    merge(paths, output, same_device=True)
    (run,) = load([output])
    assert len(run.records) == 2


def test_other_devices_are_refused_where_one_was_asked_for(tmp_path: Path, output: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    other = journal(tmp_path / "b.jsonl", fingerprint=replace(EPYC, device="xla"))
    with pytest.raises(DifferentDevicesError, match=r"devices: cpu in .*a\.jsonl, xla in .*b\.jsonl"):
        merge([path, other], output, same_device=True)


def test_of_two_verdicts_the_worse_counts_and_is_said(tmp_path: Path, output: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    other = journal(tmp_path / "b.jsonl", record("eager", Verdict.FAIL), started="2026-11-23T12:00:00+00:00")
    both = journal(
        tmp_path / "c.jsonl", record("jit", Verdict.FAIL), record("jit"), started="2026-11-23T13:00:00+00:00"
    )
    notes = merge([path, other, both], output).notes
    assert notes == (
        f"eager/mlp/cpu/float32/forward: pass in {path}, fail in {other}; the worse of those that ran counts",
        f"jit/mlp/cpu/float32/forward: pass and fail in {both}; the worse of those that ran counts",
    )
    assert {r.verdict for r in load([output])[0].records} == {Verdict.FAIL}


def test_missing_shards_are_said(tmp_path: Path, output: Path) -> None:
    def shard(number: int, **more: Any) -> Path:
        facts: dict[str, Any] = {
            "started": f"2026-11-23T1{number}:00:00+00:00",
            "selection": {"shard": {"number": number, "of": 4}, **more},
        }
        return journal(tmp_path / f"{number}{more}.jsonl", record(f"technique-{number}"), **facts)

    paths = [shard(number) for number in (1, 2, 3, 4)]
    assert merge(paths, output).notes == ()
    missing = "incomplete: shards 1, 3 of 4 missing, and with them their cases"
    assert merge([paths[1], paths[3]], output).notes == (missing,)
    assert merge([paths[0], paths[1], paths[2], shard(4, level=2)], output).notes == (
        "incomplete: shard 4 of 4 missing, and with them their cases",
        "incomplete: shards 1, 2, 3 of 4 missing, and with them their cases",
    )
    for odd in ({"number": 5, "of": 4}, {"number": "1", "of": 2}, {"number": 1, "of": 10**9}, [1, 2], None):
        path = journal(tmp_path / "odd.jsonl", record("eager"), selection={"shard": odd})
        assert merge([path], output).notes == ()


def test_other_ledgers_for_one_device_are_said(tmp_path: Path, output: Path) -> None:
    a, other = (
        journal(
            tmp_path / f"{sha}.jsonl",
            ledgers=[{"name": "all.toml", "sha256": "0"}, {"name": "cpu.toml", "sha256": sha}],
        )
        for sha in ("1", "2")
    )
    message = set(merge([a, other], output).notes)
    assert message <= {
        f"cpu: {first} and {second} were judged by other ledgers: cpu.toml"
        for first, second in ((a, other), (other, a))
    }
    assert len(message) == 1


def test_a_run_that_was_cut_off_is_said_and_its_torn_line_left_out(tmp_path: Path, output: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"), end=False)
    kept = path.read_bytes()
    path.write_bytes(kept + b'{"kind": "ca')
    other = journal(tmp_path / "b.jsonl", record("amp-bf16"), started="2026-11-23T12:00:00+00:00")
    assert merge([path, other], output).notes == (f"{path}: the run was cut off, in the middle of a line",)
    assert output.read_bytes() == kept + other.read_bytes()


def test_a_last_line_without_its_line_end_gets_one(tmp_path: Path, output: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    kept = path.read_bytes()
    path.write_bytes(kept.rstrip(b"\n"))
    assert merge([path], output).notes == ()
    assert output.read_bytes() == kept


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"kind": "run", "schema": SCHEMA + 1}, "b.jsonl:1: schema 4; this accelcheck reads 2 and 3"),
        ({"kind": "run", "schema": SCHEMA, "devices": []}, "b.jsonl:1: header: Expected `object`"),
        ({"kind": "case"}, "b.jsonl:1: field 'kind' is 'case'; expected run"),
    ],
)
def test_another_file_changes_no_output(line: dict[str, Any], message: str, tmp_path: Path, output: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    (tmp_path / "b.jsonl").write_text(json.dumps(line) + "\n")
    output.write_text("as it was")
    with pytest.raises(JournalError) as raised:
        merge([path, tmp_path / "b.jsonl"], output)
    assert message in str(raised.value)
    assert output.read_text() == "as it was"


def test_an_empty_file_is_refused(tmp_path: Path, output: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(JournalError, match=r"a\.jsonl: expected a journal"):
        merge([tmp_path / "a.jsonl"], output)


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    link = tmp_path / "link.jsonl"
    link.hardlink_to(path)
    for target in (path, link):
        with pytest.raises(MergeError, match="is one of the journals that are merged"):
            merge([path], target)


def test_a_file_of_many_cut_runs_is_read_once(tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        journal(tmp_path / "part.jsonl", *records, end=False, packages={"number": str(number)}).read_bytes()
        for number in range(40)
        for records in ((), (record("eager"),))
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(runs))
    made = []

    def sha256() -> Any:
        made.append(1)
        return hashlib.sha256()

    monkeypatch.setattr(merging, "hashlib", SimpleNamespace(sha256=sha256))
    merged = merge([tmp_path / "a.jsonl"], output)
    assert len(merged.parts) == 40
    assert len(made) <= 4 * len(runs)


def test_a_journal_that_changes_is_refused(tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    whole = path.read_bytes()

    def rewritten(parts: Any) -> tuple[list[str], int]:
        path.write_bytes(whole.replace(b"pass", b"fail"))
        return [], 1

    monkeypatch.setattr(merging, "_judged_twice", rewritten)
    with pytest.raises(MergeError, match="changed while it was merged"):
        merge([path], output)
    assert not output.exists()


def test_the_command_says_what_it_merged_and_exits_by_what_it_met(
    tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = journal(tmp_path / "a.jsonl", record("eager"))
    other = journal(tmp_path / "b.jsonl", record("eager"), accelcheck="0.2.0\x1b[31m")
    assert cli.main(["merge", str(path), str(other), "-o", str(output)]) == 0
    printed = capsys.readouterr().out
    assert f"{output}: 2 runs, 2 cases" in printed
    assert "kept apart: cpu" in printed
    assert "\x1b" not in printed
    assert cli.main(["merge", "--same-device", str(path), str(other), "-o", str(output)]) == 1
    assert cli.main(["merge", str(tmp_path / "none.jsonl"), "-o", str(output)]) == 4
    assert cli.main(["merge", str(path), "-o", str(tmp_path / "no" / "folder.jsonl")]) == 4
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_an_outline_takes_and_refuses_what_a_record_does(tmp_path: Path) -> None:
    figure = Figure("out", "row", 1.0, float("inf"), "", gates=True)
    good = replace(record("eager", Verdict.FAIL), figures=(figure,), seconds={"run": 1.0}).as_json()
    changes: list[dict[str, Any]] = [
        {},
        {"verdict": "good"},
        {"compared": -1},
        {"compared": 10**4000},
        {"compared": True},
        {"figures": [{}]},
        {"figures": [{**good["figures"][0], "measured": "nan"}]},
        {"figures": [{**good["figures"][0], "measured": "many"}]},
        {"evidence": [{"claim": "a", "observed": None, "engaged": True}]},
        {"evidence": [{"claim": "a", "observed": "inf", "engaged": True}]},
        {"evidence": [{"claim": "a", "observed": 1, "engaged": "yes"}]},
        {"case": {**good["case"], "mode": "sideways"}},
        {"seconds": {"run": "long"}},
        {"measurements": [{"name": "latency", "value": "x", "unit": "s"}]},
        {"times": [None]},
        {"later": 1},
    ]
    path = tmp_path / "a.jsonl"
    text = [json.dumps({"kind": "run"}), *(json.dumps(good | change) for change in changes)]
    path.write_text("\n".join(text) + "\n")
    taken = 0
    for line, at_once in list(zip(lines(path), lines(path, outlined=True), strict=True))[1:]:
        messages = []
        for read, given in ((case, line), (outline, line), (outline, at_once)):
            try:
                number = read(given)
            except JournalError as error:
                messages.append(str(error))
            else:
                taken += 1
                messages.append(str((number.case.id, number.verdict) if isinstance(number, Record) else number))
        assert messages[0] == messages[1] == messages[2]
    assert taken == 3 * 4
