"""A vendor's own technique: each input is written on a stream of its own; the model's stream waits by an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from accelcheck.api import SUPPORTED, Capability, Code, Device, Evidence, Mode, Program, Technique, unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.api import Log

DELAY = 20.0
"""Milliseconds that the writing stream waits: a reader that does not wait for the event reads NaN."""
SEEN = "acme-streams"
"""Key in `Program.extras` of what each exchange saw: whether the tensor was still unwritten."""


class OrderedStreams(Technique):
    """Inputs are copied on a second stream, after a delay; an event orders it before the stream that computes."""

    name = "acme-streams"
    family = "acme"
    promise = "A stream that waits for an event reads what was written before it."
    source = "https://docs.pytorch.org/docs/stable/accelerator/index.html"
    requires = frozenset({"matmul"})
    modes = frozenset({Mode.FORWARD})
    timed = False

    def capability(self, device: Device) -> Capability:
        if device.name == "acme":
            return SUPPORTED
        return unsupported(Code.NO_BACKEND, f"{device.name} is no Acme NPU")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        early = program.extras[SEEN] = list[bool]()
        program.resets.append(early.clear)
        module = program.module

        def call(*inputs: object) -> object:
            return module(
                *(self._through(tensor, early, device) if isinstance(tensor, Tensor) else tensor for tensor in inputs)
            )

        program.call = call

    def _through(self, tensor: Tensor, early: list[bool], device: Device) -> Tensor:
        module = torch.get_device_module(device.type)
        written = torch.empty_like(tensor)
        event, writer = torch.Event(device.type), torch.Stream(device.type)
        ready = torch.accelerator.current_stream().record_event()
        with writer:
            writer.wait_event(ready)
            module.sleep(DELAY)
            written.copy_(tensor)
            event.record(writer)
        early.append(not event.query())
        torch.accelerator.current_stream().wait_event(event)
        return written.clone()

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen: list[bool] = program.extras[SEEN]
        yield Evidence("inputs read while they were still to be written >= 1", sum(seen), engaged=any(seen))
