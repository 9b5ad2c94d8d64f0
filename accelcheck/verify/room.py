"""Memory of a model's FP64 oracle, and a way to take less: layer by layer."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Program, batches_to, to

PART = 0.8
"""Part of the available memory for an oracle's parameters and tensors of their size; the rest is for activations."""
WHOLE: Mapping[Mode, float] = MappingProxyType({Mode.FORWARD: 1.5, Mode.BACKWARD: 4.5, Mode.TRAIN: 5.5})
"""Memory of an oracle relative to its parameters in FP64: 1 and 0.5 for initial values in FP32; with gradients 3 more
for them, the result and the stored truth; with an optimizer, which may have two states, 4 instead of 3."""
LAYERED = 1.0
"""The same for a forward pass layer by layer: parameters and initial values in FP32. One layer in FP64 comes on top."""


def available() -> int:
    """Available memory in bytes."""
    import psutil  # type: ignore[import-untyped]  # it comes without annotations

    return int(psutil.virtual_memory().available)


class NoRoomError(RuntimeError):
    """Memory does not hold the oracle, not even layer by layer."""


def layered(program: Program, mode: Mode) -> bool:
    """True if the oracle of a program in the storage dtype, on the CPU, has to run layer by layer.

    Raises:
        NoRoomError: It does not fit even so; the message has the bytes needed and available, and a remedy.
    """
    room = PART * available()
    elements = [parameter.numel() for parameter in program.module.parameters()]
    size = 8 * sum(elements)
    need = WHOLE.get(mode, 1.5) * size
    if need <= room:
        return False
    if mode is Mode.FORWARD:
        need = LAYERED * size + max((8 * count for count in elements), default=0)
        if need <= room:
            return True
    rest = "check"
    if mode is not Mode.FORWARD:
        rest = "forward cases run layer by layer and take less: --accel-case chooses them. Or check"
    raise NoRoomError(
        f"needs about {need / 1e9:.3g} GB in {mode} mode for {sum(elements):,} parameters, and {room / 1e9:.3g} GB may "
        f"be taken ({PART:.0%} of what is available): {rest} it on a machine with more memory, or a model with fewer "
        "of the same layers"
    )


def by_layer(program: Program) -> Program:
    """Casts a program to FP64 in place like `Program.widened`, but the parameters of each layer only while it runs.

    Layers are the innermost modules with parameters. Parameters of others, such as a class token, stay in FP64. For
    forward passes only: saved tensors of a backward pass would keep every layer in FP64.
    """
    program.inputs = tuple(to(value, "cpu", torch.float64) for value in program.inputs)
    program.target = to(program.target, "cpu", torch.float64)
    program.further = batches_to(program.further, "cpu", torch.float64)
    _widen(program.module.buffers())
    for part in _layers(program.module):
        parameters = list(part.parameters())
        if any(True for _ in part.children()) and not isinstance(part, nn.MultiheadAttention):
            _widen(part.parameters(recurse=False))
        elif parameters:
            _hook(part, parameters)
    return program


def _layers(module: nn.Module) -> Iterable[nn.Module]:
    yield module
    if not isinstance(module, nn.MultiheadAttention):  # it uses the parameters of its projection without calling it
        for child in module.children():
            yield from _layers(child)


def _widen(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.data = to(parameter.data, "cpu", torch.float64)


def _hook(layer: nn.Module, parameters: list[nn.Parameter]) -> None:
    narrow: list[Tensor] = []

    def before(*_: Any) -> None:
        narrow[:] = [parameter.data for parameter in parameters]
        _widen(parameters)

    def after(*_: Any) -> None:
        for parameter, was in zip(parameters, narrow, strict=False):
            parameter.data = was
        narrow.clear()

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)
