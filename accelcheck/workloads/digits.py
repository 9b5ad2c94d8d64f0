"""Tasks on a real data set, handwritten digits: an MLP, a CNN and a small vision transformer."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem
from accelcheck.workloads.cnn import ConvBnRelu
from accelcheck.workloads.draw import initialise
from accelcheck.workloads.mlp import Mlp
from accelcheck.workloads.task import Task
from accelcheck.workloads.transformer import EncoderBlock

Maker = Callable[[torch.Generator, int], Problem]

SIDE = 8
"""Pixels along an image's side."""
CLASSES = 10


class DigitsCnn(nn.Module):
    """Two `ConvBnRelu`, the second strided, and a linear head over all positions: images ``(N, 1, 8, 8)`` to logits."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.stem = ConvBnRelu(1, channels)
        self.down = ConvBnRelu(channels, 2 * channels, stride=2)
        self.head = nn.Linear(2 * channels * (SIDE // 2) ** 2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(self.stem(x)).flatten(1))
        return out


class DigitsVit(nn.Module):
    """A vision transformer: 4 patches of two rows, two `EncoderBlock` in `blocks`, a norm, and a head over all patches.

    Images ``(N, 8, 8)`` to logits.
    """

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.positions = nn.Parameter(torch.empty(4, width))
        self.blocks = nn.ModuleList([EncoderBlock(width, heads, 2 * width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.reshape(x.size(0), 4, 16)) + self.positions  # numbers: TorchScript reads no globals
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x).flatten(1))
        return out


def present() -> Capability:
    """Availability of scikit-learn, whose package contains the images."""
    if importlib.util.find_spec("sklearn") is None:
        return unavailable(
            Code.NO_PACKAGE,
            "scikit-learn, which contains the data set, is not installed",
            "pip install 'accelcheck[accuracy]'",
        )
    return SUPPORTED


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Test set of UCI's optdigits: images ``(1797, 64)`` FP32 between -1 and 1, and classes ``(1797,)`` int64.

    A pixel has one of 17 levels, k / 8 - 1, exact in every dtype of the suite. Do not modify the cached tensors.
    """
    data = importlib.import_module("sklearn.datasets").load_digits()
    return torch.from_numpy(data.data).float() / 8.0 - 1.0, torch.from_numpy(data.target).long()


def _learn(
    generator: torch.Generator,
    extent: int,
    *,
    make: Callable[[], nn.Module],
    image: tuple[int, ...],
    steps: int,
    rate: float,
) -> Problem:
    module = initialise(make(), generator)
    images, classes = digits()
    # All samples are one batch: without an order of batches, seeds differ by the initial parameters alone.
    optimizer = partial(torch.optim.AdamW, lr=rate)
    return Problem(module, (images.reshape(-1, *image),), classes, functional.cross_entropy, optimizer, steps)


_MLP = partial(_learn, make=partial(Mlp, SIDE * SIDE), image=(SIDE * SIDE,), steps=60, rate=5e-3)
_CNN = partial(_learn, make=DigitsCnn, image=(1, SIDE, SIDE), steps=30, rate=1e-2)
_VIT = partial(_learn, make=DigitsVit, image=(SIDE, SIDE), steps=50, rate=5e-3)

_COMMON = frozenset({"matmul", "linear", "scriptable", "resizable"})
_MLP_TRAITS = _COMMON | {"inplace"}
_CNN_TRAITS = _COMMON | {"conv", "batchnorm", "inplace"}
_VIT_TRAITS = _COMMON | {"attention", "blocks"}


def _accuracy(name: str, summary: str, make: Maker, traits: frozenset[str]) -> Task:
    return Task(name, summary, make, 2, frozenset({Mode.ACCURACY}), traits, present=present)


def _learning(name: str, summary: str, make: Maker, traits: frozenset[str], level: int) -> Task:
    # FP32 alone: parameters in half precision lose small updates, and no technique promises otherwise.
    modes, dtypes = frozenset({Mode.LEARNING}), frozenset({"float32"})
    return Task(name, summary, make, level, modes, traits | {"training"}, dtypes, present=present)


# Two workloads per model, since each has one level. A training takes 0.1 s (MLP) to 1 s (CNN, ViT) on one core; a
# learning case has six.
WORKLOADS = (
    _accuracy("digits-mlp", "Handwritten digits classified by a trained MLP.", _MLP, _MLP_TRAITS),
    _accuracy("digits-cnn", "Handwritten digits classified by a trained CNN with batch norm.", _CNN, _CNN_TRAITS),
    _accuracy("digits-vit", "Handwritten digits classified by a trained vision transformer.", _VIT, _VIT_TRAITS),
    _learning("digits-mlp-training", "Training of an MLP on handwritten digits.", _MLP, _MLP_TRAITS, 2),
    _learning("digits-cnn-training", "Training of a CNN with batch norm on handwritten digits.", _CNN, _CNN_TRAITS, 3),
    _learning("digits-vit-training", "Training of a vision transformer on handwritten digits.", _VIT, _VIT_TRAITS, 3),
)
