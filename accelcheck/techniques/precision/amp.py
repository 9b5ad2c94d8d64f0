"""Automatic mixed precision: autocast to a half type, and autocast with a gradient scaler."""

import re
from collections.abc import Iterable
from typing import Any

import torch

from accelcheck.core.capability import Capability
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import CONTRACTION, Log, OperatorLog, at_least, exactly, operators
from accelcheck.workloads.base import Program
from accelcheck.workloads.problem import CONTRACTING

INITIAL_SCALE = 2.0**7
"""Initial scale of the gradient scaler. It lifts most FP16 gradients above the smallest normal number, and overflows in
no training: the largest gradient of the trained workloads is 91 and FP16's largest number 65504, so that gradients
overflow from a scale of 2**9.5 on. Runs are shorter than the growth interval (2000 steps), and never increase it."""
_SCALE = "scale begun with"


class Autocast(Technique):
    """Runs forward passes under ``torch.autocast``; parameters and inputs stay FP32."""

    family = "amp"
    works_on = CONTRACTING
    source = "https://docs.pytorch.org/docs/stable/amp.html"

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        if dtype == torch.float16:
            # Without a scaler small FP16 gradients underflow: only `grad-scaler-fp16` promises training.
            self.modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.RANDOM, Mode.ACCURACY})
        self.half = str(dtype).removeprefix("torch.")
        self.promise = f"Contractions take {self.half} operands; reductions and parameters stay float32."

    def capability(self, device: Device) -> Capability:
        return self.needs(device, f"autocast-{self.half}")

    def precision(self, dtype: str) -> str:
        return self.half

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.around = lambda: torch.autocast(device.type, dtype=self.dtype)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen = operators(log)
        full, excused = contractions(seen, torch.float32), math_attention(seen, mode)
        # An attention alone, of a device without a fused kernel, has no other contraction.
        raised = raised_attention(seen, self.dtype)
        what = "contractions or attentions" if raised else "contractions"
        yield at_least(f"{what} that took {self.half}", contractions(seen, self.dtype) + raised)
        yield Evidence(f"contractions that took float32 <= {excused}", full, engaged=full <= excused)
        yield stored_in_float32(program)


class ScaledAutocast(Autocast):
    """Autocast to FP16 with a gradient scaler around the loss and the optimizer."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name, dtype)
        self.modes = frozenset({Mode.BACKWARD, Mode.TRAIN, Mode.TRAJECTORY, Mode.RANDOM, Mode.LEARNING})
        self.promise = "Scaling the loss keeps small gradients representable; steps equal those without scaling."

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        scale = INITIAL_SCALE
        program.scaler = _CountingScaler(device.type, init_scale=scale)
        if mode is Mode.BACKWARD:
            # In a training, the scaler halves its scale when gradients overflow. Backward mode takes no step.
            state = {name: buffer.clone() for name, buffer in program.module.named_buffers()}
            while program.run(mode) and _overflowed(program) and scale > 1:
                scale /= 2
                program.scaler = _CountingScaler(device.type, init_scale=scale)
            program.scaler.scaled = 0
            for name, buffer in program.module.named_buffers():
                buffer.copy_(state[name])
        program.extras[_SCALE] = scale
        program.resets.append(lambda: setattr(program.scaler, "scaled", 0))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        scaler = program.scaler
        if not isinstance(scaler, _CountingScaler):
            raise TypeError(f"the program's scaler was replaced after prepare: {type(scaler).__name__}")
        steps = program.steps if mode in {Mode.TRAIN, Mode.TRAJECTORY} else 1
        # A scaler that torch disables (because there is no such device) only warns, and does not scale.
        yield at_least("losses scaled", scaler.scaled if scaler.is_enabled() else 0, steps)
        scale, begun = float(scaler.get_scale()), program.extras[_SCALE]
        yield Evidence(f"scale after = {begun:g} (no step skipped)", scale, engaged=scale == begun)
        if mode is Mode.BACKWARD:
            # Without a step the scaler does not check for overflow, which would look like an error of the technique.
            yield exactly("scaled gradients that overflowed", _overflowed(program), 0)
        else:
            checks = log.count("aten::_amp_foreach_non_finite_check_and_unscale_")
            yield at_least("checks for infinite gradients", checks, steps)


def _overflowed(program: Program) -> int:
    """Counts the parameters whose gradient is not finite."""
    gradients = [p.grad for p in program.module.parameters() if p.grad is not None]
    return sum(not bool(gradient.isfinite().all()) for gradient in gradients)


class _CountingScaler(torch.amp.GradScaler):
    """Gradient scaler that counts its calls to `scale`."""

    scaled = 0

    # The base class overloads this for a tensor and for iterables of tensors.
    def scale(self, outputs: Any) -> Any:
        self.scaled += 1
        return super().scale(outputs)


def stored_in_float32(program: Program) -> Evidence:
    """Makes evidence that parameters stay in FP32, the parts of complex ones too."""
    kept = {str(parameter.dtype).removeprefix("torch.") for parameter in program.module.parameters()}
    observed = ", ".join(sorted(kept)) or "no parameters"
    return Evidence("parameters are float32", observed, engaged=kept <= {"float32", "complex64"})


def contractions(log: OperatorLog, dtype: torch.dtype) -> int:
    """Counts the contractions that took a tensor of this dtype."""
    return log.having(lambda operator: re.fullmatch(CONTRACTION, operator.name) is not None and operator.takes(dtype))


def math_attention(log: OperatorLog, mode: Mode) -> int:
    """Counts the contractions that may take float32: attention's math path casts half-precision inputs up by itself.

    Each call, counted by ``_safe_softmax``, has two products in the forward pass and four in the backward pass.
    """
    return log.count("aten::_safe_softmax") * (2 if mode is Mode.FORWARD else 6)


def raised_attention(log: OperatorLog, dtype: torch.dtype) -> int:
    """Counts attentions on the math path whose queries, keys and values were cast from this dtype to float32."""
    casts = [operator for operator in log.operators if operator.name == "aten::_to_copy" and operator.takes(dtype)]
    raised = sum(any(made == torch.float32 for made, _, _ in operator.outputs) for operator in casts)
    return min(log.count("aten::_safe_softmax"), raised // 3)


TECHNIQUES: tuple[Technique, ...] = (
    Autocast("amp-bf16", torch.bfloat16),
    Autocast("amp-fp16", torch.float16),
    ScaledAutocast("grad-scaler-fp16", torch.float16),
)
