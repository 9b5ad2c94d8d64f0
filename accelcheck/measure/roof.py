"""What a device can do at most, measured on it: multiplications and copies; and what of that a call needs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.utils.flop_counter import FlopCounterMode

from accelcheck.measure.clocks import block, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.devices.base import Device

SIDE = {"cpu": 1024, "xla": 1024}
"""Side of the square matrices that are multiplied: large enough that the product is bound by arithmetic."""
ELSEWHERE = 8192
"""The same on accelerators."""
COPIED = 1 << 28
"""Bytes that are copied: more than caches hold."""
BLOCKS = 5
"""Blocks that are timed; the fastest counts, being a limit."""


@functools.cache
def matmul_peak(device: Device, dtype: str) -> float:
    """FLOP/s of a square matmul in a storage dtype, in the modes that are set.

    Of two layouts the faster: float16 on the CPU takes 7 times as long where the second matrix is not transposed, as linear layers have it.
    """
    side = SIDE.get(device.type, ELSEWHERE)
    a, b = (torch.randn(side, side).to(device.torch_device(), getattr(torch, dtype)) for _ in range(2))
    return 2 * side**3 / min(_fastest(device, lambda: a @ b), _fastest(device, lambda: a @ b.T))


@functools.cache
def bandwidth(device: Device) -> float:
    """Bytes/s that a copy reads and writes."""
    source = torch.zeros(COPIED // 8, device=device.torch_device())
    target = torch.zeros_like(source)
    return COPIED / _fastest(device, lambda: target.copy_(source))


def _fastest(device: Device, call: Callable[[], object]) -> float:
    timed = block(device, call)
    settle(timed)
    return min(timed() for _ in range(BLOCKS))


def flops(call: Callable[[], object]) -> int:
    """Floating-point operations of a call's matmuls, convolutions and attentions; a multiplication and an addition are two."""
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())
