"""``accelcheck doctor``: reports testable devices, missing parts, and the commands that install them."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, RED, add_import, number
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.devices.probe import TIMEOUT
from accelcheck.report import console

if TYPE_CHECKING:
    from accelcheck.experiments.doctor import Examination

_WIDTH = 120


def add(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can test, what it lacks, and the command that installs it",
        description="Looks at devices, drivers, torch, packages, variables, memory, disk, limits and pytest's "
        "settings. Each line is ok, a note (cases are left out, or results may differ) or a problem, with what to do. "
        "Runs no case. Exits with 0 where a device can be tested, and with 1 where none can.",
    )
    add_import(doctor)
    doctor.add_argument(
        "--probe-timeout",
        type=number(float, lambda value: 0 < value < float("inf"), "a positive number of seconds"),
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"seconds that a device has to answer (default: {TIMEOUT:g})",
    )
    add_json(doctor)
    examples(
        doctor,
        ("accelcheck doctor", "for people"),
        ("accelcheck doctor --json", "for programs"),
        ("accelcheck doctor --import=torch_vendor", "with a backend that no entry point loads"),
    )
    doctor.set_defaults(run=_doctor)


def _doctor(given: argparse.Namespace) -> int:
    from accelcheck.experiments.doctor import examine

    examination = examine(given.probe_timeout)
    if given.json:
        print_json("doctor", examination.as_json())
    else:
        console.show(_lines(examination))
    return GREEN if examination.present else RED


def _lines(examination: Examination) -> Iterator[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, break_long_words=False, break_on_hyphens=False)
    ordered = sorted(examination.findings, key=lambda finding: _TOPICS.index(finding.topic))
    for topic, group in groupby(ordered, key=lambda finding: finding.topic):
        yield topic
        for finding in group:
            start = f"  {finding.grade:<9}"
            wrapper.initial_indent, wrapper.subsequent_indent = start, " " * len(start)
            yield from wrapper.wrap(finding.fact)
            if finding.action:
                yield f"{' ' * len(start)}-> {finding.action}"
        yield ""
    grades = [str(finding.grade) for finding in examination.findings]
    yield f"{grades.count('ok')} ok, {grades.count('note')} notes, {grades.count('problem')} problems"
    if examination.present:
        yield f"can be tested: {', '.join(examination.present)}. Next: accelcheck run"
    else:
        yield "nothing can be tested until the problems above are solved"


_TOPICS = ("torch", "devices", "packages", "variables", "machine", "pytest")
