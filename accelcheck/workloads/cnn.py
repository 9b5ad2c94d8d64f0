"""Convolutional networks with batch normalisation, convolutions alone, and residual blocks."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, learned, normal, of_normal, orders, signs
from accelcheck.workloads.probes import SCALES

PIXELS = 0.02
"""Size of the noise of images: see `imprinted`."""
TAPS = 0.02
"""Size of the noise of kernels, relative to ``1 / sqrt(fan_in)``: see `imprint`."""
SECOND = 0.3
"""Size of a kernel's second channel, relative to the first."""
BRANCH = 0.12
"""Size of a residual branch, relative to its skip connection."""
KEPT = 8
"""Inverse of the least part of a channel that its ReLU passes, and blocks."""


class ConvBnRelu(nn.Module):
    """3x3 convolution, batch norm, ReLU. No bias: batch norm cancels it, and its gradient would be rounding noise."""

    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(out)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


class ResidualBlock(nn.Module):
    """``relu(bn2(conv2(relu(bn1(conv1(x))))) + x)``: the basic block of ResNet, ``(N, C, H, W)`` to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        out: Tensor = self.relu2(self.bn2(self.conv2(y)) + x)
        return out


class Cnn(nn.Module):
    """Two `ConvBnRelu`, the second strided, the mean over the image, and a linear head."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = ConvBnRelu(3, channels)
        self.down = ConvBnRelu(channels, 2 * channels, stride=2)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.stem(x))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class FrozenCnn(Cnn):
    """A `Cnn` with batch norm in evaluation mode during training, as when pretrained backbones are fine-tuned."""

    def train(self, mode: bool = True) -> FrozenCnn:  # noqa: FBT001, FBT002 - the signature of nn.Module.train
        super().train(mode)
        self.stem.bn.eval()
        self.down.bn.eval()
        return self


