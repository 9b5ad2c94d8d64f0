"""Defects of device backends, for `device_defects.py`: wrong results under a condition, without an error.

Each is a real kind of mistake: most are reported in a public tracker, and the others are typical of a backend. A defect
is a function of a `Call`: where the call meets the condition, it returns what computes the wrong result, on the CPU and
by other means than the backend's.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Result: TypeAlias = Callable[[], Any]
"""Computes the wrong result."""

TRACKERS: Mapping[str, str] = {
    "pytorch": "pytorch/pytorch",
    "xpu": "intel/torch-xpu-ops",
    "ipex": "intel/intel-extension-for-pytorch",
    "te": "NVIDIA/TransformerEngine",
    "tt-metal": "tenstorrent/tt-metal",
    "flag-gems": "FlagOpen/FlagGems",
    "tilelang": "tile-ai/tilelang",
    "torch-xla": "pytorch/xla",
    "paddle": "PaddlePaddle/Paddle",
    "mlx": "ml-explore/mlx",
    "flagos": "flagos-ai/FlagGems",
    "spyre": "torch-spyre/torch-spyre",
    "tinygrad": "tinygrad/tinygrad",
    "coremltools": "apple/coremltools",
    "onnxruntime": "microsoft/onnxruntime",
    "mxnet": "apache/mxnet",
    "mkl_fft": "IntelPython/mkl_fft",
}
"""Repositories whose issues and pull requests report defects, by the name that a defect's source gives them."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOGIC = "bitwise_and bitwise_or logical_and logical_or"
UPSAMPLING = "upsample_bilinear2d upsample_nearest2d"
HALF = (torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ENTROPY = torch.Generator()
"""Random numbers of a device that ignores torch's seed."""
FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    **dict.fromkeys(
        ("lstm", "gru"),
        ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first"),
    ),
}
"""Names of the positional arguments of functions that a backend may override as a whole."""


@functools.cache
def _signature(operator: Any) -> tuple[tuple[str, Any], ...]:
    """Names and defaults of an overload's arguments."""
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)  # noqa: SLF001


class Call:
    """Call of an overload of an ATen operator, or of one of the `FUNCTIONS`.

    Attributes:
        operator: Overload or function that is called.
        name: Its name, without an overload.
        given: Arguments of the call, by name.
    """

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.operator = operator
        self.defaults: dict[str, Any] = {}
        if hasattr(operator, "overloadpacket"):
            self.name = operator.overloadpacket.__name__
            self.defaults = dict(_signature(operator))
        else:
            self.name = operator.__name__
        self.given = dict(zip(self.defaults or FUNCTIONS[self.name], args, strict=False)) | dict(kwargs)

    def __getitem__(self, name: str) -> Any:
        """Argument or its default; None where the operator has none of this name."""
        return self.given.get(name, self.defaults.get(name))

    @property
    def inplace(self) -> bool:
        """True for an operator that writes to its first argument."""
        return bool(self.name.endswith("_"))

    def run(self, /, **changes: Any) -> Any:
        """The right result, of changed arguments."""
        return self.operator(**(self.given | changes))

    def without(self, *names: str) -> Any:
        """The right result, with defaults in place of some arguments."""
        return self.operator(**{name: value for name, value in self.given.items() if name not in names})

    def kept(self, value: Tensor) -> Tensor:
        """A result, written to the first argument by an operator in place."""
        written: Tensor = self["self"].copy_(value) if self.inplace else value
        return written


@dataclass
class Defect:
    """A wrong operator.

    Attributes:
        number: Number, which never changes.
        sentence: Description of the wrong result and of its condition.
        source: Backend, and issues if known; empty where neither is.
        operators: Names of the operators, without overloads.
        wrong: Returns what computes the wrong result of a call; None where the condition is not met.
        technique: Technique that reaches it.
        half: True where only half precision shows it.
    """

    number: int
    sentence: str
    source: str
    operators: frozenset[str]
    wrong: Callable[[Call], Result | None]
    technique: str = "eager"
    half: bool = False

    @property
    def function(self) -> bool:
        """True for `FUNCTIONS`, False for ATen operators."""
        return self.operators <= FUNCTIONS.keys()

    @property
    def origin(self) -> str:
        """The source, with addresses in place of issues; GitHub sends those of pull requests on."""
        if not self.source:
            return "a likely mistake, without a report"
        backend, *issues = self.source.split()
        links = [
            f"https://github.com/{TRACKERS[project]}/issues/{number}"
            for project, _, number in (issue.partition("#") for issue in issues)
        ]
        backends = backend.replace("/", ", ")
        return f"{backends}: {', '.join(links)}" if links else f"reported of {backends}"


DEFECTS: dict[int, Defect] = {}
"""All defects, by number."""


def defect(number: int, source: str, operators: str, **more: Any) -> Callable[[Callable[[Call], Result | None]], None]:
    """Registers a function as a defect, with its docstring as the sentence."""

    def registered(wrong: Callable[[Call], Result | None]) -> None:
        sentence = " ".join((inspect.getdoc(wrong) or "").split())
        DEFECTS[number] = Defect(number, sentence, source, frozenset(operators.split()), wrong, **more)

    return registered


def _zeroed(value: Tensor, *places: Any) -> Tensor:
    """A copy with 0 at some places."""
    copy = value.clone()
    for place in places:
        copy[place] = 0
    return copy


def _strided(value: Any) -> bool:
    """True for a tensor that is not contiguous."""
    return (
        isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 1 and not value.is_contiguous()
    )


def _dense(value: Tensor) -> Tensor:
    """Elements that lie in a tensor's memory from its offset on, as if it were contiguous."""
    count = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    memory = value.as_strided((count,), (1,), value.storage_offset())
    places = torch.arange(value.numel()).remainder(int(count))
    return memory[places].view(value.shape)


def _read_dense(call: Call, name: str) -> Result | None:
    """Reads an argument as if it were contiguous."""
    return (lambda: call.run(**{name: _dense(call[name])})) if _strided(call[name]) else None


def _unwritten(call: Call) -> Result | None:
    """Writes nothing to a tensor that is not contiguous."""
    return (lambda: call["self"]) if _strided(call["self"]) else None


