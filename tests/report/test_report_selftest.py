"""Output of the selftest: the kill table, the views, wrong verdicts, counts."""

from __future__ import annotations

from dataclasses import replace

from accelcheck.core.case import Mode, Verdict
from accelcheck.report.console import Table
from accelcheck.selftest import report
from accelcheck.selftest.runner import PLAIN, Ground, PlantedRow, SeedResult


def outcome(
    plant: str,
    seed: int = 0,
    *views: str,
    verdict: Verdict = Verdict.FAIL,
    reason: str = "",
    seconds: float = 1.0,
    **more: bool | str | float,
) -> SeedResult:
    row = PlantedRow(plant, 1.0, "matmul", Mode.FORWARD, "float32")
    row = replace(row, **more)  # type: ignore[arg-type]  # a row's fields
    return SeedResult(row, seed, verdict, views, reason, seconds={"run": seconds})


SEEN = [
    outcome("gain", 0, "gain", "row", strength=0.5),
    outcome("gain", 1, "gain", strength=0.5),
    outcome("gain", 0, "gain", strength=0.25),
    outcome("gain", 1, verdict=Verdict.PASS, strength=0.25),
    outcome("leak", 0, "row"),
    outcome("faint", 0, verdict=Verdict.PASS, hidden="less than rounding"),
    outcome("tree", 0, verdict=Verdict.PASS, correct=True),
    outcome("tree", 1, "tail", correct=True, reason="out: view tail: expected 1, got 2\nmore"),
    outcome("stream", 0, verdict=Verdict.UNSUPPORTED, reason="no streams"),
]


def test_the_table_has_a_line_for_each_fault_and_strength_the_strongest_first() -> None:
    _, *lines = report.table(SEEN).lines()
    assert [line.split() for line in lines] == [
        ["faint", "float32", "0/1", "hidden:", "less", "than", "rounding"],
        ["gain", "0.5", "float32", "2/2", "gain", "2,", "row", "1"],
        ["gain", "0.25", "float32", "1/2", "gain", "1"],
        ["leak", "float32", "1/1", "row", "1"],
    ]


def test_a_view_tells_what_it_alone_sees_in_every_seed() -> None:
    _, *lines = report.alone(SEEN).lines()
    assert [line.split() for line in lines] == [
        ["gain", "3", "gain", "0.5", "in", "matmul/float32/forward"],
        ["row", "2", "leak", "in", "matmul/float32/forward"],
    ]


def test_wrong_verdicts_are_listed_by_row_with_their_seeds() -> None:
    assert report.wrong(SEEN) == [
        "survived: gain 0.25 in matmul/float32/forward: pass with seeds 1",
        "false alarm: tree in matmul/float32/forward: fail with seeds 1: out: view tail: expected 1, got 2",
    ]


def test_of_many_wrong_verdicts_the_first_are_listed_and_the_rest_counted() -> None:
    many = [outcome(f"plant-{n:02}", 0, verdict=Verdict.PASS) for n in range(9)]
    assert [line.partition(" in ")[0] for line in report.wrong(many, most=2)] == [
        "survived: plant-00",
        "survived: plant-01",
        "and 7 more",
    ]


def test_counts_are_of_what_is_owed() -> None:
    assert report.counts(SEEN) == (
        "3 faults: 4 of 5 verdicts caught them (1 more are below their documented detectability); "
        "1 correct variants: 1 false alarms in 2 verdicts (0 of them of techniques with nothing planted)"
    )


def test_what_got_no_verdict_is_neither_caught_nor_a_false_alarm() -> None:
    plain = f"eager{PLAIN}"
    told = [
        outcome("gain", 0, verdict=Verdict.ERROR, reason="OracleError: no"),
        outcome(plain, 0, verdict=Verdict.CRASH, correct=True),
        outcome(plain, 1, verdict=Verdict.PASS, correct=True),
    ]
    assert report.counts(told) == (
        "1 faults: 0 of 1 verdicts caught them; 0 correct variants: 0 false alarms in 2 verdicts "
        "(2 of them of techniques with nothing planted); 2 without a verdict"
    )
    assert report.wrong(told)[1] == "no verdict: gain in matmul/float32/forward: error with seeds 0: OracleError: no"


