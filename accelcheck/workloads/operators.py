"""Small workloads, one for each class of operators and without other classes, so that defects show at level 1.

On a device that lacks one operator, for example a convolution, other workloads would hide every defect behind it. For
eager alone, since other techniques add nothing to single operators.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Dropout, Problem, Workload
from accelcheck.workloads.draw import initialise, integers, normal, orders

RATE = 0.125
"""Part of elements that `Drawn` drops."""
QUANTILE = -1.1503493803760079
"""Quantile of the standard normal distribution at `RATE`."""


class Contraction(nn.Module):
    """``x @ weight`` and a batch of products: ``x (33, 40)``, ``y (3, 17, 24)``, ``z (3, 24, 9)``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(40, 24))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, y @ z


class Reductions(nn.Module):
    """Sums, means, extremes and counts of ``x (37, 130)``, and sums of int32, int8 and bool tensors of its shape."""

    def forward(self, x: Tensor, wide: Tensor, narrow: Tensor, flags: Tensor) -> list[Tensor]:
        results = [x.sum(0), x.sum(1), x.mean(0), x.mean(1), x.amax(1), x.amin(0), x.argmax(1), x.cumsum(0)]
        results += [wide.sum(0), wide.sum(1), narrow.sum(1), narrow.amax(0), flags.sum(0), flags.any(1), flags.all(0)]
        return results


class ScatterGather(nn.Module):
    """Elements read and written by index tensors, with and without collisions: ``x (24, 30)``."""

    def forward(self, x: Tensor, index: Tensor, unique: Tensor, rows: Tensor, source: Tensor) -> list[Tensor]:
        return [
            torch.gather(x, 1, index),
            torch.index_select(x, 0, rows),
            torch.scatter(x, 1, unique, source),
            torch.scatter_add(x, 1, index, source),
            torch.index_add(x, 0, rows, source),
        ]


class Casts(nn.Module):
    """Numbers in other types: to half precision, to integers (towards 0), to bool, and integers to floating-point."""

    def forward(self, x: Tensor, whole: Tensor) -> list[Tensor]:
        narrow = [x.to(torch.bfloat16), x.to(torch.float16), x.to(torch.int32), x.to(torch.int64), x.to(torch.bool)]
        return [*narrow, whole.to(torch.float32), whole.to(torch.int8), whole.to(torch.bool)]


class RootsExponentials(nn.Module):
    """Roots and logarithms of ``x > 0``, exponentials and related functions of ``y``, and ``exp`` near underflow."""

    def forward(self, x: Tensor, y: Tensor, far: Tensor) -> list[Tensor]:
        near = [x.sqrt(), x.rsqrt(), x.log(), x.log1p(), y.exp(), y.exp2(), y.expm1(), y.sin(), y.cos(), y.tanh()]
        return [*near, y.erf(), y.sigmoid(), far.exp()]


class Copies(nn.Module):
    """Copies of strided, reversed, expanded and repeated tensors, joins, and a write to a window: ``x (24, 30)``."""

    def forward(self, x: Tensor, row: Tensor) -> list[Tensor]:
        written = x.clone()
        written[1::2, 3:-4] = x[:12, 5:28]
        return [
            x.t().contiguous(),
            x[::3, 1::2].contiguous(),
            x[:, 7:19].clone(),
            x.flip(1),
            x.roll(5, 1),
            row.expand(6, 30).contiguous(),
            x.repeat(2, 1),
            torch.cat([x[:, 20:], x[:, :20]], dim=1),
            torch.stack([x, written]),
            written,
        ]


class Parameter(nn.Module):
    """Returns its parameter ``(181,)`` for any input: nothing is computed before the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(181))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.view(-1)


class Drawn(nn.Module):
    """Drops elements with a uniform number below `RATE`, or a normal one below `QUANTILE`: ``x``, ``y`` alike."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if not self.training:
            return x.clone(), y.clone()
        scale = 1.0 / (1.0 - RATE)
        return x * (torch.rand_like(x) >= RATE) * scale, y * (torch.randn_like(y) >= QUANTILE) * scale


def inner_product(out: Tensor, target: Tensor) -> Tensor:
    """Computes the loss ``sum(out * target)``, 0-D, whose gradient is the target, without rounding."""
    return (out * target).sum()


def _contraction(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Contraction(), generator)
    return Problem(module, (normal(generator, 33, 40), normal(generator, 3, 17, 24), normal(generator, 3, 24, 9)))