class ResidualCnn(nn.Module):
    """A strided stem, two `ResidualBlock` in `blocks`, the mean over the image, and a linear head."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = ConvBnRelu(3, channels, stride=2)
        self.blocks = nn.ModuleList([ResidualBlock(channels) for _ in range(2)])
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def imprinted(generator: torch.Generator, batch: int, channels: int, height: int, width: int) -> Tensor:
    """Draws images ``(N, C, H, W)``, FP32: +1 or -1 by image and channel, half of each in a channel, plus noise."""
    patterns = signs(batch)[orders(generator, channels, batch)].t().reshape(batch, channels, 1, 1)
    return patterns + PIXELS * normal(generator, batch, channels, height, width)


@torch.no_grad()
def imprint(module: nn.Module, generator: torch.Generator, second: float = SECOND) -> None:
    """Draws all parameters and batch-norm statistics so that numbers fall into few, distant groups by channel.

    Otherwise rounding decides whether ReLUs pass numbers close to 0, and correct results differ by whole rows of
    gradients: with normal numbers, an element of an amp-fp16 gradient might err by 1.6 root mean squares, in bfloat16
    by 7. A kernel takes the centre of one channel, and of another `second` times. With one alone, a batch norm's
    gradient would cancel the rest of the next one's: it is orthogonal to its input, and all inputs would be the same
    pattern.
    """
    initialise(module, generator)
    for name, layer in module.named_modules():
        if name.endswith("bn2"):
            layer.weight.mul_(BRANCH)
            layer.bias.mul_(BRANCH)
        if isinstance(layer, nn.Conv2d):
            out, into, *kernel = layer.weight.shape
            layer.weight.mul_(TAPS)
            first = torch.arange(out) % into
            further = (first + 1 + torch.arange(out) // into % (into - 1)) % into
            sign = 1.0 - 2.0 * torch.randint(0, 2, (2, out), generator=generator)
            layer.weight[torch.arange(out), first, kernel[0] // 2, kernel[1] // 2] += sign[0]
            layer.weight[torch.arange(out), further, kernel[0] // 2, kernel[1] // 2] += second * sign[1]


@torch.no_grad()
def settle(module: nn.Module, images: Tensor) -> None:
    """Moves the bias of each batch norm, by channel, so that the widest gap before its ReLU lies at 0.

    In a `ResidualCnn` the skip connection passes whole: four more ReLUs would make too many groups for wide gaps.
    """
    copy = deepcopy(module).double().train()
    deep = isinstance(module, ResidualCnn)

    def moved(name: str, relu: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (x,) = inputs
        values = x.transpose(0, 1).flatten(1).sort(-1).values
        kept = values[:, values.shape[1] // KEPT : -(values.shape[1] // KEPT)]
        at = kept.diff(dim=-1).argmax(-1, keepdim=True)
        middle = (kept.gather(1, at) + kept.gather(1, at + 1))[:, 0] / 2
        if deep and name.endswith("bn2"):
            middle = values[:, 0] - 0.5
        shift = (64 * middle).round() / 64  # the same on every machine
        module.get_parameter(f"{name}.bias").sub_(shift.float())
        return (x - shift.reshape(-1, 1, 1),)

    for name, layer in copy.named_modules():
        if isinstance(layer, nn.ReLU):
            layer.register_forward_pre_hook(partial(moved, name.replace("relu", "bn")))
    copy(images.double())


def _same(generator: torch.Generator) -> torch.Generator:
    """Copies a generator with its state."""
    return torch.Generator().set_state(generator.get_state())


def _images(
    generator: torch.Generator,
    extent: int,
    *,
    make: Callable[[], nn.Module],
    batch: int = 6,
    image: tuple[int, int, int] = (3, 16, 16),
    second: float = SECOND,
) -> Problem:
    module = make()
    imprint(module, generator, second)
    own = imprinted(_same(generator), batch, *image)  # parameters must not depend on the extent
    # Frozen statistics do not follow the images' scale, which further draws change.
    settle(module, torch.cat([scale * own for scale in SCALES]) if isinstance(module, FrozenCnn) else own)
    return Problem(module, (imprinted(generator, batch + extent, *image),))


def _train(generator: torch.Generator, extent: int) -> Problem:
    module = Cnn()
    imprint(module, generator)
    batch = 8 + extent
    settle(module, imprinted(_same(generator), 8, 3, 16, 16))
    images = imprinted(generator, batch, 3, 16, 16)
    return learned(module, images, integers(generator, 0, 10, batch), rate=0.02)


_CONV = frozenset({"conv", "scriptable", "resizable"})
_CNN = _CONV | {"matmul", "linear", "batchnorm", "inplace"}

_PROBES = frozenset({"zeros", "ones", "one-hot", "powers", "nan[0]"})

WORKLOADS = (
    Workload("cnn", "Convolutions with batch norm, one strided, and a head.",
        partial(_images, make=Cnn), 1, traits=_CNN, probes=_PROBES),
    Workload("cnn-frozen-norm", "As cnn, with batch norm frozen in evaluation mode, forward and backward.",
        partial(_images, make=FrozenCnn), 2, traits=_CNN, probes=_PROBES),
    Workload("conv-strided", "A convolution with bias, stride 2 and padding on an image of odd sizes.",
        partial(of_normal, make=partial(nn.Conv2d, 8, 16, 3, stride=2, padding=1), shape=(4, 8, 17, 15)), 2,
        traits=_CONV, probes=_PROBES),
    Workload("conv-replicated", "A convolution whose padding repeats the values at the edge.",
        partial(of_normal, shape=(4, 4, 17, 15),
            make=partial(nn.Conv2d, 4, 8, 3, padding=1, bias=False, padding_mode="replicate")), 3,
        traits=_CONV, probes=_PROBES),
    Workload("conv-depthwise", "A dilated convolution with one group per channel and a bias.",
        partial(of_normal, make=partial(nn.Conv2d, 16, 16, 3, padding=2, dilation=2, groups=16), shape=(4, 16, 17, 15)),
        3, traits=_CONV, probes=_PROBES),
    Workload("residual-block", "Convolution, batch norm and ReLU twice, with a skip connection.",
        partial(_images, make=partial(ResidualBlock, 16), image=(16, 12, 12)), 2,
        traits=_CONV | {"batchnorm", "inplace"}, probes=_PROBES),
    # Larger images, or a larger second channel, leave one seed of ten with gradients of rounding errors alone.
    Workload("cnn-blocks", "A strided stem and two residual blocks.",
        partial(_images, make=ResidualCnn, batch=10, image=(3, 8, 8), second=0.2), 2, traits=_CNN | {"blocks"}),
    Workload("train-cnn", "Four steps of SGD with momentum on cross entropy, with batch norm.",
        _train, 2, frozenset({Mode.TRAIN}), _CNN | {"training"}),
)  # fmt: skip
