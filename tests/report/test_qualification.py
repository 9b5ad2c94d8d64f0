"""Must-pass lists and qualification: listed cases have to run and pass, and nothing can shrink unseen."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stored_cases import stored as stored_cases

from accelcheck.core.case import ALONE, LEVELS, Case, Evidence, Figure, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.selection import Selection
from accelcheck.devices import devices
from accelcheck.devices.base import Fingerprint
from accelcheck.expectations import must_pass
from accelcheck.expectations.ledger import Ledger, shipped
from accelcheck.expectations.must_pass import Floor, MustPassError, parsed, written
from accelcheck.report import terminal
from accelcheck.report.qualification import highest, judged, qualification
from accelcheck.report.run import DeviceRun, load
from accelcheck.techniques.matrix import Matrix

LIST = must_pass.stored()["cpu"]
CHIP = Fingerprint("cpu", "AMD EPYC", 2)


def records(level: int = 1, verdict: Verdict = Verdict.PASS, elements: int = 0) -> list[Record]:
    """Records of a run that passes the list of the CPU; each case compares an equal part of the floor."""
    ids = sorted(LIST.ids("cpu", level))
    each = elements or -(-LIST.floors[level].elements // len(ids))
    return [Record(case(name), verdict, compared=each) for name in ids]


def case(identity: str) -> Case:
    technique, workload, device, dtype, mode = identity.split("/")
    return Case(technique, workload, device, dtype, Mode(mode), 1)


def run(found: list[Record], level: int = 1) -> DeviceRun:
    return DeviceRun("cpu", CHIP, "ok", "0.1.0", "3.11", (), level, "", (), {}, tuple(found), ())


def test_a_device_that_passes_the_whole_list_qualifies() -> None:
    qualified = qualification(run(records()))
    assert qualified.holds
    assert qualified.reasons == ()
    assert str(qualified).startswith(
        f"cpu qualifies at level 1: {qualified.asked:,} of {qualified.asked:,} cases of the must-pass list cpu"
    )
    assert highest(run(records(), level=2)) == 1


def test_a_case_that_is_missing_is_named() -> None:
    gone, *rest = records()
    qualified = qualification(run(rest))
    assert not qualified.holds
    assert any(gone.case.id in reason and "in no journal" in reason for reason in qualified.reasons)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict.FAIL, "did not pass"),
        (Verdict.ERROR, "did not pass"),
        (Verdict.FLAKY, "did not pass"),
        (Verdict.XFAIL, "a ledger expects it to fail"),
        (Verdict.WAIVED, "(waived)"),
        (Verdict.UNSUPPORTED, "did not run"),
        (Verdict.UNAVAILABLE, "did not run"),
    ],
)
def test_one_case_that_did_not_pass_is_enough(verdict: Verdict, words: str) -> None:
    first, *rest = records()
    qualified = qualification(run([replace(first, verdict=verdict), *rest]))
    assert not qualified.holds
    assert any(first.case.id in reason and words in reason for reason in qualified.reasons)
    assert highest(run([replace(first, verdict=verdict), *rest])) == 0


def test_a_failure_outside_of_the_list_stands_against_the_device() -> None:
    other = Record(Case("of-a-plugin", "mlp", "cpu", "float32", Mode.FORWARD, 1), Verdict.FAIL)
    qualified = qualification(run([*records(), other]))
    assert qualified.red == {other.case.id: "fail"}
    assert not qualified.holds


def test_what_does_not_exist_outside_of_the_list_does_not() -> None:
    other = Record(Case("of-a-plugin", "mlp", "cpu", "float32", Mode.FORWARD, 1), Verdict.UNSUPPORTED, "no-dtype")
    assert qualification(run([*records(), other])).holds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compared": 0}, "pass, but no element was compared"),
        ({"evidence": (Evidence("kernels >= 1", 0, engaged=False),)}, "pass, but not engaged: kernels >= 1"),
        (
            {"figures": (Figure("out", "row", float("nan"), 1.0, "", gates=True),)},
            "pass, but out: row is beyond its budget",
        ),
        ({"figures": (Figure("out", "row", 2.0, 1.0, "", gates=True),)}, "pass, but out: row is beyond its budget"),
    ],
)
def test_a_pass_that_its_own_record_contradicts_is_none(change: dict[str, Any], said: str) -> None:
    first, *rest = records()
    more = replace(rest[0], compared=rest[0].compared + first.compared)
    qualified = qualification(run([replace(first, **change), more, *rest[1:]]))
    assert qualified.passed == qualified.asked - 1
    assert qualified.reasons == (f"1 must-pass cases did not pass: {first.case.id} ({said})",)


def test_a_figure_that_gates_nothing_contradicts_nothing() -> None:
    first, *rest = records()
    beyond = (Figure("out", "eager's row", 2.0, 1.0, "", gates=False),)
    assert qualification(run([replace(first, figures=beyond), *rest])).holds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": None, "capability": "no driver"}, "the journals have no fingerprint of the device: no driver"),
        ({"fingerprint": replace(CHIP, device="cuda")}, "the fingerprint is that of another device: cuda"),
        ({"cut_off": ("a.jsonl",)}, "a run was cut off, and its other cases are unknown: a.jsonl"),
    ],
)
def test_journals_that_do_not_show_a_whole_run_on_the_device_qualify_nothing(change: dict[str, Any], said: str) -> None:
    whole = replace(run(records()), **change)
    assert qualification(whole).reasons == (said,)
    assert highest(whole) == 0


def test_stored_runs_contradict_none_of_their_passes() -> None:
    folder = Path(__file__).parents[2] / "baselines"
    runs = [item for path in sorted(folder.glob("*/level*.jsonl")) for item in load([path])]
    passed = [record for each in runs for record in each.records if record.verdict is Verdict.PASS]
    assert len(passed) > 400
    assert [record.case.id for record in passed if record.contradiction] == []


def test_too_few_elements_compared_are_below_the_floor() -> None:
    qualified = qualification(run([replace(record, compared=1) for record in records()]))
    assert [reason.partition(":")[0] for reason in qualified.reasons] == ["elements compared with the oracle"]


def test_records_of_another_device_do_not_count() -> None:
    result = judged("cuda", 1, records())
    assert result.passed == 0
    assert len(result.absent) == result.asked > 0


def test_a_device_without_a_list_has_that_of_any_accelerator() -> None:
    assert must_pass.of("npu") is must_pass.stored()[must_pass.OTHERS]
    assert must_pass.of("../cpu") is must_pass.stored()[must_pass.OTHERS]
    assert must_pass.of("cuda").kind == "cuda"


@pytest.mark.parametrize("kind", sorted(must_pass.stored()))
def test_each_list_holds_cases_of_the_matrix_at_their_levels(kind: str) -> None:
    known = {name: level for name, level, _ in stored_cases()}
    for key, level in must_pass.stored()[kind].levels.items():
        assert known[must_pass.identity(key, "cpu")] == level, key


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", sorted(must_pass.stored()))
def test_each_list_leaves_out_what_the_shipped_ledgers_expect_to_fail_on_every_chip(kind: str) -> None:
    ledger = replace(Ledger.load(shipped((kind,))), chips={kind: "one that no entry names"})
    assert [key for key in must_pass.stored()[kind].levels if ledger.covering(must_pass.identity(key, kind))] == []


@pytest.mark.parametrize("kind", sorted(must_pass.stored()))
def test_floors_never_fall_from_a_level_to_the_next(kind: str) -> None:
    floors = [must_pass.stored()[kind].floors[level] for level in LEVELS]
    for floor, deeper in itertools.pairwise(floors):
        assert (floor.cases, floor.techniques, floor.elements) <= (deeper.cases, deeper.techniques, deeper.elements)
    assert floors[0].cases == sum(level == 1 for level in must_pass.stored()[kind].levels.values())
    assert (floors[0].elements > 0) is (must_pass.stored()[kind].measured > 0)


VERSIONS = Path(__file__).parents[1] / "must_pass.txt"


def test_a_list_that_changed_has_the_next_version() -> None:
    """``must_pass.txt`` beside this file keeps the hash of each version that was ever shipped."""
    shipped_before = dict(line.rsplit(" ", 1) for line in VERSIONS.read_text(encoding="ascii").splitlines())
    for kind, stored in must_pass.stored().items():
        name = f"{kind} {stored.version}"
        assert shipped_before.get(name) == stored.digest, (
            f"{name} {stored.digest}: raise the version, and add this line to {VERSIONS.name}"
        )


@pytest.mark.parametrize("kind", [kind for kind in must_pass.stored() if kind != must_pass.OTHERS])
def test_no_list_asks_for_what_only_a_trial_on_the_chip_shows(kind: str) -> None:
    device, listed = devices()[kind], {name.partition("/")[0] for name in must_pass.stored()[kind].levels}
    for technique in Matrix.load().techniques.values():
        if technique.name in listed:
            with contextlib.suppress(RuntimeError, AssertionError, ImportError):  # only the device itself can tell
                assert not technique.capability(device).tried, technique.name


def test_a_list_makes_the_round_trip() -> None:
    text = written(LIST.version, LIST.measured, LIST.levels, LIST.floors)
    assert parsed("cpu", text) == LIST
    assert hashlib.sha256(text.encode()).hexdigest() == LIST.digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("case eager float32 sideways 1 mlp", "sideways"),
        ("floor 1 2", "expected"),
        ("note 1", "'note'"),
        ("version x", "'x'"),
    ],
)
def test_a_malformed_list_is_refused_with_its_line(line: str, message: str) -> None:
    with pytest.raises(MustPassError, match=r"must_pass/toy\.txt:2: ") as raised:
        parsed("toy", f"version 1\n{line}\n")
    assert message in str(raised.value)


def test_a_list_without_floors_is_refused() -> None:
    with pytest.raises(MustPassError, match="a floor for each level"):
        parsed("toy", "version 1\nmeasured 0\n")


def test_a_selection_asks_for_its_part_of_the_list() -> None:
    levels = {"eager/mlp/float32/forward": 1, "eager/cnn/bfloat16/forward": 2, "amp-bf16/mlp/float32/forward": 1}
    first = parsed("toy", written(1, 0, levels, dict.fromkeys(LEVELS, Floor(1, 1, 1))))
    assert first.selected(Selection(("npu",)), "npu") == {
        "eager/mlp/npu/float32/forward",
        "amp-bf16/mlp/npu/float32/forward",
    }
    assert first.selected(Selection(("npu",), techniques=("eag*",), level=2), "npu") == {
        "eager/mlp/npu/float32/forward",
        "eager/cnn/npu/bfloat16/forward",
    }
    assert first.selected(Selection(("npu",), workloads=("cnn",), dtypes=("float32",), level=2), "npu") == set()
    assert first.selected(Selection(("npu",), cases=("eager/mlp/npu/float32/forward",)), "npu") == set()


def test_what_ran_alone_on_the_machine_is_not_asked_whether_its_device_qualifies() -> None:
    alone = [
        Record(Case("eager", "speed-mlp", "cpu", "float32", mode, 1), Verdict.PASS, compared=9)
        for mode in sorted(ALONE)
    ]
    selected: Any = SimpleNamespace(selection=Selection(("cpu",)))
    assert terminal._qualified(alone, selected) == []
    assert len(terminal._qualified([*alone, *records()], selected)) == 1
    assert qualification(run([*alone, *records()])).shown.cases == len(records())
