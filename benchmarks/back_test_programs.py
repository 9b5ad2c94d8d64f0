"""Programs of silent bugs from public issue trackers, one per root cause and named after the issue, for `back_test.py`.

Each gives a wrong result without an error with torch 2.13.0, onnxscript 0.7.2, onnxruntime 1.32.0, OpenVINO 2026.4.1 or
torchao on a CPU; reported from 2024 to 2026. Inputs are float32 where the bug shows with them, since `accelcheck` takes
no others.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TRACKERS = {
    "pytorch": "https://github.com/pytorch/pytorch/issues/",
    "onnxruntime": "https://github.com/microsoft/onnxruntime/issues/",
    "onnxscript": "https://github.com/microsoft/onnxscript/issues/",
    "openvino": "https://github.com/openvinotoolkit/openvino/issues/",
    "torchao": "https://github.com/pytorch/ao/issues/",
}
"""Addresses of each project's issues, by the first part of a program's name."""
INFINITE, NAN = float("inf"), float("nan")
INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True)
class Bug:
    """A program with a silent bug.

    Attributes:
        function: The program: a function of tensors, or a module.
        inputs: Its positional arguments.
        technique: Technique with the wrong result, or ``func-jvp``, which ``func-jacfwd`` maps over columns.
        backward: True where its gradients are wrong, and not its results.
        right: Function that gives the right result; None where eager's is right.
        operators: Faulty operators, in OpInfo's spelling; empty for a combination or a second derivative.
        labels: Regular expression of whole paths of faults, for what the families of accelcheck call; an input that one
            program alone reads goes by that program, as in ``grad:input['x + 1']``.
        workloads: Regular expression of the names of the workloads with these paths.
        note: Why no case of the suite finds it, where none does.
        also: Further techniques whose cases show it, where they take the derivative within the program.
    """

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    technique: str
    backward: bool = False
    right: Callable[[], Any] | None = None
    operators: tuple[str, ...] = ()
    labels: str = ""
    workloads: str = ".*"
    note: str = ""
    also: tuple[str, ...] = ()


def programs() -> Mapping[str, Callable[[], Bug]]:
    """The programs by name, in the order of this file."""
    name = re.compile(rf"({'|'.join(TRACKERS)})_\d+")
    return {key: value for key, value in vars(sys.modules[__name__]).items() if name.fullmatch(key)}


def link(name: str) -> str:
    """The address of a program's issue."""
    project, _, number = name.rpartition("_")
    return f"{TRACKERS[project]}{number}"


def summary(name: str) -> str:
    """The sentence that describes a program."""
    return inspect.getdoc(programs()[name]) or ""


