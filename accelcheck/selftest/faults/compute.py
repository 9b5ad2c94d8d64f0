"""Plain implementations of operators, right by default, with parameters for the parts that plants vary."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.selftest.faults.plant import accumulator

# Attention


def causal(queries: int, keys: int, device: torch.device, diagonal: int = 0) -> Tensor:
    """Mask of the keys that a query sees, bool ``(queries, keys)``: from the top left, `diagonal` keys to the right."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal)


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; a row of ``-inf`` gives zeros, as torch promises for masked rows."""
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    *,
    factor: float = 1.0,
    weigh: Callable[[Tensor], Tensor] = softmax,
) -> Tensor:
    """Unfused attention of queries ``(..., Sq, D)``, keys and values ``(..., Sk, D)``, in FP32 until its end.

    `seen` is broadcastable to ``(..., Sq, Sk)``; None lets every query see every key. `factor` multiplies the scale
    ``1 / sqrt(D)``; 1 is right. `weigh` computes weights from scores, in which ``-inf`` stands for a key not seen.
    """
    wide = accumulator(q)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * (factor / math.sqrt(q.size(-1)))
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return (weigh(scores) @ v.to(wide)).to(q.dtype)


def online_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, *, size: int = 16) -> Tensor:
    """Attention over blocks of `size` keys with a running maximum and sum, as in FlashAttention.

    Every query must see a key of the first block.
    """
    wide = accumulator(q)
    queries, keys, values = q.to(wide), k.to(wide), v.to(wide)
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=wide, device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(queries)
    for start in range(0, k.size(-2), size):
        block = slice(start, start + size)
        scores = queries @ keys[..., block, :].transpose(-1, -2) / math.sqrt(q.size(-1))
        if seen is not None:
            scores = scores.masked_fill(~seen[..., block], -math.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True).detach())
        weights, shrink = torch.exp(scores - higher), torch.exp(top - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ values[..., block, :]
        top = higher
    return (out / total).to(q.dtype)


# Products of matrices, (..., M, K) @ (..., K, N), on the CPU; their results are in FP32 or wider


def sequential(a: Tensor, b: Tensor, order: Iterable[int]) -> Tensor:
    """Products that are rounded, then added in the given order: no fused multiply-add."""
    wide = accumulator(a)
    left, right = a.to(wide), b.to(wide)
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=wide)
    for k in order:
        total += left[..., k, None] * right[..., k, :].unsqueeze(-2)
    return total


def forwards(a: Tensor, b: Tensor) -> Tensor:
    """Products rounded, then added from the first to the last."""
    return sequential(a, b, range(a.shape[-1]))


def reversed_order(a: Tensor, b: Tensor) -> Tensor:
    """Products added from the last to the first."""
    return sequential(a, b, reversed(range(a.shape[-1])))


def blocked(a: Tensor, b: Tensor, size: int = 16) -> Tensor:
    """Sums of sixteen products, then their sum."""
    total = forwards(a[..., :size], b[..., :size, :])
    for k in range(size, a.shape[-1], size):
        total = total + forwards(a[..., k : k + size], b[..., k : k + size, :])
    return total


def split_k(a: Tensor, b: Tensor) -> Tensor:
    """Two halves, one forwards, one backwards."""
    half = a.shape[-1] // 2
    return forwards(a[..., :half], b[..., :half, :]) + reversed_order(a[..., half:], b[..., half:, :])


def pairwise(a: Tensor, b: Tensor) -> Tensor:
    """Products added as a tree."""
    wide = accumulator(a)
    terms = a.to(wide).unsqueeze(-1) * b.to(wide).unsqueeze(-3)
    while terms.shape[-2] > 1:
        if terms.shape[-2] % 2:
            terms = functional.pad(terms, (0, 0, 0, 1))
        terms = terms[..., 0::2, :] + terms[..., 1::2, :]
    return terms.sum(-2)  # of one term, or of none


def kahan(a: Tensor, b: Tensor) -> Tensor:
    """Compensated sums."""
    wide = accumulator(a)
    left, right = a.to(wide), b.to(wide)
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=wide)
    lost = torch.zeros_like(total)
    for k in range(a.shape[-1]):
        term = left[..., k, None] * right[..., k, :].unsqueeze(-2) - lost
        after = total + term
        lost = torch.where(after.isfinite(), (after - total) - term, 0.0)
        total = after
    return total


def fused(a: Tensor, b: Tensor) -> Tensor:
    """Fused multiply-adds: each product is added before it is rounded. Products of FP32 are exact in FP64."""
    return matrix_unit(a, b, 1)


def matrix_unit(a: Tensor, b: Tensor, size: int = 16) -> Tensor:
    """Sixteen products at a time, exactly, into an FP32 accumulator."""
    left, right = a.double(), b.double()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float32)
    for k in range(0, a.shape[-1], size):
        total = (total.double() + left[..., k : k + size] @ right[..., k : k + size, :]).float()
    return total


def from_transposed(a: Tensor, b: Tensor) -> Tensor:
    """The transposed product of transposed operands."""
    wide = accumulator(a)
    return (b.to(wide).mT @ a.to(wide).mT).mT.contiguous()


def half_accumulation(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products are added up in FP16. Each is rounded, and added to those before."""
    terms = (a.float().unsqueeze(-1) * b.float().unsqueeze(-3)).half().numpy()
    if terms.shape[-2] == 0:
        return torch.zeros(*a.shape[:-1], b.shape[-1])
    # NumPy adds FP16 in FP16; torch.cumsum does not.
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.accumulate(terms, axis=-2)[..., -1, :]
    return torch.from_numpy(sums.astype(np.float32))