def _reductions(generator: torch.Generator, extent: int) -> Problem:
    shape = 37, 130
    wide = integers(generator, -(2**24), 2**24, *shape).to(torch.int32)
    narrow = integers(generator, -128, 128, *shape).to(torch.int8)
    # A mean of 2: a half-precision sum stops growing in half precision. Whole rows of flags are true, or false.
    flags = integers(generator, 0, 2, *shape) == 1
    flags[3], flags[5], flags[:, 7] = False, True, True
    return Problem(Reductions(), (2.0 + normal(generator, *shape), wide, narrow, flags))


def _batch_norm(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(nn.BatchNorm2d(6), generator)
    # Means of either sign and variances around 1 move the running ones in the first batch. The means are small, since a
    # variance computed in one pass, which is no fault, cancels otherwise.
    x = normal(generator, 12, 6, 5, 7)
    means = torch.linspace(-0.5, 0.5, 6).view(6, 1, 1)
    return Problem(module, (x * (1.0 + 0.1 * torch.arange(6).view(6, 1, 1)) + means,))


def _scatter_gather(generator: torch.Generator, extent: int) -> Problem:
    rows, columns = 24, 30
    index = integers(generator, 0, 9, rows, columns)  # nine places for thirty elements
    unique = orders(generator, rows, columns)
    taken = integers(generator, 0, 7, rows)
    return Problem(
        ScatterGather(), (normal(generator, rows, columns), index, unique, taken, normal(generator, rows, columns))
    )


def _casts(generator: torch.Generator, extent: int) -> Problem:
    # Fractions of either sign, some of them 0; and integers that int8 wraps.
    x = 40.0 * normal(generator, 24, 33)
    x[::5, ::4] = 0.0
    return Problem(Casts(), (x, integers(generator, -(2**20), 2**20, 24, 33).to(torch.int32)))


def _roots(generator: torch.Generator, extent: int) -> Problem:
    x = torch.exp(2.0 * normal(generator, 24, 64))
    # From the smallest normal number upwards, where fast exponentials fail first.
    far = torch.linspace(-87.0, -60.0, 24 * 64).view(24, 64) - 0.01 * torch.rand(24, 64, generator=generator)
    return Problem(RootsExponentials(), (x, 2.0 * normal(generator, 24, 64), far))


def _copies(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Copies(), (normal(generator, 24, 30), normal(generator, 1, 30)))


def _optimizer(generator: torch.Generator, extent: int) -> Problem:
    module = Parameter()
    with torch.no_grad():
        module.weight.copy_(normal(generator, *module.weight.shape))
    # Gradients of all magnitudes around eps, on either side.
    sizes = torch.exp(torch.linspace(math.log(1e-4), 0.0, 181))
    target = sizes * normal(generator, 181).sign()
    optimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, betas=(0.875, 0.96875), weight_decay=0.1)
    return Problem(module, (normal(generator, 1),), target, inner_product, optimizer)


def _drawn(generator: torch.Generator, extent: int) -> Problem:

    def clear() -> Tensor:
        return (1.0 + torch.rand(512, 256, generator=generator)).copysign(normal(generator, 512, 256))

    return Problem(Drawn(), (clear(), clear()))


EAGER = frozenset({"eager"})
_FLOAT32 = frozenset({"float32"})
_FORWARD = frozenset({Mode.FORWARD})
_workload = partial(Workload, techniques=EAGER)

WORKLOADS = (
    _workload("product-alone", "Matrix products, and nothing else.", _contraction),
    _workload("reductions", "Sums, means and extremes of each dtype, of integers and bools too.",
        _reductions, modes=_FORWARD),
    _workload("batch-norm", "Batch norm alone: its statistics move without a convolution in front.",
        _batch_norm, traits=frozenset({"batchnorm"}), dtypes=_FLOAT32),
    _workload("scatter-gather", "Elements read and written by index tensors that collide.",
        _scatter_gather, dtypes=_FLOAT32),
    _workload("casts", "Numbers in other types: half precision, integers, bool.",
        _casts, modes=_FORWARD, dtypes=_FLOAT32),
    _workload("roots-exponentials", "Roots, logarithms and exponentials, to the end of the range.",
        _roots, modes=_FORWARD, dtypes=_FLOAT32),
    _workload("copies", "Copies of strided, reversed, expanded and joined tensors.",
        _copies, modes=_FORWARD, traits=frozenset({"exact"})),
    _workload("optimizer-steps", "Four steps of AdamW whose gradients are given: nothing is computed in front of them.",
        _optimizer, modes=frozenset({Mode.TRAIN}), traits=frozenset({"training"}), dtypes=_FLOAT32),
    _workload("random-numbers", "Uniform and normal numbers, shown by which elements they drop.",
        _drawn, modes=frozenset({Mode.RANDOM}), dtypes=_FLOAT32,
        dropouts=(Dropout("out[0]", "grad:input[0]", RATE), Dropout("out[1]", "grad:input[1]", RATE))),
)  # fmt: skip
