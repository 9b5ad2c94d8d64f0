"""Remarks on a case that no verdict depends on, such as tensors that are not judged."""

from collections.abc import Sequence

from accelcheck.checks.trial import UNJUDGED, Trial
from accelcheck.core.case import Evidence, Mode
from accelcheck.verify.effort import told
from accelcheck.verify.judge import Contract, check_metadata
from accelcheck.verify.reference import Reference
from accelcheck.workloads.base import Program, Result
from accelcheck.workloads.probes import random_modules

SWITCHED_OFF = "random modules that drop nothing here"
UNCLASSIFIED = "operators whose rounding is not known, and that were granted that of a transcendental function"
OVERWRITES = "results that the next call may overwrite"
STRIDES = "outputs with other strides than eager's"
REDUCED = "how little was computed to judge a model of this size"
IDLE = "parameters that require a gradient and get none"
ALGORITHM = "classes of fast algorithms that were needed, whose errors or NaN a plain sum does not have"
UNDECIDED = "draws that rounding errors alone decide, and that are not judged"
REFUSED = "parts of the workload that the technique refuses, and that are not judged"
SIZES = "other sizes that were judged too"
ONE_SIZE = "sizes that were not tried"
CUSTOM = "custom autograd functions beside finite differences"
UNSTEADY = "tensors that a second run rounds otherwise"
REMARKS = frozenset(
    {SWITCHED_OFF, UNJUDGED, UNCLASSIFIED, OVERWRITES, STRIDES, REDUCED, IDLE, ALGORITHM, UNDECIDED, REFUSED, SIZES}
    | {ONE_SIZE}
)
"""Claims of all remarks."""
MOST_UNJUDGED = 0.5
"""Largest share of unjudged elements that a remark does not quantify."""


def remarks(trial: Trial, program: Program, reference: Reference, raw: Result, strict: Contract) -> list[Evidence]:
    """Makes the remarks on the first draw of a case.

    `raw` is the result of the run, on the device, and `strict` the metadata that a built-in workload's must have.
    """
    own, mode = trial.workload.owned, trial.case.mode
    listed: dict[str, Sequence[str]] = {
        # In evaluation mode they are off anyway.
        SWITCHED_OFF: [] if mode is Mode.FORWARD else _switched_off(trial),
        UNJUDGED: _unjudged(reference),
        UNCLASSIFIED: reference.unclassified,
        OVERWRITES: [program.overwrites] if program.overwrites else [],
        STRIDES: _strides(raw, reference, strict) if own else [],
        REDUCED: _reduced(trial),
        IDLE: _idle(program, reference) if trial.workload.given and mode is Mode.BACKWARD else [],
    }
    return [Evidence(claim, ", ".join(words), engaged=True) for claim, words in listed.items() if words]


def _switched_off(trial: Trial) -> list[str]:
    return [f"{name}: {what}" for name, what in random_modules(trial.problem(trial.case.seed).module).items()]


def _unjudged(reference: Reference) -> list[str]:
    """Lists unjudged tensors, and their share of all elements above `MOST_UNJUDGED`."""
    numbers = {path: tensor.numel() for path, tensor in reference.truth.items() if tensor.is_floating_point()}
    share = sum(numbers.get(path, 0) for path in reference.unjudged) / max(1, sum(numbers.values()))
    return [*sorted(reference.unjudged), *([f"which are {share:.0%} of all elements"] if share > MOST_UNJUDGED else [])]


def _strides(raw: Result, reference: Reference, strict: Contract) -> list[str]:
    """Lists outputs of a user-owned model with other strides: no fault where their values are right."""
    return [str(fault) for fault in check_metadata(raw, reference, strict) if fault.view == "strides"]


def _reduced(trial: Trial) -> list[str]:
    """Describes the reduced effort that judged a large model; empty for the usual one."""
    effort, store = trial.effort, trial.store
    if not effort.reduced:
        return []
    return [told(effort, store.size(trial.case, trial.workload), trial.case.mode, store.word)]


def _idle(program: Program, reference: Reference) -> list[str]:
    """Lists parameters of a user-owned model that require a gradient and have none in the reference."""
    asked = (name for name, parameter in program.module.named_parameters() if parameter.requires_grad)
    return [name for name in asked if f"grad:{name}" not in reference.truth]
