"""Activation checkpointing: blocks do not store their activations, but recompute them in the backward pass."""

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import CONTRACTION, Log, OperatorLog
from accelcheck.workloads.base import Program, flatten, leaf
from accelcheck.workloads.blocks import blocks_of

XLA_SOURCE = "https://docs.pytorch.org/xla/release/r2.9/index.html"
_COUNTS = "block calls and forwards"
PLAIN = "contractions and block calls of one plain pass"
"""Key in `Program.extras` of both numbers."""


def recomputable(device: Device) -> Capability:
    """Tells whether torch.utils.checkpoint can recompute on a device: it does so under autocast, on or off.

    For a PrivateUse1 backend torch.autocast raises an AssertionError where the backend's module lacks a function; in
    the backward pass of the non-reentrant form the process dies of it.
    """
    module = getattr(torch, device.type, None)
    if device.type != torch_names.privateuse1_backend_name() or hasattr(module, "get_amp_supported_dtype"):
        return SUPPORTED
    need = f"which needs torch.{device.type}.get_amp_supported_dtype"
    return unsupported(Code.NO_FEATURE, f"torch.utils.checkpoint recomputes under torch.autocast, {need}")


def xla_recomputable(device: Device) -> Capability:
    """Tells whether torch_xla.utils.checkpoint takes a device's tensors."""
    reason = f"torch_xla.utils.checkpoint is for xla tensors, not for {device.name}'s"
    return SUPPORTED if device.has("torch-xla") else unsupported(Code.NO_BACKEND, reason)


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Checkpoint(Technique):
    """Runs each of the module's blocks under a checkpoint function: see `accelcheck.workloads.blocks.blocks_of`."""

    family = "checkpoint"
    modes = frozenset({Mode.BACKWARD, Mode.TRAIN, Mode.TRAJECTORY, Mode.RANDOM, Mode.LEARNING})
    requires = frozenset({"blocks"})
    differentiates_twice = False  # reentrant checkpoints refuse torch.autograd.grad

    def __init__(self, name: str, source: str, promise: str) -> None:
        self.name, self.source, self.promise = name, source, promise

    def checkpointing(self) -> Callable[..., Any]:
        """Returns the variant's checkpoint function: ``checkpoint(function, *args)``."""
        raise NotImplementedError(f"{type(self).__name__}.checkpointing: return the checkpoint function")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        blocks = blocks_of(program.module)
        if blocks is None:
            need = "the trait `blocks` needs a list of modules of one class, such as `blocks`"
            raise TypeError(f"{need}; {type(program.module).__name__} has none")
        program.extras[PLAIN] = _plain_pass(program, blocks, mode, device)
        counts = program.extras[_COUNTS] = Counter[str]()
        program.resets.append(counts.clear)
        save = self.checkpointing()
        for block in blocks:
            # On the instance: a wrapper module would rename the parameters, and with them the paths of gradients.
            block.forward = _checkpointed(block.forward, save, counts)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        counts: Counter[str] = program.extras[_COUNTS]
        calls, forwards = counts["calls"], counts["forwards"]
        # The second differentiation recomputes the blocks again.
        sign, right = (">=", forwards >= 2 * calls > 0) if program.twice else ("=", forwards == 2 * calls > 0)
        yield Evidence(f"forwards of blocks {sign} {2 * calls}, twice their calls", forwards, right)
        steps = program.steps if mode in {Mode.TRAIN, Mode.TRAJECTORY} else 1
        plain, plain_calls = (steps * count for count in program.extras[PLAIN])
        # Other inputs may take another path through the blocks. A lone layer is not computed again: recomputation ends
        # once all saved tensors are there, here its input.
        layers = all(isinstance(block, _LAYERS) for block in blocks_of(program.module) or ())
        if plain and calls == plain_calls and not layers:
            seen = log.count(CONTRACTION)
            yield Evidence(f"contractions > {plain}, the plain run's", seen, engaged=seen > plain)


class TorchCheckpoint(Checkpoint):
    """``torch.utils.checkpoint``, in one of its two implementations."""

    capability = staticmethod(recomputable)

    def __init__(self, name: str, promise: str, *, reentrant: bool) -> None:
        super().__init__(name, "https://docs.pytorch.org/docs/stable/checkpoint.html", promise)
        self.reentrant = reentrant
        self.differentiates_twice = not reentrant

    def checkpointing(self) -> Callable[..., Any]:
        return functools.partial(checkpoint, use_reentrant=self.reentrant)


class XlaCheckpoint(Checkpoint):
    """``torch_xla.utils.checkpoint``: optimization barriers keep the compiler from merging the recomputation."""

    capability = staticmethod(xla_recomputable)

    def checkpointing(self) -> Callable[..., Any]:
        function: Callable[..., Any] = importlib.import_module("torch_xla.utils.checkpoint").checkpoint
        return function


def _checkpointed(forward: Callable[..., Any], save: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    def outer(*inputs: Any, **keywords: Any) -> Any:
        counts["calls"] += 1
        positional, names = len(inputs), tuple(keywords)  # no tensor, which would live as long as `inner`

        def inner(*values: Any) -> Any:
            counts["forwards"] += 1
            return forward(*values[:positional], **dict(zip(names, values[positional:], strict=True)))

        # Keyword arguments by position too: reentrant checkpoints, and torch_xla's, take no others.
        return save(inner, *inputs, *keywords.values())

    return outer


def _plain_pass(program: Program, blocks: nn.ModuleList | nn.Sequential, mode: Mode, device: Device) -> tuple[int, int]:
    """Counts contractions and block calls of a forward and backward pass without checkpoints, in training mode.

    Restores buffers and the CPU's generator. (Backward through batch norm in evaluation mode fails on xla, which other
    cases show.)
    """
    module = program.module
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}
    inputs = tuple(leaf(value) for value in program.inputs) if mode is Mode.BACKWARD else program.inputs
    calls = Counter[str]()
    handles = [block.register_forward_hook(lambda *_: calls.update(["block"])) for block in blocks]
    module.train()
    with torch.random.fork_rng(devices=[]), OperatorLog(device.type) as log:
        outs = [out for _, out in flatten(module(*inputs)) if out.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    for handle in handles:
        handle.remove()
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers.items():
            buffer.copy_(before)
    return log.count(CONTRACTION), calls["block"]


_SAME = "Recomputing activations {} gives the same gradients as storing them."

TECHNIQUES: tuple[Technique, ...] = (
    TorchCheckpoint("checkpoint-reentrant", _SAME.format("in the backward pass"), reentrant=True),
    TorchCheckpoint("checkpoint-non-reentrant", _SAME.format("in saved-tensor hooks"), reentrant=False),
    XlaCheckpoint("checkpoint-xla", XLA_SOURCE, _SAME.format("behind optimization barriers")),
)
