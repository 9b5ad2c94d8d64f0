"""Trainings that a candidate's is compared with: FP64, FP64 with rounding errors, FP32 eager, other seeds."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from accelcheck.core.case import Case, Mode
from accelcheck.verify.cache import Cache
from accelcheck.verify.oracle_runs import Arithmetic, EmulatedTechnique
from accelcheck.verify.precision import SLACK
from accelcheck.verify.reference import OracleError
from accelcheck.verify.rounding import Rounding
from accelcheck.verify.sample_budgets import TRUST
from accelcheck.verify.trajectory import SEEDS, Course, chart, judge
from accelcheck.workloads.base import Program, Result, Workload, cast
from accelcheck.workloads.dispatch import unfused

SAMPLES = 4
"""Trainings with rounding errors. Each step's number is compared with those of 9 steps (`trajectory.REACH`), each
tensor has many elements: four suffice for both, and a training costs more than a pass."""


def course(cache: Cache, case: Case, technique: EmulatedTechnique, workload: Workload) -> tuple[Course, float]:
    """Course of a case, computed once for all processes of a run, and the ratio of eager's error to the samples'.

    Raises:
        OracleError: A training failed or diverged, or eager does not agree with FP64.
    """
    arithmetic = Arithmetic.of(technique, case.dtype)
    key = f"{case.workload}/{case.seed}/{case.dtype}/{case.mode}/{arithmetic.arithmetic}/{arithmetic.oracle}"
    # Shared by all precisions: eager's trainings depend on the storage dtype alone.
    name = f"{case.workload}/{case.seed}/{case.dtype}/{case.mode}/seeds"
    seeds = cache.once(name, _others, workload, case)
    plain = cache.once(key, _computed, workload, arithmetic, case, [*seeds.values()])
    excess = plain.pop("eager_excess")
    return Course(**plain), excess


def _others(workload: Workload, case: Case) -> dict[str, Result]:
    return {str(number): _other(workload, case, number) for number in range(SEEDS)}


def _computed(workload: Workload, technique: Arithmetic, case: Case, seeds: Sequence[Result]) -> dict[str, Any]:
    """Fields of the `Course`, in types that `torch.load` accepts with ``weights_only``, and eager's excess."""
    exact = _exactly(workload, technique, case)
    start = {name: parameter.detach().clone() for name, parameter in exact.module.named_parameters()}
    with unfused(case.dtype):
        truth = _trained(f"{workload.name}: FP64", exact, case.seed)
        samples = [_sample(workload, technique, case, index) for index in range(SAMPLES)]
    try:
        course = chart(truth, start, samples, seeds)
    except ValueError as error:
        raise OracleError(f"{workload.name}: {error}") from error
    comparable = technique.oracle == "float64" and technique.arithmetic == case.dtype
    return {**vars(course), "eager_excess": _excess(workload, course, seeds[0]) if comparable else 0.0}


def _excess(workload: Workload, course: Course, eager: Result) -> float:
    judgement = judge(eager, course)
    by_step = [figure for figure in judgement.figures if figure.path in course.allowed]
    excess = max((SLACK * figure.used for figure in by_step), default=math.inf)
    if not excess <= TRUST:
        raise OracleError(
            f"{workload.name}: eager on the CPU is {excess:.3g} times further from FP64 than rounding explains (limit "
            f"{TRUST:g}): {'; '.join(map(str, judgement.faults))}"
        )
    return excess


def _exactly(workload: Workload, technique: Arithmetic, case: Case) -> Program:
    """Program in FP64, from parameters and data as the storage dtype rounds them."""
    program = Program.of(workload.problem(case.seed), dtype=getattr(torch, case.dtype), seed=case.seed).widened()
    program.module = technique.emulate(program.module, program.inputs)
    return program


def _sample(workload: Workload, technique: Arithmetic, case: Case, index: int) -> Result:
    generator = torch.Generator().manual_seed((case.seed + 1) * SAMPLES + index)
    rounding = Rounding(technique.arithmetic, case.dtype, generator)
    program = _exactly(workload, technique, case)
    program.update = lambda: rounding.at(case.dtype)
    with rounding:
        return _trained(f"{workload.name}: FP64 with rounding errors", program, case.seed)


def _other(workload: Workload, case: Case, number: int) -> Result:
    """Trains eager from another seed: other parameters and order, the same data. Number 0 is the case's own seed."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    own = Program.of(workload.problem(case.seed), dtype=dtype, seed=case.seed)
    if number:
        own.module = cast(workload.problem(case.seed + number).module, "cpu", dtype)
        own.seed = case.seed + number
    return _trained(f"{workload.name}: eager", own, case.seed + number)


def _trained(who: str, program: Program, seed: int) -> Result:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # no other device's, which would not be restored
            result = program.run(Mode.TRAJECTORY)
    except Exception as error:
        raise OracleError(f"{who}: the training raised {type(error).__name__}: {error}") from error
    if lost := [path for path, tensor in result.items() if not bool(tensor.isfinite().all())]:
        raise OracleError(f"{who}: the training is not finite at {lost[0]}")
    return result
