"""Measures the plugin's cost to a pytest run: start-up without use, and collection of 10,000 cases.

    python benchmarks/plugin_cost.py        # exit status 1 where a limit is exceeded; 40 s

Start-up: pytest on one empty test, without the plugin and with it. Limit: 1.1 times the CPU time.

Collection: 100 techniques x 100 workloads, registered by a conftest.py, against `pytest.mark.parametrize` with as many
ids of the same length, in a file that does not import torch. Limit: 1.2 times the CPU time of pytest's process from the
session's start to the interpreter's exit (making and sorting cases and items, garbage collection), less that of one
case. The cost once a run is printed beside it: importing torch, techniques and workloads. The device probe runs in
child processes and does not count.

CPU time varies less with other load than wall time. The smallest of several fresh processes in turns counts for each
side: other work only adds. Where a limit is exceeded, everything is measured once more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

START_LIMIT = 1.1
"""Limit, as a multiple of the CPU time of a pytest run without the plugin."""
COLLECT_LIMIT = 1.2
"""Limit, as a multiple of the CPU time of plain parametrize, each less that of a single case."""

PLAIN = """
import pytest
cases = range({number})
ids = [f"zz-{{i // 100:03}}/zz-{{i % 100:03}}/cpu/float32/forward" for i in cases]
@pytest.mark.parametrize("case", cases, ids=ids)
def test_case(case): pass
"""
CASES = """
def test_case(accel_case): pass
"""
REGISTER = """
from accelcheck.core.case import Mode
from accelcheck.techniques.base import Technique
from accelcheck.workloads.base import Workload
class Registered(Technique):
    family, promise, source = "benchmark", "none", "none"
    modes, requires = frozenset({{Mode.FORWARD}}), frozenset({{"benchmark"}})
    def __init__(self, name):
        self.name = name
def pytest_accel_techniques():
    return [Registered(f"zz-{{i:03}}") for i in range({techniques})]
def pytest_accel_workloads():
    return [
        Workload(f"zz-{{i:03}}", "none", lambda generator, extent: None, traits=frozenset({{"benchmark"}}))
        for i in range({workloads})
    ]
"""
CLOCK = """
import atexit, os, time
begun = {}
def pytest_sessionstart(): begun["session"] = time.process_time()
@atexit.register
def report():
    end = time.process_time()
    with open(os.environ["PLUGIN_COST"], "w") as file: print(end, end - begun["session"], file=file)
"""


class Spent(NamedTuple):
    """CPU seconds of a pytest process: from its start, and from the start of the session."""

    process: float
    session: float


def spent(folder: Path, *arguments: str) -> Spent:
    """Run pytest in a fresh process."""
    report = folder / "spent"
    environ = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", ""))),
        "PLUGIN_COST": str(report),
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "plugin_cost_clock", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise SystemExit(f"pytest {' '.join(arguments)} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return Spent(*map(float, report.read_text().split()))


def least(folder: Path, rounds: int, *sides: tuple[str, ...]) -> list[Spent]:
    """The smallest CPU times of each side, of runs in turns."""
    runs = [[spent(folder, *arguments) for arguments in sides] for _ in range(rounds)]
    return [Spent(*map(min, zip(*side, strict=True))) for side in zip(*runs, strict=True)]


def write(folder: Path, techniques: int, workloads: int) -> None:
    """Write test files with so many cases: plain parametrize, and registered ones."""
    number = techniques * workloads
    register = REGISTER.format(techniques=techniques, workloads=workloads)
    for kind, test, conftest in (("plain", PLAIN.format(number=number), ""), ("cases", CASES, register)):
        place = folder / f"{kind}{number}"
        place.mkdir(exist_ok=True)
        (place / "test_many.py").write_text(test)
        (place / "conftest.py").write_text(conftest)


def kept(folder: Path, rounds: int, side: int) -> bool:
    """Measure and print once; whether both limits are kept."""
    plain, plugin = least(folder, 3 * rounds, ("test_empty.py",), ("-p", "accelcheck.plugin.hooks", "test_empty.py"))
    start = plugin.process / plain.process
    print(
        f"start: {plain.process * 1e3:.0f} ms without, {plugin.process * 1e3:.0f} ms with the plugin: "
        f"ratio {start:.2f} (limit {START_LIMIT})"
    )
    number = side**2
    collect = ("--collect-only", "-q", "-q")
    chosen = ("-p", "accelcheck.plugin.hooks", "--accel-device=cpu", "--accel-technique=zz-*", "--accel-workload=zz-*")
    one_plain, one_case, plain, cases = least(
        folder,
        rounds,
        (*collect, "plain1"),
        (*chosen, *collect, "cases1"),
        (*collect, f"plain{number}"),
        (*chosen, *collect, f"cases{number}"),
    )
    theirs, ours = plain.session - one_plain.session, cases.session - one_case.session
    once = one_case.process - one_plain.process
    print(
        f"collect {number} cases: {theirs:.2f} s as plain parametrize, {ours:.2f} s as cases: "
        f"ratio {ours / theirs:.2f} (limit {COLLECT_LIMIT}); besides, once a run, "
        f"{once:.1f} s for torch and the registry"
    )
    return start <= START_LIMIT and ours / theirs <= COLLECT_LIMIT


def main() -> int:
    """Measure and print; 1 where a limit is exceeded twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side, three times as many of start-up (3)")
    parser.add_argument(
        "--side", type=int, default=100, help="techniques, and workloads: the cases are its square (100)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_empty.py").write_text("def test_nothing(): pass\n")
        (folder / "plugin_cost_clock.py").write_text(CLOCK)
        write(folder, 1, 1)
        write(folder, options.side, options.side)
        return int(not (kept(folder, options.rounds, options.side) or kept(folder, options.rounds, options.side)))


if __name__ == "__main__":
    sys.exit(main())
