"""Formats of checkpoints as they are served: NF4 and LLM.int8() of bitsandbytes, and int4 groups of GPTQ and AWQ.

Formats: NF4 and double quantization, T. Dettmers et al., arXiv:2305.14314; LLM.int8(), T. Dettmers et al.,
arXiv:2208.07339; ``pack-quantized`` of compressed-tensors, in which checkpoints of GPTQ (arXiv:2210.17323, symmetric
groups) and AWQ (arXiv:2306.00978, groups with a zero point) are stored. The packages quantize, pack, and unpack;
weights are rounded to nearest.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from accelcheck.core.capability import BY_TRIAL, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Mode
from accelcheck.core.quiet import torchao_imported, without
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Operator
from accelcheck.techniques.quantization import emulation
from accelcheck.techniques.quantization.int4 import LEVELS, MIDDLE, WORKLOADS
from accelcheck.techniques.quantization.int8 import Replacing

BLOCK, SCALES, GROUP = 64, 256, 16
"""Neighbours of a flattened weight that share a scale in NF4, scales that share one when they are quantized too, and
neighbours of a row that share a scale in int4: a divisor of every width in the suite."""
TABLE = 2.0**-15
"""Error of a position of a scale: the CPU's kernel looks numbers of the dynamic map up in a table of 2**16 steps."""
TRIED = 2.0**-12
"""Relative error with which a layer runs at all: bitsandbytes' int8 products have one of 1.8e-5 without CUDA."""
OUTLIER = 6.0
"""Magnitude from which LLM.int8() multiplies a column of activations without rounding it; as transformers has it."""
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=torch.float64,
)  # fmt: skip
"""The 16 numbers of NF4: arXiv:2305.14314, appendix E."""


class NF4Linear(nn.Module):
    """Linear layer by ``bitsandbytes.nn.Linear4bit``, in evaluation mode; `double` rounds the scales too."""

    def __init__(self, original: nn.Linear, *, double: bool) -> None:
        super().__init__()
        tools: Any = importlib.import_module("bitsandbytes.nn")
        weight = original.weight.detach()
        words = {"quant_type": "nf4", "compute_dtype": weight.dtype, "compress_statistics": double}
        self.inner = tools.Linear4bit(original.in_features, original.out_features, original.bias is not None, **words)
        self.inner.weight.data, self.inner.bias = weight.cpu(), original.bias
        self.inner.to(weight.device).eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def held(self) -> list[Tensor]:
        """Lists the packed weight and its scales."""
        state = self.inner.weight.quant_state
        scales = [state.absmax, *([state.state2.absmax] if state.nested else [])]
        return [self.inner.weight.data, *scales]


def nf4(weight: Tensor, side: emulation.RoundedSides) -> Tensor:
    """Rounds an FP32 weight to NF4 numbers of each block's largest magnitude; returns FP64."""
    return _nf4(weight, side, lambda scales: scales)


def nf4_double(weight: Tensor, side: emulation.RoundedSides) -> Tensor:
    """Rounds like `nf4`; the scales, less their mean, then have 8 bits of the dynamic map each."""

    def rounded(scales: Tensor) -> Tensor:
        mean = scales.mean()
        blocks = pad(scales - mean, (0, -len(scales) % SCALES)).reshape(-1, SCALES)
        most = blocks.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).smallest_normal)
        errors = side.position(torch.ones_like(blocks), blocks, TABLE) - 1.0
        position = side.position(blocks / most, blocks, emulation.RELATIVE) + errors
        found = emulation.nearest_of(emulation.dynamic_map(signed=True), position) * most
        return found.flatten()[: len(scales)] + mean

    return _nf4(weight, side, rounded)


