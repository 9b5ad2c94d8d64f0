"""Faults of one row, channel, tile or element, of small values that views of a tensor miss, and biased rounding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.selftest.faults.base import HALVES, Cell, Change, fault, passes
from accelcheck.selftest.faults.plant import Kernel, always, aside, kernel, output

TILE = 16
LAST = slice(-1, None)
ALL = slice(None)
ONE_UNIT = (
    "one product in FP32 errs by one unit in the last place at most, where correct kernels of several operations err "
    "by more"
)


def part(rows: slice, columns: slice) -> Callable[[float], Change]:
    """A fault of one part of the last two dimensions; its strength is the relative error of the part's scale."""

    def scaled(excess: float, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[..., rows, columns] = (tensor[..., rows, columns].float() * (1.0 + excess)).to(tensor.dtype)
        return tensor

    return lambda excess: output(partial(scaled, excess))


def upset(share: float, tensor: Tensor) -> Tensor:
    """One element has a flipped bit. It moves by a `share` of the root mean square."""
    size = share * tensor.float().square().mean().sqrt()
    middle = tuple(length // 2 for length in tensor.shape)
    tensor = tensor.clone()
    tensor[middle] += torch.where(torch.isfinite(size), size, 0.0).to(tensor.dtype)
    return tensor


@aside
def down(x: Tensor, y: Tensor) -> Tensor:
    """Rounds a product towards minus infinity, as an arithmetic shift does."""
    exact = x.double() * y.double()
    near = exact.to(x.dtype)
    below = torch.nextafter(near, torch.full_like(near, -torch.inf))
    return torch.where(near.double() > exact, below, near)


@always(kernel("mul"))
def rounding_down(func: Kernel, x: Tensor, y: Any) -> Tensor:
    """Results are rounded towards minus infinity."""
    return down(x, y) if isinstance(y, Tensor) else func(x, y)


def smallest_column(factor: float) -> Change:
    """Multiplies the column of the smallest norm."""

    def spoiled(out: Tensor) -> Tensor:
        columns = torch.arange(out.shape[-1], device=out.device)
        return torch.where(columns == out.norm(dim=0).argmin(), factor * out, out)

    return output(spoiled)


def ranked(factor: float, first: int, count: int) -> Change:
    """Multiplies elements of each row by their rank among the row's sizes."""

    def spoiled(out: Tensor) -> Tensor:
        ranks = out.abs().argsort(-1).argsort(-1)
        return torch.where((ranks >= first) & (ranks < first + count), factor * out, out)

    return output(spoiled)


FAULTS = (
    fault("row-scaled", "The scale of the last token is off.")(
        Cell("elementwise-large"), part(LAST, ALL), (0.02, 0.007)
    ),
    fault("channel-scaled", "The scale of the last channel is off.")(
        Cell("elementwise-large"), part(ALL, LAST), (0.02, 0.007)
    ),
    fault("tile-scaled", "The scale of one tile of a tiled kernel is off.")(
        Cell("elementwise-large"), part(slice(TILE, 2 * TILE), slice(TILE, 2 * TILE)), (0.02, 0.007)
    ),
    fault("element-upset", upset)(Cell("matmul-129"), lambda share: output(partial(upset, share)), (0.25, 0.04)),
    fault("rounded-down")(
        Cell("elementwise-product", dtypes=HALVES, hidden={"float32": ONE_UNIT}), rounding_down, number=10
    ),
    fault("small-channel-negative", "The smallest channel of a result has the other sign.")(
        passes("scaled-channels"), lambda _: smallest_column(-1.0)
    ),
    fault("small-channel-zero", "The smallest channel of a result is zero.")(
        passes("scaled-channels"), lambda _: smallest_column(0.0)
    ),
    fault(
        "small-probabilities-too-large", "Five of the 512 probabilities of each row, all of them small, are too large."
    )(Cell("softmax-peaked"), lambda strength: ranked(1.0 + strength, 200, 5), (100.0, 1.0)),
    fault("small-probabilities-flushed", "The smallest four of the 512 probabilities of each row are zero.")(
        Cell("softmax-peaked"), lambda _: ranked(0.0, 0, 4)
    ),
)
