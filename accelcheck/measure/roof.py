"""Measured peak rates of a device for matmuls and copies, and the floating-point operations of a call."""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelcheck.devices.base import Device
from accelcheck.devices.flops import flop_counter
from accelcheck.measure.clocks import BLOCK, block, positive, settle

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
"""Time limit of the measurement of a rate in seconds, half of them to find the size; a running call is finished."""
LONG = 5.0
"""Seconds of a measurement from which on the remark of its rate states them."""
SLOWER = 3.0
"""Least ratio of times at which the slower way to do the same work is left out."""
SHARE = 16
"""Number of calls of a size that must fit into `LIMIT`: eight for each of two layouts."""
PRECISIONS = ("float32", "bfloat16", "float16")
"""Storage dtypes of the products whose peaks bound a device's rate."""
NARROWER = 8.0
"""Largest plausible ratio to the fastest of these products: int8, float8, 4-bit and sparse units, and Winograd."""
CACHED = 64.0
"""Largest plausible ratio to the bandwidth of a copy beyond all caches: a first-level cache gives 128 bytes a cycle,
memory 10 GB/s and more to a core."""

_now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Rate:
    """A measured peak, FLOP/s of a matmul or bytes/s of a copy, the size of the work, and the seconds of measuring."""

    value: float
    size: str
    seconds: float

    @property
    def remark(self) -> str:
        """The size of the measured work, and the duration from `LONG` on."""
        return f"with {self.size}" + (f", which took {self.seconds:.0f} s" if self.seconds >= LONG else "")


@functools.cache
def matmul_peak(device: Device, dtype: str) -> Rate:
    """FLOP/s of a square matmul in a storage dtype, with the precision modes that are set.

    The faster of two layouts counts: float16 on the CPU takes 7 times as long with the second matrix not transposed.
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
    """Reason why a call cannot have done its work in this time (`seconds`); empty where it can.

    `operations` are those of eager's products, and `moved` the bytes that any implementation reads: inputs, parameters.
    """
    # The peaks of all precisions are measured only where one alone does not settle it.
    fastest = 0.0
    for dtype in (precision for precision in PRECISIONS if precision in device.dtypes):
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
    """A square matrix of normal numbers, whose rows repeat: drawing 8192 x 8192 takes longer than multiplying them."""
    return torch.randn(min(side, SMALLEST), side).repeat(-(-side // SMALLEST), 1)[:side]


def _doubling(smallest: int, largest: int) -> list[int]:
    return [*itertools.takewhile(largest.__gt__, (smallest << step for step in itertools.count())), largest]


def _fastest(
    device: Device,
    sizes: Sequence[int],
    calls_of: Callable[[int], Sequence[Callable[[], object]]],
    work: Callable[[int], int],
) -> tuple[int, float, float]:
    """The fastest call of the largest size that `LIMIT` allows, after warm-up: the size, its seconds, and all seconds.

    `sizes` rise; `calls_of` makes the calls of a size, ways to do the same work, whose amount is `work` of the size.
    """
    start = _now()
    half = start + LIMIT / 2
    size, tries = sizes[0], list[_Try]()
    for larger in sizes:
        if 2 * sum(attempt.seconds for attempt in tries) * work(larger) / work(size) > half - _now():
            break
        calls = calls_of(larger)
        larger_tries = list[_Try]()
        for way in [attempt.way for attempt in tries] or range(len(calls)):
            if not larger_tries or _now() < half:
                larger_tries.append(_tried(device, calls[way], way, half))
        fastest = min(attempt.seconds for attempt in larger_tries)
        if tries and fastest * SHARE > LIMIT:
            break
        size = larger
        # A way that is slower by a time that the clock can tell is not the peak.
        tries = [attempt for attempt in larger_tries if attempt.seconds <= max(SLOWER * fastest, BLOCK)]
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
    """Seconds of the fastest call after warm-up, of as many blocks as fit until `end`; of the tries where none fits."""
    fastest = math.inf
    for number, attempt in enumerate(tries):
        until = _now() + (end - _now()) / (len(tries) - number)
        if _now() + attempt.seconds * SHARE / 4 > until:
            break
        timed = block(device, attempt.call)
        settle(timed, _now, (until - _now()) / 2)
        for _ in range(BLOCKS):
            fastest = min(fastest, timed())
            if _now() > until:
                break
    return fastest if fastest < math.inf else positive(min(attempt.seconds for attempt in tries), device, 1)


def flops(call: Callable[[], object]) -> int:
    """Floating-point operations of a call's matmuls, convolutions and attentions; a multiply-add counts as two."""
    with flop_counter() as counter:
        call()
    return int(counter.get_total_flops())
