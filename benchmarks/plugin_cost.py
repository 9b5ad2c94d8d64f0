"""What the plugin costs those who have it installed: start-up, and collection of many cases. Prints ratios.

    python benchmarks/plugin_cost.py

Each figure is the median of interleaved pairs of runs in fresh processes, so that a machine that speeds up or slows down
does so for both sides alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

PLAIN = """
import pytest
@pytest.mark.parametrize("case", [object() for _ in range({number})], ids=[f"technique-{{i:05}}/workload/cpu/float32/forward" for i in range({number})])
def test_case(case): pass
"""
CASES = """
def test_case(accel_case): pass
"""
REGISTER = """
from accelcheck.techniques.base import Technique
from accelcheck.workloads.base import Workload
def make(name, **facts):
    technique = Technique()
    for key, value in dict(name=name, family="benchmark", promise="none", source="none", **facts).items():
        setattr(technique, key, value)
    return technique
def pytest_accel_techniques():
    return [make(f"zz-{{i:05}}", modes=frozenset({{"forward"}}), requires=frozenset({{"benchmark"}})) for i in range({number})]
def pytest_accel_workloads():
    return [Workload("zz", "none", lambda generator, extent: None, traits=frozenset({{"benchmark"}}))]
"""


def seconds(arguments: list[str], folder: Path) -> float:
    """Wall time of one pytest run in a fresh process."""
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    start = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    taken = time.perf_counter() - start
    if run.returncode not in {0, 5}:
        raise SystemExit(f"pytest {' '.join(arguments)} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return taken


def pairs(base: list[str], with_plugin: list[str], folder: Path, rounds: int) -> tuple[float, float]:
    """Median of the plain run's seconds and of the other's, run in turn."""
    plain: list[float] = []
    other: list[float] = []
    for _ in range(rounds):
        plain.append(seconds(base, folder))
        other.append(seconds(with_plugin, folder))
    return statistics.median(plain), statistics.median(other)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of start-up runs (default 9)")
    parser.add_argument("--cases", type=int, default=10_000, help="cases to collect (default 10000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_empty.py").write_text("def test_nothing(): pass\n")
        plain, plugin = pairs(
            ["test_empty.py"], ["-p", "accelcheck.plugin.hooks", "test_empty.py"], folder, options.rounds
        )
        print(
            f"start: {plain * 1e3:.0f} ms without, {plugin * 1e3:.0f} ms with the plugin: "
            f"ratio {plugin / plain:.3f}, {1e3 * (plugin - plain):+.0f} ms (limit 30 ms)"
        )

        counts = (1, options.cases)
        for number in counts:
            for kind, test, conftest in (
                ("plain", PLAIN.format(number=number), ""),
                ("ours", CASES, REGISTER.format(number=number)),
            ):
                place = folder / f"{kind}{number}"
                place.mkdir()
                (place / "test_many.py").write_text(textwrap.dedent(test))
                (place / "conftest.py").write_text(conftest)
        collect = ["--collect-only", "-q", "-q"]
        accel = ["-p", "accelcheck.plugin.hooks", "--accel-device=cpu", "--accel-workload=zz"]
        few, many = (
            pairs(
                [*collect, f"plain{number}"], [*accel, *collect, f"ours{number}"], folder, max(3, options.rounds // 3)
            )
            for number in counts
        )
        fixed, plain, cases = few[1] - few[0], many[0] - few[0], many[1] - few[1]
        print(
            f"collect {options.cases} cases: {plain:.2f} s as plain parametrize, {cases:.2f} s as cases: "
            f"ratio {cases / plain:.2f} (limit 1.5); besides, once a run, {fixed:.1f} s for probing devices and importing torch"
        )


if __name__ == "__main__":
    main()
