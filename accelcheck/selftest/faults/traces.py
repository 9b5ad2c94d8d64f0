"""Faults of state after a run: running statistics, flags, hooks, generators, memory, and the number of calls."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accelcheck.selftest.faults.base import HALVES, Change, alike, derived, single, variant, where
from accelcheck.selftest.faults.memory import strided
from accelcheck.selftest.faults.plant import always, calling, changing, wrapping
from accelcheck.verify.generators import Generators
from accelcheck.workloads.base import Program

CLEAR = 40
"""Number of calls after which results go wrong, above the draws, warm-ups and reruns of a case."""


@always
def afterwards(act: Callable[[nn.Module], object]) -> Change:
    """Plant an action on the module after each call; results are right."""

    def call(module: nn.Module, *inputs: Any) -> Any:
        out = module(*inputs)
        act(module)
        return out

    return calling(call)


def moves_statistics(module: nn.Module) -> None:
    """Evaluation moves running statistics."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.mul_(0.9)


def freezes(module: nn.Module) -> None:
    """A call leaves a parameter frozen."""
    list(module.parameters())[-1].requires_grad = False


def trains(module: nn.Module) -> None:
    """Evaluation leaves the module in training mode."""
    module.train()


def hooks_module(module: nn.Module) -> None:
    """Each call leaves a hook of the module."""
    module.register_forward_hook(_ignores)


def hooks_parameter(module: nn.Module) -> None:
    """Each call leaves a hook of a parameter."""
    next(module.parameters()).register_hook(lambda _: None)  # type: ignore[no-untyped-call]  # untyped in torch


def _ignores(*_: Any) -> None:
    return


@always(calling)
def hooks_for_a_while(module: nn.Module, *inputs: Any) -> Any:
    """Each call registers a hook and removes it."""
    handle = module.register_forward_hook(_ignores)
    try:
        return module(*inputs)
    finally:
        handle.remove()


def reseeds(_: nn.Module) -> None:
    """Each call seeds torch's generator."""
    torch.manual_seed(0)


def draws(_: nn.Module) -> None:
    """Each call draws from torch's generator."""
    torch.rand(1)


def draws_numpy(_: nn.Module) -> None:
    """Each call draws from NumPy's generator."""
    np.random.rand()


def draws_python(_: nn.Module) -> None:
    """Each call draws from Python's generator."""
    random.random()  # noqa: S311 - the generator itself is meant


@always(calling)
def draws_and_restores(module: nn.Module, *inputs: Any) -> Any:
    """Each call draws, and puts the generators back. A checkpoint does so."""
    before = Generators.now()
    torch.manual_seed(0)
    draws_numpy(module)
    draws_python(module)
    before.restore()
    return module(*inputs)


def draws_its_own() -> Change:
    """Each call draws from a generator of its own."""
    generator = torch.Generator().manual_seed(0)

    def call(module: nn.Module, *inputs: Any) -> Any:
        torch.rand(1, generator=generator)
        return module(*inputs)

    return calling(call)


def counting(strength: float) -> Change:
    """Results are wrong after 40 calls. A ring of buffers that wraps around errs so."""
    numbers = itertools.count()

    def call(plain: Any, *inputs: Any) -> Any:
        out = plain(*inputs)
        return out * (1 + strength) if next(numbers) >= CLEAR else out

    return wrapping(call)


def keeping(most: int, *, inputs_too: bool = False) -> Callable[[], Change]:
    """Keeps the last results, or the last inputs, of so many calls."""

    def change() -> Change:
        kept: list[Any] = []

        def call(plain: Any, *inputs: Any) -> Any:
            out = plain(*inputs)
            kept.append(inputs if inputs_too else out)
            del kept[:-most]
            return out

        return wrapping(call)

    return change


def in_the_input(program: Program) -> None:
    """The output lies behind the input in the same allocation, and keeps it alive."""
    plain, (x,) = program.module, program.inputs
    whole = torch.empty(2 * x.numel(), dtype=x.dtype, device=x.device)
    whole[: x.numel()].copy_(x.flatten())
    program.inputs = (whole[: x.numel()].view(x.shape),)

    def call(x: Tensor) -> Tensor:
        behind = x.as_strided(x.shape, x.stride(), x.numel()) if x.untyped_storage().nbytes() > x.nbytes else x.clone()
        return behind.copy_(plain(x))

    program.call = call


@always(wrapping)
def copies(plain: Any, *inputs: Any) -> Any:
    """Outputs are copies where eager gives views."""
    outs = plain(*inputs)
    return tuple(torch.empty_strided(o.shape, o.stride(), dtype=o.dtype, device=o.device).copy_(o) for o in outs)


quick_calls = where(lambda device: not device.has("lazy"), "{} traces each call: 40 more take too long")


MLP, NORM = single("mlp"), single("batch-norm")
BOTH = (MLP, derived("mlp"))
_NO_DTYPE = dict.fromkeys(HALVES, "what surrounds a run is no matter of the storage dtype")
fault = alike(absent=_NO_DTYPE)

FAULTS = (
    fault("statistics-moved")(NORM, afterwards(moves_statistics)),
    fault("parameter-frozen")(MLP, afterwards(freezes)),
    fault("mode-flipped")(MLP, afterwards(trains)),
    fault("module-hooked")(BOTH, afterwards(hooks_module)),
    fault("parameter-hooked")(BOTH, afterwards(hooks_parameter)),
    fault("generator-seeded")(BOTH, afterwards(reseeds)),
    fault("generator-drawn-from")(BOTH, afterwards(draws)),
    fault("generator-of-numpy-drawn-from")(BOTH, afterwards(draws_numpy)),
    fault("generator-of-python-drawn-from")(BOTH, afterwards(draws_python)),
    fault("wrong-after-many-calls")(NORM, counting, strengths=(0.5, 0.01), exists=quick_calls),
    fault("results-kept", "Every result is kept for ever.")(NORM, lambda _: keeping(10**9)()),
    fault("inputs-kept", "Every input is kept for ever.")(NORM, lambda _: keeping(10**9, inputs_too=True)()),
    fault("output-in-the-input")(NORM, always(changing)(in_the_input), exists=strided),
)
VARIANTS = (
    variant("hooked-for-a-while")(BOTH, hooks_for_a_while),
    variant("generators-put-back")(BOTH, draws_and_restores),
    variant("generator-of-its-own")(BOTH, draws_its_own),
    variant("last-results-kept", "The last four results are kept.")(NORM, keeping(4)),
    variant("last-input-kept", "The last input is kept.")(NORM, keeping(1, inputs_too=True)),
    variant("views-copied")(single("shared-views"), copies),
)
