"""Faults of quantized layers: packed weights, scales, zero points, and kernels; `quantized` has handwritten kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelcheck.devices import torch_names
from accelcheck.selftest.faults.base import Cell, Change, alike, derived, single, trained
from accelcheck.selftest.faults.plant import Kernel, always, changing, kernel
from accelcheck.techniques.quantization.int8 import as_module
from accelcheck.techniques.quantization.semi_structured import TECHNIQUES as SPARSE
from accelcheck.workloads.base import Program


def layer_of(kind: str) -> Callable[[Callable[[Any], None]], Change]:
    """A function changes the last layer of the quantized module that is, or whose weight is, of a class by its name."""

    def of_class(part: Any) -> bool:
        return kind in {type(part).__name__, type(getattr(getattr(part, "weight", None), "data", None)).__name__}

    def how(edit: Callable[[Any], None]) -> Change:
        def change(program: Program) -> None:
            parts = [part for part in as_module(program.call).modules() if of_class(part)]
            if not parts:
                raise LookupError(f"nothing planted: the quantized module has no {kind}")
            edit(parts[-1])

        return change

    return how


@always(layer_of("Linear"))
def bias_lost(layer: Any) -> None:
    """A layer is packed without its bias."""
    layer.set_weight_bias(layer.weight(), None)


@always(layer_of("Linear"))
def channel_stale(layer: Any) -> None:
    """The last channel of a packed weight holds other integers. They are those of the channel before."""
    weight, bias = layer.weight(), layer.bias()
    integers = weight.int_repr()
    integers[-1] = integers[-2]
    rebuilt = (
        torch_names.per_tensor_quantized(integers, weight.q_scale(), weight.q_zero_point())
        if weight.qscheme() == torch.per_tensor_affine
        else torch_names.per_channel_quantized(
            integers, weight.q_per_channel_scales(), weight.q_per_channel_zero_points(), weight.q_per_channel_axis()
        )
    )
    layer.set_weight_bias(rebuilt, bias)


@always(layer_of("Linear"))
def zero_point_moved(layer: Any) -> None:
    """A calibrated zero point is one too large."""
    layer.zero_point = layer.zero_point + 1


@torch.no_grad()
def scales_rolled(layer: Any) -> None:
    """Channels, or groups, have the scales of their neighbours."""
    layer.weight.data.scale.copy_(layer.weight.data.scale.roll(1, 0))


@always(layer_of("NibbleLinear"))
@torch.no_grad()
def nibbles_swapped(layer: Any) -> None:
    """In one channel the two weights of a byte are swapped. It is the last one."""
    last = layer.weight[-1].clone()
    layer.weight[-1] = (last >> 4) | ((last & 15) << 4)


@always(layer_of("PackedLinear"))
def halves_swapped(layer: Any) -> None:
    """In one channel the two weights of a byte of a packed word are swapped. It is the last one."""
    last = layer.weight[-1].view(torch.uint8)
    last.copy_((last >> 4) | ((last & 15) << 4))


@always(layer_of("PackedLinear"))
def zero_points_rolled(layer: Any) -> None:
    """Packed groups have the zero points of the groups before."""
    layer.weight_zero_point.copy_(layer.weight_zero_point.roll(1, -1))


@always(layer_of("MixedLinear"))
def mixed_scales_rolled(layer: Any) -> None:
    """Rows of an int8 weight have the scales of the rows before."""
    scales = layer.held()[1]
    scales.copy_(scales.roll(1))


@always(layer_of("MixedLinear"))
def mixed_row_stale(layer: Any) -> None:
    """The last row of an int8 weight holds other integers. They are those of the row before."""
    integers = layer.held()[0]
    integers[-1] = integers[-2]


@always(kernel("_int_mm"))
def last_depth_dropped(func: Any, left: Tensor, right: Tensor) -> Tensor:
    """An int8 product leaves out the last element of its depth."""
    func(left, right)  # so that observers of the run see the operator
    return (left[:, :-1].int() @ right[:-1].int()).int()


@always(kernel("_weight_int4pack_mm_for_cpu"))
def group_stale(func: Any, x: Tensor, weight: Tensor, size: int, scales: Tensor) -> Any:
    """The last group of 4-bit weights is multiplied by another group's scale. It is that of the group before."""
    wrong = scales.clone()
    wrong[-1, -1] = wrong[-1, -2]
    return func(x, weight, size, wrong)


@always(kernel("_scaled_mm"))
def first_scale_for_all(func: Any, left: Tensor, right: Tensor, scale_a: Tensor, *rest: Any, **options: Any) -> Any:
    """All rows of a float8 product have the scale of the first."""
    return func(left, right, scale_a[:1].expand_as(scale_a).contiguous(), *rest, **options)


@always(kernel("_scaled_mm"))
def float8_depth_dropped(func: Any, left: Tensor, right: Tensor, *rest: Any, **options: Any) -> Any:
    """A float8 product leaves out the last tile of its depth."""
    short = left.view(torch.uint8).clone()
    short[:, -16:] = 0
    return func(short.view(left.dtype), right, *rest, **options)


