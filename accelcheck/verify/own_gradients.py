"""Custom autograd functions of a model: their gradients against finite differences in FP64.

The oracle runs the model's own backward pass, so that a wrong one agrees with itself.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from accelcheck.core.plain import text
from accelcheck.workloads.base import duplicate, flatten, is_inexact
from accelcheck.workloads.problem import Problem

STEP = 1e-6
"""Step of finite differences, the default of `torch.autograd.gradcheck`."""
DIRECTIONS = 2
"""Random directions; a wrong gradient differs in all of them, a kink may lie along one."""
TOLERANCE = 1e-5
"""Least wrong difference of two slopes, relative to the gradient's norm; finite differences in FP64 err by 1e-9."""


@dataclass(frozen=True)
class OwnGradient:
    """Checked gradient of a custom function.

    Attributes:
        name: Name of the function's class.
        wrong: Analytic and numerical gradients where they differ; empty where they agree.
        flat: True if its finite differences are 0, as those of rounding: gradients are then estimates by design.
        unchecked: Reason why finite differences were not taken; empty where they were.
    """

    name: str
    wrong: str = ""
    flat: bool = False
    unchecked: str = ""


def own_gradients(problem: Problem) -> list[OwnGradient]:
    """Checks each class of custom functions that a model's backward pass reaches, at the arguments of its first call.

    Args:
        problem: Problem on the CPU, in FP32; a copy of its module runs in evaluation mode.
    """
    module = duplicate(problem.module).eval()
    classes = _classes(module, problem.inputs)
    if not classes:
        return []
    forwards = {own: own.forward for own in classes}  # before any is replaced, since one may inherit another's
    with torch.enable_grad(), contextlib.ExitStack() as patched:
        calls = {own: patched.enter_context(_recorded(own, forward)) for own, forward in forwards.items()}
        module(*_leaves(problem.inputs))
    return [_checked(own, calls[own]) for own in classes]


def _leaves(inputs: tuple[Any, ...]) -> list[Any]:
    # Copies of leaves, since a model may write to its inputs.
    return [value.detach().requires_grad_().clone() if is_inexact(value) else value for value in inputs]


def _classes(module: torch.nn.Module, inputs: tuple[Any, ...]) -> list[type[Function]]:
    """Classes of the custom functions in the graph of a forward pass, by name, without torch's own."""
    classes: dict[str, type[Function]] = {}
    with torch.enable_grad():
        nodes = [tensor.grad_fn for _, tensor in flatten(module(*_leaves(inputs))) if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        if isinstance(node, BackwardCFunction):
            own: Any = type(node)._forward_cls  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
            if not own.__module__.startswith("torch."):
                classes[own.__qualname__] = own
        fresh = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= fresh
        nodes += fresh
    return [classes[name] for name in sorted(classes)]


@contextlib.contextmanager
def _recorded(own: Any, forward: Callable[..., Any]) -> Iterator[list[Any]]:
    """Records the arguments of a function's first call inside a context, tensors in FP64."""
    kept: list[Any] = []
    # Without `setup_context`, the first argument is a context.
    first = int(own.setup_context is Function.setup_context)

    def recording(*arguments: Any) -> Any:
        if not kept:
            kept.extend(_exact(value) for value in arguments[first:])
        return forward(*arguments)

    defined = "forward" in vars(own)
    own.forward = staticmethod(recording)
    try:
        yield kept
    finally:
        if defined:
            own.forward = staticmethod(forward)
        else:
            del own.forward


def _exact(value: Any) -> Any:
    if not is_inexact(value):
        return value
    wide = torch.complex128 if value.is_complex() else torch.float64
    return value.detach().to(wide, copy=True).requires_grad_(value.requires_grad)


def _checked(own: Any, arguments: list[Any]) -> OwnGradient:
    leaves = [value for value in arguments if isinstance(value, Tensor) and value.requires_grad]

    def call(*values: Tensor) -> list[Tensor]:
        fresh = iter(values)
        given = [next(fresh) if isinstance(value, Tensor) and value.requires_grad else value for value in arguments]
        return [tensor for _, tensor in flatten(own.apply(*given)) if is_inexact(tensor)]

    name = own.__qualname__
    try:
        out = call(*leaves)
        if narrow := {str(tensor.dtype) for tensor in out} - {"torch.float64", "torch.complex128"}:
            return OwnGradient(name, unchecked=f"it computes in {', '.join(sorted(narrow))}")
        slopes = [_slopes(call, leaves, out, seed) for seed in range(DIRECTIONS)]
    except Exception as error:  # noqa: BLE001 - a user-owned function may raise anything
        return OwnGradient(name, unchecked=f"{type(error).__name__}: {next(iter(text(error).splitlines()), '')}")
    if not all(abs(slope.analytic - slope.numerical) > TOLERANCE * slope.scale for slope in slopes):
        return OwnGradient(name)
    first = slopes[0]
    wrong = f"{first.analytic:.6g} along a random direction, where finite differences give {first.numerical:.6g}"
    return OwnGradient(name, wrong=wrong, flat=all(slope.numerical == 0 for slope in slopes))


class _Slopes(NamedTuple):
    """Derivatives of a projection of a function's outputs along a random direction of its inputs, and their scale."""

    analytic: float
    numerical: float
    scale: float


def _slopes(call: Callable[..., list[Tensor]], leaves: Sequence[Tensor], out: Sequence[Tensor], seed: int) -> _Slopes:
    generator = torch.Generator().manual_seed(seed)
    directions, weights = (
        [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in tensors] for tensors in (leaves, out)
    )
    taken = torch.autograd.grad(out, leaves, weights, retain_graph=True, allow_unused=True)
    gradients = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(taken, leaves, strict=True)]
    with torch.no_grad():
        above, below = (
            _product(call(*(x + sign * STEP * u for x, u in zip(leaves, directions, strict=True))), weights)
            for sign in (1, -1)
        )
        scale = math.sqrt(_product(gradients, gradients))
    numerical = (above - below) / (2 * STEP)
    return _Slopes(_product(gradients, directions), numerical, max(scale, abs(numerical)))


def _product(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Sum of products; complex numbers count as pairs of real ones."""
    return sum(float((a.conj() * b).real.sum()) for a, b in zip(some, others, strict=True))
