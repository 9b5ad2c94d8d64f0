"""FP64 oracles of the communication hooks: the results of ranks that compress their gradients.

Every scheme takes decisions about a gradient (which 16-bit number, which 8-bit integer, which elements). A correct
implementation has FP32 rounding errors before it decides, so that a close decision may go either way. The oracle's runs
with rounding errors therefore decide about gradients that are off by `OFF` of the largest element: an element is a sum,
whose error depends on the size of its terms. The runs are pairs with opposite errors: each close decision goes both
ways in each pair, and six runs leave little to chance.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.distributed import compression
from accelcheck.techniques.distributed.shards import by_samples, shards
from accelcheck.techniques.quantization.emulation import RELATIVE

Gradients = Sequence[Tensor]


OFF = 4 * RELATIVE
"""Error of the gradients before a decision, relative to the largest element: that allowed for FP32 activations, because
earlier decisions have changed the parameters."""


class Scheme:
    """Exchange that computes all ranks' gradient from each rank's; with `flips`, close decisions may go either way."""

    flips = False

    def __init__(self) -> None:
        self._run = -1
        self.begin()

    def begin(self) -> None:
        """Begins a training: the exact one is number 1, the pairs are 2 and 3, 4 and 5, 6 and 7."""
        self._run += 1
        self._noise = torch.Generator().manual_seed(self._run // 2)

    def __call__(self, ranks: Sequence[Gradients]) -> Gradients:
        """Computes the gradients by parameter, from those of each rank's mean loss: FP64, of batches of equal size."""
        raise NotImplementedError(f"{type(self).__name__}: give the mean of what the ranks send")

    def near(self, x: Tensor) -> Tensor:
        """Adds to `x` the rounding error that an implementation may have before it decides."""
        if not self.flips:
            return x
        drawn = torch.rand(x.shape, generator=self._noise, dtype=x.dtype) - 0.5
        off = (drawn + drawn.sign() / 2) * (1 - 2 * (self._run % 2))  # none is near 0: half of `OFF` at least
        return x + OFF * x.abs().amax() * off


class Halves(Scheme):
    """Exchange of gradients rounded to 16 bits, divided by the number of ranks, and added up in 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __call__(self, ranks: Sequence[Gradients]) -> Gradients:
        return [self._mean([self.near(gradient).float() for gradient in of_all]) for of_all in zip(*ranks, strict=True)]

    def _mean(self, gradients: Gradients) -> Tensor:
        # Most sums of two 16-bit numbers are ties, which go to even everywhere: nothing may disturb them.
        with disable_current_modes():
            first, *rest = [gradient.to(self.dtype).div(len(gradients)) for gradient in gradients]
            for part in rest:
                first = first + part
            return first.double()


class ErrorFeedbackOracle(Scheme):
    """Codec of all gradients of a rank together; its error is added to the next gradients."""

    def begin(self) -> None:
        super().begin()
        self._residuals: dict[int, Tensor] = {}

    def __call__(self, ranks: Sequence[Gradients]) -> Gradients:
        sent = []
        for rank, gradients in enumerate(ranks):
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            wanted = flat + self._residuals[rank] if rank in self._residuals else flat
            sent.append(self.coded(wanted))
            self._residuals[rank] = wanted - sent[-1]
        pieces = compression.split(torch.stack(sent).mean(0), ranks[0])
        return [piece.view_as(gradient) for piece, gradient in zip(pieces, ranks[0], strict=True)]

    def coded(self, wanted: Tensor) -> Tensor:
        """Encodes `wanted` as the codec does, and decodes it."""
        raise NotImplementedError(f"{type(self).__name__}.coded: say what is sent")


class Largest(ErrorFeedbackOracle):
    """Oracle of `accelcheck.techniques.distributed.compression.TopK`. Ties may be broken in any way."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def coded(self, wanted: Tensor) -> Tensor:
        places = self.near(wanted.abs()).topk(compression.largest(self.share, wanted.numel())).indices
        return torch.zeros_like(wanted).index_put((places,), wanted[places])


class Integers(ErrorFeedbackOracle):
    """Oracle of `accelcheck.techniques.distributed.compression.Int8`."""

    def coded(self, wanted: Tensor) -> Tensor:
        near = self.near(wanted)
        scale = near.abs().amax() / compression.LEVELS
        return (near / scale).round().clamp(-compression.LEVELS, compression.LEVELS) * scale


