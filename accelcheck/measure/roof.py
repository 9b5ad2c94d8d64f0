"""Measured peak rates of a device for matmuls and copies, and the floating-point operations of a call."""

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
"""Side of the square matrices, by device type: large enough that the product is bound by arithmetic."""
ELSEWHERE = 8192
"""Side on all other devices."""
COPIED = 1 << 28
"""Bytes read and written by the copy: more than caches hold."""
BLOCKS = 5
"""Number of timed blocks; the fastest counts, because a peak is sought."""


@functools.cache
def matmul_peak(device: Device, dtype: str) -> float:
    """FLOP/s of a square matmul in a storage dtype, with the precision modes that are set.

    The faster of two layouts: float16 on the CPU takes 7 times as long where the second matrix is not transposed, as linear layers have it.
    """
    side = SIDE.get(device.type, ELSEWHERE)
    a, b = (torch.randn(side, side).to(device.torch_device(), getattr(torch, dtype)) for _ in range(2))
    return 2 * side**3 / min(_fastest(device, lambda: a @ b), _fastest(device, lambda: a @ b.T))


@functools.cache
def bandwidth(device: Device) -> float:
    """Bytes per second that a copy reads and writes."""
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
