"""`accelcheck baseline`: what is shown, compared, stored anew and cleared out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_harness import completed

from accelcheck import cli
from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE
from accelcheck.measure.baselines import Baseline, Baselines, Place
from accelcheck.measure.regression import CHECKED, STORED, Sample, change

SHIPPED = Path(__file__).parents[2] / "baselines"
HERE = Place("cpu", "Chip", 2, "2.13", "ATen AVX2")
BEFORE = replace(HERE, torch="2.12")
CASES = [f"eager/speed-{model}/cpu/float32/speed" for model in ("cnn", "mlp")]


@pytest.fixture
def store(tmp_path: Path) -> Baselines:
    return Baselines(tmp_path / "baselines")


def put(store: Baselines, place: Place, *means: float, cases: list[str] = CASES) -> list[Baseline]:
    baselines = [
        Baseline(case, "0123abcd", place, Sample(mean, 0.01, 10)) for case, mean in zip(cases, means, strict=True)
    ]
    for baseline in baselines:
        store.write(baseline, replace=True)
    return baselines


def run(store: Baselines, *words: str) -> int:
    return cli.main(["baseline", "--baselines", str(store.root), *words])


def test_show_says_what_slowdown_three_processes_see(store: Baselines, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = put(store, HERE, 0.0, -0.7)
    assert run(store, "show") == GREEN
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == HERE.folder
    seen = change(first.ratio, Sample(0.0, 0.01, CHECKED), len(CASES)).smallest
    assert lines[2].split() == [CASES[0], "1.0000", "1.00", "%", "10", f"{100 * (seen - 1):.1f}", "%"]
    assert lines[3].split()[1] == "0.4966"


def test_show_has_one_folder_and_names_others_on_typos(store: Baselines, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, HERE, 0.0, 0.0)
    put(store, BEFORE, 0.0, 0.0)
    assert run(store, "show", BEFORE.folder) == GREEN
    assert HERE.folder not in capsys.readouterr().out
    assert run(store, "show", "cpu-chip-x2/torch-2.11-aten-avx2") == USAGE
    assert f"Legal values: {BEFORE.folder}, {HERE.folder}" in capsys.readouterr().err


def test_an_empty_store_is_said(store: Baselines, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(store, "show") == NOTHING
    assert "no baseline is stored" in capsys.readouterr().err


@pytest.mark.parametrize(("second", "code"), [((0.0, 0.001), GREEN), ((0.0, 0.1), RED)])
def test_compare_is_red_where_the_second_is_slower(
    store: Baselines, second: tuple[float, float], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, BEFORE, 0.0, 0.0)
    put(store, HERE, *second)
    assert run(store, "compare", BEFORE.folder, HERE.folder) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("slower") for line in lines[1:3]] == [False, code == RED]


def test_compare_says_what_is_in_one_alone_or_changed(store: Baselines, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, BEFORE, 0.0, 0.0)
    (first, _) = put(store, HERE, 0.0, 0.0)
    for changed in (replace(first, digest="ffff0000"), replace(first, environment={"OMP_NUM_THREADS": "1"})):
        store.write(changed, replace=True)
        assert run(store, "compare", BEFORE.folder, HERE.folder) == GREEN
        assert capsys.readouterr().out.splitlines()[-2:] == [
            "only in the first folder, or changed since: 1 cases",
            "only in the second folder, or changed since: 1 cases",
        ]


@pytest.mark.parametrize(("words", "use"), [([], "update"), (["--new-only"], "new-only")])
def test_update_runs_the_timed_suite(
    store: Baselines, monkeypatch: pytest.MonkeyPatch, words: list[str], use: str
) -> None:
    ran: list[list[str]] = []

    def start(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr("accelcheck.commands.baseline.subprocess.run", start)
    assert run(store, "update", "--device=xla", *words, "--", "-x") == 1
    assert ran[0][1:] == [
        *("-m", "pytest", "--pyargs", "accelcheck.suite.test_speed", "--accel-device=xla", "--accel-require"),
        *("--accel-level=2", f"--accel-baselines={store.root}", f"--accel-baseline={use}", "-x"),
    ]
    assert cli.main(["baseline", "update"]) == 1
    assert not [word for word in ran[1] if word.startswith("--accel-baselines")]  # pytest knows which one


def test_the_store_is_that_of_a_run_here_unless_named(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naccel_baselines = perf/base\n")
    put(Baselines(tmp_path / "perf/base"), HERE, 0.0, 0.0)
    (tmp_path / "below").mkdir()
    # In a process of its own: what pytest knows of a folder is asked once a process.
    shown = completed(
        [sys.executable, "-c", "from accelcheck.cli import main; main(['baseline', 'show'])"],
        cwd=tmp_path / "below",
        check=True,
    )
    assert shown.stdout.startswith(HERE.folder)


def test_prune_removes_what_is_gone_and_what_writers_left(store: Baselines, capsys: pytest.CaptureFixture[str]) -> None:
    gone = "eager/speed-mlp/cpu/float32/forward-speed"
    put(store, HERE, 0.0, 0.0, 0.0, cases=[*CASES, gone])
    left = store.root / HERE.folder / ".x.json.partial"
    left.write_text("{")
    assert run(store, "prune", "--dry-run") == GREEN
    assert left.exists()
    assert "2 files would be removed" in capsys.readouterr().out
    assert run(store, "prune") == GREEN
    assert not left.exists()
    assert sorted(store.read(HERE)) == CASES


def test_prune_keeps_what_a_plugin_may_have_brought(store: Baselines, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = ["vendor-fast/speed-mlp/cpu/float32/speed", "eager/vendor-model/cpu/float32/speed", "nothing-like-an-id"]
    put(store, HERE, 0.0, 0.0, 0.0, 0.0, 0.0, cases=[*CASES, *foreign])
    assert run(store, "prune") == GREEN
    assert "3 kept: their techniques or workloads are not registered here" in capsys.readouterr().out
    assert set(foreign) < set(store.read(HERE))
    assert run(store, "prune", "--unknown") == GREEN
    assert sorted(store.read(HERE)) == CASES


@pytest.mark.parametrize("words", [["show"], ["prune"], ["compare", HERE.folder, HERE.folder]])
def test_a_spoilt_file_ends_the_command_and_is_named(
    store: Baselines, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, HERE, 0.0, 0.0)
    path = next(store.root.rglob("*.json"))
    path.write_text("{")
    assert run(store, *words) == USAGE
    assert str(path) in capsys.readouterr().err


def test_what_is_shipped_can_be_read_and_is_of_cases_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = Baselines(SHIPPED)
    stored = [baseline for _, baseline in shipped.stored()]
    assert {baseline.place.device for baseline in stored} >= {"cpu", "xla"}
    assert {baseline.ratio.count for baseline in stored} == {STORED}
    assert run(shipped, "prune", "--dry-run") == GREEN
    assert "0 files would be removed" in capsys.readouterr().out
