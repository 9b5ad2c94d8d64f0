"""Computes fused operators and long sums from their parts, whose inner roundings an error budget needs.

A fused attention, or the gradient of a softmax, sums and subtracts inside. Random errors of its result alone would not
show the error of a correct kernel where these sums cancel.

Long sums are taken in blocks that are added one after the other. Where the order of the terms goes with their values,
as with the pixels of an image, partial sums and so their roundings are larger than the result's. Some libraries also
keep partial sums in the storage dtype: columns of convolutions, samples of a batch, rows of a norm.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from accelcheck.explain.calls import OperatorCall

ATTENTION = "_scaled_dot_product_"
"""Beginning of the names of fused attention."""
SCALED = "_scaled_mm"
"""The product of float8 numbers."""
_CANCELLING = frozenset(
    ("_softmax_backward_data", "_log_softmax_backward_data", "native_group_norm_backward", "native_batch_norm_backward")
)
"""Operators whose inner sums cancel; torch's own decompositions give their parts."""
ELEMENTWISE = frozenset({"gelu", "gelu_backward"})
"""Functions whose usual formula cancels, such as the 1 + erf(x) of GELU far below 0."""
_TRAINS = 5
"""Position of batch norm's argument ``training``."""


def parts(call: OperatorCall) -> Callable[[], Any] | None:
    """Function that computes a call from its parts, without writing to its arguments; None where there are none."""
    name = call.name
    if name.startswith(ATTENTION):
        return (lambda: _attention_gradients(call)) if name.endswith("backward") else (lambda: _attention(call))
    if name == SCALED:
        return lambda: _scaled_product(call)
    if call.written():
        return None
    if name in STORED:
        return lambda: STORED[name](call)
    return (lambda: product(call)) if name in SUMMED and not call.kwargs else _norm_of(call)


def _norm_of(call: OperatorCall) -> Callable[[], Any] | None:
    if call.name == "native_batch_norm" and not call.args[_TRAINS]:
        return lambda: scaled_and_shifted(call)
    if call.name not in _CANCELLING | ELEMENTWISE:
        return None
    from accelcheck.devices.torch_names import decomposition_table

    known = decomposition_table.get(call.func)
    return None if known is None else lambda: known(*call.args, **call.kwargs)


def only_by_parts(call: OperatorCall) -> bool:
    """True if the FP64 result comes from the parts, because the CPU lacks the operator in FP64."""
    return fused_attention(call) or call.name == SCALED


def _scaled_product(call: OperatorCall) -> Tensor:
    """Multiply float8 numbers, with a scale of each operand, or of each row and column."""
    given = call.named()
    product: Tensor = (given["self"] * given["scale_a"]) @ (given["mat2"] * given["scale_b"])
    return product if given["bias"] is None else product + given["bias"]


def fused_attention(call: OperatorCall) -> bool:
    """True for fused attention; not every backend's operator exists on the CPU."""
    return call.name.startswith(ATTENTION)


def _scores(given: dict[str, Any]) -> tuple[Tensor, float, Tensor]:
    """Scaled and masked scores, the scale, and the keys that each query sees."""
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
    """Repeat keys or values for as many heads as the queries have."""
    many = queries.shape[-3] // keys.shape[-3]
    return keys if many == 1 else keys.repeat_interleave(many, -3)


def _attention(call: OperatorCall) -> tuple[Tensor, Tensor]:
    given = call.named()
    scores, _, seen = _scores(given)
    blind = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return weights @ _heads(given["value"], given["query"]), scores.logsumexp(-1)


