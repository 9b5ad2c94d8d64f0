"""Check of random operations: dropout masks from outputs and gradients, compared over runs, seeds and modes."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accelcheck.checks.trial import Finding, Trial, absent, snapshot, warm_up, watched
from accelcheck.core.case import Figure, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify import randomness
from accelcheck.verify.effort import SAMPLES
from accelcheck.verify.judge import beyond
from accelcheck.verify.precision import UNIT_ROUNDOFF
from accelcheck.verify.randomness import Mask
from accelcheck.verify.rounding import Rounding
from accelcheck.workloads.base import Dropout, Program, Result, Workload
from accelcheck.workloads.dispatch import unfused

ALARM = 1e-6
"""Probability that a correct generator fails a case, divided among all its statistics (Bonferroni)."""
STATISTICS = (randomness.rate, randomness.slice_rates, randomness.lags, randomness.slices)
"""Statistics of each mask of the first run."""


@dataclass(frozen=True)
class Undropped:
    """Output and gradient of a dropout layer when nothing is dropped, and their rounding errors.

    Attributes:
        truth: FP64 results on the CPU, of parameters and inputs rounded to the storage dtype.
        rounding: The largest `verify.randomness.errors` of the CPU's eager in the technique's precision and of the
            rounding samples.
        told: Elements from whose value the mask can be read.
    """

    truth: Tensor
    rounding: tuple[float, str, float]
    told: Tensor


def verify(trial: Trial) -> Finding:
    """Judges the dropouts of a workload, forward and backward.

    There are five runs: after seeding; without new seed; after the same seed; after the next seed; in evaluation mode.

    Raises:
        ValueError: The workload's masks cannot be read, or are too small to be judged.
    """
    case, technique, device, clock = trial.case, trial.technique, trial.device, trial.clock
    dropouts = trial.workload.dropouts
    if not dropouts:
        raise ValueError(f"{case.workload}: its modes have `random`, and it names no dropouts: give the Workload some")
    with clock("oracle"):
        expected = _expected(trial)
    with device.strict_float32():
        with clock("prepare"):
            program = _prepared(trial, Mode.BACKWARD)
        device.seed(case.seed)
        outcome, evidence = watched(trial, program, Mode.BACKWARD)
        first = _kept(outcome)
        with clock("run"):
            after = _kept(program.run(Mode.BACKWARD))
        device.seed(case.seed)
        # Watched like the first run: under autocast on xla, a dispatch mode changes where bf16 is rounded.
        outcome, repeated = watched(trial, program, Mode.BACKWARD)
        evidence += absent(evidence, repeated, "of the same seed")
        again = _kept(outcome)
        device.seed(case.seed + 1)
        outcome, last = watched(trial, program, Mode.BACKWARD)
        evidence += absent(evidence, last, "of the next seed")
        other = _kept(outcome)
        with clock("prepare"):
            program = _prepared(trial, Mode.FORWARD)
        with clock("run"):
            evaluated = _kept(program.run(Mode.FORWARD))
    with trial.judging():
        runs = {"": first, " of the next call": after, " of the same seed": again, " of the next seed": other}
        wrong = _misshapen([*runs.values()], evaluated, expected, dropouts)
        if wrong:
            return Finding(evidence, wrong, (), 0)
        unit = UNIT_ROUNDOFF[technique.precision(case.dtype)]
        figures = [
            *_values(runs, expected, dropouts, unit),
            *_evaluated(evaluated, expected, dropouts),
            *_statistics({name: runs[name] for name in runs if name != " of the same seed"}, dropouts),
        ]
        figures += [
            randomness.difference(path, "same seed", first[path], again[path])
            for path in dict.fromkeys(dropout.output for dropout in dropouts)
        ]
    compared = sum(result[dropout.output].numel() for result in runs.values() for dropout in dropouts)
    return Finding(evidence, [beyond(figure) for figure in figures if not figure.within], figures, compared)


def _prepared(trial: Trial, mode: Mode) -> Program:
    program = trial.program(trial.case.seed)
    trial.prepare(program, mode)
    warm_up(replace(trial, case=replace(trial.case, mode=mode)), program)
    trial.device.synchronize()
    return program


def _kept(result: Result) -> Result:
    """Copies a result to the CPU: captured graphs write every run's result to the same memory."""
    return {path: snapshot(tensor) for path, tensor in result.items()}


