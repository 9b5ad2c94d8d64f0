"""How workloads draw parameters and inputs: from the problem's generator alone, and with wide margins at every ReLU.

Why not the default initialisers of `torch.nn`: they draw from the global generator, which `Workload.problem` seeds like
the problem's own, so that parameters and inputs would be made of the same random numbers.

Why margins: where a pre-activation is nearly 0, its rounding decides whether a ReLU passes the gradient. Such flips
change a gradient's row by its whole size, and hide in bfloat16 every fault smaller than that. So inputs and weights of
ReLU networks carry a rank-one pattern of alternating signs, which makes pre-activations about +2 or -2 (sign of the
sample times sign of the unit), plus noise that is several times smaller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PATTERN = 2.0
"""Size of the sign pattern of a planted weight: a ReLU lets half of it pass, so 2 keeps its size from layer to layer."""
NOISE = 0.3
"""Size of the noise of a planted weight, relative to ``1 / sqrt(fan_in)``: a pre-activation of 0 is then 3 standard
deviations away or more, and still no two rows or columns are alike."""
BATCH_NORM_NOISE = 1.0
"""The same where batch norm follows, and of inputs: its gradient leaves nothing of what is along the pattern, so with
little noise gradients cancel (FP32 eager errs by 1e-5 at 0.3, by 1e-6 at 1), with none of the pattern ReLUs flip."""


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers, FP32."""
    return torch.randn(shape, generator=generator)


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """Uniform integers of ``[low, high)``, int64."""
    return torch.randint(low, high, shape, generator=generator)


def by_value(generator: torch.Generator, tensor: Tensor) -> Tensor:
    """Numbers of [0, 1), FP64, as if random, but the same wherever `tensor` has the same value: low bits of it times one.

    What is equal rounds equally: inputs that repeat (ones, the pixels of an empty image) have errors that do not average
    out, and independent random errors would not show it. Values that differ in their 27th bit get other numbers.
    """
    factor = 2.0**26 * (1.0 + torch.rand((), generator=generator, dtype=torch.float64))
    mantissa, _ = torch.frexp(tensor)
    return mantissa.to(torch.float64).mul_(factor).frac_().abs_().nan_to_num_()


def orders(generator: torch.Generator, *shape: int) -> Tensor:
    """Independent permutations along the last dimension, int64: no two indices of a row are the same."""
    return torch.rand(shape, generator=generator).argsort(dim=-1)


def lengths(generator: torch.Generator, batch: int, shortest: int, longest: int) -> Tensor:
    """Lengths of a padded batch, ``(batch,)`` int64: the first is `longest`, the last `shortest`, others between."""
    drawn = integers(generator, shortest, longest + 1, batch)
    drawn[-1] = shortest
    drawn[0] = longest
    return drawn


def signs(count: int) -> Tensor:
    """``+1, -1, +1, ...``: as many of either sign as can be, so that batch normalisation keeps the pattern."""
    return 1.0 - 2.0 * (torch.arange(count) % 2)


def separated(generator: torch.Generator, samples: int, features: int, *rest: int, noise: float = 0.5) -> Tensor:
    """Inputs for ReLU networks, ``(samples, features, *rest)``: the sign pattern, and less noise."""
    pattern = torch.outer(signs(samples), signs(features)).reshape(samples, features, *(1 for _ in rest))
    return pattern + noise * normal(generator, samples, features, *rest)


@torch.no_grad()
def plant(weight: Tensor, generator: torch.Generator, noise: float = NOISE) -> None:
    """Fill a weight of a ReLU network, ``(out, in, *kernel)``, with the sign pattern and noise."""
    out, into, *kernel = weight.shape
    fan_in = into * math.prod(kernel)
    pattern = torch.outer(signs(out), signs(into)).reshape(out, into, *(1 for _ in kernel))
    weight.copy_(PATTERN / fan_in * pattern + noise / math.sqrt(fan_in) * normal(generator, *weight.shape))


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator, *, relu: bool = False, noise: float = NOISE) -> None:
    """Draw all parameters and batch-norm statistics of a module, in the order of its submodules.

    Matrices and kernels have a variance of 1 / fan_in, or are planted with `noise` where `relu`; embeddings a variance of 1. Biases
    and scales are near 0 and 1 but never there: a bias or a scale that is dropped must show.
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
