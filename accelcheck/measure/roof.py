"""Measured peak rates of a device for matmuls and copies, and the floating-point operations of a call."""

from __future__ import annotations

import functools
import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from accelcheck.measure.clocks import BLOCK, block, positive, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accelcheck.devices.base import Device

SIDE = 1024
"""Largest side of the square matrices on processors: large enough that the product is bound by arithmetic."""
ELSEWHERE = 8192
"""Largest side on all other devices."""
SMALLEST = 128
"""Side that the growth starts from."""
COPIED = 1 << 28
"""Most bytes read and written by the copy: more than caches hold."""
SMALLEST_COPY = 1 << 20
BLOCKS = 5
"""Number of timed blocks; the fastest counts, because a peak is sought."""
LIMIT = 2.0
"""Seconds that the measurement of one rate may take, half of them to find the size. Only a call that takes longer by itself goes beyond."""
LONG = 5.0
"""Seconds from which on the remark of a rate says how long its measurement took."""
SLOWER = 3.0
"""A way to do the same work that takes this many times as long as another is left out."""
SHARE = 16
"""A size is measured where this many of its calls fit into `LIMIT`: eight for each of two layouts."""


PRECISIONS = ("float32", "bfloat16", "float16")
"""Storage dtypes of the products whose peaks say what a device can do."""
NARROWER = 8.0
"""Most times as many operations as the fastest of these products has: int8, float8 and 4-bit units, sparse ones, and Winograd's fewer multiplications."""
CACHED = 64.0
"""Most times as many bytes as a copy moves that no cache holds: a first-level cache gives 128 bytes a cycle, memory 10 GB/s to a core and more."""


_now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured peak rate.

    Attributes:
        value: FLOP/s of a matmul, bytes/s of a copy.
        size: What it was measured with, such as ``1024 x 1024 matrices``.
        seconds: What the measurement took.
    """

    value: float
    size: str
    seconds: float

    @property
    def remark(self) -> str:
        """What it was measured with, and how long it took where that is more than `LIMIT`."""
        return f"with {self.size}" + (f", which took {self.seconds:.0f} s" if self.seconds >= LONG else "")


@functools.cache
def matmul_peak(device: Device, dtype: str) -> Rate:
    """FLOP/s of a square matmul in a storage dtype, with the precision modes that are set.

    The faster of two layouts: float16 on the CPU takes 7 times as long where the second matrix is not transposed, as linear layers have it.
    """

    def products(side: int) -> Sequence[Callable[[], object]]:
        a, b = (_normal(side).to(device.torch_device(), getattr(torch, dtype)) for _ in range(2))
        return (lambda: a @ b.T), (lambda: a @ b)

    sides = _doubling(SMALLEST, SIDE if device.has("host") or device.has("torch-xla") else ELSEWHERE)
    side, seconds, spent = _fastest(device, sides, products, lambda side: 2 * side**3)
    return Rate(2 * side**3 / seconds, f"{side} x {side} matrices", spent)


@functools.cache
def bandwidth(device: Device) -> Rate:
    """Bytes per second that a copy reads and writes."""

    def copies(size: int) -> Sequence[Callable[[], object]]:
        source = torch.zeros(size // 8, device=device.torch_device())
        target = torch.zeros_like(source)
        return (lambda: target.copy_(source),)

    size, seconds, spent = _fastest(device, _doubling(SMALLEST_COPY, COPIED), copies, lambda size: size)
    return Rate(size / seconds, f"{size / (1 << 20):g} MiB", spent)


def excluded(device: Device, operations: float, moved: float, seconds: float) -> str:
    """Reason why a call cannot have done its work in this time; empty where it can.

    Args:
        device: Where it ran.
        operations: Floating-point operations of eager's products.
        moved: Bytes that any implementation reads: inputs and parameters.
        seconds: Time of the call.
    """
    # The peaks of all precisions are measured only where one alone does not settle it.
    fastest = 0.0
    for dtype in (one for one in PRECISIONS if one in device.dtypes):
        fastest = max(fastest, matmul_peak(device, dtype).value)
        if operations / seconds <= NARROWER * fastest:
            break
    else:
        return f"{operations / seconds:.2g} operations a second, where the fastest product here has {fastest:.2g}"
    copies = bandwidth(device).value
    if moved / seconds > CACHED * copies:
        return f"{moved / seconds:.2g} bytes a second of inputs and parameters, where a copy here has {copies:.2g}"
    return ""


def _normal(side: int) -> Tensor:
    """A square matrix of normal numbers; its rows repeat, because drawing all of 8192 x 8192 takes longer than their products."""
    return torch.randn(min(side, SMALLEST), side).repeat(-(-side // SMALLEST), 1)[:side]


def _doubling(smallest: int, largest: int) -> list[int]:
    return [*itertools.takewhile(largest.__gt__, (smallest << step for step in itertools.count())), largest]


def _fastest(
    device: Device,
    sizes: Sequence[int],
    calls_of: Callable[[int], Sequence[Callable[[], object]]],
    work: Callable[[int], int],
) -> tuple[int, float, float]:
    """The fastest call of the largest size that `LIMIT` allows, after warm-up.

    Args:
        device: Where the calls run, and by whose clock.
        sizes: What to try, in rising order.
        calls_of: Makes the calls of a size: ways to do the same work.
        work: How much work a call of a size is.

    Returns:
        The size, the seconds of its fastest call, and the seconds that all of it took.
    """
    start = _now()
    half = start + LIMIT / 2
    size, tries = sizes[0], list[_Try]()
    for larger in sizes:
        if 2 * sum(one.seconds for one in tries) * work(larger) / work(size) > half - _now():
            break
        calls = calls_of(larger)
        found = list[_Try]()
        for way in [one.way for one in tries] or range(len(calls)):
            if not found or _now() < half:
                found.append(_tried(device, calls[way], way, half))
        fastest = min(one.seconds for one in found)
        if tries and fastest * SHARE > LIMIT:
            break
        size = larger
        # A way that is slower by a time that the clock can tell is not the peak.
        tries = [one for one in found if one.seconds <= max(SLOWER * fastest, BLOCK)]
    return size, _settled(device, tries, start + LIMIT), _now() - start


@dataclass(frozen=True, slots=True)
class _Try:
    """One way to do the work of a size, and the seconds of a call, before any warm-up."""

    call: Callable[[], object]
    way: int
    seconds: float


def _tried(device: Device, call: Callable[[], object], way: int, until: float) -> _Try:
    seconds = device.elapsed(call, 1)
    if _now() < until:  # the first call of a size may compile
        seconds = min(seconds, device.elapsed(call, 1))
    return _Try(call, way, seconds)


def _settled(device: Device, tries: Sequence[_Try], end: float) -> float:
    """Seconds of the fastest call after warm-up, of each way as many as fit until `end`; of the tries where none fits."""
    found = math.inf
    for number, one in enumerate(tries):
        until = _now() + (end - _now()) / (len(tries) - number)
        if _now() + one.seconds * SHARE / 4 > until:
            break
        timed = block(device, one.call)
        settle(timed, _now, (until - _now()) / 2)
        for _ in range(BLOCKS):
            found = min(found, timed())
            if _now() > until:
                break
    return found if found < math.inf else positive(min(one.seconds for one in tries), device, 1)


def flops(call: Callable[[], object]) -> int:
    """Floating-point operations of a call's matmuls, convolutions and attentions; a multiplication and an addition are two."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