def _expected(trial: Trial) -> Mapping[str, Undropped]:
    """Returns outputs and gradients without dropout, by path; gradients are transposed to the output's layout."""
    case, workload = trial.case, trial.workload
    precision = trial.technique.precision(case.dtype)
    key = f"{case.workload}/{case.seed}/{case.dtype}/{case.mode}/{precision}"
    made = trial.store.cache.once(key, _undropped, workload, case.seed, case.dtype, precision)
    truth, *peers = made["results"]
    undropped: dict[str, Undropped] = {}
    for dropout in workload.dropouts:
        if absent := {dropout.output, dropout.gradient} - truth.keys():
            names = f"no {', '.join(sorted(absent))} in its result: {', '.join(sorted(truth))}"
            raise ValueError(f"{case.workload}: {names}")
        for path in (dropout.output, dropout.gradient):
            value = _aligned(truth[path], path, dropout)
            told = randomness.clear(value)
            errors = [randomness.errors(_aligned(peer[path], path, dropout), value, told) for peer in peers]
            gain = max(error[2] for error in errors)
            undropped[path] = Undropped(value, (*max(errors)[:2], gain), told)
        if not bool(undropped[dropout.gradient].told.any()):
            raise ValueError(f"{case.workload}: without dropout, {dropout.gradient} is 0: no mask can be read from it")
        if not bool(undropped[dropout.output].told.all()):
            raise ValueError(
                f"{case.workload}: without dropout, {dropout.output} has elements so close to 0 that what was dropped "
                f"cannot be told: let its smallest magnitude be {randomness.CLEAR:g} of the root mean square or more"
            )
    return undropped


def _undropped(workload: Workload, seed: int, dtype: str, precision: str) -> dict[str, list[dict[str, Tensor]]]:
    """Computes evaluation-mode outputs and gradients: FP64, eager in the technique's precision, rounding samples."""
    exact = _evaluating(workload, seed, dtype).widened()
    eager = _evaluating(workload, seed, "float16" if precision == "tf32" else precision)  # of the same significand
    results = [eager.gradients()]
    generator = torch.Generator().manual_seed(seed)
    # Eager's fused attention rounds once, where a correct unfused one rounds its weights too.
    with unfused(dtype):
        results.insert(0, exact.gradients())
        with Rounding(precision, dtype, generator):
            results += [exact.gradients() for _ in range(SAMPLES)]
    return {"results": [{path: tensor.detach() for path, tensor in result.items()} for result in results]}


def _evaluating(workload: Workload, seed: int, dtype: str) -> Program:
    program = Program.of(workload.problem(seed), dtype=getattr(torch, dtype), seed=seed)
    program.module.eval()
    return program


def _aligned(tensor: Tensor, path: str, dropout: Dropout) -> Tensor:
    return tensor.transpose(-2, -1) if dropout.transposed and path == dropout.gradient else tensor


def _misshapen(
    runs: Sequence[Result], evaluated: Result, expected: Mapping[str, Undropped], dropouts: Sequence[Dropout]
) -> list[Fault]:
    wrong = []
    for dropout in dropouts:
        owed = [(result, path) for result in runs for path in (dropout.output, dropout.gradient)]
        for result, path in [*owed, (evaluated, dropout.output)]:
            shape = tuple(expected[path].truth.shape)
            got = tuple(_aligned(result[path], path, dropout).shape) if path in result else None
            if got != shape:
                wrong.append(Fault(FaultKind.METADATA, path, "shape", expected=str(shape), got=str(got or "nothing")))
    return list(dict.fromkeys(wrong))


def _values(
    runs: Mapping[str, Result], expected: Mapping[str, Undropped], dropouts: Sequence[Dropout], unit: float
) -> Iterator[Figure]:
    """Checks in every run that kept values are rescaled, and that the gradient has the output's mask."""
    for (name, result), dropout in itertools.product(runs.items(), dropouts):
        forward = result[dropout.output]
        backward = _aligned(result[dropout.gradient], dropout.gradient, dropout)
        for path, value in ((dropout.output, forward), (dropout.gradient, backward)):
            truth, rounding = expected[path].truth, expected[path].rounding
            kept = expected[path].told & (value != 0)
            yield from randomness.rescaling(f"{path}{name}", value, truth, kept, dropout.rate, rounding, unit)
        told, path = expected[dropout.gradient].told, f"{dropout.gradient}{name}"
        yield randomness.difference(path, "mask of the output", backward != 0, forward != 0, told)


def _evaluated(result: Result, expected: Mapping[str, Undropped], dropouts: Sequence[Dropout]) -> Iterator[Figure]:
    for path in dict.fromkeys(dropout.output for dropout in dropouts):
        known = expected[path]
        yield randomness.unchanged(path, result[path], known.truth, known.rounding, known.told)


def _statistics(runs: Mapping[str, Result], dropouts: Sequence[Dropout]) -> Iterator[Figure]:
    """Yields statistics of each mask of the first run, and of every pair of masks of all runs."""
    masks = [
        Mask(f"{dropout.output}{name}", result[dropout.output] != 0, dropout.rate)
        for name, result in runs.items()
        for dropout in dropouts
    ]
    pairs = list(itertools.combinations(masks, 2))
    alarm = ALARM / (len(STATISTICS) * len(dropouts) + len(pairs))
    for mask, statistic in itertools.product(masks[: len(dropouts)], STATISTICS):
        yield statistic(mask, alarm)
    for first, second in pairs:
        yield randomness.likeness(first, second, alarm)
