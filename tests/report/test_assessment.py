"""The assessment: a point for what was seen, its evidence with it, and none for anything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journal_harness import journal

from accelcheck.cli import main
from accelcheck.core.case import HOST_RATIO, LEVELS, Case, Evidence, Measurement, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Fingerprint
from accelcheck.report import assessment_table
from accelcheck.report.assessment import Assessment, ItemResult, assess, level, upper_bound
from accelcheck.report.quality import QualityError, answers, tables, template
from accelcheck.report.run import load
from accelcheck.techniques.matrix import Matrix

CHIP = Fingerprint("toy", "Toy 0", 1, versions={"torch": "2.13.0"})
TABLES = tables()
ITEMS = {item.name: item for table in TABLES for item in table.items}
ASKED = [item for item in ITEMS.values() if item.question]


def case(workload: str, mode: Mode = Mode.PLATFORM, technique: str = "platform") -> Case:
    return Case(technique, workload, "toy", "float32", mode, 1)


def seen(workload: str, verdict: Verdict = Verdict.PASS, reason: str = "") -> Record:
    return Record(case(workload), verdict, reason=reason, compared=256)


def timed(workload: str, ratio: float | None, low: float = 0.0, high: float = 0.0) -> Record:
    figure = Measurement(HOST_RATIO, ratio, "x", low or ratio, high or ratio, "said so")
    return Record(case(workload, Mode.PLATFORM_SPEED), Verdict.PASS, compared=256, measurements=(figure,))


def written(folder: Path, *records: Record) -> Path:
    return journal(folder / "toy.jsonl", *records, fingerprint=CHIP)


def assessed(folder: Path, *records: Record, given: Path | None = None) -> Assessment:
    (run,) = load([written(folder, *records)])
    return assess(run, TABLES, answers(given, TABLES) if given is not None else ())


def item(found: Assessment, name: str) -> ItemResult:
    (result,) = (r for table in found.tables for r in table.results if r.item.name == name)
    return result


def answered(folder: Path, *names: str, **fields: Any) -> Path:
    """A file that answers items, each by yes; with fractions where they are asked for."""
    lines = ["schema = 1"]
    for name in names:
        entry = {"item": name, "answer": True, "link": "https://example.org/1", "by": "a team"} | fields
        if name in ITEMS and ITEMS[name].steps:
            entry.setdefault("fraction", 1.0)
        lines += ["[[answer]]", "date = 2026-11-20", *(f"{key} = {json.dumps(value)}" for key, value in entry.items())]
    path = folder / "answers.toml"
    path.write_text("\n".join(lines))
    return path


def test_the_tables_add_up_as_the_levels_say() -> None:
    assert [(t.name, t.points) for t in TABLES] == [
        ("prerequisites", 16),
        ("hardware", 10),
        ("software", 12),
        ("features", 18),
        ("testing", 26),
        ("experience", 14),
        ("ci", 18),
        ("adopters", 6),
        ("maintenance", 4),
    ]
    assert sum(t.points for t in TABLES) == 124
    unlike = {t.name: sum(i.points for i in t.items) for t in TABLES if sum(i.points for i in t.items) != t.points}
    assert unlike == {"experience": 16}
    assert [t.name for t in TABLES if t.note] == ["experience"]
    required = {name for name, question in ITEMS.items() if question.required}
    assert required == {
        "smoke-test", "no-open-cve", "hardware-product", "software-stability", "software-maintenance", "ci-public",
    }  # fmt: skip


def test_every_glob_of_an_item_fits_cases_that_exist(tmp_path: Path) -> None:
    everything = Matrix.load().cases(Selection(("toy",), level=max(LEVELS)))
    figure = Measurement(HOST_RATIO, 0.5, "x", 0.5, 0.5)
    records = [Record(c, Verdict.PASS, compared=1, measurements=(figure,) if c.alone else ()) for c in everything]
    assessment = assessed(tmp_path, *records)
    measured = [r for t in assessment.tables for r in t.results if not r.item.question]
    assert len(measured) == 23
    assert all(r.evidenced == r.item.points and r.evidence for r in measured)
    assert assessment.evidenced == sum(r.item.points for r in measured) == 32
    against = [Record(c, Verdict.FAIL) for c in everything if c.workload.startswith("import-")]
    claimed = assessed(tmp_path, *against, given=answered(tmp_path, "smoke-test"))
    assert item(claimed, "smoke-test").claimed == 0


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.PASS])
def test_only_a_pass_gives_a_point(verdict: Verdict, tmp_path: Path) -> None:
    assessment = assessed(tmp_path, seen("dtype-int8", verdict, "why it is so"), seen("dtype-int16"))
    lost, kept = item(assessment, "dtype-int8"), item(assessment, "dtype-int16")
    assert (lost.evidenced, lost.missing, kept.evidenced, assessment.evidenced) == (0, 1, 1, 1)
    assert "platform/dtype-int8/toy/float32/platform: " in lost.lacking
    assert "why it is so" in lost.lacking
    assert ("a failure that the ledger expects" in lost.lacking) == (verdict is Verdict.XFAIL)


def test_a_point_names_its_case_figures_and_date(tmp_path: Path) -> None:
    assessment = assessed(
        tmp_path, seen("dtype-int8"), timed("eager-inference", 0.25, 0.2, 0.3), timed("eager-training", 0.5, 0.4, 0.6)
    )
    assert item(assessment, "dtype-int8").evidence == (
        "platform/dtype-int8/toy/float32/platform: pass, 256 elements compared, 2026-11-23",
    )
    assert item(assessment, "eager-mode").evidence[0] == (
        "platform/eager-inference/toy/float32/platform-speed: pass, 256 elements compared; "
        "time beside the host's CPU: 0.25 times its time (0.2 to 0.3), 2026-11-23"
    )


def test_a_case_that_is_not_in_the_journal_gives_none(tmp_path: Path) -> None:
    answer = item(assessed(tmp_path, seen("dtype-int8")), "dtype-int16")
    assert (answer.evidenced, answer.lacking) == (0, "platform/dtype-int16/*/float32/platform is not in the journal")


@pytest.mark.parametrize(
    ("ratio", "low", "high", "said"),
    [
        (0.9, 0.8, 1.01, ""),
        (1.2, 1.1, 1.3, ": slower than the host's CPU: 1.2 times its time (1.1 to 1.3)"),
        (1.0, 0.7, 1.4, ": perhaps slower than the host's CPU: 1 times its time (0.7 to 1.4)"),
        (None, 0.0, 0.0, "was not measured: said so"),
    ],
)
def test_a_mode_must_be_shown_to_be_no_slower_than_the_host(
    ratio: float | None, low: float, high: float, said: str, tmp_path: Path
) -> None:
    bare = replace(timed("eager-inference", 1.0), measurements=())
    assert "was not measured" in item(assessed(tmp_path, bare, timed("eager-training", 0.5)), "eager-mode").lacking
    assessment = assessed(tmp_path, timed("eager-inference", ratio, low, high), timed("eager-training", 0.5))
    result = item(assessment, "eager-mode")
    assert (result.evidenced == 1) == (not said)
    assert said in result.lacking


def test_a_device_without_graph_mode_loses_that_point_alone(tmp_path: Path) -> None:
    eager = [timed(f"eager-{work}", 0.5) for work in ("inference", "training")]
    graph = [
        Record(
            case(f"graph-{work}", Mode.PLATFORM_SPEED),
            Verdict.UNSUPPORTED,
            "no-backend",
            "unsupported [no-backend] no compiler",
        )
        for work in ("inference", "training")
    ]
    assessment = assessed(tmp_path, *eager, *graph)
    points = {name: item(assessment, name).evidenced for name in ("eager-mode", "graph-mode", "inference", "training")}
    assert points == {"eager-mode": 1, "graph-mode": 0, "inference": 1, "training": 1}
    assert (
        "left out: platform/graph-inference/toy/float32/platform-speed: unsupported: [no-backend] no compiler"
        in item(assessment, "inference").evidence
    )
    missing = assessed(tmp_path, *eager)
    assert item(missing, "inference").evidenced == 0  # what was not run may be wrong


def test_a_mode_is_tested_where_a_case_of_each_kind_passes(tmp_path: Path) -> None:
    def one(mode: Mode, verdict: Verdict = Verdict.PASS) -> Record:
        return Record(case("mlp", mode, "eager"), verdict, compared=1)

    assessment = assessed(tmp_path, one(Mode.FORWARD), one(Mode.BACKWARD), one(Mode.TRAIN, Verdict.FAIL))
    assert item(assessment, "eager-tested").lacking == "eager/*/train: none of 1 executed cases passes"
    assessment = assessed(tmp_path, one(Mode.FORWARD), one(Mode.BACKWARD), one(Mode.TRAIN))
    assert (item(assessment, "eager-tested").evidenced, item(assessment, "graph-tested").evidenced) == (2, 0)
    assert item(assessment, "graph-tested").lacking.startswith("compile-*/forward was not run")


@pytest.mark.parametrize(("count", "flaky", "points"), [(58, 0, 0), (59, 0, 4), (200, 4, 4), (200, 5, 0), (0, 0, 0)])
def test_flaky_cases_are_surely_fewer_than_a_twentieth(count: int, flaky: int, points: int, tmp_path: Path) -> None:
    records = [
        Record(case(f"w{number}", Mode.FORWARD, "eager"), Verdict.FLAKY if number < flaky else Verdict.PASS)
        for number in range(count)
    ]
    unseen = [Record(case(f"u{number}"), Verdict.UNSUPPORTED) for number in range(100)]
    answer = item(assessed(tmp_path, *records, *unseen), "flaky")
    assert answer.evidenced == points
    remark = " ".join((*answer.evidence, answer.lacking))
    assert (f"{flaky} of {count} executed cases are flaky" in remark) == (count > 0)


def test_the_upper_bound_is_that_of_the_binomial() -> None:
    assert upper_bound(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert upper_bound(3, 3) == 1.0


def test_an_answer_is_claimed_and_shown_with_its_link(tmp_path: Path) -> None:
    assessment = assessed(tmp_path, given=answered(tmp_path, "hardware-access"))
    result = item(assessment, "hardware-access")
    assert (result.evidenced, result.claimed, result.missing, assessment.claimed) == (0, 4, 0, 4)
    assert (result.evidence, result.link) == (("answered by a team on 2026-11-20",), "https://example.org/1")
    assert item(assessment, "hardware-product").lacking == "no answer"


@pytest.mark.parametrize(("fraction", "points"), [(0.49, 0), (0.5, 2), (0.8, 4), (0.99, 4), (1.0, 6)])
def test_a_fraction_gives_the_points_of_its_step(fraction: float, points: int, tmp_path: Path) -> None:
    answer = item(assessed(tmp_path, given=answered(tmp_path, "unit-tests", fraction=fraction)), "unit-tests")
    assert (answer.claimed, answer.missing) == (points, 6 - points)


def test_no_is_no_claim(tmp_path: Path) -> None:
    answer = item(assessed(tmp_path, given=answered(tmp_path, "no-open-cve", answer=False)), "no-open-cve")
    assert (answer.claimed, answer.lacking) == (0, "answered by a team on 2026-11-20: no")


def test_an_answer_for_another_device_does_not_count(tmp_path: Path) -> None:
    assert assessed(tmp_path, given=answered(tmp_path, "hardware-access", device="cuda")).claimed == 0
    assert assessed(tmp_path, given=answered(tmp_path, "hardware-access", device="toy")).claimed == 4


def test_a_claim_that_the_journal_contradicts_does_not_count(tmp_path: Path) -> None:
    given = answered(tmp_path, "smoke-test")
    assert item(assessed(tmp_path, seen("import-with-hardware"), given=given), "smoke-test").claimed == 8
    absent = seen("import-without-hardware", Verdict.UNSUPPORTED)
    assert item(assessed(tmp_path, absent, given=given), "smoke-test").claimed == 8
    answer = item(
        assessed(tmp_path, seen("import-without-hardware", Verdict.ERROR, "it hangs"), given=given), "smoke-test"
    )
    assert (answer.claimed, answer.missing) == (0, 8)
    assert (
        "the journal says otherwise: platform/import-without-hardware/toy/float32/platform: error: it hangs"
        in answer.lacking
    )


def test_a_table_gives_no_more_than_it_says(tmp_path: Path) -> None:
    given = answered(tmp_path, *(question.name for question in ASKED))
    assessment = assessed(tmp_path, seen("profiler"), given=given)
    (experience,) = (table for table in assessment.tables if table.table.name == "experience")
    assert sum(result.evidenced + result.claimed for result in experience.results) == 16
    assert (experience.evidenced, experience.claimed, experience.missing) == (2, 12, 0)
    assert assessment.evidenced + assessment.claimed + assessment.missing == 124


@pytest.mark.parametrize(
    ("points", "required", "expected"),
    [
        (99, True, "Stable"),
        (124, False, "Unstable"),
        (98, True, "Unstable"),
        (86, False, "Unstable"),
        (85, True, "Engineering"),
    ],
)
def test_the_level_follows_from_points_and_what_is_required(points: int, required: bool, expected: str) -> None:
    assert level(points, required) == expected


def test_claims_alone_make_no_level_of_evidence(tmp_path: Path) -> None:
    everything = Matrix.load().cases(Selection(("toy",)))
    records = [Record(c, Verdict.PASS, compared=1) for c in everything]
    assessment = assessed(tmp_path, *records, given=answered(tmp_path, *(question.name for question in ASKED)))
    assert (assessment.level, assessment.level_of_evidence, assessment.unmet) == ("Stable", "Engineering", ())
    less = assessed(
        tmp_path,
        *records,
        given=answered(tmp_path, *(question.name for question in ASKED if question.name != "ci-public")),
    )
    assert (less.level, less.unmet) == ("Unstable", ("ci-public",))
    message = "\n".join(assessment_table.about(less))
    assert "Stable needs 99 points and every item of priority P0: all points of ci-public" in message
    assert "two consecutive releases" in message


@pytest.mark.parametrize(
    ("fields", "names", "said"),
    [
        ({}, ["no-open-cvs"], "unknown item 'no-open-cvs'. Did you mean 'no-open-cve'?"),
        ({}, ["dtype-int8"], "dtype-int8 is measured: its points come from the cases"),
        ({"link": "http://example.org"}, ["hardware-access"], "expected a URL that begins with https://"),
        ({"link": "https://x) [a](b"}, ["hardware-access"], "no spaces, quotes or brackets"),
        ({"answer": "yes"}, ["hardware-access"], "expected true or false, got 'yes'"),
        ({"fraction": 0.5}, ["hardware-access"], "answered by true or false alone"),
        ({"fraction": 1.5}, ["unit-tests"], "expected a number from 0 to 1"),
        ({"fraction": None}, ["unit-tests"], "asks for a number from 0 to 1"),
        ({"by": "x" * 501}, ["hardware-access"], "at most 500 characters"),
        ({"points": 8}, ["hardware-access"], "unknown field 'points'"),
        ({}, ["hardware-access", "hardware-access"], "hardware-access is answered twice"),
    ],
)
def test_answers_are_read_by_schema(fields: dict[str, Any], names: list[str], said: str, tmp_path: Path) -> None:
    path = answered(tmp_path, *names, **fields)
    path.write_text(path.read_text().replace("fraction = null\n", "").replace("fraction = null", ""))
    with pytest.raises(QualityError, match=r"answers\.toml: answer \d") as caught:
        answers(path, TABLES)
    assert said in str(caught.value)


def test_the_template_asks_everything_once_and_is_read(tmp_path: Path) -> None:
    path = tmp_path / "template.toml"
    path.write_text("\n".join(template(TABLES)))
    result = answers(path, TABLES)
    assert [answer.item for answer in result] == [answer.name for answer in ASKED]
    assert not any(answer.yes for answer in result)


def test_text_of_others_is_no_markup(tmp_path: Path) -> None:
    nasty = "<img src=x onerror=alert(1)> [a](javascript:1) | @someone\x1b[31m `code`"
    assessment = assessed(
        tmp_path,
        seen("dtype-int8", Verdict.FAIL, nasty),
        given=answered(tmp_path, "hardware-access", by=nasty.replace("\x1b", "")),
    )
    text = "\n".join(assessment_table.markdown(assessment, "toy"))
    for markup in ("<img", "](javascript", "@someone", "\x1b", "`code`"):
        assert markup not in text
    rows = [line for line in text.splitlines() if line.startswith("|") and "dtype-int8" in line]
    assert [line.count("|") for line in rows] == [7]
    plain = "\n".join(
        line for part in assessment_table.lines(assessment, "toy") if not isinstance(part, str) for line in part.lines()
    )
    assert "\x1b" not in plain


def test_the_command_prints_text_markdown_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, seen("dtype-int8"), seen("dtype-int16", Verdict.FAIL, "wrong")))
    assert main(["assess", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith("toy: 1 of 124 points evidenced, 0 claimed, 123 missing: Engineering\n")
    assert "platform/dtype-int8/toy/float32/platform: pass, 256 elements compared, 2026-11-23" in out
    assert main(["assess", path, "--markdown"]) == 0
    assert "| **all** | 124 | 1 | 0 | 123 |" in capsys.readouterr().out
    assert main(["assess", path, "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert (device["evidenced"], device["level"]) == (1, "Engineering")


def test_the_command_makes_one_table_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = written(tmp_path, seen("dtype-int8"))
    two = journal(tmp_path / "two.jsonl", seen("dtype-int16"), fingerprint=replace(CHIP, chip="Toy 1"))
    assert main(["assess", str(first), str(two), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["devices"]
    assert [device["name"] for device in document] == ["toy, Toy 0", "toy, Toy 1"]


@pytest.mark.parametrize(
    ("words", "code"), [(["--require=unstable"], 1), (["--answers", "absent.toml"], 4), (["absent.jsonl"], 4)]
)
def test_the_exit_code_says_what_happened(
    words: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path, seen("dtype-int8")))
    assert main(["assess", path, *words]) == code
    capsys.readouterr()


def test_a_journal_without_any_item_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, Record(case("mlp", Mode.FORWARD, "eager"), Verdict.FAIL)))
    assert main(["assess", path]) == 5
    assert "--accel-technique=platform" in capsys.readouterr().err
    assert main(["assess"]) == 4
    assert main(["assess", "--answers-template"]) == 0
    assert 'item = "no-open-cve"' in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [{"compared": 0}, {"evidence": (Evidence("kernels >= 1", 0, engaged=False),)}, {"verdict": Verdict.WAIVED}],
)
def test_a_pass_that_its_own_record_contradicts_gives_no_point(change: dict[str, Any], tmp_path: Path) -> None:
    good = seen("dtype-int8")
    assert item(assessed(tmp_path, good), "dtype-int8").evidenced == 1
    assert item(assessed(tmp_path, replace(good, **change)), "dtype-int8").evidenced == 0


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.5, 0.4, -1.0), (-2.0, -3.0, -1.0), (float("nan"), 0.4, 0.6)])
def test_a_ratio_without_an_interval_gives_no_point(ratio: float, low: float, high: float, tmp_path: Path) -> None:
    cases = [timed(name, ratio, low, high) for name in ("eager-inference", "eager-training")]
    assessment = [
        r for t in assessed(tmp_path, *cases).tables for r in t.results if r.evidenced and r.item.rule == "fast"
    ]
    assert assessment == []


def test_cases_of_a_device_without_a_fingerprint_give_no_point(tmp_path: Path) -> None:
    (run,) = load([written(tmp_path, seen("dtype-int8"))])
    assert assess(run, TABLES).evidenced > 0
    assert assess(replace(run, fingerprint=None), TABLES).evidenced == 0