def _numbers(*shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    """Float32 numbers that look irregular, without a generator: multiples of the golden section, modulo 1."""
    parts = torch.remainder(torch.arange(1, math.prod(shape) + 1, dtype=torch.float64) * 0.6180339887498949, 1.0)
    return (low + (high - low) * parts).reshape(shape).float()


def _fill(module: nn.Module, reach: float) -> None:
    """Give every parameter fixed numbers from -reach to reach."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(_numbers(*parameter.shape, low=-reach, high=reach))


# torch.compile: wrong values and metadata of one operator.


def pytorch_191308() -> Bug:
    """Inductor returns the product of int8 matrices of one row in int64."""
    return Bug(
        torch.matmul,
        (torch.full((1, 1, 3), 2, dtype=torch.int8), torch.full((1, 3, 4), 3, dtype=torch.int8)),
        "compile-static",
        operators=("matmul", "bmm", "__rmatmul__"),
        labels=r"out\['(u?int8|int16|int32), products'\].*",
        note="no sample is a product of one row in integers of fewer than 64 bits",
    )


def pytorch_197091() -> Bug:
    """Inductor computes `ldexp` of an integer mantissa and a float16 exponent in float32, eager in float16."""
    return Bug(
        lambda mantissa, exponent: torch.ldexp(mantissa, exponent.half()),
        (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, -1.0])),
        "compile-static",
        operators=("ldexp",),
        labels=r"out\[.*torch\.ldexp\(.*|out\['ldexp of int64 and float16'\]",
        note="both operands of a sample have the same dtype",
    )


def pytorch_198364() -> Bug:
    """Inductor returns contiguous strides from `copysign` of a transposed tensor, eager keeps the layout."""
    return Bug(
        lambda x, y: torch.copysign(x.t(), y),
        (torch.arange(12.0).reshape(4, 3), torch.arange(12.0).reshape(3, 4) - 5),
        "compile-static",
        operators=("copysign",),
        note="no sample has a transposed first operand and a contiguous second one",
    )


def pytorch_197815() -> Bug:
    """Inductor forgets the stride of a dimension of size 1 in `ones_like`."""
    return Bug(
        lambda x: torch.ones_like(x.reshape(1, 7).t()),
        (torch.arange(7.0),),
        "compile-static",
        operators=("ones_like", "zeros_like", "full_like"),
        note="no sample has a transposed row, and strides of dimensions of size 1 are not compared",
    )


def pytorch_197109() -> Bug:
    """Inductor returns a contiguous tensor from `channel_shuffle` of a channels-last one."""
    return Bug(
        lambda x: functional.channel_shuffle(x.contiguous(memory_format=torch.channels_last), 2),
        (torch.arange(72.0).reshape(2, 4, 3, 3),),
        "compile-static",
        operators=("nn.functional.channel_shuffle",),
        labels=r"out\[.*F\.channel_shuffle\(.*|out\['channel_shuffle, channels last'\]",
        note="no sample is channels-last",
    )


def pytorch_183986() -> Bug:
    """Inductor adds into one shared row where `index_add` is given an expanded tensor."""
    return Bug(
        lambda source, index: source.new_zeros(1, 5).expand(4, -1).index_add(0, index, source),
        (torch.ones(3, 5), torch.tensor([0, 1, 0])),
        "compile-static",
        operators=("index_add",),
        labels=r"out\['b = .*expand\(.*index_(add|put)\(.*|out\['index_add'\]",
        workloads=r"mutation-\d+|formats",
        note="no sample adds into an expanded tensor",
    )


def pytorch_188048() -> Bug:
    """Inductor divides infinity to infinity with `rounding_mode="floor"`, eager to NaN."""
    return Bug(
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        (torch.tensor([INFINITE, -INFINITE, 3.0]), torch.tensor([2.0, 2.0, 2.0])),
        "compile-static",
        operators=("div.floor_rounding", "floor_divide"),
        note="samples whose results are not finite are left out",
    )


def pytorch_175154() -> Bug:
    """Decomposition of `interpolate` in mode nearest repeats elements of a dimension whose size stays the same."""
    return Bug(
        lambda x: functional.interpolate(x, scale_factor=1.4, mode="nearest"),
        (torch.tensor([[[[5.0, 6.0]]]]),),
        "compile-aot-eager",
        operators=("nn.functional.interpolate.nearest",),
        labels=r"out\['(nearest by |F\.interpolate\([xp], scale_factor=).*",
        workloads=r"formats|chain-\d+",
        note="no scale factor of a sample leaves a size as it is",
    )


def pytorch_197089() -> Bug:
    """Inductor sums the squares of tiny float32 numbers in float32, so that their `std` is 0."""
    return Bug(
        torch.std,
        (torch.tensor([1e-30, 2e-30, 5e-30, 9e-30]),),
        "compile-static",
        operators=("std", "std.unbiased", "std_mean", "std_mean.unbiased", "var", "var.unbiased"),
        note="no sample is so small that its squares are 0 in float32",
    )


def pytorch_197108() -> Bug:
    """Inductor gives 0 as the mean of an empty tensor in `var_mean`, eager NaN."""
    return Bug(
        torch.var_mean,
        (torch.zeros(0),),
        "compile-static",
        operators=("var_mean", "var_mean.unbiased", "std_mean", "std_mean.unbiased"),
        labels=r"out\['c = .*\((0, 5|3, 0)\).*torch\.var_mean\(.*|out\['(std|var)_mean of an empty .*",
        note="samples whose results are not finite are left out, and no sample is empty",
    )


def pytorch_191499() -> Bug:
    """Inductor gives 0 as the place of the least of many positive int8 numbers."""
    numbers = [5, 3, 100, 3, 7, 8, 9, 13, 100, 120, 127, 2, 6, 4, 11, 12, 90, 80]
    return Bug(
        lambda x: (torch.amin(x), torch.argmin(x)),
        (torch.tensor(numbers, dtype=torch.int8),),
        "compile-static",
        operators=("amin", "argmin", "min.reduction_no_dim", "min.reduction_with_dim", "aminmax"),
        labels=r"out\['u?int8, reductions'\]\[[234]\]",
        note="no sample of OpInfo reduces 16 positive numbers of eight bits; the families of values do",
    )


def pytorch_151510() -> Bug:
    """Inductor converts the largest int64 that `nan_to_num` puts in place of infinity to the least one."""
    return Bug(
        lambda x: torch.nan_to_num(x, nan=0, posinf=INT64.max, neginf=INT64.min).long(),
        (torch.tensor([[INFINITE, 2.0]]),),
        "compile-static",
        note="a float beyond int64 is converted in no program: torch leaves the result open",
    )


def pytorch_185605() -> Bug:
    """Inductor does not round a number of higher precision to bfloat16 before it is added to a bfloat16 tensor."""
    return Bug(
        torch.add,
        (torch.tensor([[0.1, -0.2, 1.0]]).bfloat16(), torch.tensor(-0.1)),
        "compile-static",
        labels=r"out\['(add bfloat16 \d+'|v = torch\.(add|sub|rsub)\(.*f\.bfloat16\(\).*\bs\b).*"
        r"|out\['(add|sub) (bfloat16 \d+'\].*|of bfloat16 and 0\.1'\]\[1\])",
        note="both operands of a sample have the same dtype",
    )


def pytorch_185464() -> Bug:
    """Decomposition of `multilabel_margin_loss` goes on behind the target -1, which ends a row."""
    return Bug(
        functional.multilabel_margin_loss,
        (torch.tensor([[0.8, -1.2, 0.4, 0.1]]), torch.tensor([[3, 0, -1, 2]])),
        "compile-aot-eager",
        operators=("nn.functional.multilabel_margin_loss",),
        note="no sample has targets behind a -1",
    )


def pytorch_194347() -> Bug:
    """Inductor gives 0 as the minimum of -0 and 0, eager -0."""
    return Bug(
        lambda x, y: torch.copysign(torch.ones_like(x), torch.minimum(x, y)),
        (torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 2.0])),
        "compile-static",
        operators=("minimum", "maximum"),
        labels=r"out\['v = torch\.(minimum|maximum)\(a, b\).*|out\['(minimum|maximum)'\]",
        workloads=r"sign-\d+|values-signs",
        note="zeros of both signs count as equal, and no program reads the sign of that of a minimum",
    )


def pytorch_186875() -> Bug:
    """Inductor computes a `remainder` before it rounds 1.7 to bfloat16: the result is off by a period."""
    return Bug(
        lambda x: torch.remainder(x.bfloat16(), 1.7),
        (torch.tensor([-1.703125, 3.5]),),
        "compile-static",
        labels=r"out\['(remainder bfloat16 \d+'|v = torch\.remainder\(f\.bfloat16\(\), (1\.7|0\.1)\)).*"
        r"|out\['remainder (bfloat16 \d+|of bfloat16 and 1\.7)'\].*",
        note="no sample has a Python number that bfloat16 rounds, and a dividend that is a multiple of it",
    )


def pytorch_198183() -> Bug:
    """Inductor gives 0 as `erf` of tiny float32 numbers in its vectorised kernel."""
    return Bug(
        lambda x: torch.erf(x) / x,
        (torch.tensor([1e-8, 1e-7, 5e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.5] * 4),),
        "compile-static",
        operators=("erf",),
        labels=r"out\['erf'\].*",
        workloads="values-.*",
        note="no sample of OpInfo is that close to 0; those of the families of values are",
    )


def pytorch_198133() -> Bug:
    """Inductor loses the accuracy of `erfinv` next to 1."""
    return Bug(
        lambda distance: torch.erfinv(1 - distance.double()),
        (torch.tensor([1e-3, 1e-12, 1e-14, 1e-15]),),
        "compile-static",
        operators=("erfinv",),
        labels=r"out\['erfinv( near 1)?'\].*",
        note="no sample of OpInfo is so close to 1; those of the families of values are",
    )


# torch.compile: several operators together.


def pytorch_187018() -> Bug:
    """Inductor does not wrap the negative of uint8 numbers to eight bits before `cat` and `sum`."""

    def function(x: Tensor) -> Tensor:
        y = -x.abs()
        return torch.cat([y, y]).sum()

    return Bug(
        function,
        (torch.tensor([150, 201, 3], dtype=torch.uint8),),
        "compile-static",
        labels=r"out\['v = -?u8; .*torch\.cat\(\[v, v\]\)\.sum\(\)'\]",
        workloads=r"overflow-\d+",
        note="operators stand alone, and each result is stored in its dtype: fused, an overflow goes on in more bits",
    )


def pytorch_189518() -> Bug:
    """Inductor forgets the dtype argument of `cumsum` of ones that are made within the graph."""
    return Bug(
        lambda x: (torch.ones((3, 5), dtype=torch.bool).cumsum(1, dtype=torch.float16), x + 1),
        (torch.ones(2),),
        "compile-static",
        labels=r"out\['c = torch\.(ones|full|zeros)\(.*cumsum\(1, dtype=.*",
        note="operators are given inputs, and never constants that are made within the graph",
    )


def pytorch_194547() -> Bug:
    """Inductor gives a sample of a normal distribution with a float16 mean and a float32 deviation another dtype."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        drawn: Any = torch.distributions.Normal(x.half(), y, validate_args=False)
        return torch.zeros_like(drawn.sample())

    return Bug(
        function,
        (torch.zeros(5), torch.ones(5)),
        "compile-static",
        operators=("normal",),
        labels=r"out\['v = torch\.(normal|distributions\.Normal)\(.*|out\['dtype of (normal|a sample) of .*",
        note="random operators are left out, and no distribution is a workload",
    )


def pytorch_198101() -> Bug:
    """Inductor computes what reads a dtype view of an input only after a later write to that input."""

    def function(x: Tensor) -> Tensor:
        y = x.view(torch.int32) * 3
        y.add_(1)
        x[:, 1:3] = 9
        return y.view(torch.int64)

    return Bug(
        function,
        (torch.arange(-10, 10).reshape(4, 5),),
        "compile-static",
        labels=r"out\['p = .*; a = [xy]\.view\(torch\.int16\).*'\]\[0\]",
        note="an input is written to after a view of it was read: no program of the suite does",
    )


def pytorch_198094() -> Bug:
    """Inductor returns the zeros that are written to an input after `slice_scatter` has read it."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        result = torch.slice_scatter(x, y, dim=0, start=1, end=3)
        x.zero_()
        return result

    return Bug(
        function,
        (torch.arange(15.0).reshape(5, 3), torch.full((2, 3), 7.0)),
        "compile-static",
        labels=r"out\['zero, scattered'\]",
        note="an input is written to after it was read",
    )


def pytorch_197829() -> Bug:
    """Inductor copies rows one row down over memory that it has yet to read, although the source is cloned."""

    def function(x: Tensor) -> Tensor:
        x[1:] = x[:-1].clone()
        return x

    return Bug(
        function,
        (torch.arange(40.0).reshape(5, 8),),
        "compile-static",
        labels=r"input\['(shifted, |p = .*; p\[1:\] = p\[:-1\]\.clone\(\); ).*'\]",
        workloads=r"writes|late-writes|mutation-\d+",
        note="an input is written to through a view that overlaps its source",
    )


def pytorch_198131() -> Bug:
    """Inductor copies an input through full slices after a later write to it."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x[0:, :] = y[0:, :]
        y.add_(1)
        return x, y

    return Bug(
        function,
        (torch.zeros(2, 3), torch.arange(6.0).reshape(2, 3)),
        "compile-static",
        labels=r"input\['p = .*; p\[0:\] = q\[0:\]; q\.add_\(1\); .*'\]",
        workloads=r"mutation-\d+",
        note="one input is written to from another, which is then written to: no program of the suite does",
    )


def pytorch_185509() -> Bug:
    """Inductor computes wrong gradients of a bilinear `interpolate`, a convolution and a pooling behind a `where`."""

    def function(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        scaled = functional.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
        y = functional.conv2d(scaled[:, :, 1:7, 1:8], weight, bias, padding=1)
        return torch.where(mask, y, functional.max_pool2d(y, kernel_size=3, stride=1, padding=1))

    shapes = (2, 3, 6, 8), (4, 3, 3, 3), (4,), (2, 4, 6, 7)
    x, weight, bias, mask = (_numbers(*shape, low=-2, high=2) for shape in shapes)
    return Bug(
        function,
        (x, weight, bias, mask > 0),
        "compile-static",
        backward=True,
        labels=r"grad:input\[.*mode='bilinear'.*F\.conv2d\(.*torch\.where\(m.*F\.max_pool2d\(v, 3, 1, 1\).*",
        workloads=r"chain-\d+",
        note="five operators together; the networks of the suite have no such row",
    )


def pytorch_190855() -> Bug:
    """Inductor adds a constant to every entry of the Hessian of a function with `trace`."""

    def function(x: Tensor) -> Any:
        return torch.func.hessian(lambda y: torch.trace(y) * torch.trace(y @ y))(x)

    return Bug(
        function,
        (torch.arange(4.0).reshape(2, 2) + 1,),
        "compile-static",
        labels=r"out\['f = lambda y: torch\.trace\(y\).*hessian.*",
        note="no program of the suite compiles a transform of torch.func",
    )


def pytorch_145466() -> Bug:
    """Inductor does not round a float16 cosine before `floor`, so that 1 becomes 0."""
    return Bug(
        lambda x: torch.floor(torch.cos(x.half())),
        (torch.arange(64) * 0.001,),
        "compile-static",
        note="roundings between fused operators of half precision: the suite grants float32 in between",
    )


def pytorch_198064() -> Bug:
    """Dynamo gives the size itself as `round(size, -1)` of a symbolic size."""
    return Bug(
        lambda x: x * round(x.shape[0] * 5, -1),
        (torch.ones(3, 2),),
        "compile-dynamic",
        labels=r"out\['n = x\.shape\[0\]; x \* round\(n \* 5, -1\)'\]",
        note="no program of the suite computes with Python's functions of symbolic sizes",
    )


def pytorch_185517() -> Bug:
    """Inductor gives no gradient of `margin_ranking_loss` at a margin that bfloat16 rounds."""
    return Bug(
        lambda x, y: functional.margin_ranking_loss(x, y, torch.ones(2, dtype=torch.bfloat16), margin=1.7),
        (torch.tensor([1.703125, 1.703125]).bfloat16(), torch.zeros(2).bfloat16()),
        "compile-static",
        backward=True,
        operators=("nn.functional.margin_ranking_loss",),
        labels=r"grad:input\[.*F\.margin_ranking_loss\(.*",
        workloads=r"threshold-\d+",
        note="no sample lies at the margin, and gradients of bfloat16 are not compiled",
    )


# torch.func and derivatives of derivatives.


def _slope(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The first derivative of a function of one number, by `jvp`."""

    def derivative(t: Tensor) -> Tensor:
        tangent: Tensor = torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]
        return tangent

    return derivative


SECOND = "no program of the suite takes a forward derivative of a forward derivative"


def pytorch_196682() -> Bug:
    """Forward mode gives a wrong tangent of `cholesky_inverse`."""

    def function(t: Tensor) -> Tensor:
        zero, ones = torch.zeros_like(t), torch.ones_like(t)
        return torch.cholesky_inverse(torch.stack([t * t + 1, zero, t - 2, 3 * ones]).reshape(2, 2))

    return Bug(
        function,
        (torch.tensor(0.4),),
        "func-jvp",
        operators=("cholesky_inverse",),
        note="OpInfo's samples of linear algebra are tried by their results alone",
    )


def pytorch_196694() -> Bug:
    """Forward mode gives a wrong tangent of `cholesky_solve` where the right-hand side is broadcast."""

    def function(t: Tensor) -> Tensor:
        zero, ones = torch.zeros_like(t), torch.ones_like(t)
        factor = torch.stack([ones, zero, t, 2 * ones, 2 * ones, zero, -t, ones]).reshape(2, 2, 2)
        return torch.cholesky_solve(torch.tensor([[1.0, 5.0], [3.0, 4.0]], dtype=t.dtype), factor)

    return Bug(
        function,
        (torch.tensor(1.5),),
        "func-jvp",
        operators=("cholesky_solve",),
        note="no sample has as many columns as batches, and a right-hand side without batches",
    )


def pytorch_192540() -> Bug:
    """Forward mode gives a wrong second derivative of `linalg.solve`, and of `det` and `slogdet`, which factorise."""

    def function(t: Tensor) -> Tensor:
        ones = torch.ones_like(t)
        matrix = torch.stack([t + 2, ones, ones, t * t + 1]).reshape(2, 2)
        solution: Tensor = torch.linalg.solve(matrix, torch.stack([ones, 2 * ones]))
        return solution

    return Bug(
        _slope(function),
        (torch.tensor(0.6),),
        "func-jvp",
        labels=r"out\['(solve(, [a-z ]+)?|det|slogdet), (ff|rf)'\]",
        workloads="derivatives",
        also=("eager",),
        note=SECOND,
    )


def pytorch_196698() -> Bug:
    """Forward mode gives a wrong second derivative of `linalg.householder_product`."""

    def function(t: Tensor) -> Tensor:
        reflector = torch.stack([torch.ones_like(t), t]).reshape(2, 1)
        product: Tensor = torch.linalg.householder_product(reflector, (t + 1).reshape(1))
        return product

    return Bug(
        _slope(function),
        (torch.tensor(0.5),),
        "func-jvp",
        labels=r"out\['householder_product, (ff|rf)'\]",
        workloads="derivatives",
        also=("eager",),
        note=SECOND,
    )


def pytorch_196701() -> Bug:
    """Forward mode gives a wrong second derivative of `cumprod` where a factor is 0."""

    def function(t: Tensor) -> Tensor:
        return torch.cumprod(torch.stack([t + 1, t - 2, t * t, 3 - t]), 0)

    return Bug(
        _slope(function),
        (torch.tensor(2.0),),
        "func-jvp",
        labels=r"out\['cumprod dim=0 of zeros, (ff|rf)'\]",
        workloads="derivatives",
        also=("eager",),
        note=SECOND,
    )


def pytorch_197867() -> Bug:
    """Nested `jacfwd` loses the second derivative of an `autograd.Function` with a `jvp` of its own."""
    from accelcheck.workloads.derivatives import Cube

    def cubes(x: Tensor) -> Tensor:
        result: Tensor = Cube.apply(x).sum()  # type: ignore[no-untyped-call]  # untyped in torch
        return result

    return Bug(
        torch.func.jacfwd(cubes),
        (torch.tensor([2.0, 0.5]),),
        "func-jacfwd",
        labels=r"out\['a function of its own, ff'\]",
        workloads="derivatives",
        also=("eager",),
        note=SECOND,
    )


def pytorch_192521() -> Bug:
    """Second derivative of `linalg.det` under `torch.func` is NaN where singular values are equal."""
    return Bug(
        torch.func.grad(torch.linalg.det),
        (torch.tensor([[0.6, -0.8], [0.8, 0.6]]),),
        "func-jacrev",
        labels=r"out\['det of a rotation, (fr|rr)'\]",
        workloads="derivatives",
        also=("eager",),
        note="no program of the suite takes a second derivative at equal singular values",
    )


def _third(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The third derivative of the weighted sum of a function of ``(4, 1)``, on a curve through it."""
    with torch.enable_grad():
        t = t.detach().clone().requires_grad_()
        y = function(torch.stack([t, t * t, 1 - t, 2 * t * t * t]).reshape(4, 1))
        (y,) = (y.reshape(-1) @ torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=t.dtype)).reshape(1)
        for _ in range(3):
            (y,) = torch.autograd.grad(y, t, create_graph=True)
    return y.detach()


def _normed(x: Tensor) -> Tensor:
    """The numbers of a column, without their mean, and divided by their deviation."""
    apart = x - x.mean(0)
    return apart / (apart.square().mean(0) + 0.1).sqrt()


THIRD = "the oracle is the same formula in FP64; no third derivative is held against differences"


def pytorch_186256() -> Bug:
    """Autograd gives a wrong third derivative of `batch_norm` with the statistics of the batch."""
    at = torch.tensor(0.7)
    return Bug(
        lambda t: _third(lambda x: functional.batch_norm(x, None, None, training=True, eps=0.1), t),
        (at,),
        "eager",
        right=lambda: _third(_normed, at),
        labels=r"out\['batch_norm, (fff|frr|rrr)'\]",
        workloads="derivatives",
        note=THIRD,
    )


def pytorch_175754() -> Bug:
    """Autograd gives a wrong third derivative of `layer_norm`."""
    at = torch.tensor(0.7)
    return Bug(
        lambda t: _third(lambda x: functional.layer_norm(x.t(), (4,), eps=0.1).t(), t),
        (at,),
        "eager",
        right=lambda: _third(_normed, at),
        labels=r"out\['layer_norm(, weighted)?, (fff|frr|rrr)'\]",
        workloads="derivatives",
        note=THIRD,
    )


def pytorch_158610() -> Bug:
    """A function under `vmap` sees tensors that ask for no gradient, and takes the other branch."""
    return Bug(
        lambda x: x - 1 if x.requires_grad else x + 1,
        (torch.zeros(3, requires_grad=True),),
        "func-vmap",
        backward=True,
        note="no program of the suite branches on requires_grad",
    )


# ONNX Runtime, OpenVINO, TorchScript, torchao.


def onnxscript_2589() -> Bug:
    """Export to ONNX divides large integers in float32 with `rounding_mode="trunc"`."""
    return Bug(
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        (torch.tensor([100000007, -2147483001, 4611686018427387905]), torch.tensor([3, 7, 2])),
        "onnxruntime",
        operators=("div.trunc_rounding",),
        labels=r"out\['int(32|64), (full-width )?quotients'\]\[3\]",
        note="no integer of a sample has more than 24 bits",
    )


def onnxscript_2479() -> Bug:
    """Attention in ONNX Runtime gives the mean of the values for a query whose keys are all masked, torch 0."""
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 1, :] = False
    return Bug(
        lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        (_numbers(1, 1, 4, 8), _numbers(1, 1, 4, 8, low=-2), _numbers(1, 1, 4, 8, high=2), mask),
        "onnxruntime",
        operators=("nn.functional.scaled_dot_product_attention",),
        labels="out",
        workloads="attention-empty-row",
        note="no sample masks every key of a query; a workload does",
    )


def onnxruntime_30513() -> Bug:
    """ONNX Runtime fuses a normalisation by means of rows that broadcast over columns to a layer norm."""

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        apart = x - x.mean(-1)
        return apart / torch.sqrt((apart**2).mean(-1) + 1e-5) * weight + bias

    return Bug(
        function,
        (_numbers(4, 4), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, 0.0, 0.0, 1.0])),
        "onnxruntime",
        labels=r"out\['c = x - x\.mean\(-1\); .*",
        note="a pattern that a runtime takes for another: no program of the suite resembles a layer norm",
    )


