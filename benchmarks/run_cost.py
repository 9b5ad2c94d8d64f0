"""Measures the cost of a run's safety: a journal record with its sync, and cases in a process of their own.

``python benchmarks/run_cost.py [--records N] [--pairs N] [--technique GLOB ...]``

A record may take 200 us, and separate processes may add 2 % to the time of level 1. Runs of both kinds alternate, and
the median ratio of the pairs counts; under other load the result means nothing.

Exit status: 0 within these limits, 1 above one of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from accelcheck.core.journal import Journal
from accelcheck.core.journal_reading import read

MOST_RECORD = 200e-6
"""Limit of a record, in seconds."""
MOST_SUPERVISION = 1.02
"""Limit of a run's time, as a multiple of that with all cases in their worker's process."""
STORED = Path(__file__).parent.parent / "baselines" / "cpu" / "level1.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=5000, help="journal records to write (default: 5000)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (default: 3); 0: journal records alone")
    parser.add_argument("--technique", action="append", default=[], help="technique to run; default: all of level 1")
    given = parser.parse_args()
    record = per_record(given.records)
    good = record <= MOST_RECORD
    print(f"journal record with sync: {1e6 * record:.0f} us, at most {1e6 * MOST_RECORD:.0f}")
    if given.pairs:
        words = [f"--accel-technique={name}" for name in given.technique]
        ratios = [pair(words) for _ in range(given.pairs)]
        middle = statistics.median(ratios)
        good = good and middle <= MOST_SUPERVISION
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"cases in a process of their own: {middle:.3f} times the time, at most {MOST_SUPERVISION} ({shown})")
    return int(not good)


def per_record(count: int) -> float:
    """Mean seconds that a record takes, from its making to the synced end of the journal."""
    records = read(STORED)[1]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        journal.header({})
        start = time.perf_counter()
        for index in range(count):
            journal.case(records[index % len(records)].as_json())
        journal.end({})
        return (time.perf_counter() - start) / count


def pair(words: list[str]) -> float:
    """Time of a run, divided by that of the same run with ``--accel-in-process``."""
    apart, together = seconds(words), seconds([*words, "--accel-in-process"])
    return apart / together


def seconds(words: list[str]) -> float:
    """Wall time of a run of level 1."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "accelcheck.suite", "--accel-device=cpu", "-q", "-n", "2"]
    start = time.perf_counter()
    subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
