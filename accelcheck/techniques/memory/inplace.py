"""In-place activations, which overwrite their input."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import OperatorLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

_GAINED = "operators in place beyond the plain module's"
_OVERWRITTEN = "calls of toggled modules, by whether they gave back their input"


class Inplace(Technique):
    """Sets ``inplace=True`` on every submodule that has the attribute.

    Devices without strides dispatch another operator and rebind the tensor (torch's functionalization). There, the evidence is
    that modules return the very tensor that they were called with.
    """

    name = "inplace"
    family = "inplace"
    promise = "Activations that overwrite their input change no value or gradient."
    source = "https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-operations-with-autograd"
    dtypes = ("float32", "bfloat16", "float16")
    requires = frozenset({"inplace"})

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        toggled = [module for module in program.module.modules() if getattr(module, "inplace", None) is False]
        before = _inplace_operators(program, device)
        for module in toggled:
            module.inplace = True  # type: ignore[assignment]  # nn.Module declares attributes as Tensor | Module
        program.extras[_GAINED] = _inplace_operators(program, device) - before
        calls: Counter[bool] = Counter()
        program.extras[_OVERWRITTEN] = calls
        program.resets.append(calls.clear)

        def same(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            calls[out is args[0]] += 1

        for module in toggled:
            module.register_forward_hook(same)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        passes = program.steps if mode in {Mode.TRAIN, Mode.TRAJECTORY} else 1
        gained: Counter[str] = program.extras[_GAINED]
        seen = log.names()
        if device.has("strided"):
            total = gained.total()
            yield Evidence("operators in place beyond the plain module's >= 1", total, engaged=total >= 1)
        for name, count in sorted(gained.items()):
            yield Evidence(f"{name} dispatched >= {count * passes}", seen[name], engaged=seen[name] >= count * passes)
        calls: Counter[bool] = program.extras[_OVERWRITTEN]
        yield Evidence(
            "calls of toggled modules that gave back the very tensor they were given = all",
            f"{calls[True]} of {calls.total()}",
            engaged=calls[True] >= 1 and not calls[False],
        )


def _inplace_operators(program: Program, device: Device) -> Counter[str]:
    """In-place operators of one forward pass, by name. In evaluation mode, so that no statistics or generators change."""
    training = program.module.training
    program.module.eval()
    inputs = tuple(value.clone() if isinstance(value, Tensor) else value for value in program.inputs)
    log = OperatorLog(device.type)
    with torch.no_grad(), log:
        program.module(*inputs)
    program.module.train(training)
    return Counter({name: count for name, count in log.names().items() if name.endswith("_")})


TECHNIQUES: tuple[Technique, ...] = (Inplace(),)
