"""Fast algorithms that libraries choose for convolutions and matrix products, by class, with errors of their own.

They err norm-wise: each element by the size of the operands of its whole tile or image, where a plain sum errs by the
size of its own terms. NaN and infinities spread over that tile or image. Bounds: N. J. Higham, Accuracy and Stability
of Numerical Algorithms, 2nd ed., theorems 23.3 (Strassen) and 24.2 (FFT); B. Barabasz et al., Error Analysis and
Improving the Accuracy of Winograd Convolution for Deep Neural Networks, ACM TOMS 46(4), 2020. They bound the worst
case; a class's samples show the numbers at hand: each is the FP64 oracle by that algorithm, with rounding errors in
each of its steps. No class has a budget beyond the caps of `accelcheck.verify.few`.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.verify.operators import facts
from accelcheck.workloads.base import Result

Convolution = Callable[[Tensor, Tensor, tuple[int, int]], Tensor]

_TRANSFORMS: Mapping[int, tuple[Any, Any, Any]] = MappingProxyType({
    2: (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    4: (
        [[4, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
         [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1]],
        [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6],
         [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]],
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    ),
})  # fmt: skip
"""Matrices of input, weight and output of F(m, 3), by m (Lavin, Gray: Fast Algorithms for Convolutional Neural
Networks, 2016)."""
_KERNEL = 3
"""Side of the weights in `_TRANSFORMS`."""


def winograd(side: int, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """Convolves ``(N, C, H, W)`` with ``(O, C, 3, 3)`` by tiles of `side` x `side` results."""
    into, of_weight, out = (torch.tensor(rows, dtype=x.dtype, device=x.device) for rows in _TRANSFORMS[side])
    height, width = (x.shape[2 + i] + 2 * padding[i] - _KERNEL + 1 for i in (0, 1))
    right, below = -width % side, -height % side
    held = pad(x, (padding[1], padding[1] + right, padding[0], padding[0] + below))
    tiles = held.unfold(2, side + 2, side).unfold(3, side + 2, side)  # (N, C, rows, columns, side + 2, side + 2)
    count, channels, rows, columns = tiles.shape[:4]
    spread = (into @ tiles @ into.t()).permute(4, 5, 0, 2, 3, 1).reshape((side + 2) ** 2, -1, channels)
    factors = (of_weight @ weight @ of_weight.t()).permute(2, 3, 1, 0).reshape((side + 2) ** 2, channels, -1)
    products = (spread @ factors).reshape(side + 2, side + 2, count, rows, columns, -1).permute(2, 5, 3, 4, 0, 1)
    computed = out @ products @ out.t()  # (N, O, rows, columns, side, side)
    return computed.transpose(3, 4).reshape(count, -1, rows * side, columns * side)[:, :, :height, :width]


def by_fft(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> Tensor:
    """Convolves ``(N, C, H, W)`` with ``(O, C, h, w)`` as a product of spectra."""
    sides = [x.shape[2 + i] + 2 * padding[i] for i in (0, 1)]
    held = pad(x, (padding[1], padding[1], padding[0], padding[0]))
    stages = math.ceil(math.log2(max(2, math.prod(sides))))
    spectra = [_rounded(torch.fft.rfft2(value, s=sides), stages) for value in (held, weight)]
    product = _rounded(torch.einsum("nchw,ochw->nohw", spectra[0], spectra[1].conj()), stages)
    whole: Tensor = torch.fft.irfft2(product, s=sides)
    return whole[:, :, : sides[0] - weight.shape[2] + 1, : sides[1] - weight.shape[3] + 1]


def _rounded(spectrum: Tensor, stages: int) -> Tensor:
    """Rounds real and imaginary parts once per stage of a transform: simulated rounding sees no complex numbers."""
    parts = torch.view_as_real(spectrum.resolve_conj())
    for _ in range(stages):
        parts = parts * 1.0
    return torch.view_as_complex(parts)


def strassen(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies ``(..., M, K) @ (..., K, N)`` of even sides by seven products of a quarter."""
    (a11, a12), (a21, a22) = (half.chunk(2, -1) for half in a.chunk(2, -2))
    (b11, b12), (b21, b22) = (half.chunk(2, -1) for half in b.chunk(2, -2))
    first, second = (a11 + a22) @ (b11 + b22), (a21 + a22) @ b11
    third, fourth, fifth = a11 @ (b12 - b22), a22 @ (b21 - b11), (a11 + a12) @ b22
    sixth, seventh = (a21 - a11) @ (b11 + b12), (a12 - a22) @ (b21 + b22)
    above = torch.cat([first + fourth - fifth + seventh, third + fifth], -1)
    return torch.cat([above, torch.cat([second + fourth, first - second + third + sixth], -1)], -2)


