"""Plants each numeric fault of one operator, has `accelcheck explain` explain it, and counts the operators named.

    python benchmarks/explain_faults.py
    python benchmarks/explain_faults.py --fault 'split-k-*' --dtype float32 --scripts 5

A fault belongs to an operator where its plant replaces kernels; the kernels it changed are observed, not listed. Faults
in functions that a technique puts in place of an operator (`FUNCTIONS`) are counted separately: their own operators are
right, and the operator of eager that they replace must be named. No operator of a correct variant may be named. Each
script must exit with 1 in a fresh process with the plant imported. The exit status is 1 where less than 95 % of the
operators are named, an operator of a variant is named, or a script does not fail.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from torch import nn

from accelcheck.core.case import Case, Mode
from accelcheck.devices.torch_names import get_current_dispatch_mode_stack
from accelcheck.explain import runs, text
from accelcheck.explain.explain import explain
from accelcheck.explain.script import LINES, script_of
from accelcheck.plugin import registered
from accelcheck.selftest import runner
from accelcheck.selftest.faults import plant
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import draws

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accelcheck.checks.execute import Bench
    from accelcheck.explain.explain import Explanation
    from accelcheck.selftest.runner import PlantedRow

SLOW = 20.0
"""Longest explanation, as a multiple of the case's time."""
LEAST = 0.95
"""Least share of the faults whose operator must be named."""
ATTENTION = "_scaled_dot_product_"
FUNCTIONS = {
    "causal-*": ATTENTION,
    "mask-off-by-one*": ATTENTION,
    "length-off-by-one": ATTENTION,
    "masked-row-*": ATTENTION,
    "softmax-scale*": ATTENTION,
    "softmax-unshifted": "_softmax",
    "tanh-gelu*": "gelu",
    "norm-*": "native_layer_norm",
    "padding-counted*": "avg_pool2d",
}
"""Patterns of faults in functions, with the beginning of the name of the operator that they replace."""
NO_NUMBERS = frozenset({"operator-on-the-cpu"})
"""Plants by kernels whose numbers are right."""

NOT_ALONE = frozenset({"flash-stale-row-sums"})
"""Plants that need an earlier call: a script of one call is right, and `accelcheck explain` says so."""


@dataclass
class Count:
    """Counts of one kind of fault."""

    named: int = 0
    not_named: int = 0
    wrongly: int = 0
    missed: int = 0
    """Cases that pass with this seed, without anything to explain."""

    @property
    def part(self) -> float:
        """Named share of the faults that fail."""
        return self.named / max(1, self.named + self.not_named + self.wrongly)


class Acted:
    """Notes which kernels a plant has replaced, while it runs."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        wrapped = plant.Kernels.__torch_dispatch__

        def dispatch(mode: plant.Kernels, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name().partition(".")[0].removeprefix("aten::")
            if not mode.idle and name in mode.kernels:
                self.names.add(name)
            return wrapped(mode, func, types, args, kwargs)

        plant.Kernels.__torch_dispatch__ = dispatch  # type: ignore[method-assign,assignment]  # of this process alone


def install(name: str, strength: float) -> None:
    """Leave a fault's kernels in place in this process, for the script that imports this module."""
    program = Program(nn.Identity(), ())
    seen: list[Any] = []

    def run(mode: Mode) -> Any:
        seen.extend(get_current_dispatch_mode_stack())
        return {}

    program.run = run  # type: ignore[method-assign]  # on this instance alone
    runner.faults()[name].plant(strength)(program)
    program.run(Mode.FORWARD)
    for call in seen:
        call.__enter__()


def cases(bench: Bench, rows: Sequence[PlantedRow]) -> Iterator[tuple[PlantedRow, Bench, Case]]:
    """Each row with a bench that has its planted technique, and the case."""
    for row in rows:
        technique = runner.planted(row, bench.matrix)
        workload = bench.matrix.workloads[row.workload]
        eager = bench.matrix.techniques["eager"]
        matrix = Matrix({"eager": eager, f"planted-{technique.name}": technique}, {workload.name: workload})
        technique.name = f"planted-{technique.name}"
        yield row, replace(bench, matrix=matrix), Case(technique.name, workload.name, "cpu", row.dtype, row.mode, 1)


def fails_alone(found: Any, row: PlantedRow, folder: Path) -> str:
    """Why a script does not fail in a fresh process; empty where it does."""
    (folder / "planted_fault.py").write_text(
        f"import explain_faults\nexplain_faults.install({row.plant!r}, {row.strength!r})\n"
    )
    path = folder / "case.py"
    script_of(found.smallest, "cpu", str(row), ("planted_fault",)).write(path)
    if (lines := len(path.read_text().splitlines())) > LINES:
        return f"{lines} lines"
    folders = [str(folder), str(Path(__file__).parent), *sys.path]
    ended = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        ""
        if ended.returncode == 1 and "measured" in ended.stdout
        else f"exit {ended.returncode}: {(ended.stdout + ended.stderr)[-200:]}"
    )


def expected(row: PlantedRow) -> str:
    """Beginning of the name of the operator whose work a planted function does; empty for other faults."""
    return next((name for pattern, name in FUNCTIONS.items() if fnmatch.fnmatchcase(row.plant, pattern)), "")


