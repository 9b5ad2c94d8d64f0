"""Measures detection and false alarms of accelcheck's gates, pytest-benchmark's and torch.utils.benchmark's.

    python benchmarks/speed_gates.py                      # 32 quiet and 32 busy sessions, about 3 min each
    python benchmarks/speed_gates.py --sessions 4 --json part.jsonl    # some of them; another run adds further ones
    python benchmarks/speed_gates.py --table baselines/cpu/speed_gates.jsonl    # table of stored sessions; 10 s
    python benchmarks/speed_gates.py --quick              # a few minutes in all, to see that it works; decides nothing

Four CPU workloads (planted_work.py) are made slower by 0, 3, 5 and 10 %. A session measures each of these 16 cells once
with every gate, each tool in its own process; 13 short processes are the samples of gate 2, and 5 pairs of them in
turns those of gate 3. A gate with a saved run reads that of the session before. gate_table.py defines repetitions,
counts and limits: the exit status is 1 where one is not met.

Everything runs on one thread unless --threads says otherwise, so that a neighbour disturbs caches and clocks but not
every call.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gate_table
import planted_work
import torch
from planted_work import SLOWDOWNS, WORKLOADS, in_turns, shuffled, slowed, timed
from torch.utils.benchmark import Timer

from accelcheck.core import processes
from accelcheck.devices import hardware
from accelcheck.devices.cpu import Cpu
from accelcheck.experiments import duet_process
from accelcheck.experiments.duet_side import DuetSide, Process, together
from accelcheck.measure import duet
from accelcheck.measure.clocks import BLOCK, block, settle, undisturbed
from accelcheck.measure.paired import compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SECONDS = 1.0
"""Seconds that pytest-benchmark and torch.utils.benchmark measure a cell: the default of the first."""
CALIBRATIONS = 5
"""Calibrating processes; their median counts."""
ROUNDS = 300
"""Rounds of blocks of a calibration."""
SAMPLED = 80
"""Rounds of a sampling process: 80 blocks of each of five times, half a second a workload."""
TURNS = 10
"""Parts of these rounds, between which two processes of a pair hand over to each other."""
SILENCE = 300.0
"""Seconds after which a silent process of a pair counts as hanging."""
TEST = """
import os, sys, json
sys.path.insert(0, {folder!r})
import pytest, planted_work
job = json.loads(os.environ["SPEED_GATES_JOB"])
planted_work.prepare(job["threads"])
@pytest.mark.parametrize(("name", "per_cent"), planted_work.shuffled(job["names"], job["seed"]))
def test_speed(benchmark, name, per_cent):
    call = planted_work.WORKLOADS[name]()
    benchmark(planted_work.slowed(call, job["elements"][name][str(per_cent)]))
"""


# In processes of their own.


def calibrate(job: dict[str, Any]) -> dict[str, Any]:
    """The planted elements by workload and slowdown."""
    calibrated = {name: planted_work.calibrated(name, job["rounds"]) for name in job["names"]}
    return {
        name: {str(per_cent): count for per_cent, count in elements.items()}
        for name, (elements, _) in calibrated.items()
    }


def tools(job: dict[str, Any]) -> dict[str, Any]:
    """torch.utils.benchmark and gate 1 on every cell, and an empty call both ways."""
    timers: dict[str, dict[str, float]] = {name: {} for name in job["names"]}
    gates: dict[str, dict[str, dict[str, Any]]] = {
        kind: {name: {} for name in job["names"]} for kind in ("shared", "own")
    }
    spent = time.perf_counter()
    for name, per_cent in shuffled(job["names"], job["seed"]):
        call = slowed(WORKLOADS[name](), job["elements"][name][str(per_cent)])
        timer = Timer("call()", globals={"call": call}, num_threads=job["threads"])
        timers[name][str(per_cent)] = timer.blocked_autorange(min_run_time=job["seconds"]).median
    spent = time.perf_counter() - spent
    for name, per_cent in shuffled(job["names"], job["seed"] + 1):
        elements = job["elements"][name][str(per_cent)]
        base = WORKLOADS[name]()
        for kind, other in (("shared", base), ("own", WORKLOADS[name]())):
            gates[kind][name][str(per_cent)] = gate_1(base, slowed(other, elements))
    return {"timer": timers, "timer-seconds": spent, "gate-1": gates, "empty": empty(job["seconds"])}


def gate_1(base: planted_work.Call, candidate: planted_work.Call) -> dict[str, Any]:
    """The answer of gate 1, and the seconds of the whole check."""
    start = time.perf_counter()
    with undisturbed():
        first, second = timed([base, candidate])
        comparison = compare(first, second)
    return {
        "answer": comparison.answer,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
        "seconds": time.perf_counter() - start,
    }


def empty(seconds: float) -> dict[str, float]:
    """Median time of a call that does nothing, ours and torch's, in turns."""

    def nothing() -> None:
        return

    timer = Timer("nothing()", globals={"nothing": nothing})
    ours, theirs = [], []
    timed_block = block(Cpu(), nothing)
    with undisturbed():
        settle(timed_block)
        calls = math.ceil(BLOCK / timed_block())  # as many as ours has in a block
        for _ in range(round(seconds * 200)):
            ours.append(timed_block())
            theirs.append(timer.timeit(calls).median)
    return {"ours": statistics.median(ours), "theirs": statistics.median(theirs)}


