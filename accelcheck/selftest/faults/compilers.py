"""Faults of compilers: inductor's kernels, lowerings and graphs, Dynamo's guards, AOTInductor, export, TorchScript."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, fx

from accelcheck.devices import torch_names
from accelcheck.selftest.faults import sowing
from accelcheck.selftest.faults.base import FLOAT32, HALVES, Cell, alike, derived, fault, passes, single, trained
from accelcheck.selftest.faults.sowing import Around, calls_of, exported, graph_pass, in_cpp, kernel_text, replacing

if TYPE_CHECKING:
    import re
    from collections.abc import Callable
    from contextlib import AbstractContextManager


COMPILED = 2
"""Number of seeds of faults that compile something, seconds each."""
ONCE = dict.fromkeys(
    HALVES,
    "it is in a graph that has no dtypes yet: planted once, in float32, since each case takes seconds to compile",
)


LOOP = r"(?P<name>x0)<static_cast<int64_t>\((?P<last>\d+)L\);"
"""The outermost loop of a kernel in inductor's C++."""


def shorter_loop(match: re.Match[str]) -> str:
    """The loop of a generated kernel ends before the last tile."""
    last = int(match["last"])
    return f"{match['name']}<static_cast<int64_t>({last - (64 if last > 1024 else 1)}L);"


dynamic_loop_short = kernel_text(r"x0<static_cast<int64_t>\(ks\d+\)", lambda match: f"{match[0]} - 1", most=1)
"""A kernel for all sizes has a loop that ends one row too early."""


def sine_by_series(strength: float) -> AbstractContextManager[Any]:
    """A lowering computes sines from the first terms of the series. The argument's range is not reduced."""
    ops, table = torch.ops.aten, torch_names.lowering.lowerings

    def lowered(x: Any) -> Any:
        multiply, add = table[ops.mul.Tensor], table[ops.add.Tensor]
        square = multiply(x, x)
        inner = add(multiply(square, 1 / 120), -1 / 6)
        return multiply(x, add(multiply(square, inner), 1.0))

    return sowing.fresh_code(mock.patch.dict(table, {ops.sin.default: lowered}))


def bias_gradient_short(graph: fx.Graph) -> int:
    """A pass over the backward graph loses the last row of the batch in the gradients of biases."""
    sums = [node for node in calls_of(graph, "sum") if node.args[1] == [0]]
    for node in sums:
        with graph.inserting_before(node):
            rows = node.all_input_nodes[0]
            fewer = graph.call_function(torch.ops.aten.slice.Tensor, (rows, 0, 0, -1))
            fewer.meta["val"] = rows.meta["val"][:-1]
        node.replace_input_with(rows, fewer)
    return len(sums)


