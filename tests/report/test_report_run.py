"""Runs of each device: journals of one device are joined, all else is kept apart, differences are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journal_harness import EPYC, STORED, journal, record

from accelcheck.core.case import Verdict
from accelcheck.core.journal import SCHEMA, JournalError
from accelcheck.report.run import labels, load


def test_shards_of_one_device_are_one(tmp_path: Path) -> None:
    path = journal(tmp_path / "1.jsonl", record("eager"), started="2026-11-23T11:00:00+00:00")
    other = journal(tmp_path / "2.jsonl", record("amp-bf16"), record("absent", Verdict.UNAVAILABLE), level=2)
    (run,) = load([path, other])
    assert [r.case.technique for r in run.records] == ["absent", "amp-bf16", "eager"]
    assert (run.level, run.started, run.executed, run.green) == (2, "2026-11-23T10:00:00+00:00", 2, True)
    assert run.sources == (str(path), str(other))


@pytest.mark.parametrize(
    ("changed", "label"),
    [
        ({"fingerprint": replace(EPYC, chip="Xeon")}, ["cpu, AMD EPYC", "cpu, Xeon"]),
        (
            {"fingerprint": replace(EPYC, versions={"torch": "2.9.0"})},
            ["cpu, AMD EPYC, torch 2.13.0", "cpu, AMD EPYC, torch 2.9.0"],
        ),
        ({"accelcheck": "0.2.0"}, ["cpu, AMD EPYC, torch 2.13.0 (1)", "cpu, AMD EPYC, torch 2.13.0 (2)"]),
        ({"python": "3.12.0"}, ["cpu, AMD EPYC, torch 2.13.0 (1)", "cpu, AMD EPYC, torch 2.13.0 (2)"]),
        ({"fingerprint": replace(EPYC, device="xla")}, ["cpu", "xla"]),
    ],
)
def test_runs_on_different_devices_are_kept_apart(changed: dict[str, Any], label: list[str], tmp_path: Path) -> None:
    device = changed["fingerprint"].device if "fingerprint" in changed else "cpu"
    path = journal(tmp_path / "1.jsonl", record("eager"))
    other = journal(tmp_path / "2.jsonl", record("eager", device=device), **changed)
    runs = load([path, other])
    assert [len(run.records) for run in runs] == [1, 1]
    assert labels(runs) == label


def test_a_merged_journal_is_read_as_its_parts(tmp_path: Path) -> None:
    parts = [
        journal(tmp_path / "1.jsonl", record("eager")),
        journal(tmp_path / "2.jsonl", record("eager"), fingerprint=replace(EPYC, chip="Xeon")),
    ]
    merged = tmp_path / "merged.jsonl"
    merged.write_bytes(b"".join(part.read_bytes() for part in parts))
    assert [run.records for run in load([merged])] == [run.records for run in load(parts)]


def test_of_two_verdicts_of_one_case_the_worse_counts_and_is_said(tmp_path: Path) -> None:
    paths = [
        journal(tmp_path / "1.jsonl", record("eager")),
        journal(tmp_path / "2.jsonl", record("eager", Verdict.FAIL)),
    ]
    for order in (paths, paths[::-1]):
        (run,) = load(order)
        assert run.records[0].verdict is Verdict.FAIL
        assert not run.green
        assert any("the worse of those that ran counts" in remark for remark in run.remarks)


def test_a_run_that_was_cut_off_says_so(tmp_path: Path) -> None:
    path = journal(tmp_path / "1.jsonl", record("eager"), end=False)
    assert load([path])[0].remarks == (f"{path}: the run was cut off",)
    with path.open("a") as file:
        file.write('{"kind": "ca')
    assert load([path])[0].remarks == (f"{path}: the run was cut off, in the middle of a line",)


def test_an_absent_device_has_no_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    absent = {"capability": "unavailable [no-hardware] no NVIDIA GPU found", "fingerprint": None}
    path.write_text(json.dumps({"kind": "run", "schema": SCHEMA, "devices": {"cuda": absent}}) + "\n")
    (run,) = load([path])
    assert (run.device, run.fingerprint, run.green) == ("cuda", None, False)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"devices": []}, "Expected `object`, got `array` - at `$.devices`"),
        ({"level": 5}, "field 'level' is 5; expected one of 1, 2, 3, 4"),
        ({"level": "deep"}, "Expected `int`, got `str` - at `$.level`"),
        ({"devices": {"cpu": {"fingerprint": {"chip": 1}}}}, "Expected `str`, got `int` - at `$.chip`"),
    ],
)
def test_a_wrong_header_is_refused_with_file_and_field(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps({"kind": "run", "schema": SCHEMA, **header}) + "\n")
    with pytest.raises(JournalError) as raised:
        load([path])
    assert str(raised.value).startswith(f"{path}:1: header: ")
    assert message in str(raised.value)


def test_a_file_without_a_whole_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_bytes(b"")
    with pytest.raises(JournalError, match=r"1\.jsonl: expected a journal"):
        load([path])


def test_stored_journals_of_both_devices_are_read() -> None:
    runs = load([STORED / "cpu" / "level1.jsonl", STORED / "xla" / "level1.jsonl"])
    assert labels(runs) == ["cpu", "xla"]
    assert all(run.executed > 100 for run in runs)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"level": 9}, "field 'level' is 9; expected one of"),
        ({"packages": []}, "Expected `object`, got `array`"),
        ({"devices": {str(number): {} for number in range(65)}}, "at most 64 devices in field 'devices', got 65"),
    ],
)
def test_an_error_in_a_later_header_names_its_line(facts: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = journal(tmp_path / "1.jsonl", record("eager"))
    bad = journal(tmp_path / "2.jsonl", record("eager"), **facts)
    good.write_bytes(good.read_bytes() + bad.read_bytes())
    with pytest.raises(JournalError) as raised:
        load([good])
    assert str(raised.value).startswith(f"{good}:4: header: ")
    assert said in str(raised.value)


def test_a_run_that_was_cut_off_is_known_by_its_journal(tmp_path: Path) -> None:
    whole, part = (journal(tmp_path / f"{e}.jsonl", record("eager"), record("amp-bf16"), end=e) for e in (True, False))
    assert [run.cut_off for run in load([whole])] == [()]
    assert [run.cut_off for run in load([whole, part])] == [(str(part),)]
