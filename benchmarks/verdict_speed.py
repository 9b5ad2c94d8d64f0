"""Compares the full verdict of one tensor with `torch.testing.assert_close`: time, and memory beyond the inputs.

    python benchmarks/verdict_speed.py --json baselines/cpu/verdict_speed.json    # on an otherwise idle machine; 2 min
    python benchmarks/verdict_speed.py --exponents 10 16 20 --memory 10 16 20 24 --blocks 15    # half a minute

The verdict is `accelcheck.verify.judge.judge` of one FP32 tensor against an existing reference, as for every technique
after the first: all views, their budgets, all figures. Both compare tensors that differ by rounding. They run in turns
in one process (verdict, assert_close, assert_close, verdict), so that a change of the machine's speed affects both;
each block gives one ratio of means. Printed are medians of the blocks, the median ratio, and its 95 % interval by order
statistics, which assumes no distribution. A ratio is above the limit of 1 where the whole interval is, in two
consecutive measurements.

Memory is the larger of two peaks: the running sum of the profiler's `[memory]` events (torch's allocations, to the
byte) and tracemalloc's (NumPy's). The limit is 16 MiB for up to 2^26 elements. The exit status is 1 where a limit is
exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from accelcheck.measure import paired
from accelcheck.verify.judge import judge
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.reference import Layout, Reference
from accelcheck.verify.views import SIGNED, VIEWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WIDTH = 1024
"""Columns of a tensor: a usual hidden size. The smallest is a square of 32."""
LIMIT = 16 * 2**20
"""Bytes that a verdict may take beyond what it compares."""
BLOCK = 0.04
"""Seconds of a block, at least: thousands of the resolution of any clock."""
PATH = "out"


def reference(exponent: int) -> tuple[Tensor, Reference]:
    """A candidate of ``2**exponent`` elements that is the truth rounded to FP32, and its reference."""
    columns = min(WIDTH, 2 ** (exponent // 2))
    generator = torch.Generator().manual_seed(exponent)
    truth = torch.randn(2**exponent // columns, columns, generator=generator).double()
    for rows in torch.split(truth, 2**16 // columns):  # errs by up to a unit; in parts, to fit into a small memory
        rows.mul_(1 + UNIT_ROUNDOFF["float32"] * (torch.rand(rows.shape, generator=generator) - 0.5))
    candidate = truth.float()
    made = Reference(
        truth={PATH: truth},
        layouts={PATH: Layout("float32", tuple(truth.shape), truth.stride())},
        budgets={PATH: dict.fromkeys(VIEWS, 4.0)},
        leanings={PATH: dict.fromkeys(SIGNED, (0.0,))},
        unit=UNIT_ROUNDOFF["float32"],
        spacing=SMALLEST_SUBNORMAL["float32"],
        eager_excess=0.0,
    )
    return candidate, made


def seconds(call: Callable[[], object], times: int) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def blocks(ours: Callable[[], object], theirs: Callable[[], object], count: int) -> list[tuple[float, float]]:
    """Seconds of either side, block by block: A B B A."""
    ours()
    theirs()
    each = max(seconds(ours, 1), seconds(theirs, 1))
    times = max(1, round(BLOCK / 4 / each))
    collected = []
    for _ in range(count):
        first, other, again, last = (seconds(call, times) for call in (ours, theirs, theirs, ours))
        collected.append(((first + last) / 2, (other + again) / 2))
    return collected


def interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval of the median by order statistics; the whole range where there are too few values."""
    error = (1 - confidence) / 2
    return paired.interval(values, error) if len(values) >= paired.fewest(error) else (min(values), max(values))


def peak(call: Callable[[], object]) -> int:
    """Most bytes that a call holds at once, its inputs aside."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
        _ = torch.ones(1)  # seen, or the profiler records nothing: small tensors go through NumPy alone
        call()
    held = most = 0
    # The raw events: `log.events()` has given most of them to the operators that they fell into.
    events = log.profiler.kineto_results.events() if log.profiler is not None else []
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    if not most:
        raise SystemExit("the profiler saw no memory event: this torch records them in another way")
    tracemalloc.start()
    try:
        call()
        return max(most, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


def human(value: float) -> str:
    """Seconds, readable."""
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.2f} ms"


def timed(exponent: int, threads: int, count: int) -> dict[str, Any]:
    """Seconds of either side, their ratio and its interval; measured again where the whole interval lies above 1."""
    candidate, expected = reference(exponent)
    eager = expected.truth[PATH].float()
    result = {PATH: candidate}
    torch.set_num_threads(threads)
    for _ in range(2):
        pairs = blocks(lambda: judge(result, expected), lambda: torch.testing.assert_close(candidate, eager), count)
        ratios = [ours / theirs for ours, theirs in pairs]
        low, high = interval(ratios)
        if low <= 1.0:
            break
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    return {
        "exponent": exponent,
        "threads": threads,
        "verdict": ours,
        "assert_close": theirs,
        "ratio": statistics.median(ratios),
        "low": low,
        "high": high,
    }


def main() -> int:
    """Measure and print; 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exponents", type=int, nargs="+", default=[10, 16, 20, 24], help="sizes to time, powers of 2")
    parser.add_argument("--memory", type=int, nargs="*", default=[10, 16, 20, 24, 26], help="sizes to weigh")
    parser.add_argument("--threads", type=int, nargs="+", default=None, help="default: 1 and all")
    parser.add_argument("--blocks", type=int, default=31, help="blocks a size (default 31)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables, as docs/verdicts.md takes them")
    options = parser.parse_args()
    threads = options.threads or sorted({1, torch.get_num_threads()})
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"torch {torch.__version__}, {os.cpu_count()} processors{load}\n")
    print("| elements | threads | verdict | assert_close | ratio | 95 % interval |\n|---:|---:|---:|---:|---:|---:|")
    times = []
    for exponent in options.exponents:
        for number in threads:
            times.append(row := timed(exponent, number, options.blocks))
            print(
                f"| 2^{exponent} | {number} | {human(row['verdict'])} | {human(row['assert_close'])} | "
                f"{row['ratio']:.2f} "
                f"| {row['low']:.2f} to {row['high']:.2f} |",
                flush=True,
            )
    print("\n| elements | memory beyond the inputs |\n|---:|---:|")
    weights = []
    for exponent in options.memory:
        candidate, expected = reference(exponent)
        result = {PATH: candidate}
        weights.append({"exponent": exponent, "bytes": peak(lambda: judge(result, expected))})  # noqa: B023
        print(f"| 2^{exponent} | {weights[-1]['bytes'] / 2**20:.2f} MiB |", flush=True)
    if options.json:
        stored = {"torch": torch.__version__, "processors": os.cpu_count(), "times": times, "memory": weights}
        options.json.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    return int(any(item["low"] > 1.0 for item in times) or any(weight["bytes"] > LIMIT for weight in weights))


if __name__ == "__main__":
    sys.exit(main())
