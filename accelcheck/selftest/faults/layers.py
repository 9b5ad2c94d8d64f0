"""Faults of norms, convolutions and pooling; some that only one combination of module mode and gradients shows."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.selftest.faults.base import Cell, backward, derived, fault, passes, single
from accelcheck.selftest.faults.compute import layer_norm, two_pass
from accelcheck.selftest.faults.plant import Kernel, always, backwards, calling, convolution

unbiased = partial(two_pass, correction=1)
"""The variance over N - 1."""


@always(lambda wrong: convolution(forward=wrong))
def without_bias(func: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Convolutions with a stride omit their bias."""
    return func(x, weight, None, *rest)


@always(lambda wrong: convolution(backward=wrong))
def without_bias_gradient(func: Any, *args: Any) -> Any:
    """The gradient of a convolution's bias stays 0."""
    of_input, of_weight, of_bias = func(*args)
    return of_input, of_weight, None if of_bias is None else torch.zeros_like(of_bias)


def counting_padding(module: Any, x: Tensor) -> Tensor:
    """Average pooling counts its padding."""
    return functional.avg_pool2d(x, 3, stride=2, padding=1, count_include_pad=True)


@always(calling)
def padded_with_zeros(module: Any, x: Tensor) -> Tensor:
    """Padding is zero where the values at the edge were asked for."""
    return functional.conv2d(x, module.weight, module.bias, padding=1)


@always(calling)
def padded_on_one_side(module: Any, x: Tensor) -> Tensor:
    """All of the padding is above and to the left. It is twice as wide there."""
    return functional.conv2d(functional.pad(x, (2, 0, 2, 0), mode="replicate"), module.weight, module.bias)


@always(lambda wrong: convolution(backward=wrong))
def misread_gradient(func: Any, grad: Tensor, *rest: Any) -> Any:
    """A convolution reads the gradient of a channels-last output as channels first."""
    return func(grad.permute(0, 2, 3, 1).reshape(grad.shape), *rest)


@always(calling)
def norms_follow_gradients(module: nn.Module, *inputs: Any) -> Any:
    """Batch norm takes the batch's statistics where gradients are recorded, else its running ones, in any mode."""

    def follow(layer: nn.Module, inputs: Any) -> None:
        layer.train(torch.is_grad_enabled())

    layers = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm1d)]
    modes = [layer.training for layer in layers]
    handles = [layer.register_forward_pre_hook(follow) for layer in layers]
    try:
        return module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
        for layer, training in zip(layers, modes, strict=True):
            layer.train(training)


FAULTS = (
    fault("norm-over-n-minus-1", "Layer norm divides by N - 1.")(
        Cell("layer-norm-narrow"), lambda _: calling(partial(layer_norm, moments=unbiased)), number=14
    ),
    fault("norm-over-n-minus-1-backward", "The gradient of layer norm is that of a layer norm that divides by N - 1.")(
        backward("layer-norm-narrow"), lambda _: backwards(partial(layer_norm, moments=unbiased)), number=14
    ),
    fault("norm-eps", "Layer norm takes another eps: the strength for 1e-5.")(
        Cell("layer-norm-narrow"), lambda eps: calling(partial(layer_norm, eps=eps)), (1e-3, 1e-6), number=14
    ),
    fault("norm-eps-backward", "The gradient of layer norm is that of one with another eps: the strength for 1e-5.")(
        backward("layer-norm-narrow"), lambda eps: backwards(partial(layer_norm, eps=eps)), (1e-6,), number=14
    ),
    fault("conv-bias-dropped")(Cell("conv-strided"), without_bias, number=16),
    fault("conv-bias-dropped-backward")(backward("conv-strided"), without_bias_gradient, number=16),
    fault("padding-counted")(single("average-pool"), always(calling)(counting_padding), number=17),
    fault("padding-counted-backward", "The gradient of average pooling counts its padding.")(
        derived("average-pool"), always(backwards)(counting_padding), number=17
    ),
    fault("padding-of-zeros")(Cell("conv-replicated"), padded_with_zeros, number=17),
    fault("padding-on-one-side")(Cell("conv-replicated"), padded_on_one_side, number=17),
    fault("channels-last-gradient")(backward("conv-strided"), misread_gradient, number=18),
    fault(
        "channels-last-gradient-under-channels-last", "The same, under the technique that gives the output this layout."
    )(backward("conv-strided"), misread_gradient, number=18, technique="channels-last"),
    fault(
        "norm-of-the-batch-in-evaluation",
        "Batch norm takes the statistics of the batch where gradients are asked in evaluation mode.",
    )(backward("saliency"), norms_follow_gradients),
    fault(
        "norm-of-the-past-without-gradients",
        "Batch norm takes its running statistics in training mode where no gradients are recorded.",
    )(passes("frozen-backbone"), norms_follow_gradients),
)
