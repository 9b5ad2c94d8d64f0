"""Operators: it is known of each that a built-in workload computes with how much it rounds."""

from __future__ import annotations

import pytest

from accelcheck.core.case import Case, Mode
from accelcheck.core.selection import Selection
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify import operators
from accelcheck.verify.effort import FULL
from accelcheck.verify.oracle import FIRST
from accelcheck.verify.oracle_runs import Oracle, Source
from accelcheck.workloads.dispatch import unfused

LEVEL = 2
MODES = (Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN)


def unclassified() -> dict[str, Case]:
    """Operators without a class, each with a case that computes with it."""
    matrix = Matrix.load()
    names: dict[str, Case] = {}
    seen: set[tuple[str, Mode, str]] = set()
    for case in matrix.cases(Selection(("cpu",), level=LEVEL), MODES):
        technique = matrix.techniques[case.technique]
        if (key := (case.workload, case.mode, technique.oracle)) in seen:
            continue
        seen.add(key)
        source = Source(matrix.workloads[case.workload], technique, case.seed, case.dtype, case.mode, FIRST)
        with unfused():
            oracle = Oracle(source.exactly(), case.mode, FULL)
            oracle.sample(case.seed, source.precision, case.dtype)
        names |= dict.fromkeys(oracle.unclassified - names.keys(), case)
    return names


@pytest.mark.slow
def test_every_operator_of_a_built_in_workload_is_classified() -> None:
    assert unclassified() == {}, (
        "add each to EXACT, CORRECTLY_ROUNDED or INEXACT in accelcheck/verify/operators.py, "
        "with what its kernels promise"
    )


def test_an_operator_without_a_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "INEXACT", operators.INEXACT - {"silu"})
    source = Source(
        Matrix.load().workloads["deep-blocks"], Matrix.load().techniques["eager"], 1, "float32", Mode.FORWARD, FIRST
    )
    with unfused():
        oracle = Oracle(source.exactly(), Mode.FORWARD, FULL)
        oracle.sample(1, "float32", "float32")
    assert oracle.unclassified == {"silu"}
