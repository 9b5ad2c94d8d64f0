"""Derived files: each is what its writer makes, and the writers lose nothing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import must_pass
import pytest
import regenerate

from accelcheck.core.case import Verdict
from accelcheck.expectations import must_pass as stored
from accelcheck.report.run import load
from accelcheck.techniques.matrix import Matrix

ROOT = Path(__file__).parent.parent

PAGE = "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\nText.\n"


@pytest.mark.slow
def test_every_derived_file_is_what_its_writer_makes() -> None:
    stale = [path for path, write in regenerate.derived().items() if regenerate.renewed(path, write) is not None]
    assert stale == [], f"run {regenerate.COMMAND}"


@pytest.mark.slow
def test_the_page_of_techniques_does_not_depend_on_installed_packages() -> None:
    packages = {package for technique in Matrix.load().techniques.values() for package in technique.packages}
    packages -= {"torchao"}  # every environment of the tests has it
    hidden = f"import sys; sys.modules.update(dict.fromkeys({sorted(packages)}))"
    command = [sys.executable, "-c", f"{hidden}; from accelcheck.cli import main; main(['list', '--markdown'])"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    assert listed.stdout == (ROOT / "docs" / "techniques.md").read_text()


def test_a_stale_file_is_renewed() -> None:
    assert regenerate.renewed("docs/reference.md", lambda before: before + "more") is not None


def test_measured_files_exist() -> None:
    assert [path for path in regenerate.MEASURED if not (ROOT / path).exists()] == []


def test_rows_of_a_table_are_replaced_and_nothing_else() -> None:
    assert regenerate.tabled(PAGE, "| a |", ["| 5 | 6 |"]) == "| a | b |\n|---|---|\n| 5 | 6 |\n\nText.\n"


def test_a_stored_case_that_is_gone_is_not_forgotten() -> None:
    with pytest.raises(SystemExit, match="gone/mlp/cpu/float32/forward"):
        regenerate.cases("seed mlp 1\ncase gone float32 forward 1 mlp\n")


@pytest.mark.slow
@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL, Verdict.UNSUPPORTED])
def test_a_list_takes_up_a_new_case_only_where_it_passed(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    old, (run,) = stored.stored()["cpu"], load([ROOT / "baselines" / "cpu" / "level1.jsonl"])
    new = "eager/mlp/float32/forward"
    without = replace(old, levels={key: level for key, level in old.levels.items() if key != new})
    monkeypatch.setattr(stored, "stored", lambda: {"cpu": without})
    records = [replace(r, verdict=verdict) if must_pass.key(r.case) == new else r for r in run.records]
    made = stored.parsed("cpu", must_pass.lists([replace(run, records=tuple(records))])["cpu"])
    assert (new in made.levels) is (verdict is Verdict.PASS)
    assert made.version == old.version + 1
    assert new not in stored.parsed("cpu", must_pass.lists([])["cpu"]).levels