def test_a_hidden_row_that_is_an_error_is_no_survivor_of_what_is_owed() -> None:
    broken = outcome("faint", 1, verdict=Verdict.ERROR, hidden="less than rounding")
    assert not broken.good
    assert report.counts([*SEEN, broken]).startswith("3 faults: 4 of 5 verdicts caught them (2 more")


def test_the_slowest_plants_come_first() -> None:
    lines = report.slowest([outcome("slow", 0, seconds=3.0), outcome("slow", 1, seconds=5.0), outcome("fast", 0)])
    assert [line.split()[:2] for line in lines] == [["4.00", "slow"], ["1.00", "fast"]]


GROUND = Ground(
    techniques=("eager", "export", "onnxruntime"),
    families={"eager": "eager", "eager-resized": "eager", "export": "export", "onnxruntime": "engines"},
    workloads=("matmul", "mlp"),
    modes=(Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN),
    dtypes=("float32", "bfloat16"),
    absent=("tf32 in matmul/bfloat16/forward: operands have no more bits",),
)


def test_the_matrix_counts_rows_by_family_and_names_what_has_none() -> None:
    told = [
        outcome("gain", 0),
        outcome("gain", 1),  # another seed of the same row
        outcome("gain", 0, dtype="bfloat16"),
        outcome("size", 0, technique="eager-resized"),
        outcome("slice", 0, technique="export", emulated=True),
        outcome("faint", 0, verdict=Verdict.PASS, hidden="less than rounding", technique="export"),
        outcome("refused", 0, verdict=Verdict.UNSUPPORTED, technique="onnxruntime"),
        outcome("tree", 0, verdict=Verdict.PASS, correct=True, workload="mlp"),
    ]
    table, *lines = report.planted(told, GROUND)
    assert isinstance(table, Table)
    assert [line.split() for line in table.lines()] == [
        ["family", "techniques", "forward", "float32", "bfloat16", "emulated", "hidden"],
        ["eager", "1", "of", "1", "3", "2", "1", "-", "-"],
        ["engines", "0", "of", "1", "-", "-", "-", "-", "-"],
        ["export", "1", "of", "1", "1", "1", "-", "1", "1"],
    ]
    assert lines == [
        "2 of 3 techniques have a planted fault; none has: onnxruntime",
        "1 of 2 workloads have a planted fault; none has: mlp",
        "1 of 3 modes have a planted fault; none has: backward, train",
        "2 of 2 dtypes have a planted fault",
        "1 rows are hidden, 1 cells have no such fault: each says why",
    ]


def test_the_total_says_what_is_emulated_and_what_has_fewer_seeds() -> None:
    told = [outcome("nibbles", 0, emulated=True), outcome("bucket", 0, seeds=3), outcome("gain", 0)]
    assert report.counts(told).startswith(
        "3 faults: 3 of 3 verdicts caught them, 1 of them planted in an emulation, "
        "1 rows of slow techniques with at most 3 seeds; "
    )


def test_cells_without_a_fault_are_listed_with_the_matrix() -> None:
    lines = report.whole(SEEN, "cpu", GROUND)
    assert "tf32 in matmul/bfloat16/forward: operands have no more bits" in lines
    assert "Cells without such a fault" not in report.whole(SEEN, "cpu")


def test_the_whole_report_has_only_parts_with_something_in_them() -> None:
    lines = report.whole(SEEN[4:5], "cpu")
    assert "Faults" in lines
    assert "Wrong verdicts" not in lines
    assert "Not planted on cpu" not in lines
    assert "Not planted on cpu" in report.whole(SEEN, "cpu")
    assert lines[-1] == report.counts(SEEN[4:5])