def _nf4(weight: Tensor, side: emulation.RoundedSides, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    blocks = pad(weight.flatten(), (0, -weight.numel() % BLOCK)).reshape(-1, BLOCK)
    most = blocks.abs().amax(1, keepdim=True)
    position = side.position(blocks * (1.0 / most.clamp(min=1e-38)), blocks)
    out = emulation.nearest_of(NF4, position) * side.scale(rounded(most.flatten())).unsqueeze(1)
    return out.flatten()[: weight.numel()].reshape(weight.shape)


class MixedLinear(nn.Module):
    """Linear layer by ``bitsandbytes.nn.Linear8bitLt``, in evaluation mode."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        tools: Any = importlib.import_module("bitsandbytes.nn")
        words = {"has_fp16_weights": False, "threshold": OUTLIER}
        self.inner = tools.Linear8bitLt(original.in_features, original.out_features, original.bias is not None, **words)
        weight = original.weight.detach()
        self.inner.weight.data, self.inner.bias = weight.cpu(), original.bias
        self.inner.to(weight.device).eval()

    def forward(self, x: Tensor) -> Tensor:
        with without("bitsandbytes.autograd._functions", "inputs will be cast"):  # the scheme has it so
            out: Tensor = self.inner(x)
        return out

    def held(self) -> list[Tensor]:
        """Lists the int8 weight and its scales."""
        state = self.inner.state if self.inner.weight.CB is None else self.inner.weight
        return [state.CB, state.SCB]


def rows_of(weight: Tensor, side: emulation.RoundedSides) -> Tensor:
    """Rounds an FP32 weight to half precision, and to int8 with a scale per row of which 127 steps are the largest."""
    half = emulation.nearest(weight, torch.float16)
    return emulation.symmetric(half, (half.abs().amax(1, keepdim=True) / 127).clamp(min=1e-38), side)


class MixedEmulation(emulation.Dequantized):
    """Emulates `MixedLinear`: columns with an outlier are multiplied as they are, all others by rows of int8."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.taken()
        rows = x.reshape(-1, x.shape[-1])
        half = emulation.nearest(rows.float(), torch.float16, self.flips)
        far = half.abs() >= OUTLIER
        scale = (half.masked_fill(far, 0.0).abs().amax(1, keepdim=True) / 127).clamp(min=1e-38)
        integers = emulation.rounded(half * (1.0 / scale), half, self.flips)
        near = integers.double() * emulation.RoundedSides(self.flips).scale(scale)
        out = linear(torch.where(far.any(0), rows, near), weight, self.bias)
        return out.reshape(*x.shape[:-1], -1)


class PackedLinear(nn.Module):
    """Linear layer with a weight that compressed-tensors packs, eight to an int32, and unpacks for every product."""

    weight: Tensor

    def __init__(self, original: nn.Linear, *, symmetric: bool) -> None:
        super().__init__()
        with torchao_imported():  # transformers, which compressed-tensors imports, imports torchao
            compressors: Any = importlib.import_module("compressed_tensors.compressors")
            quantization: Any = importlib.import_module("compressed_tensors.quantization")
        parameters: Any = importlib.import_module("compressed_tensors.quantization.utils").calculate_qparams
        words = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
        arguments = quantization.QuantizationArgs(**words)
        self.scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
        self.packer = compressors.PackedQuantizationCompressor
        weight = original.weight.detach().cpu()  # a checkpoint is made elsewhere than it is served
        groups = weight.reshape(len(weight), -1, GROUP)
        scale, zero = parameters(groups.amin(-1), groups.amax(-1), arguments)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        packed = self.packer.compress(state, self.scheme)
        self.shape = packed.pop("weight_shape")
        for name, value in ("weight", packed.pop("weight_packed")), *packed.items():
            self.register_buffer(name, value.to(original.weight.device))
        self.bias = original.bias

    def forward(self, x: Tensor) -> Tensor:
        state = {**dict(self.named_buffers()), "weight_shape": self.shape}
        state["weight_packed"] = state.pop("weight")
        return linear(x, self.packer.decompress(state, self.scheme)["weight"], self.bias)

    def held(self) -> list[Tensor]:
        """Lists the packed weight, scales and zero points."""
        return list(self.buffers())


def groups_of(weight: Tensor, _: emulation.RoundedSides | None = None, *, symmetric: bool) -> Tensor:
    """Rounds an FP32 weight to int4 in groups, whose ranges include 0, as the package does; returns FP64.

    A checkpoint holds these integers, so that no implementation may round to another side: of a symmetric range, the
    largest magnitude lies halfway between two of them.
    """
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0.0), groups.amax(-1, keepdim=True).clamp(min=0.0)
    scale = torch.maximum(-low, high) / (LEVELS / 2) if symmetric else (high - low) / LEVELS
    scale = scale.where(scale != 0, torch.finfo(torch.float32).eps)
    zero = torch.zeros_like(scale) if symmetric else torch.round(-MIDDLE - low / scale)
    integers = torch.round(groups / scale + zero).clamp(-MIDDLE, LEVELS - MIDDLE)
    return ((integers - zero).double() * scale.double()).reshape(weight.shape)


