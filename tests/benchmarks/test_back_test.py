"""benchmarks/back_test.py: a red case counts for a bug only with its technique and its operator."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import back_test
import pytest
from back_test_programs import Bug, programs
from back_test_runs import CANDIDATES, JUDGED_AS

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Journal, Record
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.function_parts import Functions
from accelcheck.workloads.operator_samples import database

ROOT = Path(__file__).parents[2]

BUG = Bug(abs, (), "compile-static", operators=("index_add",), labels=r"out\['index_add of \d+'\].*")


def record(
    technique: str = "compile-static",
    workload: str = "ops-index-further-1",
    verdict: Verdict = Verdict.FAIL,
    path: str = "out['index_add int64 1'][0]",
    level: int = 3,
    mode: Mode = Mode.FORWARD,
) -> Record:
    fault = Fault(FaultKind.VALUE, path, expected="1", got="2")
    faults = (fault,) if verdict in {Verdict.FAIL, Verdict.XFAIL} else ()
    case = Case(technique, workload, "cpu", "float32", mode, level)
    return Record(case, verdict, faults=faults, seconds={"run": 1.0, "oracle": 2.0})


@pytest.mark.parametrize(
    "found",
    [
        record(),
        record(verdict=Verdict.XFAIL),
        record("aot-inductor"),
        record(workload="sizes-indices", path="out['index_add of 17']"),
        record(workload="op-index_add", path="grad:input[2]", mode=Mode.BACKWARD),
        record(workload="op-index_add-further", path="grad:input[2]", mode=Mode.BACKWARD),
    ],
)
def test_a_red_case_of_the_operator_shows_the_bug(found: Record) -> None:
    seen = back_test.first_seen(BUG, [found])
    assert seen is not None
    assert (seen.id, seen.level, seen.seconds) == (found.case.id, 3, 3.0)


@pytest.mark.parametrize(
    "other",
    [
        record("onnxruntime"),
        record(verdict=Verdict.PASS),
        record(path="out['index_copy int64 1'][0]"),
        record(path="out"),
        record(workload="op-index_copy", path="grad:input[2]", mode=Mode.BACKWARD),
        record(workload="sizes-indices", path="out['scatter_add of 17']"),
    ],
)
def test_other_cases_do_not(other: Record) -> None:
    assert back_test.first_seen(BUG, [other]) is None


def test_a_derivative_within_a_program_shows_under_eager_too() -> None:
    inner = replace(BUG, technique="func-jvp")
    assert back_test.first_seen(inner, [record("eager")]) is None
    assert back_test.first_seen(replace(inner, also=("eager",)), [record("eager")]) is not None


def test_an_input_goes_by_the_one_program_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Functions((("x + 1", abs, (0, 2)), ("y", abs, (0, 1))))
    monkeypatch.setattr(back_test, "module_of", {"bundle-1": module}.get)
    named = {"grad:input[2]": "grad:input['x + 1']", "input[1]": "input['y']"}
    for path in ("grad:input[2]", "input[1]", "input[0]", "out['y'][1]"):
        assert back_test.by_program("bundle-1", path) == named.get(path, path)


CAUSES = [
    ("pytorch_187018", "overflow-1", "v = u8; v = v.bitwise_not().neg(); torch.cat([v, v]).sum()", "out", True),
    ("pytorch_187018", "overflow-1", "v = -i16; v.abs() + v.to(torch.int32)", "out", False),
    ("pytorch_185517", "threshold-1", "v = f.bfloat16(); F.margin_ranking_loss(", "grad:input", True),
    ("pytorch_185517", "threshold-1", "v = f.bfloat16(); F.threshold(", "grad:input", False),
    ("pytorch_198131", "mutation-2", "p = y; q = x; a = y; v = x.view(-1)[3:40]; ", "input", True),
    ("pytorch_198131", "mutation-2", "p = y; q = x; a = y[:, 1:4]; v = y[::2]; ", "input", False),
    ("pytorch_197829", "mutation-2", "p = y; q = x; a = y[:, 1:4]; v = y[::2]; ", "input", True),
    ("pytorch_185509", "chain-2", "F.interpolate(p, scale_factor=(1.25, 1.1))", "grad:input", False),
]


@pytest.mark.parametrize(("name", "workload", "start", "tensor", "shown"), CAUSES)
def test_a_program_shows_the_bug_whose_cause_it_has(
    name: str, workload: str, start: str, tensor: str, shown: bool
) -> None:
    module: Any = back_test.module_of(workload)
    (text,) = (text for text in module.labels if text.startswith(start))
    place = next(place for place in range(999) if module.readers(place) == {text}) if tensor != "out" else repr(text)
    red = record(workload=workload, path=f"{tensor}[{place}]", mode=Mode.BACKWARD)
    assert (back_test.first_seen(programs()[name](), [red]) is not None) == shown


def test_another_symptom_of_the_operator_is_another_fault() -> None:
    assert (
        back_test.first_seen(BUG, [record()], "out[0]: 20 of 20 numbers, first at [0, 0]: expected 2, got 3")
        is not None
    )
    assert back_test.first_seen(BUG, [record()], "out[0]: strides: expected (1, 3), got (4, 1)") is None


@pytest.mark.parametrize("draw", ["", "draw 1", "zeros draw 1", "run again"])
def test_the_symptom_of_a_fault_does_not_depend_on_its_draw(draw: str) -> None:
    fault = Fault(FaultKind.METADATA, "out", "strides", draw, expected="(1, 3)", got="(4, 1)")
    assert back_test.symptom(fault) == "strides"
    assert back_test.symptom(Fault(FaultKind.PATTERN, "out", "NaN", draw, measured=1.0)) == "numbers"


def test_a_difference_may_have_several_symptoms() -> None:
    message = (
        "out[0]: 210 of 288 numbers, first at [0]: expected 1, got 2; out[1]: strides: expected (1, 3), got (4, 1)"
    )
    assert back_test.symptoms(message) == {"numbers", "strides"}
    assert back_test.symptoms("raises RuntimeError") == {"numbers"}


def test_the_case_of_the_lowest_level_is_the_first() -> None:
    seen = back_test.first_seen(BUG, [record(level=4), record("compile-aot-eager", level=2), record(level=3)])
    assert seen is not None
    assert seen.id.startswith("compile-aot-eager/")


def test_a_gradient_in_a_bundle_is_that_of_the_operator_whose_input_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_test, "owners", {"ops-index-1": {2: "index_add", 3: "index_copy"}}.__getitem__)
    collected = [
        record(workload="ops-index-1", path=f"grad:input[{place}]", mode=Mode.BACKWARD, level=4 - place)
        for place in (2, 3)
    ]
    seen = back_test.first_seen(BUG, collected)
    assert seen is not None
    assert seen.level == 2


def test_a_run_counts_what_journal_and_verdicts_find(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["pytorch_183986", "pytorch_191308", "pytorch_197091"]
    rows = [back_test.Row(name, "compile-static", "", "", present=True, caught=name == names[1]) for name in names]
    file, journal = tmp_path / "found.json", Journal(tmp_path / "journal.jsonl")
    file.write_text(json.dumps({"bugs": [asdict(row) for row in rows]}))
    journal.header({"level": 3})
    journal.case(record().as_json())
    journal.end({"exit": 1})
    words = ["--stored", str(file), "--json", str(file), *names]
    assert back_test.main([*words, "--journal", str(journal.path)]) == 0
    assert (
        "finds 1 of the 3 whose techniques the journals have (33%); a user's file finds 1 more, nothing finds 1."
        in capsys.readouterr().out
    )
    assert json.loads(file.read_text())["bugs"][0]["seen"]["level"] == 3
    assert back_test.main(words) == 0
    assert capsys.readouterr().out.count(back_test.NOTHING) == len(names) + 1


def test_every_bug_names_a_technique_and_operators_that_exist() -> None:
    techniques = Matrix.load().techniques
    for name, program in programs().items():
        bug = program()
        assert bug.technique in CANDIDATES, name
        assert JUDGED_AS.get(bug.technique, bug.technique) in techniques, name
        assert set(bug.operators) <= database().keys(), name
        assert bug.note, name
        assert (program.__doc__ or "").endswith("."), name
