"""User-owned models with held-out data and a metric, to measure a technique's loss of accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accelcheck.workloads.base import Workload
from accelcheck.workloads.nested import OwnModelError, Rebuilt

Metric: TypeAlias = Callable[[Any, Any], Any]
"""Function ``metric(output, target)`` of a score for each sample of a batch, or for the batch; larger is better."""


def _none(output: Any, target: Any) -> Any:
    raise NotImplementedError(f"a task without a metric was asked for one, of {type(output)} and {type(target)}")


@dataclass(frozen=True)
class OwnTask(Workload):
    """Workload of mode ``accuracy``: its problem has the first batch, and `Problem.further` the others.

    Attributes:
        metric: Scoring function; see `Metric`.
        rebuilt: Function from the output tensors to the model's output; None if it is one tensor.
        max_drop: Largest allowed drop of the mean score, above 0 and at most 1.
    """

    metric: Metric = _none
    rebuilt: Rebuilt | None = None
    max_drop: float = 0.01

    def scores(self, result: Mapping[str, Tensor], target: Tensor | None) -> Tensor:
        """Scores a forward result on the CPU: ``(n,)`` bool or FP64; 0-D if the metric returns one number.

        Raises:
            OwnModelError: The metric raises, or gives something else.
        """
        tensors = [tensor.float() if tensor.is_floating_point() else tensor for tensor in result.values()]
        output = tensors[0] if self.rebuilt is None else self.rebuilt(tensors)
        try:
            scores = torch.as_tensor(self.metric(output, target)).detach().cpu()
        except Exception as error:
            raise OwnModelError(f"metric: raised {type(error).__name__}: {error}") from error
        if scores.dim() > 1 or scores.is_complex() or not scores.numel():
            raise OwnModelError(
                "metric: expected a score for each sample, of shape (n,), or one number, got shape "
                f"{tuple(scores.shape)} of {str(scores.dtype).removeprefix('torch.')}"
            )
        return scores if scores.dtype == torch.bool and scores.dim() else scores.double()
