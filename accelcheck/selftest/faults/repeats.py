"""Faults that only a further call shows: results kept, overwritten or wrong again, gradients that do not add up."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import get_current_dispatch_mode_stack
from accelcheck.selftest.faults.base import Cell, Change, backward, fault, variant
from accelcheck.selftest.faults.plant import Run, always, both, changing, running, wrapping
from accelcheck.techniques.eager import Eager
from accelcheck.workloads.base import Program, Result


class Copying(Eager):
    """Eager, prepared anew for other parameters, as what copies them is."""

    name = "eager-copying"
    bakes = True


def watched_only(program: Program) -> None:
    """Computes while it is watched; otherwise returns the last result again. A dispatch mode watches."""
    kept: Result = {}

    def run(plain: Run, mode: Mode) -> Result:
        if get_current_dispatch_mode_stack() or not kept:
            kept.update({path: tensor.clone() for path, tensor in plain(mode).items()})
        return dict(kept)

    running(run)(program)


def wrong_again(strength: float) -> Change:
    """A second call with the same inputs is wrong by this part."""
    before: list[Tensor] = []

    def call(plain: Any, x: Tensor, *rest: Any) -> Any:
        again = any(torch.equal(x, old) for old in before)
        before[:] = [x.detach().clone()]
        out = plain(x, *rest)
        return out * (1 - strength) if again else out

    return wrapping(call)


def in_turn(number: float) -> Change:
    """Outputs are written to so many buffers in turn."""
    buffers: list[Tensor] = []

    def call(plain: Any, *inputs: Any) -> Any:
        out = plain(*inputs)
        ours = buffers.pop(0) if len(buffers) == int(number) else torch.empty_like(out)
        buffers.append(ours if ours.shape == out.shape else torch.empty_like(out))
        return buffers[-1].copy_(out)

    return wrapping(call)


def copied_out() -> Change:
    """Outputs are computed in one buffer, and copied from there."""
    return both(in_turn(1), wrapping(lambda plain, *inputs: plain(*inputs).clone()))


def after_each_gradient(hook: Callable[[Tensor], object], program: Program) -> None:
    """Calls a function with each parameter whose gradient is complete."""
    for parameter in program.module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch


def in_one_buffer() -> Change:
    """Each backward pass writes to the memory of the gradients before, which were taken away."""
    buffers: dict[int, Tensor] = {}

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            buffer = buffers.setdefault(id(parameter), torch.empty_like(parameter.grad))
            parameter.grad = buffer.copy_(parameter.grad)

    return partial(after_each_gradient, hook)


def moved(parameter: Tensor) -> None:
    """Gradients are in other memory after each pass."""
    if parameter.grad is not None:
        parameter.grad = parameter.grad.clone()


def overwritten(program: Program) -> None:
    """A second backward pass sets the gradients where it should add to them."""

    def clear(parameter: Tensor, gradient: Tensor) -> Tensor:
        parameter.grad = None
        return gradient

    for parameter in program.module.parameters():
        parameter.register_hook(partial(clear, parameter))  # type: ignore[no-untyped-call]  # untyped in torch


MLP, LEARNING = backward("mlp"), Cell("train-mlp", Mode.TRAIN)

FAULTS = (
    fault("right-only-while-watched")((Cell("mlp"), Cell("matmul"), MLP, LEARNING), always(changing)(watched_only)),
    fault(
        "copies-right-only-while-watched",
        "A technique that copies parameters, and is prepared anew for others, computes only while it is watched.",
    )((Cell("mlp"), MLP, LEARNING), always(changing)(watched_only), technique=Copying()),
    fault("second-call-wrong")((Cell("mlp"), Cell("matmul"), MLP), wrong_again, strengths=(0.5, 0.1)),
    fault(
        "one-output-buffer",
        "The output of each call is in the memory of the output before, whose owner may still use it.",
    )((Cell("mlp"), Cell("matmul")), in_turn),
    fault("one-output-buffer-of-copies", "A technique that copies parameters has one output buffer.")(
        Cell("mlp"), in_turn, technique=Copying()
    ),
    fault("one-gradient-buffer", in_one_buffer)(MLP, lambda _: in_one_buffer()),
    fault("gradient-overwritten")((MLP, backward("matmul")), always(changing)(overwritten)),
)

VARIANTS = (
    variant("output-copied-from-a-buffer")((Cell("mlp"), Cell("matmul")), copied_out),
    variant("gradients-moved", moved)((MLP, backward("matmul")), lambda: partial(after_each_gradient, moved)),
)
