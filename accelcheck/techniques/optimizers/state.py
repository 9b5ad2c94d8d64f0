"""Optimizers with states in bfloat16 and parameters in FP32, and the FP64 emulation of such a training."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, operators
from accelcheck.techniques.precision.amp import stored_in_float32
from accelcheck.techniques.quantization.emulation import nearest
from accelcheck.workloads.base import OptimizerMaker, Program

_WORKLOADS = frozenset({"train-mlp", "train-transformer", "digits-mlp-training"})
"""Trainings by SGD with momentum and by AdamW, and one of which the accuracy is checked."""

_KEPT = "optimizer whose states are kept"


@dataclass
class KeptStates:
    """Makes optimizers whose states, except step counts, `narrow` converts after each step, `widen` before the next.

    `made` is the optimizer that was made last.
    """

    make: OptimizerMaker
    narrow: Callable[[Tensor], Tensor]
    widen: Callable[[Tensor], Tensor]
    made: torch.optim.Optimizer | None = None

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        self.made = self.make(parameters)
        self.made.register_step_pre_hook(lambda optimizer, *_: _each(optimizer, self.widen))
        self.made.register_step_post_hook(lambda optimizer, *_: _each(optimizer, self.narrow))
        return self.made


class RoundedStates(KeptStates):
    """Emulation of `HalfStates` in FP64: states are rounded after each step. `flips` works as in `Quantizer`."""

    flips: torch.Generator | None = None

    def __init__(self, make: OptimizerMaker, dtype: torch.dtype) -> None:
        super().__init__(make, self._rounded, lambda state: state)
        self.dtype = dtype

    def _rounded(self, state: Tensor) -> Tensor:
        with disable_current_modes():
            return nearest(state, self.dtype, self.flips)


class HalfStates(Technique):
    """Keeps moments and momentum in bfloat16 between steps. A step widens them, computes in FP32 and rounds them."""

    name = "optimizer-bf16-states"
    family = "precision"
    promise = "Optimizer states in bfloat16 take half the memory; parameters, gradients and arithmetic stay float32."
    source = "https://docs.pytorch.org/ao/stable/api_reference/api_ref_optim.html"
    modes = frozenset({Mode.TRAIN, Mode.LEARNING})
    level = 2
    early = frozenset({"train-transformer"})
    requires = frozenset({"training"})
    workloads = _WORKLOADS
    oracle = "bfloat16-states"
    dtype = torch.bfloat16

    def capability(self, device: Device) -> Capability:
        half = str(self.dtype).removeprefix("torch.")
        return SUPPORTED if half in device.dtypes else device.lacks(half, Code.NO_DTYPE)

    def emulate_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        return RoundedStates(make, self.dtype)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if program.optimizer is None:
            raise TypeError("expected a program with an optimizer: give the Problem one")
        program.optimizer = KeptStates(program.optimizer, lambda s: s.to(self.dtype), lambda s: s.float())
        program.extras[_KEPT] = kept = program.optimizer
        program.resets.append(lambda: setattr(kept, "made", None))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        kept = program.extras[_KEPT]
        states = list(states_of(kept.made)) if kept.made is not None else []
        if kept.made is not None and not states:
            reason = f"{type(kept.made).__name__} keeps no states as it is set here"
            raise Unsupported(unsupported(Code.NO_EFFECT, reason))
        dtypes = {str(state.dtype).removeprefix("torch.") for _, _, state in states}
        after, before = sum(state.nbytes for _, _, state in states), sum(4 * state.numel() for _, _, state in states)
        trained = sum(parameter.requires_grad for parameter in program.module.parameters())
        wanted = len(states) * (program.steps - 1)
        widened = operators(log).having(lambda op: op.name == "aten::_to_copy" and op.takes(self.dtype))
        yield Evidence(f"optimizer states >= {trained}", len(states), engaged=len(states) >= trained >= 1)
        yield Evidence("states are bfloat16", ", ".join(sorted(dtypes)) or "none", engaged=dtypes == {"bfloat16"})
        yield Evidence("bytes of states are half of FP32's", f"{before} -> {after}", engaged=2 * after == before > 0)
        yield Evidence(f"states widened before a step >= {wanted}", widened, engaged=widened >= wanted >= 1)
        yield stored_in_float32(program)


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields every floating-point state, without step counts, after the mapping that holds it and its name."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point():
                yield state, name, value


def _each(optimizer: torch.optim.Optimizer, change: Callable[[Tensor], Tensor]) -> None:
    for state, name, value in list(states_of(optimizer)):
        state[name] = change(value)


TECHNIQUES: tuple[Technique, ...] = (HalfStates(),)
