"""Faults that only one combination of module mode and gradients shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelcheck.core.case import Mode
from accelcheck.selftest.faults.base import Cell, Change, fault, passes
from accelcheck.selftest.faults.plant import calling


def norms_follow_gradients(strength: float) -> Change:
    """Batch norm takes the statistics of the batch where gradients are recorded, and its running ones elsewhere, whatever its mode is."""

    def call(module: nn.Module, *inputs: Any) -> Any:
        layers = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm1d)]
        modes = [layer.training for layer in layers]
        handles = [layer.register_forward_pre_hook(_follow) for layer in layers]
        try:
            return module(*inputs)
        finally:
            for handle in handles:
                handle.remove()
            for layer, training in zip(layers, modes, strict=True):
                layer.train(training)

    return calling(call)


def _follow(layer: nn.Module, inputs: Any) -> None:
    layer.train(torch.is_grad_enabled())


FAULTS = (
    fault(
        "norm-of-the-batch-in-evaluation",
        "Batch norm takes the statistics of the batch where gradients are asked in evaluation mode.",
    )((Cell("saliency", Mode.BACKWARD),), norms_follow_gradients),
    fault(
        "norm-of-the-past-without-gradients",
        "Batch norm takes its running statistics in training mode where no gradients are recorded.",
    )(passes("frozen-backbone"), norms_follow_gradients),
)
