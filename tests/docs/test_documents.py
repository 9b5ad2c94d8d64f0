"""Documents agree with their sources: links, paths, options and commands exist; tables hold stored figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from process_harness import script

from accelcheck.core.case import Verdict
from accelcheck.core.journal_reading import read
from accelcheck.plugin.options import OPTIONS
from accelcheck.report import terminal
from accelcheck.report.run import counts

ROOT = Path(__file__).parents[2]
STORED = ROOT / "baselines" / "cpu"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "baselines" / "README.md",
    ROOT / "examples" / "ci" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
OURS = re.compile(r"(?<![\w/.:<-])(?:accelcheck|baselines|benchmarks|docs|tests)/[\w./-]*\w")
"""A path of this repository; not a part of an address."""


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the table whose header begins so, cell by cell."""
    lines = text(page).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def stored(name: str) -> Any:
    return json.loads((STORED / name).read_text(encoding="utf-8"))


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return script(ROOT / "benchmarks" / f"{name}.py")


def anchors(page: Path) -> set[str]:
    """Makes anchors of headings as GitHub does."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    matches = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for target in matches:
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        place = (page.parent / name).resolve() if name else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_exists(page: Path) -> None:
    words = page.read_text(encoding="utf-8")
    named = {path for path in OURS.findall(words) if not re.search(r"/[A-Z]+(\.toml)?$", path)}  # such as DEVICE.toml
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
    modules = set(re.findall(r"(?<![\w./-])accelcheck(?:\.[a-z_]\w*)+", words))
    assert sorted(name for name in modules if not _exists(name)) == []


def _exists(dotted: str) -> bool:
    """Returns True where a module, or that of an attribute, is a file; the interpreter's own names aside."""
    path = ROOT.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    return module.is_file() and re.search(rf"\b{path.name}\b", module.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_and_command_that_a_page_uses_exists(page: Path) -> None:
    words = page.read_text(encoding="utf-8")
    known = {f"--accel-{option.name.replace('_', '-')}" for option in OPTIONS}
    assert set(re.findall(r"--accel-[a-z-]*[a-z]", words)) <= known
    ini = {option.dest for option in OPTIONS}
    assert set(re.findall(r"`(accel_[a-z_]+)`", words)) <= ini | {"accel_case", "accel_check", "accel_supervisor"}
    names = {path.stem for path in (ROOT / "accelcheck" / "commands").glob("*.py")} - {"__init__", "common", "listing"}
    assert set(re.findall(r"^\$ accelcheck (\w+)", words, re.MULTILINE)) <= names | {"list"}


def test_the_table_of_variables_has_those_that_the_noxfile_documents() -> None:
    documented = set(re.findall(r"\* ``(ACCELCHECK_\w+)``", text("noxfile.py")))
    assert {row[0].strip("`") for row in table("docs/options.md", "variable")} == documented


def test_every_session_of_nox_that_a_page_uses_exists() -> None:
    sessions = set(re.findall(r"^@nox\.session.*\ndef (\w+)", text("noxfile.py"), re.MULTILINE))
    used = {
        name
        for page in PAGES
        for words in re.findall(r"\bnox (?:--no-venv )?-s ((?:[a-z]+ ?)+)", page.read_text(encoding="utf-8"))
        for name in words.split()
    }
    assert {"cpu", "tests", "benchmarks"} <= sessions
    prose = {"at", "runs", "does", "with", "in", "and", "goes", "times", "or"}
    assert used - sessions - prose == set()


def test_the_table_of_verdicts_has_words_that_are_verdicts() -> None:
    named = {name for row in table("docs/options.md", "verdict") for name in row[0].replace("`", "").split()}
    assert named == set(map(str, Verdict))


def test_the_readme_is_short() -> None:
    assert len(text("README.md").splitlines()) <= 110


def test_the_excerpt_of_a_run_is_of_the_stored_journal() -> None:
    _, records = read(STORED / "level1.jsonl")
    readme = text("README.md")
    excerpt = readme[readme.index("```text\ntechnique") :].splitlines()[2:]
    rows = {tuple(line.split()) for line in terminal.matrix(records, ("cpu",))}
    shown = [tuple(line.split()) for line in excerpt[: excerpt.index("...")]]
    assert len(shown) > 5
    assert [row for row in shown if row not in rows] == []
    executed = sum(record.verdict.executed for record in records)
    tally = ", ".join(f"{number} {verdict}" for verdict, number in counts(records).items())
    compared = sum(record.compared for record in records)
    assert f"{executed} cases executed, {compared} elements compared with the oracle: {tally}" in excerpt


def test_the_totals_of_level_2_are_those_of_the_stored_summary() -> None:
    summary = stored("level2.json")
    readme = text("README.md")
    assert f"{summary['executed']:,} cases" in readme
    assert f"{summary['elements']:,} elements" in readme
    assert sum(summary["verdicts"].values()) == sum(sum(item.values()) for item in summary["techniques"].values())


def test_the_summary_of_a_journal_counts_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = STORED / "level1.jsonl"
    summary = benchmark("level_summary", monkeypatch).summary(*read(journal))
    *_, last = map(json.loads, journal.read_text(encoding="utf-8").splitlines())
    assert summary["verdicts"] == last["verdicts"]
    assert summary["executed"] == last["verdicts"]["pass"] + last["verdicts"]["xfail"]


def test_the_counts_beside_the_table_of_rules_are_the_stored_ones() -> None:
    document = stored("verdict_rules.json")
    page = " ".join(text("docs/verdicts.md").split())
    assert f"{document['faults']} faults and {document['correct kernels']} correct kernels" in page
    assert f"with {document['seeds']} seeds" in page
    assert f"{document['trials of faults']} and {document['trials of correct kernels']} trials" in page
    assert f"{document['trials of hidden cells']} more are of hidden cells" in page


def test_the_readme_has_the_stored_figures_with_hidden_cells_in_and_out() -> None:
    page = " ".join(text("README.md").split())
    rules = {rule["rule"]: rule for rule in stored("verdict_rules.json")["rules"]}
    own, other = rules["**accelcheck**"], rules["`torch.testing.assert_close` defaults"]

    def share(rule: Mapping[str, float], key: str) -> str:
        return f"{rule[key] * 100:.1f} %"

    assert f"catches {share(own, 'caught')} of the faults and fails {share(own, 'failed')} of the correct ones" in page
    assert f"`torch.testing.assert_close` catches {share(other, 'caught')} and fails {share(other, 'failed')}" in page
    assert f"it catches {share(own, 'caught-with-hidden')}, `assert_close` {share(other, 'caught-with-hidden')}" in page


def test_the_memory_that_the_page_states_is_above_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    script, document = benchmark("verdict_speed", monkeypatch), stored("verdict_speed.json")
    page = text("docs/verdicts.md")
    stated, limit = re.findall(r"under (\d+) MiB for up to 2\^26 elements; the script fails above (\d+) MiB", page)[0]
    assert max(size["bytes"] for size in document["memory"]) < int(stated) * 2**20
    assert int(limit) * 2**20 == script.LIMIT


def test_what_is_said_of_the_selftest_on_xla_is_stored() -> None:
    page = " ".join(text("docs/verdicts.md").split())
    last = (STORED.parent / "xla" / "selftest.txt").read_text(encoding="utf-8").splitlines()[-2]
    caught = re.search(r"(\d+ of \d+) verdicts caught them", last)
    correct = re.search(r"0 false alarms in (\d+) verdicts", last)
    assert caught is not None
    assert correct is not None
    assert f"of the others {caught[1]} are caught, and none of {correct[1]} correct verdicts is wrong" in page


def test_the_excerpt_of_the_selftest_is_of_the_stored_one() -> None:
    page = text("docs/verdicts.md")
    excerpt = page[page.index("```text\nview  ") :].split("```")[1].splitlines()[1:]
    written = (STORED / "selftest.txt").read_text(encoding="utf-8").splitlines()
    assert len(excerpt) > 5
    assert [line for line in excerpt if line and line != "..." and line not in written] == []


def test_the_figures_beside_the_table_of_gates_are_what_the_stored_sessions_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark("gate_table", monkeypatch)
    monkeypatch.setattr(script, "DRAWS", 1)  # of a figure beside the table
    assert script.show(script.read([STORED / "speed_gates.jsonl"])) == 0
    printed = capsys.readouterr().out
    page = text("docs/speed.md")
    sessions = [line for line in script.read([STORED / "speed_gates.jsonl"]) if line["kind"] == "session"]
    *small, (turns, apart) = [
        (f"{100 * first:.1f}", f"{100 * other:.1f}") for first, other in script.spreads(sessions).values()
    ]
    assert {first for first, _ in small} == {"0.5"}
    assert sorted(other for _, other in small) == ["0.7", "0.8", "1.0"]
    assert "standard deviation of 0.5 %" in page
    assert "of 0.7 to 1.0 %" in page
    assert f"are {turns} and {apart} %" in page
    false = [
        result["0"]["ratio"] - 1
        for session in sessions
        for result in session["gate-1"]["own"].values()
        if result["0"]["answer"] in {"slower", "faster"}
    ]
    assert f"{100 * max(false):.1f} % slower and {-100 * min(false):.1f} % faster" in " ".join(page.split())
    (call,) = re.findall(r"an empty call: ([\d.]+)", printed)
    assert f"An empty call takes {call} times" in " ".join(page.split())


def test_the_counts_of_baseline_checks_are_those_of_the_stored_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = benchmark("baseline_checks", monkeypatch)
    lines = (STORED / "baseline_checks" / "cpu-level-2" / "checks.jsonl").read_text(encoding="utf-8").splitlines()
    assert script.show([json.loads(line) for line in lines]) == 0
    printed = capsys.readouterr().out
    page = " ".join(text("docs/speed.md").split())
    assert re.search(r"no regression in (\d+) of \1 checks", printed)
    for pattern, claim in (
        (r"of (\d+) checks", "none was reported in {} checks"),
        (r"(\d+) cases;", "of {} cases of level 2"),
        (r"named in (\d+ of \d+),", "that it finds, {} were"),
    ):
        (matches,) = re.findall(pattern, printed)
        assert claim.format(matches) in page


def test_the_limits_of_the_plugins_cost_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    script = benchmark("plugin_cost", monkeypatch)
    for page in ("README.md", "docs/options.md"):
        words = " ".join(text(page).split())
        assert f"at most {script.START_LIMIT} times" in words
        assert f"at most {script.COLLECT_LIMIT} times" in words


def test_the_benchmarks_of_nox_exist() -> None:
    noxfile = text("noxfile.py")
    listed = noxfile[noxfile.index("BENCHMARKS = (") : noxfile.index("INDEX_TIMEOUT")]
    paths = re.findall(r'"((?:benchmarks|baselines)/[\w./]+)"', listed)
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / path).exists()] == []
