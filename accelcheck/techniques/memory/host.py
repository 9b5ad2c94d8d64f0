"""Host memory that a device copies from by itself: page-locked, or pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported

if TYPE_CHECKING:
    from accelcheck.devices.base import Device


def page_locked(device: Device) -> Capability:
    """Whether host memory can be pinned for an open device.

    CUDA and ROCm have it; a stranger is asked for four bytes of it.
    """
    if device.type == "cpu":
        return unsupported(
            Code.NO_EFFECT, "tensors of the CPU stay in host memory: there is no transfer to pin them for"
        )
    if device.type == "xla":
        return unsupported(
            Code.NO_FEATURE,
            "torch_xla gives torch no allocator of pinned memory: PJRT copies into buffers of its own before it transfers",
        )
    if device.type != "cuda":
        try:
            torch.empty(1, pin_memory=True)
        except (RuntimeError, NotImplementedError) as error:
            return unsupported(Code.NO_FEATURE, f"torch pins no memory for {device.name}: {str(error).splitlines()[0]}")
    return SUPPORTED
