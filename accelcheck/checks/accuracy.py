"""Check of task accuracy: a trained model run under a technique, and a model that a technique trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.checks import own_accuracy
from accelcheck.checks.trial import Finding, Trial, on_device
from accelcheck.core.case import Evidence, Figure, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.techniques.base import Unsupported
from accelcheck.verify.accuracy import CONFIDENCE, Pairs, UndecidedError, fewest, learning_bound, pooled, upper_bound
from accelcheck.verify.cache import Cache
from accelcheck.verify.judge import beyond
from accelcheck.verify.reference import OracleError
from accelcheck.workloads.base import Problem, Program, Result
from accelcheck.workloads.own_task import OwnTask
from accelcheck.workloads.task import Lesson, Task

WATCHED_STEPS = 2
"""Steps of the watched run that shows, in mode learning, that the technique is engaged."""


@dataclass(frozen=True)
class Sitting:
    """The samples of one fold, classified by the reference and by the candidate, which has `right` of them right."""

    pairs: Pairs
    right: int
    evidence: Sequence[Evidence]
    faults: Sequence[Fault]


def verify(trial: Trial) -> Finding:
    """Compares the accuracy on held-out samples with that of FP32 eager on the CPU.

    In mode accuracy FP32 eager has trained the models, and the technique classifies; every sample is held out once. In
    mode learning the technique trains, from the reference's parameters, and FP32 eager on the CPU classifies. An
    `OwnTask` is judged by `accelcheck.checks.own_accuracy`.

    Raises:
        TypeError: The workload is no task.
        Unsupported: Its data set is absent.
        UndecidedError: There are too few samples for the technique's limit.
        OracleError: FP32 eager did not learn the task.
    """
    task = trial.workload
    if isinstance(task, OwnTask):
        return own_accuracy.verify(trial, task)
    if not isinstance(task, Task):
        raise TypeError(f"mode {trial.case.mode} needs a workload of type Task; {task.name} is a {type(task).__name__}")
    if not task.present().ok:
        raise Unsupported(task.present())
    learns = trial.case.mode is Mode.LEARNING
    with trial.clock("oracle"):
        # Seed and fold of each training.
        plan = [(trial.case.seed + n, n % task.folds) for n in range(task.seeds if learns else task.folds)]
        references = {seed: learned(trial.store.cache, task, seed, fold) for seed, fold in plan}
        _decidable(trial, task, references)
    sittings: list[Sitting] = []
    with trial.device.strict_float32():
        for fold in range(task.folds):
            own = {seed: references[seed] for seed, at in plan if at == fold}
            sittings += _trained(trial, task, fold, own) if learns else _classified(trial, task, fold, own)
            trial.technique.finish()
    with trial.judging():
        return _finding(trial, sittings, references)


def _decidable(trial: Trial, task: Task, references: Mapping[int, Learned]) -> None:
    right = torch.cat([reference.right for reference in references.values()])
    accuracy = float(right.float().mean())
    if accuracy < task.least:
        raise OracleError(
            f"{task.name}: FP32 eager on the CPU reached an accuracy of {accuracy:.2%}, expected {task.least:.2%} or "
            "more: a model that learnt nothing has nothing to lose"
        )
    # A sample counts once, however many seeds are examined on it: they agree on whether it is hard.
    samples = len(right) * task.folds // len(references)
    limit = trial.technique.accuracy_limit
    least = fewest(limit)
    if samples < least:
        raise UndecidedError(
            f"too few samples to decide: n = {samples}, at least {least} needed to show, at {CONFIDENCE:.1%} "
            f"confidence, that no more than {limit:.3%} of the accuracy is lost"
        )


def _classified(trial: Trial, task: Task, fold: int, references: Mapping[int, Learned]) -> Iterator[Sitting]:
    """Classifies the fold's samples by the technique, with parameters that FP32 eager trained."""
    for seed, reference in references.items():
        with trial.clock("prepare"):
            lesson = task.lesson(seed, fold)
            module = lesson.training.module
            module.load_state_dict(reference.state)
            # Static quantization calibrates on these samples: they belong to the training, and have no target.
            known, _ = _some(lesson, len(lesson.inputs))
            program = trial.place(Problem(module, (known,)), seed)
            trial.technique.prepare(program, Mode.FORWARD, trial.device)
            _warm_up(trial, program, Mode.FORWARD, lesson)
            trial.device.reset_fallbacks()
        # The judged run is unobserved, as for users; evidence comes from a run with other samples.
        _, evidence = _watched(trial, program, Mode.FORWARD)
        with trial.clock("run"):
            # The prepared tensor keeps its strides; in-place input exposes caches that go by address.
            _fill({"": program.inputs[0]}, {"": lesson.inputs})
            trial.device.seed(seed)
            result = program.run(Mode.FORWARD)
        with trial.judging():
            logits, faults = _logits(result, reference.logits.shape, trial.device.type)
            right = correct(logits, lesson.target)
        yield Sitting(Pairs.of(reference.right.tolist(), right.tolist()), int(right.sum()), evidence, faults)


