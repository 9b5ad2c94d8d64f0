"""Faults of handwritten gradients, and of ``torch.func``: maps over samples, products with cotangents, Jacobians."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import pytree
from accelcheck.selftest.faults import sowing
from accelcheck.selftest.faults.base import Change, PlantedFault, backward, fault, row, single
from accelcheck.selftest.faults.plant import backwards, calling, editing

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from accelcheck.workloads.base import Result


def exchanged(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    """A custom function returns each operand's gradient for the other."""
    return _Exchange.apply(x, gate, module.slope)  # type: ignore[no-untyped-call,no-any-return]  # untyped in torch


def gated(x: Tensor, gate: Tensor, slope: Tensor) -> Tensor:
    """The formula of `accelcheck.workloads.custom.GatedFunction`."""
    return x * torch.sigmoid(slope * gate)


def derivatives(grad: Tensor, x: Tensor, gate: Tensor, slope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `gated`."""
    opened = torch.sigmoid(slope * gate)
    inner = grad * x * opened * (1 - opened)
    return grad * opened, inner * slope, (inner * gate).sum()


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, slope)
        return gated(x, gate, slope)


class _Exchange(_Gated):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_x, of_gate, of_slope = derivatives(grads[0], *ctx.saved_tensors)
        return of_gate, of_x, of_slope


class _Once(_Gated):
    """First gradients are right, but detached from their inputs, so second gradients are wrong."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return derivatives(grads[0], *(saved.detach() for saved in ctx.saved_tensors))


def detached(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    """A custom function's first gradients are right, its second gradients are wrong."""
    return _Once.apply(x, gate, module.slope)  # type: ignore[no-untyped-call,no-any-return]  # untyped in torch


def unscaled(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    """A custom function forgets a factor in one gradient. The gradient of ``gate`` lacks ``slope``."""
    slope = module.slope
    return gated(x, gate / slope.detach(), slope) + 0.0 * gate.sum()


def doubling(program: Any) -> None:
    """Gradients are not cleared, and those of two passes add up."""
    plain = program.run

    def run(mode: Mode) -> Result:
        result: Result = plain(mode)
        return {path: 2 * tensor if path.startswith("grad:") else tensor for path, tensor in result.items()}

    program.run = run


def swapped(one: str, other: str) -> Change:
    """Two tensors of the result are swapped."""

    def edit(result: Result) -> None:
        result[one], result[other] = result[other], result[one]

    return editing(edit)


def last_sample_repeated(strength: float) -> AbstractContextManager[None]:
    """A map over samples computes the last but one in place of the last."""

    def wrong(plain: Callable[..., Any], function: Callable[..., Any], in_dims: Any) -> Callable[..., Any]:
        mapped = plain(function, in_dims=in_dims)

        def call(*values: Any) -> Any:
            given = (
                value if dim is None else torch.cat([value[:-1], value[-2:-1]])
                for value, dim in zip(values, in_dims, strict=True)
            )
            return mapped(*given)

        return call

    return sowing.swapped(torch.func, "vmap", wrong)


def cotangent_short(strength: float) -> AbstractContextManager[None]:
    """A product with a cotangent leaves out its last row."""

    def short(cotangent: Tensor) -> Tensor:
        return torch.cat([cotangent[:-1], torch.zeros_like(cotangent[-1:])])

    def wrong(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        out, pull, *rest = plain(*args, **options)
        return out, lambda given: pull(pytree.tree_map(short, given)), *rest

    return sowing.swapped(torch.func, "vjp", wrong)


def row_transposed(by: str) -> Callable[[float], AbstractContextManager[None]]:
    """The last row of the first output's Jacobian is that of the output before it."""

    def wrong(plain: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        jacobian = plain(function, **options)

        def call(*args: Any) -> Any:
            first, *rest = jacobian(*args)
            return pytree.tree_map(lambda rows: torch.cat([rows[:-1], rows[-2:-1]]), first), *rest

        return call

    return lambda _: sowing.swapped(torch.func, by, wrong)


slow = row(PlantedFault, seeds=10)

FAULTS = (
    fault("gradients-swapped", exchanged)(backward("custom-function"), lambda _: calling(exchanged), number=38),
    fault("attention-gradients-swapped", "The gradients of query and key are swapped.")(
        backward("attention"), lambda _: swapped("grad:input[0]", "grad:input[1]"), number=38
    ),
    fault("chain-rule-factor-lost", unscaled)(backward("custom-function"), lambda _: backwards(unscaled), number=38),
    fault("double-backward-wrong", detached)(backward("custom-function"), lambda _: calling(detached), number=38),
    fault("gradient-doubled", doubling)(backward("mlp"), lambda _: doubling, number=38),
    slow("vmap-last-sample-repeated")(
        (single("attention-ragged"), single("elementwise-scalar"), single("gather", Mode.BACKWARD)),
        around=last_sample_repeated,
        technique="func-vmap",
    ),
    slow("vjp-cotangent-short")(
        (single("custom-function", Mode.BACKWARD), single("embedding-norm-gelu", Mode.BACKWARD)),
        around=cotangent_short,
        technique="func-grad",
    ),
    slow("jacrev-row-repeated", "A Jacobian by reverse mode has its last row but one twice.")(
        single("max-pool", Mode.BACKWARD), around=row_transposed("jacrev"), technique="func-jacrev"
    ),
    slow("jacfwd-row-repeated", "A Jacobian by forward mode has its last row but one twice.")(
        (single("elementwise-overlap", Mode.BACKWARD), single("layer-norm-narrow", Mode.BACKWARD)),
        around=row_transposed("jacfwd"),
        technique="func-jacfwd",
    ),
)
