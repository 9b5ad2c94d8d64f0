"""Reports for other tools validate against published schemas, agree with the journal, and allow no injection."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from collections import Counter
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from lxml import etree
from ocptv.output import objects
from plugin_harness import Suite, only
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from accelcheck.cli import main
from accelcheck.core.case import Case, Figure, Measurement, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices.base import Fingerprint
from accelcheck.report import ctrf, markdown, ocptv
from accelcheck.report.run import DeviceRun, load

FOLDER = Path(__file__).parents[1]
TOY, XLA = (FOLDER / "journals" / f"{name}.jsonl" for name in ("toy", "xla"))
CPU = FOLDER.parent / "baselines" / "cpu" / "level1.jsonl"
SPEED = CPU.with_name("level1-speed.jsonl")
SCHEMAS = FOLDER / "schemas"
HOSTILE = "`|</code></details><script>alert(1)</script> @everyone [x](javascript:y) ![i](https://e/i.png) #1 | a\\|b ``` \x1b[2J\u202e"


def run(*records: Record, device: str = "cpu", **facts: Any) -> DeviceRun:
    device_fingerprint = Fingerprint(device, "EPYC", 2, driver="1.2", runtime="ATen", versions={"torch": "2.13.0"})
    whole: dict[str, Any] = {
        "fingerprint": device_fingerprint,
        "started": "2026-11-23T10:00:00+00:00",
        "remarks": (),
    } | facts
    return DeviceRun(
        device=device, capability="ok", accelcheck="0.1.0", python="3.11.7", platforms=("Linux",), level=1,
        selections=({},), packages={},
        records=records, sources=("j",), **whole,
    )  # fmt: skip


def record(technique: str = "eager", verdict: Verdict = Verdict.PASS, reason: str = "", **more: Any) -> Record:
    return Record(Case(technique, "mlp", "cpu", "float32", Mode.FORWARD, 1), verdict, reason=reason, **more)


def test_the_first_line_of_the_markdown_is_the_verdict() -> None:
    assert markdown.page([run(record())]).startswith("## accelcheck: no unexpected failure in 1 cases that ran\n")
    assert markdown.page([run(record(verdict=Verdict.UNSUPPORTED))]).startswith("## accelcheck: nothing ran\n")
    page = markdown.page(load([TOY]))
    assert page.startswith("## accelcheck: 127 of 202 cases that ran are not right, 22 causes\n")


def test_the_markdown_has_causes_with_their_commands_and_a_row_for_each_technique_that_is_not_right() -> None:
    runs = load([TOY, XLA])
    page = markdown.page(runs)
    wrong = {r.case.technique for other in runs for r in other.records if not r.verdict.green}
    assert set(re.findall(r"^\| `([^`]+)` \| (?=[\d-])", page, re.MULTILINE)) >= wrong
    assert "<summary>14 cases: <code>autocast is not registered</code> (missing feature)</summary>" in page
    assert "pytest --pyargs accelcheck.suite --accel-device=toy --accel-case=amp-bf16/cnn/toy/float32/forward" in page


def test_the_markdown_says_what_was_not_run_and_what_the_ledger_expects() -> None:
    page = markdown.page(load([CPU]))
    assert "<summary>Not run: 82 cases</summary>" in page
    assert '| 7 | `cpu` | `unavailable [no-package] jax is not installed; pip install "accelcheck[jax]"` |' in page
    assert "<summary>Expected to fail, by the ledger: 1 case, 1 reason</summary>" in page


def test_the_markdown_says_whether_a_device_qualifies_where_a_whole_level_was_asked_for() -> None:
    (whole,) = load([XLA])
    line = next(line for line in markdown.page([whole]).splitlines() if " at level 1: " in line)
    assert line.startswith("- `xla`: `xla does not qualify at level 1: ")
    assert " at level 1: " not in markdown.page([replace(whole, selections=({}, {"techniques": ["eager"]}))])


def test_a_journal_cannot_write_markdown() -> None:
    case = replace(record().case, technique=HOSTILE, workload=HOSTILE)
    wrong = [
        Record(case, Verdict.FAIL, reason=f"{HOSTILE}\n{HOSTILE}"),
        Record(replace(case, workload="other"), Verdict.XFAIL, reason=f"{HOSTILE} (https://e/{HOSTILE})"),
        Record(replace(case, workload="third"), Verdict.UNSUPPORTED, reason=HOSTILE),
        Record(replace(case, workload="fourth"), Verdict.ERROR, reason="```\n````\n</details>"),
    ]
    page = markdown.page([replace(run(*wrong, remarks=(HOSTILE,)), device=HOSTILE)])
    assert "\x1b" not in page
    assert "\u202e" not in page
    # What is left without code spans and blocks, read as GitHub reads them, is ours alone.
    rest = re.sub(r"^(`{3,})text\n.*?^\1$", "", page, flags=re.MULTILINE | re.DOTALL)
    assert len(re.findall(r"^`{3,}", rest, re.MULTILINE)) == 0
    rest = re.sub(r"(?<!`)(`+)(?!`)(.*?)(?<!`)\1(?!`)", "", rest)
    rest = re.sub(r"<code>[^<>]*</code>", "", rest)
    assert not re.search(r"[`@\[\]]|script|javascript|#1|https", rest), rest
    # A row has as many cells as its table's head.
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table
    assert rest.count("<details>") == rest.count("</details>") > 0


def test_the_markdown_fits_into_a_comment_and_says_that_it_was_cut() -> None:
    many = [record(f"t{i}", Verdict.ERROR, f"Error{'x' * i}: {'no such thing ' * 200}") for i in range(300)]
    page = markdown.page([run(*many)])
    assert len(page.encode()) <= markdown.MOST
    assert re.search(r"\*\*\d+ further parts are left out: GitHub takes at most 65,536 characters\.", page)
    assert page.startswith("## accelcheck: 300 of 300")


def validate_ctrf(text: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    schema = json.loads((SCHEMAS / "ctrf-schema-0.0.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)
    return document


@pytest.mark.parametrize("paths", [(TOY, XLA), (CPU, SPEED)], ids=["failing", "green"])
def test_ctrf_validates_and_counts_as_the_journals_do(paths: tuple[Path, ...]) -> None:
    runs = load(paths)
    document = validate_ctrf(ctrf.document(runs))
    summary = document["results"]["summary"]
    records = [row for other in runs for row in other.records]
    assert summary["tests"] == len(records) == len(document["results"]["tests"])
    assert summary["failed"] == sum(not row.verdict.green for row in records)
    assert summary["skipped"] == sum(not row.verdict.executed for row in records)
    assert sum(summary[name] for name in ("passed", "failed", "skipped", "pending", "other")) == summary["tests"]
    assert {test["testId"]: test["rawStatus"] for test in document["results"]["tests"]} == {
        row.case.id: str(row.verdict) for row in records
    }
    assert ctrf.document(load(paths)) == ctrf.document(runs)


def test_the_schema_of_ctrf_refuses_what_is_none() -> None:
    document = json.loads(ctrf.document(load([XLA])))
    document["results"]["tests"][0]["status"] = "xfail"
    with pytest.raises(jsonschema.ValidationError):
        validate_ctrf(json.dumps(document))


def test_every_verdict_has_a_status_in_ctrf() -> None:
    assert set(ctrf.STATUSES) == set(Verdict)
    assert {verdict for verdict, status in ctrf.STATUSES.items() if status == "failed"} == {
        verdict for verdict in Verdict if not verdict.green
    }


def test_a_strange_start_or_time_is_no_error() -> None:
    strange = run(record(seconds={"run": float("inf"), "judge": -1.0, "oracle": 0.5}), started="yesterday")
    document = validate_ctrf(ctrf.document([strange]))
    assert (document["results"]["summary"]["start"], document["results"]["tests"][0]["duration"]) == (0, 500)
    assert read_ocptv(ocptv.document([strange]))


def read_ocptv(text: str) -> list[dict[str, Any]]:
    """Reads lines with the object models of the package ocptv: every field known, none missing, of its type."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        _model(line, objects.Root)
    assert [line["sequenceNumber"] for line in lines] == list(range(len(lines)))
    return lines


