"""Exchange with CuPy while the producer, on another stream, has not yet written the tensor."""

from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.interop.dlpack import CupyExchange, exchange_all
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.base import Program

DELAY = 10**7
"""Clock cycles for which a producer waits before it writes: 5 ms at 2 GHz. A hasty consumer reads earlier."""
GIVE = "give"
"""Key in `Program.extras` of the function that gives CuPy a tensor; a fault can replace it."""
SEEN = "streams"
"""Key in `Program.extras` of the counts of streams and of early exchanges."""
WORKLOADS = frozenset({"matmul", "mlp", "train-mlp"})


class CupyStreams(CupyExchange):
    """Torch writes a tensor on one stream after a delay, CuPy copies it on a second, torch reads the copy on a third.

    Only the exchange itself orders the streams: in DLPack's protocol the producer makes the consumer's stream wait for
    its own. A side that reads too early gets NaN. Memory returns to a pool only after the reading stream waits for the
    other two, and every later use of these pools first waits for the reading stream.
    """

    name = "cupy-stream"
    workloads = WORKLOADS
    promise = "An exchange through DLPack orders the streams of both sides: consumers read what the producer wrote."
    source = "https://dmlc.github.io/dlpack/latest/python_spec.html#syntax-for-data-interchange-with-dlpack"
    warmups = 1  # CuPy compiles its kernels at the first use, which takes longer than the delay

    def exchangeable(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.numel() > 0

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        seen = Counter[str]()
        program.extras |= {GIVE: self.give, SEEN: seen}
        program.resets.append(seen.clear)
        exchange_all(program, lambda tensor: self.through(tensor, program) if self.exchangeable(tensor) else tensor)

    def through(self, tensor: Tensor, program: Program) -> Tensor:
        """Passes the tensor through two other streams."""
        give, seen = program.extras[GIVE], program.extras[SEEN]
        cuda: Any = torch.cuda  # its streams are not annotated
        reader, writer = cuda.current_stream(), cuda.Stream()
        copier = import_module("cupy").cuda.Stream(non_blocking=True)
        writer.wait_stream(reader)
        with cuda.stream(writer):
            written, copied = torch.full_like(tensor, float("nan")), torch.full_like(tensor, float("nan"))
            writer.synchronize()
            cuda._sleep(DELAY)  # noqa: SLF001 - torch's own tests of streams use it
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
        seen: Counter[str] = program.extras[SEEN]
        yield exactly("streams of reader, writer and copier", seen["streams"], 3)
        yield at_least("tensors handed over before they were written", seen["early"])


TECHNIQUES = (CupyStreams(),)