@dataclass(eq=False, kw_only=True)
class Deployed(Replacing):
    """Replaces every linear layer by one of a package that serves such checkpoints.

    Attributes:
        name, promise, source, family, packages, dtypes, modes: The same as of every technique. Weights of a checkpoint
            come from its own algorithm, so that rounding to nearest, or pruning, tells nothing about its accuracy.
        layer, words, stored, action: Layer, its options, the dtype of its weight, and the operation of each product.
        operators: Names of the operators that take the weight.
        rule, emulated: FP64 emulation of the weight, and of the layer: see `emulation.Dequantized`.
    """

    name: str
    promise: str
    source: str
    packages: Mapping[str, str] = field(default_factory=dict)
    layer: type[nn.Module]
    words: Mapping[str, Any]
    stored: torch.dtype
    action: str
    operators: frozenset[str]
    rule: Callable[[Tensor, emulation.RoundedSides], Tensor]
    emulated: type[emulation.Dequantized] = emulation.Dequantized
    family: str = Replacing.family
    dtypes: Sequence[str] = Replacing.dtypes
    modes: frozenset[Mode] = Replacing.modes
    workloads = WORKLOADS
    level = 2

    @property
    def oracle(self) -> str:
        return f"{self.name}-{GROUP if self.layer is PackedLinear else BLOCK}"

    def capability(self, device: Device) -> Capability:
        """Tries a layer with a weight that the format holds exactly; verdicts tell of errors within `TRIED`."""
        example = nn.Linear(BLOCK, 32, bias=False)
        row, used = torch.tensor([7.5, -7.5]).repeat(BLOCK // 2), torch.tensor([1.0, 0.0]).repeat(16)
        with torch.no_grad():
            example.weight.copy_(row * used.unsqueeze(1))
        place = {"device": device.torch_device(), "dtype": getattr(torch, self.dtypes[0])}
        x = torch.tensor([[1.0, 0.0] * (BLOCK // 2)], **place)
        try:
            with torch.no_grad():
                got = self.make(example.to(**place))(x).cpu()
        except ImportError as error:
            package, command = next(iter(self.packages.items()))
            return unavailable(Code.NO_PACKAGE, f"{package} does not import: {error}", command, tried=True)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            reason = f"{self.action} does not run on {device.name}: {str(error).splitlines()[0]}"
            return unsupported(Code.NO_FEATURE, reason, tried=True)
        expected = self.rule(example.weight.detach().cpu().float(), emulation.RoundedSides(None)) @ x.cpu().double().t()
        if not torch.allclose(got.double(), expected.t(), rtol=TRIED, atol=0.0):
            raise RuntimeError(f"{device.name}: {self.action}: expected {expected.t().tolist()}, got {got.tolist()}")
        return BY_TRIAL

    def make(self, linear: nn.Linear) -> nn.Module:
        return self.layer(linear, **self.words)

    def emulated_layer(self, linear: nn.Linear) -> nn.Module:
        return self.emulated(linear, self.rule)

    def is_action(self, operator: Operator) -> bool:
        return operator.name in self.operators and operator.takes(self.stored)

    def holds(self, layer: nn.Module) -> list[Tensor]:
        tensors: list[Tensor] = layer.held()  # type: ignore[operator]  # both layers have it
        return tensors


_bits = partial(
    Deployed, layer=NF4Linear, stored=torch.uint8, action="products with an NF4 weight",
    packages={"bitsandbytes": "pip install 'accelcheck[checkpoints]'"},
    source="https://huggingface.co/docs/bitsandbytes/reference/nn/linear4bit",
    operators=frozenset({"bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit"}),
)  # fmt: skip
_mixed = partial(
    _bits, layer=MixedLinear, stored=torch.int8, action="products of int8 values with an int8 weight",
    source="https://huggingface.co/docs/bitsandbytes/reference/nn/linear8bit",
    operators=frozenset({"bitsandbytes::int8_mixed_scaled_mm"}),
)  # fmt: skip
_packed = partial(
    Deployed, layer=PackedLinear, stored=torch.int32, action="unpacking of eight weights from an int32",
    packages={"compressed_tensors": "pip install 'accelcheck[checkpoints]'"}, modes=frozenset({Mode.FORWARD}),
    source="https://github.com/vllm-project/compressed-tensors", operators=frozenset({"aten::view"}),
)  # fmt: skip
_SCALE = f"one scale per {GROUP} neighbours"

TECHNIQUES: tuple[Technique, ...] = (
    _bits(
        name="nf4-bitsandbytes", words={"double": False}, rule=nf4,
        promise=f"Linear layers store weights in NF4 (one scale per {BLOCK} neighbours), and multiply in FP32."),
    _bits(
        name="nf4-bitsandbytes-double", words={"double": True}, rule=nf4_double,
        promise="Linear layers store weights in NF4 with scales of 8 bits, and multiply in FP32."),
    _mixed(
        name="int8-bitsandbytes", words={}, rule=rows_of, emulated=MixedEmulation,
        promise=f"Linear layers multiply int8 weights and activations, and columns from {OUTLIER:g} on in FP32."),
    _packed(
        name="int4-packed-gptq", words={"symmetric": True}, rule=partial(groups_of, symmetric=True),
        promise=f"Linear layers unpack a GPTQ checkpoint's int4 weights ({_SCALE}), and multiply in FP32."),
    _packed(
        name="int4-packed-awq", words={"symmetric": False}, rule=partial(groups_of, symmetric=False),
        promise=f"Linear layers unpack an AWQ checkpoint's int4 weights ({_SCALE} and zero point); products are FP32."),
)  # fmt: skip