def _model(value: Any, kind: Any) -> None:
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Union:
        assert any(_is(value, argument) for argument in args), f"{value!r} is none of {args}"
    elif origin is list:
        assert isinstance(value, list), value
        for item in value:
            _model(item, args[0])
    elif dataclasses.is_dataclass(kind):
        _fields(value, kind)
    elif issubclass(origin, Enum):
        assert value in {element.value for element in kind}, f"{value!r} is no {kind.__name__}"
    else:
        plain = dict if issubclass(origin, dict) else (int, float) if origin is float else origin
        assert isinstance(value, plain), f"{value!r} is no {kind}"


def _is(value: Any, kind: Any) -> bool:
    try:
        _model(value, kind)
    except AssertionError:
        return False
    return True


def _fields(value: Any, kind: Any) -> None:
    assert isinstance(value, dict), value
    known: set[str] = set()
    for field in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind, vars(objects))[field.name]
        options = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)
        optional = type(None) in options
        if (name := field.metadata.get("spec_field")) is not None:
            names = {name: hint}
        else:
            names = {option.SPEC_OBJECT: option for option in options if option is not type(None)}
        present = names.keys() & value.keys()
        known |= names.keys()
        assert present or optional, f"{kind.__name__} lacks {' or '.join(names)}"
        for item in present:
            if item in {
                "timestamp",
                "hardwareInfoId",
                "softwareInfoIds",
            }:  # of objects the package writes the texts alone
                assert isinstance(value[item], (str, list))
            else:
                _model(value[item], names[item])
    assert value.keys() <= known, f"{kind.__name__} has no {value.keys() - known}"


