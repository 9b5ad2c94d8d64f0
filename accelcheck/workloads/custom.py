"""Custom autograd functions, as extensions write them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, learned, normal


class GatedFunction(torch.autograd.Function):
    """``x * sigmoid(slope * gate)``: ``x`` and ``gate`` of the same shape, ``slope`` 0-d; differentiable twice.

    It has a separate ``setup_context``, which `torch.func` requires.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, gate: Tensor, slope: Tensor) -> Tensor:
        return x * torch.sigmoid(slope * gate)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        x, gate, slope = ctx.saved_tensors
        open_ = torch.sigmoid(slope * gate)
        inner = grad * x * open_ * (1 - open_)
        return grad * open_, inner * slope, (inner * gate).sum()


class Gated(nn.Module):
    """`GatedFunction` with a learned slope. Not scriptable: TorchScript has no custom autograd functions."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.empty(()))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = GatedFunction.apply(x, gate, self.slope)  # type: ignore[no-untyped-call]  # untyped in torch
        return out


def _swish_projection(device_type: str) -> Any:
    """``swish(x) weight^T`` with ``swish(x) = x sigmoid(beta x)``, an autograd function that saves no ``swish(x)``.

    ``x`` (..., in), ``weight`` (out, in), ``beta`` (in,); differentiable twice. Without autocast's decorators, which
    take a device type, half-precision gradients would be multiplied with saved FP32 operands.

    Swish: P. Ramachandran, B. Zoph, Q. V. Le, arXiv:1710.05941.
    """

    class SwishProjection(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type)  # type: ignore[untyped-decorator]  # untyped in torch
        def forward(ctx: Any, x: Tensor, weight: Tensor, beta: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight, beta)
            return functional.linear(x * torch.sigmoid(beta * x), weight)

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)  # type: ignore[untyped-decorator]  # untyped in torch
        def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
            (grad,) = grads
            x, weight, beta = ctx.saved_tensors
            open_ = torch.sigmoid(beta * x)
            through = grad @ weight
            inner = through * x * open_ * (1 - open_)
            of_weight = grad.flatten(0, -2).t() @ (x * open_).flatten(0, -2)
            return through * open_ + inner * beta, of_weight, (inner * x).flatten(0, -2).sum(0)

    return SwishProjection


# Defined here for known device types: a class definition in a forward pass is a graph break for compilers.
_PROJECTIONS = {device_type: _swish_projection(device_type) for device_type in ("cpu", "cuda", "xla")}


def swish_projection(device_type: str) -> Any:
    """Function of `_swish_projection` for tensors of a device type."""
    if device_type not in _PROJECTIONS:
        _PROJECTIONS[device_type] = _swish_projection(device_type)
    return _PROJECTIONS[device_type]


class SwishBlock(nn.Module):
    """``x + swish(fc(x)) weight^T`` with learned betas, through `swish_projection`; ``(..., width)`` to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, hidden)
        self.weight = nn.Parameter(torch.empty(width, hidden))
        self.beta = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + swish_projection(x.device.type).apply(self.fc(x), self.weight, self.beta)
        return out


class SwishNetwork(nn.Module):
    """A linear stem, two `SwishBlock` in `blocks`, and a head: ``(B, features)`` to ``(B, classes)``.

    The stem is no block, since the input of a reentrant checkpoint must require a gradient.
    """

    def __init__(self, features: int = 24, width: int = 32, hidden: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.blocks = nn.ModuleList([SwishBlock(width, hidden) for _ in range(2)])
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _gated(generator: torch.Generator, extent: int) -> Problem:
    module = Gated()
    with torch.no_grad():
        module.slope.copy_(1.5 + 0.1 * normal(generator))
    return Problem(module, (normal(generator, 16 + extent, 12), normal(generator, 16 + extent, 12)))


def _network(generator: torch.Generator) -> SwishNetwork:
    module = initialise(SwishNetwork(), generator)
    with torch.no_grad():
        for block in module.blocks:
            # With larger slopes 1 - sigmoid(beta x) cancels, and some seeds leave gradients of rounding errors alone.
            block.get_parameter("beta").add_(0.7)
    return module


def _swish(generator: torch.Generator, extent: int) -> Problem:
    return Problem(_network(generator), (normal(generator, 16 + extent, 24),))


def _train(generator: torch.Generator, extent: int) -> Problem:
    module, batch = _network(generator), 16 + extent
    return learned(module, normal(generator, batch, 24), integers(generator, 0, 10, batch), rate=0.02)


_TRAITS = frozenset({"resizable", "custom-function"})
_NETWORK = _TRAITS | {"matmul", "linear", "blocks"}

WORKLOADS = (
    Workload("custom-function", "A custom autograd function of two inputs and a parameter: swapped gradients show.",
        _gated, 2, traits=_TRAITS | {"twice-differentiable"}),
    Workload("custom-swish",
        "Two blocks of a linear layer and a custom function: SiLU with learned slopes, and a projection.",
        _swish, 2, traits=_NETWORK | {"twice-differentiable"}),
    Workload("train-custom", "Four steps of SGD with momentum through custom functions.",
        _train, 2, frozenset({Mode.TRAIN}), _NETWORK | {"training"}),
)  # fmt: skip
