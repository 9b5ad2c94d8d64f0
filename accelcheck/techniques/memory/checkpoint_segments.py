"""Activation checkpointing in segments: of several blocks in a row, only what goes into the first is kept."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.memory.peaks import lower, of_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.measure.memory import Peak
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

SEGMENTS = 4
"""Near the square root of the number of blocks (eight, in the suite's deep workloads), where the peak is lowest."""

_FORWARDS = "forwards of each block"
_PLAIN = "peak of the plain run"


class Segments(Technique):
    """The module's ``blocks`` run in `SEGMENTS` segments.

    The last, which has what does not divide evenly, is stored: its backward pass comes at once.
    """

    family = "checkpoint"
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN})
    requires = frozenset({"blocks", "activations"})
    early = frozenset({"deep-blocks"})

    def __init__(self, name: str, source: str, promise: str) -> None:
        self.name = name
        self.source = source
        self.promise = promise

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        """The blocks one after the other, in segments."""
        raise NotImplementedError(f"{type(self).__name__}.chain: run the blocks in segments")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        blocks = _blocks(program)
        program.extras[_PLAIN] = of_run(program, mode, device)
        counts: Counter[int] = Counter()
        program.extras[_FORWARDS] = counts
        plain = [_counted(block.forward, counts, number) for number, block in enumerate(blocks)]
        # On the instances: wrapping modules instead would rename their parameters, by which gradients are found. The module
        # goes through its blocks as before: the first one does the work of all.
        blocks[0].forward = lambda x: self.chain(plain, x)
        for block in blocks[1:]:
            block.forward = _passed_on

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del log
        counts: Counter[int] = program.extras[_FORWARDS]
        plain: Peak = program.extras[_PLAIN]
        blocks = _blocks(program)
        forwards = [counts[number] for number in range(len(blocks))]  # before a run is measured, which has some too
        passes = program.steps if mode is Mode.TRAIN else 1
        again = (SEGMENTS - 1) * (len(blocks) // SEGMENTS)
        bytes_ = f" (no peak: {plain.reason})" if plain.bytes is None else ""
        yield Evidence(
            f"forwards of the first {again} blocks = {2 * passes} each, of the rest {passes}{bytes_}",
            " ".join(map(str, forwards)),
            engaged=forwards == [2 * passes] * again + [passes] * (len(blocks) - again),
        )
        if plain.bytes is not None:
            yield lower(of_run(program, mode, device), plain)


class TorchSegments(Segments):
    """``torch.utils.checkpoint.checkpoint_sequential``."""

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        return checkpoint_sequential(blocks, SEGMENTS, x, use_reentrant=False)  # type: ignore[no-untyped-call]  # untyped in torch


class XlaSegments(Segments):
    """Segments under ``torch_xla.utils.checkpoint``, divided as torch divides them."""

    def capability(self, device: Device) -> Capability:
        if device.type != "xla":
            return unsupported(Code.NO_BACKEND, f"torch_xla.utils.checkpoint is for xla tensors, not {device.type}")
        return SUPPORTED

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        checkpoint: Callable[..., Any] = importlib.import_module("torch_xla.utils.checkpoint").checkpoint
        size = len(blocks) // SEGMENTS
        for start in range(0, size * (SEGMENTS - 1), size):
            x = checkpoint(functools.partial(_in_turn, blocks[start : start + size]), x)
        return _in_turn(blocks[size * (SEGMENTS - 1) :], x)


def _blocks(program: Program) -> nn.ModuleList:
    blocks = program.module.blocks
    if not isinstance(blocks, nn.ModuleList) or len(blocks) < SEGMENTS:
        raise TypeError(
            f"expected {type(program.module).__name__}.blocks to be a ModuleList of {SEGMENTS} or more, to divide into "
            f"segments; got {blocks}"
        )
    return blocks


def _in_turn(blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
    return functools.reduce(lambda value, block: block(value), blocks, x)


def _passed_on(x: Tensor) -> Tensor:
    return x


def _counted(forward: Callable[..., Any], counts: Counter[int], number: int) -> Callable[[Tensor], Any]:
    def counted(x: Tensor) -> Any:
        counts[number] += 1
        return forward(x)

    return counted


TECHNIQUES: tuple[Technique, ...] = (
    TorchSegments(
        "checkpoint-segments",
        "https://docs.pytorch.org/docs/stable/checkpoint.html#torch.utils.checkpoint.checkpoint_sequential",
        "Segments that are computed again lower the peak of memory, and give the gradients of storing.",
    ),
    XlaSegments(
        "checkpoint-segments-xla",
        "https://docs.pytorch.org/xla/release/r2.9/index.html",
        "Segments that are computed again behind optimization barriers give the gradients of storing.",
    ),
)