@pytest.mark.parametrize("paths", [(TOY, XLA), (CPU, SPEED)], ids=["failing", "green"])
def test_ocptv_has_a_diagnosis_for_each_case_that_ran(paths: tuple[Path, ...]) -> None:
    runs = load(paths)
    lines = read_ocptv(ocptv.document(runs))
    assert lines[0]["schemaVersion"] == {"major": 2, "minor": 0}
    steps = [line["testStepArtifact"] for line in lines if "testStepArtifact" in line]
    diagnoses = Counter(step["diagnosis"]["type"] for step in steps if "diagnosis" in step)
    records = [row for each in runs for row in each.records if row.verdict.executed]
    assert diagnoses == Counter(
        "PASS" if row.verdict is Verdict.PASS else "UNKNOWN" if row.verdict.green else "FAIL" for row in records
    )
    errors = sum("error" in step for step in steps)
    assert errors == sum(row.verdict in ocptv.RAISED for row in records)
    starts, ends = (Counter(s["testStepId"] for s in steps if name in s) for name in ("testStepStart", "testStepEnd"))
    assert starts == ends
    assert set(starts.values()) == {1}
    end = lines[-1]["testRunArtifact"]["testRunEnd"]
    assert end == {"status": "COMPLETE", "result": "PASS" if all(row.verdict.green for row in records) else "FAIL"}


@pytest.mark.skipif(
    "ACCELCHECK_OCPTV_SCHEMAS" not in os.environ, reason="ACCELCHECK_OCPTV_SCHEMAS names no folder of OCP's schemas"
)
@pytest.mark.parametrize("paths", [(TOY, XLA), (CPU, SPEED)], ids=["failing", "green"])
def test_ocptv_validates_against_the_published_schemas(paths: tuple[Path, ...]) -> None:
    folder = Path(os.environ["ACCELCHECK_OCPTV_SCHEMAS"])
    schemas = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    registry: Any = Registry().with_resources((s["$id"], DRAFT202012.create_resource(s)) for s in schemas)
    (root,) = (schema for schema in schemas if schema["$id"].endswith("/output"))
    validator = jsonschema.Draft202012Validator(root, registry=registry, format_checker=jsonschema.FormatChecker())
    for line in ocptv.document(load(paths)).splitlines():
        validator.validate(json.loads(line))


