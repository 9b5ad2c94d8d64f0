"""Families of operators with options in combination: a kernel may take each option alone, and not two together."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.function_parts import BOTH, KNOWN, Collected, family
from accelcheck.workloads.problem import TRANSLATORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EUCLIDEAN = ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist")


def together(**options: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every combination of options with its words, such as ``mode=sum, padding_idx=1``."""
    for chosen in product(*options.values()):
        named = dict(zip(options, chosen, strict=True))
        yield ", ".join(f"{name}={value}" for name, value in named.items()), named


def _embeddings(parts: Collected) -> None:
    """Adds embeddings and bags: weighted, with a padding index, with rows of one index, of several and of none."""
    table = normal(parts.generator, 7, 5)
    index = torch.tensor([1, 4, 1, 6, 0, 4, 2, 1, 3, 5])
    offsets = torch.tensor([0, 0, 3, 4, 9, 10])  # an empty bag first and last, one of a single index, one of five
    bags, modes = functional.embedding_bag, ("sum", "mean", "max")
    for words, chosen in together(mode=modes, padding_idx=(None, 1, -2), include_last_offset=(False, True)):
        parts.add(f"bags, {words}", bags, index, table, offsets, **chosen)
    for padding in (None, 1):
        parts.add(f"weighted, padding_idx={padding}", _weighted, index, table, offsets, (10,), padding_idx=padding)
    square = integers(parts.generator, 0, 7, 3, 4)
    for words, chosen in together(mode=modes, padding_idx=(None, 2)):
        parts.add(f"bags of equal size, {words}", bags, square, table, **chosen)
        parts.add(f"a single bag, {words}", bags, index[None], table, **chosen)
    for words, chosen in together(mode=modes[:2], padding_idx=(None, 1), scale_grad_by_freq=(True,)):
        parts.add(f"bags, {words}", bags, index, table, offsets, **chosen)
    for words, chosen in together(padding_idx=(None, 0, -1), scale_grad_by_freq=(False, True)):
        parts.add(f"embedding, {words}", functional.embedding, square, table, **chosen)


def _weighted(index: Tensor, table: Tensor, offsets: Tensor, weights: Tensor, **options: Any) -> Tensor:
    return functional.embedding_bag(index, table, offsets, mode="sum", per_sample_weights=weights, **options)


def _distances(parts: Collected) -> None:
    """Adds distances of few and of more than 25 points, where kernels multiply matrices, of each norm and size."""
    for (rows, columns), p in product(((1, 1), (3, 4), (26, 27), (30, 2)), (0.0, 1.0, 1.5, 2.0, 3.0, torch.inf)):
        for mode in EUCLIDEAN if p == 2.0 else EUCLIDEAN[:1]:
            words = f"cdist of {rows} and {columns}, p={p}, {mode}"
            parts.add(words, torch.cdist, (rows, 5), (columns, 5), p=p, compute_mode=mode)
    for scale, p in product((1e-2, 1e2), (1.0, 2.0, torch.inf)):
        x, y = normal(parts.generator, 4, 6) * scale, normal(parts.generator, 3, 6) * scale
        parts.add(f"cdist of points of {scale}, p={p}", torch.cdist, x, y, p=p)
        parts.add(f"pdist of points of {scale}, p={p}", functional.pdist, x, p=p)
    points = normal(parts.generator, 4, 6)
    for p in (1.0, 2.0, 3.0):  # each point is met again, at the distance 0
        parts.add(f"cdist of points and themselves, p={p}", torch.cdist, points, points.flip(0), p=p)
        parts.add(f"cdist of points far from 0, p={p}", torch.cdist, points + 100, points[:3] + 101, p=p)
    parts.add("cdist of batches", torch.cdist, (2, 3, 5), (2, 4, 5))
    parts.add("cdist of batches and one", torch.cdist, (2, 3, 5), (1, 4, 5))
    for words, chosen in together(p=(1.0, 2.0, 3.0), keepdim=(False, True)):
        parts.add(f"pairwise, {words}", functional.pairwise_distance, (4, 6), (4, 6), **chosen)
    for dim in (0, 1, -1):
        parts.add(f"cosine along {dim}", functional.cosine_similarity, (4, 6), (4, 6), dim=dim)


