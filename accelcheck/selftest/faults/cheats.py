"""Implementations that pass a careless check without doing the work, or by doing more than was asked."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.selftest.faults.base import FLOAT32, Cell, Change, backward, fault, passes, single
from accelcheck.selftest.faults.memory import overwriting, strided
from accelcheck.selftest.faults.plant import calling, editing, replacing, wrapping
from accelcheck.selftest.faults.staleness import kept_by, shapes
from accelcheck.techniques.quantization.int8 import Holder
from accelcheck.workloads.base import flatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.workloads.base import Program, Result


def always(change: Change) -> Callable[[float], Change]:
    """Plants of a change that has no degrees."""
    return lambda _: change


def eager_again(program: Program) -> None:
    """A compiler returns eager's result: right, but nothing was compiled."""
    program.call = None


def no_context(program: Program) -> None:
    """FP32 results are passed off as bfloat16: more accurate, but not what was asked for."""
    program.around = contextlib.nullcontext


def in_floating_point(program: Program) -> None:
    """Linear layers stay in floating point and are passed off as int8. The module is held as a quantized one is."""
    program.call = Holder(program.module)


def mean_everywhere(out: Tensor) -> Tensor:
    """Every element is the mean of the result."""
    return torch.full_like(out, float(out.float().mean()))


def input_returned(module: nn.Module, x: Tensor, *rest: Any) -> Tensor:
    """The input."""
    return x.clone()


def one_nan(out: Tensor) -> Tensor:
    """One element is NaN where it should be a number. It is the last one."""
    place = torch.arange(out.numel(), device=out.device).view(out.shape) == out.numel() - 1
    return torch.where(place, math.nan, out)


def nan_everywhere(plain: Any, *inputs: Any) -> Any:
    """One NaN spreads to all elements. A shared reduction, a row maximum, or 0 times NaN in a mask does so."""
    out = plain(*inputs)
    return torch.where(out.isnan().any(), math.nan, out)


def nan_in_row(plain: Any, *inputs: Any) -> Any:
    """One NaN spreads along its column. A shared tile does so."""
    out = plain(*inputs)
    return torch.where(out.isnan().any(0, keepdim=True), math.nan, out)


def elsewhere(result: Result) -> None:
    """The output is on another device."""
    for path, tensor in result.items():
        if path.startswith("out"):
            result[path] = tensor.to("meta" if tensor.device.type == "cpu" else "cpu")


def other_dtype(out: Tensor) -> Tensor:
    """The output has another dtype. Half types become FP32, and FP32 becomes FP16."""
    return out.half() if out.dtype == torch.float32 else out.float()


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


def without(path: str) -> Callable[[float], Change]:
    """A tensor of the result is missing."""

    def drop(result: Result) -> None:
        del result[path]

    return always(editing(drop))


def detached(program: Program) -> None:
    """A parameter is detached. Outputs are right, but one layer gets no gradient."""
    module = program.module

    def call(*inputs: Any) -> Any:
        cut = {name: p.detach() for name, p in module.named_parameters() if name == "fc2.bias"}
        return torch.func.functional_call(module, cut, inputs)

    program.call = call


def zeroed(program: Program) -> None:
    """Results are zeros, and so are gradients. The graph does not reach the inputs."""

    def call(*inputs: Any) -> Any:
        ((_, out),) = flatten(program.module(*inputs))
        return out * 0

    program.call = call


MLP, MATMUL = Cell("mlp"), Cell("matmul")

FAULTS = (
    fault("reference-returned", eager_again)(
        single("elementwise-5"), always(eager_again), technique="compile-aot-eager"
    ),
    fault("autocast-never-entered", no_context)(passes("mlp", FLOAT32), always(no_context), technique="amp-bf16"),
    fault("never-quantized", in_floating_point)(single("mlp"), always(in_floating_point), technique="int8-dynamic"),
    fault("cached-by-shape", "The first result for a shape is returned again.")((MLP, MATMUL), kept_by(shapes)),
    fault("zeros", "Zeros.")((MLP, MATMUL, Cell("gelu")), always(replacing(out=torch.zeros_like))),
    fault("zeros-with-gradients", zeroed)(backward("mlp"), always(zeroed)),
    fault("constant", mean_everywhere)((MLP, MATMUL), always(replacing(out=mean_everywhere))),
    fault("input-returned", input_returned)((Cell("gelu"), MATMUL), always(calling(input_returned))),
    fault("nan-for-a-number", one_nan)((MLP, MATMUL), always(replacing(out=one_nan))),
    fault("nan-everywhere", nan_everywhere)((MLP, MATMUL), always(wrapping(nan_everywhere))),
    fault("nan-spreads", nan_in_row)((MLP, MATMUL), always(wrapping(nan_in_row))),
    fault("output-on-another-device", elsewhere)(MLP, always(editing(elsewhere))),
    fault("other-dtype", other_dtype)((MLP, MATMUL), always(replacing(out=other_dtype))),
    fault("other-strides", column_major)((MLP, MATMUL), always(replacing(out=column_major)), exists=strided),
    fault("input-mutated")((MLP, Cell("elementwise-5")), overwriting, strengths=(1.0, 0.01)),
    fault("parameter-mutated")((MLP, backward("mlp")), drifting, strengths=(0.5, 0.01)),
    fault("gradient-absent", "A parameter gets no gradient.")(backward("mlp"), without("grad:fc2.bias")),
    fault("gradient-cut-off", detached)(backward("mlp"), always(detached)),
    fault("output-missing", "The result has no output.")(MLP, without("out")),
)
