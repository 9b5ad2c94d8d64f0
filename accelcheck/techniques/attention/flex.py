"""FlexAttention: attention with a mask function and a score function, compiled to one kernel or run eagerly."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.packages import release
from accelcheck.techniques.attention.intercept import Call, intercept, taken
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation import compile as compilation
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.base import Program

_CLEAR_REFUSAL = (2, 11)
"""First torch that refuses a backward pass on the CPU with a clear error; before, inductor raised an IndexError."""
_REFUSALS = ("FlexAttention does not support backward", "FlexAttention is only supported on")
_SCORES = r"aten::_safe_softmax"
"""Operator dispatched once per call that computes the score matrix: see `accelcheck.techniques.attention.sdpa`."""
_FOUND = "flex operators"
"""Key in `Program.extras` of the number of `flex_attention` operators in each compiled graph."""
_TEMPLATE = r"triton_tem_fused.*"
"""Pattern of kernels that inductor generates from Triton templates."""


class FlexEager(compilation.Compilation):
    """Replaces ``scaled_dot_product_attention`` by uncompiled ``flex_attention``, which computes the score matrix."""

    name = "flex-attention-eager"
    family = "attention"
    promise = "Attention with a mask function and a score function equals attention with a mask and a bias."
    source = "https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html"
    level = 2  # each call captures its functions anew
    early = frozenset({"attention-mask"})
    dtypes = ("float32", "bfloat16", "float16")
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    requires = frozenset({"attention"})
    keeps_strides = False
    warmups = 0

    def capability(self, device: Device) -> Capability:
        reason = f"flex_attention supports cpu, cuda, hpu, mps, xpu, not {device.type}"
        return SUPPORTED if device.has("flex-attention") else unsupported(Code.NO_BACKEND, reason)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        intercept(program, partial(attend, flex_attention))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from taken(program, log, "flex_attention")
        yield at_least("score matrices held", log.count(_SCORES))
        yield exactly("inductor graphs called", log.count(compilation.INDUCTOR_GRAPH), 0)


class FlexCompiled(FlexEager):
    """``torch.compile(flex_attention)``: one kernel, into which the mask and score functions are inlined."""

    name = "flex-attention"
    promise = "One compiled kernel computes exact attention with any mask and score function."
    level = 3
    early = frozenset({"attention-causal", "attention-mask", "attention-packed", "attention-varlen"})
    modes = frozenset(Mode) - {Mode.RANDOM}

    def capability(self, device: Device) -> Capability:
        flex = super().capability(device)
        return compilation.inductor_capability(device) if flex.ok else flex

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if device.has("inductor-cpp") and mode not in _INFERENCE and release(torch.__version__) < _CLEAR_REFUSAL:
            raise Unsupported(unsupported(Code.NO_FEATURE, "inductor has no backward of flex_attention for the CPU"))
        compilation.reset_compiler()
        counts = program.extras[_FOUND] = list[int]()
        intercept(program, partial(attend, torch.compile(flex_attention, dynamic=False, backend=_counting(counts))))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from taken(program, log, "flex_attention")
        yield at_least("flex_attention operators in compiled graphs", sum(program.extras[_FOUND]))
        yield at_least("graphs compiled", compilation.graphs())
        yield at_least("compiled regions entered", log.count(compilation.REGION))
        yield at_least("inductor graphs called", log.count(compilation.INDUCTOR_GRAPH))
        if mode not in _INFERENCE:
            yield at_least("compiled backward graphs called", log.count(compilation.BACKWARD_GRAPH))
        if device.has("inductor-triton"):
            yield at_least("kernels of Triton templates launched", log.count(_TEMPLATE))
        yield exactly("score matrices held", log.count(_SCORES), 0)


_INFERENCE = frozenset({Mode.FORWARD, Mode.ACCURACY})
"""Modes without gradients."""


def attend(flex: Callable[..., Tensor], call: Call) -> Tensor:
    """Computes the attention of one call by `flex`: `flex_attention`, compiled or not.

    Raises `Unsupported` for dropout, which `flex_attention` lacks, or if torch refuses the device or the backward pass.
    """
    if call.dropout_p:
        raise Unsupported(unsupported(Code.NO_FEATURE, "flex_attention has no dropout"))
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    batch, heads, queries, keys = call.sizes
    mask = call.mask()
    blocks = partial(create_block_mask, Q_LEN=queries, KV_LEN=keys, device=str(call.query.device))
    if call.is_causal:
        options["block_mask"] = blocks(causal, None, None)
    elif mask is not None and mask.dtype == torch.bool:
        options["block_mask"] = blocks(lambda b, h, q, k: mask[b, h, q, k], batch, heads)
    elif mask is not None:
        options["score_mod"] = lambda score, b, h, q, k: score + mask[b, h, q, k]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex(call.query, call.key, call.value, **options)
    except (NotImplementedError, ValueError) as error:
        if not any(refusal in str(error) for refusal in _REFUSALS):
            raise
        reason = str(error).partition(". ")[0]
        raise Unsupported(unsupported(Code.NO_FEATURE, f"torch {torch.__version__}: {reason}", tried=True)) from error


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Mask function: a query sees keys up to its own position, aligned to the top left as torch's causal attention."""
    return query >= key


def _counting(counts: list[int]) -> Callable[..., Any]:
    """Wraps inductor in a backend that appends each graph's number of `flex_attention` operators to `counts`."""
    from accelcheck.devices.torch_names import lookup_backend

    inductor = lookup_backend("inductor")

    def counting_inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        counts.append(sum(node.target is torch.ops.higher_order.flex_attention for node in graph.graph.nodes))
        return inductor(graph, inputs)

    return counting_inductor


TECHNIQUES: tuple[Technique, ...] = (FlexEager(), FlexCompiled())
