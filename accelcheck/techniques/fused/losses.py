"""Losses of a vocabulary's head that never hold all logits: torch's own, and those of packages."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import at_least, operators
from accelcheck.workloads.large_models import VocabularyLoss

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

ROWS = 16
"""Rows of logits that torch's chunked loss holds at a time."""
_CALLS = "calls of the fused loss"


def torch_chunked(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Calls ``torch.nn.functional.linear_cross_entropy`` in chunks of `ROWS`."""
    options: Any = torch.nn.LinearCrossEntropyOptions  # type: ignore[attr-defined]  # from torch 2.13 on
    fused: Any = torch.nn.functional.linear_cross_entropy  # type: ignore[attr-defined]  # the same
    out: Tensor = fused(hidden, weight, target, options=options(batch_chunk_size=ROWS, chunking_method=None))
    return out


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Calls Liger's fused linear cross entropy, by Triton's interpreter where there is no GPU."""
    kind: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    out: Tensor = kind()(weight, hidden, target)
    return out


def cut(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Calls cut-cross-entropy by its implementation for ``torch.compile``."""
    out: Tensor = importlib.import_module("cut_cross_entropy").linear_cross_entropy(
        hidden, weight, target, impl="torch_compile"
    )
    return out


class FusedLoss(Technique):
    """Replaces the method `loss` of a `VocabularyLoss`.

    Args:
        fused: Function of hidden states, weight and target.
        most: Largest number of logits that a run may hold in one tensor; 0 where it is not seen.
    """

    family = "fused"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    workloads = frozenset({"vocabulary-loss", "train-vocabulary"})
    differentiates_twice = False

    def __init__(self, name: str, source: str, fused: Any, **packages: str) -> None:
        self.name, self.source, self.fused, self.packages = name, source, fused, packages
        self.promise = "Head and cross entropy in one step give the loss and gradients of both, without all logits."

    def capability(self, device: Device) -> Capability:
        if not self.packages and not hasattr(torch.nn.functional, "linear_cross_entropy"):
            return unsupported(Code.WRONG_VERSION, f"torch {torch.__version__} has no linear_cross_entropy")
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        heads = [part for part in program.module.modules() if isinstance(part, VocabularyLoss)]
        if not heads:
            reason = "the module has no loss of a head of `accelcheck.workloads.large_models`"
            raise Unsupported(unsupported(Code.NO_EFFECT, reason))
        program.extras[_CALLS] = calls = []
        program.resets.append(calls.clear)
        for head in heads:

            def loss(hidden: Tensor, target: Tensor, head: VocabularyLoss = head) -> Tensor:
                calls.append(1)
                return self.fused(hidden, head.head.weight, target)  # type: ignore[no-any-return]

            head.loss = loss  # type: ignore[method-assign]  # on this instance alone

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        steps = program.steps if mode is Mode.TRAIN else 1
        yield at_least(_CALLS, len(program.extras[_CALLS]), steps)
        whole = operators(log).count("aten::(nll_loss_forward|_log_softmax)")
        yield Evidence("losses of all logits = 0", whole, engaged=whole == 0)
        if self.fused is torch_chunked:
            chunked = operators(log).count("torch_nn::_linear_cross_entropy_batch_chunked")
            yield at_least("chunked losses", chunked, steps)


TECHNIQUES: tuple[Technique, ...] = (
    FusedLoss(
        "linear-cross-entropy",
        "https://docs.pytorch.org/docs/main/generated/torch.nn.functional.linear_cross_entropy.html",
        torch_chunked,
    ),
)
