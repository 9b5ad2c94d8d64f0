"""Finds the traits of a model from its modules and the operators of one forward pass."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accelcheck.devices.torch_names import TorchDispatchMode, dropout_base
from accelcheck.workloads.base import Problem, flatten, is_inexact
from accelcheck.workloads.blocks import blocks_of, called_twice
from accelcheck.workloads.dispatch import layer_by_layer
from accelcheck.workloads.probes import quieted

ALIKE = 1e-3
"""Relative distance allowed between a sample's result alone and in its batch: other sizes round differently."""
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot"})


def found_traits(problem: Problem) -> Iterator[str]:
    """Yields the visible traits: of modules, and of one forward pass in evaluation mode; may change the problem.

    Others have to be stated: ``activations`` and those of a test's own models.
    """
    module = quieted(problem).module.eval()
    parts = list(module.modules())
    if any(type(part) is nn.Linear for part in parts):
        yield "linear"
    if any(isinstance(part, NORMS) for part in parts):
        yield "batchnorm"
    if any(getattr(part, "inplace", None) is False and not isinstance(part, dropout_base) for part in parts):
        yield "inplace"
    with torch.no_grad(), layer_by_layer(), _Functions() as functions, _Operators() as operators:
        out = module(*problem.inputs)
    if functions.attention:
        yield "attention"
    if operators.products:
        yield "matmul"
    if operators.images:
        yield "conv"
    # Python decisions by `bool(tensor)` and `tensor.item()` defeat traces, unless the model skips them while traced.
    if "aten::_local_scalar_dense" in operators.seen and not _exportable(module, problem.inputs):
        yield "branching"
    yield from _tried(module, problem.inputs, out)


def _tried(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> Iterator[str]:
    """Yields traits that further runs show; `out` is the module's result for these inputs."""
    if _repeats_blocks(module, inputs, out):
        yield "blocks"
    if _samplewise(module, inputs, out):
        yield "samplewise"
    if _scriptable(module):
        yield "scriptable"


class _Functions(TorchFunctionMode):
    """Records calls of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Calls by `nn.MultiheadAttention` are invisible; it calls attention unless it returns its weights.
        whole = func is nn.functional.multi_head_attention_forward and not (kwargs or {}).get("need_weights", True)
        self.attention |= whole or func is nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Records dispatched operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen: set[str] = set()
        self.images = self.products = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition(".")[0]
        # Autocast and quantization leave complex products as they are.
        self.products |= name in _PRODUCTS and args[0].is_floating_point()
        self.seen.add(name)
        self.images |= name == "aten::convolution" and args[0].dim() == 4
        return func(*args, **(kwargs or {}))


def _samplewise(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> bool:
    """True if the first sample alone gives its result in the batch, in every output."""
    try:
        results = [tensor for _, tensor in flatten(out)]
        sizes = {value.shape[0] if value.dim() else 0 for value in (*inputs, *results)}
        if len(sizes) != 1 or sizes.pop() < 2:
            return False
        with torch.no_grad():
            alone = [tensor for _, tensor in flatten(module(*(value[:1] for value in inputs)))]
    except Exception:  # noqa: BLE001 - a model need not take one sample
        return False
    pairs = zip(alone, results, strict=True)
    return len(alone) == len(results) and all(alike(single, whole[:1]) for single, whole in pairs)


def _repeats_blocks(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> bool:
    """True if the module calls all of its blocks, and gives the same result when each is called once more."""
    blocks = blocks_of(module)
    if blocks is None:
        return False
    try:
        with torch.no_grad(), called_twice(module) as seen:
            again = [tensor for _, tensor in flatten(module(*inputs))]
        results = [tensor for _, tensor in flatten(out)]
    except Exception:  # noqa: BLE001 - blocks need not take a second call
        return False
    same = len(again) == len(results) and all(map(alike, again, results))
    return same and set(blocks) == set(seen)


def alike(one: Tensor, other: Tensor) -> bool:
    """True if two tensors differ by rounding errors alone."""
    if one.shape != other.shape:
        return False
    if not is_inexact(one):
        return torch.equal(one, other)
    return float((one - other).detach().norm()) <= ALIKE * float(other.detach().norm())


def _exportable(module: nn.Module, inputs: tuple[Any, ...]) -> bool:
    # An export that ends at a branch prints its graph so far.
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        torch.export.export(module, inputs)
        return True
    return False


def _scriptable(module: nn.Module) -> bool:
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        torch.jit.script(module)
        return True
    return False