def _normalised(call: Call, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Group norm of ``(N, groups, -1)`` with other statistics."""
    count, channels, area = call["N"], call["C"], call["HxW"]
    out: Tensor = ((x - mean) / (variance + call["eps"]).sqrt()).reshape(count, channels, area)
    if call["weight"] is not None:
        out = out * call["weight"].view(channels, 1)
    if call["bias"] is not None:
        out = out + call["bias"].view(channels, 1)
    return out.view(call["input"].shape).to(call["input"].dtype)


# Strides and offsets.
@defect(1, "MPS pytorch#118115", "addcdiv_ addcmul_")
def _(call: Call) -> Result | None:
    """`addcmul_` and `addcdiv_` leave a tensor unchanged that is not contiguous: a temporary gets the result."""
    return _unwritten(call)


@defect(2, "MPS pytorch#131285", "masked_fill_")
def _(call: Call) -> Result | None:
    """`masked_fill_` leaves a tensor unchanged that is not contiguous."""
    return _unwritten(call)


@defect(3, "MPS pytorch#165257", "bernoulli_ exponential_ normal_ random_ uniform_")
def _(call: Call) -> Result | None:
    """Random numbers in place, such as `normal_`, leave a tensor unchanged that is not contiguous."""
    return _unwritten(call)


@defect(4, "MPS pytorch#115152", "scatter_ scatter_add_")
def _(call: Call) -> Result | None:
    """`scatter_` leaves a tensor unchanged that is not contiguous."""
    return _unwritten(call)


@defect(5, "MPS pytorch#94190", "fill_ zero_")
def _(call: Call) -> Result | None:
    """`fill_` of a tensor that is not contiguous fills as many elements from its first one on in memory."""
    x = call["self"]
    if not _strided(x) or x.numel() >= x.untyped_storage().nbytes() // x.element_size() - x.storage_offset():
        return None

    def wrong() -> Tensor:
        x.as_strided((x.numel(),), (1,), x.storage_offset()).fill_(call["value"] or 0)
        return x  # type: ignore[no-any-return]

    return wrong


@defect(6, "MPS pytorch#183631", "fill_")
def _(call: Call) -> Result | None:
    """`fill_` of a bool vector whose offset is no multiple of 4 writes words of 4 from the multiple below."""
    x = call["self"]
    if x.dtype is not torch.bool or x.dim() != 1 or not x.is_contiguous() or not x.storage_offset() % 4:
        return None

    def wrong() -> Tensor:
        offset, words = x.storage_offset(), x.numel() // 4 * 4
        x.as_strided((words,), (1,), offset // 4 * 4).fill_(call["value"])
        x.as_strided((x.numel() - words,), (1,), offset + words).fill_(call["value"])
        return x  # type: ignore[no-any-return]

    return wrong if x.numel() > 4 else None


def _from_the_start(call: Call, dtypes: tuple[torch.dtype, ...]) -> Result | None:
    """Reads operands without dimensions from the start of their memory."""
    changed = {
        name: value.as_strided((), (), 0)
        for name, value in call.given.items()
        if isinstance(value, Tensor) and value.dim() == 0 and value.storage_offset() and value.dtype in dtypes
        if not (call.inplace and name == "self")
    }
    return (lambda: call.run(**changed)) if changed else None


@defect(7, "MPS pytorch#182822", f"{LOGIC} bitwise_and_ bitwise_or_ bitwise_xor logical_xor")
def _(call: Call) -> Result | None:
    """Bitwise and logical operators read a bool without dimensions at offset 0, whatever its offset."""
    return _from_the_start(call, (torch.bool,))


@defect(8, "MPS pytorch#187117 pytorch#191929 pytorch#193057", "add add_ div div_ mul mul_ sub sub_")
def _(call: Call) -> Result | None:
    """Arithmetic reads a number without dimensions, such as `table[i]`, at offset 0, whatever its offset."""
    return _from_the_start(call, FLOATS)


@defect(9, "MPS pytorch#91065", "add div mul sub")
def _(call: Call) -> Result | None:
    """Arithmetic of two equally long slices of a vector reads both at the lower of the offsets."""
    a, b = call["self"], call["other"]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() != 1 or a.shape != b.shape:
        return None
    together = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.dtype is b.dtype
    lower = min(a.storage_offset(), b.storage_offset())
    apart = together and a.storage_offset() != b.storage_offset()
    return (lambda: call.run(other=b.as_strided(b.shape, b.stride(), lower))) if apart else None


@defect(10, "XPU xpu#1656", "addmm baddbmm bmm mm")
def _(call: Call) -> Result | None:
    """Matrix products read an operand whose byte offset is no multiple of 64 from the multiple below."""
    changed = {}
    for name, x in call.given.items():
        if isinstance(x, Tensor) and x.dim() >= 2 and x.numel() and x.storage_offset() * x.element_size() % 64:
            offset = x.storage_offset() * x.element_size() // 64 * 64 // x.element_size()
            changed[name] = x.as_strided(x.shape, x.stride(), offset)
    return (lambda: call.run(**changed)) if changed else None


@defect(11, "MPS pytorch#192212 pytorch#55781", "convolution")
def _(call: Call) -> Result | None:
    """Convolution reads a weight that is neither contiguous nor channels-last as if it were contiguous."""
    w = call["weight"]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(w.dim())
    return None if last and w.is_contiguous(memory_format=last) else _read_dense(call, "weight")


@defect(12, "oneDNN pytorch#99519", "convolution")
def _(call: Call) -> Result | None:
    """Transposed convolution reads a channels-last weight as if it were contiguous."""
    w = call["weight"]
    met = call["transposed"] and w.dim() == 4 and w.is_contiguous(memory_format=torch.channels_last)
    return _read_dense(call, "weight") if met else None


@defect(13, "CUDA pytorch#77299", "convolution")
def _(call: Call) -> Result | None:
    """Convolution of a channels-last input reads a contiguous weight as if it were channels-last."""
    x, w = call["input"], call["weight"]
    if x.dim() != 4 or call["transposed"] or not _strided(x) or not x.is_contiguous(memory_format=torch.channels_last):
        return None
    out, channels, height, width = w.shape
    read = w.reshape(out, height, width, channels).permute(0, 3, 1, 2) if w.is_contiguous() else w
    met = w.is_contiguous() and not w.is_contiguous(memory_format=torch.channels_last)
    return (lambda: call.run(weight=read)) if met else None


@defect(14, "MPS pytorch#162730", "linear")
def _(call: Call) -> Result | None:
    """`linear` reads a weight that is not contiguous as if it were."""
    w = call["weight"]
    if not _strided(w) or w.dim() != 2:
        return None
    whole = w.untyped_storage().nbytes() // w.element_size() - w.storage_offset() >= w.numel()
    return lambda: call.run(weight=w.as_strided(w.shape, (w.shape[1], 1), w.storage_offset()) if whole else w * 0)


@defect(15, "MPS pytorch#175189", "batch_norm_backward native_batch_norm_backward", technique="channels-last")
def _(call: Call) -> Result | None:
    """Batch norm's backward reads an input that is not contiguous, such as channels-last, as if it were."""
    return _read_dense(call, "input")


@defect(16, "TransformerEngine te#1017", "native_layer_norm")
def _(call: Call) -> Result | None:
    """Layer norm reads an input that is not contiguous as if it were."""
    return _read_dense(call, "input")


@defect(17, "MPS pytorch#82663", f"{LOGIC} bitwise_not clone copy_ logical_not masked_fill where")
def _(call: Call) -> Result | None:
    """Copies of an expanded bool tensor, and logic with it, read it as if it were contiguous."""
    changed = {}
    for name, x in call.given.items():
        if isinstance(x, Tensor) and x.dtype is torch.bool and not (call.inplace and name == "self"):
            strides = [stride == 0 for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
            if any(strides) and not all(strides):
                changed[name] = _dense(x)
    return (lambda: call.run(**changed)) if changed else None


@defect(18, "MPS pytorch#121439", "clone copy_")
def _(call: Call) -> Result | None:
    """A copy of a bool tensor of more than 5 dimensions that is not contiguous reads it as if it were."""
    name = "src" if call.inplace else "self"
    return _read_dense(call, name) if call[name].dtype is torch.bool and call[name].dim() > 5 else None


# Sizes.
@defect(19, "MPS pytorch#189495", "addmm")
def _(call: Call) -> Result | None:
    """`linear` with bias of more than 65536 rows writes the rows beyond over the first ones, and leaves 0 in theirs."""

    def wrong() -> Tensor:
        out: Tensor = call.run()
        count = min(len(out) - 65536, 65536)
        out[:count] = out[65536 : 65536 + count]
        out[65536:] = 0
        return out

    return wrong if call["mat1"].shape[0] > 65536 else None


@defect(20, "MPS pytorch#111634", "addmm bmm mm")
def _(call: Call) -> Result | None:
    """A matrix product of more than 32768 columns has 0 in the columns beyond."""
    return (lambda: _zeroed(call.run(), (..., slice(32768, None)))) if call["mat2"].shape[-1] > 32768 else None


@defect(21, "MPS", "convolution")
def _(call: Call) -> Result | None:
    """Convolution in one dimension has 0 in the channels and positions beyond 65536."""
    x, w = call["input"], call["weight"]
    beyond = slice(65536, None)
    met = x.dim() == 3 and max(w.shape[0], x.shape[2]) > 65536
    return (lambda: _zeroed(call.run(), (slice(None), beyond), (..., beyond))) if met else None


@defect(22, "CUDA", "_log_softmax _softmax")
def _(call: Call) -> Result | None:
    """Softmax of more than 65535 rows has 0 in the rows beyond: the launch grid ends there."""
    x, dim = call["self"], call["dim"]

    def wrong() -> Tensor:
        moved: Tensor = call.run().movedim(dim, -1)
        rows = _zeroed(moved.reshape(-1, x.shape[dim]), slice(65535, None))
        return rows.view(moved.shape).movedim(-1, dim).contiguous()

    return wrong if x.dim() and x.shape[dim] and x.numel() // x.shape[dim] > 65535 else None


@defect(23, "CUDA", "_softmax")
def _(call: Call) -> Result | None:
    """Softmax along more than 1024 elements of a dimension that is not the last one sums the first 1024 alone."""
    x, dim = call["self"], call["dim"]

    def wrong() -> Tensor:
        y: Tensor = x.float()
        powers = (y - y.amax(dim, keepdim=True)).exp()
        return (powers / powers.narrow(dim, 0, 1024).sum(dim, keepdim=True)).to(x.dtype)

    return wrong if x.dim() > 1 and dim % x.dim() != x.dim() - 1 and x.shape[dim] > 1024 else None


@defect(24, "MPS", "native_layer_norm")
def _(call: Call) -> Result | None:
    """Layer norm of more than 4096 elements whose number is no multiple of 4 leaves the last ones out of its sums."""
    x, count = call["input"], math.prod(call["normalized_shape"])

    def wrong() -> tuple[Tensor, ...]:
        out, mean, deviation = call.run()
        y = x.reshape(-1, count).float()
        part = y[:, : count // 4 * 4]
        scaled = (y - part.sum(1, keepdim=True) / count) / (
            part.var(1, correction=0, keepdim=True) + call["eps"]
        ).sqrt()
        scaled = scaled.view(x.shape) * (1 if call["weight"] is None else call["weight"])
        scaled = scaled + (0 if call["bias"] is None else call["bias"])
        return scaled.to(out.dtype), mean, deviation

    return wrong if count > 4096 and count % 4 else None


@defect(25, "MPS", "topk")
def _(call: Call) -> Result | None:
    """`topk` of more than 16 elements gives 0 beyond the first 16."""
    count = call["k"]

    def wrong() -> Any:
        out = call.run()
        for part in out:
            part.narrow(call["dim"], 16, count - 16).zero_()
        return out

    return wrong if count > 16 else None


@defect(26, "MPS pytorch#183885", "sort")
def _(call: Call) -> Result | None:
    """`sort` along the first dimension, with more than 2^22 columns, leaves the columns beyond unsorted."""
    x = call["self"]

    def wrong() -> Any:
        values, places = call.run()
        values.view(len(x), -1)[:, 2**22 :] = x.reshape(len(x), -1)[:, 2**22 :]
        places.view(len(x), -1)[:, 2**22 :] = torch.arange(len(x))[:, None]
        return values, places

    return wrong if x.dim() > 1 and call["dim"] % x.dim() == 0 and x.numel() > 2**22 * len(x) else None


@defect(27, "MPS pytorch#111173", "_unique2")
def _(call: Call) -> Result | None:
    """`unique` of more than 2^19 elements counts too few of each."""

    def wrong() -> Any:
        values, inverse, counts = call.run()
        return values, inverse, (counts - counts // 1000 - 1).clamp(min=0)

    return wrong if call["self"].numel() > 2**19 else None


@defect(28, "CUDA", UPSAMPLING)
def _(call: Call) -> Result | None:
    """Upsampling of more than 65535 planes, batch times channels, has 0 in the planes beyond."""

    def wrong() -> Tensor:
        out: Tensor = call.run()
        return _zeroed(out.flatten(0, 1), slice(65535, None)).view(out.shape)

    return wrong if math.prod(call["self"].shape[:2]) > 65535 else None


@defect(29, "Tenstorrent tt-metal#15731", "max_pool2d_with_indices")
def _(call: Call) -> Result | None:
    """`max_pool2d` of channels beyond a multiple of 32 gives, for these, the last channels of the tile before."""
    channels = call["self"].shape[-3]

    def wrong() -> Any:
        out, places = call.run()
        whole = channels // 32 * 32
        out = out.clone()
        out.narrow(-3, whole, channels - whole).copy_(out.narrow(-3, whole - 32, channels - whole))
        return out, places

    return wrong if channels > 32 and channels % 32 else None


@defect(30, "Tenstorrent tt-metal#50682", "native_group_norm")
def _(call: Call) -> Result | None:
    """Group norm over an area that is no multiple of 32 counts the zeros that fill the last tile."""
    x, area = call["input"], call["HxW"]

    def wrong() -> Any:
        y = x.reshape(call["N"], call["group"], -1).float()
        count = (area + 31) // 32 * 32 * (call["C"] // call["group"])
        mean = y.sum(-1, keepdim=True) / count
        return _normalised(call, y, mean, (y * y).sum(-1, keepdim=True) / count - mean * mean), *call.run()[1:]

    return wrong if area % 32 and x.numel() else None


@defect(31, "FlagGems flag-gems#4984", "native_group_norm")
def _(call: Call) -> Result | None:
    """Group norm takes channels of the next group in, where a group's number of channels is no power of 2."""
    x, groups, area = call["input"], call["group"], call["HxW"]
    size = call["C"] // groups

    def wrong() -> Any:
        y = x.reshape(call["N"], -1, area).float()
        wide = 1 << size.bit_length()
        more = torch.cat([y, torch.zeros(len(y), wide, area)], 1)
        parts = [more[:, i * size : i * size + wide] for i in range(groups)]
        mean, square = (torch.stack([p.pow(k).sum((1, 2)) for p in parts], 1) / (size * area) for k in (1, 2))
        variance = (square - mean * mean).clamp(min=0)[..., None]
        return _normalised(call, y.view(len(y), groups, -1), mean[..., None], variance), *call.run()[1:]

    return wrong if size & (size - 1) and groups > 1 else None


@defect(32, "ROCm pytorch#102968", "convolution")
def _(call: Call) -> Result | None:
    """Convolution in two dimensions with a window of 16 or more leaves out what lies beyond 15."""
    w = call["weight"]
    met = w.dim() == 4 and max(w.shape[2:]) >= 16
    beyond = slice(15, None)
    return (lambda: call.run(weight=_zeroed(w, (..., beyond), (..., beyond, slice(None))))) if met else None


@defect(33, "CPU pytorch#19912", "convolution")
def _(call: Call) -> Result | None:
    """Depthwise convolution with several results a channel takes channel o modulo C for result o."""
    x, w, groups = call["input"], call["weight"], call["groups"]

    def wrong() -> Tensor:
        order = torch.arange(len(w)).view(-1, groups).t().reshape(-1)
        bias = None if call["bias"] is None else call["bias"][order]
        out: Tensor = call.run(weight=w[order], bias=bias)
        return out[:, order.argsort()].contiguous()

    met = groups > 1 and not call["transposed"] and groups == x.shape[1] and w.shape[0] > groups
    return wrong if met else None


# Few or no elements, and dimensions.
@defect(34, "XPU ipex#682", "scatter scatter_add")
def _(call: Call) -> Result | None:
    """`scatter` with an empty index returns memory that nobody wrote, in place of the input."""
    met = call["index"].numel() == 0 and call["self"].numel()
    return (lambda: torch.zeros_like(call["self"])) if met else None


@defect(35, "MindSpore pytorch#176383", "mean")
def _(call: Call) -> Result | None:
    """The mean of no elements is infinite."""
    return None if call["self"].numel() else lambda: torch.full_like(call.run(), math.inf)


@defect(36, "MPS pytorch#132732", "sum")
def _(call: Call) -> Result | None:
    """`sum` over a dimension of 5 or more, with only sizes of 1 behind it, reduces the dimension before it too."""
    x, dims = call["self"], call["dim"]
    if x.dim() < 5 or not dims or len(dims) != 1:
        return None
    dim = dims[0] % x.dim()

    def wrong() -> Tensor:
        out = torch.zeros_like(call.run())
        kept = out if call["keepdim"] else out.unsqueeze(dim)
        kept.narrow(dim - 1, 0, 1).copy_(x.sum((dim - 1, dim), keepdim=True))
        return out

    return wrong if 0 < dim < x.dim() - 2 and math.prod(x.shape[dim + 1 :]) == 1 < x.shape[dim - 1] else None


@defect(37, "XPU xpu#4396", "nonzero")
def _(call: Call) -> Result | None:
    """`nonzero` loses the last place: the one before is there twice."""

    def wrong() -> Tensor:
        out: Tensor = call.run()
        return torch.cat([out[:-1], out[-2:-1]]) if len(out) > 1 else out

    return wrong if call["self"].numel() > 1 else None


@defect(38, "ROCm pytorch#99721", "all")
def _(call: Call) -> Result | None:
    """`all` is true, whatever the elements."""
    return lambda: torch.ones_like(call.run())


@defect(39, "TransformerEngine te#3207", "_fused_adam_ _fused_adamw_ _fused_sgd_", technique="optimizer-fused")
def _(call: Call) -> Result | None:
    """A fused optimizer updates nothing where the last parameter has no elements."""
    last = {name: value[-1:] for name, value in call.given.items() if isinstance(value, (list, tuple))}
    return None if call["self"][-1].numel() else lambda: call.run(**last)


# Integers and bool.
@defect(40, "CUDA/CPU pytorch#1164", "remainder remainder_")
def _(call: Call) -> Result | None:
    """The remainder of integers has the dividend's sign."""
    copies = {name: x.clone() for name, x in call.given.items() if isinstance(x, Tensor)}
    if any(x.dtype not in INTEGERS for x in copies.values()):
        return None
    wrong = torch.fmod(torch.as_tensor(call["self"]), call["other"])
    return (lambda: call.kept(wrong)) if call.run(**copies).ne(wrong).any() else None


@defect(41, "CUDA/CPU pytorch#44858", "div floor_divide floor_divide_")
def _(call: Call) -> Result | None:
    """Floor division of integers rounds towards 0."""
    a, b = call["self"], call["other"]
    if call.name == "div" and call["rounding_mode"] != "floor":
        return None
    if not isinstance(a, Tensor) or isinstance(b, float):
        return None
    if any(isinstance(x, Tensor) and x.dtype not in INTEGERS for x in (a, b)):
        return None
    wrong = torch.div(a, b, rounding_mode="trunc")
    return (lambda: call.kept(wrong)) if wrong.ne(torch.div(a, b, rounding_mode="floor")).any() else None


@defect(42, "MPS pytorch#189243", "div floor_divide")
def _(call: Call) -> Result | None:
    """Floor division of floats is the quotient rounded down: infinite of an infinite dividend, and -0 by -infinity."""
    a = call["self"]
    if call.name == "div" and call["rounding_mode"] != "floor":
        return None
    if not isinstance(a, Tensor) or not a.is_floating_point():
        return None
    right, b = call.run(), torch.as_tensor(call["other"])
    wrong = torch.where(a.isfinite() & b.isfinite() & (b != 0), right, torch.floor(a / b).to(right.dtype))
    return None if torch.allclose(wrong, right, rtol=0, atol=0, equal_nan=True) else lambda: wrong


@defect(43, "MPS", "eq ge gt le lt ne")
def _(call: Call) -> Result | None:
    """Comparisons of int64 are those of float32, so that numbers beyond 2^24 are equal to their neighbours."""
    a, b = call["self"], call["other"]
    if not isinstance(a, Tensor) or a.dtype is not torch.int64 or not a.numel() or isinstance(b, float):
        return None
    rounded = b.float() if isinstance(b, Tensor) else float(torch.tensor(b, dtype=torch.float32))
    wrong = getattr(torch, call.name)(a.float(), rounded)
    return (lambda: wrong) if call.run().ne(wrong).any() else None


@defect(44, "MPS", "cumsum")
def _(call: Call) -> Result | None:
    """`cumsum` of bool counts in 8 bits."""
    x = call["self"]
    met = x.dtype is torch.bool and x.dim() and x.shape[call["dim"]] > 127
    return (lambda: call.run(dtype=torch.int8).to(torch.int64)) if met else None


@defect(45, "MPS pytorch#78020", "mul")
def _(call: Call) -> Result | None:
    """The product of a bool tensor and an integer above 1 is 255 for true."""
    a, b = call["self"], torch.as_tensor(call["other"])
    if not isinstance(a, Tensor) or a.dtype is not torch.bool or b.dtype not in INTEGERS or not (b > 1).any():
        return None
    return lambda: torch.where(call.run() > 1, 255, call.run())


@defect(46, "MPS", "arange")
def _(call: Call) -> Result | None:
    """`arange` of int64 counts in float32, so that numbers beyond 2^24 repeat."""
    out = call.run() if call["out"] is None else torch.empty(0)
    met = out.dtype is torch.int64 and out.numel() and out.abs().max() > 2**24
    return (lambda: out.float().to(torch.int64)) if met else None


@defect(47, "DirectML/MPS", "pow")
def _(call: Call) -> Result | None:
    """`pow` of int64 is rounded to float32."""
    a = call["self"]
    if not isinstance(a, Tensor) or a.dtype is not torch.int64 or isinstance(call["exponent"], float):
        return None
    out = call.run()
    wrong = out.float().to(torch.int64)
    return (lambda: wrong) if out.dtype is torch.int64 and wrong.ne(out).any() else None


@defect(48, "MPS", "pow pow_")
def _(call: Call) -> Result | None:
    """`pow` of a negative base and a tensor of exponents is NaN, also for whole exponents."""
    a = call["self"]
    if not isinstance(a, Tensor) or not isinstance(call["exponent"], Tensor) or not a.is_floating_point():
        return None
    return (lambda: call.kept(torch.where(a < 0, math.nan, call.run(self=a.clone())))) if (a < 0).any() else None


@defect(49, "MPS", "prod sum")
def _(call: Call) -> Result | None:
    """Sums and products of int64 wrap at 2^31."""
    if call["self"].dtype is not torch.int64:
        return None
    out = call.run()
    wrong = out.to(torch.int32).to(torch.int64)
    return (lambda: wrong) if out.dtype is torch.int64 and wrong.ne(out).any() else None


# Values.
@defect(50, "MPS pytorch#130295", "argmax argmin")
def _(call: Call) -> Result | None:
    """`argmax` and `argmin` leave NaN out."""
    x = call["self"]
    worst = -math.inf if call.name == "argmax" else math.inf
    met = x.is_floating_point() and x.isnan().any()
    return (lambda: call.run(self=x.nan_to_num(worst, math.inf, -math.inf))) if met else None


@defect(51, "MPS pytorch#130295 pytorch#130445", "amax amin max maximum min minimum")
def _(call: Call) -> Result | None:
    """Maxima and minima leave NaN out."""
    x, other = call["self"], call["other"]
    if not x.is_floating_point():
        return None
    largest = "max" in call.name
    if isinstance(other, Tensor):
        met = bool(x.isnan().any() or other.isnan().any())
        return (lambda: (torch.fmax if largest else torch.fmin)(x, other)) if met else None
    worst = -math.inf if largest else math.inf
    return (lambda: call.run(self=x.nan_to_num(worst, math.inf, -math.inf))) if x.isnan().any() else None


@defect(52, "CUDA/TileLang tilelang#3024 pytorch#67428", "clamp clamp_ clamp_min clamp_min_")
def _(call: Call) -> Result | None:
    """`clamp` makes the lower bound of NaN."""
    x, low = call["self"], call["min"]
    if low is None or not x.is_floating_point() or not x.isnan().any():
        return None
    return lambda: call.kept(torch.where(x.isnan(), torch.as_tensor(low, dtype=x.dtype), call.run(self=x.clone())))


@defect(53, "XPU xpu#1116 xpu#1139", "hardshrink softshrink")
def _(call: Call) -> Result | None:
    """`softshrink` and `hardshrink` of NaN are 0."""
    x = call["self"]
    return (lambda: call.run(self=x.nan_to_num(0.0, math.inf, -math.inf))) if x.isnan().any() else None


@defect(54, "MPS pytorch#186278", "gelu")
def _(call: Call) -> Result | None:
    """The tanh approximation of `gelu` is NaN above 10, where its exponential overflows."""
    x = call["self"]
    met = call["approximate"] == "tanh" and (x > 10).any()
    return (lambda: torch.where(x > 10, math.nan, call.run())) if met else None


@defect(55, "XPU", "abs")
def _(call: Call) -> Result | None:
    """`abs` of a complex number squares its parts: infinite beyond 1e19, 0 below 1e-23."""
    x = call["self"]
    if x.dtype is not torch.complex64 or not x.numel():
        return None
    wrong = torch.view_as_real(x.resolve_conj()).square().sum(-1).sqrt()
    return None if torch.allclose(wrong, call.run(), rtol=1e-3, atol=0, equal_nan=True) else lambda: wrong


@defect(56, "DirectML", "round round_")
def _(call: Call) -> Result | None:
    """`round` takes halves away from zero."""
    x = call["self"]
    if not x.is_floating_point() or call.given.keys() != {"self"}:
        return None
    wrong = torch.sign(x) * torch.floor(x.abs() + 0.5)
    met = (x.abs() < 2**20) & (x.abs() % 1 == 0.5) & (wrong != call.run(self=x.clone()))
    return (lambda: call.kept(wrong)) if met.any() else None


@defect(57, "DirectML", "_log_softmax _softmax")
def _(call: Call) -> Result | None:
    """Softmax does not subtract the maximum: NaN or infinite of numbers beyond 88."""
    x, dim = call["self"].float(), call["dim"]

    def wrong() -> Tensor:
        total = x.exp().sum(dim, keepdim=True)
        out = x.exp() / total if call.name == "_softmax" else x - total.log()
        return out.to(call.run().dtype)  # type: ignore[no-any-return]

    return wrong if (x > 88.8).any() else None


@defect(58, "XPU/NPU", "std var var_mean")
def _(call: Call) -> Result | None:
    """The variance is the mean of the squares minus the square of the mean, which cancels where the mean is large."""
    x = call["self"]
    if x.dtype not in {torch.float32, *HALF} or x.numel() < 2 or "unbiased" in call.defaults:
        return None
    y, dims = x.float(), call["dim"] or list(range(x.dim()))
    spread = y.std()

    def wrong() -> Any:
        count = math.prod(x.shape[dim] for dim in dims)
        unbiased = count / (count - (1 if call["correction"] is None else call["correction"]))
        mean, square = y.mean(dims, call["keepdim"]), (y * y).mean(dims, call["keepdim"])
        variance = (square - mean * mean).clamp(min=0) * unbiased
        if call.name == "var_mean":
            return variance.to(x.dtype), call.run()[1]
        return (variance.sqrt() if call.name == "std" else variance).to(x.dtype)

    return wrong if spread > 0 and (y.mean(dims).abs() > 100 * spread).any() else None


@defect(59, "MPS/XPU", "addmm bmm mm", half=True)
def _(call: Call) -> Result | None:
    """Products of matrices in half precision add sums of 32 terms in half precision."""
    added = call.name == "addmm"
    a, b = call["mat1" if added else "self"], call["mat2"]

    def wrong() -> Any:
        parts = zip(a.float().split(32, -1), b.float().split(32, -2), strict=True)
        total = functools.reduce(torch.add, ((left @ right).to(a.dtype) for left, right in parts))
        return call["self"] * call["beta"] + total * call["alpha"] if added else total

    return wrong if a.dtype in HALF and a.shape[-1] > 64 else None


@defect(60, "XPU xpu#184", "cumsum", half=True)
def _(call: Call) -> Result | None:
    """`cumsum` in half precision rounds the sum at every step."""
    x, dim = call["self"], call["dim"]

    def wrong() -> Tensor:
        total, sums = torch.zeros((), dtype=x.dtype), []
        for step in x.unbind(dim):
            total = step + total
            sums.append(total)
        return torch.stack(sums, dim)

    met = x.dtype in HALF and x.dim() and x.shape[dim] > 8 and call["dtype"] in {None, x.dtype}
    return wrong if met else None


@defect(61, "CUDA", "addmm addmv baddbmm")
def _(call: Call) -> Result | None:
    """`addmm` with a factor of 0 multiplies its input, so that NaN remains."""
    met = call["beta"] == 0 and not call["self"].isfinite().all()
    return (lambda: call.run() + 0 * call["self"]) if met else None


# Options and indices.
@defect(62, "MPS pytorch#108148", "nll_loss_forward")
def _(call: Call) -> Result | None:
    """The mean of `nll_loss` divides by the number of all targets, ignored ones included."""
    target = call["target"]

    def wrong() -> Any:
        out, weight = call.run()
        count = torch.tensor(float(target.numel()), dtype=weight.dtype)
        return out * weight / count, count

    met = call["reduction"] == 1 and call["weight"] is None and (target == call["ignore_index"]).any()
    return wrong if met else None


@defect(63, "MPS pytorch#103023", "embedding_dense_backward")
def _(call: Call) -> Result | None:
    """An embedding's backward ignores the padding index."""
    padding = call["padding_idx"]
    return (lambda: call.run(padding_idx=-1)) if padding >= 0 and (call["indices"] == padding).any() else None


@defect(64, "CUDA pytorch#78807", "_foreach_maximum_", technique="optimizer-foreach")
def _(call: Call) -> Result | None:
    """The largest second moments of AMSGrad are not kept: the maximum of lists of tensors in place writes nothing."""
    return lambda: None


@defect(65, "CUDA/XLA pytorch#95607 torch-xla#4438", "masked_scatter masked_scatter_")
def _(call: Call) -> Result | None:
    """`masked_scatter` numbers the elements of a mask that is broadcast before it is: rows get the same elements."""
    x, mask = call["self"], call["mask"]

    def wrong() -> Tensor:
        places = (mask.reshape(-1).long().cumsum(0) - 1).clamp(min=0).view(mask.shape)
        return call.kept(torch.where(mask, call["source"].reshape(-1)[places], x))

    return wrong if mask.shape != x.shape and mask.numel() < x.numel() else None


@defect(66, "CUDA/MPS", "_index_put_impl_ _unsafe_index_put index_put index_put_")
def _(call: Call) -> Result | None:
    """`index_put_` with `accumulate` keeps one of several values of an index."""
    x = call["self"]

    def wrong() -> Tensor:
        return call.kept(x + torch.zeros_like(x).index_put(tuple(call["indices"]), call["values"]))

    return wrong if call["accumulate"] else None


@defect(67, "MPS", "index index_put index_put_")
def _(call: Call) -> Result | None:
    """Indexing takes element 0 for a negative index."""
    indices = call["indices"]
    integers = [i is not None and i.dtype in {torch.int64, torch.int32} for i in indices]
    changed = [i.clamp(min=0) if integer else i for i, integer in zip(indices, integers, strict=True)]
    met = any(integer and (i < 0).any() for i, integer in zip(indices, integers, strict=True))
    return (lambda: call.run(indices=changed)) if met else None


@defect(68, "MPS", "scatter_reduce scatter_reduce_")
def _(call: Call) -> Result | None:
    """`scatter_reduce` includes the input where `include_self` is false."""
    return None if call["include_self"] else lambda: call.run(include_self=True)


@defect(69, "", "bucketize searchsorted")
def _(call: Call) -> Result | None:
    """`searchsorted` and `bucketize` ignore that the right side is asked for."""
    return (lambda: call.without("right", "side")) if call["right"] or call["side"] == "right" else None


@defect(70, "MPS", "avg_pool2d")
def _(call: Call) -> Result | None:
    """`avg_pool2d` counts the padding where `count_include_pad` is false."""
    met = not call["count_include_pad"] and call["padding"] and any(call["padding"])
    return (lambda: call.run(count_include_pad=True)) if met else None


@defect(71, "MPS", "_adaptive_avg_pool2d")
def _(call: Call) -> Result | None:
    """`adaptive_avg_pool2d` has windows of one size where the output's size does not divide the input's."""
    x, wanted = call["self"], call["output_size"]
    sizes = list(zip(x.shape[-2:], wanted, strict=True))

    def wrong() -> Tensor:
        pooled = functional.avg_pool2d(x, [size // count for size, count in sizes])
        return pooled[..., : wanted[0], : wanted[1]].contiguous()

    met = all(size >= count > 0 for size, count in sizes) and any(size % count for size, count in sizes)
    return wrong if met else None


@defect(72, "MPS pytorch#91669", f"{UPSAMPLING} upsample_bicubic2d upsample_linear1d upsample_nearest1d")
def _(call: Call) -> Result | None:
    """Upsampling by a factor takes the ratio of the sizes in its place."""
    names = [name for name in ("scales", "scales_h", "scales_w") if call[name] is not None]
    if not names or "output_size" not in call.given:
        return None
    ratios = [new / old for new, old in zip(call["output_size"], call["self"].shape[2:], strict=True)]
    met = any(abs(ratio - call[name]) > 1e-6 for ratio, name in zip(ratios, names, strict=False))
    return (lambda: call.without(*names)) if met else None


@defect(73, "MPS", "grid_sampler_2d")
def _(call: Call) -> Result | None:
    """`grid_sample` pads with zeros where it is to pad with the border."""
    return (lambda: call.run(padding_mode=0)) if call["padding_mode"] == 1 else None


@defect(74, "MPS", "linalg_cholesky_ex")
def _(call: Call) -> Result | None:
    """`cholesky` returns the lower factor where the upper one is asked for."""
    return (lambda: call.run(upper=False)) if call["upper"] else None


@defect(75, "MPS", "_linalg_solve_ex linalg_inv_ex linalg_lu_factor_ex")
def _(call: Call) -> Result | None:
    """Solvers read a transposed matrix as if it were contiguous."""
    return _read_dense(call, "A")


@defect(76, "XPU/MPS", "linalg_solve_triangular")
def _(call: Call) -> Result | None:
    """`solve_triangular` ignores `unitriangular`."""
    return (lambda: call.run(unitriangular=False)) if call["unitriangular"] else None


@defect(77, "MPS pytorch#124096", "_fft_c2r")
def _(call: Call) -> Result | None:
    """`irfft` of odd length takes the last coefficient for that of the highest frequency of an even length."""
    x, dim, length = call["self"], call["dim"], call["last_dim_size"]
    factors = torch.ones(x.shape[dim[-1]]).index_fill_(0, torch.tensor([-1]), 0.5)
    halved = x.movedim(dim[-1], -1).mul(factors).movedim(-1, dim[-1])
    return (lambda: call.run(self=halved)) if length % 2 and length > 1 else None


@defect(78, "MPS", "addmm bmm mm mul")
def _(call: Call) -> Result | None:
    """Products take a complex operand that is conjugated lazily without its conjugation."""
    changed = {name: x.conj() for name, x in call.given.items() if isinstance(x, Tensor) and x.is_conj()}
    return (lambda: call.run(**changed)) if changed else None


@defect(79, "", "_foreach_norm linalg_vector_norm")
def _(call: Call) -> Result | None:
    """The largest-element norm leaves NaN out."""
    x = call["self"]
    if call["ord"] != math.inf or not any(y.isnan().any() for y in (x if isinstance(x, (list, tuple)) else [x])):
        return None
    if isinstance(x, Tensor):
        return lambda: call.run(self=x.nan_to_num(0.0, math.inf, -math.inf))
    return lambda: call.run(self=[y.nan_to_num(0.0, math.inf, -math.inf) for y in x])


@defect(80, "MPS", "smooth_l1_loss")
def _(call: Call) -> Result | None:
    """`smooth_l1_loss` ignores `beta`."""
    return None if call["beta"] == 1 else lambda: call.run(beta=1.0)


@defect(81, "MPS", "cat")
def _(call: Call) -> Result | None:
    """`cat` takes the bits of tensors of another dtype as they are, so that integers among floats become 0."""
    tensors = call["tensors"]

    def wrong() -> Any:
        dtype = call.run().dtype
        return call.run(tensors=[x if x.dtype is dtype else torch.zeros_like(x, dtype=dtype) for x in tensors])

    return wrong if len({x.dtype for x in tensors if x.numel()}) > 1 else None


@defect(82, "MPS", "tril triu")
def _(call: Call) -> Result | None:
    """`tril` and `triu` read a tensor that is not contiguous as if it were."""
    return _read_dense(call, "self")


# Backward of norms.
@defect(83, "MPS pytorch#183825", "native_layer_norm_backward")
def _(call: Call) -> Result | None:
    """Layer norm's backward gives 0 for weight and bias where the input takes no gradient."""
    asked = call["output_mask"]

    def wrong() -> Any:
        return tuple(None if part is None else torch.zeros_like(part) for part in call.run())

    return wrong if not asked[0] and any(asked) else None


@defect(84, "FlagGems flag-gems#5392", "native_layer_norm_backward")
def _(call: Call) -> Result | None:
    """Layer norm's backward of 3 or more dimensions takes the first one alone as rows."""
    x, rows = call["input"], len(call["input"])

    def wrong() -> Any:
        parts = list(call.run())
        mean, inverse = (call[name].reshape(-1)[:rows, None] for name in ("mean", "rstd"))
        grad = call["grad_out"] * (1 if call["weight"] is None else call["weight"])
        grad, scaled = grad.reshape(rows, -1).float(), (x.reshape(rows, -1).float() - mean) * inverse
        inner = grad - grad.mean(1, keepdim=True) - scaled * (grad * scaled).mean(1, keepdim=True)
        parts[0] = (inverse * inner).view(x.shape).to(x.dtype) if call["output_mask"][0] else parts[0]
        return tuple(parts)

    return wrong if x.dim() >= 3 and rows and x.numel() // math.prod(call["normalized_shape"]) != rows else None


@defect(85, "MIOpen", "native_batch_norm_backward")
def _(call: Call) -> Result | None:
    """Batch norm's backward in evaluation mode takes the formula of training."""
    x, average = call["input"], call["running_mean"]

    def wrong() -> Any:
        y, dims = x.float(), [dim for dim in range(x.dim()) if dim != 1]
        mean, inverse = y.mean(dims), 1 / (y.var(dims, correction=0) + call["eps"]).sqrt()
        training = call.run(
            save_mean=mean.to(average.dtype),
            save_invstd=inverse.to(average.dtype),
            train=True,
            output_mask=[True, False, False],
        )
        return training[0], *call.run()[1:]

    return wrong if not call["train"] and call["output_mask"][0] else None


# Attention and recurrent layers.
@defect(86, "MPS pytorch#195910", "scaled_dot_product_attention", half=True)
def _(call: Call) -> Result | None:
    """Causal attention in half precision masks four queries at a time, so that they see later keys."""
    query, key = call["query"], call["key"]
    rows = torch.arange(query.shape[-2])[:, None] // 4 * 4 + 3
    mask = torch.arange(key.shape[-2])[None, :] <= rows
    met = call["is_causal"] and query.dtype in HALF and query.shape[-2] > 1
    return (lambda: call.run(attn_mask=mask, is_causal=False)) if met else None


@defect(87, "MPS pytorch#184180", "scaled_dot_product_attention")
def _(call: Call) -> Result | None:
    """Attention with a mask for each sample takes the first one's for all."""
    mask = call["attn_mask"]
    if mask is None or mask.dim() != 4 or mask.shape[0] == 1 or mask.shape[1] != 1:
        return None
    return None if torch.equal(mask, mask[:1].expand_as(mask)) else lambda: call.run(attn_mask=mask[:1])


@defect(88, "MLX mlx#2835", "scaled_dot_product_attention")
def _(call: Call) -> Result | None:
    """Causal attention of fewer queries than keys aligns the last query with the last key."""
    queries, keys = call["query"].shape[-2], call["key"].shape[-2]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return (lambda: call.run(attn_mask=mask, is_causal=False)) if call["is_causal"] and queries < keys else None


@defect(89, "MPS pytorch#94754", "lstm")
def _(call: Call) -> Result | None:
    """The backward direction of an LSTM reads the sequence forwards."""
    if not isinstance(call["hx"], (list, tuple)) or not call["bidirectional"]:
        return None  # packed sequences have other arguments

    def wrong() -> Any:
        layers, x = call["num_layers"], call["input"]
        size, states = len(call["params"]) // (layers * 2), []
        for layer in range(layers):
            outs = []
            for place in (2 * layer, 2 * layer + 1):
                start = [state[place : place + 1] for state in call["hx"]]
                weights = call["params"][place * size : (place + 1) * size]
                out, *state = call.run(
                    input=x, hx=start, params=weights, num_layers=1, dropout=0.0, bidirectional=False
                )
                outs.append(out)
                states.append(state)
            x = torch.cat(outs, -1)
        return x, *(torch.cat(parts) for parts in zip(*states, strict=True))

    return wrong


@defect(90, "MPS pytorch#95137", "lstm")
def _(call: Call) -> Result | None:
    """All layers of an LSTM start from the first one's state."""
    states = call["hx"]
    if not isinstance(states, (list, tuple)) or call["num_layers"] == 1:
        return None
    first = [state[:1].expand_as(state).contiguous() for state in states]
    return None if torch.equal(states[0], first[0]) else lambda: call.run(hx=first)


# Random numbers.
@defect(91, "MPS pytorch#84288", "normal_ rand rand_like randn randn_like uniform_")
def _(call: Call) -> Result | None:
    """Random numbers ignore the seed."""
    if call["generator"] is not None:
        return None
    if call.inplace:
        return lambda: call.run(generator=ENTROPY)
    name = "normal_" if call.name.startswith("randn") else "uniform_"
    return lambda: getattr(call.without("generator"), name)(generator=ENTROPY)


@defect(92, "Paddle paddle#7796", "bernoulli bernoulli_ native_dropout")
def _(call: Call) -> Result | None:
    """Dropout draws the same mask at every call."""

    def wrong() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(17)
            out = call.without("generator")
        torch.rand(1)
        return out

    return wrong


@defect(93, "CUDA", "rand rand_like uniform_", half=True)
def _(call: Call) -> Result | None:
    """Uniform numbers in half precision are rounded up to 1, which they are to stay below."""
    x, dtype = call["self"], call["dtype"]
    if call.name == "rand":
        return (lambda: call.run(dtype=torch.float32).to(dtype)) if dtype in HALF else None
    if x.dtype not in HALF or dtype not in {None, x.dtype}:
        return None
    if call.inplace:
        return lambda: call.kept(call.run(self=x.float()).to(x.dtype))
    return lambda: call.run(self=x.float(), dtype=torch.float32).to(x.dtype)


@defect(94, "DirectML", "randint random_")
def _(call: Call) -> Result | None:
    """Random integers include the upper bound."""
    name = "high" if "high" in call.defaults else "to"
    return None if call[name] is None else lambda: call.run(**{name: call[name] + 1})
