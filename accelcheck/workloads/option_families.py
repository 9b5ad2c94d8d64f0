"""Families of operators with each of their options: convolutions, windows, indices and attention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.workloads.draw import initialise, integers, normal
from accelcheck.workloads.function_parts import BOTH, FORWARD, KERNELS, KNOWN, Collected, family
from accelcheck.workloads.problem import Problem, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelcheck.workloads.function_parts import Function

FEW_SIZES = (1, 3, 8, 17, 33, 64, 129, 257, 1025)


def _convolutions(parts: Collected) -> None:
    """Adds convolutions of 1 to 3 dimensions, and transposed ones, with options one at a time and together."""
    options: Mapping[str, dict[str, Any]] = {
        "plain": {},
        "padding": {"padding": 1},
        "stride": {"stride": 2},
        "stride 3, padding 2": {"stride": 3, "padding": 2},
        "dilation": {"dilation": 2},
        "dilation and stride": {"dilation": 2, "stride": 2, "padding": 2},
        "groups": {"groups": 2, "padding": 1},
        "uneven": {"padding": (1, 0), "stride": (1, 2), "dilation": (2, 1)},
    }
    for name, chosen in options.items():
        groups = chosen.get("groups", 1)
        parts.add(f"conv2d, {name}", functional.conv2d, (2, 4, 11, 13), (6, 4 // groups, 3, 3), (6,), **chosen)
        parts.add(f"transposed, {name}", functional.conv_transpose2d, (2, 6, 7, 6), (6, 4 // groups, 3, 3), **chosen)
    more = {"stride": 2, "output_padding": 1}
    parts.add("transposed, output padding", functional.conv_transpose2d, (2, 4, 6, 7), (4, 3, 3, 3), **more)
    for size in FEW_SIZES:
        parts.add(f"conv1d of {size}", functional.conv1d, (2, 3, size), (4, 3, 3), padding=1)
        if size <= 129:
            x = normal(parts.generator, 1, size, 6, 5)
            parts.add(f"{size} channels", functional.conv2d, x, (5, size, 3, 3), padding=1)
            parts.add(f"{size} filters", functional.conv2d, (1, 3, 6, 5), (size, 3, 3, 3))
            parts.add(f"depthwise {size}", functional.conv2d, x, (size, 1, 3, 3), groups=size, padding=1)
            parts.add(f"pointwise {size}", functional.conv2d, x, (4, size, 1, 1))
    parts.add("conv3d", functional.conv3d, (1, 3, 5, 6, 7), (4, 3, 3, 3, 3), padding=1, stride=2)
    for side in (1, 2, 5, 7):
        parts.add(f"kernel of {side}", functional.conv2d, (1, 3, 9, 10), (4, 3, side, side), padding=side // 2)


def _windows(parts: Collected) -> None:
    """Adds pooling, padding and interpolation with their options."""
    x = normal(parts.generator, 2, 3, 11, 13)
    line = normal(parts.generator, 2, 3, 19)
    for name, chosen in {
        "plain": {},
        "stride": {"stride": 1},
        "padding": {"padding": 1},
        "ceil": {"ceil_mode": True, "stride": 3},
        "ceil and padding": {"ceil_mode": True, "padding": 1, "stride": 2},
    }.items():
        parts.add(f"max pool, {name}", functional.max_pool2d, x, kernel_size=3, **chosen)
        parts.add(f"average pool, {name}", functional.avg_pool2d, x, kernel_size=3, **chosen)
        parts.add(f"max pool 1-D, {name}", functional.max_pool1d, line, kernel_size=3, **chosen)
        parts.add(f"average pool 1-D, {name}", functional.avg_pool1d, line, kernel_size=3, **chosen)
    parts.add("max pool, dilation", functional.max_pool2d, x, kernel_size=2, dilation=2, stride=1)
    parts.add(
        "average pool without padding", functional.avg_pool2d, x, kernel_size=3, padding=1, count_include_pad=False
    )
    parts.add("average pool with a divisor", functional.avg_pool2d, x, kernel_size=2, divisor_override=3)
    for size in ((1, 1), (4, 5), (7, 7), (13, 17)):
        parts.add(f"adaptive average pool to {size}", functional.adaptive_avg_pool2d, x, output_size=size)
        parts.add(f"adaptive max pool to {size}", functional.adaptive_max_pool2d, x, output_size=size)
    for mode in ("constant", "reflect", "replicate", "circular"):
        parts.add(f"pad, {mode}", partial(functional.pad, pad=(2, 1, 3, 2), mode=mode), x)
    parts.add("pad, negative", functional.pad, x, pad=(-1, 2, -2, -3))
    for factor in (0.6, 1.7, 2.0, 3.0):
        parts.add(f"nearest by {factor}", functional.interpolate, x, scale_factor=factor, mode="nearest")
        for aligned in (False, True):
            scaled: dict[str, Any] = {"scale_factor": factor, "mode": "bilinear", "align_corners": aligned}
            parts.add(f"bilinear by {factor}{', aligned' * aligned}", functional.interpolate, x, **scaled)
    parts.add("pixel shuffle", lambda x: functional.pixel_shuffle(x[:, :, :10, :12].repeat(1, 4, 1, 1), 2), x)
    parts.add("unfold", functional.unfold, x, kernel_size=3, stride=2, padding=1)
    parts.add("fold", partial(functional.fold, output_size=(6, 7), kernel_size=2), (2, 12, 30))


def _indices(parts: Collected) -> None:
    """Adds reads and writes by repeated, negative and unsorted indices around block sizes, and joins of tensors."""
    for size in FEW_SIZES:
        x, source = normal(parts.generator, size, 3), normal(parts.generator, 2 * size + 1, 3)
        rows = integers(parts.generator, 0, size, 2 * size + 1)
        wide = rows[:, None].expand(-1, 3).contiguous()
        parts.add(f"index_select of {size}", lambda x, rows: x.index_select(0, rows), x, rows)
        parts.add(f"index_add of {size}", lambda x, rows, source: x.index_add(0, rows, source), x, rows, source)
        parts.add(f"gather of {size}", lambda x, wide: x.gather(0, wide), x, wide)
        parts.add(f"scatter_add of {size}", lambda x, wide, source: x.scatter_add(0, wide, source), x, wide, source)
        parts.add(
            f"scatter_reduce of {size}",
            lambda x, wide, source: x.scatter_reduce(0, wide, source, "amax"),
            x,
            wide,
            source,
        )
        parts.add(f"brackets of {size}", lambda x, rows: x[rows - x.shape[0]], x, rows)
        parts.add(
            f"put of {size}", lambda x, rows, source: x.index_put((rows,), source, accumulate=True), x, rows, source
        )
        parts.add(f"embedding of {size}", lambda rows, x: functional.embedding(rows, x, padding_idx=0), rows, x)
        parts.add(f"mask of {size}", lambda x: [x.masked_fill(x > 0.5, -1.0), torch.where(x < 0, x, 0.0)], x)
        parts.add(f"masked select of {size}", lambda x: (x * (x > 0)).sum(0), x)
        parts.add(f"one-hot of {size}", lambda rows, x: functional.one_hot(rows, x.shape[0]), rows, x)
        parts.add(f"cat of {size}", lambda x: torch.cat([x[: k + 1] for k in range(min(len(x), 40))]), x)
        parts.add(f"stack of {size}", lambda x: torch.stack([x, -x, x * 2.0], 1), x)
    logits, target = normal(parts.generator, 9, 5), integers(parts.generator, 0, 5, 9)
    ignored = torch.where(torch.arange(9) % 3 == 0, -100, target)
    for reduction in ("none", "mean", "sum"):
        parts.add(f"cross entropy, {reduction}", functional.cross_entropy, logits, target, reduction=reduction)
        parts.add(
            f"cross entropy, ignored, {reduction}", functional.cross_entropy, logits, ignored, reduction=reduction
        )
        chosen = {"reduction": reduction, "label_smoothing": 0.1}
        parts.add(f"cross entropy, smoothed, {reduction}", functional.cross_entropy, logits, target, **chosen)
    for width in (0.25, 3.0):
        parts.add(f"smooth losses of {width}", partial(_losses, width), (5, 7), (5, 7))
    for count in (1, 15, 16, 17, 33, 64, 100, 257):
        parts.add(f"topk {count}", partial(_largest, count), (3, 300))
    parts.add("nothing by index", _nothing, torch.ones(3), torch.zeros(0), torch.zeros(0, dtype=torch.long))
    edges = torch.linspace(-2, 2, 33)
    parts.add(
        "searchsorted of edges",
        lambda e: [f(e, e, right=right) for f in (torch.searchsorted, torch.bucketize) for right in (False, True)],
        edges,
    )
    parts.add("searchsorted", lambda e, x: [torch.searchsorted(e, x), torch.bucketize(x, e, right=True)], edges, logits)


def _losses(size: float, x: Tensor, y: Tensor) -> list[Tensor]:
    return [
        functional.smooth_l1_loss(x, y, beta=size),
        functional.huber_loss(x, y, delta=size),
        functional.margin_ranking_loss(x, y, x.detach().sign(), margin=size),
        functional.hinge_embedding_loss(x, y.detach().sign(), margin=size),
    ]


def _largest(count: int, x: Tensor) -> list[Tensor]:
    return [x.topk(count).values, x.topk(count, largest=False).values, x.kthvalue(count).values]


def _nothing(x: Tensor, none: Tensor, index: Tensor) -> list[Tensor]:
    """Returns results of an empty index: of writes, the tensor itself."""
    return [
        x.scatter(0, index, none),
        x.scatter_add(0, index, none),
        x.scatter_reduce(0, index, none, "sum"),
        x.index_add(0, index, none),
        x.index_copy(0, index, none),
        x.index_put((index,), none),
        x.index_fill(0, index, 2.0),
        x.gather(0, index),
        torch.cat((x, none)),
    ]


def _attention(parts: Collected) -> None:
    """Adds attention with queries, keys and heads of a few sizes: causal, masked, and with fewer keys than queries."""
    for size in (1, 3, 17, 64, 129):
        q, k, v = (normal(parts.generator, 1, 2, size, 8) for _ in range(3))
        parts.add(f"{size} positions", functional.scaled_dot_product_attention, q, k, v)
        parts.add(f"{size} positions, causal", functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        parts.add(f"{size} keys", functional.scaled_dot_product_attention, (1, 2, 5, 8), k, v)
        mask = normal(parts.generator, size, size)
        parts.add(f"{size} positions, biased", functional.scaled_dot_product_attention, q, k, v, mask)
    for width in (1, 4, 16, 33, 64, 80, 128):
        q, k, v = (normal(parts.generator, 1, 1, 9, width) for _ in range(3))
        parts.add(f"heads of {width}", functional.scaled_dot_product_attention, q, k, v)
    parts.add("a scale", functional.scaled_dot_product_attention, *((1, 1, 9, 8) for _ in range(3)), scale=0.3)


IMAGES: Mapping[str, Function] = {
    "channel_shuffle": lambda x: functional.channel_shuffle(x, 2),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "pad": lambda x: functional.pad(x, (1, 1, 0, 2)),
    "reflected": lambda x: functional.pad(x, (1, 1, 1, 1), "reflect"),
    "max_pool2d": lambda x: functional.max_pool2d(x, 2, 1),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 2),
    "joined": lambda x: [torch.cat((x, x + 1), 1), torch.stack((x, x)), torch.where(x > 0, x, 0.0)],
    "sums": lambda x: [x.sum(1, keepdim=True), x.mean((2, 3), keepdim=True), x.cumsum(1), x.softmax(1)],
    "likes": lambda x: [torch.ones_like(x), torch.full_like(x, 2.0), x.new_zeros(x.shape), x.clone(), x.exp()],
    "flips": lambda x: [x.flip(1), x.roll(1, 2), x.tril(), x.sort(1).values],
    **{
        f"{mode} by {scale}": partial(functional.interpolate, scale_factor=scale, mode=mode)
        for mode in ("nearest", "nearest-exact")
        for scale in (1.0, 1.2, 1.4, (1.0, 2.0))
    },
}
"""Functions of images with few rows and columns, of which a scale factor may leave the size as it is."""
FORMATS: Mapping[str, Function] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.mT.contiguous().mT,
    "of one channel": lambda x: x[:1, :1].expand(2, 4, -1, -1),
}
SHARED: Mapping[str, Function] = {
    "index_add": lambda x, index, source: x.index_add(0, index, source),
    "index_copy": lambda x, index, source: x.index_copy(0, index, source),
    "index_put": lambda x, index, source: x.index_put((index,), source, accumulate=True),
    "index_fill": lambda x, index, _: x.index_fill(0, index, 2.0),
    "scatter_add": lambda x, index, source: x.scatter_add(0, index[:, None].expand(-1, 5), source),
    "masked_fill": lambda x, *_: x.masked_fill(x == x[:, :1], 2.0),
    "select_scatter": lambda x, _, source: x.select_scatter(source[0], 0, 1),
}
"""Functions that write out of place to a tensor whose rows share memory."""


def _convolved(first: Function, second: Function, x: Tensor, weight: Tensor, turned: Tensor) -> list[Tensor]:
    """Convolves an image and a weight of a layout each: directly, transposed, and in groups."""
    x = first(x)
    grouped = functional.conv2d(x, second(weight[:, :2]), groups=2)
    return [functional.conv2d(x, second(weight)), functional.conv_transpose2d(x, second(turned)), grouped]


def _formats(parts: Collected) -> None:
    """Adds functions of images in each format, and of rows that share memory."""
    x = normal(parts.generator, 2, 4, 3, 2)
    for name, function in IMAGES.items():
        for word, layout in FORMATS.items():
            parts.add(f"{name}, {word}", lambda x, f=function, layout=layout: f(layout(x)), x)
    row, source = normal(parts.generator, 1, 5), normal(parts.generator, 3, 5)
    index = torch.tensor([0, 2, 1])
    for name, function in SHARED.items():
        parts.add(name, lambda row, *more, f=function: f(row.expand(4, -1), *more), row, index, source)


def _further_options(parts: Collected) -> None:
    """Adds convolutions with large kernels, several filters a channel, and in each format; windows of many channels."""
    for channels in (17, 33, 48, 129):
        parts.add(
            f"windows of {channels} channels",
            lambda x: [
                functional.max_pool2d(x, 2),
                functional.avg_pool2d(x, 2),
                functional.adaptive_avg_pool2d(x, 2),
                functional.interpolate(x, scale_factor=2),
                functional.instance_norm(x),
                functional.group_norm(x, 1),
            ],
            (2, channels, 5, 4),
        )
    for each in (2, 3):
        parts.add(f"depthwise, {each} filters each", functional.conv2d, (1, 4, 6, 5), (4 * each, 1, 3, 3), groups=4)
    for side in (15, 16, 17):
        parts.add(f"kernel of {side}", functional.conv2d, (1, 2, 18, 19), (3, 2, side, side), stride=2)
        parts.add(f"kernel of {side}, 1-D", functional.conv1d, (1, 2, 40), (3, 2, side))
    weight, image = normal(parts.generator, 6, 4, 3, 2), normal(parts.generator, 2, 4, 6, 5)
    plain: Function = lambda x: x  # noqa: E731 - beside functions of a table
    for first in (plain, *FORMATS.values()):
        for second in (
            plain,
            FORMATS["channels last"],
            FORMATS["transposed"],
            lambda w: torch.stack((w, -w), -1)[..., 0],
        ):
            chosen = partial(_convolved, first, second)
            parts.add(f"convolutions {len(parts.parts)}", chosen, image, weight, (4, 6, 3, 2))


PADDED = ((False, False, False, True), (False, True, True, True), (True, True, True, True))
"""Keys that are padding, by sample: in the last one, all are."""


class Masked(nn.Module):
    """Attention and encoder layers without masks, with padding, and with boolean and additive masks.

    In evaluation mode, torch takes its fast path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, bias: Tensor, padding: Tensor, causal: Tensor) -> dict[str, Tensor]:
        results = {
            "attention, padded": self.attention(x, x, x, padding, need_weights=False)[0],
            "encoder": self.encoder(x),
        }
        results["encoder, padded"] = self.encoder(x, src_key_padding_mask=padding)
        for name, mask in {"causal": causal, "biased": bias}.items():
            results[f"attention, {name}"] = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
            results[f"encoder, {name}"] = self.encoder(x, src_mask=mask)
        return results


def _masked(generator: torch.Generator, extent: int) -> Problem:
    module = Masked()
    initialise(module, generator)
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    return Problem(module.eval(), (normal(generator, 3, 4, 8), normal(generator, 4, 4), torch.tensor(PADDED), causal))


WORKLOADS = (
    family("sizes-attention", "Attention of each of a few sizes.", _attention),
    family("sizes-indices", "Reads and writes by index, and joins, of each of a few sizes.", _indices, BOTH),
    family("options-convolutions", "Convolutions with each of their options.", _convolutions, BOTH, backward=4),
    family("options-windows", "Pooling, padding and interpolation with each of their options.", _windows, BOTH),
    family("formats", "Images in each memory format, and rows that share memory.", _formats, techniques=KERNELS),
    family("further-options",
        "Convolutions of large kernels, several filters a channel, and in each format; windows of many channels.",
        _further_options,
        techniques=frozenset({"eager"})),
    Workload("attention-masks",
        "Attention and encoder layers in evaluation mode, with masks that hide some keys, or all.",
        _masked, level=3, modes=FORWARD, dtypes=frozenset({"float32"}), traits=KNOWN, techniques=frozenset({"eager"}),
        given=True),
)  # fmt: skip
