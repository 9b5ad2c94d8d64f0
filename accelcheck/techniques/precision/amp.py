"""Automatic mixed precision: autocast to a half type, and autocast with a gradient scaler."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import CONTRACTION, operators

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.core.capability import Capability
    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log, OperatorLog
    from accelcheck.workloads.base import Program, Workload

INITIAL_SCALE = 2.0**7
"""Of the gradient scaler: lifts most FP16 gradients above the smallest normal number, and overflows none of a training. The
largest gradient of the trained workloads is 91; FP16 ends at 65504, so from 2**9.5 on the sums of products in a gradient
become infinite. The growth interval (2000 steps) is far: a run leaves it as it was."""
_SCALE = "scale begun with"

_CONTRACTING = frozenset({"matmul", "linear", "conv", "attention"})


class Autocast(Technique):
    """Forward passes under ``torch.autocast``; parameters and inputs stay FP32."""

    family = "amp"
    source = "https://docs.pytorch.org/docs/stable/amp.html"

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype
        if dtype == torch.float16:
            # Without a scaler small FP16 gradients underflow: training in it is `grad-scaler-fp16`'s promise alone.
            self.modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.RANDOM, Mode.ACCURACY})
        self.half = str(dtype).removeprefix("torch.")
        self.promise = f"Contractions take {self.half} operands, reductions and parameters stay float32."

    def capability(self, device: Device) -> Capability:
        return self.needs(device, f"autocast-{self.half}")

    def accepts(self, workload: Workload) -> bool:
        """Autocast changes contractions alone: element-wise workloads would show nothing."""
        return super().accepts(workload) and bool(_CONTRACTING & workload.traits)

    def precision(self, dtype: str) -> str:
        del dtype
        return self.half

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode
        program.around = lambda: torch.autocast(device.type, dtype=self.dtype)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del device
        seen = operators(log)
        halves = contractions(seen, self.dtype)
        full = contractions(seen, torch.float32)
        excused = math_attention(seen, mode)
        kept = {str(parameter.dtype).removeprefix("torch.") for parameter in program.module.parameters()}
        yield Evidence(f"contractions that took {self.half} >= 1", halves, engaged=halves >= 1)
        yield Evidence(f"contractions that took float32 <= {excused}", full, engaged=full <= excused)
        yield Evidence(
            "parameters are float32", ", ".join(sorted(kept)) or "no parameters", engaged=kept <= {"float32"}
        )


class ScaledAutocast(Autocast):
    """Autocast to FP16 with a gradient scaler around the loss and the optimizer."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__(name, dtype)
        self.modes = frozenset({Mode.BACKWARD, Mode.TRAIN, Mode.TRAJECTORY, Mode.RANDOM, Mode.LEARNING})
        self.promise = "A scaled loss keeps small gradients representable; steps equal those without it."

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        scale = INITIAL_SCALE
        program.scaler = _CountingScaler(device.type, init_scale=scale)
        if mode is Mode.BACKWARD:
            # Steps find out by themselves: a scaler halves its scale where gradients overflow. Here no step is taken.
            state = {name: buffer.clone() for name, buffer in program.module.named_buffers()}
            while program.run(mode) and _overflowed(program) and scale > 1:
                scale /= 2
                program.scaler = _CountingScaler(device.type, init_scale=scale)
            program.scaler.scaled = 0
            for name, buffer in program.module.named_buffers():
                buffer.copy_(state[name])
        program.extras[_SCALE] = scale

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        scaler = program.scaler
        if not isinstance(scaler, _CountingScaler):
            raise TypeError(f"the program's scaler was replaced after prepare: {type(scaler).__name__}")
        steps = program.steps if mode in {Mode.TRAIN, Mode.TRAJECTORY} else 1
        # A scaler that torch disables (no such device) warns, and passes losses through.
        scaled = scaler.scaled if scaler.is_enabled() else 0
        yield Evidence(f"losses scaled >= {steps}", scaled, engaged=scaled >= steps)
        scale, begun = float(scaler.get_scale()), program.extras[_SCALE]
        yield Evidence(f"scale after = {begun:g} (no step skipped)", scale, engaged=scale == begun)
        if mode is Mode.BACKWARD:
            # No step, and so no scaler, looks at these: an overflow of the scale's making would pass for the technique's.
            infinite = _overflowed(program)
            yield Evidence("scaled gradients that overflowed = 0", infinite, engaged=infinite == 0)
        else:
            checks = log.count("aten::_amp_foreach_non_finite_check_and_unscale_")
            yield Evidence(f"checks for infinite gradients >= {steps}", checks, engaged=checks >= steps)


def _overflowed(program: Program) -> int:
    """How many parameters have a gradient that is not finite."""
    gradients = [p.grad for p in program.module.parameters() if p.grad is not None]
    return sum(not bool(gradient.isfinite().all()) for gradient in gradients)


class _CountingScaler(torch.amp.GradScaler):
    """A gradient scaler that knows how often it was asked to scale."""

    scaled = 0

    # The base class overloads this for tensors, lists and iterables of them.
    def scale(self, outputs: Any) -> Any:
        self.scaled += 1
        return super().scale(outputs)


def contractions(log: OperatorLog, dtype: torch.dtype) -> int:
    """How many contractions took a tensor of that dtype."""
    return log.having(lambda operator: re.fullmatch(CONTRACTION, operator.name) is not None and operator.takes(dtype))


def math_attention(log: OperatorLog, mode: Mode) -> int:
    """Contractions that may take float32: attention's math path takes half inputs, and computes in float32 by itself.

    It multiplies twice going forward and four times going back; only it dispatches ``_safe_softmax``.
    """
    return log.count("aten::_safe_softmax") * (2 if mode is Mode.FORWARD else 6)


TECHNIQUES: tuple[Technique, ...] = (
    Autocast("amp-bf16", torch.bfloat16),
    Autocast("amp-fp16", torch.float16),
    ScaledAutocast("grad-scaler-fp16", torch.float16),
)