def onnxruntime_24819() -> Bug:
    """ONNX Runtime passes over NaN in `max_pool1d`."""
    return Bug(
        lambda x: functional.max_pool1d(x, 2),
        (torch.tensor([[[1.0, NAN, NAN, 2.0, NAN, NAN, 3.0, 4.0]]]),),
        "onnxruntime",
        operators=("nn.functional.max_pool1d", "nn.functional.max_pool2d", "nn.functional.max_pool3d"),
        labels=r"out\['F\.max_pool[12]d\(n.*|out\['max_pool[123]d.*",
        workloads=r"pattern-\d+|values-windows",
        note="samples whose results are not finite are left out, and families are not run with NaN",
    )


def onnxruntime_24711() -> Bug:
    """ONNX Runtime fuses a quantized convolution to integer sums that saturate on a processor without VNNI."""
    import torch.ao.quantization.fx._decomposed  # registers the operators

    quantized: Any = torch.ops.quantized_decomposed
    weight = torch.where(_numbers(4, 8, 3, 3) > -0.5, 127, -127).to(torch.int8)

    def rounded(x: Tensor, scale: float) -> Tensor:
        levels = quantized.quantize_per_tensor(x.float(), scale, 0, 0, 255, torch.uint8)
        result: Tensor = quantized.dequantize_per_tensor(levels, scale, 0, 0, 255, torch.uint8)
        return result

    def function(x: Tensor) -> Tensor:
        kernel = quantized.dequantize_per_tensor(weight, 1 / 127, 0, -127, 127, torch.int8)
        return rounded(functional.conv2d(rounded(x, 1 / 255), kernel), 0.3)

    return Bug(
        function,
        (_numbers(1, 8, 6, 6, low=0.8),),
        "onnxruntime",
        labels=r"out\['grid\(F\.conv2d\(.*",
        note="no quantized network is exported to ONNX",
    )


