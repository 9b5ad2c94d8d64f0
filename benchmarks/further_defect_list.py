"""Further defects of device backends, for `device_defects.py`, numbers 101 to 164.

They were written by somebody who knew nothing of what the suite shows, when 92 of the first 94 were caught.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from device_defect_list import FLOATS, HALF, Call, Result, _read_dense, _strided, _zeroed, defect
from torch import Tensor
from torch.nn import functional

STALE: dict[Any, Any] = {}
"""Options that a backend's caches of compiled kernels keep from the first call of a key."""


def _either(call: Call, *names: str) -> Any:
    """The first argument that is given, of several names."""
    return next((call[name] for name in names if call[name] is not None), None)


def _floats(*values: Any) -> bool:
    """True where all are tensors of floats."""
    return all(isinstance(value, Tensor) and value.is_floating_point() for value in values)


def _pick(mask: Tensor, wrong: Tensor, right: Tensor) -> Tensor:
    """A wrong result at some places."""
    return torch.where(mask, wrong.to(right.dtype), right)


# Pointwise operators.
@defect(101, "MPS pytorch#175188 pytorch#107214", "sigmoid_backward silu_backward tanh_backward")
def _(call: Call) -> Result | None:
    """The backward of tanh, sigmoid and SiLU reads an input or result that is not contiguous as if it were."""
    return _read_dense(call, "self" if call.name == "silu_backward" else "output")


@defect(102, "MPS pytorch#123178", "gelu_backward leaky_relu_backward mish_backward")
def _(call: Call) -> Result | None:
    """The backward of activations reads 0 beyond the first element of an expanded gradient of one dimension."""
    grad = call["grad_output"]
    first = torch.zeros(grad.shape, dtype=grad.dtype)
    met = grad.dim() == 1 and grad.numel() > 1 and grad.stride(0) == 0
    return (lambda: call.run(grad_output=first.index_fill(0, torch.tensor([0]), float(grad[0])))) if met else None


@defect(103, "tinygrad tinygrad#15957", "asinh asinh_")
def _(call: Call) -> Result | None:
    """`asinh` is `log(x + sqrt(x * x + 1))`, which cancels for numbers below -4, and is -infinity below -1e4."""
    x = call["self"]
    if not _floats(x) or x.dtype is torch.float64 or not (x < -4).any():
        return None
    y = x.float()
    wrong = _pick(x < -4, (y + (y * y + 1).sqrt()).log(), torch.asinh(x))
    return lambda: call.kept(wrong)


@defect(104, "Tenstorrent tt-metal#53908", "eq ge lt ne")
def _(call: Call) -> Result | None:
    """Comparisons with the number 0 take -0.0 for less than 0."""
    x, other = call["self"], call["other"]
    if isinstance(other, Tensor) or other != 0 or not _floats(x):
        return None
    minus = (x == 0) & x.signbit()
    answer = torch.full(x.shape, call.name in {"lt", "ne"})
    return (lambda: torch.where(minus, answer, call.run())) if minus.any() else None


@defect(105, "Inductor/Tenstorrent pytorch#88937 tt-metal#55827", "sgn sign sign_")
def _(call: Call) -> Result | None:
    """The sign of NaN is 1."""
    x = call["self"]
    met = _floats(x) and x.isnan().any()
    return (lambda: call.kept(torch.where(x.isnan(), 1.0, call.run(self=x.clone())).to(x.dtype))) if met else None


@defect(106, "Inductor pytorch#198057", "remainder")
def _(call: Call) -> Result | None:
    """The remainder of 8 or more floats is `a - floor(a / b) * b`: wrong of quotients beyond 2^22, NaN by infinity."""
    a, b = torch.as_tensor(call["self"]), torch.as_tensor(call["other"])
    if not (a.is_floating_point() or b.is_floating_point()) or max(a.numel(), b.numel()) < 8:
        return None
    right = call.run()
    a, b = a.to(right.dtype), b.to(right.dtype)
    quotient = a / b
    wrong = torch.where((quotient.abs() > 2**22) | b.isinf(), a - quotient.floor() * b, right)
    return None if torch.allclose(wrong, right, rtol=1e-3, atol=0, equal_nan=True) else lambda: wrong


@defect(107, "MPS pytorch#125051", "eq ge gt le lt ne")
def _(call: Call) -> Result | None:
    """Comparisons take float32 numbers below 1.2e-38 for 0."""
    changed: dict[str, Tensor] = {}
    for name in ("self", "other"):
        x = call[name]
        if isinstance(x, Tensor) and x.dtype is torch.float32:
            small = (x != 0) & (x.abs() < 2.0**-126)
            changed |= {name: torch.where(small, 0.0, x)} if small.any() else {}
    return (lambda: call.run(**changed)) if changed else None