def _attention_gradients(call: OperatorCall) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; the softmax comes from the saved logarithms, as in FlashAttention."""
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
    """Sum the gradients of keys over the heads that share them."""
    heads, own = gradient.shape[-3], keys.shape[-3]
    if heads == own:
        return gradient
    shape = (*gradient.shape[:-3], own, heads // own, *gradient.shape[-2:])
    return gradient.reshape(shape).sum(-3)


BLOCKS = 16
"""Most blocks of a sum that are added one after the other."""
STORED_BLOCKS = 64
"""Most blocks where each partial sum is rounded to the storage dtype."""
MOST_TAPS = 25
"""Most places of a kernel that are computed one by one."""
SUMMED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
)
"""Positions of the factors of matrix products, by operator."""


def product(call: OperatorCall) -> Tensor:
    """Multiply matrices, with the depth in blocks."""
    first, second = SUMMED[call.name]
    size = max(1, -(-call.args[first].shape[-1] // BLOCKS))
    total: Tensor | None = call.args[0] if first else None
    for left, right in zip(call.args[first].split(size, -1), call.args[second].split(size, -2), strict=True):
        block = left @ right
        total = block if total is None else total + block
    assert total is not None
    return total


def _convolution_gradients(call: OperatorCall) -> tuple[Tensor | None, ...]:
    """Gradients of a convolution: of the input tap by tap, of weight and bias in blocks of the batch."""
    grad, x, weight, *rest, (to_input, to_weight, to_bias) = call.args
    if not len(grad):
        return tuple(call.run())
    size = max(1, -(-len(grad) // BLOCKS))
    pairs = list(zip(grad.split(size), x.split(size), strict=True))
    blocks = [call.func(block, inputs, weight, *rest, [False, to_weight, to_bias]) for block, inputs in pairs]
    taps = [call.func(grad, x, tap, *rest, [True, False, False])[0] for tap in (_taps(weight) if to_input else ())]
    return _added(taps) if taps else None, *(_added([block[place] for block in blocks]) for place in (1, 2))


def _norm_gradients(call: OperatorCall) -> tuple[Tensor | None, ...]:
    """Gradients of a layer norm, those of weight and bias in blocks of rows."""
    grad, x, shape, mean, deviation, *rest = call.args
    normal = math.prod(shape)
    if not x.numel():
        return tuple(call.run())
    rows = [tensor.reshape(-1, *shape) for tensor in (grad, x)]
    rows += [tensor.reshape(-1, *[1] * len(shape)) for tensor in (mean, deviation)]
    size = max(1, -(-(x.numel() // normal) // STORED_BLOCKS))
    split = zip(*(tensor.split(size) for tensor in rows), strict=True)
    gradients = [call.func(a, b, shape, c, d, *rest) for a, b, c, d in split]
    of_input = None if gradients[0][0] is None else torch.cat([block[0] for block in gradients]).reshape(x.shape)
    return of_input, *(_added([block[place] for block in gradients]) for place in (1, 2))


def _negative_log_likelihood(call: OperatorCall) -> tuple[Tensor, Tensor]:
    """Add up the losses of samples one after the other; as the operator where there is none to add."""
    x, target, weight, reduction, ignored = call.args
    loss, total = call.run()
    if reduction == 0 or x.dim() != 2:
        return loss, total
    single = call.func(x, target, weight, 0, ignored)[0]
    added = _added([losses.sum() for losses in single.split(max(1, -(-len(single) // STORED_BLOCKS)))])
    assert added is not None
    return (added / total if reduction == 1 else added), total


def _taps(weight: Tensor) -> Iterator[Tensor]:
    """The kernel with one of its places at a time, all others zero."""
    places: list[tuple[int, ...]] = list(itertools.product(*(range(size) for size in weight.shape[2:])))
    for place in places if len(places) <= MOST_TAPS else ():
        alone = torch.zeros_like(weight)
        index: Any = (..., *place)
        alone[index] = weight[index]
        yield alone
    if len(places) > MOST_TAPS:
        yield weight


def _added(blocks: list[Tensor | None]) -> Tensor | None:
    total = blocks[0]
    for block in blocks[1:]:
        total = None if total is None or block is None else total + block
    return total


def scaled_and_shifted(call: OperatorCall) -> tuple[Tensor, ...]:
    """Compute batch norm with known statistics as one scale and one shift of each channel."""
    x, weight, bias, mean, variance, _, _, eps = call.args
    scale = (variance + eps).rsqrt() if weight is None else (variance + eps).rsqrt() * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return x * scale.reshape(shape) + shift.reshape(shape), *call.run()[1:]


STORED: Mapping[str, Callable[[OperatorCall], tuple[Tensor | None, ...]]] = MappingProxyType(
    {
        "convolution_backward": _convolution_gradients,
        "native_layer_norm_backward": _norm_gradients,
        "nll_loss_forward": _negative_log_likelihood,
    }
)
"""Functions that compute operators whose partial sums libraries keep in the storage dtype, by operator."""
