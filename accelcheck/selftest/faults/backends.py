"""Faults of attention's backends: fused kernel, math path, jagged batches, FlexAttention's masks and kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.selftest.faults.base import HALVES, Cell, Change, alike, backward, fault, passes, single
from accelcheck.selftest.faults.plant import Kernel, always, kernel, kernels
from accelcheck.selftest.faults.sowing import in_cpp, kernel_text, replacing
from accelcheck.techniques.attention import flex

if TYPE_CHECKING:
    import re
    from collections.abc import Callable


ONCE = dict.fromkeys(
    HALVES,
    "the mask and the scale are FP32 in all kernels: planted once, in float32, since each case takes seconds "
    "to compile",
)


@always(kernel("_scaled_dot_product_flash_attention_for_cpu"))
def last_key_unseen(func: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """The fused kernel does not see the last key."""
    return func(query, key[:, :, :-1], value[:, :, :-1], *rest, **options)


def stale_logsumexp(strength: float) -> Change:
    """The fused backward kernel reads row sums of an earlier call."""
    kept: dict[Any, Tensor] = {}

    def fused(func: Any, *args: Any, **options: Any) -> Any:
        sums = kept.setdefault(args[5].shape, args[5].clone())
        return func(*args[:5], sums, *args[6:], **options)

    return kernels(_scaled_dot_product_flash_attention_for_cpu_backward=fused)


@always(kernel("tril"))
def next_key_seen(func: Kernel, mask: Tensor, diagonal: int = 0) -> Tensor:
    """The math path's causal mask shows the next key too."""
    return func(mask, diagonal + 1)


@always(kernel("_softmax_backward_data"))
def row_sums_lost(func: Any, grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The math path's softmax has a gradient without the sum of its row."""
    func(grad, out, dim, dtype)  # so that observers of the run see the operator
    return grad * out


@replacing(torch.nested, "nested_tensor_from_jagged")
def neighbours_token(plain: Callable[..., Any], values: Tensor, offsets: Tensor, *args: Any, **options: Any) -> Any:
    """Sequences of a jagged batch begin with a token of their neighbour. Inner sequences begin one token early."""
    early = offsets.clone()
    early[1:-1] -= 1
    return plain(values, early, *args, **options)


@replacing(flex, "create_block_mask")
def mask_moved(plain: Callable[..., Any], seen: Callable[..., Tensor], *args: Any, **options: Any) -> Any:
    """FlexAttention's block mask is one key late."""
    keys = options["KV_LEN"]
    return plain(lambda b, h, i, j: seen(b, h, i, (j + 1).clamp(max=keys - 1)), *args, **options)


def larger(match: re.Match[str]) -> str:
    """FlexAttention's generated kernel has a softmax scale that is one percent too large."""
    return f"scaling_factor = {1.01 * float(match['scale'])};"


slow = alike(seeds=10)
mathematical = alike(technique="sdpa-math", seeds=10)
compiled = alike(technique="flex-attention", absent=ONCE, seeds=1)

FAULTS = (
    slow("flash-last-key-unseen")(passes("attention-cross"), last_key_unseen, technique="sdpa-flash"),
    slow("flash-stale-row-sums")(backward("attention-causal"), stale_logsumexp, technique="sdpa-flash"),
    mathematical("math-next-key-seen")(Cell("attention-causal"), next_key_seen),
    mathematical("math-row-sums-lost")((backward("attention-cross"), backward("attention-mask")), row_sums_lost),
    slow("jagged-neighbours-token")(passes("attention-varlen"), around=neighbours_token, technique="sdpa-nested"),
    fault("flex-mask-moved")(Cell("attention-mask"), around=mask_moved, technique="flex-attention-eager", seeds=2),
    compiled(
        "flex-compiled-mask-moved", "The block mask that is compiled into FlexAttention's kernel is one key late."
    )(single("attention-varlen"), around=mask_moved),
    compiled("flex-kernel-scale", larger)(
        single("attention-varlen"), around=kernel_text(r"scaling_factor = (?P<scale>[0-9.]+);", larger), exists=in_cpp
    ),
)
