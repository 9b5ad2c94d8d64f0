"""Activation offload: tensors that autograd saves stay in host memory, page-locked or not, until they are needed."""

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.measure.memory import Peak
from accelcheck.techniques.base import Technique
from accelcheck.techniques.memory.peaks import evidence_of_lower_peak, peak_of_run
from accelcheck.techniques.observe import Log, exactly
from accelcheck.workloads.base import Program

_TALLY = "tensors offloaded"
_PLAIN = "peak of the plain run"


def page_locked(device: Device) -> Capability:
    """Tells whether an open device can pin host memory: tried with four bytes if it does not declare the feature."""
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


class Tally(Counter[str]):
    """Counts of tensors that autograd saved (`packed`, of some bytes) and that a backward pass asked for (`unpacked`).

    `elsewhere` were not packed on the CPU, `copied` were packed in memory of their own, `pinned` in page-locked memory;
    `altered` were packed or unpacked with another dtype or shape, or unpacked to another device.
    """


class Counted(save_on_cpu):
    """``save_on_cpu`` with a tally, whose copies the log does not see: it would say that operators left the device."""

    def __init__(self, tally: Tally, **options: Any) -> None:
        super().__init__(**options)
        pack, unpack = self.pack_hook, self.unpack_hook

        def packing(tensor: Tensor) -> Any:
            with disable_current_modes():
                packed = pack(tensor)
            held = packed[1]
            own = tensor.device.type != "cpu" or held.data_ptr() != tensor.data_ptr()
            tally.update(packed=1, bytes=held.nbytes, copied=int(own), pinned=int(held.is_pinned()))
            tally["elsewhere"] += held.device.type != "cpu"
            tally["altered"] += (held.dtype, held.shape) != (tensor.dtype, tensor.shape)
            return packed

        def unpacking(packed: Any) -> Any:
            tensor = unpack(packed)
            place, held = packed
            tally["unpacked"] += 1
            tally["altered"] += (tensor.dtype, tensor.shape, tensor.device) != (held.dtype, held.shape, place)
            return tensor

        self.pack_hook, self.unpack_hook = packing, unpacking


class Offload(Technique):
    """``torch.autograd.graph.save_on_cpu`` around every forward pass.

    On the CPU its hooks run too. With pinning they copy; without it they keep the tensor itself.
    """

    family = "offload"
    source = "https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu"
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN})
    requires = frozenset({"activations"})
    early = frozenset({"deep-blocks"})

    def __init__(self, name: str, promise: str, *, pinned: bool) -> None:
        self.name, self.promise, self.pinned = name, promise, pinned

    def saving(self, tally: Tally, device: Device) -> AbstractContextManager[Any]:
        """Makes the context for a forward pass."""
        # save_on_cpu asks the device type's module in torch whether to pin memory, and torch.cuda if there is none.
        asked = device.type if page_locked(device).ok else "cuda"
        return Counted(tally, pin_memory=self.pinned, device_type=asked)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if not device.has("host"):
            program.extras[_PLAIN] = peak_of_run(program, mode, device)
        tally = program.extras[_TALLY] = Tally()
        program.resets.append(tally.clear)
        program.around = lambda: self.saving(tally, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen = Counter(program.extras[_TALLY])  # copied before a run is measured, which adds to it
        plain: Peak | None = program.extras.get(_PLAIN)
        unknown = f" (no peak: {plain.reason})" if plain is not None and plain.bytes is None else ""
        yield Evidence(f"bytes saved in host memory >= 1{unknown}", seen["bytes"], engaged=seen["bytes"] >= 1)
        claim = f"tensors returned for the backward pass = {seen['packed']}, all that were saved"
        yield Evidence(claim, seen["unpacked"], engaged=seen["unpacked"] == seen["packed"])
        yield exactly("tensors not saved on the CPU", seen["elsewhere"], 0)
        yield exactly("tensors saved or returned with another dtype, shape or device", seen["altered"], 0)
        copied = 0 if device.has("host") and not self.pinned else seen["packed"]
        yield exactly("tensors saved in their own memory", seen["copied"], copied)
        pinned = seen["packed"] if self.pinned and page_locked(device).ok else 0
        yield exactly("tensors saved in page-locked memory", seen["pinned"], pinned)
        if plain is not None and plain.bytes is not None:
            yield evidence_of_lower_peak(peak_of_run(program, mode, device), plain)


_HOST = "Activations that are stored on the host give the same gradients as those that stay on the device."
_PINNED = "Activations copied to the host, page-locked where the device can use that, give the same gradients."

TECHNIQUES: tuple[Technique, ...] = (
    Offload("offload-cpu", _HOST, pinned=False),
    Offload("offload-cpu-pinned", _PINNED, pinned=True),
)
