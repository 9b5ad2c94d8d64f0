"""Measures the speed-up of one worker per device: ``python benchmarks/device_workers.py``, with torch_xla.

Runs a level of the suite on the four devices of PJRT's CPU client (``CPU_NUM_DEVICES=4``), once with one worker and
once with several, each pinned to its own device. Prints the seconds of both and their ratio, and checks that all
verdicts agree.

Two cores cannot reach `RATIO`: level 2 took 932 s with one worker and 689 s with two (1.35 times as fast, 2,741 cases),
because one worker already keeps 1.7 cores busy with the threads of XLA's compiler and client. Two processes of torch on
the CPU scale 1.9 times on the same machine.

Exit status: 0; 1 where the ratio is below `RATIO` or a verdict differs; 2 where the load average is too high to tell.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RATIO = 1.7
"""Least ratio of the times of one worker and of two, where two cores are free."""
BUSY = 0.5
"""Largest load average of the last minute, before the first run, with which two of the cores count as free."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", default="2", help="of the suite (default: 2)")
    parser.add_argument("--workers", type=int, default=2, help="of the second run (default: 2)")
    parser.add_argument("--anyway", action="store_true", help="also on a busy machine; the ratio then says little")
    parser.add_argument("more", nargs="*", help="for pytest, such as --accel-technique=eager")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load average {load:.2f} on {os.cpu_count()} logical processors")
    if load > BUSY and not given.anyway:
        print("too busy: other work would be measured; --anyway measures nevertheless")
        return 2
    with tempfile.TemporaryDirectory(prefix="accelcheck-workers-") as name:
        times, verdicts = zip(
            *(_run(Path(name), given.level, count, given.more) for count in (1, given.workers)), strict=True
        )
    ratio = times[0] / times[1]
    print(
        f"1 worker {times[0]:.0f} s, {given.workers} workers {times[1]:.0f} s: {ratio:.2f} times as fast, "
        f"{len(verdicts[0])} cases"
    )
    differ = sorted(
        case for case in verdicts[0].keys() | verdicts[1].keys() if verdicts[0].get(case) != verdicts[1].get(case)
    )
    for case in differ:
        print(f"{case}: {verdicts[0].get(case)} with 1 worker, {verdicts[1].get(case)} with {given.workers}")
    return int(bool(differ) or ratio < RATIO)


def _run(folder: Path, level: str, workers: int, more: list[str]) -> tuple[float, dict[str, str]]:
    """Seconds of a run of the judged cases, and the verdicts by case id."""
    journal = folder / f"{workers}.jsonl"
    words = [
        "--pyargs",
        "accelcheck.suite",
        "--accel-device=xla",
        f"--accel-level={level}",
        f"--accel-journal={journal}",
    ]
    # The same threads a worker in both runs: what is compared is the number of devices.
    environ = {"CPU_NUM_DEVICES": "4", **os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, "-n", str(workers), *more],
        env=environ,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - begun
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    return seconds, {line["case"]["id"]: line["verdict"] for line in lines if line.get("kind") == "case"}


if __name__ == "__main__":
    sys.exit(main())
