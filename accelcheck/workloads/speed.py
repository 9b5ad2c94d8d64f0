"""Timed workloads: models of the other families at larger sizes, taking milliseconds on two CPU cores."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import TIMED, Mode
from accelcheck.workloads.attention import Attention
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.cnn import ResidualCnn
from accelcheck.workloads.draw import BATCH_NORM_NOISE, initialise, integers, learned, normal, separated
from accelcheck.workloads.elementwise import Chain
from accelcheck.workloads.mlp import Mlp
from accelcheck.workloads.transformer import Encoder

CLASSES = 10


class StemEncoder(Encoder):
    """A linear layer before the blocks: what they take then has a gradient in training, as reentrant checkpointing needs."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__(width, heads, depth)
        self.stem = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:  # repeated from the base class, since TorchScript has no super()
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def _learned(generator: torch.Generator, module: nn.Module, x: Tensor) -> Problem:
    return learned(module, x, integers(generator, 0, CLASSES, len(x)), rate=0.01, steps=1)


def _mlp(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Mlp(features=512, hidden=1024, classes=CLASSES), generator, relu=True)
    return _learned(generator, module, separated(generator, 128 + extent, 512))


def _cnn(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(ResidualCnn(channels=32, classes=CLASSES), generator, relu=True, noise=BATCH_NORM_NOISE)
    return _learned(generator, module, separated(generator, 8 + extent, 3, 64, 64, noise=BATCH_NORM_NOISE))


def _transformer(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(StemEncoder(width=256, heads=4, depth=2), generator)
    x, target = (normal(generator, 4, 128 + extent, 256) for _ in range(2))
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    return Problem(module, (x,), target, functional.mse_loss, optimizer, steps=1)


def _elementwise(generator: torch.Generator, extent: int) -> Problem:
    x, y = (normal(generator, 512 + extent, 1024) for _ in range(2))
    return Problem(Chain(20), (x, 0.5 + torch.sigmoid(y)))


def _attention(generator: torch.Generator, extent: int) -> Problem:
    q, k, v = (normal(generator, 2, 8, 512 + extent, 64) for _ in range(3))
    return Problem(Attention(causal=True), (q, k, v))


_BOTH = frozenset(TIMED)
_FORWARD = frozenset({Mode.SPEED})

WORKLOADS = (
    Workload("speed-mlp", "Three linear layers, 512 to 1024 to 1024 to 10, on 128 samples: 0.4 GFLOP.",
        _mlp, 1, _BOTH, frozenset({"matmul", "linear", "scriptable", "resizable", "inplace", "training"})),
    Workload("speed-transformer",
        "A linear layer and two encoder blocks of width 256 on 4 sequences of 128: 1.2 GFLOP.",
        _transformer, 2, _BOTH,
        frozenset({"attention", "matmul", "linear", "scriptable", "resizable", "blocks", "training"})),
    Workload("speed-cnn", "A strided stem and two residual blocks of 32 channels on 8 images of 64 x 64: 0.6 GFLOP.",
        _cnn, 2, _BOTH,
        frozenset({"conv", "batchnorm", "linear", "scriptable", "resizable", "inplace", "blocks", "training"})),
    Workload("speed-elementwise",
        "Twenty element-wise statements on tensors of 512 x 1024 (2 MiB): limited by memory bandwidth.",
        _elementwise, 1, _FORWARD, frozenset({"scriptable", "resizable", "inplace", "activations"})),
    Workload("speed-attention", "Causal attention of 8 heads over 512 positions, in a batch of 2: 1.1 GFLOP.",
        _attention, 2, _FORWARD, frozenset({"attention", "matmul", "scriptable"})),
)  # fmt: skip
