"""The HTML report: what it says first, that it carries every case, and that nothing in a journal becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from process_harness import completed
from report_page import Page, blocks, unpacked

from accelcheck import cli
from accelcheck.core.case import SCHEME, Case, Evidence, Figure, Measurement, Mode, Verdict
from accelcheck.core.journal import Journal, Record
from accelcheck.expectations import must_pass
from accelcheck.report.html import document, experiments, figures, payload, tables
from accelcheck.report.run import load

if TYPE_CHECKING:
    from accelcheck.report.run import DeviceRun

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "baselines"
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'\x1b[31m\u202egnp.exe\u2028\x00<!--"


def fingerprint(name: str) -> dict[str, Any]:
    return {
        "device": name, "chip": f"Chip of {name}", "count": 1, "memory": 0, "driver": "1.2", "runtime": "R",
        "versions": {"torch": "2.13.0"}, "environment": {"X": "1"},
    }  # fmt: skip


def journal(
    path: Path, records: Iterable[Record], device: str = "cpu", *, present: bool = True, ended: bool = True, **more: Any
) -> Path:
    """A journal of one device; `more` are further fields of its header."""
    written = Journal(path)
    result = {
        "capability": "ok" if present else "unavailable [no-hardware] none",
        "fingerprint": fingerprint(device) if present else None,
    }
    written.header({
        "started": "2026-11-23T10:00:00+00:00", "accelcheck": "0.1.0", "python": "3.11.7", "platform": "Linux",
        "level": 2,
        "devices": {device: result}, "packages": {"torch": "2.13.0"}, **more,
    })  # fmt: skip
    for record in records:
        written.case(record.as_json())
    if ended:
        written.end({"exit": 0, "verdicts": {}})
    written.close()
    return path


def case(technique: str = "eager", workload: str = "mlp", device: str = "cpu", mode: Mode = Mode.FORWARD) -> Case:
    return Case(technique, workload, device, "float32", mode, 1)


def page(runs: Sequence[DeviceRun], **more: Any) -> Page:
    return Page(document.document(runs, **more))


def test_the_verdict_comes_first_and_counts_what_the_journal_has(tmp_path: Path) -> None:
    records = [
        Record(case("compile-static"), Verdict.FAIL, reason="out: view row: expected at most 1e-7, got 2e-7",
            compared=40),
        Record(case(), Verdict.PASS, compared=1200),
        Record(case("flex"), Verdict.UNSUPPORTED, "no-backend", "unsupported [no-backend] no kernel"),
    ]  # fmt: skip
    text = page(load([journal(tmp_path / "a.jsonl", records)])).text
    assert "Not green: 1 of 2 executed cases stands against it" in text
    assert "1,240 elements" in text
    assert text.index("Not green") < text.index("1 case, 1 cause") < text.index("Techniques and devices")
    assert "unsupported [no-backend] no kernel flex" in text
    assert "--accel-case=compile-static/mlp/cpu/float32/forward" in text


NET = {"net": {"spec": "folder/net.py:make", "summary": "Net with 163 parameters."}}


def checked(technique: str, mode: Mode, *figures: Figure, workload: str = "net", **more: Any) -> Record:
    """A record of the check of a model."""
    row = Figure("out", "row", 1e-7, 3e-7, "", gates=True)
    return Record(
        case(technique, workload, mode=mode), more.pop("verdict", Verdict.PASS), figures=(row, *figures), compared=1,
        **more
    )  # fmt: skip


def of_a_check(folder: Path, *more: Record, **header: Any) -> Path:
    """A journal of a check, in which a scheme such as quantization is fastest."""
    cost = Figure("out", SCHEME, 1.4e-2, math.inf, "", gates=False)
    speed = (Measurement("speed-up", 2.0, "x", 1.8, 2.2),)
    records = [
        checked("eager", Mode.FORWARD), checked("coarse", Mode.FORWARD, cost),
        checked("coarse", Mode.SPEED, cost, measurements=speed), *more,
    ]  # fmt: skip
    return journal(folder / "check.jsonl", records, **{"models": NET, **header})


def test_the_page_of_a_check_opens_with_model_recommendation_table_and_plot(tmp_path: Path) -> None:
    absent = Record(case("gpu", "net"), Verdict.UNSUPPORTED, "no-backend", "unsupported [no-backend] no GPU here")
    shown = page(load([of_a_check(tmp_path, absent)]))
    wanted = [
        "net Net with 163 parameters. Checked on cpu: Chip of cpu, torch 2.13.0, 2026-11-23.",
        (
            "Inference on cpu: Use coarse. It is right, 2.00 times as fast as FP32 eager (1.80 or more) and is off by "
            "at most 1.4e-02"
        ),
        "technique forward inference speed memory worst error against FP32",
        "coarse ✓ pass 2.00x (1.80-2.20) not measured 1.0e-07 of 3.0e-07 1.4e-02",
        "gpu: unsupported [no-backend] no GPU here",
        "Speed against error",
        "Techniques and devices",
    ]
    places = [shown.text.find(words) for words in wanted]
    assert -1 not in places, wanted[places.index(-1)]
    assert places == sorted(places)
    assert shown.text.index(wanted[0]) < shown.text.index("Skip to") + 200
    assert not re.search("qualif|must-pass|Journals", shown.text)


def test_a_page_of_a_check_says_what_is_wrong_and_why(tmp_path: Path) -> None:
    bad = checked("odd", Mode.FORWARD, verdict=Verdict.FAIL, reason="out: view row: expected at most 1, got 2")
    text = page(load([of_a_check(tmp_path, bad)])).text
    assert "cpu, do not use odd: fail in forward: out: view row: expected at most 1, got 2" in text
    assert text.index("do not use odd") < text.index("technique forward")
    assert "1 case, 1 cause" in text


def test_eager_that_cannot_be_judged_is_all_that_a_page_of_a_check_says(tmp_path: Path) -> None:
    lost = checked("eager", Mode.BACKWARD, verdict=Verdict.ERROR, reason="OracleError: it keeps state")
    text = page(load([journal(tmp_path / "a.jsonl", [lost], models=NET)])).text
    assert (
        "Eager cannot be judged on cpu in backward mode, and so no technique can: OracleError: it keeps state" in text
    )
    assert "Inference on" not in text


def test_a_report_of_other_workloads_too_opens_with_its_verdict(tmp_path: Path) -> None:
    text = page(load([of_a_check(tmp_path, checked("eager", Mode.FORWARD, workload="mlp"))])).text
    assert "Green, but does not qualify at level 2" in text
    assert "Inference on" not in text


def test_commands_carry_the_model_and_the_modules_that_they_need(tmp_path: Path) -> None:
    bad = checked("odd", Mode.FORWARD, verdict=Verdict.FAIL, reason="out: wrong")
    shown = page(load([of_a_check(tmp_path, bad, imports=["my backend"])]))
    command = (
        "pytest --pyargs accelcheck.suite --accel-device=cpu --accel-case=odd/net/cpu/float32/forward "
        "'--accel-import=my backend' "
        "--accel-model=folder/net.py:make"
    )
    assert command in shown.text
    _, (block,) = blocks(shown)
    commands = [block["texts"][row[7]] for row in block["rows"]]
    assert len(commands) == 4
    assert command in commands
    assert all(words.endswith(" --accel-model=folder/net.py:make") for words in commands)


def test_names_of_models_are_text_and_one_word_of_a_command(tmp_path: Path) -> None:
    models = {"net": {"spec": HOSTILE, "summary": HOSTILE}}
    shown = page(load([of_a_check(tmp_path, checked(HOSTILE, Mode.BACKWARD), models=models, started=HOSTILE)]))
    assert "img" not in [tag for tag, _ in shown.tags]
    assert [name for _, attributes in shown.tags for name in attributes if name.startswith("on")] == []
    assert "</script><img src=x onerror=alert(1)>" in shown.text
    assert not re.search("[\x1b\u202e\u2028\x00]", shown.text)


def test_a_scheme_is_plotted_at_its_error_against_the_fp32_model(tmp_path: Path) -> None:
    runs = load([of_a_check(tmp_path)])
    assert [(tradeoff.technique, tradeoff.error) for tradeoff in figures.tradeoffs(runs, ["cpu"])] == [
        ("coarse", 1.4e-2)
    ]


def test_a_green_device_and_an_absent_one(tmp_path: Path) -> None:
    good = journal(tmp_path / "a.jsonl", [Record(case(), Verdict.PASS, compared=1)])
    absent = [Record(case(device="cuda"), Verdict.UNAVAILABLE, "no-hardware", "unavailable [no-hardware] no GPU")]
    runs = load([good, journal(tmp_path / "b.jsonl", absent, "cuda", present=False)])
    text = page(runs).text
    assert "Green, but does not qualify at level 2" in text
    assert "No case was executed" in text
    assert "Device absent: unavailable [no-hardware] none" in text
    assert "No case fails unexpectedly." in text


def test_a_device_that_runs_its_must_pass_list_qualifies() -> None:
    (run,) = load([BASELINES / "cpu" / "level1.jsonl"])
    wanted = sorted(must_pass.of("cpu").ids("cpu", 1))
    records = []
    for name in wanted:
        technique, workload, device, dtype, mode = name.split("/")
        records.append(Record(Case(technique, workload, device, dtype, Mode(mode), 1), Verdict.PASS, compared=10**8))
    result = tables.standing(replace(run, records=tuple(records)), "cpu")
    assert (result.state, result.title, result.qualified.reasons) == ("good", "Qualifies at level 1", ())
    less = tables.standing(replace(run, records=tuple(records[1:])), "cpu")
    assert (less.state, less.title) == ("part", "Green, but does not qualify at level 1")
    assert wanted[0] in less.qualified.reasons[0]
    text = page([replace(run, records=tuple(records[1:]))]).text
    assert "Why it does not qualify" in text
    assert f"1 must-pass cases are in no journal: {wanted[0]}" in text


def test_the_matrix_has_a_row_a_technique_and_words_beside_colours(tmp_path: Path) -> None:
    paths = [
        journal(tmp_path / "a.jsonl",
            [Record(case(), Verdict.PASS, compared=1), Record(case(workload="cnn"), Verdict.CRASH)]),
        journal(tmp_path / "b.jsonl", [Record(case("amp", device="xla"), Verdict.UNSUPPORTED, "no-kernel")], "xla"),
    ]  # fmt: skip
    cells = tables.matrix(load(paths))
    assert list(cells) == ["amp", "eager"]
    assert cells["amp"][0] is None
    assert cells["amp"][1] == tables.MatrixCell({"unsupported": 1}, "no-kernel")
    assert cells["eager"][0] == tables.MatrixCell({"crash": 1, "pass": 1}, "")
    text = page(load(paths)).text
    assert "1 crash" in text
    assert "1 pass" in text


def test_every_case_of_stored_journals_is_in_the_report_with_its_figures() -> None:
    runs = load([BASELINES / "cpu" / "level1-speed.jsonl", BASELINES / "xla" / "level1.jsonl"])
    index, details = blocks(page(runs))
    records = [record for run in runs for record in run.records]
    columns = index["columns"]
    ids = [
        "/".join((
            index["texts"][columns["technique"][at]], index["texts"][columns["workload"][at]],
            index["devices"][columns["run"][at]], index["texts"][columns["dtype"][at]],
            index["modes"][columns["mode"][at]],
        ))
        for at in range(len(columns["run"]))
    ]  # fmt: skip
    assert ids == [record.case.id for record in records]
    assert [index["verdicts"][which] for which in columns["verdict"]] == [record.verdict for record in records]
    rows = [(block["texts"], row) for block in details for row in block["rows"]]
    assert len(rows) == len(records)
    for (texts, row), record in zip(rows, records, strict=True):
        assert texts[row[0]] == record.reason
        assert row[5] == record.compared
        shown = [(texts[row[9][n]], texts[row[9][n + 1]], float(row[9][n + 2])) for n in range(0, len(row[9]), 6)]
        wanted: list[Any] = [(f.path, f.view, pytest.approx(f.measured, rel=1e-3)) for f in record.figures]
        assert shown == wanted
        named = {texts[row[12][n]]: row[12][n + 1] for n in range(0, len(row[12]), 6)}
        assert named == {
            measurement.name: measurement.value
            if measurement.value is None
            else pytest.approx(measurement.value, rel=1e-3)
            for measurement in record.measurements
        }


def test_nothing_in_a_journal_becomes_markup_or_turns_the_text(tmp_path: Path) -> None:
    hostile = Record(
        case(HOSTILE, HOSTILE), Verdict.FAIL, HOSTILE, HOSTILE, (Evidence(HOSTILE, HOSTILE, engaged=True),),
        (Figure(HOSTILE, HOSTILE, 2.0, 1.0, HOSTILE, gates=True),), seconds={HOSTILE: 1.0}, traceback=HOSTILE,
        measurements=(Measurement(HOSTILE, 1.0, HOSTILE, reason=HOSTILE),), remark=HOSTILE, digest=HOSTILE,
    )  # fmt: skip
    path = tmp_path / "a.jsonl"
    lines = journal(path, [hostile]).read_text("ascii").splitlines()
    header = json.loads(lines[0])
    header |= dict.fromkeys(("started", "python", "platform"), HOSTILE) | {"packages": {HOSTILE: HOSTILE}}
    chip = header["devices"]["cpu"]["fingerprint"]
    chip |= {"chip": HOSTILE, "driver": HOSTILE, "versions": {HOSTILE: HOSTILE}, "environment": {HOSTILE: HOSTILE}}
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n", "ascii")
    good = journal(tmp_path / "b.jsonl", [Record(case(), Verdict.PASS, compared=1)])
    text = document.document(load([path, good]))
    usual, shown = Page(document.document(load([good]))), Page(text)
    assert not [attributes for _, attributes in shown.tags if any(name.startswith("on") for name in attributes)]
    assert "img" not in {tag for tag, _ in shown.tags}
    count = Counter(tag for tag, _ in shown.tags)
    assert count["script"] == Counter(tag for tag, _ in usual.tags)["script"]
    assert not shown.open
    own = text.replace(str(document._own(document.CHART)), "").replace(str(document._own("templates/report.js")), "")
    assert not [c for c in own if not c.isprintable() and c != "\n"]
    assert r"\u202egnp.exe" in shown.text
    assert "alert(1)" in shown.text


def test_the_policy_allows_the_scripts_and_the_style_of_the_report_alone(tmp_path: Path) -> None:
    text = document.document(load([journal(tmp_path / "a.jsonl", [Record(case(), Verdict.PASS, compared=1)])]))
    shown = Page(text)
    policy = next(tag[1]["content"] for tag in shown.tags if tag[1].get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["base-uri"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert len(scripts) == 2
    for rule, parts in (("script-src", scripts), ("style-src", styles)):
        hashes = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        assert rules[rule].split() == [f"'sha256-{digest}'" for digest in hashes]
    assert not [attributes for _, attributes in shown.tags if {"style", "src", "srcset"} & set(attributes)]
    links = [attributes["href"] for tag, attributes in shown.tags if tag in {"a", "link"} and "href" in attributes]
    assert [link for link in links if not str(link).startswith("#")] == []


def test_the_script_makes_no_markup_of_texts() -> None:
    script = (ROOT / "accelcheck/report/html/templates/report.js").read_text("utf-8")
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\.srcdoc", script
    )


def test_the_same_journals_give_the_same_bytes(tmp_path: Path) -> None:
    path = journal(tmp_path / "a.jsonl", [Record(case(), Verdict.PASS, compared=1)])
    assert document.document(load([path])) == document.document(load([path]))


@pytest.mark.slow
def test_a_long_reason_is_cut_and_says_so_and_many_cases_of_a_cause_are_counted(tmp_path: Path) -> None:
    many = [
        Record(case(workload=f"w{at}"), Verdict.ERROR, reason="KeyError: x\n" * 8000, traceback="  File t\n" * 9000)
        for at in range(90)
    ]
    text = document.document(load([journal(tmp_path / "a.jsonl", many)]))
    assert len(text) < 1_000_000
    _, (block,) = blocks(Page(text))
    assert block["texts"][block["rows"][0][0]].endswith("more characters)")
    assert f"and {90 - document.SHOWN} more" in Page(text).text


def test_numbers_that_json_lacks_reach_the_script_as_their_names(tmp_path: Path) -> None:
    broken = Record(
        case(), Verdict.FAIL, reason="out: NaN",
        figures=(Figure("out", "row", float("nan"), 1.0, "", gates=True),
            Figure("out", "gain", float("inf"), 0.0, "", gates=True)),
    )  # fmt: skip
    index, (block,) = blocks(page(load([journal(tmp_path / "a.jsonl", [broken])])))
    assert index["columns"]["used"] == ["inf"]
    assert (block["rows"][0][9][2], block["rows"][0][9][8]) == ("nan", "inf")


def test_speed_and_memory_are_gathered_by_technique_device_and_mode(tmp_path: Path) -> None:
    def timed(workload: str, speed: float, peak: float, error: float) -> Record:
        return Record(
            case("amp-bf16", workload, mode=Mode.SPEED), Verdict.PASS, compared=1,
            figures=(Figure("out", "row", error, 1.0, "", gates=True),),
            measurements=(
                Measurement("speed-up", speed, "x"), Measurement("peak-memory", peak, "B"),
                Measurement("peak-memory-fp32-eager", 100.0, "B"),
            ),
        )  # fmt: skip

    unknown = Record(
        case("amp-bf16", "z", mode=Mode.SPEED), Verdict.PASS, measurements=(Measurement("speed-up", None, "x"),)
    )
    runs = load([journal(tmp_path / "a.jsonl", [timed("a", 2.0, 50.0, 1e-3), timed("b", 4.0, 150.0, 1e-2), unknown])])
    assert figures.tradeoffs(runs, ["cpu"]) == [figures.TradeOff("amp-bf16", "cpu", "speed", 2, 3.0, 2.0, 4.0, 1e-2)]
    assert figures.memory(runs, ["cpu"]) == [figures.MemoryShare("amp-bf16", "cpu", "speed", 2, 1.0, 0.5, 1.5, 150.0)]


def test_figures_whose_ratio_or_sum_is_not_finite_make_a_report(tmp_path: Path) -> None:
    def timed(workload: str, peak: float) -> Record:
        result = {"speed-up": 1e308, "peak-memory": peak, "peak-memory-fp32-eager": 1e-300}
        measured = tuple(Measurement(name, value, "") for name, value in result.items())
        return Record(case("amp-bf16", workload, mode=Mode.SPEED), Verdict.PASS, compared=1, measurements=measured)

    runs = load([journal(tmp_path / "a.jsonl", [timed("a", 1e308), timed("b", 1e-300)])])
    index, _ = blocks(page(runs))
    assert [point["median"] for point in index["tradeoffs"]] == [1e308]
    assert [point["high"] for point in index["memory"]] == [1.0]


def test_curve_and_claims_have_their_numbers_as_tables() -> None:
    runs = load([BASELINES / "cpu" / "level1.jsonl"])
    curve = experiments.curve(BASELINES / "cpu" / "curve.json")
    claims = experiments.claims(BASELINES / "cpu" / "claims.json")
    text = page(runs, curves=[curve], claims=[claims]).text
    assert "static, fixed shapes: between 5 statements (slower) and 10 (faster), about 8.1 by interpolation" in text
    assert "amp-training-speed ✓ confirmed 2.50x to 3.50x 2.95x (2.90x to 3.00x)" in text
    assert "amp-training-memory ✗ not confirmed at least -50.0 % +18.4 %" in text
    for point in curve.points:
        assert f"{point.low:.3g} to {point.high:.3g}" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"schema": 1}', "missing required field"),
        ("[" * 100_000, "expected a result of `accelcheck curve --json`"),
        ("nothing", "expected a result of `accelcheck curve --json`"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_curve_is_refused_with_its_name(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, curve = journal(tmp_path / "a.jsonl", [Record(case(), Verdict.PASS)]), tmp_path / "curve.json"
    if content is not None:
        curve.write_text(content, "ascii")
    assert cli.main(["report", str(path), "-o", str(tmp_path / "r.html"), "--curve", str(curve)]) == 4
    error = capsys.readouterr().err
    assert str(curve) in error
    assert said in error
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda curve: curve["points"][0].update(low=0.0), "expected ratios above 0"),
        (lambda curve: curve.update(kind="claims"), "of kind 'curve' of schema 1, got kind 'claims'"),
    ],
)
def test_what_is_no_curve_is_refused(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    plain = json.loads((BASELINES / "cpu" / "curve.json").read_text("ascii"))
    change(plain)
    (tmp_path / "curve.json").write_text(json.dumps(plain), "ascii")
    with pytest.raises(experiments.ResultFileError, match=message):
        experiments.curve(tmp_path / "curve.json")


def test_the_command_writes_the_file_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = journal(tmp_path / "a.jsonl", [Record(case(), Verdict.PASS, compared=1)], ended=False)
    assert cli.main(["report", str(path), "-o", str(tmp_path / "r.html")]) == 0
    assert f"report: {tmp_path / 'r.html'}" in capsys.readouterr().out
    text = (tmp_path / "r.html").read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert f"{path}: the run was cut off" in text


@pytest.mark.parametrize("words", [[], ["-o", "."], ["-o", "absent/r.html"]])
def test_a_report_needs_a_place(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = journal(tmp_path / "a.jsonl", [Record(case(), Verdict.PASS)])
    assert cli.main(["report", str(path), *words]) == 4
    assert "expected" in capsys.readouterr().err


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n", "ascii")
    assert cli.main(["report", str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "r.html")]) == 4
    assert f"{tmp_path / 'a.jsonl'}:1: field 'kind' is None; expected run" in capsys.readouterr().err


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    path = journal(tmp_path / "a.jsonl", [Record(case(), Verdict.PASS, compared=1)])
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from accelcheck import cli\n"
        f"sys.exit(cli.main(['report', {str(path)!r}, '-o', {str(tmp_path / 'r.html')!r}]))"
    )
    done = completed([sys.executable, "-c", program], cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_family_is_that_of_the_records_and_without_one_the_first_word_of_the_name(tmp_path: Path) -> None:
    records = [
        Record(case("acme-fused"), Verdict.PASS, compared=1, family="attention"),
        Record(case("acme-fused", workload="cnn"), Verdict.CRASH),
        Record(case("compile-static"), Verdict.PASS, compared=1),
    ]
    index, _ = blocks(page(load([journal(tmp_path / "a.jsonl", records)])))
    columns, texts = index["columns"], index["texts"]
    pairs = zip(columns["technique"], columns["family"], strict=True)
    result = {(texts[technique], texts[family]) for technique, family in pairs}
    assert result == {("acme-fused", "attention"), ("compile-static", "compile")}


def colours(scheme: str) -> dict[str, tuple[float, ...]]:
    style = (ROOT / "accelcheck/report/html/templates/report.css").read_text("utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    matches = dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", light))
    if scheme == "dark":
        matches |= dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", dark))
    return {name: tuple(int(code[n : n + 2], 16) / 255 for n in (0, 2, 4)) for name, code in matches.items()}


def contrast(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """The contrast ratio of WCAG 2."""

    def luminance(colour: tuple[float, ...]) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_marks_have_the_contrast_that_wcag_asks_for(scheme: str) -> None:
    result = colours(scheme)
    pairs = [(name, back) for name in ("ink", "soft", "link", "bad", "warn") for back in ("back", "panel")]
    pairs += [(name, f"{name}-back") for name in ("pass", "bad", "warn", "none", "known")]
    assert {pair: ratio for pair in pairs if (ratio := contrast(result[pair[0]], result[pair[1]])) < 4.5} == {}
    marks = [f"series-{n}" for n in range(6)] + ["bad", "focus"]
    assert {name: ratio for name in marks if (ratio := contrast(result[name], result["back"])) < 3.0} == {}


def test_what_is_packed_has_no_character_of_html() -> None:
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", payload.packed({"text": HOSTILE}))
    assert unpacked(payload.packed({"text": HOSTILE})) == {"text": HOSTILE}
