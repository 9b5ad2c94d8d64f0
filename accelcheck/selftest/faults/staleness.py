"""Faults of code and constants that outlive sizes, weights or addresses, and of lost side effects."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import HALVES, Cell, Change, alike, backward, fault, passes, single
from accelcheck.selftest.faults.plant import always, calling, wrapping
from accelcheck.techniques.compilation.graphed import GraphedCallables
from accelcheck.techniques.eager import Eager
from accelcheck.workloads.base import Program


class Resized(Eager):
    """Eager, called with other sizes before, for faults of code that serves all sizes."""

    name = "eager-resized"
    requires = frozenset({"resizable"})
    resizing = True
    warmups = 2


def address(tensor: Tensor) -> int:
    """A tensor's identity to a cache: its address, or its handle on a device that hides addresses."""
    return tensor.data_ptr() if tensor.device.type in {"cpu", "cuda"} else id(tensor)


def reading_with(choose: Callable[[list[int]], int]) -> Change:
    """Read the input with a leading dimension that is chosen from those of all calls, the present one last."""
    sizes: list[int] = []

    def call(plain: Any, x: Tensor) -> Any:
        sizes.append(x.size(0))
        return plain(read_with(x, choose(sizes)))

    return wrapping(call)


def read_with(x: Tensor, rows: int) -> Tensor:
    """Reads column-major ``x (B, K)`` as if its columns were `rows` long."""
    flat = x.t().reshape(-1)
    place = torch.arange(x.size(1)).unsqueeze(0) * rows + torch.arange(x.size(0)).unsqueeze(1)
    return flat[(place % flat.numel()).to(x.device)]


def first_divisor(strength: float) -> Change:
    """A mean divides by the size of the first call."""
    sizes: list[int] = []

    def call(plain: Any, x: Tensor, lengths: Tensor) -> Any:
        sizes.append(x.size(1))
        # The longest sequence fills the batch; its length is the size that became a constant.
        factors = torch.where(lengths == x.size(1), x.size(1) / sizes[0], 1.0).unsqueeze(-1)
        return plain(x, lengths) * factors.to(x.dtype)

    return wrapping(call)


def first_branch(strength: float) -> Change:
    """A branch on the batch size is taken as in the first call. A kernel of two rows at a time skips a last one."""
    odd: list[bool] = []

    def call(plain: Any, x: Tensor) -> Any:
        rows = x.size(0)
        odd.append(rows % 2 == 1)
        paired = 2 * ((rows - 1) // 2 if odd[0] else rows // 2)
        index = torch.arange(rows)
        written = (index < paired) | (odd[0] & (index == rows - 1))
        return plain(x) * written.unsqueeze(-1).to(x.device)

    return wrapping(call)


class StaleParameter(torch.autograd.Function):
    """A parameter with an old value; its gradient goes to the current one."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, old: Tensor) -> Tensor:
        return old.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def stale_parameters(*endings: str) -> Change:
    """Parameters whose names end so are constants of the first call, folded or packed only then."""
    kept: dict[str, Tensor] = {}

    def call(module: nn.Module, *inputs: Any) -> Any:
        apply: Any = StaleParameter.apply
        named = {name: p for name, p in module.named_parameters() if name.endswith(endings)}
        frozen = {name: apply(p, kept.setdefault(name, p.detach().clone())) for name, p in named.items()}
        return torch.func.functional_call(module, frozen, inputs)

    return calling(call)


def kept_by(key: Callable[[tuple[Any, ...]], Any]) -> Callable[[float], Change]:
    """Caches results by a key of the inputs."""

    def plant(strength: float) -> Change:
        kept: dict[Any, Any] = {}

        def call(plain: Any, *inputs: Any) -> Any:
            place = key(inputs)
            if place not in kept:
                # The inputs are kept with their result, so that no other tensor can get their address.
                kept[place] = (plain(*inputs), inputs)
            return kept[place][0]

        return wrapping(call)

    return plant


def addresses(inputs: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(address(value) for value in inputs if isinstance(value, Tensor))


def shapes(inputs: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for value in inputs if isinstance(value, Tensor))


def rewritten(edit: Callable[[fx.GraphModule], None]) -> Change:
    """Run a traced graph of the module, changed in place."""

    def change(program: Program) -> None:
        traced = program.call = fx.symbolic_trace(program.module)
        edit(traced)
        traced.recompile()

    return change


@always(rewritten)
def without_effect(traced: fx.GraphModule) -> None:
    """A graph pass that makes batch norm a pure function loses its running statistics."""
    graph = traced.graph
    for node in graph.nodes:
        layer = traced.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(layer, nn.BatchNorm2d):
            with graph.inserting_before(node):
                weight, bias = (graph.get_attr(f"{node.target}.{name}") for name in ("weight", "bias"))
                options: dict[str, Any] = {"weight": weight, "bias": bias, "training": True, "eps": layer.eps}
                pure = graph.call_function(functional.batch_norm, (node.args[0], None, None), options)
            node.replace_all_uses_with(pure)
            graph.erase_node(node)


@always(rewritten)
def without_cast(traced: fx.GraphModule) -> None:
    """A graph pass removes the cast back to the storage dtype: the output is FP32."""
    graph = traced.graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    value = output.args[0]
    with graph.inserting_before(output):
        wide = graph.call_method("float", (value,))
        total = graph.call_function(operator.add, (wide, 0.0))
        back = graph.call_method("to", (total, next(traced.parameters()).dtype))
    output.replace_input_with(value, back)
    back.replace_all_uses_with(total)
    graph.erase_node(back)


graphed = alike(technique="graphed-callables", exists=GraphedCallables().answer)
resized = alike(number=26, technique=Resized())

FAULTS = (
    resized(
        "stale-leading-dimension", "A kernel for all sizes has the leading dimension of the first call as a constant."
    )((Cell("matmul"), Cell("mlp")), lambda _: reading_with(lambda sizes: sizes[0])),
    resized("kernel-of-the-size-before", "A cache of kernels by size returns the kernel of the call before.")(
        (Cell("matmul"), Cell("mlp")), lambda _: reading_with(lambda sizes: sizes[-2:][0])
    ),
    resized("stale-divisor")(Cell("mean-pool"), first_divisor),
    graphed("graph-first-inputs", "A graph has the inputs of its capture.")(single("mlp"), kept_by(shapes)),
    graphed("graph-first-weights", "A graph has old weights.")(single("mlp"), lambda _: stale_parameters("weight")),
    resized("stale-branch-on-size")(Cell("mlp"), first_branch),
    fault("stale-weights", "Weights are packed in the first call, and not again when they change.")(
        (Cell("mlp"), Cell("train-mlp", Mode.TRAIN)), lambda _: stale_parameters("weight"), number=27
    ),
    fault("stale-bias", "One bias is folded into a constant in the first call.")(
        (Cell("mlp"), Cell("train-mlp", Mode.TRAIN)), lambda _: stale_parameters("fc2.bias"), number=27
    ),
    fault(
        "cached-at-address",
        "A result is cached by the addresses of the inputs, and returned again when these hold other values.",
    )((Cell("mlp"), Cell("matmul"), Cell("mean-pool")), kept_by(addresses), number=28),
    fault("fx-drops-side-effect")(backward("cnn"), without_effect, number=39),
    fault("fx-drops-cast")(
        passes("mlp", HALVES),
        without_cast,
        number=39,
        absent={"float32": "the output is FP32 with the cast and without it"},
    ),
)
