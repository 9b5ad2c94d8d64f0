"""Checks that cases do not change each other's figures: random pairs in either order, and each case alone.

    python benchmarks/order.py [--pairs 100] [--level 1] [--seed 0] [--jobs 2]

Some cases have a technique that leaves global state changed. Records must be equal bit for bit, but for times; each
order runs in its own process, which computes its own references.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.checks.execute import Bench
from accelcheck.core.capability import SUPPORTED
from accelcheck.core.case import TIMED, Case, Mode
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Status
from accelcheck.devices.cpu import Cpu
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.leaks import LEAKS
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.cache import clean_process
from accelcheck.verify.oracle import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelcheck.core.journal import Record
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Program

LEAKING = 0.4
"""Share of the pairs with a leaking technique."""


def leaking(eager: Technique, name: str, leak: Callable[[], object]) -> Technique:
    """Eager with a leak: it leaves something changed."""

    def change(program: Program) -> None:
        leak()

    technique = Planted(eager, change)
    technique.name = f"leaves-{name.replace(' ', '-')}"
    return technique


@functools.cache
def matrix() -> Matrix:
    """All techniques, and the leaking ones."""
    known = Matrix.load()
    leaks = [leaking(known.techniques["eager"], name, leak) for name, leak in LEAKS.items()]
    return Matrix({**known.techniques, **{technique.name: technique for technique in leaks}}, known.workloads)


def pairs(count: int, level: int, seed: int) -> list[tuple[Case, Case]]:
    """Random pairs of cases."""
    generator = random.Random(seed)
    modes = [mode for mode in Mode if mode not in TIMED]
    cases = [
        case
        for case in matrix().cases(Selection(("cpu",), level=level), modes)
        if not case.technique.startswith("leaves-") and matrix().techniques[case.technique].answer(Cpu()).ok
    ]
    leaks = [
        Case(f"leaves-{name.replace(' ', '-')}", "mlp", "cpu", "float32", mode, 1)
        for name in LEAKS
        for mode in (Mode.FORWARD, Mode.BACKWARD)
    ]
    return [
        (generator.choice(leaks if generator.random() < LEAKING else cases), generator.choice(cases))
        for _ in range(count)
    ]


def told(record: Record) -> dict[str, Any]:
    """The fields of a record that hold no times."""
    answer = record.as_json()
    return {
        name: answer[name]
        for name in ("verdict", "reason", "faults", "evidence", "figures", "compared", "eager_excess")
    }


def ran(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns the records of these cases, run in sequence in this fresh process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="accelcheck-order-") as folder:
        clean = clean_process(matrix().parts())
        store = Store(Path(folder), clean)
        bench = Bench(matrix(), {"cpu": Cpu()}, {"cpu": Status("cpu", SUPPORTED)}, store)
        try:
            return [told(bench.run(case)) for case in cases]
        finally:
            clean.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    for name, value in (("pairs", 100), ("level", 1), ("seed", 0), ("jobs", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    chosen = pairs(given.pairs, given.level, given.seed)
    single = list(dict.fromkeys(case for pair in chosen for case in pair))
    tasks: list[tuple[Case, ...]] = [(case,) for case in single]
    tasks += [order for first, other in chosen for order in ((first, other), (other, first))]
    started = time.monotonic()
    # A fork for each task, with torch imported and no case run.
    with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=1) as pool:
        records = pool.map(ran, tasks, chunksize=1)
    alone = {case: task for (case,), (task,) in zip(tasks[: len(single)], records[: len(single)], strict=True)}
    differing = [
        f"{case.id} in {' then '.join(item.id for item in order)}: {name} is {answer[name]!r}, "
        f"alone {alone[case][name]!r}"
        for order, answers in zip(tasks[len(single) :], records[len(single) :], strict=True)
        for case, answer in zip(order, answers, strict=True)
        for name in answer
        if answer[name] != alone[case][name]
    ]
    for line in differing:
        print(line[:2000])
    verdicts = [answer["verdict"] for answers in records for answer in answers]
    leaks = sum(first.technique.startswith("leaves-") for first, _ in chosen)
    counted = ", ".join(f"{verdicts.count(name)} {name}" for name in sorted(set(verdicts)))
    print(
        f"{given.pairs} pairs ({leaks} with a leaking technique) in either order, {len(single)} cases alone: "
        f"{len(verdicts)} records ({counted}), {len(differing)} differences, {time.monotonic() - started:.0f} s"
    )
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