class Algorithm(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Computes operators by a fast algorithm, a key of `ALGORITHMS`, wherever it applies to their sizes."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._kernels = ALGORITHMS[name]
        self.used = 0
        """Operators computed by the algorithm."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kernel = None if kwargs else self._kernels.get(facts(func).name)
        result = None if kernel is None else kernel(func, *args)
        self.used += result is not None
        return func(*args, **(kwargs or {})) if result is None else result


def _convolution(convolve: Convolution, only: int, func: Any, *args: Any) -> Tensor | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if not _plain(x, weight, stride, dilation, transposed, groups, only):
        return None
    result = convolve(x, weight, tuple(padding)).contiguous()
    return result if bias is None else result + bias.reshape(-1, 1, 1)


def _convolution_backward(convolve: Convolution, only: int, func: Any, *args: Any) -> tuple[Any, ...] | None:
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = args
    if not _plain(x, weight, stride, dilation, transposed, groups, only):
        return None
    gradients = [*func(*args)]
    if mask[0]:
        beyond = tuple(size - 1 - padded for size, padded in zip(weight.shape[2:], padding, strict=True))
        gradients[0] = convolve(grad, weight.flip(2, 3).transpose(0, 1), beyond)
    if mask[1] and not only:  # its kernel is the gradient, of any size
        gradients[1] = convolve(x.transpose(0, 1), grad.transpose(0, 1), tuple(padding)).transpose(0, 1)
    return tuple(gradients)


def _plain(x: Tensor, weight: Tensor, stride: Any, dilation: Any, transposed: Any, groups: int, only: int) -> bool:
    sides = set(weight.shape[2:])
    return x.dim() == 4 and {*stride, *dilation, groups} == {1} and not transposed and (not only or sides == {only})


def _mm(func: Any, a: Tensor, b: Tensor) -> Tensor | None:
    sides = (*a.shape[-2:], b.shape[-1])
    return None if any(side % 2 or not side for side in sides) else strassen(a, b)


def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    product = _mm(func, a, b)
    return None if product is None else product + bias


def _convolutions(convolve: Convolution, only: int) -> Mapping[str, Callable[..., Any]]:
    kernels = {"convolution": _convolution, "convolution_backward": _convolution_backward}
    return MappingProxyType({name: partial(kernel, convolve, only) for name, kernel in kernels.items()})


ALGORITHMS: Mapping[str, Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "fast convolution F(2,3)": _convolutions(partial(winograd, 2), _KERNEL),
        "fast convolution F(4,3)": _convolutions(partial(winograd, 4), _KERNEL),
        "convolution by FFT": _convolutions(by_fft, 0),
        "fast matrix product (Strassen, one level)": MappingProxyType({"mm": _mm, "bmm": _mm, "addmm": _addmm}),
    }
)
"""Kernels by operator, by class; smaller errors first. A kernel gives None where its algorithm does not apply."""


def admitted(result: Result, truth: Result, spread: Result) -> Result:
    """A result on the CPU with the truth's values where a class spreads NaN and infinities: where `spread` is True."""
    return {
        path: torch.where(spread[path] & ~torch.isfinite(tensor), truth[path].to(tensor.dtype), tensor)
        if path in spread and tensor.shape == spread[path].shape
        else tensor
        for path, tensor in result.items()
    }
