"""Plants defects of device backends in single operators, and finds the cases that catch them, by level.

    python benchmarks/device_defects.py 38 86 89                                  # these alone
    python benchmarks/device_defects.py --json=baselines/cpu/device_defects.json  # all

The defects are those of `device_defect_list.py` and `further_defect_list.py`: mistakes that backends make. Eager runs
on the CPU, with a wrong result of an operator where a call meets the defect's condition. The cases of levels 1 to 3 run
once without a defect, to see which calls would meet one. The cases that reach a defect are then judged with it, those
of level 1 first, until one fails at a place where it does not fail without the defect. Of bundles and families of
operators, a few of the parts that reach it are judged, and all of them before the next level. Three defects show in
other techniques than eager, such as a fused optimizer, and are planted there. Half precision runs where a defect needs
it. All take six minutes of one core, two of them for the first run.

A defect is `caught` where a case fails so, and `not reached` where no call met its condition.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import further_defect_list  # noqa: F401 - adds to DEFECTS
import torch
from device_defect_list import DEFECTS, FUNCTIONS, Call, Defect
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.selection import Selection
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.torch_names import TorchDispatchMode, pytree
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.runner import bench
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Draw, draws
from accelcheck.workloads.problem import divided

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from accelcheck.core.journal import Record

LEVELS = (1, 2, 3)
MODES = (Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN, Mode.RANDOM, Mode.TRAJECTORY)
"""Modes that run, in the order in which the cases of a level are judged."""
FEW_LABELS = 12
"""Parts of a bundle that are judged at first."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Hands calls of ATen operators to a watcher."""

    def __init__(self, watcher: Plant | Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.watcher.call(func, func.overloadpacket.__name__, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Hands calls of torch's functions to a watcher."""

    def __init__(self, watcher: Plant | Watch) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        return self.watcher.call(func, name, args, kwargs or {}) if name in FUNCTIONS else func(*args, **(kwargs or {}))


class Plant:
    """Gives a defect's results, and counts them."""

    def __init__(self, defect: Defect) -> None:
        self.defect = defect
        self.hits = 0

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrong = self.defect.wrong(Call(func, args, kwargs)) if name in self.defect.operators else None
        if wrong is None:
            return func(*args, **kwargs)
        self.hits += 1
        if self.defect.function or _drawn_or_written(func):
            return wrong()
        right, shape = pytree.tree_flatten(func(*args, **kwargs))
        given = pytree.tree_leaves(wrong(), is_leaf=lambda value: value is None)
        return pytree.tree_unflatten([*map(_in_strides, right, given)], shape)


def _drawn_or_written(operator: torch._ops.OpOverload) -> bool:
    """True if an ATen operator draws numbers or writes to its arguments, so that it cannot be called twice."""
    schema = operator._schema  # noqa: SLF001 - torch has no public schema
    return torch.Tag.nondeterministic_seeded in operator.tags or schema.is_mutable


def _in_strides(right: Any, given: Any) -> Any:
    """A result in the strides that the right operator gives, which no defect is about."""
    if not isinstance(right, Tensor) or not isinstance(given, Tensor):
        return given
    same = right.shape == given.shape and right.dtype == given.dtype
    return torch.empty_like(right).copy_(given) if same and right.stride() != given.stride() else given


class Watch:
    """Counts, for defects, the calls that meet their conditions."""

    def __init__(self, defects: Iterable[Defect]) -> None:
        self.hits: Counter[int] = Counter()
        self.defects: dict[str, list[Defect]] = defaultdict(list)
        for defect in defects:
            for name in defect.operators:
                self.defects[name].append(defect)
        self.inside = False

    def call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in self.defects and not self.inside:
            self.inside = True  # what conditions compute does not count
            call = Call(func, args, kwargs)
            for defect in self.defects[name]:
                self.hits[defect.number] += defect.wrong(call) is not None
            self.inside = False
        return func(*args, **kwargs)


@contextlib.contextmanager
def planted(defect: Defect) -> Iterator[Plant]:
    """Context in which a defect is in place."""
    plant = Plant(defect)
    with Functions(plant) if defect.function else Operators(plant):
        yield plant


@dataclass(frozen=True)
class Reached:
    """A case that reaches a defect, with the labels of the parts that do; none for a workload without parts."""

    case: Case
    labels: tuple[str, ...]

    @property
    def order(self) -> tuple[Any, ...]:
        """Key by which cases are sorted: level, mode, float32 first, workloads without parts first."""
        case = self.case
        return case.level, MODES.index(case.mode), case.dtype != "float32", bool(self.labels), case.id


@dataclass(frozen=True)
class Outcome:
    """Outcome of a defect.

    Attributes:
        number, defect, origin, operators: Those of `Defect`.
        outcome: ``caught``, ``missed`` or ``not reached``.
        case, level, first: The case that caught it, its level and first fault; empty and 0 where none did.
        reached: Number of cases that reach it, by level.
    """

    number: int
    defect: str
    origin: str
    operators: str
    outcome: str
    case: str
    level: int
    first: str
    reached: Mapping[str, int]


def census(defects: Sequence[Defect], matrix: Matrix) -> dict[int, list[Reached]]:
    """The cases of levels 1 to 3 that reach each defect, by its number, in the order in which they are judged."""
    reached: dict[int, list[Reached]] = defaultdict(list)
    names = tuple(sorted({defect.technique for defect in defects}))
    for case in matrix.cases(Selection(("cpu",), techniques=names, level=max(LEVELS)), MODES):
        here = [defect for defect in defects if defect.technique == case.technique]
        here = [defect for defect in here if case.dtype == "float32" or defect.half]
        labels: dict[int, list[str]] = defaultdict(list)
        for label, numbers in _watched(case, here, matrix) if here else ():
            for number in numbers:
                labels[number] += [label] if label not in labels[number] else []
        for number, found in labels.items():
            reached[number].append(Reached(case, tuple(filter(None, found))))
    return {defect.number: sorted(reached[defect.number], key=lambda one: one.order) for defect in defects}


def _watched(case: Case, defects: Sequence[Defect], matrix: Matrix) -> Iterator[tuple[str, set[int]]]:
    """The defects that each part of a case reaches; an empty label for a workload without parts."""
    technique, workload = matrix.techniques[case.technique], matrix.workloads[case.workload]
    mode = Mode.BACKWARD if case.mode is Mode.RANDOM else case.mode
    probed = draws(workload, mode, technique.admits) if mode in {Mode.FORWARD, Mode.BACKWARD} else [Draw()]
    for draw in (draw for draw in probed if not draw.number):
        problem = draw.problem(workload, case.seed, case.dtype)
        program = Program.of(problem, dtype=getattr(torch, case.dtype), seed=case.seed)
        with contextlib.ExitStack() as stack:
            stack.callback(technique.finish)
            stack.enter_context(contextlib.suppress(Unsupported))
            technique.prepare(program, mode, Cpu())
            module = program.module
            whole = divided(module) if workload.divisible else None
            labels = whole.labels if whole else ("",)
            for label in labels:
                program.module = whole.without(frozenset(labels) - {label}) if whole else module
                watch = Watch(defects)
                with Functions(watch), Operators(watch):
                    program.run(mode)
                yield label, {number for number, hits in watch.hits.items() if hits}


def _change(program: Program, defect: Defect) -> None:
    """Plants a defect in every run of a program."""
    plain = program.within

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        with planted(defect), plain():
            yield

    program.within = within


def judged(defect: Defect | None, case: Case, labels: Sequence[str], matrix: Matrix, store: Store) -> Record:
    """The record of a case with a defect, or without one; of some parts alone where there are labels."""
    workload = matrix.workloads[case.workload]
    if labels:
        workload = workload.without(frozenset(divided(workload.problem(1).module).labels) - frozenset(labels))
    technique = matrix.techniques[case.technique]
    if defect is not None:
        technique = Planted(technique, functools.partial(_change, defect=defect), warm=False)
    reduced = replace(matrix, techniques={technique.name: technique}, workloads={workload.name: workload})
    return bench(Cpu(), reduced, store).run(replace(case, workload=workload.name))


def _first(defect: Defect, case: Case, labels: Sequence[str], matrix: Matrix, store: Store) -> str:
    """The first fault of a case that a defect alone makes; empty where there is none."""
    record = judged(defect, case, labels, matrix, store)
    if record.verdict is not Verdict.FAIL:
        return ""
    known = {fault.path for fault in judged(None, case, labels, matrix, store).faults}
    return next((str(fault) for fault in record.faults if fault.path not in known), "")


def outcome(defect: Defect, reached: Sequence[Reached], matrix: Matrix) -> Outcome:
    """Judges a defect by the cases that reach it, in their order, and returns its outcome."""
    counts = {str(level): sum(one.case.level == level for one in reached) for level in LEVELS}
    facts = defect.number, defect.sentence, defect.origin, " ".join(sorted(defect.operators))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for level in LEVELS:
            here = [one for one in reached if one.case.level == level]
            spread = [(one, one.labels[:: max(1, len(one.labels) // FEW_LABELS)][:FEW_LABELS]) for one in here]
            whole = [(one, one.labels) for one in here if len(one.labels) > FEW_LABELS]
            for one, labels in spread + whole:
                if first := _first(defect, one.case, labels, matrix, store):
                    return Outcome(*facts, "caught", one.case.id, level, first, counts)
    return Outcome(*facts, "missed" if reached else "not reached", "", 0, "", counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=int, nargs="*", metavar="NUMBER", help="defects to plant (default: all)")
    parser.add_argument("--json", type=Path, help="file to store the outcomes in")
    arguments = parser.parse_args()
    if unknown := set(arguments.numbers) - DEFECTS.keys():
        parser.error(f"no defects: {sorted(unknown)}; there are {', '.join(map(str, sorted(DEFECTS)))}")
    warnings.simplefilter("ignore")
    defects = [DEFECTS[number] for number in arguments.numbers or sorted(DEFECTS)]
    matrix = Matrix.load()
    reached = census(defects, matrix)
    rows = []
    for defect in defects:
        row = outcome(defect, reached[defect.number], matrix)
        rows.append(row)
        where = f"level {row.level}: {row.case}" if row.level else row.outcome
        print(f"{row.number:3}  {where}  {row.defect}", flush=True)
    levels = {str(level): sum(row.level == level for row in rows) for level in LEVELS}
    counts = {word: sum(row.outcome == word for row in rows) for word in ("caught", "missed", "not reached")}
    print(f"of {len(rows)} defects: {counts}; caught by level: {levels}")
    if arguments.json:
        stored = {"counts": counts, "levels": levels, "defects": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
