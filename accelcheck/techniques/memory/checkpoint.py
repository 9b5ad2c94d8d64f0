"""Activation checkpointing: blocks forget what they computed, and compute it again in the backward pass."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import CONTRACTION, OperatorLog
from accelcheck.workloads.base import flatten, leaf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

_COUNTS = "block calls and forwards"
_PLAIN = "contractions of one plain pass"


class Checkpoint(Technique):
    """Every member of the module's ``blocks`` runs under a checkpoint function."""

    family = "checkpoint"
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN, Mode.TRAJECTORY, Mode.RANDOM, Mode.LEARNING})
    requires = frozenset({"blocks"})
    differentiates_twice = False  # the reentrant ones refuse torch.autograd.grad

    def __init__(self, name: str, source: str, promise: str) -> None:
        self.name = name
        self.source = source
        self.promise = promise

    def checkpointing(self) -> Callable[..., Any]:
        """``checkpoint(function, *args)``, with the variant's options bound."""
        raise NotImplementedError(f"{type(self).__name__}.checkpointing: give the checkpoint function")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        blocks = program.module.blocks
        if not isinstance(blocks, nn.ModuleList):
            raise TypeError(f"trait `blocks` promises a ModuleList; {type(program.module).__name__}.blocks is none")
        program.extras[_PLAIN] = _contractions(program, mode, device)
        counts: Counter[str] = Counter()
        program.extras[_COUNTS] = counts
        save = self.checkpointing()
        for block in blocks:
            # On the instance: wrapping the module instead would rename its parameters, by which gradients are found.
            block.forward = _checkpointed(block.forward, save, counts)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del device
        counts: Counter[str] = program.extras[_COUNTS]
        calls, forwards = counts["calls"], counts["forwards"]
        if program.twice:  # each of the two passes through the gradients' own graph computes the blocks once more
            yield Evidence(f"forwards of blocks >= {2 * calls}, twice their calls", forwards, forwards >= 2 * calls > 0)
        else:
            yield Evidence(
                f"forwards of blocks = {2 * calls}, twice their calls", forwards, engaged=forwards == 2 * calls > 0
            )
        plain: int = program.extras[_PLAIN] * (program.steps if mode in {Mode.TRAIN, Mode.TRAJECTORY} else 1)
        if plain:
            seen = log.count(CONTRACTION)
            yield Evidence(f"contractions > {plain}, the plain run's", seen, engaged=seen > plain)


class TorchCheckpoint(Checkpoint):
    """``torch.utils.checkpoint``, in one of its two implementations."""

    def __init__(self, name: str, promise: str, *, reentrant: bool) -> None:
        super().__init__(name, "https://docs.pytorch.org/docs/stable/checkpoint.html", promise)
        self.reentrant = reentrant
        self.differentiates_twice = not reentrant

    def checkpointing(self) -> Callable[..., Any]:
        return functools.partial(checkpoint, use_reentrant=self.reentrant)


class XlaCheckpoint(Checkpoint):
    """``torch_xla.utils.checkpoint``: barriers keep the compiler from merging the two computations."""

    def capability(self, device: Device) -> Capability:
        if device.type != "xla":
            return unsupported(
                Code.NO_BACKEND, f"torch_xla.utils.checkpoint is for xla tensors, not those of {device.name}"
            )
        return SUPPORTED

    def checkpointing(self) -> Callable[..., Any]:
        function: Callable[..., Any] = importlib.import_module("torch_xla.utils.checkpoint").checkpoint
        return function


def _checkpointed(
    forward: Callable[..., Any], save: Callable[..., Any], counts: Counter[str]
) -> Callable[[Tensor], Any]:
    def inner(value: Tensor) -> Any:
        counts["forwards"] += 1
        return forward(value)

    def outer(value: Tensor) -> Any:
        counts["calls"] += 1
        return save(inner, value)

    return outer


def _contractions(program: Program, mode: Mode, device: Device) -> int:
    """Contractions of one pass forward and back, plain. Statistics are put back, and the CPU's generator with them.

    In train mode, as the judged run is: backward through batch norm in eval mode fails on xla, which is another case's
    finding.
    """
    module = program.module
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    inputs = tuple(leaf(value) for value in program.inputs) if mode is Mode.BACKWARD else program.inputs
    log = OperatorLog(device.type)
    module.train()
    with torch.random.fork_rng(devices=[]), log:
        outs = [out for _, out in flatten(module(*inputs)) if out.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers.items():
            buffer.copy_(before)
    return log.count(CONTRACTION)


TECHNIQUES: tuple[Technique, ...] = (
    TorchCheckpoint(
        "checkpoint-reentrant", "Recomputing in the backward pass gives the gradients of storing.", reentrant=True
    ),
    TorchCheckpoint(
        "checkpoint-non-reentrant", "Recomputing in saved-tensor hooks gives the gradients of storing.", reentrant=False
    ),
    XlaCheckpoint(
        "checkpoint-xla",
        "https://docs.pytorch.org/xla/release/r2.9/index.html",
        "Recomputing behind optimization barriers gives the gradients of storing.",
    ),
)