def _resizing(parts: Collected) -> None:
    """Adds resizing by each mode from and to few elements, one among them, and samples of grids beside the image."""
    line, image, volume = (normal(parts.generator, 1, 2, *size) for size in ((5,), (5, 4), (2, 3, 4)))
    resize = functional.interpolate
    modes = {"linear": line, "bilinear": image, "bicubic": image, "trilinear": volume}
    for (mode, x), aligned, size in product(modes.items(), (False, True), (1, 3, 8)):
        chosen: dict[str, Any] = {"size": (size,) * (x.dim() - 2), "mode": mode, "align_corners": aligned}
        parts.add(f"{mode} to {size}{', aligned' * aligned}", resize, x, **chosen)
        parts.add(f"{mode} of one to {size}{', aligned' * aligned}", resize, x[..., :1], **chosen)
    for words, chosen in together(mode=("nearest", "nearest-exact", "area"), size=((1, 1), (3, 7), (8, 2))):
        parts.add(f"resized, {words}", resize, image, **chosen)
    grid = normal(parts.generator, 1, 3, 4, 2) * 1.3  # beside the image too
    padding = ("zeros", "border", "reflection")
    for words, chosen in together(
        mode=("bilinear", "nearest", "bicubic"), padding_mode=padding, align_corners=(False, True)
    ):
        parts.add(f"grid, {words}", functional.grid_sample, image, grid, **chosen)


def _antialiased(parts: Collected) -> None:
    """Adds resizing with a filter, to one element along an axis too."""
    sizes = ((2, 3), (9, 7), (8, 1), (1, 7))
    for words, chosen in together(mode=("bilinear", "bicubic"), size=sizes, align_corners=(False, True)):
        parts.add(words, functional.interpolate, (1, 2, 5, 4), antialias=True, **chosen)


def _pools(parts: Collected) -> None:
    """Adds pools with options in combination, in both memory formats."""
    image = normal(parts.generator, 2, 3, 9, 8)
    average, largest, switch = functional.avg_pool2d, functional.max_pool2d, (False, True)
    for layout, x in {"": image, ", channels last": image.contiguous(memory_format=torch.channels_last)}.items():
        for words, chosen in together(
            stride=(1, 3), padding=(0, 1), ceil_mode=switch, count_include_pad=switch, divisor_override=(None, 5)
        ):
            parts.add(f"average, {words}{layout}", average, x, kernel_size=3, **chosen)
        for words, chosen in together(stride=(1, 2), padding=(0, 1), dilation=(1, 2), ceil_mode=switch):
            parts.add(f"max, {words}{layout}", largest, x, kernel_size=3, **chosen)
    for words, chosen in together(norm_type=(1.0, 2.0, 3.0), stride=(1, 2), ceil_mode=switch):
        parts.add(f"norms, {words}", functional.lp_pool2d, image, kernel_size=2, **chosen)


def _heads(parts: Collected) -> None:
    """Adds attention with fewer heads of keys than of queries, and with masks of each kind and shape."""
    attend = functional.scaled_dot_product_attention
    for heads, causal in product((1, 2, 4), (False, True)):
        keys, options = (2, heads, 5, 8), {"enable_gqa": True, "is_causal": causal}
        parts.add(f"4 heads of {heads}{', causal' * causal}", attend, (2, 4, 5, 8), keys, keys, **options)
    keys = (2, 4, 6, 8)
    shapes = ((5, 6), (1, 6), (5, 1), (2, 1, 1, 6), (1, 4, 5, 6), (2, 4, 5, 6))
    for shape, scale in product(shapes, (None, 0.3)):
        bias = normal(parts.generator, *shape)
        for words, mask in {"biased": bias, "hidden": (bias > -0.5) | (torch.arange(shape[-1]) == 0)}.items():
            parts.add(f"{words} by {shape}, scale={scale}", attend, (2, 4, 5, 8), keys, keys, mask, scale=scale)
    for dims in ((5, 8), (3, 5, 8), (1, 2, 2, 5, 8)):
        parts.add(f"of {len(dims)} dimensions", attend, dims, dims, dims)
    parts.add("values of another width", attend, (2, 4, 5, 8), keys, (2, 4, 6, 3))


# OpenVINO converts some of these, in workers of pytest-xdist alone, to results without elements: not yet understood.
UNCLEAR = frozenset({"embeddings", "heads"})
WORKLOADS = tuple(
    family(f"options-{name}", summary, build, BOTH, level=3, compiled=4, backward=4,
        techniques=frozenset(TRANSLATORS) - {"openvino" if name in UNCLEAR else ""},
        traits=KNOWN if name == "antialiasing" else frozenset({"domain"}))
    for name, summary, build in (
        ("embeddings", "Embeddings and bags with options in combination, empty bags among them.", _embeddings),
        ("distances", "Distances of few and many points, of each norm and size.", _distances),
        ("resizing", "Resizing by each mode from and to few elements, and samples of grids.", _resizing),
        ("antialiasing", "Resizing with a filter, to one element too.", _antialiased),
        ("pools", "Pools with options in combination, in both memory formats.", _pools),
        ("heads", "Attention with grouped heads, and with masks of each kind and shape.", _heads),
    )
)  # fmt: skip
