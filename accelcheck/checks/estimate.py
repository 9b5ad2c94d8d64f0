"""Estimates how long the cases of a user-owned model take, from one forward pass."""

import time
from collections.abc import Iterable

import torch

from accelcheck.core.case import EFFORTS, Case, Mode, stable_seed
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.effort import BUDGET, Size, choose, size_of
from accelcheck.workloads.base import Workload

CASE_SECONDS = {"compilation": 12.0, "": 3.0}
"""Overhead of a judged case in seconds, by the folder of its technique; measured on 2 cores of an AMD EPYC (Zen 3)."""
TIMED_SECONDS = 12.0
"""Overhead of a timed case in seconds."""
RUNS = 4
"""Runs of a technique for each draw: warm-up, the judged one, its repetition, one without an observer."""
PASSES = {Mode.FORWARD: 1.0, Mode.SPEED: 10.0, Mode.TRAIN_SPEED: 30.0}
"""Cost of a run of a mode, in forward passes; 3 for modes with a backward pass."""
SETTLED = 0.2
"""Seconds of forward passes after which the fastest of up to three is taken: the first one may be slow."""
BUDGET_SECONDS = 10.0
"""Seconds that `accelcheck.verify.effort.BUDGET` operations take."""


def seconds_of(cases: Iterable[Case], matrix: Matrix, workload: Workload) -> tuple[float, float]:
    """Returns the seconds of one FP32 forward pass, measured, and of all cases, estimated; references are shared.

    Args:
        cases: Cases of the workload.
        matrix: Matrix that has their techniques.
        workload: User-owned workload.
    """
    problem = workload.problem(stable_seed(workload.name))  # the owner's own parameters and inputs
    module = problem.module.eval()
    times: list[float] = []
    while sum(times) < SETTLED and len(times) < 3:
        begin = time.perf_counter()
        with torch.no_grad():
            module(*problem.inputs)
        times.append(time.perf_counter() - begin)
    once = min(times)
    size, references, total = Size(**size_of(problem)), set[tuple[str, ...]](), 0.0
    for case in cases:
        technique, effort = matrix.techniques[case.technique], choose(EFFORTS[0], size, case.mode)
        own = CASE_SECONDS["compilation" if ".compilation." in type(technique).__module__ else ""]
        total += TIMED_SECONDS if case.timed else own
        steps = effort.taken(size.steps) if case.mode is Mode.TRAIN else 1
        total += effort.draws * RUNS * PASSES.get(case.mode, 3.0) * steps * once
        reference = (technique.oracle, technique.precision(case.dtype), case.dtype, str(case.mode))
        if reference not in references and not case.timed:
            references.add(reference)
            total += BUDGET_SECONDS * effort.runs() * size.work(case.mode, effort.taken(size.steps)) / BUDGET
    return once, total
