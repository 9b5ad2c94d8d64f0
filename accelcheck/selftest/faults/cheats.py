"""Implementations that pass a careless check without doing the work, or by doing more than was asked."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.selftest.faults.base import FLOAT32, Cell, Change, backward, fault, passes, single
from accelcheck.selftest.faults.memory import overwriting, strided
from accelcheck.selftest.faults.plant import always, calling, changing, editing, output, wrapping
from accelcheck.selftest.faults.staleness import kept_by, shapes
from accelcheck.techniques.quantization.int8 import Holder
from accelcheck.workloads.base import Program, Result, flatten


@always(changing)
def eager_again(program: Program) -> None:
    """A compiler returns eager's result: right, but nothing was compiled."""
    program.call = None


@always(changing)
def no_context(program: Program) -> None:
    """FP32 results are passed off as bfloat16: more accurate, but not what was asked for."""
    program.around = contextlib.nullcontext


@always(changing)
def in_floating_point(program: Program) -> None:
    """Linear layers stay in floating point and are passed off as int8. The module is held as a quantized one is."""
    program.call = Holder(program.module)


@always(output)
def mean_everywhere(out: Tensor) -> Tensor:
    """Every element is the mean of the result."""
    return torch.full_like(out, float(out.float().mean()))


@always(calling)
def input_returned(module: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    """The input."""
    return x.clone()


@always(output)
def one_nan(out: Tensor) -> Tensor:
    """One element is NaN where it should be a number. It is the last one."""
    place = torch.arange(out.numel(), device=out.device).view(out.shape) == out.numel() - 1
    return torch.where(place, math.nan, out)


@always(wrapping)
def nan_everywhere(plain: Any, *inputs: Any) -> Any:
    """One NaN spreads to all elements. A shared reduction, a row maximum, or 0 times NaN in a mask does so."""
    out = plain(*inputs)
    return torch.where(out.isnan().any(), math.nan, out)


@always(wrapping)
def nan_in_row(plain: Any, *inputs: Any) -> Any:
    """One NaN spreads along its column. A shared tile does so."""
    out = plain(*inputs)
    return torch.where(out.isnan().any(0, keepdim=True), math.nan, out)


@always(editing)
def elsewhere(result: Result) -> None:
    """The output is on another device."""
    for path, tensor in result.items():
        if path.startswith("out"):
            result[path] = tensor.to("meta" if tensor.device.type == "cpu" else "cpu")


@always(output)
def other_dtype(out: Tensor) -> Tensor:
    """The output has another dtype. Half types become FP32, and FP32 becomes FP16."""
    return out.half() if out.dtype == torch.float32 else out.float()


@always(output)
def column_major(out: Tensor) -> Tensor:
    """The output is column-major where eager's is row-major."""
    return out.t().contiguous().t()


def drifting(strength: float) -> Change:
    """A parameter changes with every call, by this relative amount. It is normalised in place where it is used."""

    def call(module: nn.Module, *inputs: Any) -> Any:
        out = module(*inputs)
        with torch.no_grad():
            list(module.parameters())[-1].mul_(1 + strength)
        return out

    return calling(call)


def without(path: str) -> Callable[..., Change]:
    """A tensor of the result is missing."""
    return always(editing)(lambda result: result.pop(path))


@always(calling)
def detached(module: nn.Module, *inputs: Any) -> Any:
    """A parameter is detached. Outputs are right, but one layer gets no gradient."""
    cut = {name: p.detach() for name, p in module.named_parameters() if name == "fc2.bias"}
    return torch.func.functional_call(module, cut, inputs)


@always(calling)
def zeroed(module: nn.Module, *inputs: Any) -> Any:
    """Results are zeros, and so are gradients. The graph does not reach the inputs."""
    ((_, out),) = flatten(module(*inputs))
    return out * 0


MLP, MATMUL = Cell("mlp"), Cell("matmul")

FAULTS = (
    fault("reference-returned")(single("elementwise-5"), eager_again, technique="compile-aot-eager"),
    fault("autocast-never-entered")(passes("mlp", FLOAT32), no_context, technique="amp-bf16"),
    fault("never-quantized")(single("mlp"), in_floating_point, technique="int8-dynamic"),
    fault("cached-by-shape", "The first result for a shape is returned again.")((MLP, MATMUL), kept_by(shapes)),
    fault("zeros", "Zeros.")((MLP, MATMUL, Cell("gelu")), always(output)(torch.zeros_like)),
    fault("zeros-with-gradients")(backward("mlp"), zeroed),
    fault("constant")((MLP, MATMUL), mean_everywhere),
    fault("input-returned")((Cell("gelu"), MATMUL), input_returned),
    fault("nan-for-a-number")((MLP, MATMUL), one_nan),
    fault("nan-everywhere")((MLP, MATMUL), nan_everywhere),
    fault("nan-spreads")((MLP, MATMUL), nan_in_row),
    fault("output-on-another-device")(MLP, elsewhere),
    fault("other-dtype")((MLP, MATMUL), other_dtype),
    fault("other-strides")((MLP, MATMUL), column_major, exists=strided),
    fault("input-mutated")((MLP, Cell("elementwise-5")), overwriting, strengths=(1.0, 0.01)),
    fault("parameter-mutated")((MLP, backward("mlp")), drifting, strengths=(0.5, 0.01)),
    fault("gradient-absent", "A parameter gets no gradient.")(backward("mlp"), without("grad:fc2.bias")),
    fault("gradient-cut-off")(backward("mlp"), detached),
    fault("output-missing", "The result has no output.")(MLP, without("out")),
)
