"""The check of accuracy by a user's metric: the scores of held-out data against those of FP32 eager."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accelcheck.checks.trial import Finding, Trial, given, warm_up, watched
from accelcheck.core.case import Evidence, Figure, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify.accuracy import CONFIDENCE, Pairs, UndecidedError, fewest, replicated_bound, upper_bound
from accelcheck.verify.judge import beyond
from accelcheck.workloads.base import Program
from accelcheck.workloads.own_task import OwnTask
from accelcheck.workloads.probes import Draw


@dataclass(frozen=True)
class ScoreDrop:
    """The drop of scores from one implementation to another.

    Attributes:
        drop: Drop of the mean score; negative where it rose.
        bound: Upper bound of the drop, with `CONFIDENCE`; the drop itself where there is no interval.
        words: Description of the samples that the bound rests on.
        enough: Function that takes a limit above the drop and returns the number of such samples whose bound is
            within it; 0 without an interval.
    """

    drop: float
    bound: float
    words: str
    enough: Callable[[float], int] = lambda _: 0


def verify(trial: Trial, task: OwnTask) -> Finding:
    """Compares the mean score under the technique with that of FP32 eager on the CPU, batch by batch.

    Raises:
        UndecidedError: There are too few samples for `OwnTask.max_drop`: the drop is within it, and its bound is not.
        OwnModelError: The metric raises, or gives no score.
    """
    with trial.clock("oracle"):
        key = f"{task.name}/{trial.case.seed}/own-scores"
        before: list[Tensor] = trial.store.cache.once(key, _eager, task, trial.case.seed)["scores"]
    _check_decidable(task, before)
    after: list[Tensor] = []
    problem = trial.problem(trial.case.seed)
    batches = ((problem.inputs, problem.target), *problem.further)
    with trial.device.strict_float32():
        with trial.clock("prepare"):
            program = trial.program(trial.case.seed)
            trial.prepare(program, Mode.FORWARD)
            warm_up(replace(trial, case=replace(trial.case, mode=Mode.FORWARD)), program)
        # The judged run is unobserved, as for users; evidence comes from a run with other inputs.
        with given(trial, program, Draw(1).problem(task, trial.case.seed, trial.case.dtype)):
            _, evidence = watched(trial, program, Mode.FORWARD)
        trial.device.seed(trial.case.seed)
        for inputs, target in batches:
            with trial.clock("run"):
                program.load((tuple(map(trial.placed, inputs)), trial.placed(target)))
                result = program.run(Mode.FORWARD)
            with trial.judging():
                after.append(task.scores({path: tensor.cpu() for path, tensor in result.items()}, target))
    with trial.judging():
        return _finding(task, before, after, evidence)


def _eager(task: OwnTask, seed: int) -> dict[str, Any]:
    problem = task.problem(seed)
    batches = ((problem.inputs, problem.target), *problem.further)
    program = Program.of(problem, seed=seed)
    scores = []
    for inputs, target in batches:
        program.inputs = inputs
        scores.append(task.scores(program.run(Mode.FORWARD), target))
    return {"scores": scores}


def _check_decidable(task: OwnTask, scores: Sequence[Tensor]) -> None:
    if not all(score.dtype == torch.bool for score in scores):
        return
    samples, least = sum(map(len, scores)), fewest(task.max_drop)
    if samples < least:
        raise UndecidedError(
            f"{task.name}: {samples} samples cannot show that the accuracy drops by at most {task.max_drop:.2%}: even "
            f"with none lost, the bound at {CONFIDENCE:.1%} confidence is {upper_bound(Pairs(samples, 0, 0)):.2%}. "
            f"Give {least} samples or more, or a larger max_drop"
        )


def _finding(task: OwnTask, before: Sequence[Tensor], after: Sequence[Tensor], evidence: Sequence[Evidence]) -> Finding:
    shapes = [(tuple(a.shape), a.dtype) for a in before], [(tuple(b.shape), b.dtype) for b in after]
    if shapes[0] != shapes[1]:
        expected, got = map(str, shapes)
        return Finding(evidence, [Fault(FaultKind.METADATA, "accuracy", "metadata", "", expected, got)], [], 0)
    first, second = (torch.cat([score.reshape(-1) for score in side]) for side in (before, after))
    score_drop = compared(first, second, single=all(score.dim() == 0 for score in before))
    means = float(first.double().mean()), float(second.double().mean())
    figures = [
        Figure("accuracy", "drop", score_drop.bound, task.max_drop, "", gates=True),
        Figure("accuracy", "before", means[0], math.inf, "", gates=False),
        Figure("accuracy", "after", means[1], math.inf, "", gates=False),
    ]
    faults = []
    if not figures[0].within:
        if score_drop.drop < task.max_drop and (enough := score_drop.enough(task.max_drop)):
            raise UndecidedError(
                f"{task.name}: too few samples: {score_drop.words} are a drop of {score_drop.drop:.2%}, at most "
                f"{score_drop.bound:.2%} at {CONFIDENCE:.1%} confidence, where {task.max_drop:.2%} is allowed; some "
                f"{enough:,} such samples would decide"
            )
        measured = f"{score_drop.drop:.3%}, at most {score_drop.bound:.3%} ({score_drop.words})"
        got = f"{measured}: from {means[0]:.6g} to {means[1]:.6g}"
        faults.append(replace(beyond(figures[0]), got=got))
    return Finding(evidence, faults, figures, first.numel())


def compared(before: Tensor, after: Tensor, *, single: bool) -> ScoreDrop:
    """Computes the drop between scores of the same samples, ``(n,)`` bool or FP64.

    Args:
        before: Scores of the reference.
        after: Scores of the candidate.
        single: True if each is one number for a whole batch, which gives no interval.
    """
    if before.dtype == torch.bool:
        pairs = Pairs.of(before.tolist(), after.tolist())
        words = f"{pairs.lost} lost and {pairs.won} won of {pairs.samples} samples"
        return ScoreDrop(pairs.drop, upper_bound(pairs), words, pairs.enough)
    drops = before - after
    mean = float(drops.mean())
    if single or len(drops) < 2:
        return ScoreDrop(mean, mean, "one number a batch: no interval")
    bound = replicated_bound(drops.tolist())
    # The interval's width falls with the root of the number of samples.
    words = f"{len(drops)} samples, by Student's t,"
    return ScoreDrop(mean, bound, words, lambda limit: math.ceil(len(drops) * ((bound - mean) / (limit - mean)) ** 2))