@replacing(torch, "compile")
def unguarded(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compiled code is used again after what it depends on has changed. Python numbers have no guards."""

    def kept(guards: list[Any]) -> list[bool]:
        return [guard.guard_type not in {"CONSTANT_MATCH", "EQUALS_MATCH"} for guard in guards]

    return plain(*args, **kwargs, options={"guard_filter_fn": kept})


@replacing("accelcheck.devices.torch_names:AOTICompiledModel", "load_constants")
def copied_constants(plain: Callable[..., Any], model: Any, constants: dict[str, Tensor], **options: Any) -> Any:
    """A package copies the weights that it is to share, and does not follow their changes."""
    kept = model.__dict__.setdefault("kept", {name: value.detach().clone() for name, value in constants.items()})
    return plain(model, kept, **options)


def loaded(edit: Callable[[fx.Graph], int]) -> Around:
    """Edit programs that are loaded from a file, while active."""

    def wrong(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        program = plain(*args, **kwargs)
        if not edit(program.graph_module.graph):
            raise LookupError("nothing planted: the loaded graph has no such node")
        program.graph_module.recompile()
        return program

    return replacing(torch.export, "load")(wrong)


def bounds_moved(graph: fx.Graph) -> int:
    """Two slices of the exported graph meet one element too early."""
    first, second = calls_of(graph, "slice")[:2]
    first.args = (*first.args[:2], -6, *first.args[3:])
    second.args = (*second.args[:3], -6, *second.args[4:])
    return 2


def mask_short(graph: fx.Graph) -> int:
    """A program that was saved and loaded compares positions with <= where < was written."""
    (compared,) = calls_of(graph, "lt")
    compared.target = torch.ops.aten.le.Tensor
    return 1


def scripted(by: str) -> Callable[[Callable[[Any], None]], Around]:
    """A decorator for functions that change, in place, the graph of the result of this function of ``torch.jit``."""

    def decorate(edit: Callable[[Any], None]) -> Around:
        @functools.wraps(edit)
        def wrong(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            script = plain(*args, **kwargs)
            torch_names.jit_inline(script.graph)
            edit(script.graph)
            return script

        return replacing(torch.jit, by)(wrong)

    return decorate


@scripted("trace")
def epsilon_times_ten(graph: Any) -> None:
    """A traced graph has another epsilon in its layer norm. It is ten times as large."""
    (norm,) = graph.findAllNodes("aten::layer_norm")
    graph.setInsertPoint(norm)
    norm.replaceInput(4, graph.insertConstant(1e-4))


@scripted("freeze")
def constant_rounded(graph: Any) -> None:
    """A weight is rounded when freezing makes it a constant of the graph. It is rounded to bfloat16."""
    for node in graph.findAllNodes("prim::Constant"):
        if node.hasAttribute("value") and node.kindOf("value") == "t" and node.t("value").dim() == 2:
            node.t_("value", node.t("value").bfloat16().float())
            return
    raise LookupError("nothing planted: the graph has no constant matrix")


@scripted("script")
def relu_lost(graph: Any) -> None:
    """A pass over a script's graph removes its last activation."""
    node = graph.findAllNodes("aten::relu")[-1]
    node.output().replaceAllUsesWith(next(node.inputs()))


static = alike(technique="compile-static", seeds=COMPILED)
slow = alike(seeds=5)
exporting, reloading = alike(technique="export", seeds=5), alike(technique="export-dynamic", seeds=5)
once = alike(seeds=1)

FAULTS = (
    static("inductor-tail-unwritten", shorter_loop)(
        (Cell("mlp"), Cell("layer-norm-narrow")), around=kernel_text(LOOP, shorter_loop, most=1), exists=in_cpp
    ),
    static("inductor-sine-by-series")(single("elementwise-5"), around=sine_by_series, absent=ONCE),
    static("inductor-bias-gradient-short", bias_gradient_short)(
        (derived("mlp"), trained("train-mlp")), around=graph_pass(bias_gradient_short), absent=ONCE
    ),
    fault(
        "inductor-dynamic-size-constant", "A kernel for all sizes ends its loop where that of the second size ended."
    )(single("mean-pool"), around=dynamic_loop_short, exists=in_cpp, technique="compile-dynamic", seeds=COMPILED),
    once("dynamo-dynamic-size-constant", "A kernel for a stream of sizes ends its loop one row too early.")(
        single("stream-lengths"), around=dynamic_loop_short, exists=in_cpp, technique="dynamo-stream-dynamic"
    ),
    fault("guards-skipped")(single("stream-lengths"), around=unguarded, technique="dynamo-stale", seeds=3),
    once("aot-inductor-constants-copied")(single("mlp"), around=copied_constants, technique="aot-inductor-constants"),
    once("aot-inductor-relu-lost", "A pass over the graph of a package removes its last activation.")(
        single("mlp"), around=graph_pass(sowing.without_call("relu")), technique="aot-inductor-constants"
    ),
    exporting("export-slice-moved", bounds_moved)(passes("slicing", FLOAT32), around=exported(bounds_moved)),
    exporting("export-bias-dropped", "The exported graph has lost the last layer's bias.")(
        (single("mlp"), derived("mlp"), trained("train-mlp")), around=exported(sowing.with_argument("linear", 2, None))
    ),
    reloading("export-comparison-mapped-wrong", mask_short)(
        (single("mean-pool"), derived("attention-ragged")), around=loaded(mask_short)
    ),
    reloading(
        "export-causal-lost",
        "A program that was saved and loaded has lost the attribute that makes its attention causal.",
    )(single("attention-causal"), around=loaded(sowing.with_argument("scaled_dot_product_attention", 5, value=False))),
    slow("trace-epsilon-wrong")(passes("layer-norm-narrow", FLOAT32), around=epsilon_times_ten, technique="jit-trace"),
    slow("script-relu-lost")((single("mlp"), trained("train-mlp")), around=relu_lost, technique="jit-script"),
    slow("freeze-rounds-constant")(single("mlp"), around=constant_rounded, technique="jit-freeze"),
)
