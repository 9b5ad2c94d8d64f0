"""Draws of parameters and inputs: from the problem's generator alone, and with wide margins at every ReLU.

The default initialisers of `torch.nn` are not used: `Workload.problem` seeds their global generator like the problem's
own, so that parameters and inputs would consist of the same random numbers.

Margins are needed because rounding decides whether a ReLU passes the gradient of a pre-activation near 0. Such a flip
changes a whole row of a gradient, and in bfloat16 hides every smaller fault. Inputs and weights of ReLU networks
therefore contain a rank-one pattern of alternating signs, which makes pre-activations about +2 or -2 (sign of the
sample times sign of the unit), plus noise that is several times smaller.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.problem import Problem

Made = TypeVar("Made", bound=nn.Module)

PATTERN = 2.0
"""Size of the sign pattern of a planted weight. A ReLU passes half of it: 2 keeps the size from layer to layer."""
NOISE = 0.3
"""Size of the noise of a planted weight, relative to ``1 / sqrt(fan_in)``. Pre-activations are then at least 3 standard
deviations away from 0, and no two rows or columns are equal."""
BATCH_NORM_NOISE = 1.0
"""Size of the noise where batch norm follows, also of inputs. Batch norm's gradient lacks the component along the
pattern, so that gradients cancel with little noise (error of FP32 eager: 1e-5 at 0.3, 1e-6 at 1). Without it, ReLUs
flip."""


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draws standard normal numbers, FP32."""
    return torch.randn(shape, generator=generator)


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Draws uniform integers in ``[low, high)``, int64."""
    return torch.randint(low, high, shape, generator=generator)


def by_value(generator: torch.Generator, tensor: Tensor) -> Tensor:
    """Pseudo-random numbers in [0, 1), FP64, in the shape of `tensor`; equal elements get equal numbers.

    For simulated rounding errors: equal values round equally, so that the errors of repeated inputs (ones, the pixels
    of an empty image) do not average out, as independent random errors would. A number is the fractional part of a
    random factor times the element's mantissa; values that differ in their first 27 bits get unrelated numbers.
    """
    # In torch, not Python: emulations call this within `Rounding`, where these operators draw numbers too.
    factor = 2.0**26 * (1.0 + torch.rand((), generator=generator, dtype=torch.float64))
    return fractions(tensor, factor)


def factor_of(generator: torch.Generator) -> float:
    """Draws a random factor for `fractions`."""
    return 2.0**26 * (1.0 + torch.rand((), generator=generator, dtype=torch.float64).item())


def fractions(tensor: Tensor, factor: float | Tensor) -> Tensor:
    """Numbers of `by_value` with this factor."""
    mantissa, _ = torch.frexp(tensor)
    return mantissa.to(torch.float64).mul_(factor).frac_().abs_().nan_to_num_()


def of_mantissas(generator: torch.Generator, mantissas: Any, *, finite: bool) -> Any:
    """Numbers of `by_value`, to the same bits, from a NumPy FP64 array of mantissas (``np.frexp`` of magnitudes)."""
    numbers = mantissas * factor_of(generator)
    numbers -= np.trunc(numbers)
    np.abs(numbers, out=numbers)
    if not finite:
        np.nan_to_num(numbers, copy=False)
    return numbers


def orders(generator: torch.Generator, *shape: int) -> Tensor:
    """Independent permutations along the last dimension, int64: no index occurs twice in a row."""
    return torch.rand(shape, generator=generator).argsort(dim=-1)


def lengths(generator: torch.Generator, batch: int, shortest: int, longest: int) -> Tensor:
    """Lengths of a padded batch, ``(batch,)`` int64: `longest` first, `shortest` last, random ones in between."""
    drawn = integers(generator, shortest, longest + 1, batch)
    drawn[-1] = shortest
    drawn[0] = longest
    return drawn


def signs(count: int) -> Tensor:
    """Signs ``+1, -1, +1, ...``, ``(count,)`` FP32, balanced so that batch normalisation keeps the pattern."""
    return 1.0 - 2.0 * (torch.arange(count) % 2)


def separated(generator: torch.Generator, samples: int, features: int, *rest: int, noise: float = 0.5) -> Tensor:
    """Inputs of ReLU networks, ``(samples, features, *rest)`` FP32: the sign pattern plus smaller noise."""
    pattern = torch.outer(signs(samples), signs(features)).reshape(samples, features, *(1 for _ in rest))
    return pattern + noise * normal(generator, samples, features, *rest)


@torch.no_grad()
def plant(weight: Tensor, generator: torch.Generator, noise: float = NOISE) -> None:
    """Fills a weight of a ReLU network, ``(out, in, *kernel)``, with the sign pattern plus noise."""
    out, into, *kernel = weight.shape
    fan_in = into * math.prod(kernel)
    pattern = torch.outer(signs(out), signs(into)).reshape(out, into, *(1 for _ in kernel))
    weight.copy_(PATTERN / fan_in * pattern + noise / math.sqrt(fan_in) * normal(generator, *weight.shape))


@torch.no_grad()
def initialise(module: Made, generator: torch.Generator, *, relu: bool = False, noise: float = NOISE) -> Made:
    """Draws all parameters and batch-norm statistics of a module, in the order of its submodules, and returns it.

    Matrices and kernels have a variance of 1 / fan_in, or, with `relu`, the sign pattern and `noise` of `plant`.
    Embeddings have a variance of 1. Biases are near 0 and scales near 1, but not exactly, so that a missing bias or
    scale changes results.
    """
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if isinstance(layer, nn.Embedding):
                parameter.copy_(normal(generator, *parameter.shape))
            elif parameter.dim() > 1 and relu:
                plant(parameter, generator, noise)
            elif parameter.dim() > 1:
                fan_in = parameter[0].numel()
                parameter.copy_(normal(generator, *parameter.shape) / math.sqrt(fan_in))
            else:
                center = 1.0 if name == "weight" else 0.0
                parameter.copy_(center + 0.1 * normal(generator, *parameter.shape))
        if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.copy_(0.1 * normal(generator, layer.num_features))
            layer.running_var.copy_(0.5 + torch.rand(layer.num_features, generator=generator))
    return module


def of_normal(
    generator: torch.Generator, extent: int, *, make: Callable[[], nn.Module], shape: tuple[int, ...], axis: int = 0
) -> Problem:
    """Problem of an initialised module and one standard normal input, whose dimension `axis` grows by the extent."""
    module = initialise(make(), generator)
    sizes = (size + extent * (place == axis) for place, size in enumerate(shape))
    return Problem(module, (normal(generator, *sizes),))


def learned(module: nn.Module, x: Tensor, target: Tensor, *, rate: float, steps: int = 4) -> Problem:
    """Problem of a classifier in training, by SGD with momentum on cross entropy."""
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.9)
    return Problem(module, (x,), target, functional.cross_entropy, optimizer, steps)