def _trained(trial: Trial, task: Task, fold: int, references: Mapping[int, Learned]) -> Iterator[Sitting]:
    """Trains by the technique on all but the fold's samples: prepared once, run once per seed.

    Two further watched steps after the last training give the evidence: counters (compilations, scaled losses,
    fallbacks) cover all steps, and the operators of whole trainings would be too many to keep.
    """
    device = trial.device
    lessons = {seed: task.lesson(seed, fold) for seed in references}
    with trial.clock("prepare"):
        seed, lesson = next(iter(lessons.items()))
        program = trial.place(task.lesson(seed, fold).training, seed)
        trial.technique.prepare(program, Mode.TRAIN, device)
        _warm_up(trial, program, Mode.TRAIN, lesson)
        device.reset_fallbacks()
    sat: list[tuple[Pairs, int]] = []
    for seed, lesson in lessons.items():
        module = lesson.training.module
        with trial.clock("run"):
            _fill(_named(program.module), _named(module))
            device.seed(seed)
            result = program.run(Mode.TRAIN)
        with trial.judging():
            _fill(_named(module), {path.partition(":")[2]: tensor for path, tensor in result.items()})
            right = correct(examine(module, lesson.inputs), lesson.target)
            sat.append((Pairs.of(references[seed].right.tolist(), right.tolist()), int(right.sum())))
    program.steps = WATCHED_STEPS
    _, evidence = _watched(trial, program, Mode.TRAIN)
    for pairs, number in sat:
        yield Sitting(pairs, number, evidence, ())


def _warm_up(trial: Trial, program: Program, mode: Mode, lesson: Lesson) -> None:
    """Warms up with other samples of the training, by a single step where it trains."""
    technique, traits = trial.technique, trial.workload.traits
    judged = program.inputs, program.target, program.steps
    program.steps = 1
    for number in range(1, technique.warmups + 1):
        extent = number if technique.resizing and "resizable" in traits else 0
        inputs, target = _some(lesson, len(judged[0][0]) + extent, number)
        program.inputs = (trial.placed(inputs),)
        program.target = None if judged[1] is None else trial.placed(target)
        program.run(mode)
    program.inputs, program.target, program.steps = judged
    trial.device.synchronize()


