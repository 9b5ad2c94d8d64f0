"""``accelcheck claims``: measures published claims on this device."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, NOTHING, RED, add_device, add_many, add_results, chosen, usable
from accelcheck.commands.parsing import examples
from accelcheck.experiments.claims import catalogue, report
from accelcheck.plugin import registered
from accelcheck.report import console, results

if TYPE_CHECKING:
    from accelcheck.experiments.claims.catalogue import ClaimResult

KIND = "claims"


def add(commands: Any) -> None:
    claims = commands.add_parser(
        KIND,
        help="measure published claims on this device, and print each claim beside its measurement",
        description="Measures published claims of speed, memory and error on this device. A claim is confirmed if the "
        "whole interval reaches it, not confirmed if no part of the interval does, and undecided otherwise; it is not "
        "measurable if this device lacks the technique. Exits with 1 if a result was wrong, not if a claim is not "
        "confirmed.",
    )
    add_device(claims, "measure")
    add_many(claims, "--claim", "GLOB", "claims by name; repeatable (default: all)")
    add_results(claims)
    examples(
        claims,
        ("accelcheck claims", "all of them, on the CPU"),
        ("accelcheck claims --device=cuda --claim='fp8-*' --json claims.json", "some, and a file of the results"),
    )
    claims.set_defaults(run=_claims)


def _claims(given: argparse.Namespace) -> int:
    if not usable(given.device):
        return NOTHING
    # torch reads these at import: no pool of compiling processes, and no messages of the memory profiler.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    results.writable(given.json)
    answers = _measured(given)
    if any(answer.broken for answer in answers):
        return RED
    return GREEN if any(answer.measured for answer in answers) else NOTHING


def _measured(given: argparse.Namespace) -> list[ClaimResult]:
    from accelcheck.experiments.claims import run

    known = run.experiments()
    claims = catalogue.load(catalogue.PACKAGED, {name: technique.gives for name, technique in known.items()})
    wanted = chosen("claim", claims, given.claim, lambda claim: claim.name)
    device = registered.device(given.device)
    device.open()
    fingerprint = device.fingerprint()
    console.show([results.identity(fingerprint)])
    started = time.monotonic()
    answers: list[ClaimResult] = []
    with console.progress("claims", len(wanted), interval=0.0) as done:
        for answer in run.answers(device, wanted, known):
            answers.append(answer)
            done(f"{answer.claim.name}: {answer.outcome}", 1)
    console.show(["", *report.text(answers), f"{time.monotonic() - started:.0f} s"])
    if given.json is not None:
        results.write(given.json, KIND, fingerprint, report.as_json(answers))
    return answers
