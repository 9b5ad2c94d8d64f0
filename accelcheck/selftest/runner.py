"""Runs planted faults and correct variants, and records their verdicts."""

import functools
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelcheck.checks.execute import Bench
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.registry import discover, index
from accelcheck.devices.base import Device, Status
from accelcheck.expectations.ledger import Ledger, hold, shipped, unsteady
from accelcheck.plugin import registered
from accelcheck.selftest.faults.base import EVERY, Planted, PlantedFault, Variant
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.base import Technique
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.cache import clean_process
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload

PLAIN = ", nothing planted"
"""Suffix of a technique's name in a row without a plant."""
DEVICE_FAILS = "device-fails"
"""Code of rows that are not attempted because the device fails their workload without a plant."""


class DiedError(RuntimeError):
    """A process of the selftest ended before its work was done."""


@dataclass(frozen=True, slots=True)
class PlantedRow:
    """One line of the kill table: a plant at one strength, in one workload, mode and dtype.

    Attributes:
        plant: Name of the fault or variant.
        strength: Strength of a fault; 1 where it has no degrees.
        workload, mode, dtype: Cell of the plant.
        correct: True for a correct variant.
        hidden: Reason why a fault may be missed in this row; empty where it must be caught.
        technique: Name of the technique that it is planted under.
        emulated: True if it is planted in accelcheck's own code, see `PlantedFault.emulated`.
        seeds: Largest number of seeds; 0 for as many as are asked for.
    """

    plant: str
    strength: float
    workload: str
    mode: Mode
    dtype: str
    correct: bool = False
    hidden: str = ""
    technique: str = "eager"
    emulated: bool = False
    seeds: int = 0

    def tried(self, seeds: int) -> int:
        """Number of seeds that it runs with where `seeds` are asked for."""
        return min(seeds, self.seeds or seeds)

    def __str__(self) -> str:
        degree = f" {self.strength:g}" if self.strength != 1.0 else ""
        return f"{self.plant}{degree} in {self.workload}/{self.dtype}/{self.mode}"


@dataclass(frozen=True, slots=True)
class SeedResult:
    """The outcome of a row with one seed.

    Attributes:
        views: Views and other checks that found something wrong.
        code: Code of the reason why it was not run.
        compared: Number of elements compared.
        seconds: Wall time by phase.
    """

    row: PlantedRow
    seed: int
    verdict: Verdict
    views: tuple[str, ...]
    reason: str
    code: str = ""
    compared: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        """True if it was run."""
        return self.verdict.executed

    @property
    def plain(self) -> bool:
        """True for a technique with nothing planted."""
        return self.row.plant.endswith(PLAIN)

    @property
    def judged(self) -> bool:
        """True for a verdict about the result: `pass` or `fail`, not `error`."""
        return self.verdict in {Verdict.PASS, Verdict.FAIL}

    @property
    def caught(self) -> bool:
        """True if the verdict calls the result wrong; an `error` does not."""
        return self.verdict is Verdict.FAIL

    @property
    def good(self) -> bool:
        """True for the right verdict: `fail` for a fault, also `pass` for a hidden one; `pass` for a variant."""
        if not self.ran:
            return True
        if self.row.correct:
            return self.verdict is Verdict.PASS
        return self.caught or (bool(self.row.hidden) and self.verdict is Verdict.PASS)


@dataclass(frozen=True, slots=True)
class Ground:
    """Techniques, workloads, modes and dtypes that faults can be planted in, to count those with a planted fault.

    Attributes:
        techniques: Names of the matrix's techniques, family by family.
        families: Family by name of technique; also of those that the catalogue makes for itself.
        absent: Cells without such a fault, each with the reason.
    """

    techniques: Sequence[str]
    families: Mapping[str, str]
    workloads: Sequence[str]
    modes: Sequence[Mode]
    dtypes: Sequence[str]
    absent: Sequence[str]


@functools.cache
def faults() -> Mapping[str, PlantedFault]:
    """The faults of the catalogue, by name."""
    return index("fault", discover("accelcheck.selftest.faults", "FAULTS"))


@functools.cache
def variants() -> Mapping[str, Variant]:
    """The correct variants, by name."""
    return index("variant", discover("accelcheck.selftest.faults", "VARIANTS"))


def _own() -> list[Technique]:
    """Techniques that the catalogue makes for itself."""
    plants: list[PlantedFault | Variant] = [*faults().values(), *variants().values()]
    return [plant.technique for plant in plants if isinstance(plant.technique, Technique)]