def openvino_35830() -> Bug:
    """OpenVINO divides large integers in float32."""
    return Bug(
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        (
            torch.tensor([123456789, 2000000011, -2147483001, 50], dtype=torch.int32),
            torch.tensor([5, 7, 3, 7], dtype=torch.int32),
        ),
        "openvino",
        operators=("div.trunc_rounding", "div.floor_rounding", "floor_divide"),
        labels=r"out\['int(32|64), (full-width )?quotients'\]\[[03]\]",
        note="no integer of a sample has more than 24 bits",
    )


def openvino_35838() -> Bug:
    """OpenVINO computes `pow` of integers in float32."""
    return Bug(
        torch.pow,
        (torch.tensor([7, 11, 21, 3]), torch.tensor([10, 8, 7, 30])),
        "openvino",
        operators=("pow", "__rpow__"),
        labels=r"out\['int(32|64), powers'\].*",
        note="no power of integers in a sample has more than 24 bits",
    )


def openvino_35928() -> Bug:
    """OpenVINO forgets what came before a NaN in `amin`."""
    return Bug(
        lambda x: torch.amin(x, 0),
        (torch.tensor([1.0, 3.0, NAN, 4.0]),),
        "openvino",
        operators=("amin", "amax", "min.reduction_with_dim", "max.reduction_with_dim"),
        note="samples whose results are not finite are left out, and families are not run with NaN",
    )


