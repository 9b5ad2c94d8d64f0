"""Measures claims; each experiment runs once for all claims that share it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from accelcheck.core.registry import discover, index
from accelcheck.devices.base import Device
from accelcheck.experiments.claims.catalogue import Claim, ClaimResult, absent, judged, wrong
from accelcheck.experiments.claims.experiment import Experiment, measured, telling
from accelcheck.experiments.curve import brief
from accelcheck.measure.clocks import undisturbed
from accelcheck.techniques.base import Unsupported


def experiments() -> Mapping[str, Experiment]:
    """All experiments of the package, by name."""
    return index("experiment", discover("accelcheck.experiments.claims", "EXPERIMENTS"))


def answers(device: Device, claims: Sequence[Claim], known: Mapping[str, Experiment]) -> Iterator[ClaimResult]:
    """The results of claims on an open device, grouped by experiment; `known` has the experiments by name."""
    ordered = sorted(claims, key=lambda claim: (claim.experiment, claim.name))
    for name, group in groupby(ordered, key=lambda claim: claim.experiment):
        yield from _answers(device, list(group), known[name])


def _answers(device: Device, claims: Sequence[Claim], experiment: Experiment) -> Iterator[ClaimResult]:
    capability = experiment.answer(device)
    told = {claim: capability if not capability.ok else telling(device, claim.what) for claim in claims}
    left = [claim for claim in claims if told[claim].ok]
    results = {claim: absent(claim, told[claim]) for claim in claims if claim not in left}
    if left:
        try:
            with device.strict_float32(), experiment.contest(device) as contest:
                for claim in left:
                    with undisturbed():
                        results[claim] = judged(claim, measured(contest, claim.what, claim.figure))
        except Unsupported as answer:
            results |= {claim: absent(claim, answer.capability) for claim in left}
        except Exception as error:  # noqa: BLE001 - any failure of an experiment is the result of its claims
            results |= {claim: wrong(claim, brief(error)) for claim in left}
    yield from (results[claim] for claim in claims)