def rows() -> list[PlantedRow]:
    """All rows of the kill table, ordered by workload, so that rows that share references follow each other."""
    planted_rows = [
        PlantedRow(
            f.name,
            strength,
            cell.workload,
            cell.mode,
            dtype,
            hidden=cell.hidden.get(dtype, f.hidden.get((dtype, strength), "")),
            technique=_name(f),
            emulated=f.emulated,
            seeds=f.seeds,
        )
        for f in faults().values()
        for cell in f.cells
        for dtype in (*cell.dtypes, *cell.hidden)
        for strength in f.strengths
    ]
    planted_rows += [
        PlantedRow(v.name, 1.0, cell.workload, cell.mode, dtype, correct=True, technique=_name(v))
        for v in variants().values()
        for cell in v.cells
        for dtype in cell.dtypes
    ]
    return sorted(planted_rows, key=lambda row: (row.workload, row.mode, row.dtype, row.plant, -row.strength))


def absent(chosen: Iterable[PlantedRow]) -> list[str]:
    """Cells without such a fault, of the faults in these rows, each with the reason."""
    names = {row.plant for row in chosen}
    return sorted(
        f"{f.name} in {cell.workload}/{dtype}/{cell.mode}: {reason}"
        for f in faults().values()
        for cell in f.cells
        for dtype, reason in f.absent.items()
        if f.name in names and dtype not in cell.dtypes
    )


def ground(chosen: Iterable[PlantedRow]) -> Ground:
    """The built-in matrix, and the cells that these rows leave out for a stated reason."""
    matrix = Matrix.load()
    every = matrix.techniques.values()
    return Ground(
        techniques=[t.name for t in sorted(every, key=lambda t: (t.family, t.name))],
        families={t.name: t.family for t in (*_own(), *every)},
        workloads=sorted(matrix.workloads),
        modes=[mode for mode in Mode if any(technique.covers(mode) for technique in every)],
        dtypes=EVERY,
        absent=absent(chosen),
    )


def _name(plant: PlantedFault | Variant) -> str:
    return plant.technique if isinstance(plant.technique, str) else plant.technique.name


def bench(device: Device, matrix: Matrix, store: Store) -> Bench:
    """Make the bench for attempts on a device that is present; it opens the device once, so keep it."""
    statuses = {device.name: Status(device.name, SUPPORTED)}
    return Bench(matrix, {device.name: device}, statuses, store)


def attempt(row: PlantedRow, seed: int, bench: Bench) -> SeedResult:
    """Plant a fault or variant, run it, and judge the result; each seed gives other parameters and inputs."""
    there = _plant(row).exists(_device(bench))
    if not there.ok:
        return SeedResult(row, seed, there.verdict or Verdict.UNSUPPORTED, (), str(there), str(there.code))
    return _outcome(row, seed, _record(planted(row, bench.matrix), row, seed, bench))


def attempts(rows: Sequence[PlantedRow], seed: int, bench: Bench) -> list[SeedResult]:
    """Attempt rows of one workload, mode and dtype, after each of their techniques without a plant.

    Rows whose technique fails without a plant, as the device's ledger expects, or fails on the device with some seeds,
    are not attempted. A failure that no ledger expects is a false alarm, as with any correct variant.
    """
    results: list[SeedResult] = []
    plains: dict[str, SeedResult] = {}
    for row in rows:
        if not _plant(row).exists(_device(bench)).ok:
            results.append(attempt(row, seed, bench))
            continue
        technique = _base(row, bench.matrix)
        if technique.name not in plains:
            plains[technique.name] = _plain(technique, row, seed, bench)
            results.append(plains[technique.name])
        plain = plains[technique.name]
        results.append(attempt(row, seed, bench) if plain.ran else replace(plain, row=row))
    return results


def _plain(technique: Technique, row: PlantedRow, seed: int, bench: Bench) -> SeedResult:
    name, device, plant = f"{technique.name}{PLAIN}", _device(bench).name, _plant(row)
    plain = replace(row, plant=name, strength=1.0, correct=True, hidden="", emulated=False, seeds=0)
    case = Case(technique.name, row.workload, device, row.dtype, row.mode, 1)
    if entries := unsteady(device).covering(case.id):
        reason = f"{row.dtype}: with some seeds {device} fails by itself: {entries[0].reason}"
        return SeedResult(plain, seed, Verdict.UNSUPPORTED, (), reason, DEVICE_FAILS)
    record = _record(Planted(technique, nothing, warm=isinstance(plant, Variant) or plant.warm), row, seed, bench)
    known = hold(replace(record, case=case), _ledger(*shipped((device,))))
    if known.verdict is Verdict.XFAIL:
        reason = f"{case.id} fails by itself: {known.headline}"
        return SeedResult(plain, seed, Verdict.UNSUPPORTED, (), reason, DEVICE_FAILS)
    return _outcome(plain, seed, record)