class Counting:
    """Plants, explains and counts.

    Args:
        folder: Folder of references and scripts.
        scripts: Most scripts that are run alone.
    """

    def __init__(self, folder: Path, scripts: int) -> None:
        self.folder = folder
        self.most_scripts = scripts
        self.acted = Acted()
        self.counts = {"operators": Count(), "functions": Count()}
        self.scripts: Counter[bool] = Counter()
        self.ratios: list[float] = []
        self.variants = self.false = self.unwritten = 0

    def variant(self, row: PlantedRow, bench: Bench, case: Case) -> None:
        """Look for an operator in a correct variant, whatever its verdict: none may be named."""
        trial = bench.trial(case)
        random = [draw for draw in draws(trial.workload, case.mode, trial.technique.admits) if not draw.probe]
        match = next((culprit for draw in random for culprit in runs.traced(trial, draw).culprits), None)
        match = match or runs.in_turn(trial, random)
        self.variants += 1
        if match is not None:
            self.false += 1
            print(f"FALSE: {row}: {match.operator}: {match.faults[0]}", flush=True)

    def fault(self, row: PlantedRow, bench: Bench, case: Case) -> None:
        """Explain a fault, and see whether the operator is named that it is planted in."""
        self.acted.names.clear()
        explanation = explain(bench, case, with_layers=False)
        function = expected(row)
        kind = "functions" if function else "operators"
        wanted = {function} if function else set(self.acted.names)
        names = [name.partition(".")[0].partition("::")[2] for name in text.all_named(explanation)]
        right = any(name.startswith(item) if function else name == item for item in wanted for name in names)
        name, count = ", ".join(names), self.counts[kind]
        if not explanation.record.verdict.executed:
            return
        if not explanation.failed:
            count.missed += 1
        else:
            # Rows that share an oracle with an earlier one take a tenth of the time that a case takes by itself.
            if explanation.record.seconds.get("oracle", 0.0) > explanation.seconds[0] / 4:
                self.ratios.append(explanation.seconds[1] / max(1e-3, explanation.seconds[0]))
                if self.ratios[-1] > SLOW:
                    print(
                        f"slow: {row}: {explanation.seconds[1]:.1f} s for a case of {explanation.seconds[0]:.1f} s",
                        flush=True,
                    )
            count.named += right
            count.wrongly += bool(name) and not right
            count.not_named += not name
        if not explanation.failed or not right:
            print(
                f"{kind}: {row}: {explanation.record.verdict}, named {name or 'nothing'}, planted in {sorted(wanted)}",
                flush=True,
            )
        elif not function:
            self.script(explanation, row)

    def script(self, found: Explanation, row: PlantedRow) -> None:
        """Run the script of a named operator alone."""
        if row.plant in NOT_ALONE or self.scripts.total() >= self.most_scripts:
            return
        if found.smallest is None:
            self.unwritten += 1
            print(f"no script: {row}: {'; '.join(found.notes)}", flush=True)
            return
        why = fails_alone(found, row, self.folder)
        self.scripts[not why] += 1
        if why:
            print(f"script: {row}: {why}", flush=True)

    def report(self) -> int:
        """Print the counts; the exit code."""
        for kind, count in self.counts.items():
            print(
                f"{kind}: {count.named} named, {count.not_named} not named, "
                f"{count.wrongly} wrongly named ({count.part:.1%}); "
                f"{count.missed} cases passed"
            )
        print(f"correct variants: {self.variants}, {self.false} with a named operator")
        print(
            f"scripts run alone: {self.scripts.total()}, {self.scripts[True]} failed as they must; "
            f"{self.unwritten} named operators are right in a single call, and have none"
        )
        if self.ratios:
            middle = sorted(self.ratios)[len(self.ratios) // 2]
            print(
                f"an explanation without layers took {max(self.ratios):.2f} times the case at most, "
                f"{middle:.2f} in the median ({len(self.ratios)} cases)"
            )
        few = self.counts["operators"].part < LEAST and bool(self.ratios)
        return int(few or self.false > 0 or self.scripts[False] > 0)


def main() -> int:
    """Count, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fault", action="append", default=[], metavar="GLOB", help="faults and variants by name (default: all)"
    )
    parser.add_argument("--dtype", action="append", default=[], help="storage dtypes (default: all)")
    parser.add_argument("--scripts", type=int, default=10**9, help="most scripts that are run alone (default: all)")
    given = parser.parse_args()
    rows = [
        row
        for row in runner.rows()
        if row.mode in runs.MODES
        and not row.hidden
        and row.plant not in NO_NUMBERS
        and (row.correct or expected(row) or _kernels(row))
        and (not given.fault or any(fnmatch.fnmatchcase(row.plant, glob) for glob in given.fault))
        and (not given.dtype or row.dtype in given.dtype)
    ]
    device = registered.device("cpu")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counting = Counting(Path(folder), given.scripts)
        store = Path(folder) / "store"
        store.mkdir()
        for row, bench, case in cases(runner.bench(device, Matrix.load(), Store(store)), rows):
            technique, workload = bench.matrix.techniques[case.technique], bench.matrix.workloads[case.workload]
            if technique.answer(device, *sorted(workload.features)).ok:
                (counting.variant if row.correct else counting.fault)(row, bench, case)
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s")
    return counting.report()


def _kernels(row: PlantedRow) -> bool:
    """Returns True where a fault's plant replaces kernels."""
    made = getattr(runner.faults()[row.plant].plant(row.strength), "__qualname__", "")
    return made.startswith(("within.", "backward_kernels."))


if __name__ == "__main__":
    sys.exit(main())