def test_ocptv_measures_figures_beyond_their_budgets_and_times() -> None:
    figures = (
        Figure("out", "row", 3.0, 1.0, "[0, :]", gates=True),
        Figure("out", "gain", 0.5, 1.0, "", gates=True),
        Figure("out", "bias", 9.0, 1.0, "", gates=False),
        Figure("out", "column", float("nan"), 1.0, "", gates=True),
    )
    times = (Measurement("latency", 2.0, "s", 1.5, 2.5), Measurement("peak-memory", None, "B"))
    lines = read_ocptv(ocptv.document([run(record(verdict=Verdict.FAIL, figures=figures, measurements=times))]))
    steps = [s["testStepArtifact"]["measurement"] for s in lines if "measurement" in s.get("testStepArtifact", {})]
    names = [step["name"].partition(": ")[2] for step in steps]
    assert names == ["out: row", "out: column", "latency"]
    assert (steps[0]["value"], steps[0]["validators"]) == (
        3.0, [{"name": "budget", "type": "LESS_THAN_OR_EQUAL", "value": 1.0}]
    )  # fmt: skip
    assert steps[1]["value"] == "nan"
    assert steps[2]["metadata"] == {"low": 1.5, "high": 2.5}


@pytest.mark.parametrize(
    ("found", "end"),
    [
        (run(record(verdict=Verdict.UNAVAILABLE)), {"status": "SKIP", "result": "NOT_APPLICABLE"}),
        (run(record(), remarks=("j: the run was cut off",)), {"status": "ERROR", "result": "NOT_APPLICABLE"}),
        (run(record(verdict=Verdict.XFAIL), record("other")), {"status": "COMPLETE", "result": "PASS"}),
        (run(record(verdict=Verdict.FLAKY)), {"status": "COMPLETE", "result": "FAIL"}),
    ],
)
def test_ocptv_ends_with_a_result_only_where_there_is_one(found: DeviceRun, end: dict[str, str]) -> None:
    assert read_ocptv(ocptv.document([found]))[-1]["testRunArtifact"]["testRunEnd"] == end


def test_the_object_models_of_ocptv_refuse_what_is_none() -> None:
    lines = ocptv.document([run(record())]).splitlines()
    for old, new in (('"PASS"', '"GOOD"'), ('"testStepId"', '"stepId"'), ('"message"', '"text"')):
        index = next(i for i, line in enumerate(lines) if old in line and "testStepArtifact" in line)
        with pytest.raises(AssertionError):
            _model(json.loads(lines[index].replace(old, new)), objects.Root)


@pytest.mark.slow
def test_junit_validates_and_holds_verdict_and_evidence(suite: Suite) -> None:
    suite.run(*only("toy", "toy-value", "toy-idle"), "--accel-device=xla", "--junit-xml=junit.xml")
    tree = etree.parse(str(suite.path / "junit.xml"))
    by_case: dict[str, dict[str, str]] = {}
    for case in tree.iter("testcase"):
        # pytest's documentation of `record_property`: properties of a test case are not in this schema.
        for properties in case.findall("properties"):
            by_case[case.get("name", "")] = {item.get("name", ""): item.get("value", "") for item in properties}
            case.remove(properties)
    schema = etree.XMLSchema(etree.parse(str(SCHEMAS / "junit-10.xsd")))
    assert schema.validate(tree), schema.error_log
    name = "test_equivalence[{}/tiny/cpu/float32/forward]"
    verdicts = {
        technique: by_case[name.format(technique)]["accelcheck.verdict"]
        for technique in ("toy", "toy-value", "toy-idle")
    }
    assert verdicts == {"toy": "pass", "toy-value": "fail", "toy-idle": "fail"}
    assert by_case[name.format("toy")]["accelcheck.evidence.aten::addmm dispatched >= 1"] == "1"


def test_the_command_writes_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"markdown": tmp_path / "report.md", "ctrf": tmp_path / "ctrf.json", "ocptv": tmp_path / "ocptv.jsonl"}
    assert main(["report", str(TOY), *(f"--{name}={path}" for name, path in names.items())]) == 0
    assert names["markdown"].read_text(encoding="utf-8") == markdown.page(load([TOY]))
    validate_ctrf(names["ctrf"].read_text(encoding="utf-8"))
    read_ocptv(names["ocptv"].read_text(encoding="utf-8"))
    assert capsys.readouterr().out.splitlines() == [f"report: {path}" for path in names.values()]
