"""A fault says how large it is, and becomes the same text everywhere."""

from __future__ import annotations

import math

import pytest

from accelcheck.core.fault import Fault, FaultKind


def view(measured: float, allowed: float) -> Fault:
    return Fault(FaultKind.VIEW, "out", "row", measured=measured, allowed=allowed, place="[3, :]")


@pytest.mark.parametrize(
    ("fault", "size"),
    [
        (view(3e-6, 1e-6), 3.0),
        (view(math.inf, 1e-6), math.inf),
        (view(math.nan, 1e-6), math.inf),
        (view(1e-6, 0.0), 1e-6 * 2**23),
        (view(math.nan, 0.0), math.inf),
        (view(1.0, math.inf), 0.0),
        (Fault(FaultKind.PATTERN, "out", "NaN", measured=12), 12.0),
        (Fault(FaultKind.PATTERN, "loss[3]", "not finite", measured=1), 1.0),
        (Fault(FaultKind.VALUE, "out", expected="-3", got="4", measured=7), 7.0),
        (Fault(FaultKind.VALUE, "out", expected="False", got="True", measured=True), 1.0),
        (Fault(FaultKind.VALUE, "sum", expected="1, 2", got="2, 2"), None),
        (Fault(FaultKind.RERUN, "out", measured=0.1), 0.1),
        (Fault(FaultKind.RERUN, "out", measured=math.nan), math.inf),
        (Fault(FaultKind.REGRESSION, "regression", "time", measured=1.2, allowed=1.0), 1.2),
        (Fault(FaultKind.LIMIT, "limit", "memory", measured=3.0, allowed=2.0), 1.5),
        (Fault(FaultKind.LIMIT, "limit", "speed up", measured=0.5, allowed=2.0, at_least=True), 4.0),
        (Fault(FaultKind.LIMIT, "limit", "speed up", measured=0.0, allowed=2.0, at_least=True), math.inf),
        (Fault(FaultKind.METADATA, "out", "dtype", expected="float32", got="float16"), None),
        (Fault(FaultKind.MUTATED, "input[0]"), None),
        (Fault(FaultKind.STATE, "default dtype"), None),
        (Fault(FaultKind.EVIDENCE, "graphs >= 1", got="0"), None),
        (Fault(FaultKind.RAISED, "run", "LookupError", got="no kernel"), None),
        (Fault(FaultKind.RULE, "scaler", "step 2", expected="0", got="3"), None),
    ],
    ids=str,
)
def test_the_size_follows_from_the_numbers(fault: Fault, size: float | None) -> None:
    assert fault.size == (size if size is None else pytest.approx(size))


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (view(3e-6, 1e-6), "out: view row at [3, :]: expected at most 1.000e-06, got 3.000e-06"),
        (
            Fault(FaultKind.PATTERN, "out", "NaN", "nan[0]", "3 of them", "2", measured=1, place="[0, 1]"),
            "out: NaN pattern, 1 element differ, first at [0, 1] [nan[0]]: expected 3 of them, got 2",
        ),
        (Fault(FaultKind.STATE, "default dtype", "", "", "a", "b"), "default dtype: left changed: expected a, got b"),
        (Fault(FaultKind.EVIDENCE, "graphs >= 1", got="0"), "not engaged: graphs >= 1: observed 0"),
        (
            Fault(FaultKind.RAISED, "run", "LookupError", "draw 1", got="no kernel"),
            "run: raised [draw 1]: expected a result, got LookupError: no kernel",
        ),
        (
            Fault(FaultKind.REGRESSION, "regression", "memory", expected="bytes", measured=1048577, allowed=1048576),
            "regression: memory: expected at most 1048576 bytes, got 1048577",
        ),
        (
            Fault(FaultKind.LIMIT, "limit", "speed up", expected="why", measured=0.5, allowed=1.5, at_least=True),
            "limit: speed up: expected at least 1.5 (why), got 0.5",
        ),
        (Fault(FaultKind.OTHER, "a line: of an older journal"), "a line: of an older journal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_reads_as_a_line(fault: Fault, line: str) -> None:
    assert str(fault) == line
