from __future__ import annotations

from dataclasses import replace

from accelcheck.core.case import Case, Measurement, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.report.terminal import timed_lines as lines


def record(technique: str, own: float | None, eager: float | None) -> Record:
    case = Case(technique, "speed-mlp", "cpu", "float32", Mode.SPEED, 1)
    measured = (
        Measurement("launches", own, "1", None, None, "1 fused in place of 3 mm"),
        Measurement("launches-fp32-eager", eager, "1", None, None, ""),
    )
    return Record(case, Verdict.PASS, measurements=measured)


def test_what_is_launched_in_place_of_eagers_is_listed_where_it_is_less() -> None:
    shown = lines([record("fused", 1, 3), record("same", 3, 3), record("more", 4, 3), record("unknown", None, 3)])
    title = shown.index("launches fewer than eager:")
    assert shown[title - 1] == ""
    assert shown[title + 1 :] == ["  fused/speed-mlp/cpu/float32/speed  1 fused in place of 3 mm"]


def test_nothing_is_listed_where_nothing_launches_less() -> None:
    assert "launches fewer than eager:" not in lines([record("same", 3, 3)])
    assert lines([]) == []


def test_what_is_held_against_a_baseline_says_its_limit_and_what_would_have_been_seen() -> None:
    held = replace(
        record("held", 3, 3),
        measurements=(
            Measurement("baseline-change", 1.002, "x", high=1.031),
            Measurement("baseline-detectable", 1.0457, "x"),
        ),
    )
    shown = lines([held, record("other", 3, 3)])
    assert shown[2].endswith("1.002 (1.031, 1.046)")
    assert any(line.startswith("compared with baselines: 1 of 2 cases; in brackets") for line in shown)


def test_notes_on_baselines_name_few_cases_and_count_many() -> None:
    def noted(technique: str, reason: str) -> Record:
        return replace(
            record(technique, 3, 3), measurements=(Measurement("baseline-change", None, "x", reason=reason),)
        )

    many = [noted(f"many{number}", "no baseline") for number in range(4)]
    shown = lines([*many, noted("one", "not stored"), noted("two", "not stored")])
    assert shown[-2:] == [
        "baseline: no baseline (4 cases)",
        "baseline: not stored (one/speed-mlp/cpu/float32/speed, two/speed-mlp/cpu/float32/speed)",
    ]