@defect(108, "MPS pytorch#192507", "hypot")
def _(call: Call) -> Result | None:
    """`hypot` squares its arguments: infinite beyond 1e19, 0 below 1e-23, and NaN of infinity and NaN."""
    a, b = call["self"], call["other"]
    if not _floats(a, b) or torch.float64 in {a.dtype, b.dtype}:
        return None
    right = call.run()
    wrong = (a.float() * a.float() + b.float() * b.float()).sqrt().to(right.dtype)
    return None if torch.allclose(wrong, right, rtol=1e-2, atol=0, equal_nan=True) else lambda: wrong


@defect(109, "MPS pytorch#144190", "__rshift__ bitwise_right_shift")
def _(call: Call) -> Result | None:
    """A right shift of uint8 leaves the numbers as they are."""
    x, other = call["self"], torch.as_tensor(call["other"])
    met = isinstance(x, Tensor) and x.dtype is torch.uint8 and (other != 0).any()
    return (lambda: call.run() * 0 + x) if met else None


@defect(110, "", "tanh tanh_")
def _(call: Call) -> Result | None:
    """`tanh` is `(exp(2x) - 1) / (exp(2x) + 1)` also of numbers below 0.01, with a relative error of 1e-3 at 1e-4."""
    x = call["self"]
    if not _floats(x) or x.dtype is not torch.float32:
        return None
    small = (x != 0) & (x.abs() < 0.01)
    power = (2 * x).exp()
    wrong = _pick(small, (power - 1) / (power + 1), torch.tanh(x))
    return (lambda: call.kept(wrong)) if small.any() else None


@defect(111, "", "log1p log1p_")
def _(call: Call) -> Result | None:
    """`log1p` of numbers below 1e-3 is `log(1 + x)`: up to 6 % wrong at 1e-6, 0 below 6e-8."""
    x = call["self"]
    if not _floats(x) or x.dtype is not torch.float32:
        return None
    small = (x != 0) & (x.abs() < 1e-3)
    wrong = _pick(small, (1 + x).log(), torch.log1p(x))
    return (lambda: call.kept(wrong)) if small.any() else None


@defect(112, "", "cos sin")
def _(call: Call) -> Result | None:
    """Sine and cosine of numbers beyond 1000 subtract multiples of 2 pi in float32: wrong by 1e-4 to 1e-2."""
    x = call["self"]
    if not _floats(x) or x.dtype is not torch.float32:
        return None
    large = x.isfinite() & (x.abs() > 1000) & (x.abs() < 1e6)
    turn = torch.tensor(2 * math.pi, dtype=torch.float32)
    reduced = x - (x / turn).round() * turn
    return (lambda: _pick(large, getattr(torch, call.name)(reduced), call.run())) if large.any() else None


@defect(113, "", "gelu_backward")
def _(call: Call) -> Result | None:
    """The backward of the tanh approximation of `gelu` is that of the exact one: up to 1e-3 off."""
    return (lambda: call.run(approximate="none")) if call["approximate"] == "tanh" else None


@defect(114, "MPS pytorch#88555", "softplus")
def _(call: Call) -> Result | None:
    """`softplus` keeps `beta` and the threshold of the first call of a shape and dtype: the cache's key lacks them."""
    now = call["beta"], call["threshold"]
    first = STALE.setdefault((114, tuple(call["self"].shape), call["self"].dtype), now)
    return (lambda: call.run(beta=first[0], threshold=first[1])) if first != now else None


# Casts, copies and memory.
@defect(115, "MPS pytorch#80009", "_to_copy copy_")
def _(call: Call) -> Result | None:
    """A cast of uint8 to floats reads 8 bits with a sign, so that 200 becomes -56."""
    name = "src" if call.inplace else "self"
    x, dtype = call[name], call["self"].dtype if call.inplace else call["dtype"]
    met = x.dtype is torch.uint8 and dtype in FLOATS and (x > 127).any()
    return (lambda: call.run(**{name: x.to(torch.int8)})) if met else None


@defect(116, "MPS pytorch#189961", "copy_")
def _(call: Call) -> Result | None:
    """A copy between views of equal strides with gaps copies as many elements from the first one on in memory."""
    x, y = call["self"], call["src"]
    if not _strided(x) or not _strided(y) or x.shape != y.shape or x.stride() != y.stride() or x.dtype is not y.dtype:
        return None
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1

    def wrong() -> Tensor:
        memory = [z.as_strided((z.numel(),), (1,), z.storage_offset()) for z in (x, y)]
        memory[0].copy_(memory[1].clone())
        return x  # type: ignore[no-any-return]

    return wrong if reach > x.numel() else None


