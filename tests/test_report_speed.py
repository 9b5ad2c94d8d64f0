from __future__ import annotations

from accelcheck.case import Case, Measurement, Mode, Verdict
from accelcheck.journal import Record
from accelcheck.report.speed import lines


def record(technique: str, own: float | None, eager: float | None) -> Record:
    case = Case(technique, "speed-mlp", "cpu", "float32", Mode.SPEED, 1)
    measured = (
        Measurement("launches", own, "1", None, None, "1 fused in place of 3 mm"),
        Measurement("launches-fp32-eager", eager, "1", None, None, ""),
    )
    return Record(case, Verdict.PASS, measurements=measured)


def test_what_is_launched_in_place_of_eagers_is_listed_where_it_is_less() -> None:
    found = lines([record("fused", 1, 3), record("same", 3, 3), record("more", 4, 3), record("unknown", None, 3)])
    title = found.index("launches fewer than eager:")
    assert found[title - 1] == ""
    assert found[title + 1 :] == ["  fused/speed-mlp/cpu/float32/speed  1 fused in place of 3 mm"]


def test_nothing_is_listed_where_nothing_launches_less() -> None:
    assert "launches fewer than eager:" not in lines([record("same", 3, 3)])
    assert lines([]) == []