@always(kernel("round"))
def truncating(func: Kernel, x: Tensor) -> Tensor:
    """Fake quantization truncates where it should round to nearest."""
    return func(x).where(x.sign() == 0, x.trunc())


def quantizing_node(index: int, moved: Callable[[Any], Any]) -> Callable[[float], Change]:
    """Change the scale (index 1) or zero point (2) of the last operator of a graph that quantizes activations."""

    def change(program: Program) -> None:
        graph: Any = program.call
        calls = (node for node in graph.graph.nodes if node.op == "call_function")
        nodes = [node for node in calls if "quantize_per_tensor" in str(node.target)]
        for node in nodes[-2:]:  # the pair that quantizes and dequantizes, or else only the rounding would differ
            node.args = (*node.args[:index], moved(node.args[index]), *node.args[index + 1 :])
        graph.recompile()

    return lambda _: change


@always(changing)
def unquantized_weight(program: Program) -> None:
    """One layer's weight is trained without fake quantization."""
    parts = [part for part in program.module.modules() if hasattr(part, "weight_fake_quantizer")]
    quantizer: Any = parts[-1].weight_fake_quantizer
    quantizer.forward = lambda weight: weight  # on this instance alone


BLOCK = (single("transformer-block"),)
MLP, WIDE_MLP = (single("mlp"),), Cell("mlp", dtypes=("float32", "bfloat16"))
HALF, sparse = Cell("mlp", dtypes=("bfloat16",)), always(layer_of("SparseLinear"))

fault = alike(seeds=5)

FAULTS = (
    fault("int8-bias-lost")(MLP, bias_lost, technique="int8-dynamic"),
    fault("int8-channel-stale")((*MLP, single("transformer-block")), channel_stale, technique="int8-static"),
    fault("int8-zero-point-moved")(MLP, zero_point_moved, technique="int8-static"),
    fault("torchao-scales-rolled", "Channels have the scales of their neighbours.")(
        (*MLP, single("multi-head-attention")),
        always(layer_of("Int8Tensor"))(scales_rolled),
        technique="int8-torchao-weight-only",
    ),
    fault("torchao-depth-dropped")(MLP, last_depth_dropped, technique="int8-torchao-dynamic"),
    fault("torchao-int4-scales-rolled", "Groups of 4-bit weights have the scales of other channels.")(
        MLP, always(layer_of("IntxUnpackedToInt8Tensor"))(scales_rolled), technique="int4-torchao-weight-only"
    ),
    fault("torchao-float8-scales-rolled", "Channels of float8 weights have the scales of their neighbours.")(
        MLP, always(layer_of("Float8Tensor"))(scales_rolled), technique="float8-torchao-weight-only"
    ),
    fault("int4-nibbles-swapped")(MLP, nibbles_swapped, technique="int4-weight-only", emulated=True),
    fault("mixed-scales-rolled")(BLOCK, mixed_scales_rolled, technique="int8-bitsandbytes"),
    fault("mixed-row-stale")(BLOCK, mixed_row_stale, technique="int8-bitsandbytes"),
    fault("packed-halves-swapped")(MLP, halves_swapped, technique="int4-packed-gptq"),
    fault("packed-zero-points-rolled")(MLP, zero_points_rolled, technique="int4-packed-awq"),
    fault("sparse-elements-late", "Elements of a compressed weight are one place late.")(
        (HALF,),
        sparse(lambda layer: layer.weight.packed.copy_(layer.weight.packed.roll(1))),
        technique="sparse-2-4",
        exists=SPARSE[0].capability,
    ),
    fault("sparse-places-rolled", "Rows of a sparse weight have their values at the places of other rows.")(
        (HALF,),
        sparse(lambda layer: layer.weight.meta.copy_(layer.weight.meta.roll(1, 0))),
        technique="sparse-2-4-cutlass",
        exists=SPARSE[1].capability,
    ),
    fault("int4-group-stale")(MLP, group_stale, technique="int4-weight-only-kernel"),
    fault("float8-first-scale-for-all")(WIDE_MLP, first_scale_for_all, technique="float8-scaled-mm-rowwise"),
    fault("float8-depth-dropped")(WIDE_MLP, float8_depth_dropped, technique="float8-scaled-mm"),
    fault("pt2e-scale-wrong", "A calibrated scale of the converted graph is one percent too large.")(
        MLP, quantizing_node(1, lambda scale: 1.01 * scale), technique="int8-pt2e-static"
    ),
    fault(
        "pt2e-zero-point-clipped",
        "A calibrated zero point of the converted graph is that of a symmetric range, so that half of the range "
        "is clipped.",
    )(single("multi-head-attention"), quantizing_node(2, lambda zero: zero + 64), technique="int8-pt2e-static"),
    fault("qat-truncates")((trained("train-mlp"), derived("mlp-blocks")), truncating, technique="int8-qat"),
    fault("qat-weight-left")(trained("train-mlp"), unquantized_weight, technique="int8-qat"),
)