class LowRank(Scheme):
    """PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019, algorithm 1), with plain averaging in the first steps.

    The approximation and the next column space depend on the span of the columns alone: any orthogonal basis serves.
    """

    def __init__(self, rank: int, rate: float) -> None:
        super().__init__()
        self.rank, self.rate = rank, rate

    def begin(self) -> None:
        super().begin()
        self._steps = 0
        self._bases: dict[int, Tensor] = {}
        self._residuals: dict[tuple[int, int], Tensor] = {}

    def __call__(self, ranks: Sequence[Gradients]) -> Gradients:
        self._steps += 1
        return [self._mean(index, of_all) for index, of_all in enumerate(zip(*ranks, strict=True))]

    def _mean(self, index: int, gradients: Gradients) -> Tensor:
        wanted = [gradient + self._residuals.get((rank, index), 0.0) for rank, gradient in enumerate(gradients)]
        mean = torch.stack(wanted).mean(0)
        if self._steps <= compression.PLAIN_STEPS:
            return mean
        if compression.worthwhile(mean.shape, self.rank, self.rate):
            mean = self._product(index, mean.view(compression.matrix(mean.shape))).view_as(mean)
        self._residuals |= {(rank, index): own - mean for rank, own in enumerate(wanted)}
        return mean

    def _product(self, index: int, mean: Tensor) -> Tensor:
        if index not in self._bases:
            self._bases[index] = compression.first_basis(mean.shape, self.rank).double()
        left: Tensor = torch.linalg.qr(mean @ self._bases[index]).Q
        self._bases[index] = mean.T @ left
        return left @ self._bases[index].T


def shared_out(module: nn.Module, world: int, scheme: Scheme) -> nn.Module:
    """Copies the FP64 module to one with exchanged gradients: it divides its batch among ranks, and joins the outputs.

    Inputs and outputs have the batch in their first dimension. The scheme begins anew when a state is loaded.
    """
    inner = copy.deepcopy(module)
    outer = copy.copy(inner)  # of the same parameters, under the same names
    names = [name for name, _ in inner.named_parameters()]

    def forward(*inputs: Any) -> Any:
        scheme.flips = getattr(outer, "flips", None) is not None
        batch = next(value for value in inputs if isinstance(value, Tensor))
        replicas = _Replicas.apply(scheme, world, *inner.parameters())  # type: ignore[no-untyped-call]  # torch's
        outs, sizes = [], []
        for rank, (part, share) in enumerate(shards(inputs, batch, world)):
            own = replicas[rank * len(names) : (rank + 1) * len(names)]
            outs.append(functional_call(inner, dict(zip(names, own, strict=True)), part))
            sizes.append(len(share))
        return _joined(outs, by_samples(sizes))

    outer.forward = forward
    outer.flips = None  # type: ignore[assignment]  # the oracle puts a generator here: it is no tensor or module
    outer.register_load_state_dict_post_hook(lambda *_: scheme.begin())  # type: ignore[no-untyped-call]  # torch's
    return outer


def _joined(outs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Joins the outputs of the ranks: batches are concatenated, means over a batch (losses) averaged with `weights`."""
    first = outs[0]
    if isinstance(first, Mapping):
        return {key: _joined([out[key] for out in outs], weights) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(parts, weights) for parts in zip(*outs, strict=True))
    if first.dim():
        return torch.cat(list(outs))
    return torch.stack([weight * out for weight, out in zip(weights, outs, strict=True)]).sum()


class _Replicas(torch.autograd.Function):
    """Copies all parameters for each rank; the scheme exchanges their gradients."""

    @staticmethod
    def forward(ctx: Any, scheme: Scheme, world: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.scheme, ctx.world = scheme, world
        return tuple(parameter.clone() for _ in range(world) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        count = len(gradients) // ctx.world
        # A rank computes the mean over its own samples: its part of the joined mean, times the number of ranks.
        ranks = [[ctx.world * g for g in gradients[i : i + count]] for i in range(0, len(gradients), count)]
        return None, None, *ctx.scheme(ranks)
