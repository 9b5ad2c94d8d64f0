"""Stated support of chips: strict reading; a refusal of what is stated as supported is a failure."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fault_harness import Bed, Planted, bench, case, seeded

from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.cuda import Cuda
from accelcheck.devices.rocm import Rocm
from accelcheck.expectations.chips import FOLDER, RUNS, TRIED, ChipError, ChipStatement, held, load
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.base import Unsupported
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program

TEXT = """
schema = 1
[[statement]]
cases = ["planted/mlp/*"]
supported = true
since = "2.4"
fact = "it multiplies float8"
source = "https://example.org/chip"
"""


class Chip(Bed):
    """A device of a family that a test states something about."""

    def architecture(self) -> str:
        return "sm_77"


def refusing(*, tried: bool = True) -> Change:
    def refuse(program: Program) -> None:
        raise Unsupported(unsupported(Code.NO_BACKEND, "No available kernel", tried=tried))

    return refuse


@pytest.fixture
def stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "chips" / "sm_77.toml"
    path.parent.mkdir()
    path.write_text(TEXT)
    monkeypatch.setattr("accelcheck.checks.execute.load", lambda name: load(name, path.parent))
    return path


def record_of(change: Change, store: Store, device: Bed) -> Record:
    workload = seeded("mlp")
    return bench(store, Planted(change), workload, device).run(case(workload))


def test_what_a_chip_is_stated_to_support_and_refuses_is_a_failure(store: Store, stated: Path) -> None:
    record = record_of(refusing(), store, Chip())
    assert (record.verdict, record.code, record.remark) == (Verdict.FAIL, "", "")
    assert record.why == (
        "technique: refused: expected to run on sm_77: it multiplies float8 (https://example.org/chip), "
        "got unsupported [no-backend] No available kernel"
    )


def test_what_a_chip_is_stated_not_to_support_is_unsupported_without_a_remark(store: Store, stated: Path) -> None:
    stated.write_text(TEXT.replace("true", "false"))
    record = record_of(refusing(), store, Chip())
    assert (record.verdict, record.remark) == (Verdict.UNSUPPORTED, "")


def test_what_runs_although_stated_as_unsupported_is_said_and_passes(store: Store, stated: Path) -> None:
    stated.write_text(TEXT.replace("true", "false"))
    record = record_of(nothing, store, Chip())
    assert record.verdict is Verdict.PASS
    assert record.remark == f"{RUNS} on sm_77: it multiplies float8 (https://example.org/chip)"


def test_on_an_unknown_chip_a_refusal_is_found_by_trying_and_keeps_its_message(store: Store, stated: Path) -> None:
    record = record_of(refusing(), store, Bed())
    assert (record.verdict, record.remark) == (Verdict.UNSUPPORTED, TRIED)
    assert record.why == "unsupported [no-backend] No available kernel"


def test_what_a_technique_declares_is_not_found_by_trying(store: Store) -> None:
    assert record_of(refusing(tried=False), store, Bed()).remark == ""


def test_a_ledger_can_expect_what_a_chip_refuses(store: Store, stated: Path) -> None:
    import datetime as dt

    from accelcheck.expectations.ledger import Entry, Ledger, hold

    workload = seeded("mlp")
    expecting = bench(store, Planted(refusing()), workload, Chip())
    day = dt.date(9999, 1, 1)
    ledger = Ledger((Entry(("*",), Verdict.FAIL, 0.0, "known", "link", "owner", day, match="^technique: refused: "),))
    assert hold(expecting.run(case(workload)), ledger).verdict is Verdict.XFAIL


def plain(verdict: Verdict = Verdict.UNSUPPORTED, technique: str = "a") -> Record:
    return Record(
        Case(technique, "mlp", "cpu", "float32", Mode.FORWARD, 1), verdict, "no-backend", "refused", remark=TRIED
    )


def statement(glob: str = "a/*", *, supported: bool = True) -> ChipStatement:
    return ChipStatement("sm_77", (glob,), supported, (2, 9), "fact", "https://example.org")


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.8.1", "unsupported"), ("2.9.0+cu130", "fail"), ("2.13.0", "fail"), ("", "unsupported"), ("3.0", "fail")],
)
def test_a_statement_holds_from_its_release_on(version: str, verdict: str) -> None:
    assert held(plain(), (statement(),), version).verdict == verdict


def test_the_first_statement_that_covers_a_case_decides() -> None:
    both = (statement("a/mlp/*", supported=False), statement())
    assert held(plain(), both, "2.13").verdict is Verdict.UNSUPPORTED
    assert held(plain(), both[::-1], "2.13").verdict is Verdict.FAIL
    assert held(plain(technique="b"), both, "2.13") == plain(technique="b")


def test_what_is_only_unavailable_is_no_failure_of_the_chip() -> None:
    assert held(plain(Verdict.UNAVAILABLE), (statement(),), "2.13").verdict is Verdict.UNAVAILABLE


def test_a_remark_survives_the_journal_and_earlier_journals_have_none() -> None:
    data = json.loads(json.dumps(plain().as_json()))
    assert Record.from_json(data) == plain()
    del data["remark"]
    assert Record.from_json(data) == replace(plain(), remark="")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("true", '"yes"', "statement 1: field 'supported': expected true or false, got 'yes'"),
        ('"2.4"', "2.4", "statement 1: field 'since': expected the first release of torch"),
        ("https", "http", "statement 1: field 'source': expected a URL"),
        ("fact =", "facts =", "statement 1: field 'facts': unknown field 'facts'. Did you mean 'fact'?"),
        ("schema = 1", "schema = 2", "field 'schema': expected 1, which this accelcheck reads, got 2"),
    ],
)
def test_a_malformed_file_is_refused_by_name(old: str, new: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "sm_77.toml").write_text(TEXT.replace(old, new))
    with pytest.raises(ChipError) as raised:
        load("sm_77", tmp_path)
    assert message in str(raised.value)
    assert "sm_77.toml" in str(raised.value)


@pytest.mark.parametrize("name", ["", "no-such-chip", "../ledgers/all", "/etc/passwd"])
def test_a_chip_that_is_not_stored_has_no_statements(name: str) -> None:
    assert load(name) == ()


@pytest.mark.slow
def test_shipped_statements_are_read_and_speak_of_cases_that_exist() -> None:
    from accelcheck.core.selection import Selection
    from accelcheck.techniques.matrix import Matrix

    ids = [each_case.id for each_case in Matrix.load().cases(Selection(("any",), level=4))]
    files = sorted(FOLDER.glob("*.toml"))
    assert {"sm_80", "sm_89", "sm_90", "sm_100", "gfx942", "x86_64", "pjrt-cpu"} <= {path.stem for path in files}
    for path in files:
        for run in load(path.stem):
            for glob in run.cases:
                assert any(fnmatch.fnmatchcase(name, glob) for name in ids), f"{path.name}: {glob}"


def case_of(technique: str, workload: str, dtype: str, mode: Mode = Mode.FORWARD) -> Record:
    return Record(
        Case(technique, workload, "cuda", dtype, mode, 1), Verdict.UNSUPPORTED, reason="refused", remark=TRIED
    )


@pytest.mark.parametrize(
    ("chip", "technique", "workload", "dtype", "verdict"),
    [
        ("sm_90", "float8-scaled-mm", "mlp", "float32", "fail"),
        ("sm_90", "float8-scaled-mm-rowwise", "mlp", "bfloat16", "fail"),
        ("sm_90", "float8-scaled-mm-fnuz", "mlp", "float32", "unsupported"),
        ("sm_90", "sdpa-flash", "attention", "float16", "fail"),
        ("sm_90", "sdpa-flash", "attention", "float32", "unsupported"),
        ("sm_90", "sdpa-flash", "attention-mask", "float16", "unsupported"),
        ("sm_89", "float8-scaled-mm", "mlp", "float32", "fail"),
        ("sm_80", "float8-scaled-mm", "mlp", "float32", "unsupported"),
        ("sm_80", "sdpa-efficient", "attention-causal", "float32", "fail"),
        ("gfx942", "float8-scaled-mm", "mlp", "float32", "unsupported"),
        ("gfx942", "float8-scaled-mm-fnuz", "mlp", "float32", "fail"),
        ("gfx950", "float8-scaled-mm", "mlp", "float32", "fail"),
        ("gfx90a", "float8-scaled-mm-fnuz", "mlp", "float32", "unsupported"),
        ("x86_64", "float8-scaled-mm", "mlp", "float32", "fail"),
    ],
)
def test_what_is_stored_of_known_chips(chip: str, technique: str, workload: str, dtype: str, verdict: str) -> None:
    assert held(case_of(technique, workload, dtype), load(chip), "2.13.0").verdict == verdict


class Properties:
    gcnArchName = "gfx942:sramecc+:xnack-"  # noqa: N815 - torch's name


def test_devices_name_their_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    assert Cuda().architecture() == "sm_90"
    assert Rocm().architecture() == "gfx942"
    for machine, family in (("AMD64", "x86_64"), ("x86_64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64")):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert Cpu().architecture() == family
    assert Bed().architecture() == ""
