"""Check of long trainings: their course, resuming them, and the rules of their gradient scaler."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from accelcheck.checks.trial import Finding, State, Trial, mutations, snapshot, warm_up, watched
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify import ensemble
from accelcheck.verify.trajectory import Course, judge, quantity, step
from accelcheck.workloads.base import Program, Result
from accelcheck.workloads.trainer import Trainer

WARM_STEPS = 2
"""Steps of each warm-up run: the first one creates the optimizer's state."""
SCALES = (1.0, 2.0**16)
"""Initial scales that must give the same training: 1, and torch's default."""
SCALED_STEPS = 4
"""Steps taken from each of `SCALES`, so that momentum and schedule take effect."""
RULE_STEPS = 8
SPOILT = 2
INTERVAL = 3
"""Growth interval of the run that tests the scaler's rule: 8 steps with an infinite gradient in step 2. The scale is
halved once and grows after steps 5 and 8; a scaler that kept its count would grow it after step 3."""
RESUMED = "resumed"
"""Draw name of faults of a resumed training."""


class Bed:
    """A test bed: a prepared program that is reset to its initial state before each run.

    Parameters keep their storage, so that code is compiled once; optimizer, schedule, loader and scaler are made anew.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.program = trial.program(trial.case.seed)
        if self.program.trainer is None:
            mode = Mode.TRAJECTORY
            raise TypeError(f"workload {trial.workload.name} has mode {mode} and no recipe: give its Problem one")
        self.steps = self.program.steps
        self._state = State(self.program)
        self._prepare()
        # Before its first use a scaler holds no tensors: a copy is a fresh one.
        self._scaler = copy.deepcopy(self.program.scaler)
        self.program.steps = WARM_STEPS
        warm_up(trial, self.program)

    @property
    def trainer(self) -> Trainer:
        """Trainer of the program, which the technique may have replaced."""
        if self.program.trainer is None:
            raise TypeError("the program's trainer was taken away after it was prepared")
        return self.program.trainer

    @property
    def scaled(self) -> bool:
        """True if there is an enabled scaler."""
        return self._scaler is not None and self._scaler.is_enabled()

    def begin(self, steps: int, configure: Callable[[torch.amp.GradScaler], None] | None = None) -> None:
        """Resets everything to the initial state, for a run of this many steps."""
        program, trial = self.program, self.trial
        self._state.restore()
        program.module.zero_grad(set_to_none=True)
        program.steps = steps
        program.scaler = copy.deepcopy(self._scaler)
        if configure is not None and program.scaler is not None:
            configure(program.scaler)
        self.trainer.start = None
        trial.device.synchronize()
        trial.device.seed(trial.case.seed)

    def run(self) -> Result:
        """Trains from the present state; the result is on the CPU."""
        return {path: tensor.cpu() for path, tensor in self.program.run(Mode.TRAJECTORY).items()}

    def go_on(self, steps: int, configure: Callable[[torch.amp.GradScaler], None] | None = None) -> Result:
        """Trains on from the saved state of the last run; everything else is overwritten first."""
        saved = self.trainer.save(self.program)
        self.begin(steps, configure)
        self.trial.device.seed(self.trial.case.seed + 1)
        with torch.no_grad():
            for tensor in (*self.program.module.parameters(), *self.program.module.buffers()):
                tensor.fill_(math.nan if tensor.is_floating_point() else 0)
        self.trainer.start = saved
        try:
            return self.run()
        finally:
            self.trainer.start = None

    def _prepare(self) -> None:
        # A technique is prepared with a mini-batch, as in its calls, not with the whole data set.
        program, data = self.program, self.program.inputs
        rows = len(data[0]) // self.trainer.recipe.batches
        program.inputs = tuple(value[:rows] if isinstance(value, Tensor) else value for value in data)
        self.trial.prepare(program, Mode.TRAJECTORY)
        program.inputs = data


def verify(trial: Trial) -> Finding:
    """Trains, judges the course of the training, resumes it, and probes its scaler.

    Raises:
        OracleError: The reference course fails or cannot be trusted.
    """
    case, technique, device, clock = trial.case, trial.technique, trial.device, trial.clock
    with clock("oracle"):
        course, excess = ensemble.course(trial.store.cache, case, technique, trial.workload)
    with device.strict_float32():
        with clock("prepare"):
            bed = Bed(trial)
            data = [snapshot(value) for value in bed.program.inputs]
            bed.begin(bed.steps)
        raw, evidence = watched(trial, bed.program, Mode.TRAJECTORY)
        with trial.judging():
            faults = list(_misplaced(raw, bed.program, device.type))
            result = {path: tensor.cpu() for path, tensor in raw.items()}
            judgement = judge(result, course)
            faults += judgement.faults
        with clock("resume"):
            broken, repeats = _resume(bed, result, course)
            faults += broken
            evidence.append(repeats)
        if bed.scaled:
            with clock("scaler"):
                faults += _rule(bed)
                faults += _indifference(bed, course)
        faults += mutations(bed.program.inputs, data)
    return Finding(evidence, faults, judgement.figures, judgement.compared, excess)


def _misplaced(result: Result, program: Program, device_type: str) -> Iterator[Fault]:
    """Yields a fault if a result is off the device or in another dtype; autocast keeps losses in float32 too."""
    stored = next(program.module.parameters()).dtype
    for path, tensor in result.items():
        if tensor.device.type != device_type or tensor.dtype != stored:
            expected, got = f"{stored} on {device_type}", f"{tensor.dtype} on {tensor.device.type}"
            yield Fault(FaultKind.METADATA, path, "metadata", expected=expected, got=got)
            return  # one fault for all steps


def _resume(bed: Bed, result: Result, course: Course) -> tuple[list[Fault], Evidence]:
    """Trains half, saves, restores, trains on: bitwise equal to no stop if the device repeats bitwise."""
    half = bed.steps // 2

    def growing(scaler: torch.amp.GradScaler) -> None:
        # The scale grows before the stop and, if the count of clean steps survives, soon after it.
        scaler.set_growth_interval(half // 2 + 1)

    def straight() -> tuple[Result, dict[int, float]]:
        bed.begin(bed.steps, growing)
        return bed.run(), bed.trainer.scales

    expected, scales = straight() if bed.scaled else (result, {})
    bed.begin(half, growing)
    bed.run()
    resumed = bed.go_on(bed.steps - half, growing)
    got = bed.trainer.scales
    claim = f"training resumed after {half} of {bed.steps} steps"
    faults = _unequal(expected, resumed, half)
    if faults:
        again, _ = straight()
        if _unequal(expected, again, 0):
            # The device itself does not repeat bitwise, so a resumed training need not.
            paths = {path for path in course.truth if step(path) >= half}
            faults = [replace(fault, draw=RESUMED) for fault in judge(resumed, course, paths).faults]
            return faults, Evidence(claim, "within rounding (the device itself does not repeat bitwise)", engaged=True)
    late = {at: scale for at, scale in scales.items() if at >= half}
    if late != got:
        at = next((at for at in late if got.get(at) != late[at]), half)
        wanted, there = str(late.get(at)), str(got.get(at))
        faults.append(Fault(FaultKind.RULE, "scaler", f"scale after step {at}", RESUMED, wanted, there))
    return faults, Evidence(claim, "differs" if faults else "bitwise equal", engaged=True)


def _unequal(expected: Result, got: Result, first: int) -> list[Fault]:
    """Makes one fault of the differences from step `first` on, naming the earliest."""
    wanted = {path for path in expected if step(path) >= first}
    differing = [
        path
        for path in wanted | got.keys()
        if path not in got or path not in wanted or not torch.equal(expected[path], got[path])
    ]
    if not differing:
        return []
    path = min(differing, key=lambda path: (step(path), quantity(path) == "parameter", path))
    if path not in got or path not in wanted:
        lost = path in wanted
        sides = ("a tensor", "nothing") if lost else ("nothing", "a tensor")
        return [Fault(FaultKind.METADATA, path, "missing" if lost else "unexpected", RESUMED, *sides)]
    distance = float((got[path].double() - expected[path].double()).norm() / expected[path].double().norm())
    others = f"{len(differing)} that differ, this first, by {distance:.3e}"
    equal = f"{len(wanted)} tensors bitwise equal"
    return [Fault(FaultKind.RULE, path, "not as without the stop", RESUMED, equal, others)]


def _rule(bed: Bed) -> Iterator[Fault]:
    """Checks that an infinite gradient changes no parameter and lowers the scale, and that clean steps raise it."""
    bed.begin(RULE_STEPS, lambda scaler: scaler.set_growth_interval(INTERVAL))
    trainer, scaler = bed.trainer, bed.program.scaler
    if scaler is None:
        raise TypeError("the program's scaler was taken away after it was prepared")
    scale, grow, back = float(scaler.get_scale()), scaler.get_growth_factor(), scaler.get_backoff_factor()
    spoilt = next(parameter for parameter in bed.program.module.parameters() if parameter.requires_grad)

    def infinite(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, math.inf) if trainer.step == SPOILT else gradient

    handle = spoilt.register_hook(infinite)  # type: ignore[no-untyped-call]  # torch annotates Tensor only in part
    records, trainer.records = trainer.records, lambda taken: taken > 0
    try:
        result = bed.run()
    finally:
        trainer.records = records
        handle.remove()
    clean = 0
    for at in range(RULE_STEPS):
        clean = 0 if at == SPOILT else clean + 1
        scale *= back if at == SPOILT else grow if clean == INTERVAL else 1.0
        clean %= INTERVAL
        if trainer.scales[at] != scale:
            why = "an infinite gradient" if at == SPOILT else f"{clean or INTERVAL} clean steps"
            yield _scaler(f"scale after step {at}, {why}", f"{scale:g}", f"{trainer.scales[at]:g}")
            break
    for at in range(1, RULE_STEPS):
        names = {path.rpartition("@")[0] for path in result if path.endswith(f"@{at}")}
        moved = sum(not torch.equal(result[f"{name}@{at}"], result[f"{name}@{at + 1}"]) for name in names)
        if at == SPOILT and moved:
            yield _scaler(f"step {at}, whose gradient is infinite", "0 parameters changed", str(moved))
        if at != SPOILT and not moved:
            yield _scaler(f"step {at}, whose gradient is finite", "parameters to change", f"0 of {len(names)}")


def _scaler(rule: str, expected: str, got: str) -> Fault:
    return Fault(FaultKind.RULE, "scaler", rule, expected=expected, got=got)


def _indifference(bed: Bed, course: Course) -> Iterator[Fault]:
    """Checks that the initial scale does not change the training: gradients are unscaled before they are used."""
    paths = {path for path in course.truth if step(path) < SCALED_STEPS}
    for scale in SCALES:

        def begin(scaler: torch.amp.GradScaler, scale: float = scale) -> None:
            scaler.load_state_dict(scaler.state_dict() | {"scale": scale})

        bed.begin(SCALED_STEPS, begin)
        result = bed.run()
        after = bed.trainer.scales[SCALED_STEPS - 1]
        if after != scale:
            yield _scaler(f"initial scale {scale:g}", "no gradient to overflow", f"the scale {after:g}")
        for fault in judge(result, course, paths).faults:
            yield replace(fault, draw=f"initial scale {scale:g}")