def sample(job: dict[str, Any]) -> dict[str, Any]:
    """Measures in one process the time of each slowdown, in s, by workload, and a ratio with nothing planted."""
    return {name: sampled(job, name, lambda: None) for name in some_order(job)}


def half(job: dict[str, Any]) -> dict[str, Any]:
    """Measure like `sample`, in turns with another process; report as a side of a duet."""
    turns = duet_process.Turns()
    for name in some_order(job):
        processes.say(done=name, found=sampled(job, name, turns.hand_over))
        turns.hand_over()
    processes.say(end=True)
    return {}


def sampled(job: dict[str, Any], name: str, hand_over: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Measures one workload."""
    base, own = WORKLOADS[name](), WORKLOADS[name]()
    calls = [slowed(own, job["elements"][name][str(per_cent)]) for per_cent in SLOWDOWNS]
    blocks = timed([base, *calls])
    times: list[list[float]] = [[] for _ in blocks]
    for _ in range(TURNS):
        hand_over()
        for kept, new in zip(times, in_turns(blocks, job["sampled"] // TURNS), strict=True):
            kept.extend(new)
    eager, *planted = times
    return {
        str(per_cent): {
            "seconds": duet.latency(slower),
            "ratio": math.exp(statistics.median([math.log(b / a) for a, b in zip(eager, slower, strict=True)])),
        }
        for per_cent, slower in zip(SLOWDOWNS, planted, strict=True)
    }


def some_order(job: dict[str, Any]) -> list[str]:
    """The workloads, in an order of the seed's."""
    names = list(job["names"])
    random.Random(job["seed"]).shuffle(names)
    return names


def burn(job: dict[str, Any]) -> dict[str, Any]:
    """A neighbour: for parts of a second it works on more memory than caches hold, and for parts it sleeps."""
    chance = random.Random(job["seed"])
    memory = bytearray(1 << 25)
    while os.getppid() == job["parent"]:
        until = time.monotonic() + chance.uniform(0.05, 0.5)
        while time.monotonic() < until:
            memory = memory[::-1]
        time.sleep(chance.uniform(0.05, 0.5))
    return {}


ROLES = {"calibrate": calibrate, "tools": tools, "sample": sample, "half": half, "burn": burn}


# In the parent.


def ask(role: str, job: dict[str, Any]) -> Any:
    """Returns the answer of a fresh process."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__)), "--role", role, "--job", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if run.returncode:
        raise SystemExit(f"{role}: the process ended with {run.returncode}")
    return json.loads(run.stdout)


def pair(job: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Returns the measurements of two processes that run in turns."""
    arguments = [str(Path(__file__)), "--role", "half", "--job", json.dumps(job)]
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(Process(DuetSide(name, sys.executable), arguments, SILENCE)) for name in "AB"]
        together(both, number)
    if died := [process.ended for process in both if process.ended != ""]:
        raise SystemExit(f"half: {died[0]}")
    return [
        {message["done"]: message["found"] for message in process.messages if "done" in message} for process in both
    ]


