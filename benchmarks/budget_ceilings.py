"""Stores the largest budget of each reference and view: accelcheck/expectations/ceilings.json.

    python benchmarks/budget_ceilings.py                       # level 2 on the CPU; 8 minutes on one core
    python benchmarks/budget_ceilings.py --workload cnn mlp    # some workloads alone
    python benchmarks/budget_ceilings.py --raise               # where budgets must be larger: say why in CHANGELOG.md
    python benchmarks/budget_ceilings.py --seeds 20            # the first draw of other seeds; nothing is stored

Computes the oracle, the rounding samples and eager for every draw of every case of level 2, and nothing else: no
technique runs. Ceilings only go down: the smaller of the stored and the measured one is kept, unless ``--raise`` is
given. The exit status is 1 where a budget is above its ceiling (`accelcheck.expectations.ceilings.HEADROOM` times) and
stays there, or where a workload has no reference with one of the seeds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from accelcheck.core.case import Mode
from accelcheck.core.selection import Selection
from accelcheck.expectations import ceilings
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import compute
from accelcheck.verify.oracle_runs import Source
from accelcheck.verify.reference import OracleError
from accelcheck.verify.views import GATES
from accelcheck.workloads.probes import draws

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from accelcheck.core.case import Case
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload

LEVEL = 2
MODES = (Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN)
"""Modes of the cases that have budgets by view."""


def references(workloads: Sequence[str] = ()) -> Iterator[tuple[str, Case, Technique, Workload]]:
    """The cases that have budgets by view, each with the key of its reference; several have the same one."""
    matrix = Matrix.load()
    for case in matrix.cases(Selection(("cpu",), workloads=tuple(workloads), level=LEVEL), MODES):
        technique, workload = matrix.techniques[case.technique], matrix.workloads[case.workload]
        name = ceilings.key(case.workload, case.dtype, case.mode, technique.precision(case.dtype), technique.oracle)
        yield name, case, technique, workload


def measured(workloads: Sequence[str] = (), without: Container[str] = ()) -> dict[str, dict[str, float]]:
    """The largest budget over paths and draws, by key and view, rounded up to three digits.

    Args:
        workloads: Globs; all where there are none.
        without: Keys that are left out.
    """
    torch.set_num_threads(1)
    table: dict[str, dict[str, float]] = {}
    seen: set[tuple[str, str]] = set()
    for name, case, technique, workload in references(workloads):
        for draw in () if name in without else draws(workload, case.mode, technique.admits):
            if (name, str(draw)) in seen:
                continue
            seen.add((name, str(draw)))
            reference = compute(Source(workload, technique, case.seed, case.dtype, case.mode, draw))
            for view, (budget, _) in ceilings.largest(reference.budgets).items():
                if view in GATES:
                    views = table.setdefault(name, {})
                    views[view] = max(views.get(view, 0.0), float(f"{budget * 1.005:.2e}"))
        if sys.stderr.isatty():
            print(f"{len(seen)} references, {name}", end="\033[K\r", file=sys.stderr, flush=True)
    return table


def refused(workloads: Sequence[str], seeds: int) -> Iterator[str]:
    """A line for each reference and seed, from 1 on, with which no reference can be had or trusted."""
    torch.set_num_threads(1)
    seen: set[str] = set()
    for name, case, technique, workload in references(workloads):
        if name not in seen:
            seen.add(name)
            for seed in range(1, seeds + 1):
                try:
                    compute(Source(workload, technique, case.seed + seed, case.dtype, case.mode))
                except OracleError as error:
                    yield f"{name}, seed {seed}: {error}"


def main() -> int:
    """Measure, compare and write; 1 where a budget is above its ceiling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="*", default=[], help="globs; default: all")
    parser.add_argument("--raise", dest="higher", action="store_true", help="store larger budgets too")
    parser.add_argument("--seeds", type=int, default=0, help="number of other seeds, in place of the ceilings")
    parser.add_argument("--file", type=Path, default=Path(ceilings.__file__).with_name(ceilings.FILE))
    options = parser.parse_args()
    if options.seeds:
        lines = 0
        for line in refused(options.workload, options.seeds):
            print(line[:300], flush=True)
            lines += 1
        print(f"{lines} references of {options.seeds} seeds cannot be had")
        return int(lines > 0)
    kept = ceilings.parsed(options.file.read_text(encoding="utf-8")) if options.file.exists() else {}
    exceeded = 0
    for name, views in measured(options.workload).items():
        for path, view, budget, limit in ceilings.above(name, {"any": views}, kept):
            del path
            exceeded += 1
            print(f"{name}: budget of {view}: {budget:.3g}, stored ceiling {limit:.3g}")
        before = kept.get(name, {})
        kept[name] = {
            view: budget if options.higher else min(budget, before.get(view, budget)) for view, budget in views.items()
        }
    options.file.write_text(ceilings.written(kept), encoding="utf-8")
    print(f"{len(kept)} references in {options.file}")
    return int(exceeded > 0 and not options.higher)


if __name__ == "__main__":
    sys.exit(main())
