"""Selective activation checkpointing: results of contractions are stored, all else is recomputed."""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.memory.checkpoint import PLAIN, TorchCheckpoint
from accelcheck.techniques.observe import CONTRACTION, Log
from accelcheck.workloads.base import Program


def policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Chooses what is stored: contractions alone."""
    name = operator.name().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if re.fullmatch(CONTRACTION, name) else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(TorchCheckpoint):
    """``torch.utils.checkpoint`` with a policy for each operator."""

    modes = frozenset({Mode.BACKWARD, Mode.TRAIN})
    level = 2
    workloads = frozenset({"deep-blocks", "mlp-blocks", "train-transformer", "transformer-blocks"})
    early = frozenset({"train-transformer", "transformer-blocks"})

    def __init__(self) -> None:
        promise = "Storing contractions and recomputing all else gives the same gradients as storing everything."
        super().__init__("checkpoint-selective", promise, reentrant=False)
        self.differentiates_twice = False

    def checkpointing(self) -> Callable[..., Any]:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        recomputed, *_ = super().evidence(program, log, mode, device)
        yield recomputed
        plain, _ = program.extras[PLAIN]
        wanted, ran = plain * (program.steps if mode is Mode.TRAIN else 1), log.count(CONTRACTION)
        yield Evidence(f"contractions = {wanted}, the plain run's: none is computed again", ran, wanted == ran > 0)


TECHNIQUES: tuple[Technique, ...] = (Selective(),)
