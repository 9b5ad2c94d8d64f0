"""benchmarks/gpu.py: steps that hang, fail or do not begin leave the others their time, and what they found."""

from __future__ import annotations

import json
import time
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from process_harness import script

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import Journal, Record
from accelcheck.selftest.runner import faults, variants

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported and not run, without its least time and with a short grace."""
    module = script(SCRIPT)
    monkeypatch.setattr(module, "GRACE", 1.0)
    monkeypatch.setattr(module, "LEAST", 0.0)
    return module


def planned(gpu: Any, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    plans = tuple(gpu.Plan(name, 1, lambda _, program=program: [["-c", program]]) for name, program in programs.items())
    monkeypatch.setattr(gpu, "PLANS", plans)


def states(folder: Path) -> dict[str, str]:
    return {step["name"]: step["state"] for step in json.loads((folder / "summary.json").read_text())["steps"]}


@pytest.mark.slow
def test_a_step_that_hangs_is_stopped_and_the_others_run(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    planned(
        gpu, monkeypatch, first="print('one')", hung=stubborn, found="raise SystemExit(1)", wrong="raise SystemExit(4)"
    )
    begun = time.monotonic()
    assert gpu.main(["--out", str(tmp_path), "--minutes", "0.2"]) == 1
    assert time.monotonic() - begun < 30
    assert states(tmp_path) == {"first": "done", "hung": "stopped", "found": "done", "wrong": "failed"}
    assert {"one", "deaf"} <= set((tmp_path / "log.txt").read_text().splitlines())
    assert "--steps hung wrong" in capsys.readouterr().out


def test_what_is_interrupted_may_write_its_report(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    polite = "import time\ntry:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('the report')"
    planned(gpu, monkeypatch, polite=polite)
    gpu.main(["--out", str(tmp_path), "--minutes", "0.03"])
    assert states(tmp_path) == {"polite": "stopped"}
    assert "the report" in (tmp_path / "log.txt").read_text().splitlines()


def test_steps_are_chosen_by_name_and_know_their_device(gpu: Any) -> None:
    given = gpu.parsed(["--device", "rocm", "--steps", "level1", "curve", "--workers", "3"])
    words = {plan.name: plan.words(given) for plan in gpu.PLANS}
    assert given.steps == ["level1", "curve"]
    for programs in words.values():
        for program in programs:
            assert "rocm" in program or "--accel-device=rocm" in program
    (level2,) = words["level2"]
    assert {"--accel-level=2", "--accel-require", "3"} <= set(level2)
    assert len(words["selftest"]) == len(gpu.SLICES)


def test_every_fault_is_in_one_slice(gpu: Any) -> None:
    names = [*faults(), *variants()]
    for name in names:
        assert sum(fnmatchcase(name, part) for part in gpu.SLICES) == 1, name
    for part in gpu.SLICES:
        assert 0 < sum(fnmatchcase(name, part) for name in names) < len(names) / 2


def test_a_journal_gives_the_verdicts_and_the_bad_cases(gpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "level1.jsonl"
    journal = Journal(path)
    journal.header({"level": 1})
    for technique, verdict in (("a", Verdict.PASS), ("b", Verdict.FAIL)):
        case = Case(technique, "mlp", "cuda", "float32", Mode.FORWARD, 1)
        journal.case(Record(case, verdict, reason="out: view row\nmore").as_json())
    outcome = gpu.Outcome("level1")
    gpu.judged(path, outcome)
    assert outcome.verdicts == {"pass": 1, "fail": 1}
    assert outcome.bad == ["b/mlp/cuda/float32/forward: fail: out: view row"]


def test_a_large_journal_is_compressed(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "LARGE", 1)
    path = tmp_path / "level2.jsonl"
    Journal(path).header({"level": 1})
    gpu.judged(path, gpu.Outcome("level2"))
    assert [file.name for file in tmp_path.iterdir()] == ["level2.jsonl.gz"]


def test_how_many_cases_there_are_is_read_from_the_output(gpu: Any, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("collected 3 items")
    assert gpu.selected(log) == 0
    log.write_text(
        "accelcheck: level 1: 26 cases on cpu (x)\n...\naccelcheck: level 2: 55 cases on cuda (NVIDIA H200)\n"
    )
    assert gpu.selected(log) == 55
