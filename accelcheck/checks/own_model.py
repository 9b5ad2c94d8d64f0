"""Further checks of a user-owned model: other sizes, and the gradients of its custom functions."""

from collections.abc import Callable
from dataclasses import replace

from accelcheck.checks.remarks import CUSTOM, ONE_SIZE, SIZES
from accelcheck.checks.trial import Finding, Trial, absent
from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.plain import text
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.compilation.compile import AGAIN, ENTERED, GRAPHS
from accelcheck.verify.known_answers import KnownAnswerError
from accelcheck.verify.own_gradients import own_gradients
from accelcheck.verify.reference import OracleError

QUANTIZATIONS = "accelcheck.techniques.quantization."


def widened(trial: Trial, finding: Finding, judge: Callable[[Trial], Finding]) -> Finding:
    """Adds faults at other sizes and of custom functions to a finding of forward or backward mode.

    Args:
        trial: Trial of a user-owned model.
        finding: Finding at the example's sizes.
        judge: Function that prepares a trial's technique and judges one draw.

    Raises:
        Unsupported: Nothing is wrong, and a quantization found no layer that it converts, or a compiler nothing that it
            compiles in this mode.
    """
    finding = _lenient(finding)
    # A compiler that leaves out a part of its promise is not engaged; one that skips the model finds nothing.
    claims = ">= 1" if type(trial.technique).__module__.startswith(QUANTIZATIONS) else f"{ENTERED} >= 1"
    nothing = [item for item in finding.evidence if item.observed == 0 and item.claim.endswith(claims)]
    if nothing and not finding.faults:
        reason = f"{trial.technique.name} finds nothing in this model to change: {nothing[0].claim}: 0"
        raise Unsupported(unsupported(Code.NO_EFFECT, reason))
    if trial.case.mode not in {Mode.FORWARD, Mode.BACKWARD}:
        return finding
    evidence, faults = [*finding.evidence], [*finding.faults]
    for other in (_at_other_sizes(trial, finding, judge), _custom_functions(trial)):
        evidence += other[0]
        faults += other[1]
    return replace(finding, evidence=evidence, faults=faults)


def _lenient(finding: Finding) -> Finding:
    """Makes new graphs for other sizes an observation: they are no fault where results are right."""
    evidence = [
        replace(item, engaged=item.engaged or item.claim.startswith((AGAIN, GRAPHS))) for item in finding.evidence
    ]
    return replace(finding, evidence=evidence)


def _at_other_sizes(
    trial: Trial, finding: Finding, judge: Callable[[Trial], Finding]
) -> tuple[list[Evidence], list[Fault]]:
    """Judges at other sizes, prepared anew for each: at one of them where that is slow, or in backward mode."""
    sizes = trial.workload.sizes
    if sizes is None:
        return [], []
    if trial.effort.reduced:
        return [Evidence(ONE_SIZE, "all but the example's, since the model is large", engaged=True)], []
    evidence: list[Evidence] = []
    faults: list[Fault] = []
    judged, left = [], [*sizes.refused]
    every = trial.technique.level == 1 and trial.case.mode is Mode.FORWARD
    for number, (label, workload) in enumerate(sizes.workloads.items()):
        if number and not every:
            left.append(label)
            continue
        trial.technique.finish()
        try:
            other = _lenient(judge(replace(trial, workload=workload)))
        except (OracleError, Unsupported) as error:
            left.append(f"{label}: {error}")
            continue
        except KnownAnswerError:
            raise
        except Exception as error:  # noqa: BLE001 - a fault of the technique: the model accepts this size
            first = next(iter(text(error).splitlines()), "")
            faults.append(Fault(FaultKind.RAISED, "run", type(error).__name__, label, got=first))
        else:
            evidence += absent(finding.evidence, other.evidence, label)
            faults += [replace(fault, draw=label) for fault in other.faults]
        judged.append(label)
    listed = ((SIZES, judged), (ONE_SIZE, left))
    return [*evidence, *(Evidence(claim, "; ".join(words), engaged=True) for claim, words in listed if words)], faults


def _custom_functions(trial: Trial) -> tuple[list[Evidence], list[Fault]]:
    """Compares gradients of custom autograd functions with finite differences: in eager's case alone."""
    if trial.technique.family != "eager" or trial.case.mode is not Mode.BACKWARD:
        return [], []
    with trial.clock("oracle"), trial.state.restored():
        gradients = own_gradients(trial.problem(trial.case.seed))
    faults: list[Fault] = []
    words: list[str] = []
    for gradient in gradients:
        if gradient.wrong and not gradient.flat and gradient.name not in trial.workload.estimators:
            or_named = f"or {gradient.name!r} among the model's `estimators` if it is meant to differ"
            expected = f"the derivative of its forward, {or_named}"
            faults.append(
                Fault(FaultKind.VALUE, f"{gradient.name}.backward", "gradient", expected=expected, got=gradient.wrong)
            )
        elif gradient.wrong:
            words.append(f"{gradient.name}: an estimate by design")
        else:
            words.append(f"{gradient.name}: {f'not checked: {gradient.unchecked}' if gradient.unchecked else 'right'}")
    return [Evidence(CUSTOM, "; ".join(words), engaged=True)] if words else [], faults
