"""Faults of what torch_xla has of its own: its dynamo backend, its checkpoints, its loader."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from accelcheck.selftest.faults.base import FLOAT32, alike, derived, passes, single
from accelcheck.selftest.faults.saving import other_row_again
from accelcheck.selftest.faults.sowing import replacing, without_call


@replacing("torch_xla.core.dynamo_bridge", "extract_compiled_graph")
def _without_activation(plain: Callable[..., Any], model: Any, args: Sequence[Tensor]) -> Any:
    """The graph that is compiled for XLA has lost its last activation."""
    without_call("relu")(model.graph)
    model.recompile()
    return plain(model, args)


@replacing("torch_xla.core.dynamo_bridge", "extract_compiled_graph")
def _first_arguments(plain: Callable[..., Any], model: Any, args: Sequence[Tensor]) -> Any:
    """The executable runs on the tensors of the call that it was compiled with."""
    kept = [value.detach().clone() for value in args]
    compiled = plain(model, args)
    return lambda *_: compiled(*kept)


@replacing("torch_xla.distributed.parallel_loader", "MpDeviceLoader")
def _exchanged(plain: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
    """Two batches arrive on the device in the wrong order."""
    batches = [*plain(*args, **options)]
    yield from (*batches[1:2], *batches[:1], *batches[2:])


_row_of_another = replacing("torch_xla.utils.checkpoint", "checkpoint")(other_row_again)

fault, openxla = alike(seeds=3), alike(technique="compile-openxla", seeds=3)

FAULTS = (
    openxla("openxla-relu-lost")(passes("mlp", FLOAT32), around=_without_activation),
    openxla("openxla-arguments-kept")((single("mlp"), single("matmul")), around=_first_arguments),
    fault("xla-checkpoint-row-overwritten")(
        (derived("mlp-blocks"), derived("transformer-blocks")), around=_row_of_another, technique="checkpoint-xla"
    ),
    fault(
        "xla-segments-row-overwritten",
        "A checkpointed segment is recomputed from an input that has been overwritten in part.",
    )(derived("deep-blocks"), around=_row_of_another, technique="checkpoint-segments-xla"),
    fault("xla-loader-batches-exchanged")(single("mlp"), around=_exchanged, technique="xla-device-loader"),
)
