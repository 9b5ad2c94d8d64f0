"""Fused operators and long sums, written out: what an error budget needs to see of their inner roundings.

A fused attention, or the gradient of a softmax, sums and subtracts inside. Random errors of its result alone would not show what a
correct kernel errs where these sums cancel, so that samples are taken of the parts. For long sums see `blocks`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.explain import blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from accelcheck.explain.calls import OperatorCall

ATTENTION = "_scaled_dot_product_"
"""How the names of fused attention begin."""
SCALED = "_scaled_mm"
"""The product of float8 numbers."""
_CANCELLING = frozenset(
    [
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "native_group_norm_backward",
        "native_batch_norm_backward",
    ]
)
"""Operators whose inner sums cancel; torch's own decompositions give their parts."""
ELEMENTWISE = frozenset({"gelu", "gelu_backward"})
"""Functions whose usual formula cancels, as the 1 + erf(x) of GELU does far below 0."""
_TRAINS = 5
"""Position of the argument of batch norm that says whether it takes the statistics of the batch."""


def parts(call: OperatorCall) -> Callable[[], Any] | None:
    """A function that computes a call from its parts, without writing to its arguments; None where the operator has none."""
    name = call.name
    if name.startswith(ATTENTION):
        return (lambda: _attention_gradients(call)) if name.endswith("backward") else (lambda: _attention(call))
    if name == SCALED:
        return lambda: _scaled_product(call)
    if call.written():
        return None
    if name in blocks.STORED:
        return lambda: blocks.STORED[name](call)
    return _product_of(call) or _norm_of(call)


def _product_of(call: OperatorCall) -> Callable[[], Any] | None:
    return (lambda: blocks.product(call)) if call.name in blocks.SUMMED and not call.kwargs else None


def _norm_of(call: OperatorCall) -> Callable[[], Any] | None:
    if call.name == "native_batch_norm" and not call.args[_TRAINS]:
        return lambda: blocks.scaled_and_shifted(call)
    if call.name not in _CANCELLING | ELEMENTWISE:
        return None
    from accelcheck.devices.torch_names import decomposition_table

    known = decomposition_table.get(call.func)
    return None if known is None else lambda: known(*call.args, **call.kwargs)


def stored(call: OperatorCall) -> bool:
    """Whether libraries keep the partial sums of an operator in the storage dtype: gradients of parameters, and losses."""
    return call.name in blocks.STORED


def only_by_parts(call: OperatorCall) -> bool:
    """Whether the FP64 result comes from the parts, because the CPU has no such operator in FP64 on every backend's behalf."""
    return fused_attention(call) or call.name == SCALED


def _scaled_product(call: OperatorCall) -> Tensor:
    """A product of float8 numbers with a scale of each operand, or of each row and column."""
    given = call.named()
    product: Tensor = (given["self"] * given["scale_a"]) @ (given["mat2"] * given["scale_b"])
    return product if given["bias"] is None else product + given["bias"]


def fused_attention(call: OperatorCall) -> bool:
    """Whether it is attention, whose FP64 result comes from its parts: not every backend's operator exists on the CPU."""
    return call.name.startswith(ATTENTION)


def _scores(given: dict[str, Any]) -> tuple[Tensor, float, Tensor]:
    """Scaled and masked scores, the scale, and which keys each query sees."""
    q, k = given["query"], given["key"]
    scale = given.get("scale") or 1.0 / math.sqrt(q.shape[-1])
    scores = q @ _heads(k, q).transpose(-1, -2) * scale
    mask = given.get("attn_mask", given.get("attn_bias"))
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if given["is_causal"]:
        seen = seen.tril()
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
        seen = seen & (mask != -math.inf)
    return scores.masked_fill(~seen, -math.inf), scale, seen


def _heads(keys: Tensor, queries: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries."""
    many = queries.shape[-3] // keys.shape[-3]
    return keys if many == 1 else keys.repeat_interleave(many, -3)


def _attention(call: OperatorCall) -> tuple[Tensor, Tensor]:
    given = call.named()
    scores, _, seen = _scores(given)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return weights @ _heads(given["value"], given["query"]), scores.logsumexp(-1)


def _attention_gradients(call: OperatorCall) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values: the softmax is recomputed from the saved logarithms of its sums, as in FlashAttention."""
    given = call.named()
    grad: Any = given.get("grad_out", given.get("grad_out_"))
    scores, scale, seen = _scores(given)
    weights = (scores - given["logsumexp"][..., : scores.shape[-2], None]).exp().masked_fill(~seen, 0.0)
    values = _heads(given["value"], grad)
    inner = weights * (grad @ values.transpose(-1, -2) - (grad * given["out"]).sum(-1, keepdim=True))
    of_queries = inner @ _heads(given["key"], grad) * scale
    of_keys = inner.transpose(-1, -2) @ given["query"] * scale
    of_values = weights.transpose(-1, -2) @ grad
    return of_queries, _summed(of_keys, given["key"]), _summed(of_values, given["value"])


def _summed(gradient: Tensor, keys: Tensor) -> Tensor:
    """The gradient of keys that several heads share."""
    heads, own = gradient.shape[-3], keys.shape[-3]
    if heads == own:
        return gradient
    shape = (*gradient.shape[:-3], own, heads // own, *gradient.shape[-2:])
    return gradient.reshape(shape).sum(-3)
