"""Check of eager and graph mode: judged by the FP64 oracle, then timed beside eager on the host's CPU."""

from dataclasses import replace

from accelcheck.checks import numerics
from accelcheck.checks.speed import Contender
from accelcheck.checks.trial import Finding, Trial, warm_up
from accelcheck.core.case import HOST_RATIO, Evidence, Measurement, Mode
from accelcheck.core.registry import discover
from accelcheck.devices import devices
from accelcheck.measure.clocks import ClockError, block, settle, undisturbed
from accelcheck.measure.paired import Comparison, compare
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.eager import Eager
from accelcheck.verify.oracle import FIRST

COMPILERS = ("compile-static", "compile-openxla")
"""Graph-mode techniques, in order of preference."""
WORK = {"inference": Mode.FORWARD, "training": Mode.TRAIN}


def verify(trial: Trial) -> Finding:
    """Judges a mode, and times it if it is right; slower than the host's CPU is no fault.

    Raises:
        Unsupported: The device has no graph mode, or its compiler is missing.
    """
    mode, _, work = trial.case.workload.partition("-")
    technique = Eager() if mode == "eager" else _compiler(trial)
    own = _as(trial, technique, WORK[work])
    try:
        finding = numerics.verify(own, (FIRST,))
        if finding.wrong or finding.undecided:
            return finding
        used = Evidence("computed by", technique.name, engaged=True)
        return replace(finding, evidence=[*finding.evidence, used], measurements=_beside_host(own))
    finally:
        technique.finish()


def _as(trial: Trial, technique: Technique, mode: Mode) -> Trial:
    return replace(trial, technique=technique, case=replace(trial.case, technique=technique.name, mode=mode))


def _compiler(trial: Trial) -> Technique:
    """Returns the first graph-mode technique that runs on the device.

    Raises:
        Unsupported: None runs; the reason is the first one with an action, or the first.
    """
    known = {compiler.name: compiler for compiler in discover("accelcheck.techniques.compilation", "TECHNIQUES")}
    answers = []
    for name in COMPILERS:
        technique: Technique = known[name]
        answer = technique.answer(trial.device)
        if answer.ok:
            return technique
        answers.append(answer)
    raise Unsupported(next((answer for answer in answers if answer.action), answers[0]))


def _beside_host(own: Trial) -> list[Measurement]:
    """Measures the device's time as a part of the host CPU's."""
    if own.device.has("host"):
        return [Measurement(HOST_RATIO, 1.0, "x", 1.0, 1.0, "the device is the host's CPU")]
    host = devices()["cpu"]
    host.open()
    beside = replace(_as(own, Eager(), own.case.mode), device=host)
    beside = replace(beside, case=replace(beside.case, device=host.name))
    try:
        with own.clock("measure"), own.device.strict_float32(), undisturbed():
            comparison = _timed(beside, own)
    except ClockError as error:
        return [Measurement(HOST_RATIO, None, "x", reason=str(error))]
    reason = f"{comparison.answer}, {comparison.pairs} pairs, beside FP32 eager on the host's CPU"
    return [Measurement(HOST_RATIO, comparison.ratio, "x", comparison.low, comparison.high, reason)]


def _timed(host: Trial, own: Trial) -> Comparison:
    own.technique.finish()
    sides = []
    for trial in (host, own):
        contender = Contender(trial)
        warm_up(trial, contender.program)
        contender.rewind()
        timed = block(trial.device, contender.call)
        settle(timed)
        sides.append(timed)
    return compare(sides[0], sides[1])
