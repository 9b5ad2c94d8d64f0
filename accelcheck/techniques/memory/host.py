"""Page-locked (pinned) host memory, from which a device can copy asynchronously."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported

if TYPE_CHECKING:
    from accelcheck.devices.base import Device


def page_locked(device: Device) -> Capability:
    """Tells whether host memory can be pinned for an open device.

    A tensor of four bytes is pinned as a test if the device does not declare the feature.
    """
    if device.has("host"):
        reason = "tensors of the CPU stay in host memory: there is no transfer that pinning could help"
        return unsupported(Code.NO_EFFECT, reason)
    if device.has("torch-xla"):
        reason = "torch_xla has no allocator of pinned memory: PJRT copies to its own buffers before a transfer"
        return unsupported(Code.NO_FEATURE, reason)
    if not device.has("pinned-memory"):
        try:
            tried = torch.empty(1, pin_memory=True)
        except RuntimeError as error:
            reason = f"torch cannot pin memory for {device.name}: {str(error).splitlines()[0]}"
            return unsupported(Code.NO_FEATURE, reason)
        if not tried.is_pinned():
            reason = f"{device.name} has no page-locked memory: a tensor that torch was asked to pin is not"
            return unsupported(Code.NO_EFFECT, reason)
    return SUPPORTED
