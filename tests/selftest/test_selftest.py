"""The selftest: what it plants, what it makes of the verdicts, what it prints and how it exits."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fault_harness import FORWARD

from accelcheck import cli
from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Record
from accelcheck.devices import devices
from accelcheck.devices.base import Device, Status
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.probe import HostFacts
from accelcheck.expectations.ledger import Entry, Ledger
from accelcheck.selftest import report, runner
from accelcheck.selftest.faults.base import EVERY, Cell, Planted, PlantedFault, Variant
from accelcheck.selftest.faults.plant import nothing, replacing, scaled
from accelcheck.selftest.faults.sowing import swapped
from accelcheck.selftest.runner import PlantedRow, SeedResult, attempt, caught_by, rows, seeded
from accelcheck.techniques.base import Technique
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program


@functools.cache
def matrix() -> Matrix:
    return Matrix.load()


@functools.cache
def cpu() -> Device:
    return devices()["cpu"]


def attempted(row: PlantedRow, store: Store, seed: int = 0) -> SeedResult:
    return attempt(row, seed, runner.bench(cpu(), matrix(), store))


def test_rows_are_unique_and_sorted_so_that_those_that_share_references_follow_each_other() -> None:
    table = rows()
    assert len(set(table)) == len(table)
    groups = [(row.workload, row.mode, row.dtype) for row in table]
    assert groups == sorted(groups)
    assert rows() == table


def test_rows_name_what_there_is() -> None:
    for row in rows():
        assert row.plant in (runner.variants() if row.correct else runner.faults())
        workload = matrix().workloads[row.workload]
        assert row.mode in workload.modes, row
        assert not (row.correct and row.hidden), row


def test_every_fault_and_every_variant_has_a_row_that_must_be_right() -> None:
    assert {row.plant for row in rows() if row.correct} == runner.variants().keys()
    assert {row.plant for row in rows() if not row.correct and not row.hidden} == runner.faults().keys()


def test_every_number_of_the_list_has_a_fault() -> None:
    assert {fault.number for fault in runner.faults().values()} - {0} == set(range(1, 44))


COMPUTING = frozenset(technique.family for technique in Matrix.load().techniques.values()) - {"platform"}
"""Families of techniques; each has faults in what it computes with. `platform` prepares no program to plant a fault in:
tests/checks/test_platform.py plants faults in its operations."""


def test_every_family_that_computes_has_two_faults_under_a_technique_of_its_own() -> None:
    families = runner.ground(rows()).families
    planted = Counter(families[runner._name(fault)] for fault in runner.faults().values())
    assert {family for family in COMPUTING if planted[family] < 2} == set()


def test_every_fault_under_a_technique_of_the_matrix_is_where_that_technique_is_tried() -> None:
    for fault in runner.faults().values():
        technique = fault.technique if isinstance(fault.technique, Technique) else matrix().techniques[fault.technique]
        for cell in fault.cells:
            workload = matrix().workloads[cell.workload]
            assert technique.accepts(workload), (fault.name, cell)
            assert cell.mode in technique.modes & workload.modes, (fault.name, cell)
            assert {*cell.dtypes, *cell.hidden} <= workload.dtypes.intersection(technique.dtypes), (fault.name, cell)


def test_no_dtype_is_left_out_in_silence() -> None:
    silent = []
    for fault in runner.faults().values():
        technique = fault.technique if isinstance(fault.technique, Technique) else matrix().techniques[fault.technique]
        for cell in fault.cells:
            there = matrix().workloads[cell.workload].dtypes.intersection(technique.dtypes, EVERY)
            left = there - {*cell.dtypes, *cell.hidden, *fault.absent}
            silent += [f"{fault.name} in {cell.workload}/{dtype}/{cell.mode}" for dtype in sorted(left)]
    assert silent == []


def test_what_is_hidden_or_absent_says_why() -> None:
    for fault in runner.faults().values():
        reasons = [
            *fault.hidden.values(),
            *fault.absent.values(),
            *(r for cell in fault.cells for r in cell.hidden.values()),
        ]
        assert all(len(reason.split()) >= 5 for reason in reasons), fault.name
        for cell in fault.cells:
            assert not {*cell.hidden} & {*cell.dtypes}, fault.name


FAULTS = (
    "causal-leak", "cached-at-address", "double-backward-wrong", "gain", "gradients-swapped", "input-mutated",
    "last-k-dropped", "mask-off-by-one", "momentum-ignored", "nan-swallowed-by-relu", "norm-over-n-minus-1",
    "row-never-written", "stale-weights", "tf32-for-float32",
)  # fmt: skip
PLANTED = (
    "autocast-weights-stale", "checkpoint-row-overwritten", "export-slice-moved", "export-zero-unsigned",
    "flash-stale-row-sums",
    "foreach-last-parameter-left", "guards-skipped", "inplace-row-left", "int8-zero-point-moved", "jacfwd-row-repeated",
    "offload-copy-unfinished", "row-stride-ignored", "script-relu-lost", "torchao-scales-rolled",
)  # fmt: skip
"""One of each kind of technique that takes no long compilation and no process of its own."""
VARIANTS = ("attention-online-16", "epilogue-fused", "nan-payload", "negative-zero", "norm-welford", "sum-tree")


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_where_it_is_weakest(name: str, store: Store) -> None:
    row = min((row for row in rows() if row.plant == name and not row.hidden), key=lambda row: row.strength)
    outcome = attempted(row, store)
    assert outcome.caught, outcome
    assert outcome.views
    assert outcome.good


def test_views_of_all_draws_get_one_closer_look_alone(store: Store) -> None:
    chosen = next(r for r in rows() if (r.plant, r.workload, r.dtype) == ("last-k-dropped", "matmul-long", "float16"))
    outcome = attempted(chosen, store, seed=4)  # 1.3 times the budget: a second look's samples would allow it
    assert outcome.views == ("gain in all draws",), outcome


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_in_what_a_technique_runs_is_caught_and_the_technique_alone_passes(name: str, store: Store) -> None:
    chosen = next(row for row in rows() if row.plant == name and not row.hidden)
    if not matrix().techniques[chosen.technique].answer(cpu()).ok:
        pytest.skip(f"{chosen.technique} does not exist here")
    plain, outcome = runner.attempts([chosen], 0, runner.bench(cpu(), matrix(), store))
    assert plain.verdict is Verdict.PASS, plain.reason
    assert outcome.caught, outcome


@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_variant_passes(name: str, store: Store) -> None:
    row = next(row for row in rows() if row.plant == name and row.correct)
    outcome = attempted(row, store)
    assert outcome.verdict is Verdict.PASS, outcome.reason
    assert outcome.compared > 0
    assert outcome.views == ()


CELL = Cell("matmul", dtypes=("float32",))
LOUD = PlantedFault("loud", "One percent too much.", (CELL,), lambda s: replacing(out=scaled(1 + s)), (0.01,))
SILENT = PlantedFault("silent", "Nothing is wrong.", (CELL,), lambda _: nothing)
HARMLESS = Variant("harmless", "Eager.", (CELL,), lambda: nothing)
ALARMING = Variant("alarming", "Wrong, in truth.", (CELL,), lambda: replacing(out=scaled(1.01)))


def nowhere(device: Device) -> Capability:
    return unsupported(Code.NO_FEATURE, f"{device.name} has no such unit")


FOREIGN = replace(LOUD, name="foreign", exists=nowhere)
BURIED = replace(
    SILENT,
    name="buried",
    strengths=(0.5, 0.1),
    hidden={("float32", 0.1): "less than rounding"},
    plant=lambda _: nothing,
)


@pytest.fixture
def catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {fault.name: fault for fault in (LOUD, SILENT, FOREIGN, BURIED)}
    correct = {variant.name: variant for variant in (HARMLESS, ALARMING)}
    monkeypatch.setattr(runner, "faults", lambda: planted)
    monkeypatch.setattr(runner, "variants", lambda: correct)


def test_a_fault_acts_from_before_the_technique_prepares_until_it_is_finished(store: Store) -> None:
    seen: list[str] = []

    class Telling(Eager):
        name = "telling"

        def prepare(self, program: Program, mode: Mode, device: Device) -> None:
            seen.append("prepared")
            super().prepare(program, mode, device)

        def finish(self) -> None:
            seen.append("finished")

    @contextlib.contextmanager
    def around(strength: float) -> Iterator[None]:
        seen.append(f"entered with {strength:g}")
        yield
        seen.append("left")

    planted = Planted(Telling(), nothing, lambda: around(0.5))
    case = Case("telling", "matmul", "cpu", "float32", Mode.FORWARD, 1)
    bench = replace(runner.bench(cpu(), matrix(), store), matrix=Matrix({"telling": planted}, matrix().workloads))
    assert bench.run(case).verdict is Verdict.PASS
    assert seen == ["entered with 0.5", "prepared", "finished", "left"]


def test_a_plant_that_nothing_calls_is_an_error_and_not_caught(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = PlantedFault("idle", "Never called.", (CELL,), around=lambda _: swapped(torch.jit, "freeze", lambda p: p()))
    monkeypatch.setattr(runner, "faults", lambda: {"idle": idle})
    outcome = attempted(row("idle"), store)
    assert outcome.verdict is Verdict.ERROR
    assert "nothing planted: expected calls of torch.jit.freeze" in outcome.reason


def test_slow_faults_are_tried_with_fewer_seeds() -> None:
    chosen = [row("loud"), replace(row("slow"), seeds=2)]
    tasks = [(seed, [planted.plant for planted in group]) for group, seed in runner.shared(chosen, 3)]
    assert tasks == [(0, ["loud", "slow"]), (1, ["loud", "slow"]), (2, ["loud"])]
    assert [choice.tried(3) for choice in chosen] == [3, 2]
    assert [choice.tried(1) for choice in chosen] == [1, 1]


def test_techniques_are_planted_in_with_the_names_and_marks_of_their_faults() -> None:
    by_name = {planted.plant: planted for planted in rows()}
    assert by_name["int4-nibbles-swapped"].emulated
    assert not by_name["ranks-bucket-lost"].emulated
    assert (by_name["ranks-bucket-lost"].technique, by_name["ranks-bucket-lost"].seeds) == ("ddp-2", 3)
    assert by_name["stale-leading-dimension"].technique == "eager-resized"


def row(
    plant: str, *, strength: float = 1.0, correct: bool = False, hidden: str = "", dtype: str = "float32"
) -> PlantedRow:
    return PlantedRow(plant, strength, "matmul", FORWARD, dtype, correct, hidden)


@pytest.mark.usefixtures("catalogue")
def test_rows_carry_strengths_and_what_hides_them() -> None:
    assert [planted for planted in rows() if planted.plant in {"loud", "buried", "harmless"}] == [
        row("buried", strength=0.5),
        row("buried", strength=0.1, hidden="less than rounding"),
        row("harmless", correct=True),
        row("loud", strength=0.01),
    ]
    assert str(row("loud", strength=0.01)) == "loud 0.01 in matmul/float32/forward"
    assert str(row("harmless")) == "harmless in matmul/float32/forward"


@pytest.mark.usefixtures("catalogue")
@pytest.mark.parametrize(
    ("name", "correct", "verdict", "good"),
    [
        ("loud", False, Verdict.FAIL, True),
        ("silent", False, Verdict.PASS, False),
        ("harmless", True, Verdict.PASS, True),
        ("alarming", True, Verdict.FAIL, False),
    ],
)
def test_an_attempt_is_good_when_the_verdict_is_what_the_plant_deserves(
    name: str, correct: bool, verdict: Verdict, good: bool, store: Store
) -> None:
    outcome = attempted(row(name, strength=0.01 if name == "loud" else 1.0, correct=correct), store)
    assert (outcome.verdict, outcome.good) == (verdict, good), outcome.reason
    assert ("gain" in outcome.views) is (verdict is Verdict.FAIL)


@pytest.mark.usefixtures("catalogue")
def test_what_is_hidden_gates_nothing_when_it_passes(store: Store) -> None:
    hidden = attempted(row("buried", strength=0.1, hidden="less than rounding"), store)
    assert hidden.verdict is Verdict.PASS
    assert hidden.good
    assert not attempted(row("buried", strength=0.5), store).good


def test_an_error_is_never_good() -> None:
    for planted in (row("x"), row("x", hidden="so"), row("x", correct=True)):
        outcome = SeedResult(planted, 0, Verdict.ERROR, (), "broke")
        assert not outcome.good
        assert not outcome.caught


@pytest.mark.usefixtures("catalogue")
def test_a_plant_that_makes_no_sense_on_a_device_is_refused_with_its_reason(store: Store) -> None:
    outcome = attempted(row("foreign", strength=0.01), store)
    assert (outcome.verdict, outcome.code) == (Verdict.UNSUPPORTED, "no-feature")
    assert "cpu has no such unit" in outcome.reason
    assert not outcome.ran
    assert outcome.good
    assert report.refused([outcome, replace(outcome, seed=1)]) == [f"foreign: {outcome.reason}"]


@pytest.mark.usefixtures("catalogue")
def test_another_seed_is_another_case(store: Store) -> None:
    first, other = (attempted(row("loud", strength=0.01), store, seed) for seed in (0, 1))
    assert first.caught
    assert other.caught
    assert first.reason != other.reason
    matmul = matrix().workloads["matmul"]
    assert seeded(matmul, 0) is matmul
    assert seeded(matmul, 3).name == "matmul+3"


@pytest.mark.usefixtures("catalogue")
def test_rows_that_share_a_bench_open_the_device_once(store: Store) -> None:
    class Counted(Cpu):
        opened = 0

        def open(self) -> None:
            self.opened += 1
            super().open()

    device = Counted()
    shared = runner.bench(device, matrix(), store)
    for _ in range(2):
        assert attempt(row("loud", strength=0.01), 0, shared).caught
    assert device.opened == 1


def test_what_is_planted_is_judged_as_its_technique_is() -> None:
    for technique in matrix().techniques.values():
        planted = Planted(technique, nothing)
        for dtype in technique.dtypes:
            assert planted.precision(dtype) == technique.precision(dtype)
        assert planted.watch is technique.watch
        assert (planted.oracle, planted.keeps_strides, planted.bakes) == (
            technique.oracle,
            technique.keeps_strides,
            technique.bakes,
        )
        assert planted.differentiates_twice == technique.differentiates_twice
        assert planted.warmups == max(1, technique.warmups)


SHOWN = (
    *(
        Fault(FaultKind.VIEW, path, view, draw)
        for path, view, draw in (
            ("out", "row", ""),
            ("out[1]['hidden']", "row", "draw 2"),
            ("out", "column", "zeros"),
            ("out", "gain in all draws", ""),
            ("grad2:input[0]", "element", ""),
        )
    ),
    Fault(FaultKind.PATTERN, "out", "NaN", "nan[0]", measured=1),
    Fault(FaultKind.MUTATED, "input[0]", draw="draw 1"),
    Fault(FaultKind.RERUN, "out", measured=0.1),
    Fault(FaultKind.METADATA, "out", "dtype", "slice"),
    Fault(FaultKind.EVIDENCE, "graphs compiled >= 1", got="0"),
)


def test_what_caught_a_fault_is_named_the_most_frequent_first() -> None:
    case = Case("eager", "matmul", "cpu", "float32", Mode.FORWARD, 1)
    result = caught_by(Record(case, Verdict.FAIL, faults=SHOWN))
    assert result[0] == "row"
    assert set(result) == {
        "row",
        "column",
        "gain in all draws",
        "NaN pattern",
        "mutated",
        "element",
        "rerun",
        "dtype",
        "evidence",
    }
    assert len(result) == len(set(result))


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.ERROR, Verdict.UNSUPPORTED])
def test_only_a_failure_was_caught_by_something(verdict: Verdict) -> None:
    case = Case("eager", "matmul", "cpu", "float32", Mode.FORWARD, 1)
    assert caught_by(Record(case, verdict, code="no-feature" if not verdict.executed else "", faults=SHOWN)) == ()


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is here; everything else is not asked for."""
    facts = HostFacts.__new__(HostFacts)
    monkeypatch.setattr(
        "accelcheck.commands.common.probe",
        lambda names, **_: ({name: Status(name, SUPPORTED) for name in names}, facts),
    )


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are attempted in this process, which knows the planted catalogue."""

    def run(
        device: str, chosen: Sequence[PlantedRow], seeds: int, jobs: int, folder: Path
    ) -> Iterator[list[SeedResult]]:
        own = Store(folder)
        for seed in range(seeds):
            yield [attempted(choice, own, seed) for choice in chosen]

    monkeypatch.setattr(runner, "run", run)


@pytest.mark.usefixtures("present", "catalogue", "inline")
@pytest.mark.parametrize(("device", "seeds"), [("cpu", 3), ("xla", 1)])
def test_the_cpu_is_tried_with_three_seeds_and_a_device_that_compiles_each_case_with_one(
    device: str, seeds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "run", lambda *_: iter(()))
    cli.main(["selftest", f"--device={device}", "--fault=loud"])
    assert f"1 rows x {seeds} seeds on {device}" in capsys.readouterr().out


def test_an_unknown_device_is_answered_with_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--device=cdua"]) == 4
    told = capsys.readouterr().err
    assert told.startswith("accelcheck: unknown device 'cdua'. Did you mean 'cuda'? Legal values: cpu, ")


@pytest.mark.usefixtures("present")
def test_an_unknown_fault_is_answered_with_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--fault=causal-lek"]) == 4
    told = capsys.readouterr().err
    assert "unknown fault 'causal-lek'. Did you mean 'causal-leak'?" in told
    assert all(name in told for name in ("gain", "tanh-gelu", "negative-zero"))


def test_absent_devices_have_no_plants(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    absent = {"cuda": Status("cuda", unavailable(Code.NO_HARDWARE, "no NVIDIA GPU found"))}
    monkeypatch.setattr("accelcheck.commands.common.probe", lambda _, **__: (absent, None))
    assert cli.main(["selftest", "--device=cuda"]) == 5
    assert "no NVIDIA GPU found" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_number_below_one_is_refused(option: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["selftest", f"{option}={number}"])
    assert left.value.code == 4
    assert option in capsys.readouterr().err


@pytest.mark.usefixtures("present")
@pytest.mark.slow
def test_one_fault_and_one_variant_in_a_process_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["selftest", "--seeds=1", "--jobs=1", "--fault=conv-bias-dropped", "--fault=negative-zero"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr().out
    chosen = [planted for planted in rows() if planted.plant in {"conv-bias-dropped", "negative-zero"}]
    owed = sum(not choice.correct for choice in chosen)
    assert f"{len(chosen)} rows x 1 seeds on cpu, 1 processes" in told
    assert f"1 faults: {owed} of {owed} verdicts caught them; 1 correct variants: 0 false alarms in " in told


@pytest.mark.slow(after=1)
@pytest.mark.usefixtures("present", "inline", "catalogue")
@pytest.mark.parametrize(
    ("plants", "code", "line"),
    [
        (("loud", "harmless"), 0, "1 faults: 2 of 2 verdicts caught them; 1 correct variants: 0 false alarms in 2"),
        (("silent",), 1, "survived: silent in matmul/float32/forward: pass with seeds 0, 1"),
        (("alarming",), 1, "false alarm: alarming in matmul/float32/forward: fail with seeds 0, 1: out: view "),
        (("buried",), 1, "survived: buried 0.5 in matmul/float32/forward: pass with seeds 0, 1"),
        (("foreign",), 5, "foreign: "),
    ],
)
def test_the_exit_code_says_whether_verdicts_are_right(
    plants: tuple[str, ...], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["selftest", "--seeds=2", *(f"--fault={plant}" for plant in plants)]) == code
    assert line in capsys.readouterr().out


@pytest.mark.usefixtures("present", "catalogue")
def test_what_was_done_before_a_process_died_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(
        device: str, chosen: Sequence[PlantedRow], seeds: int, jobs: int, folder: Path
    ) -> Iterator[list[SeedResult]]:
        yield [attempted(chosen[0], Store(folder), 0)]
        raise runner.DiedError("a process of the selftest died")

    monkeypatch.setattr(runner, "run", run)
    assert cli.main(["selftest", "--seeds=2", "--fault=loud"]) == 1
    told = capsys.readouterr()
    assert "1 faults: 1 of 1 verdicts caught them" in told.out
    assert told.err == "accelcheck: a process of the selftest died\n"


def test_nothing_is_planted_where_a_device_is_wrong_at_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(("*/matmul/*",), Verdict.FAIL, 9.0, "half the time", "link", "owner", dt.date(9999, 1, 1), match=".")
    monkeypatch.setattr(runner, "unsteady", lambda _: Ledger((entry,)))
    chosen = [planted for planted in rows() if planted.workload == "matmul" and planted.dtype == "float32"][:3]
    attempts = runner.attempts(chosen, 0, runner.bench(cpu(), matrix(), Store(tmp_path)))
    assert len(attempts) == 4
    assert {(item.ran, item.code) for item in attempts} == {(False, runner.DEVICE_FAILS)}
    assert attempts[0].reason == "float32: with some seeds cpu fails by itself: half the time"


class Doubling(Eager):
    """Wrong without any plant."""

    name = "doubling"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        replacing(out=scaled(2.0))(program)


def test_what_a_device_gets_wrong_by_itself_is_left_out_and_anything_else_is_a_false_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Variant("broken", "None.", (Cell("matmul"),), lambda: nothing, technique=Doubling())
    monkeypatch.setattr(runner, "variants", lambda: {"broken": broken})
    planted = PlantedRow("broken", 1.0, "matmul", Mode.FORWARD, "float32", correct=True)
    plain, _ = runner.attempts([planted], 0, runner.bench(cpu(), matrix(), Store(tmp_path)))
    assert plain.ran
    assert not plain.good
    ledger = tmp_path / "cpu.toml"
    ledger.write_text(
        'schema = 2\n[[entry]]\ncases = ["doubling/matmul/cpu/float32/forward"]\nverdict = "fail"\nmatch = "out: '
        'view"\nat-most = 1.5\n'
        'reason = "known"\nlink = "x"\nowner = "x"\nexpires = 9999-01-01\n'
    )
    monkeypatch.setattr(runner, "shipped", lambda _: (ledger,))
    attempts = runner.attempts([planted], 0, runner.bench(cpu(), matrix(), Store(tmp_path)))
    assert [(o.ran, o.code) for o in attempts] == [(False, runner.DEVICE_FAILS)] * 2