@contextlib.contextmanager
def neighbour(seed: int) -> Iterator[None]:
    """A busy neighbour for the time of the context."""
    job = json.dumps({"seed": seed, "threads": 1, "parent": os.getpid()})
    process = subprocess.Popen([sys.executable, str(Path(__file__)), "--role", "burn", "--job", job])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def pytest_benchmark(job: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The statistics of each cell in a saved run of pytest-benchmark."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_speed.py").write_text(TEST.format(folder=str(Path(__file__).parent)))
        (folder / "pytest.ini").write_text("[pytest]\n")
        run = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "pytest_benchmark.plugin", "-p", "no:cacheprovider"),
                *(f"--benchmark-max-time={job['seconds']}", "--benchmark-json=saved.json", "--benchmark-quiet"),
            ],
            cwd=folder,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "SPEED_GATES_JOB": json.dumps(job)},
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            raise SystemExit(f"pytest ended with {run.returncode}:\n{run.stdout}{run.stderr}")
        saved = json.loads((folder / "saved.json").read_text())
    times: dict[str, dict[str, Any]] = {name: {} for name in job["names"]}
    for benchmark in saved["benchmarks"]:
        times[benchmark["params"]["name"]][str(benchmark["params"]["per_cent"])] = {"mean": benchmark["stats"]["mean"]}
    return times


def session(
    calibration: dict[str, Any], condition: str, seed: int, processes: int, pairs: int, seconds: float
) -> dict[str, Any]:
    """Measure every cell once."""
    job = {**calibration, "seed": seed, "seconds": seconds, "sampled": SAMPLED}
    start = time.perf_counter()
    with neighbour(seed) if condition == "busy" else contextlib.nullcontext():
        saved = pytest_benchmark(job)
        spent = time.perf_counter() - start
        answer = ask("tools", job)
        samples = [ask("sample", {**job, "seed": seed + number}) for number in range(processes)]
        duets = [pair({**job, "seed": seed + number}, number) for number in range(pairs)]
    return {
        "kind": "session",
        "calibration": calibration["id"],
        "condition": condition,
        "seed": seed,
        "names": calibration["names"],
        "quick": calibration["quick"],
        "pytest-benchmark": saved,
        "pytest-benchmark-seconds": spent,
        **answer,
        "processes": samples,
        "pairs": duets,
        "seconds": time.perf_counter() - start,
    }


def calibration_of(path: Path, names: list[str], threads: int, *, quick: bool) -> dict[str, Any]:
    """The calibration that a file has for this machine, or a new one, which is added to it."""
    here = {
        "machine": f"{hardware.cpu()}, {hardware.usable_cores()} cores",
        "torch": torch.__version__,
        "threads": threads,
        "names": names,
        "quick": quick,
    }
    for line in gate_table.read([path]) if path.exists() else []:
        if line["kind"] == "calibration" and all(line[key] == value for key, value in here.items()):
            return line
    print(f"calibrating in {CALIBRATIONS} processes", flush=True)
    runs = [ask("calibrate", {**here, "rounds": 20 if quick else ROUNDS}) for _ in range(CALIBRATIONS)]
    elements = {
        name: {str(p): round(statistics.median(run[name][str(p)] for run in runs)) for p in SLOWDOWNS} for name in names
    }
    known = {"kind": "calibration", **here, "elements": elements}
    known["id"] = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=6).hexdigest()
    append(path, known)
    return known


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a file of results: six digits of each number."""
    short = json.loads(json.dumps(line), parse_float=lambda text: float(f"{float(text):.6g}"))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(short, sort_keys=True) + "\n")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=32, help="sessions of each condition to add (default 32)")
    parser.add_argument("--condition", action="append", choices=gate_table.CONDITIONS, help="default: both, in turns")
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS), help="default: all")
    parser.add_argument("--seed", type=int, default=None, help="default: the clock's")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument("--json", type=Path, default=Path("speed_gates.jsonl"), help="results are added to this file")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these files, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="two short sessions of each condition")
    parser.add_argument("--role", choices=tuple(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, add to the file, print the table; 1 where a criterion is not met."""
    options = parsed()
    if options.role:
        planted_work.prepare(options.job["threads"])
        print(json.dumps(ROLES[options.role](options.job)))
        return 0
    if options.table:
        return gate_table.show(gate_table.read(options.table))
    sessions, processes, pairs, seconds = (
        (2, 3, 2, 0.1) if options.quick else (options.sessions, gate_table.PROCESSES, gate_table.PAIRS, SECONDS)
    )
    names = list(options.workload or WORKLOADS)
    calibration = calibration_of(options.json, names, options.threads, quick=options.quick)
    seed = options.seed if options.seed is not None else int(time.time())
    for number in range(sessions):
        for condition in options.condition or gate_table.CONDITIONS:
            line = session(calibration, condition, seed + 1000 * number, processes, pairs, seconds)
            append(options.json, line)
            print(f"{condition} session {number + 1} of {sessions}: {line['seconds']:.0f} s", flush=True)
    return gate_table.show(gate_table.read([options.json]))


if __name__ == "__main__":
    sys.exit(main())
