"""Faults of what saves memory: recomputation, offload to the host, activations in place."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, PlantedFault, backward, fault, row, single, trained
from accelcheck.selftest.faults.plant import kernels
from accelcheck.selftest.faults.sowing import swapped
from accelcheck.techniques.memory import checkpoint as checkpointing
from accelcheck.techniques.memory import checkpoint_segments as segments

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Sequence


def draws_anew(strength: float) -> contextlib.AbstractContextManager[None]:
    """Checkpointed blocks are recomputed with other random numbers."""

    def wrong(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return plain(*args, **{**options, "preserve_rng_state": False})

    return swapped(checkpointing, "checkpoint", wrong)


def other_row_again(plain: Callable[..., Any], block: Callable[[Tensor], Any], value: Tensor, **options: Any) -> Any:
    """Checkpointed blocks are recomputed from an input that has been overwritten in part. The last row changes."""
    calls: Counter[str] = Counter()

    def changed(x: Tensor) -> Any:
        calls["block"] += 1
        return block(x if calls["block"] == 1 else torch.cat([x[:-1], x[:1]]))

    return plain(changed, value, **options)


def row_of_another(strength: float) -> contextlib.AbstractContextManager[None]:
    """Checkpointed blocks are recomputed from an input that has been overwritten in part."""
    return swapped(checkpointing, "checkpoint", other_row_again)


def order_changed(strength: float) -> contextlib.AbstractContextManager[None]:
    """The blocks of a checkpointed segment are recomputed in another order."""

    def wrong(plain: Callable[..., Any], blocks: Sequence[Callable[[Tensor], Any]], *args: Any, **options: Any) -> Any:
        calls: Counter[int] = Counter()

        def numbered(number: int) -> Callable[[Tensor], Any]:
            def call(x: Tensor) -> Any:
                calls[number] += 1
                return blocks[number if calls[number] == 1 else number ^ 1](x)

            return call

        return plain([numbered(number) for number in range(len(blocks))], *args, **options)

    return swapped(segments, "checkpoint_sequential", wrong)


def buffer_reused(strength: float) -> contextlib.AbstractContextManager[None]:
    """A buffer on the host is overwritten before it is read."""

    def wrong(plain: Callable[..., Any], saving: Any, *args: Any, **options: Any) -> None:
        plain(saving, *args, **options)
        pack, unpack, buffers = saving.pack_hook, saving.unpack_hook, {}

        def packed(tensor: Tensor) -> Any:
            held = pack(tensor)
            buffers[tensor.shape] = held
            return held

        saving.pack_hook = packed
        saving.unpack_hook = lambda held: unpack(buffers[held[1].shape])

    return swapped(save_on_cpu, "__init__", wrong)


def copy_unfinished(strength: float) -> contextlib.AbstractContextManager[None]:
    """A tensor is read before all of it has come back from the host."""

    def wrong(plain: Callable[..., Any], saving: Any, *args: Any, **options: Any) -> None:
        plain(saving, *args, **options)
        unpack = saving.unpack_hook

        def early(held: Any) -> Tensor:
            came: Tensor = unpack(held).clone()
            came[-1:] = 0
            return came

        saving.unpack_hook = early

    return swapped(save_on_cpu, "__init__", wrong)


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


def overwritten_result(strength: float) -> Change:
    """The gradient of an activation in place reads a result that has been overwritten."""
    return kernels(threshold_backward=lambda func, grad, result, threshold: func(grad, result.roll(1, 0), threshold))


slow = row(PlantedFault, seeds=5)

FAULTS = (
    slow("checkpoint-draws-anew")(
        single("dropout-blocks", Mode.RANDOM), around=draws_anew, technique="checkpoint-non-reentrant"
    ),
    slow("checkpoint-row-overwritten")(
        (single("mlp-blocks", Mode.BACKWARD), trained("train-gated-depth")),
        around=row_of_another,
        technique="checkpoint-non-reentrant",
    ),
    slow("checkpoint-reentrant-row-overwritten")(
        single("transformer-blocks", Mode.BACKWARD), around=row_of_another, technique="checkpoint-reentrant"
    ),
    slow("segments-order-changed")(
        single("deep-blocks", Mode.BACKWARD), around=order_changed, technique="checkpoint-segments", warm=False
    ),
    slow("offload-buffer-reused")(
        (single("deep-blocks", Mode.BACKWARD), trained("train-deep-blocks")),
        around=buffer_reused,
        technique="offload-cpu",
    ),
    slow("offload-copy-unfinished")(
        single("elementwise-30", Mode.BACKWARD), around=copy_unfinished, technique="offload-cpu-pinned"
    ),
    fault("inplace-row-left")(Cell("mlp"), row_left, technique="inplace"),
    fault("inplace-result-overwritten")(backward("mlp"), overwritten_result, technique="inplace"),
)
