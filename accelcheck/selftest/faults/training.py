"""Faults of the training loop: scaler, clipping, resumption and optimizer state."""

from __future__ import annotations

import copy
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import FLOAT32, Cell, Change, fault, single, variant
from accelcheck.selftest.faults.plant import optimizing, spoiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from accelcheck.workloads.base import Program
    from accelcheck.workloads.trainer import Parts, Trainable, Trainer


def trainer(edit: Callable[[Trainer], None]) -> Change:
    """Change a program's trainer."""

    def change(program: Program) -> None:
        if program.trainer is None:
            raise TypeError("expected a program with a recipe: plant it in a trajectory")
        edit(program.trainer)

    return change


def clipped_scaled(strength: float) -> Change:
    """Clips the gradients of the scaled loss; the scaler unscales them later."""

    def edit(trained: Trainer) -> None:
        trained.unscale = lambda program, parts: None  # type: ignore[method-assign]  # noqa: ARG005 - on this instance alone, called by position

    return trainer(edit)


def never_skips(optimizer: torch.optim.Optimizer) -> None:
    """Tells the scaler that the optimizer checks for infinities itself, as fused ones do, while it does not."""
    plain = optimizer.step

    def step(own: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        # Attributes that the scaler passes: the plain optimizer must not see them.
        vars(own).update(grad_scale=None, found_inf=None)
        return plain(*args, **options)

    # A method, because schedules take it apart.
    vars(optimizer).update(_step_supports_amp_scaling=True, step=MethodType(step, optimizer))


unskipped = spoiling(never_skips)
"""An optimizer that takes a step with infinite gradients."""


def forgetting(*entries: str) -> Callable[[float], Change]:
    """A resumed training starts with part of its state reset."""

    def edit(trained: Trainer) -> None:
        plain = trained.load

        def load(program: Trainable, parts: Parts, state: Mapping[str, Any]) -> None:
            fresh = trained.state(program, parts)
            plain(program, parts, {**state, **{name: fresh[name] for name in entries}})

        trained.load = load  # type: ignore[method-assign]  # on this instance alone

    return lambda _: trainer(edit)


def without_option(**options: Any) -> Callable[[float], Change]:
    """Ignores options of the optimizer."""

    def ignore(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(options)

    return spoiling(ignore)


class HalfState(torch.optim.SGD):
    """SGD that keeps its momentum in a half type.

    Args:
        parameters: As of SGD.
        dtype: Of the momentum.
        options: As of SGD.
    """

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.kept = dtype

    def step(self, closure: Any = None) -> Any:
        """Take a step, then round the momentum."""
        loss = super().step(closure)
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(self.kept).to(value.dtype)
        return loss


def half_state(bits: float) -> Change:
    """Momentum with this number of significant bits."""
    dtype = torch.bfloat16 if bits == 8 else torch.float16
    return optimizing(partial(HalfState, dtype=dtype, lr=0.02, momentum=0.9))


def restored(trained: Trainer) -> None:
    """Copies and loads all state after every step, as a training that is resumed at each step."""
    plain = trained.take

    def take(program: Trainable, parts: Parts) -> tuple[Tensor, Tensor]:
        out = plain(program, parts)
        parts.generator = torch.random.get_rng_state()
        trained.load(program, parts, copy.deepcopy(trained.state(program, parts)))
        return out

    trained.take = take  # type: ignore[method-assign]  # on this instance alone


TRAJECTORY = (single("trajectory-mlp", Mode.TRAJECTORY),)
SCALER = "grad-scaler-fp16"
SMALL_STEPS = "a momentum with 8 bits moves a step by less than parameters are rounded; 11 are its own"

FAULTS = (
    fault("clipping-before-unscale", "Gradients are clipped before they are unscaled.")(
        TRAJECTORY, clipped_scaled, number=29, technique=SCALER
    ),
    fault("step-not-skipped", "A step is taken with infinite gradients.")(
        TRAJECTORY, unskipped, number=30, technique=SCALER
    ),
    fault("resume-loses-scaler", "A resumed training starts with a fresh gradient scaler.")(
        TRAJECTORY, forgetting("scaler"), number=34, technique=SCALER
    ),
    *(
        fault(f"resume-loses-{what}", f"A resumed training starts with a fresh {what}.")(
            TRAJECTORY, forgetting("loader" if what == "sampler" else what), number=34
        )
        for what in ("optimizer", "schedule", "generator", "sampler")
    ),
    fault("momentum-ignored", "The optimizer forgets its momentum.")(
        (Cell("train-mlp", Mode.TRAIN),), without_option(momentum=0.0)
    ),
    fault("decay-ignored", "Weight decay is ignored.")(TRAJECTORY, without_option(weight_decay=0.0)),
    fault("half-precision-state", "Momentum is kept in a half type with this number of significant bits.")(
        (Cell("train-mlp", Mode.TRAIN, FLOAT32, {"float16": SMALL_STEPS}),),
        half_state,
        strengths=(8.0, 11.0),
        absent={"bfloat16": "momentum has the parameters' dtype, and so 8 bits anyway"},
    ),
)

VARIANTS = (
    variant("resumed-every-step", "State is saved and loaded after every step.")(TRAJECTORY, lambda: trainer(restored)),
)
