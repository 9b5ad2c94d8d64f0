"""Faults of results that are read before they are written, or computed on another device than the one asked for."""

import threading
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, backward, fault, passes, where
from accelcheck.selftest.faults.plant import Kernel, Run, always, kernel, running, wrapping
from accelcheck.techniques.interop.streams import GIVE
from accelcheck.workloads.base import Program, Result

PATIENCE = 10.0
"""Time limit in seconds for either side; both only copy."""


def raced(share: float) -> Change:
    """A buffer shared by two libraries is read while the other still writes it.

    The producer is a thread that waits until the consumer has read, so the race is lost every time. The last `share` of
    the buffer, which is not written yet, holds the result of the call before.
    """
    buffers: dict[tuple[int, ...], Tensor] = {}

    def call(plain: Any, *inputs: Any) -> Tensor:
        out: Tensor = plain(*inputs)
        shape = tuple(out.shape)
        buffer = buffers.setdefault(shape, torch.zeros_like(out)).view(-1)
        ready = buffer.numel() - max(1, int(buffer.numel() * share))
        begun, taken = threading.Event(), threading.Event()

        @torch.no_grad()
        def produce() -> None:
            content = out.detach().reshape(-1)
            buffer[:ready] = content[:ready]
            begun.set()
            taken.wait(PATIENCE)
            buffer[ready:] = content[ready:]

        producer = threading.Thread(target=produce, name="producer")
        producer.start()
        begun.wait(PATIENCE)
        read = buffer.clone().view(shape)
        taken.set()
        producer.join()
        return read

    return wrapping(call)


def streamed(strength: float) -> Change:
    """Nothing waits for a call on another stream; the strength is its delay in clock cycles."""
    delay = int(strength)

    def call(plain: Any, *inputs: Any) -> Tensor:
        here = torch.cuda.current_stream()
        other = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # not annotated in torch
        # The result of a plain run gives the sizes; its values are poisoned.
        read = torch.full_like(plain(*inputs), float("nan"))
        other.wait_stream(here)
        with torch.cuda.stream(other):
            torch.cuda._sleep(delay)  # type: ignore[no-untyped-call]  # noqa: SLF001 - as in torch's tests
            read.copy_(plain(*inputs))
        out = read.clone()
        here.wait_stream(other)  # afterwards, so that no memory is freed under the delayed call
        return out

    return wrapping(call)


class Unordered:
    """A tensor that is exported without ordering any streams, as ``stream=-1`` asks."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self._tensor.__dlpack__(stream=-1, **options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


def unordered(strength: float) -> Change:
    """A tensor is exported to a library on another stream that does not wait for the producer."""

    def change(program: Program) -> None:
        give = program.extras[GIVE]
        program.extras[GIVE] = lambda tensor: give(Unordered(tensor))

    return change


def unsynced(strength: float) -> Change:
    """Results are read before the device is synchronised. The host reads its mirror of the run before."""
    mirror: Result = {}

    def run(plain: Run, mode: Mode) -> Result:
        result = plain(mode)
        read = {path: mirror.get(path, torch.zeros_like(tensor)) for path, tensor in result.items()}
        same = all(read[path].shape == tensor.shape for path, tensor in result.items())
        mirror.update(result)
        return read if same else result

    return running(run)


@always(kernel("relu", "tanh", "gelu"))
def fallen_back(func: Kernel, *args: Any, **options: Any) -> Tensor:
    """An operator without a kernel falls back to the CPU without notice; the result is right."""
    (device,) = {value.device for value in args if isinstance(value, Tensor)}
    moved = [value.cpu() if isinstance(value, Tensor) else value for value in args]
    return func(*moved, **options).to(device)


elsewhere = where(lambda device: not device.has("host"), "the CPU is what others fall back to", Code.NO_EFFECT)
on_streams = where(lambda device: device.has("torch-cuda"), "{} has no streams that a caller chooses")


FAULTS = (
    fault("race-at-border")((Cell("mlp"), Cell("matmul")), raced, strengths=(1.0, 0.1, 0.001), number=40),
    fault("stream-race")(Cell("mlp"), streamed, strengths=(1e7,), number=40, exists=on_streams),
    fault("dlpack-unordered")(
        passes("mlp", ("float32", "float16")), unordered, number=40, technique="cupy-stream", exists=on_streams
    ),
    fault("result-unsynced")((Cell("mlp"), backward("mlp"), Cell("train-mlp", Mode.TRAIN)), unsynced, number=41),
    fault("operator-on-the-cpu")((Cell("mlp"), Cell("gelu")), fallen_back, number=41, exists=elsewhere),
)
