"""Tries dtypes and features that a device neither declares nor denies. Imports torch only when called."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from accelcheck.devices._late_torch import torch
from accelcheck.devices.base import FOUND, TRIED, Device

RUNS = 3
"""Number of runs whose bits are compared."""
_UNENDED = "not found: its trial, or one before it, did not end"


def answers(device: Device) -> Iterator[Mapping[str, str]]:
    """Yields the answers for all undeclared words of `TRIED` again after each trial, which may end the process.

    A trial finds out if a feature of an open device exists; cases find out if it computes rightly.
    """
    known = {word: f"denied: {reason}" for word, reason in device.denied.items()}
    open_words = [word for word in TRIED if not (word in known or word in device.dtypes or device.has(word))]
    known |= dict.fromkeys(open_words, _UNENDED)
    if known:
        yield dict(known)
    for word in open_words:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                lack = _TRIALS[word](device)
                device.synchronize()
        except Exception as error:  # noqa: BLE001 - a backend may raise anything where it has no kernel
            lack = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        known[word] = f"not found: {lack}" if lack else FOUND
        yield dict(known)


def _normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Normal numbers on the CPU, from a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _dtype(name: str, device: Device) -> str:
    wanted: torch.dtype = getattr(torch, name)
    matrix = _normal((64, 64)).to(device.torch_device(), wanted)
    for result in (matrix * matrix + 1, matrix @ matrix, matrix.sum(), matrix.float()):
        result.cpu()
    got = (matrix @ matrix).cpu().dtype
    return "" if got == wanted else f"a product is {str(got).removeprefix('torch.')}"


def _autocast(name: str, device: Device) -> str:
    wanted: torch.dtype = getattr(torch, name)
    matrix = _normal((64, 64)).to(device.torch_device())
    with torch.autocast(device.type, dtype=wanted):
        product = matrix @ matrix
    got = product.cpu().dtype
    return "" if got == wanted else f"a product is {str(got).removeprefix('torch.')}"


def _strided(device: Device) -> str:
    matrix = _normal((6, 8))
    own = matrix.to(device.torch_device())
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transpose": lambda tensor: tensor.t(),
        "slice": lambda tensor: tensor[1:, ::2],
        "expand": lambda tensor: tensor[:1].expand(6, 8),
        "as_strided": lambda tensor: tensor.as_strided((4, 3), (1, 8)),
    }
    for name, view in views.items():
        seen, there, copied = view(own), view(matrix).to(own.device, copy=True), view(matrix).clone()
        for what, got, expected in (("a view", seen, view(matrix)), ("a copy", there, copied)):
            if got.stride() != expected.stride():
                return f"{name}: expected {what} with the strides {expected.stride()}, got {got.stride()}"
        for tensor in (seen, there):
            (tensor + tensor).cpu()
    return ""


def _deterministic(device: Device) -> str:
    """Compares the bits of several runs of products, convolutions, and sums, whose order is open with atomics."""
    place = device.torch_device()
    left, right, long = (_normal(shape).to(place) for shape in ((96, 4096), (4096, 80), (1 << 18,)))
    image, weight = _normal((4, 16, 20, 20)).to(place), _normal((24, 16, 3, 3)).to(place)
    rows = torch.randint(40, (4096,), generator=torch.Generator().manual_seed(0)).to(place)

    def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        asked = [tensor.detach().requires_grad_() for tensor in inputs]
        out = function(*asked)
        return (out, *torch.autograd.grad(out, asked, torch.ones_like(out) / 3))

    programs: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
        "product": lambda: (left @ right, left[:7] @ right[:, :5], left[:, :64] @ right[:64]),
        "sum": lambda: (long.sum(), left.sum(0), left.sum(1), right.mean(0)),
        "softmax": lambda: gradients(lambda x: x.softmax(-1), left),
        "layer_norm": lambda: gradients(lambda x, w: torch.nn.functional.layer_norm(x, (80,), w), right, right[0]),
        "convolution": lambda: gradients(lambda x, w: torch.nn.functional.conv2d(x, w, padding=1), image, weight),
        "pooling": lambda: gradients(lambda x: torch.nn.functional.max_pool2d(x, 3, 1), image),
        "upsampling": lambda: gradients(lambda x: torch.nn.functional.interpolate(x, scale_factor=2.5), image),
        "cumsum": lambda: (long.cumsum(0),),
        "index_add": lambda: (torch.zeros_like(right[:40]).index_add(0, rows, right),),
        "scatter_add": lambda: (torch.zeros_like(long[:40]).scatter_add(0, rows, right[:, 0].contiguous()),),
        "index_put": lambda: (torch.zeros_like(right[:40]).index_put((rows,), right, accumulate=True),),
        "embedding": lambda: gradients(lambda w: torch.nn.functional.embedding(rows, w), right[:40]),
    }
    for name, program in programs.items():
        try:
            first = [tensor.detach().cpu() for tensor in program()]
        except Exception:
            if name in {"product", "sum"}:
                raise
            continue  # the cases say which operators a device lacks
        for _ in range(RUNS - 1):
            again = [tensor.detach().cpu() for tensor in program()]
            pairs = zip(first, again, strict=True)
            if not all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs):
                return f"{name}: other bits in one of {RUNS} runs"
    return ""


_TRIALS: Mapping[str, Callable[[Device], str]] = {
    "bfloat16": partial(_dtype, "bfloat16"),
    "float16": partial(_dtype, "float16"),
    "strided": _strided,
    "deterministic": _deterministic,
    "autocast-bfloat16": partial(_autocast, "bfloat16"),
    "autocast-float16": partial(_autocast, "float16"),
}
"""Functions that say what a device lacks for a word of `TRIED`; empty where it has it."""
