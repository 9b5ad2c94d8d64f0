"""Activation checkpointing in segments of several blocks: only the input of each segment is stored."""

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.measure.memory import Peak
from accelcheck.techniques.base import Technique
from accelcheck.techniques.memory.checkpoint import XLA_SOURCE, recomputable, xla_recomputable
from accelcheck.techniques.memory.peaks import evidence_of_lower_peak, peak_of_run
from accelcheck.techniques.observe import Log
from accelcheck.workloads.base import Program

SEGMENTS = 4
"""Number of segments. The peak is lowest near the square root of the number of blocks (eight in the suite)."""
_FORWARDS = "forwards of each block"
_PLAIN = "peak of the plain run"


class Segments(Technique):
    """Runs the module's ``blocks`` in segments. The last, with the rest, needs no checkpoint: its backward is next."""

    family = "checkpoint"
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN})
    requires = frozenset({"blocks", "activations"})
    early = frozenset({"deep-blocks"})

    def __init__(self, name: str, source: str, promise: str) -> None:
        self.name, self.source, self.promise = name, source, promise

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        """Computes the output for `x` of all blocks in a row, run in segments."""
        raise NotImplementedError(f"{type(self).__name__}.chain: run the blocks in segments")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        blocks = _blocks(program)
        program.extras[_PLAIN] = peak_of_run(program, mode, device)
        counts = program.extras[_FORWARDS] = Counter[int]()
        program.resets.append(counts.clear)
        plain = [functools.partial(_counted, b.forward, counts, number) for number, b in enumerate(blocks)]
        # On the instances: wrapper modules would rename the parameters, and with them the paths of gradients. The
        # module calls its blocks as before: the first one now runs all of them, and the others return their input.
        blocks[0].forward = lambda x: self.chain(plain, x)
        for block in blocks[1:]:
            block.forward = lambda x: x

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        counts: Counter[int] = program.extras[_FORWARDS]
        plain: Peak = program.extras[_PLAIN]
        blocks = _blocks(program)
        forwards = [counts[number] for number in range(len(blocks))]  # copied: a measured run adds to the counts
        passes = program.steps if mode is Mode.TRAIN else 1
        again = (SEGMENTS - 1) * (len(blocks) // SEGMENTS)
        bytes_ = f" (no peak: {plain.reason})" if plain.bytes is None else ""
        claim = f"forwards of the first {again} blocks = {2 * passes} each, of the rest {passes}{bytes_}"
        wanted = [2 * passes] * again + [passes] * (len(blocks) - again)
        yield Evidence(claim, " ".join(map(str, forwards)), engaged=forwards == wanted)
        if plain.bytes is not None:
            yield evidence_of_lower_peak(peak_of_run(program, mode, device), plain)


class TorchSegments(Segments):
    """``torch.utils.checkpoint.checkpoint_sequential``."""

    capability = staticmethod(recomputable)

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        run: Callable[..., Any] = checkpoint_sequential  # not annotated in torch
        return run(blocks, SEGMENTS, x, use_reentrant=False)


class XlaSegments(Segments):
    """Segments under ``torch_xla.utils.checkpoint``, divided as ``checkpoint_sequential`` divides them."""

    capability = staticmethod(xla_recomputable)

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        checkpoint: Callable[..., Any] = importlib.import_module("torch_xla.utils.checkpoint").checkpoint
        size = len(blocks) // SEGMENTS
        for start in range(0, size * (SEGMENTS - 1), size):
            x = checkpoint(functools.partial(_in_turn, blocks[start : start + size]), x)
        return _in_turn(blocks[size * (SEGMENTS - 1) :], x)


def _blocks(program: Program) -> nn.ModuleList:
    blocks = program.module.blocks
    if not isinstance(blocks, nn.ModuleList) or len(blocks) < SEGMENTS:
        owner = type(program.module).__name__
        raise TypeError(f"expected {owner}.blocks to be a ModuleList of at least {SEGMENTS} blocks, got {blocks}")
    return blocks


def _in_turn(blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
    return functools.reduce(lambda value, block: block(value), blocks, x)


def _counted(forward: Callable[..., Any], counts: Counter[int], number: int, x: Tensor) -> Any:
    counts[number] += 1
    return forward(x)


_SOURCE = "https://docs.pytorch.org/docs/stable/checkpoint.html#torch.utils.checkpoint.checkpoint_sequential"
_SAME = "Recomputing segments of blocks {} the same gradients as storing activations."

TECHNIQUES: tuple[Technique, ...] = (
    TorchSegments("checkpoint-segments", _SOURCE, _SAME.format("lowers peak memory and gives")),
    XlaSegments("checkpoint-segments-xla", XLA_SOURCE, _SAME.format("behind optimization barriers gives")),
)
