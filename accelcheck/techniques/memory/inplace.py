"""In-place activations, which overwrite their input, and the peak memory that they save."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.measure.memory import Peak, measurable
from accelcheck.techniques.base import Technique
from accelcheck.techniques.memory.peaks import peak_of_run
from accelcheck.techniques.observe import Log, OperatorLog, at_least
from accelcheck.workloads.base import Program

_GAINED = "operators in place beyond the plain module's"
_OVERWRITTEN = "calls of toggled modules, by whether they gave back their input"


class Inplace(Technique):
    """Sets ``inplace=True`` on every submodule that has the attribute.

    Devices without strides dispatch another operator and rebind the tensor (torch's functionalization). The evidence
    there is that modules return the very tensor that they were called with.
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
        calls = program.extras[_OVERWRITTEN] = Counter[bool]()
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
            yield at_least("operators in place beyond the plain module's", gained.total())
        for name, count in sorted(gained.items()):
            yield at_least(f"{name} dispatched", seen[name], count * passes)
        calls: Counter[bool] = program.extras[_OVERWRITTEN]
        claim = "calls of toggled modules that gave back the very tensor they were given = all"
        yield Evidence(claim, f"{calls[True]} of {calls.total()}", engaged=calls[True] >= 1 and not calls[False])


def _inplace_operators(program: Program, device: Device) -> Counter[str]:
    """Counts in-place operators of a forward pass in evaluation mode, which changes no statistics or generators."""
    training = program.module.training
    program.module.eval()
    inputs = tuple(value.clone() if isinstance(value, Tensor) else value for value in program.inputs)
    with torch.no_grad(), OperatorLog(device.type) as log:
        program.module(*inputs)
    program.module.train(training)
    return Counter({name: count for name, count in log.names().items() if name.endswith("_")})


_PLAIN = "peak of the plain run"


class InplaceMemory(Inplace):
    """In-place activations without gradients; with gradients, most activations store what they overwrite."""

    name = "inplace-memory"
    promise = "Activations that overwrite their input lower peak memory."
    modes = frozenset({Mode.FORWARD})
    requires = frozenset({"inplace", "activations"})
    capability = staticmethod(measurable)
    # In half precision the peak may be the workspace of a matmul, which activations do not affect.
    dtypes = ("float32",)  # type: ignore[assignment]  # inferred as a tuple of three from the class

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.extras[_PLAIN] = peak_of_run(program, mode, device)
        super().prepare(program, mode, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        plain: Peak = program.extras[_PLAIN]
        own = peak_of_run(program, mode, device)
        if plain.bytes is None or own.bytes is None:
            raise ValueError(
                f"expected two measured peaks, since `capability` accepted the device; got {plain} and {own}"
            )
        yield at_least(f"bytes saved of the plain run's peak of {plain.bytes}", plain.bytes - own.bytes)


TECHNIQUES: tuple[Technique, ...] = (Inplace(), InplaceMemory())