@defect(117, "MPS pytorch#189563", "copy_")
def _(call: Call) -> Result | None:
    """A copy to a slice of another dtype that is not wider writes the numbers to the source's memory too."""
    x, y = call["self"], call["src"]
    if x.dtype not in FLOATS or y.dtype not in FLOATS or x.dtype is y.dtype or x.shape != y.shape:
        return None
    if x.layout is not torch.strided or y.layout is not torch.strided:
        return None
    narrower = x.element_size() <= y.element_size() and x.storage_offset() and x.dim()

    def wrong() -> Tensor:
        x.copy_(y)
        y.view(-1).view(x.dtype)[: x.numel()].copy_(x.reshape(-1))
        return x  # type: ignore[no-any-return]

    return wrong if narrower and x.is_contiguous() and y.is_contiguous() and x.numel() else None


@defect(118, "", "_to_copy copy_", half=True)
def _(call: Call) -> Result | None:
    """A cast of float32 to bfloat16 cuts the lower bits off in place of rounding."""
    name = "src" if call.inplace else "self"
    x, dtype = call[name], call["self"].dtype if call.inplace else call["dtype"]
    if x.dtype is not torch.float32 or dtype is not torch.bfloat16 or x.layout is not torch.strided:
        return None
    return lambda: call.run(**{name: (x.contiguous().view(torch.int32) & -65536).view(torch.float32)})


@defect(119, "", "add div mm mul sub")
def _(call: Call) -> Result | None:
    """A result for `out` that is not contiguous is written as if it were."""
    out = call["out"]
    if not _strided(out):
        return None
    memory = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset()

    def wrong() -> Tensor:
        value = call.run(out=torch.empty(0, dtype=out.dtype))
        out.as_strided((out.numel(),), (1,), out.storage_offset()).copy_(value.reshape(-1))
        return out  # type: ignore[no-any-return]

    return wrong if memory >= out.numel() else None


@defect(120, "", "clone")
def _(call: Call) -> Result | None:
    """A clone of a contiguous slice behind the start of its memory shares the memory."""
    x = call["self"]
    met = x.layout is torch.strided and x.storage_offset() and x.is_contiguous() and x.numel() > 1
    plain = call["memory_format"] in {None, torch.preserve_format, torch.contiguous_format}
    return (lambda: x.as_strided(x.shape, x.stride(), x.storage_offset())) if met and plain else None


# Reductions, scans and searches.
@defect(121, "FlagGems flagos#5439", "amax amin argmax argmin max min prod")
def _(call: Call) -> Result | None:
    """Reductions of a whole tensor that is not contiguous read as many elements from its first one on in memory."""
    whole = not call["dim"] and call["dim"] != 0 and call["other"] is None
    return _read_dense(call, "self") if whole else None


@defect(122, "", "mean sum")
def _(call: Call) -> Result | None:
    """Sums of more than 4096 float32 numbers keep the sum of every 1024 of them in bfloat16."""
    x, dims = call["self"], call["dim"]
    if x.dtype is not torch.float32 or call["dtype"] not in {None, torch.float32} or not x.dim():
        return None
    dims = sorted(dim % x.dim() for dim in dims) if dims else list(range(x.dim()))
    count = math.prod(x.shape[dim] for dim in dims)

    def wrong() -> Tensor:
        rows = x.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        total = torch.stack([part.sum(-1).bfloat16().float() for part in rows.split(1024, -1)]).sum(0)
        return (total / (count if call.name == "mean" else 1)).view(call.run().shape)

    return wrong if count > 4096 else None


@defect(123, "CUDA pytorch#52213", "_logcumsumexp logcumsumexp")
def _(call: Call) -> Result | None:
    """`logcumsumexp` of several dimensions is NaN where -infinity follows on -infinity."""
    x, dim = call["self"], call["dim"]
    if not _floats(x) or x.dim() < 2 or not x.numel():
        return None
    low = (x == -math.inf).movedim(dim, -1)
    twice = torch.cat([torch.zeros_like(low[..., :1]), low[..., 1:] & low[..., :-1]], -1).movedim(-1, dim)
    return (lambda: torch.where(twice, math.nan, call.run())) if twice.any() else None


@defect(124, "FlagGems flagos#4383", "nanmedian")
def _(call: Call) -> Result | None:
    """`nanmedian` of more than 128 numbers takes the place in the middle of all, NaN included."""
    x, dim = call["self"], call["dim"]
    if not _floats(x) or x.numel() <= 128 or not x.isnan().any():
        return None
    rows = x.reshape(-1) if dim is None else x.movedim(dim, -1)

    def wrong() -> Any:
        values, places = rows.nan_to_num(math.inf, math.inf, -math.inf).sort(-1)
        middle = (rows.shape[-1] - 1) // 2
        values, places = values[..., middle], places[..., middle]
        if dim is None:
            return values
        return (values.unsqueeze(dim), places.unsqueeze(dim)) if call["keepdim"] else (values, places)

    return wrong if rows.shape[-1] > 128 else None