def _some(lesson: Lesson, size: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Returns training samples and their classes from index `first` on, cyclically."""
    index = (torch.arange(size) + first) % len(lesson.samples)
    return lesson.samples[index], lesson.classes[index]


def _watched(trial: Trial, program: Program, mode: Mode) -> tuple[Result, tuple[Evidence, ...]]:
    technique, device = trial.technique, trial.device
    with trial.clock("run"):
        with technique.watch(device.type) as log:
            result = program.run(mode)
        fallbacks = device.fallbacks()
    with trial.judging():
        seen = technique.evidence(program, log, mode, device)
        return result, (*seen, on_device(log, fallbacks, trial))


def _logits(result: Result, shape: torch.Size, device_type: str) -> tuple[Tensor, list[Fault]]:
    """Returns the logits on the CPU, all NaN where none can be read, and their faults."""
    out = result.get("out")
    if out is None or out.shape != shape or not out.is_floating_point() or out.device.type != device_type:
        expected = f"one floating-point tensor of shape {tuple(shape)} on {device_type}"
        got = ", ".join(f"{path} {tuple(t.shape)} {t.dtype} on {t.device.type}" for path, t in result.items())
        wrong = Fault(FaultKind.METADATA, "out", "metadata", expected=expected, got=got or "nothing")
        return torch.full(shape, math.nan), [wrong]
    logits = out.cpu()
    lost = int(logits.isnan().any(1).sum())
    if not lost:
        return logits, []
    got = f"some of {lost} samples"
    return logits, [Fault(FaultKind.PATTERN, "out", "NaN", expected="no logit", got=got, measured=lost)]


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _fill(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies values in place into the tensors of the same names, on their device."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def _finding(trial: Trial, sittings: Sequence[Sitting], references: Mapping[int, Learned]) -> Finding:
    limit = trial.technique.accuracy_limit
    groups = [sitting.pairs for sitting in sittings]
    whole = pooled(groups)
    bound = learning_bound(groups) if trial.case.mode is Mode.LEARNING else upper_bound(whole)
    before = sum(int(reference.right.sum()) for reference in references.values()) / whole.samples
    after = sum(sitting.right for sitting in sittings) / whole.samples
    figures = (
        Figure("accuracy", "drop", bound, limit, "", gates=True),
        Figure("accuracy", "before", before, 1.0, "", gates=False),
        Figure("accuracy", "after", after, 1.0, "", gates=False),
        Figure("accuracy", "lost", whole.lost, whole.samples, "", gates=False),
        Figure("accuracy", "won", whole.won, whole.samples, "", gates=False),
    )
    faults = [fault for sitting in sittings for fault in sitting.faults]
    if not figures[0].within:
        got = (
            f"{whole.drop:.3%}, at most {bound:.3%}: from {before:.2%} to {after:.2%}, "
            f"{whole.lost} lost and {whole.won} won of {whole.samples} samples"
        )
        expected = f"at {CONFIDENCE:.1%} confidence"
        faults.append(replace(beyond(figures[0]), expected=expected, got=got))
    # Later sittings add only evidence that did not engage.
    amiss = [observation for sitting in sittings[1:] for observation in sitting.evidence if not observation.engaged]
    evidence = tuple(dict.fromkeys([*sittings[0].evidence, *amiss]))
    return Finding(evidence, faults, figures, whole.samples)


@dataclass(frozen=True)
class Learned:
    """A trained model and its answers on the ``n`` samples of a fold, on the CPU.

    Attributes:
        state: Parameters and buffers, FP32, as `nn.Module.state_dict` names them.
        logits: Logits of the samples, ``(n, classes)`` FP32.
        right: True where the largest logit is that of the sample's class, ``(n,)`` bool.
    """

    state: Mapping[str, Tensor]
    logits: Tensor
    right: Tensor


def learned(cache: Cache, task: Task, seed: int, fold: int) -> Learned:
    """Trains the model of a seed without a fold, and examines it on that fold; cached by the run."""
    return Learned(**cache.once(f"learned/{task.name}/{seed}/{fold}", _learn, task, seed, fold))


def examine(module: nn.Module, inputs: Tensor) -> Tensor:
    """Returns the logits of a module in evaluation mode, ``(n, classes)``."""
    module.eval()
    with torch.no_grad():
        logits: Tensor = module(inputs)
    return logits


def correct(logits: Tensor, target: Tensor) -> Tensor:
    """Marks samples classified right, ``(n,)`` bool; False where a logit is NaN, which `argmax` would choose."""
    return (logits.argmax(1) == target) & ~logits.isnan().any(1)


def _learn(task: Task, seed: int, fold: int) -> dict[str, Any]:
    lesson = task.lesson(seed, fold)
    program = Program.of(lesson.training, seed=seed)
    program.run(Mode.TRAIN)
    logits = examine(program.module, lesson.inputs)
    return {"state": program.module.state_dict(), "logits": logits, "right": correct(logits, lesson.target)}
