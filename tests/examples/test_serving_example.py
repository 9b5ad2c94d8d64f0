"""examples/serving: a Llama and a mixture of experts pass in every row; tokens in another order fail."""

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
EXAMPLE = ROOT / "examples" / "serving"

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")


def run(folder: Path, journal: Path, *more: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    words = ["-p", "no:cacheprovider", "--accel-device=cpu", f"--accel-journal={journal}"]
    return completed(
        [sys.executable, "-m", "pytest", "-q", "test_decoding.py", *words, *more],
        cwd=folder,
        env={**known, "PYTHONPATH": str(ROOT)},
        timeout=900,
    )


def verdicts(journal: Path) -> dict[str, str]:
    return {record.case.technique: str(record.verdict) for record in read(journal)[1]}


@pytest.mark.parametrize(("what", "least"), [("cache", 8), ("ways and mixture", 13), ("steps and mixture", 3)])
def test_a_llama_and_a_mixture_of_experts_pass_in_every_row(what: str, least: int, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    done = run(EXAMPLE, journal, f"-k={what}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = read(journal)[1]
    assert {str(record.verdict) for record in records} == {"pass"}
    assert len(records) >= least


def test_a_prefill_in_another_order_fails(tmp_path: Path) -> None:
    folder, journal = tmp_path / "serving", tmp_path / "journal.jsonl"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "conftest.py"
    source = path.read_text("utf-8")
    wrong = source.replace("model(tokens[:, start:end],", "model(tokens[:, start:end].flip(1),")
    assert wrong != source
    path.write_text(wrong, "utf-8")
    done = run(folder, journal, "-k=cache and not mixture")
    assert done.returncode == 1, done.stdout + done.stderr
    wrong_ones = dict.fromkeys(("hf-dynamic-cache", "hf-static-cache"), "fail")
    assert verdicts(journal) == dict.fromkeys(("eager", "sdpa-math"), "pass") | wrong_ones