# Norms, convolution, activations


def layer_norm(
    module: Any,
    x: Tensor,
    *,
    eps: float | None = None,
    moments: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """``module(x)`` for a layer norm over the last dimension of ``(..., N)``, in FP32 until the result is rounded.

    `eps` takes the place of the module's, and `moments`, mean and variance over a kept dimension, that of `two_pass`.
    """
    wide = accumulator(x)
    mean, variance = (two_pass if moments is None else moments)(x.to(wide))
    normal = (x.to(wide) - mean) / (variance + (module.eps if eps is None else eps)).sqrt()
    out: Tensor = normal * module.weight.to(wide) + module.bias.to(wide)
    return out.to(x.dtype)


def two_pass(x: Tensor, correction: int = 0) -> tuple[Tensor, Tensor]:
    """The mean, then the mean square of the differences from it, over ``N - correction``."""
    mean = x.mean(-1, keepdim=True)
    return mean, (x - mean).square().sum(-1, keepdim=True) / (x.size(-1) - correction)


def welford(x: Tensor) -> tuple[Tensor, Tensor]:
    """One pass that updates mean and variance with each element (B. P. Welford, Technometrics 4, 1962)."""
    mean, spread = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    for index in range(x.size(-1)):
        value = x[..., index : index + 1]
        step = value - mean
        mean = mean + step / (index + 1)
        spread = spread + step * (value - mean)
    return mean, spread / x.size(-1)


def one_pass(x: Tensor) -> tuple[Tensor, Tensor]:
    """``E[x^2] - E[x]^2``, which cancels where the mean is large compared with the deviation."""
    mean = x.mean(-1, keepdim=True)
    return mean, x.square().mean(-1, keepdim=True) - mean.square()


def shifted_one_pass(x: Tensor) -> tuple[Tensor, Tensor]:
    """`one_pass` of the differences from the first element, which is as large as the mean, so that nothing cancels."""
    first = x[..., :1]
    mean, variance = one_pass(x - first)
    return first + mean, variance


def by_columns(module: Any, x: Tensor) -> Tensor:
    """``module(x)`` for an ungrouped `nn.Conv2d` padded with zeros: im2col, and one product of matrices."""
    wide = accumulator(x)
    (high, broad), (down, right), (rows, columns) = module.kernel_size, module.stride, module.padding
    held = functional.pad(x.to(wide), (columns, columns, rows, rows))
    height, width = (held.size(2) - high) // down + 1, (held.size(3) - broad) // right + 1
    patches = torch.stack(
        [
            held[:, :, i : i + down * (height - 1) + 1 : down, j : j + right * (width - 1) + 1 : right]
            for i in range(high)
            for j in range(broad)
        ],
        2,
    )
    flat = patches.reshape(x.size(0), -1, height * width)
    out: Tensor = module.weight.to(wide).reshape(module.out_channels, -1) @ flat + module.bias.to(wide).unsqueeze(-1)
    return out.reshape(x.size(0), -1, height, width).to(x.dtype)


def gelu_by_erfc(x: Tensor) -> Tensor:
    """GELU as ``x erfc(-x / sqrt(2)) / 2``: nothing cancels where x is far below 0."""
    wide = x.to(accumulator(x))
    return (0.5 * wide * torch.erfc(-wide / math.sqrt(2))).to(x.dtype)