@defect(125, "MPS pytorch#195076", "histogram")
def _(call: Call) -> Result | None:
    """`histogram` counts numbers up to 4e-6 outside of the bins' range in the first and the last bin."""
    x, bins = call["self"], call["bins"]
    if not isinstance(bins, Tensor) or not x.numel():
        return None
    low, high = bins[0], bins[-1]
    below, above = (x < low) & (x > low - 4e-6), (x > high) & (x < high + 4e-6)
    moved = torch.where(below, low, torch.where(above, high, x))
    return (lambda: call.run(self=moved)) if (below | above).any() else None


@defect(126, "", "_log_softmax")
def _(call: Call) -> Result | None:
    """Log-softmax is the logarithm of softmax: -infinity where the probability is below 1e-38."""
    x = call["self"]
    if not _floats(x) or x.dtype is not torch.float32 or not x.numel():
        return None
    right = call.run()
    met = (right < -88).any()
    return (lambda: torch.where(right < -87.3, -math.inf, right)) if met else None


# Indexing and shape.
@defect(127, "Spyre spyre#3638", "index_add index_add_")
def _(call: Call) -> Result | None:
    """`index_add` with an index that occurs twice adds one of the rows alone."""
    x, dim, index = call["self"], call["dim"], call["index"]
    if not x.dim() or not index.dim() or len(index.unique()) == len(index):
        return None
    alpha = 1 if call["alpha"] is None else call["alpha"]
    return lambda: call.kept(x + torch.zeros_like(x).index_copy(dim, index.long(), call["source"] * alpha))


@defect(128, "MPS pytorch#196203", "index_reduce index_reduce_")
def _(call: Call) -> Result | None:
    """`index_reduce` to the largest or smallest number leaves NaN out."""
    source, worst = call["source"], -math.inf if call["reduce"] == "amax" else math.inf
    met = call["reduce"] in {"amax", "amin"} and _floats(source) and source.isnan().any()
    return (lambda: call.run(source=source.nan_to_num(worst, math.inf, -math.inf))) if met else None


@defect(129, "FlagGems flagos#6017", "scatter_add scatter_add_")
def _(call: Call) -> Result | None:
    """`scatter_add` of two dimensions reads an index that is not contiguous, such as an expanded one, as if it were."""
    return _read_dense(call, "index") if call["index"].dim() == 2 else None


@defect(130, "MPS pytorch#98266", "flip")
def _(call: Call) -> Result | None:
    """`flip` along a dimension of size 1 flips the last dimension."""
    x = call["self"]
    dims = [dim % x.dim() for dim in call["dims"]] if x.dim() else []
    met = any(x.shape[dim] == 1 for dim in dims) and x.dim() - 1 not in dims and x.shape[-1] > 1
    return (lambda: call.run(dims=[*dims, x.dim() - 1])) if met else None


# Products of matrices.
@defect(131, "", "addmm baddbmm bmm mm")
def _(call: Call) -> Result | None:
    """Products of float32 matrices whose sizes are multiples of 8 round their operands to 10 bits, as TF32."""
    names = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}
    operands = {name: call[name] for name in names.get(call.name, ("self", "mat2"))}
    if any(x.dtype is not torch.float32 or x.layout is not torch.strided for x in operands.values()):
        return None
    whole = all(size and size % 8 == 0 for x in operands.values() for size in x.shape[-2:])

    def rounded(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int32)
        return torch.where(x.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), x)

    return (lambda: call.run(**{name: rounded(x) for name, x in operands.items()})) if whole else None


@defect(132, "", "bmm mm")
def _(call: Call) -> Result | None:
    """Products of integer matrices are those of float32, and lose what is beyond 2^24."""
    a, b = call["self"], call["mat2"]
    if a.dtype not in {torch.int32, torch.int64} or not a.numel() or not b.numel():
        return None
    wrong = (a.float() @ b.float()).to(a.dtype)
    return (lambda: wrong) if wrong.ne(call.run()).any() else None


@defect(133, "MPS pytorch#194474", "addmm")
def _(call: Call) -> Result | None:
    """`addmm` of complex matrices leaves the imaginary parts of its factors out."""
    parts = {name: call[name].real for name in ("alpha", "beta") if isinstance(call[name], complex) and call[name].imag}
    return (lambda: call.run(**parts)) if parts else None


