"""Four CPU workloads, and an operation that makes each slower by a known part, for speed_gates.py.

The planted operation is the inverse error function of a few thousand elements: about 7 ns each, hardly any memory, and
a time proportional to their number. `calibrated` finds the number for 3, 5 or 10 % from blocks with and without it, in
turns. The table shows the slowdowns measured in the sessions themselves.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import TYPE_CHECKING

import torch
from torch import nn

from accelcheck.devices.cpu import Cpu
from accelcheck.measure.clocks import block, settle, undisturbed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Call = Callable[[], object]

SLOWDOWNS = (0, 3, 5, 10)
"""Planted slowdowns in per cent; 0 is the false-alarm cell."""
PROBED = 1 << 14
"""Elements that are timed alone, for a first estimate."""
AIMS = (0.05, 0.1, 0.2, 0.3)
"""Approximate slowdowns that the straight line is fitted to."""
WINDOW = 25
"""Blocks of the first estimate."""
_CPU = Cpu()


def prepare(threads: int) -> None:
    """Set up a process that measures."""
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def matmul_relu() -> Call:
    """The matmul and ReLU of 128 x 256 x 512."""
    a, b = torch.randn(128, 256), torch.randn(256, 512)
    return lambda: torch.relu(a @ b)


def mlp() -> Call:
    """Three layers of width 256 on 128 samples."""
    module = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    x = torch.randn(128, 256)
    return lambda: module(x)


def convolution() -> Call:
    """A 3 x 3 convolution of 16 to 32 channels, channels last."""
    module = nn.Conv2d(16, 32, 3, padding=1)
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's annotations lack it
    x = torch.randn(4, 16, 32, 32).to(memory_format=torch.channels_last)
    return lambda: module(x)


def elementwise() -> Call:
    """Twenty element-wise operations on 256 x 512: 512 KiB are allocated for each result, so where they lie shows."""
    x, y = torch.randn(256, 512), torch.rand(256, 512)

    def call() -> object:
        value = x
        for _ in range(10):
            value = value * y
            value = value + 0.01
        return value

    return call


WORKLOADS: Mapping[str, Callable[[], Call]] = {
    "matmul-relu": matmul_relu,
    "mlp": mlp,
    "conv-channels-last": convolution,
    "elementwise-20": elementwise,
}
"""Makers of workloads, each call with its own tensors."""


def slowed(call: Call, elements: int) -> Call:
    """The call with so many elements of the planted operation; with none, the call itself."""
    if not elements:
        return call
    source, target = torch.linspace(-0.9, 0.9, elements), torch.empty(elements)

    def both() -> object:
        result = call()
        torch.erfinv(source, out=target)
        return result

    return both


def timed(calls: Sequence[Call]) -> list[Callable[[], float]]:
    """Warmed-up blocks of each call."""
    blocks = [block(_CPU, call) for call in calls]
    for item in blocks:
        settle(item)
    return blocks


def in_turns(blocks: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Times of each block in s, round by round, every other round in the opposite order."""
    seconds: list[list[float]] = [[] for _ in blocks]
    with undisturbed():
        for number in range(rounds):
            order = range(len(blocks)) if number % 2 == 0 else range(len(blocks) - 1, -1, -1)
            for which in order:
                seconds[which].append(blocks[which]())
    return seconds


def part(base: Sequence[float], other: Sequence[float]) -> float:
    """The other's slowdown as a part, from the median log ratio of rounds."""
    return math.expm1(statistics.median([math.log(b / a) for a, b in zip(base, other, strict=True)]))


def calibrated(name: str, rounds: int) -> tuple[dict[int, int], dict[int, float]]:
    """Finds the number of elements for each of `SLOWDOWNS`, and measures the slowdown with them.

    Time is linear in the number of elements. The line is fitted to large slowdowns, where disturbances matter least.

    Args:
        name: Name of the workload.
        rounds: Rounds of blocks of each number of elements; twice as many in the second measurement.
    """
    call = WORKLOADS[name]()
    alone, each = (statistics.median(times) for times in in_turns(timed([call, slowed(lambda: None, PROBED)]), WINDOW))
    tried = [round(PROBED * aim * alone / each) for aim in AIMS]
    seen = in_turns(timed([call, *(slowed(call, count) for count in tried)]), rounds)
    slope, start = statistics.linear_regression(tried, [part(seen[0], other) for other in seen[1:]])
    elements = {per_cent: max(1, round((per_cent / 100 - start) / slope)) if per_cent else 0 for per_cent in SLOWDOWNS}
    seen = in_turns(timed([slowed(call, count) for count in elements.values()]), 2 * rounds)
    return elements, {per_cent: part(seen[0], other) for per_cent, other in zip(elements, seen, strict=True)}


def shuffled(names: Sequence[str], seed: int) -> list[tuple[str, int]]:
    """All workloads with all slowdowns, in an order of the seed's."""
    cells = [(name, per_cent) for name in names for per_cent in SLOWDOWNS]
    random.Random(seed).shuffle(cells)
    return cells
