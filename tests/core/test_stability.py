"""Stored names of cases stay valid: ids and seeds, baselines, journals and ledgers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_cases import everything, facts, stored

from accelcheck.core.case import LEVELS, TIMED
from accelcheck.core.journal_reading import read
from accelcheck.core.selection import Selection
from accelcheck.measure.digest import digest
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.probes import Draw

BASELINES = Path(__file__).parents[2] / "baselines"
RETIRED = frozenset({"matmul-numpy", "data-parallel-2", "data-parallel-3", "data-parallel-compressed"})
"""Techniques that are gone. Stored journals have their names, which no other technique may get."""


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    from accelcheck.techniques.matrix import Matrix

    return Matrix.load()


def test_every_stored_case_keeps_its_id_level_and_seed(capsys: pytest.CaptureFixture[str]) -> None:
    before, now = stored(), facts(everything())
    with capsys.disabled():
        print(f"\n{len(before & now)} of {len(before)} stored cases have the id, level and seed that they had")
    assert len(before) > 5000
    assert sorted(before - now) == []


def test_no_two_cases_share_an_id() -> None:
    assert [name for name, count in Counter(case.id for case in everything()).items() if count > 1] == []


@pytest.mark.slow
def test_every_case_of_a_stored_journal_is_still_one_and_has_its_seed(matrix: Matrix) -> None:
    journals = sorted(BASELINES.glob("*/level*.jsonl"))
    assert len(journals) > 3
    for journal in journals:
        _, records = read(journal)
        now = facts(matrix.cases(Selection((journal.parent.name,), level=max(LEVELS))))
        assert facts(record.case for record in records if record.case.technique not in RETIRED) <= now, journal


def test_no_technique_has_the_name_of_one_that_is_gone(matrix: Matrix) -> None:
    assert not RETIRED & set(matrix.techniques)


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(path.name for path in BASELINES.glob("*-x*")))
def test_the_work_of_every_stored_baseline_is_what_it_was(folder: str, matrix: Matrix) -> None:
    files: list[dict[str, Any]] = [json.loads(path.read_text()) for path in (BASELINES / folder).glob("*/*.json")]
    assert files
    device = files[0]["device"]["name"]
    cases = {case.id: case for case in matrix.cases(Selection((device,), level=max(LEVELS)), TIMED)}
    changed = []
    for stored_one in files:
        case = cases[stored_one["case"]]
        problem = Draw(0).problem(matrix.workloads[case.workload], case.seed, case.dtype)
        if digest(replace(case, mode=TIMED[case.mode]).id, problem) != stored_one["digest"]:
            changed.append(case.id)
    assert changed == [], "a class, function or docstring that these cases time was edited: restore it, or measure anew"
