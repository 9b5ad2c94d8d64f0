"""Faults of values: gains, subnormals, NaN, overflow, and functions that are nearly right."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.devices.base import Device
from accelcheck.selftest.faults import plant
from accelcheck.selftest.faults.base import HALVES, Cell, backward, fault, where
from accelcheck.selftest.faults.compute import layer_norm
from accelcheck.selftest.faults.partial import ONE_UNIT
from accelcheck.selftest.faults.plant import Kernel, always, aside, backward_kernels, calling, kernel, output, scaled


@aside
def _flushed(tensor: Tensor) -> Tensor:
    """Replaces subnormal numbers by 0 of their sign."""
    zeros = torch.zeros_like(tensor).copysign(tensor)
    return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, zeros, tensor)


@aside
def small_flushed(share: float, tensor: Tensor) -> Tensor:
    """Elements below a threshold are 0, but for those of every 16th column. They are a `share` of all."""
    sizes = tensor.abs().float()
    small = sizes <= sizes.flatten().kthvalue(max(1, int(share * tensor.numel()))).values
    small[..., ::16] = False
    return tensor.masked_fill(small, 0.0)


def flushing(func: Any, x: Tensor, y: Any) -> Tensor:
    """Subnormal operands and results are 0."""
    other = _flushed(y) if isinstance(y, Tensor) else y
    return _flushed(func(_flushed(x), other))


def _keeps_subnormals(device: Device) -> bool:
    tiny = torch.full((2,), torch.finfo(torch.float32).tiny, device=device.torch_device())
    return bool(((tiny * 0.5).cpu() > 0).all())


keeps_subnormals = where(_keeps_subnormals, "{} flushes subnormal numbers")
"""Devices that keep subnormal numbers: where they are flushed anyway, there is nothing to plant."""


def maximum(func: Kernel, x: Tensor, y: Tensor) -> Tensor:
    """The maximum of a number and NaN is the number."""
    return func(torch.where(x.isnan(), y, x), torch.where(y.isnan(), x, y))


def clamp(func: Kernel, x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """NaN is clamped to a bound."""
    return func(torch.where(x.isnan(), torch.full_like(x, low), x), low, high)


def relu(func: Kernel, x: Tensor) -> Tensor:
    """The ReLU of NaN is 0."""
    return func(torch.where(x.isnan(), torch.zeros_like(x), x))


def unshifted_softmax(module: Any, x: Tensor) -> Tensor:
    """Softmax does not subtract the maximum: large scores give NaN."""
    grown = torch.exp(x.float())
    return (grown / grown.sum(module.dim, keepdim=True)).to(x.dtype)


def half_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm squares in FP16: inputs beyond 256 overflow."""
    mean = x.mean(-1, keepdim=True)
    return mean, (x - mean).half().square().float().mean(-1, keepdim=True)


def tanh_gelu(module: Any, x: Tensor) -> Tensor:
    """GELU by tanh where erf was asked for."""
    return functional.gelu(x, approximate="tanh")


_SCALES = (0.05, 0.01, 0.003)

FAULTS = (
    fault("gain", "All results are too large by a factor.")(
        (Cell("elementwise-5"), Cell("mlp")), lambda error: output(scaled(1.0 + error)), _SCALES
    ),
    fault("gain-backward", "All gradients are too large by a factor.")(
        backward("mlp"), lambda error: plant.replacing(grad=scaled(1.0 + error)), _SCALES
    ),
    fault("truncated-elementwise", "Results of element-wise products are truncated to the storage dtype, not rounded.")(
        Cell("elementwise-product", dtypes=HALVES, hidden={"float32": ONE_UNIT}),
        always(kernel("mul"))(plant.truncated),
        number=10,
    ),
    fault("subnormals-flushed")(
        Cell("elementwise-product"), always(kernel("mul"))(flushing), number=11, exists=keeps_subnormals
    ),
    fault("subnormals-flushed-backward", "In the backward pass subnormal operands and results are 0.")(
        backward("elementwise-product"), lambda _: backward_kernels(mul=flushing), number=11, exists=keeps_subnormals
    ),
    fault("small-elements-flushed", small_flushed)(
        Cell("elementwise-large", dtypes=("bfloat16",)),
        lambda share: output(partial(small_flushed, share)),
        (0.02, 0.016, 0.008),
        absent=dict.fromkeys(
            ("float32", "float16"), "the norms see numbers of this size, as in other faults of values"
        ),
        hidden={("bfloat16", 0.008): "the tail is what 1 % of the elements exceed, and no norm sees elements so small"},
    ),
    fault("nan-swallowed-by-maximum")(Cell("elementwise-bound"), always(kernel("maximum"))(maximum), number=12),
    fault("nan-swallowed-by-clamp")(Cell("elementwise-bound"), always(kernel("clamp"))(clamp), number=12),
    fault("nan-swallowed-by-relu")(Cell("elementwise-bound"), always(kernel("relu"))(relu), number=12),
    fault("softmax-unshifted")(Cell("softmax"), always(calling)(unshifted_softmax), number=13),
    fault("norm-overflow", half_moments)(
        Cell("layer-norm-large"), lambda _: calling(partial(layer_norm, moments=half_moments)), number=13
    ),
    fault("tanh-gelu")(Cell("gelu"), always(calling)(tanh_gelu), number=15),
    fault("tanh-gelu-backward", "The gradient is that of GELU by tanh where GELU by erf was asked for.")(
        backward("gelu"), always(plant.backwards)(tanh_gelu), number=15
    ),
)
