"""Layers of torch.nn with the options that models of sequences, images and losses give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, normal

STEPS, BATCH, WIDTH = 6, 3, 8
LENGTHS = (3, 6, 2)
"""Lengths of the sequences of a batch."""
PADDED = tuple(tuple(step >= length for step in range(STEPS)) for length in LENGTHS)
"""Steps that are padding, by sequence."""
LABELS = ((1, 2, 2), (3, 1, 0), (0, 0, 0))
"""Labels of connectionist temporal classification: two equal ones, two of three, and none."""


def _masked(net: nn.Module, x: Tensor, bias: Tensor, **options: Any) -> Any:
    """Self-attention with an additive mask and padded keys."""
    padding = torch.tensor(PADDED, device=x.device)
    hidden = torch.zeros_like(bias[0, 0]).expand(padding.shape).masked_fill(padding, -torch.inf)
    return net(x, x, x, key_padding_mask=hidden, attn_mask=bias, **options)


def _packed(net: nn.Module, x: Tensor, _: Tensor) -> Any:
    """Runs sequences of `LENGTHS`, and pads the results again."""
    out, last = net(pack_padded_sequence(x, torch.tensor(LENGTHS), enforce_sorted=False))
    return pad_packed_sequence(out, total_length=STEPS + 1)[0], last


def _aligned(x: Tensor, blank: int, **options: Any) -> Tensor:
    """Loss of connectionist temporal classification of sequences and `LABELS`."""
    labels = torch.tensor(LABELS, device=x.device)
    if blank == 0:
        labels = labels + 1
    scores = x.log_softmax(-1)
    lengths = torch.tensor(LENGTHS), torch.tensor((3, 2, 0))
    return functional.ctc_loss(scores, labels, *lengths, blank, zero_infinity=True, **options)


def _pooled(x: Tensor, _: Tensor) -> list[Tensor]:
    """Fractional pooling of an image and a volume, with given random numbers."""
    numbers = torch.tensor([0.3, 0.8, 0.6], device=x.device, dtype=x.dtype)
    image = functional.fractional_max_pool2d(
        x.unsqueeze(1), (2, 3), (2, 4), return_indices=True, _random_samples=numbers[:2].expand(STEPS, 1, 2)
    )
    volume = functional.fractional_max_pool3d(
        x[None, None], 2, (4, 1, 5), return_indices=True, _random_samples=numbers.expand(1, 1, 3)
    )
    return [*image, *volume]


def _windows(x: Tensor, _: Tensor) -> list[Tensor]:
    """Windows of even and odd length, periodic and symmetric, and frequencies."""
    given: Any = {"device": x.device, "dtype": x.dtype}
    kinds = (torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window, torch.kaiser_window)
    made = [kind(size, periodic, **given) for kind in kinds for size in (1, 8, 9) for periodic in (True, False)]
    frequencies = [kind(size, 0.5, **given) for kind in (torch.fft.fftfreq, torch.fft.rfftfreq) for size in (1, 8, 9)]
    return [x.mean() * value for value in (*made, *frequencies)]


def _classified(net: nn.Module, x: Tensor, _: Tensor) -> Any:
    classes = torch.arange(STEPS * BATCH, device=x.device) % 10
    return tuple(net(x.reshape(-1, WIDTH), classes))


LAYERS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor], Any]]] = {
    "attention": (lambda: nn.MultiheadAttention(WIDTH, 2), _masked),
    "attention, weights of each head": (
        lambda: nn.MultiheadAttention(WIDTH, 2, bias=False),
        lambda net, x, bias: _masked(net, x, bias, average_attn_weights=False),
    ),
    "attention, further keys": (
        lambda: nn.MultiheadAttention(WIDTH, 4, add_bias_kv=True, add_zero_attn=True),
        lambda net, x, bias: _masked(net, x, bias, need_weights=False)[0],
    ),
    "attention, keys of other widths": (
        lambda: nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=5, batch_first=True),
        lambda net, x, _: net(x, x[..., :4], x[..., 3:]),
    ),
    "encoder, norms first": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, "gelu", norm_first=True),
        lambda net, x, bias: net(x, bias),
    ),
    "encoder, norms last": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, bias=False),
        lambda net, x, _: net(x, is_causal=True, src_mask=nn.Transformer.generate_square_subsequent_mask(
            len(x), x.device, x.dtype)),
    ),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.0),
        lambda net, x, bias: net(x, x.flip(0), tgt_mask=bias),
    ),
    "LSTM, packed": (lambda: nn.LSTM(WIDTH, 4, 2, bidirectional=True), _packed),
    "GRU, packed": (lambda: nn.GRU(WIDTH, 4, bias=False), _packed),
    "RNN, packed": (lambda: nn.RNN(WIDTH, 4, 2, nonlinearity="relu"), _packed),
    "LSTM, projected": (lambda: nn.LSTM(WIDTH, 6, proj_size=3), lambda net, x, _: net(x)),
    "LSTM cell": (lambda: nn.LSTMCell(WIDTH, 4), lambda net, x, _: net(x[0], net(x[1]))),
    "GRU cell": (lambda: nn.GRUCell(WIDTH, 4), lambda net, x, _: net(x[0], net(x[1]))),
    "RNN cell": (lambda: nn.RNNCell(WIDTH, 4), lambda net, x, _: net(x[0], net(x[1]))),
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Conv1d(BATCH, 4, 3, dilation=2)), lambda net, x, _: net(x),
    ),
    "weight norm of all": (
        lambda: parametrizations.weight_norm(nn.Linear(WIDTH, 4), dim=-1), lambda net, x, _: net(x),
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="matrix_exp"),
        lambda net, x, _: net(x),
    ),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 3, bias=False), lambda net, x, _: net(x, x.flip(0))),
    "adaptive softmax": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 10, [3, 6], 2.0, head_bias=True), _classified,
    ),
    "batch norm, cumulative": (lambda: nn.BatchNorm1d(BATCH, momentum=None), lambda net, x, _: net(x)),
    "batch norm of the batch": (
        lambda: nn.BatchNorm1d(BATCH, affine=False, track_running_stats=False), lambda net, x, _: net(x),
    ),
    "instance norm": (
        lambda: nn.InstanceNorm1d(BATCH, affine=True, track_running_stats=True), lambda net, x, _: net(x),
    ),
}  # fmt: skip
"""Layers and how they are called, by name, with ``x (STEPS, BATCH, WIDTH)`` and a mask ``(STEPS, STEPS)``."""
MASKED = frozenset(
    {"attention", "attention, weights of each head", "attention, further keys", "encoder, norms first", "decoder"}
)
"""Layers with the mask."""
FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "aligned, blank first": lambda x, _: _aligned(x, 0),
    "aligned, blank last": lambda x, _: _aligned(x, WIDTH - 1, reduction="none"),
    "aligned, sum": lambda x, _: _aligned(x, WIDTH - 1, reduction="sum"),
    "fractional pooling": _pooled,
    "windows": _windows,
}
"""Functions with state of their own, or none, by name."""


class Layers(nn.Module):
    """Calls `LAYERS` and `FUNCTIONS` with the same inputs; returns results by name."""

    def __init__(self, nets: Mapping[str, nn.Module], functions: Sequence[str]) -> None:
        super().__init__()
        self.nets = nn.ModuleDict(nets)
        self.functions = tuple(functions)

    def forward(self, x: Tensor, bias: Tensor) -> dict[str, Any]:
        results = {name: LAYERS[name][1](net, x, bias) for name, net in self.nets.items()}
        return results | {name: FUNCTIONS[name](x, bias) for name in self.functions}

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of layers and functions."""
        return (*self.nets, *self.functions)

    def without(self, labels: frozenset[str]) -> Layers:
        """Module without these layers and functions."""
        nets = {name: net for name, net in self.nets.items() if name not in labels}
        return Layers(nets, [name for name in self.functions if name not in labels])

    def readers(self, place: int) -> frozenset[str]:
        """Labels that read the input (0) or the mask (1)."""
        return frozenset(self.labels if place == 0 else MASKED)


def _make(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Layers({name: make() for name, (make, _) in LAYERS.items()}, [*FUNCTIONS]), generator)
    return Problem(module, (normal(generator, STEPS, BATCH, WIDTH), normal(generator, STEPS, STEPS)))


WORKLOADS = (
    Workload("layers", "Layers of torch.nn with options of attention, recurrence, norms, losses and pooling.", _make,
        level=2, dtypes=frozenset({"float32"}), traits=frozenset({"domain"}), techniques=frozenset({"eager"}),
        divisible=True, given=True),
)  # fmt: skip