@functools.cache
def _ledger(*paths: Path) -> Ledger:
    return Ledger.load(paths).of_any_size()  # other seeds, other sizes


def _record(technique: Technique, row: PlantedRow, seed: int, bench: Bench) -> Record:
    workload = seeded(bench.matrix.workloads[row.workload], seed)
    matrix = Matrix({technique.name: technique}, {workload.name: workload})
    case = Case(technique.name, workload.name, _device(bench).name, row.dtype, row.mode, 1)
    return replace(bench, matrix=matrix).run(case)


def _device(bench: Bench) -> Device:
    (device,) = bench.devices.values()
    return device


def _outcome(row: PlantedRow, seed: int, record: Record) -> SeedResult:
    return SeedResult(
        row, seed, record.verdict, caught_by(record), record.why, record.code, record.compared, record.seconds
    )


def planted(row: PlantedRow, matrix: Matrix) -> Planted:
    """The technique of a row with its plant."""
    plant, base = _plant(row), _base(row, matrix)
    if isinstance(plant, Variant):
        return Planted(base, plant.plant())
    return Planted(base, plant.plant(row.strength), lambda: plant.around(row.strength), warm=plant.warm)


def _base(row: PlantedRow, matrix: Matrix) -> Technique:
    technique = _plant(row).technique
    return technique if isinstance(technique, Technique) else matrix.techniques[technique]


def _plant(row: PlantedRow) -> PlantedFault | Variant:
    return variants()[row.plant] if row.correct else faults()[row.plant]


def seeded(workload: Workload, number: int) -> Workload:
    """The same workload with other numbers, since its name gives a case's seed."""
    return replace(workload, name=f"{workload.name}+{number}") if number else workload


def caught_by(record: Record) -> tuple[str, ...]:
    """Distinct views and other checks that found something wrong, the most frequent first."""
    wrong = record.faults if record.verdict is Verdict.FAIL else ()
    return tuple(name for name, _ in Counter(fault.what for fault in wrong).most_common())


def shared(chosen: Sequence[PlantedRow], seeds: int) -> list[tuple[list[PlantedRow], int]]:
    """Groups of rows that share references, each with a seed, in the order of work."""
    groups: dict[tuple[str, Mode, str], list[PlantedRow]] = {}
    for row in chosen:
        groups.setdefault((row.workload, row.mode, row.dtype), []).append(row)
    # Slow groups, which have few seeds, and large ones first, so that no process ends long after the others.
    ordered = sorted(groups.values(), key=lambda group: (min(row.tried(seeds) for row in group), -len(group)))
    return [
        (wanted, seed)
        for group in ordered
        for seed in range(seeds)
        if (wanted := [row for row in group if seed < row.tried(seeds)])
    ]


def run(device: str, chosen: Sequence[PlantedRow], seeds: int, jobs: int, folder: Path) -> Iterator[list[SeedResult]]:
    """Attempt rows with all seeds in `jobs` worker processes, and yield groups of results in any order.

    Workers inherit the environment, so set the variables that torch reads at import before. Rows that state fewer
    seeds run with the first ones. The folder is of this run alone, for the references that the processes share.

    Raises:
        DiedError: A process died. The results up to then have been yielded.
    """
    tasks = [(device, group, seed, str(folder)) for group, seed in shared(chosen, seeds)]
    context = multiprocessing.get_context("spawn")  # torch's threads and a backend's client do not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = [pool.submit(_attempts, *task) for task in tasks]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BrokenProcessPool as error:
            raise DiedError(
                "a process of the selftest died: run it again with --jobs=1 and --fault to find the plant that kills it"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@functools.cache
def _bench(device: str, folder: str) -> Bench:
    matrix = Matrix.load()
    return bench(registered.device(device), matrix, Store(Path(folder), clean_process([*matrix.parts(), *_own()])))


def _attempts(device: str, group: list[PlantedRow], seed: int, folder: str) -> list[SeedResult]:
    return attempts(group, seed, _bench(device, folder))