def openvino_35886() -> Bug:
    """OpenVINO gives another place than that of the NaN in `argmin`."""
    return Bug(
        lambda x: torch.argmin(x, 0),
        (torch.tensor([3.0, NAN, 5.0, 0.5]),),
        "openvino",
        operators=("argmin", "argmax"),
        note="no sample has a NaN, and families are not run with NaN",
    )


def openvino_33518() -> Bug:
    """OpenVINO saturates sums, differences and products of uint8 numbers, torch wraps them."""
    return Bug(
        lambda x, y: (x + y, x - y, x * y),
        (torch.tensor([200, 10, 255], dtype=torch.uint8), torch.tensor([100, 20, 2], dtype=torch.uint8)),
        "openvino",
        operators=("add", "sub", "mul"),
        labels=r"out\['uint8, sums'\].*",
        note="no sample of uint8 overflows",
    )


class RemainderInPlace(nn.Module):
    """The remainder of a division by 2.5, in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y %= 2.5
        return y


def pytorch_133847() -> Bug:
    """TorchScript computes `%=` of a tensor with the sign of the dividend, Python with that of the divisor."""
    return Bug(
        RemainderInPlace(),
        (torch.tensor([-7.0, -3.0, 4.0, -0.5]),),
        "jit-script",
        labels=r"out\['y = .*; y %= .*",
        note="operators are traced, and never scripted: no program of the suite has the operators of Python's language",
    )


def torchao_1662() -> Bug:
    """Linear layer with int8 weights in float16 overflows before its sums are scaled."""
    module = nn.Linear(256, 32).half().eval()
    with torch.no_grad():
        module.weight.copy_(_numbers(32, 256, low=-3, high=3))
        module.bias.zero_()
    return Bug(
        module,
        ((40 * _numbers(4, 256)).half(),),
        "int8-torchao-weight-only",
        note="quantized layers are run in float32, and never in float16",
    )


# Eager on a CPU: the oracle is the same operator in FP64, and has what the operator has in every precision.

SAME_KERNEL = "the FP64 oracle has the same branch: {}"
NOT_FINITE = "samples whose results are not finite are left out"


def pytorch_132614() -> Bug:
    """Incomplete gamma functions give numbers for NaN."""
    return Bug(
        lambda x, y: (torch.special.gammainc(x, y), torch.special.gammaincc(x, y)),
        (torch.tensor([INFINITE, NAN, NAN]), torch.tensor([NAN, 0.0, INFINITE])),
        "eager",
        right=lambda: (torch.full((3,), NAN), torch.full((3,), NAN)),
        operators=("igamma", "igammac"),
        labels=r"out\['gammaincc?'\]",
        workloads="known-values",
        note=SAME_KERNEL.format("NaN becomes a number in any precision"),
    )


def pytorch_187294() -> Bug:
    """Zeta function gives NaN for an infinite second argument, and not 0."""
    return Bug(
        torch.special.zeta,
        (torch.tensor([2.0, 3.5]), torch.tensor([INFINITE, INFINITE])),
        "eager",
        right=lambda: torch.zeros(2),
        operators=("special.zeta",),
        labels=r"out\['zeta'\]",
        workloads="known-values",
        note=SAME_KERNEL.format("an infinite argument gives NaN in any precision"),
    )


def pytorch_192293() -> Bug:
    """Bessel function `i0` overflows in float64 below the largest argument whose result is finite."""

    def right() -> Tensor:
        scaled = torch.special.i0e(torch.tensor([713.0], dtype=torch.float64))
        half = math.exp(713 / 2)  # exp(713) alone would overflow
        result: Tensor = scaled * half * half
        return result

    return Bug(
        torch.special.i0,
        (torch.tensor([713.0], dtype=torch.float64),),
        "eager",
        right=right,
        operators=("i0",),
        labels=r"out\['i0 of 713'\].*",
        workloads="known-values",
        note="FP64 is the precision of the oracle, and of no candidate",
    )


def pytorch_186640() -> Bug:
    """Trigamma function gives large numbers at its poles on the negative integers, and not infinity."""
    return Bug(
        lambda x: torch.special.polygamma(1, x),
        (torch.tensor([-1.0, -2.0, -3.0]),),
        "eager",
        right=lambda: torch.full((3,), INFINITE),
        operators=("polygamma.polygamma_n_1",),
        labels=r"out\['polygamma 1'\]",
        workloads="known-values",
        note=SAME_KERNEL.format("poles give numbers in any precision"),
    )


def pytorch_195075() -> Bug:
    """Gradients of activations at NaN differ between whole vectors and the rest of a tensor."""
    x = torch.full((19,), NAN)
    activations: tuple[Callable[[Tensor], Tensor], ...] = (
        functional.hardtanh,
        functional.hardshrink,
        functional.softshrink,
        functional.elu,
        functional.hardswish,
    )

    def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.func.grad(lambda y: function(y).sum())(x)
        return result

    def one_by_one(function: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([slope(function, x[place : place + 1]) for place in range(19)])

    return Bug(
        lambda x: tuple(slope(function, x) for function in activations),
        (x,),
        "eager",
        right=lambda: tuple(map(one_by_one, activations)),
        operators=("nn.functional.hardtanh", "nn.functional.hardshrink", "nn.functional.elu"),
        labels=r"out\['gradient of (nn\.functional\.)?(hardtanh|hardshrink|softshrink|elu).*",
        workloads="known-elements",
        note=f"{NOT_FINITE}: no gradient is taken at NaN",
    )


class _FastPath(nn.Module):
    """A layer in evaluation mode, with or without torch's fast path, which `forward` takes by default."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        _fill(layer, 0.3)
        self.eval()

    def called(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError("call the layer with these inputs")

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.called(*inputs)

    def slowly(self, *inputs: Tensor) -> Tensor:
        """The result without the fast path."""
        enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad():
                return self.called(*inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)


class _PaddedAttention(_FastPath):
    def called(self, *inputs: Tensor) -> Tensor:
        x, padding = inputs
        out: Tensor = self.layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return out


class _BiasedEncoder(_FastPath):
    def called(self, *inputs: Tensor) -> Tensor:
        x, bias = inputs
        out: Tensor = self.layer(x, src_mask=bias)
        return out


def pytorch_190486() -> Bug:
    """Fast path of `MultiheadAttention` gives NaN for a sample whose keys are all padding."""
    module = _PaddedAttention(nn.MultiheadAttention(8, 2, batch_first=True))
    inputs = _numbers(2, 4, 8), torch.tensor([[False] * 4, [True] * 4])
    return Bug(
        module,
        inputs,
        "eager",
        right=lambda: module.slowly(*inputs),
        labels=r"""out\["layer\('attention'.*key_padding_mask=.*|out\['(attention|encoder), padded'\]""",
        note="no sample of the suite's attention is padding alone",
    )


def pytorch_118628() -> Bug:
    """Fast path of `TransformerEncoderLayer` gives NaN with a mask of numbers."""
    module = _BiasedEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    inputs = _numbers(2, 5, 8), _numbers(5, 5)
    return Bug(
        module,
        inputs,
        "eager",
        right=lambda: module.slowly(*inputs),
        labels=r"""out\["layer\('encoder'.*src_mask=.*|out\['encoder, biased'\]""",
        note="no encoder layer of torch.nn is given a mask of numbers",
    )


def pytorch_194725() -> Bug:
    """Sorting path of `isin` finds integers among float16 numbers that they only equal once they are rounded."""
    integers, halves = torch.arange(4097, 4197, dtype=torch.int32), torch.arange(1.0, 60.0)
    return Bug(
        lambda x, y: torch.isin(x, y.half()),
        (integers, halves),
        "eager",
        right=lambda: (integers.half().reshape(-1, 1) == halves).any(1),
        operators=("isin",),
        labels=r"out\['isin of many, .*",
        workloads="mixed-dtypes",
        note="both operands of a sample have the same dtype",
    )


def pytorch_158738() -> Bug:
    """Search for NaN and infinity in a sorted sequence gives other places than numpy."""
    edges, values = torch.tensor([1.0, 3.0, INFINITE, NAN]), torch.tensor([0.0, 2.0, 4.0, INFINITE, NAN])

    def right() -> tuple[Tensor, Tensor]:
        left = np.searchsorted(edges.numpy(), values.numpy(), "left")
        return torch.from_numpy(left), torch.from_numpy(np.searchsorted(edges.numpy(), values.numpy(), "right"))

    return Bug(
        lambda edges, values: (torch.searchsorted(edges, values), torch.searchsorted(edges, values, right=True)),
        (edges, values),
        "eager",
        right=right,
        operators=("searchsorted", "bucketize"),
        labels=r"out\['searches'\].*",
        workloads="known-answers",
        note=SAME_KERNEL.format("NaN is compared as a number in any precision"),
    )


def pytorch_149097() -> Bug:
    """Range in int64 with a fractional end has one element fewer than in int32."""
    return Bug(
        lambda x: torch.arange(0, 1.5, 1, dtype=torch.int64) + 0 * x,
        (torch.zeros(1),),
        "eager",
        right=lambda: torch.arange(0, 1.5, 1, dtype=torch.int32).float(),
        operators=("arange",),
        labels=r"out\['arange, int64'\].*",
        workloads="known-answers",
        note=SAME_KERNEL.format("its integers are those of the candidate"),
    )


def pytorch_194699() -> Bug:
    """Gradient of `prod` under `torch.func` is NaN where the product overflows beside zeros."""
    x = torch.tensor([0.0, 5.0, 0.0, 1e20, 1e20, 2.0])

    def right() -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(torch.prod(leaf), leaf)[0]

    return Bug(
        torch.func.grad(torch.prod),
        (x,),
        "eager",
        right=right,
        operators=("prod",),
        labels=r"out\['gradient of prod of .*",
        workloads="known-answers",
        note="no product of a sample overflows beside zeros",
    )


def pytorch_139464() -> Bug:
    """Quantization per channel multiplies by the reciprocal of the scale, so that ties go to the wrong level."""
    x = torch.tensor([[757.5, 22.5, 37.5]])

    def function(x: Tensor) -> Tensor:
        return torch.quantize_per_channel(x.float(), torch.tensor([15.0]), torch.tensor([0]), 0, torch.qint8).int_repr()

    return Bug(
        function,
        (x,),
        "eager",
        right=lambda: torch.round(x / 15).to(torch.int8),
        labels=r"out\['levels by channel, .*",
        workloads="known-levels",
        note="OpInfo has no operators of quantized tensors",
    )


def pytorch_153358() -> Bug:
    """Dequantization of int32 levels overflows where the zero point is subtracted."""
    levels = torch.tensor([2147483647, 0, -2147483648], dtype=torch.int32)
    return Bug(
        lambda x: torch.dequantize(torch._make_per_tensor_quantized_tensor(x, 1e-9, -2147483648)),  # noqa: SLF001
        (levels,),
        "eager",
        right=((levels.double() + 2147483648) * 1e-9).float,
        labels=r"out\['numbers, zero .*",
        workloads="known-levels",
        note="OpInfo has no operators of quantized tensors",
    )


def pytorch_177839() -> Bug:
    """Logit with an eps above one half gives another sign in whole vectors than in the rest of a row."""
    x = torch.full((2, 24), 0.3)
    return Bug(
        lambda x: torch.special.logit(x[:, :19], eps=0.51),
        (x,),
        "eager",
        right=lambda: torch.cat([torch.special.logit(x[:, place : place + 1], eps=0.51) for place in range(19)], 1),
        operators=("logit",),
        labels=r"out\['logit eps=0\.75'\].*",
        workloads="known-elements",
        note="no sample has an eps above one half",
    )
