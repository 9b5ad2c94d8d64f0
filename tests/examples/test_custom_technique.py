"""examples/custom-technique: its kernel builds, opcheck passes, and so does the suite, eager and compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from process_harness import completed

from accelcheck.core.journal_reading import read

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "custom-technique"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: apt-get install g++")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return completed(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=EXAMPLE,
        env={**known, "PYTHONPATH": str(ROOT), "MAX_JOBS": "1"},
        timeout=900,
    )


@pytest.mark.slow
def test_the_operator_passes_its_own_tests() -> None:
    done = run("test_operator.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_technique_passes_in_eager_mode_and_compiled(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    words = ["--accel-technique=precise-linear*", "--accel-workload=mlp", f"--accel-journal={journal}"]
    done = run("--pyargs", "accelcheck.suite", "--accel-device=cpu", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {f"{record.case.technique}/{record.case.mode}": record for record in read(journal)[1]}
    assert {name: str(record.verdict) for name, record in records.items()} == {
        f"precise-linear{kind}/{mode}": "pass" for kind in ("", "-compiled") for mode in ("forward", "backward")
    }
    compiled = [entry.claim for entry in records["precise-linear-compiled/forward"].evidence if entry.engaged]
    assert "calls of example::precise_linear >= 3" in compiled
    assert "compiled regions entered >= 1" in compiled
