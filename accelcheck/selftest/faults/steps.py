"""Faults of optimizer steps (fused, on lists, compiled, on the device) and of reduced precision around a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, fault, single
from accelcheck.selftest.faults.plant import kernels, products, spoiling
from accelcheck.selftest.faults.sowing import in_cpp, kernel_text
from accelcheck.techniques.optimizers.state import KeptStates

if TYPE_CHECKING:
    from accelcheck.workloads.base import Program

WIDE = ("float32", "bfloat16")
"""Dtypes of the small trainings, which leave FP16's range."""


def next_correction(strength: float) -> Change:
    """The fused step corrects the bias of its moments as in the step after it."""

    def fused(func: Any, *args: Any, **options: Any) -> Any:
        *lists, counts = args
        return func(*lists, [count + 1 for count in counts], **options)

    return kernels(_fused_adam_=fused, _fused_adamw_=fused)


def momentum_stale(strength: float) -> Change:
    """After the first step, the fused kernel does not write momentum back."""

    def fused(func: Any, parameters: Any, gradients: Any, momenta: Any, *rest: Any, **options: Any) -> Any:
        kept = [] if options["is_first_step"] else [momentum.clone() for momentum in momenta]
        out = func(parameters, gradients, momenta, *rest, **options)
        for momentum, before in zip(momenta, kept, strict=bool(kept)):
            momentum.copy_(before)
        return out

    return kernels(_fused_sgd_=fused)


def last_parameter_left(strength: float) -> Change:
    """The update of a list of parameters leaves out the last one."""

    def listed(func: Any, parameters: Any, *lists: Any, **options: Any) -> Any:
        fewer = (value[:-1] if isinstance(value, (list, tuple)) else value for value in lists)
        return func(parameters[:-1], *fewer, **options)

    def renewed(func: Any, parameters: Any, *lists: Any, **options: Any) -> Any:
        return [*listed(func, parameters, *lists, **options), parameters[-1].clone()]

    return kernels(_foreach_addcdiv_=listed, _foreach_addcdiv=renewed)  # in place, and where tensors are rebound


def root_before_epsilon(strength: float) -> Change:
    """The denominator of Adam's step is not corrected for its bias."""

    def by_ones(func: Any, values: Any, divisors: Any) -> Any:
        return func(values, [1.0] * len(divisors))

    return kernels(_foreach_div_=by_ones, _foreach_div=by_ones)  # as above


def counted_once(optimizer: torch.optim.Optimizer) -> None:
    """The step count on the device stays 1."""

    def stuck(own: torch.optim.Optimizer, *_: Any) -> None:
        for state in own.state.values():
            state["step"].fill_(1)

    optimizer.register_step_post_hook(stuck)


def truncated_states(program: Program) -> None:
    """States are truncated to bfloat16, not rounded."""
    kept = program.optimizer
    if not isinstance(kept, KeptStates):
        raise TypeError(f"expected an optimizer whose states are converted, got {type(kept).__name__}")
    kept.narrow = truncated


def truncated(state: Tensor) -> Tensor:
    """FP32 truncated to bfloat16, without a view of its bits, which not every device has."""
    nearest = state.bfloat16()
    # A half to a whole unit in the last place less, and rounded: one unit less.
    below = (nearest.float() * (1 - 2**-8)).bfloat16()
    return torch.where(nearest.float().abs() > state.abs(), below, nearest)


def one_context(program: Program) -> None:
    """One autocast context around the whole training: copies of weights in half precision are kept from the first step on."""
    place = next(program.module.parameters()).device.type
    program.within = lambda: torch.autocast(place, dtype=torch.bfloat16)


def depth_dropped(strength: float) -> Change:
    """Products leave out the last element of their depth."""
    return products(lambda a, b: a[..., :-1] @ b[..., :-1, :])


def truncated_operands(strength: float) -> Change:
    """Products truncate their operands to 4 significant bits."""

    def short(x: Tensor) -> Tensor:
        return ((x.float().contiguous().view(torch.int32) >> 20) << 20).view(torch.float32)

    return products(lambda a, b: short(a) @ short(b))


FAULTS = (
    fault("fused-next-correction", "The fused step corrects the bias of its moments as in the step after it.")(
        (Cell("train-amsgrad", Mode.TRAIN, WIDE),), next_correction, technique="optimizer-fused", seeds=10
    ),
    fault("fused-momentum-stale", "The fused step does not write momentum back.")(
        (Cell("train-nesterov", Mode.TRAIN, WIDE), Cell("train-mlp", Mode.TRAIN)),
        momentum_stale,
        technique="optimizer-fused",
        seeds=10,
    ),
    fault("foreach-last-parameter-left", "The update of a list of parameters leaves out the last one.")(
        (single("train-adagrad", Mode.TRAIN), single("train-nadam", Mode.TRAIN)),
        last_parameter_left,
        technique="optimizer-foreach",
        seeds=10,
    ),
    fault("foreach-root-uncorrected", "The denominator of a step on lists is not corrected for its bias.")(
        (single("train-transformer", Mode.TRAIN),), root_before_epsilon, technique="optimizer-foreach", seeds=3
    ),
    fault("compiled-momentum-constant", "A compiled step has another momentum as its constant.")(
        (single("train-nesterov", Mode.TRAIN),),
        around=lambda _: kernel_text(r"static_cast<float>\(0\.9\)", lambda _: "static_cast<float>(0.89)"),
        exists=in_cpp,
        technique="optimizer-compiled",
        seeds=1,
    ),
    fault("capturable-counted-once", "The step count that is kept on the device stays 1.")(
        (single("train-amsgrad", Mode.TRAIN),), spoiling(counted_once), technique="optimizer-capturable", seeds=10
    ),
    fault("states-truncated", "Optimizer states are truncated to bfloat16, not rounded.")(
        (single("train-mlp", Mode.TRAIN), single("train-transformer", Mode.TRAIN)),
        lambda _: truncated_states,
        technique="optimizer-bf16-states",
        emulated=True,
        seeds=3,
    ),
    fault(
        "autocast-weights-stale",
        "Autocast uses the copies of weights in half precision that it made before they were updated.",
    )((single("train-mlp", Mode.TRAIN),), lambda _: one_context, technique="amp-bf16", seeds=10),
    fault("reduced-depth-dropped", "Products in reduced precision leave out the last element of their depth.")(
        (single("matmul"), single("mlp", Mode.BACKWARD)), depth_dropped, technique="matmul-bf16"
    ),
    fault("reduced-operands-truncated", "Products in reduced precision truncate their operands to 4 significant bits.")(
        (single("matmul"),), truncated_operands, technique="matmul-tf32"
    ),
)
