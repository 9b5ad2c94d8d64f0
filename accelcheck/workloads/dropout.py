"""Dropout: alone, in blocks, and inside attention. Values are far from 0, so that masks can be read from results."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Dropout, Problem, Workload
from accelcheck.workloads.draw import initialise, normal

RATE = 0.1
"""Dropout rate of most models. At 0.5, a mask and its complement, and the scales 1 / p and 1 / (1 - p), are alike."""
ATTENTION_RATE = 0.25
"""Multiple of 1 / 256: fused kernels compare a random byte with the rate, and so round others (0.1 to 0.1016)."""
BLOCKS = 3
ROWS, FEATURES = 256, 512
"""Mask shape of `Block`: with 131072 draws, rates of 0.09 and 0.11 differ from 0.1 by 12 standard deviations."""


class Alone(nn.Module):
    """Dropout of any shape. Not `nn.Dropout`, whose ``inplace`` would overwrite the values that the check needs."""

    __constants__ = ("rate",)

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.rate, self.training)


class Block(nn.Module):
    """``dropout(fc(x) + shift)``: ``(rows, 16)`` to ``(rows, features)``.

    The shift has the shape of the output, so that its gradient is that of the dropout's input, and shows the mask.
    """

    def __init__(self, rows: int, width: int, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, features, bias=False)
        self.shift = nn.Parameter(torch.empty(rows, features))
        self.dropout = Alone(RATE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.fc(x) + self.shift)
        return out


class Branches(nn.Module):
    """The outputs of all `blocks` for the same input, as a list. In a chain, one mask would hide the next."""

    def __init__(self, count: int, rows: int, width: int, features: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(rows, width, features) for _ in range(count)])

    def forward(self, x: Tensor) -> list[Tensor]:
        outs: list[Tensor] = []
        for block in self.blocks:
            outs.append(block(x))  # noqa: PERF401 - TorchScript unrolls loops over modules, not comprehensions
        return outs


class AttentionDropout(nn.Module):
    """Attention of ``q, k (B, H, S, D)`` over diagonal values ``v (B, H, S, S)``, which shows weights after dropout.

    Queries are projected, so that autocast has a product to act on (attention's math path casts its own products up),
    and cast back, since attention takes one dtype and autocast does not include it on every device.

    Only the diagonal of each head's output has a gradient. ``grad_v[j, i]`` is then the weight of query i and key j
    after dropout, times the i-th gradient: one mask element for each element, as in the output, but transposed.
    """

    __constants__ = ("rate",)

    def __init__(self, depth: int, rate: float) -> None:
        super().__init__()
        self.query = nn.Linear(depth, depth, bias=False)
        self.rate = rate

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rate = self.rate if self.training else 0.0
        out = functional.scaled_dot_product_attention(self.query(q).to(v.dtype), k, v, dropout_p=rate)
        # A copy: inductor loses the gradient of a view next to a detached alias
        # (github.com/pytorch/pytorch/pull/195357).
        return out.detach(), out.diagonal(dim1=-2, dim2=-1).clone()


def _clear(generator: torch.Generator, *shape: int) -> Tensor:
    """Numbers of either sign with magnitudes in [1, 2)."""
    return (1.0 + torch.rand(shape, generator=generator)).copysign(normal(generator, *shape))


def _alone(generator: torch.Generator, extent: int) -> Problem:
    return Problem(Alone(RATE), (_clear(generator, 512 + extent, 512),))


def _blocks(generator: torch.Generator, extent: int) -> Problem:
    width = 16
    module = Branches(BLOCKS, ROWS, width, FEATURES)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("shift"):
                parameter.copy_(_clear(generator, *parameter.shape))
            else:
                # Products have a standard deviation of 1 / 16 and a maximum of 0.3: none cancels a shift of at least 1.
                parameter.copy_(normal(generator, *parameter.shape) / (16 * width**0.5))
    return Problem(module, (normal(generator, ROWS, width),))


def _attention(generator: torch.Generator, extent: int) -> Problem:
    length, depth = 128 + extent, 32
    module = initialise(AttentionDropout(depth, ATTENTION_RATE), generator)
    # Scores have a standard deviation of 1 / 4: weights are within a factor of e**1.2 of 1 / S, and none is small.
    q, k = 0.25 * normal(generator, 4, 4, length, depth), normal(generator, 4, 4, length, depth)
    return Problem(module, (q, k, torch.diag_embed(_clear(generator, 4, 4, length))))


_RANDOM = frozenset({Mode.RANDOM})

WORKLOADS = (
    Workload("dropout", "Dropout of 262144 elements, alone.",
        _alone, 1, _RANDOM, frozenset({"scriptable", "resizable"}), dropouts=(Dropout("out", "grad:input[0]", RATE),)),
    Workload("dropout-blocks", "Three blocks of a linear layer and dropout.",
        _blocks, 2, _RANDOM, frozenset({"blocks", "linear", "matmul", "scriptable"}),
        dropouts=tuple(Dropout(f"out[{i}]", f"grad:blocks.{i}.shift", RATE) for i in range(BLOCKS))),
    Workload("attention-dropout", "Attention with dropout on its weights.",
        _attention, 2, _RANDOM, frozenset({"attention", "linear", "matmul", "scriptable", "resizable"}),
        dropouts=(Dropout("out[0]", "grad:input[2]", ATTENTION_RATE, transposed=True),)),
)  # fmt: skip
