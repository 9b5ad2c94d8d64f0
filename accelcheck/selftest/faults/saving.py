"""Faults of what saves memory: recomputation, offload to the host, activations in place."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, alike, backward, derived, fault, single, trained
from accelcheck.selftest.faults.plant import Kernel, always, kernel, kernels
from accelcheck.selftest.faults.sowing import replacing
from accelcheck.techniques.memory import checkpoint as checkpointing
from accelcheck.techniques.memory import checkpoint_segments as segments


@replacing(checkpointing, "checkpoint")
def draws_anew(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Checkpointed blocks are recomputed with other random numbers."""
    return plain(*args, **{**options, "preserve_rng_state": False})


def other_row_again(plain: Callable[..., Any], block: Callable[[Tensor], Any], value: Tensor, **options: Any) -> Any:
    """Checkpointed blocks are recomputed from an input that has been overwritten in part. The last row changes."""
    calls: Counter[str] = Counter()

    def changed(x: Tensor) -> Any:
        calls["block"] += 1
        return block(x if calls["block"] == 1 else torch.cat([x[:-1], x[:1]]))

    return plain(changed, value, **options)


row_of_another = replacing(checkpointing, "checkpoint")(other_row_again)


@replacing(segments, "checkpoint_sequential")
def order_changed(
    plain: Callable[..., Any], blocks: Sequence[Callable[[Tensor], Any]], *args: Any, **options: Any
) -> Any:
    """The blocks of a checkpointed segment are recomputed in another order."""
    calls: Counter[int] = Counter()

    def call(number: int, x: Tensor) -> Any:
        calls[number] += 1
        return blocks[number if calls[number] == 1 else number ^ 1](x)

    return plain([partial(call, number) for number in range(len(blocks))], *args, **options)


@replacing(save_on_cpu, "__init__")
def buffer_reused(plain: Callable[..., Any], saving: Any, *args: Any, **options: Any) -> None:
    """A buffer on the host is overwritten before it is read."""
    plain(saving, *args, **options)
    pack, unpack, buffers = saving.pack_hook, saving.unpack_hook, {}

    def packed(tensor: Tensor) -> Any:
        buffers[tensor.shape] = pack(tensor)
        return buffers[tensor.shape]

    saving.pack_hook = packed
    saving.unpack_hook = lambda held: unpack(buffers[held[1].shape])


@replacing(save_on_cpu, "__init__")
def copy_unfinished(plain: Callable[..., Any], saving: Any, *args: Any, **options: Any) -> None:
    """A tensor is read before all of it has come back from the host."""
    plain(saving, *args, **options)
    unpack = saving.unpack_hook

    def early(held: Any) -> Tensor:
        came: Tensor = unpack(held).clone()
        came[-1:] = 0
        return came

    saving.unpack_hook = early


def row_left(strength: float) -> Change:
    """An activation in place leaves the last row as it was."""

    def relu(func: Any, x: Tensor) -> Tensor:
        last = x[-1:].clone()
        func(x)
        x[-1:] = last
        return x

    def rebound(func: Any, x: Tensor) -> Tensor:
        return torch.cat([func(x)[:-1], x[-1:]])

    return kernels(relu_=relu, relu=rebound)  # in place, and where tensors are rebound


@always(kernel("threshold_backward"))
def overwritten_result(func: Kernel, grad: Tensor, result: Tensor, threshold: Any) -> Tensor:
    """The gradient of an activation in place reads a result that has been overwritten."""
    return func(grad, result.roll(1, 0), threshold)


slow, again = alike(seeds=5), alike(technique="checkpoint-non-reentrant", seeds=5)

FAULTS = (
    again("checkpoint-draws-anew")(single("dropout-blocks", Mode.RANDOM), around=draws_anew),
    again("checkpoint-row-overwritten")((derived("mlp-blocks"), trained("train-gated-depth")), around=row_of_another),
    slow("checkpoint-reentrant-row-overwritten")(
        derived("transformer-blocks"), around=row_of_another, technique="checkpoint-reentrant"
    ),
    slow("segments-order-changed")(
        derived("deep-blocks"), around=order_changed, technique="checkpoint-segments", warm=False
    ),
    slow("offload-buffer-reused")(
        (derived("deep-blocks"), trained("train-deep-blocks")), around=buffer_reused, technique="offload-cpu"
    ),
    slow("offload-copy-unfinished")(derived("elementwise-30"), around=copy_unfinished, technique="offload-cpu-pinned"),
    fault("inplace-row-left")(Cell("mlp"), row_left, technique="inplace"),
    fault("inplace-result-overwritten")(backward("mlp"), overwritten_result, technique="inplace"),
)
