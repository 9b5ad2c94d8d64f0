"""Faults of handwritten gradients, and of ``torch.func``: maps over samples, products with cotangents, Jacobians."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcheck.devices.torch_names import pytree
from accelcheck.selftest.faults import sowing
from accelcheck.selftest.faults.base import alike, backward, derived, fault, single
from accelcheck.selftest.faults.plant import always, backwards, calling, editing, replacing
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


@always(editing)
def swapped(result: Result) -> None:
    """The gradients of query and key are swapped."""
    query, key = "grad:input[0]", "grad:input[1]"
    result[query], result[key] = result[key], result[query]


@sowing.replacing(torch.func, "vmap")
def last_sample_repeated(plain: Callable[..., Any], function: Callable[..., Any], in_dims: Any) -> Callable[..., Any]:
    """A map over samples computes the last but one in place of the last."""
    mapped = plain(function, in_dims=in_dims)

    def call(*values: Any) -> Any:
        pairs = zip(values, in_dims, strict=True)
        return mapped(*(x if dim is None else torch.cat([x[:-1], x[-2:-1]]) for x, dim in pairs))

    return call


@sowing.replacing(torch.func, "vjp")
def cotangent_short(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A product with a cotangent leaves out its last row."""

    def short(cotangent: Tensor) -> Tensor:
        return torch.cat([cotangent[:-1], torch.zeros_like(cotangent[-1:])])

    out, pull, *rest = plain(*args, **options)
    return out, lambda given: pull(pytree.tree_map(short, given)), *rest


def row_repeated(plain: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The last row of the first output's Jacobian is that of the output before it."""
    jacobian = plain(function, **options)

    def call(*args: Any) -> Any:
        first, *rest = jacobian(*args)
        return pytree.tree_map(lambda rows: torch.cat([rows[:-1], rows[-2:-1]]), first), *rest

    return call


slow = alike(seeds=10)

FAULTS = (
    fault("gradients-swapped")(backward("custom-function"), always(calling)(exchanged), number=38),
    fault("attention-gradients-swapped")(backward("attention"), swapped, number=38),
    fault("chain-rule-factor-lost")(backward("custom-function"), always(backwards)(unscaled), number=38),
    fault("double-backward-wrong")(backward("custom-function"), always(calling)(detached), number=38),
    fault("gradient-doubled", "Gradients are not cleared, and those of two passes add up.")(
        backward("mlp"), lambda _: replacing(grad=lambda gradient: 2 * gradient), number=38
    ),
    slow("vmap-last-sample-repeated")(
        (single("attention-ragged"), single("elementwise-scalar"), derived("gather")),
        around=last_sample_repeated,
        technique="func-vmap",
    ),
    slow("vjp-cotangent-short")(
        (derived("custom-function"), derived("embedding-norm-gelu")), around=cotangent_short, technique="func-grad"
    ),
    slow("jacrev-row-repeated", "A Jacobian by reverse mode has its last row but one twice.")(
        derived("max-pool"), around=sowing.replacing(torch.func, "jacrev")(row_repeated), technique="func-jacrev"
    ),
    slow("jacfwd-row-repeated", "A Jacobian by forward mode has its last row but one twice.")(
        (derived("elementwise-overlap"), derived("layer-norm-narrow")),
        around=sowing.replacing(torch.func, "jacfwd")(row_repeated),
        technique="func-jacfwd",
    ),
)
