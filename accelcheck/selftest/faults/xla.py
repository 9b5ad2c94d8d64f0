"""Faults of what torch_xla has of its own: its dynamo backend, its checkpoints, its loader."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import FLOAT32, PlantedFault, passes, row, single
from accelcheck.selftest.faults.saving import other_row_again
from accelcheck.selftest.faults.sowing import swapped, without_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor


def _instead(path: str, wrong: Callable[..., Any]) -> Callable[[float], AbstractContextManager[None]]:
    """Replaces a function of torch_xla by `wrong`, see `swapped`."""
    module, _, name = path.rpartition(".")
    return lambda _: swapped(importlib.import_module(f"torch_xla.{module}"), name, wrong)


def _without_activation(plain: Callable[..., Any], model: Any, args: Sequence[Tensor]) -> Any:
    """The graph that is compiled for XLA has lost its last activation."""
    without_call("relu")(model.graph)
    model.recompile()
    return plain(model, args)


def _first_arguments(plain: Callable[..., Any], model: Any, args: Sequence[Tensor]) -> Any:
    """The executable runs on the tensors of the call that it was compiled with."""
    kept = [value.detach().clone() for value in args]
    compiled = plain(model, args)
    return lambda *_: compiled(*kept)


def _exchanged(plain: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
    """Two batches arrive on the device in the wrong order."""
    batches = [*plain(*args, **options)]
    yield from (*batches[1:2], *batches[:1], *batches[2:])


fault = row(PlantedFault, seeds=3)

FAULTS = (
    fault("openxla-relu-lost", _without_activation)(
        passes("mlp", FLOAT32),
        around=_instead("core.dynamo_bridge.extract_compiled_graph", _without_activation),
        technique="compile-openxla",
    ),
    fault("openxla-arguments-kept", _first_arguments)(
        (single("mlp"), single("matmul")),
        around=_instead("core.dynamo_bridge.extract_compiled_graph", _first_arguments),
        technique="compile-openxla",
    ),
    fault("xla-checkpoint-row-overwritten", other_row_again)(
        (single("mlp-blocks", Mode.BACKWARD), single("transformer-blocks", Mode.BACKWARD)),
        around=_instead("utils.checkpoint.checkpoint", other_row_again),
        technique="checkpoint-xla",
    ),
    fault(
        "xla-segments-row-overwritten",
        "A checkpointed segment is recomputed from an input that has been overwritten in part.",
    )(
        single("deep-blocks", Mode.BACKWARD),
        around=_instead("utils.checkpoint.checkpoint", other_row_again),
        technique="checkpoint-segments-xla",
    ),
    fault("xla-loader-batches-exchanged", _exchanged)(
        single("mlp"),
        around=_instead("distributed.parallel_loader.MpDeviceLoader", _exchanged),
        technique="xla-device-loader",
    ),
)