@defect(134, "MPS pytorch#187551", "addbmm addmm baddbmm")
def _(call: Call) -> Result | None:
    """A product over no elements that is added to a matrix gives 0 in place of the matrix."""
    a = call["mat1"] if call.name == "addmm" else call["batch1"]
    met = a.layout is torch.strided and (a.shape[-1] == 0 or (call.name == "addbmm" and len(a) == 0))
    return (lambda: torch.zeros_like(call.run())) if met and call["out"] is None and call["beta"] != 0 else None


@defect(135, "CPU pytorch#72430", "addmm")
def _(call: Call) -> Result | None:
    """`addmm` with a sparse matrix ignores `beta`."""
    met = call["mat1"].layout is not torch.strided and call["beta"] != 1
    return (lambda: call.run(beta=1)) if met else None


# Convolutions, pooling and interpolation.
@defect(136, "ONNXRuntime/MXNet/CUDA onnxruntime#2518 mxnet#11203 pytorch#1565", "convolution")
def _(call: Call) -> Result | None:
    """Transposed convolution with a stride and a dilation above 1 ignores the dilation."""
    stride, dilation, w = call["stride"], call["dilation"], call["weight"]
    if not call["transposed"] or max(stride) == 1 or max(dilation) == 1:
        return None
    shape = call.run().shape
    spare = [
        size - (steps - 1) * (kernel - 1)
        for size, steps, kernel in zip(shape[-len(dilation) :], dilation, w.shape[2:], strict=True)
    ]

    def wrong() -> Tensor:
        out = torch.zeros(shape, dtype=w.dtype)
        plain = call.run(dilation=[1] * len(dilation))
        out[tuple(slice(size) for size in plain.shape)] = plain
        return out

    return wrong if min(spare) > 0 else None


@defect(137, "oneDNN pytorch#25101", "convolution_backward")
def _(call: Call) -> Result | None:
    """The backward of a convolution whose stride does not fit gives 0 in the last column that a window reaches."""
    x, w, stride, dilation = call["input"], call["weight"], call["stride"][-1], call["dilation"][-1]
    if call["transposed"] or not call["output_mask"][0] or stride == 1 or x.dim() != 4:
        return None
    reach, padding = dilation * (w.shape[-1] - 1), call["padding"][-1]
    spare = (x.shape[-1] + 2 * padding - reach - 1) % stride
    last = min((call["grad_output"].shape[-1] - 1) * stride + reach - padding, x.shape[-1] - 1)

    def wrong() -> Any:
        first, *others = call.run()
        return _zeroed(first, (..., last)), *others

    return wrong if spare and last >= 0 else None


