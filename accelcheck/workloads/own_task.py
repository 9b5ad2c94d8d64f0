"""User-owned models with held-out data and a metric, for the accuracy that a technique costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from accelcheck.workloads.base import Workload
from accelcheck.workloads.nested import OwnModelError, Rebuilt

if TYPE_CHECKING:
    from accelcheck.workloads.own_targets import Structure
    from accelcheck.workloads.signatures import Target

Metric: TypeAlias = Callable[[Any, Any], Any]
"""Function ``metric(output, target)``: a score for each sample of a batch, or one number for it; larger is better."""


def _none(output: Any, target: Any) -> Any:
    raise NotImplementedError(f"a task without a metric was asked for one, of {type(output)} and {type(target)}")


@dataclass(frozen=True)
class OwnTask(Workload):
    """Workload of mode ``accuracy``: its problem is the first batch, `Problem.further` the others.

    Attributes:
        metric: Function for the scores of a batch, see `Metric`.
        rebuilt: Rebuilds the model's return value from its tensors; None where it returns one tensor.
        max_drop: Largest loss of mean score allowed to a technique, above 0 and at most 1.
        structure: Structure of a target of several tensors.
    """

    metric: Metric = _none
    rebuilt: Rebuilt | None = None
    max_drop: float = 0.01
    structure: Structure | None = None

    def scores(self, result: Mapping[str, Tensor], target: Target) -> Tensor:
        """Scores of a batch from its forward result on the CPU: ``(n,)`` bool or FP64, 0-D for a single number.

        Raises:
            OwnModelError: The metric raises, or gives something else.
        """
        tensors = [tensor.float() if tensor.is_floating_point() else tensor for tensor in result.values()]
        output = tensors[0] if self.rebuilt is None else self.rebuilt(tensors)
        try:
            scores = (
                torch.as_tensor(self.metric(output, target if self.structure is None else self.structure(target)))
                .detach()
                .cpu()
            )
        except Exception as error:
            raise OwnModelError(f"metric: raised {type(error).__name__}: {error}") from error
        if scores.dim() > 1 or scores.is_complex() or not scores.numel():
            raise OwnModelError(
                "metric: expected a score for each sample, of shape (n,), or one number, got shape "
                f"{tuple(scores.shape)} of {str(scores.dtype).removeprefix('torch.')}"
            )
        return scores if scores.dtype == torch.bool and scores.dim() else scores.double()
