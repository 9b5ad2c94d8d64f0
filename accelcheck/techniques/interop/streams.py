"""Tensors handed to CuPy and back while their producer, on another stream, has not written them yet."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.interop.dlpack import CupyBorder, bordered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload

DELAY = 10**7
"""Clock cycles that a producer waits before it writes: 5 ms at 2 GHz, in which a consumer that does not wait has long read."""
GIVE = "give"
"""Where a program keeps what gives CuPy a tensor."""
SEEN = "streams"
"""Where it keeps what was seen of the streams."""
WORKLOADS = frozenset({"matmul", "mlp", "train-mlp"})


class CupyStreams(CupyBorder):
    """Each tensor is written by torch on a stream of its own, after a delay, copied by CuPy on another, and read by torch.

    Nobody waits but the exchange itself: DLPack has the producer make the consumer's stream wait for its own. What either
    side would read too early is NaN. Memory goes back to a pool only when the reading stream waits for those before it, and
    every later use of these pools begins by waiting for the reading stream.
    """

    name = "cupy-stream"
    promise = (
        "An exchange through DLPack orders the streams of both sides: no consumer reads before its producer wrote."
    )
    source = "https://dmlc.github.io/dlpack/latest/python_spec.html#syntax-for-data-interchange-with-dlpack"
    warmups = 1  # CuPy compiles its kernels at their first use, which takes longer than the delay

    def accepts(self, workload: Workload) -> bool:
        return super().accepts(workload) and workload.name in WORKLOADS

    def crosses(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.numel() > 0

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode, device
        program.extras |= {GIVE: self.give, SEEN: Counter()}
        bordered(program, lambda tensor: self.through(tensor, program) if self.crosses(tensor) else tensor)

    def through(self, tensor: Tensor, program: Program) -> Tensor:
        """The tensor, by way of two further streams."""
        give, seen = program.extras[GIVE], program.extras[SEEN]
        cuda: Any = torch.cuda  # its streams are not annotated
        reader, writer = cuda.current_stream(), cuda.Stream()
        copier = import_module("cupy").cuda.Stream(non_blocking=True)
        writer.wait_stream(reader)
        with cuda.stream(writer):
            written, copied = torch.full_like(tensor, float("nan")), torch.full_like(tensor, float("nan"))
            writer.synchronize()
            cuda._sleep(DELAY)  # noqa: SLF001 - what torch's own tests of streams delay with
            written.copy_(tensor)
            with copier:
                source, target = give(written), give(copied)
                seen["early"] += not writer.query()
                self.fill(target, source)
        with copier:
            out = self.take(target)
        seen["streams"] = len({reader.cuda_stream, writer.cuda_stream, copier.ptr})
        return out.clone()

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del log, mode, device
        seen: Counter[str] = program.extras[SEEN]
        yield Evidence("streams of reader, writer and copier = 3", seen["streams"], engaged=seen["streams"] == 3)
        yield Evidence("tensors handed over before they were written >= 1", seen["early"], engaged=seen["early"] >= 1)


TECHNIQUES = (CupyStreams(),)