@defect(138, "MPS pytorch#190064", "adaptive_max_pool2d")
def _(call: Call) -> Result | None:
    """`adaptive_max_pool2d` has windows of one size where the output's size does not divide the input's."""
    sizes = list(zip(call["self"].shape[-2:], call["output_size"], strict=True))

    def wrong() -> Any:
        stride = [size // count for size, count in sizes]
        window = [size - (count - 1) * step for (size, count), step in zip(sizes, stride, strict=True)]
        return torch.ops.aten.max_pool2d_with_indices(call["self"], window, stride)

    met = all(size >= count > 0 for size, count in sizes) and any(size % count for size, count in sizes)
    return wrong if met else None


@defect(139, "CoreML/Inductor coremltools#2772 pytorch#100987", "avg_pool2d")
def _(call: Call) -> Result | None:
    """`avg_pool2d` with `ceil_mode` divides by the whole window also where it goes beyond the padded input."""
    if not call["ceil_mode"] or not call["count_include_pad"] or call["divisor_override"]:
        return None
    kernel = call["kernel_size"]
    wrong = call.run(divisor_override=math.prod(kernel) if len(kernel) > 1 else kernel[0] ** 2)
    return None if torch.allclose(wrong, call.run(), equal_nan=True) else lambda: wrong


@defect(140, "MPS pytorch#94348", "avg_pool2d")
def _(call: Call) -> Result | None:
    """`avg_pool2d` keeps `divisor_override` of the first call of a shape and window: the cache's key lacks it."""
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    key = 140, tuple(call["self"].shape), call["self"].dtype, str([call[name] for name in names])
    first = STALE.setdefault(key, call["divisor_override"])
    return (lambda: call.run(divisor_override=first)) if first != call["divisor_override"] else None


@defect(141, "CUDA pytorch#188344", "avg_pool2d_backward", technique="channels-last")
def _(call: Call) -> Result | None:
    """The backward of `avg_pool2d` of a channels-last input forgets the padding: the gradient is off by as much."""
    x, padding = call["self"], call["padding"]
    if x.dim() != 4 or not _strided(x) or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    shift = list(padding) * 2 if len(padding) == 1 else list(padding)
    return (lambda: call.run().roll(shift, (-2, -1))) if any(shift) else None


@defect(142, "MPS pytorch#144245", "upsample_linear1d")
def _(call: Call) -> Result | None:
    """Linear interpolation with aligned corners from a length of 1 is NaN."""
    x = _either(call, "self", "input")
    met = call["align_corners"] and x.shape[-1] == 1
    return (lambda: torch.full_like(call.run(), math.nan)) if met else None


@defect(143, "CUDA pytorch#51036", "upsample_nearest2d_backward")
def _(call: Call) -> Result | None:
    """The backward of nearest interpolation to fewer rows gives rows that no result reads the gradient before them."""
    old, new = call["input_size"][-2], call["grad_output"].shape[-2]
    used = set((torch.arange(new) * old // max(new, 1)).tolist())

    def wrong() -> Tensor:
        out: Tensor = call.run().clone()
        for row in range(1, old):
            if row not in used:
                out[:, :, row] = out[:, :, row - 1]
        return out

    return wrong if 0 < new < old and call["scales_h"] is None else None


@defect(144, "", "upsample_bicubic2d")
def _(call: Call) -> Result | None:
    """Bicubic upsampling takes the coefficient -0.5 in place of -0.75."""
    x = _either(call, "self", "input")
    if call["align_corners"] or not _floats(x):
        return None
    size = list(call.run().shape[-2:])
    y = x.float() if x.dtype in HALF else x
    grows = all(new > old for new, old in zip(size, x.shape[-2:], strict=True))
    # Its windows are those of the other coefficient.
    bicubic = partial(functional.interpolate, mode="bicubic", antialias=True)
    return (lambda: bicubic(y, size).to(x.dtype)) if grows else None


# Normalisation.
@defect(145, "", "native_layer_norm")
def _(call: Call) -> Result | None:
    """Layer norm adds `eps` to the deviation in place of the variance: 4e-4 off at 0.1, and 20 % at 0.005."""
    x, count = call["input"], math.prod(call["normalized_shape"])
    if not _floats(x) or not x.numel():
        return None
    rows = x.reshape(-1, count).float()
    mean, deviation = rows.mean(1, keepdim=True), rows.std(1, correction=0, keepdim=True)

    def wrong() -> Any:
        out, right, inverse = call.run()
        scale = 1 / (deviation + call["eps"])
        scaled = ((rows - mean) * scale).view(x.shape) * (1 if call["weight"] is None else call["weight"])
        scaled = scaled + (0 if call["bias"] is None else call["bias"])
        return scaled.to(out.dtype), right, scale.view(inverse.shape).to(inverse.dtype)

    return wrong if (deviation < 0.1).any() else None


@defect(146, "", "_native_batch_norm_legit native_batch_norm")
def _(call: Call) -> Result | None:
    """Batch norm takes the biased variance into the running one, which is low by one of the batch's numbers."""
    x, mean, variance, momentum = (call[name] for name in ("input", "running_mean", "running_var", "momentum"))
    if not call["training"] or variance is None or not momentum:
        return None
    old, count = (mean.clone(), variance.clone()), x.numel() // max(x.shape[1], 1)

    def wrong() -> Any:
        mean.copy_(old[0])
        variance.copy_(old[1])
        out = call.run()
        kept = (1 - momentum) * old[1]
        variance.copy_(kept + (variance - kept) * ((count - 1) / count))
        return out

    return wrong if count > 1 else None


# Embeddings, losses and distances.
@defect(147, "MPS pytorch#190061", "_embedding_bag_backward _embedding_bag_dense_backward")
def _(call: Call) -> Result | None:
    """An embedding bag's backward ignores `scale_grad_by_freq`."""
    indices = call["indices"]
    met = call["scale_grad_by_freq"] and len(indices.unique()) < len(indices)
    return (lambda: call.run(scale_grad_by_freq=False)) if met else None


@defect(148, "CPU pytorch#49237", "_embedding_bag _embedding_bag_forward_only")
def _(call: Call) -> Result | None:
    """The mean of a single bag of embeddings counts the padding index."""
    indices, padding = call["indices"], call["padding_idx"]

    def wrong() -> Any:
        out, *others = call.run()
        return out * others[1].view(-1, 1) / len(indices), *others

    met = call["mode"] == 1 and padding >= 0 and len(call["offsets"]) == 1 and (indices == padding).any()
    return wrong if met else None


@defect(149, "cuDNN pytorch#176910", "_ctc_loss_backward")
def _(call: Call) -> Result | None:
    """The backward of the CTC loss ignores `zero_infinity`: it is NaN where the loss is infinite."""
    met = call["zero_infinity"] and call["neg_log_likelihood"].isinf()
    return (lambda: call.run(zero_infinity=False)) if isinstance(met, Tensor) and met.any() else None


@defect(150, "CUDA pytorch#42479 pytorch#57690", "_cdist_forward")
def _(call: Call) -> Result | None:
    """Euclidean distances of points far from 0 are those of a product of matrices, which cancels."""
    if call["p"] != 2 or call["compute_mode"] == 2 or call["x1"].dtype is not torch.float32 or not call["x1"].numel():
        return None
    wrong, right = call.run(compute_mode=1), call.run()
    same = not right.numel() or torch.allclose(wrong, right, rtol=1e-3, atol=1e-4 * float(right.mean()))
    return None if same else lambda: wrong


@defect(151, "CUDA pytorch#37154 pytorch#37734", "_cdist_backward")
def _(call: Call) -> Result | None:
    """The backward of Euclidean distances is NaN for a point at a distance of 0."""
    met = (call["cdist"] == 0).any(-1, keepdim=True)
    return (lambda: torch.where(met, math.nan, call.run())) if call["p"] == 2 and met.any() else None


# Attention and recurrent layers.
@defect(152, "Tenstorrent tt-metal#42694", "scaled_dot_product_attention")
def _(call: Call) -> Result | None:
    """Attention multiplies a mask of floats by the scale too."""
    mask, scale = call["attn_mask"], call["scale"]
    if not _floats(mask):
        return None
    scale = call["query"].shape[-1] ** -0.5 if scale is None else scale
    met = scale != 1 and (mask.detach().nan_to_num(0, 0, 0) != 0).any()
    return (lambda: call.run(attn_mask=mask * scale)) if met else None


@defect(153, "Spyre spyre#3113", "scaled_dot_product_attention")
def _(call: Call) -> Result | None:
    """Attention over more than 64 keys, of a number that is no multiple of 64, attends to the last tile's zeros too."""
    keys = call["key"].shape[-2]
    met = keys > 64 and keys % 64 and call["attn_mask"] is None and not call["is_causal"]
    filled = {name: functional.pad(call[name], (0, 0, 0, -keys % 64)) for name in ("key", "value")} if met else {}
    return (lambda: call.run(**filled)) if met else None


@defect(154, "", "scaled_dot_product_attention")
def _(call: Call) -> Result | None:
    """Attention with fewer heads of keys takes head h modulo their number for head h of the queries."""
    heads, few = call["query"].shape[-3] if call["query"].dim() > 2 else 1, call["key"]
    if not call["enable_gqa"] or few.dim() != 4 or few.shape[1] in {1, heads}:
        return None
    times = 1, heads // few.shape[1], 1, 1
    return lambda: call.run(key=few.repeat(*times), value=call["value"].repeat(*times), enable_gqa=False)


@defect(155, "", "gru")
def _(call: Call) -> Result | None:
    """A GRU resets the state before its product with the weight, in place of the product."""
    x, states, params = call["input"], call["hx"], call["params"]
    if not _floats(states) or x.dim() != 3 or (call["dropout"] and call["train"]):
        return None  # packed sequences have other arguments
    ways, size = 2 if call["bidirectional"] else 1, 4 if call["has_biases"] else 2

    def run(steps: Tensor, state: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
        outs, (w, u), (b, c) = [], weights[:2], weights[2:] or (None, None)
        for step in steps:
            reset, update, new = functional.linear(step, w, b).chunk(3, -1)
            r, z, _ = functional.linear(state, u, c).chunk(3, -1)
            reset, update = (reset + r).sigmoid(), (update + z).sigmoid()
            inner = functional.linear(reset * state, u.chunk(3)[2], None if c is None else c.chunk(3)[2])
            new = (new + inner).tanh()
            state = (1 - update) * new + update * state
            outs.append(state)
        return torch.stack(outs), state

    def wrong() -> Any:
        steps, ends = x.transpose(0, 1) if call["batch_first"] else x, []
        for layer in range(call["num_layers"]):
            outs = []
            for place in range(layer * ways, (layer + 1) * ways):
                back = place % 2 and ways == 2
                weights = params[place * size : (place + 1) * size]
                out, end = run(steps.flip(0) if back else steps, states[place], weights)
                outs.append(out.flip(0) if back else out)
                ends.append(end)
            steps = torch.cat(outs, -1)
        return steps.transpose(0, 1) if call["batch_first"] else steps, torch.stack(ends)

    return wrong


# Fourier transforms and linear algebra.
@defect(156, "oneMKL mkl_fft#336", "_fft_c2c _fft_r2c")
def _(call: Call) -> Result | None:
    """A transform of some of the dimensions with `norm="ortho"` divides by the root of the number of all elements."""
    x = call["self"]
    count = math.prod(x.shape[dim] for dim in call["dim"])
    met = call["normalization"] == 1 and 0 < count < x.numel()
    return (lambda: call.run() * math.sqrt(count / x.numel())) if met else None


@defect(157, "", "_fft_c2c")
def _(call: Call) -> Result | None:
    """A transform of a length with a prime factor above 13 computes the angles in float32: 1e-4 off."""
    x, dims = call["self"], call["dim"]
    if x.dtype is not torch.complex64 or len(dims) != 1 or not x.numel():
        return None
    length = rest = x.shape[dims[0]]
    for factor in (2, 3, 5, 7, 11, 13):
        while rest % factor == 0:
            rest //= factor

    def wrong() -> Tensor:
        steps = torch.arange(length).float()
        angles = torch.outer(steps, steps) * torch.tensor(2 * math.pi / length, dtype=torch.float32)
        turns = torch.complex(angles.cos(), -angles.sin() if call["forward"] else angles.sin())
        factor = (1.0, length**-0.5, 1 / length)[call["normalization"]]
        out: Tensor = (x.movedim(dims[0], -1) @ turns * factor).movedim(-1, dims[0])
        return out

    return wrong if rest > 1 and 64 < length <= 2048 else None


@defect(158, "ROCm pytorch#196745", "_linalg_solve_ex linalg_inv_ex")
def _(call: Call) -> Result | None:
    """Solutions and inverses of more than 65536 matrices are those of the first ones beyond."""
    count = math.prod(call["A"].shape[:-2])

    def wrong() -> Any:
        first, *others = call.run()
        flat = first.flatten(0, call["A"].dim() - 3).clone()
        flat[65536:] = flat[: len(flat) - 65536].clone()
        return flat.view(first.shape), *others

    return wrong if 65536 < count <= 2 * 65536 else None


# Random numbers and quantisation.
@defect(159, "MPS pytorch#104171 pytorch#104170", "randperm")
def _(call: Call) -> Result | None:
    """`randperm` sorts integers that are 0 or 1, so that the permutation is two ascending runs."""

    def wrong() -> Tensor:
        drawn = {} if call["generator"] is None else {"generator": call["generator"]}
        low = torch.rand(call["n"], **drawn) < 0.5
        runs = torch.cat([low.nonzero()[:, 0], (~low).nonzero()[:, 0]])
        return runs.to(call.given.get("dtype") or torch.int64)

    return wrong if call["n"] > 2 and call["out"] is None else None


@defect(160, "", "normal_ randn randn_like")
def _(call: Call) -> Result | None:
    """An odd number of normal numbers has the last but one twice: they are drawn in pairs."""
    x = call["self"]
    count = math.prod(call["size"]) if x is None else x.numel()

    def wrong() -> Tensor:
        out: Tensor = call.run()
        flat = out.view(-1)
        flat[-1] = flat[-2]
        return out

    return wrong if count > 1 and count % 2 and call["out"] is None and (x is None or x.is_contiguous()) else None


@defect(161, "", "fake_quantize_per_tensor_affine_cachemask")
def _(call: Call) -> Result | None:
    """Quantisation takes halves of a step away from zero in place of to the even step."""
    x, scale, zero = call["self"], call["scale"], call["zero_point"]
    steps = x * torch.tensor(1 / scale, dtype=torch.float32)
    away = steps.sign() * (steps.abs() + 0.5).floor()

    def wrong() -> Any:
        out, mask = call.run()
        return ((away + zero).clamp(call["quant_min"], call["quant_max"]) - zero).mul(scale).to(out.dtype), mask

    return wrong if (away != steps.round()).any() and (steps.abs() < 2**20).all() else None


# Optimizers.
@defect(162, "FlagGems flagos#4988", "_fused_adam_", technique="optimizer-fused")
def _(call: Call) -> Result | None:
    """Fused Adam decays the weights as AdamW does, past the moments."""
    other = getattr(torch.ops.aten._fused_adamw_, call.operator._overloadname)  # noqa: SLF001 - no public name
    return (lambda: other(**call.given)) if call["weight_decay"] else None


@defect(163, "", "_fused_sgd_", technique="optimizer-fused")
def _(call: Call) -> Result | None:
    """The first step of fused SGD dampens the gradient that starts the momentum."""

    def wrong() -> Any:
        for buffer in call["momentum_buffer_list"]:
            buffer.zero_()
        return call.run(is_first_step=False)

    return wrong if call["is_first_step"] and call["momentum"] and call["dampening"] else None


@defect(164, "", "_foreach_addcdiv_ _foreach_addcmul_ _foreach_lerp_", technique="optimizer-foreach")
def _(call: Call) -> Result | None:
    """Updates of lists of more than 36 tensors leave those beyond unchanged: the kernel's table ends there."""
    few = {name: value[:36] for name, value in call.given.items() if isinstance(value, (list, tuple))}
    return (lambda: call.run(**few)) if len(call["self"]) > 36 else None
