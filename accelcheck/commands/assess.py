"""``accelcheck assess``: prints PyTorch's Compute Platform Quality Levels by item, from journals and answers."""

import argparse
import json
from pathlib import Path
from typing import Any

from accelcheck.commands.common import GREEN, NOTHING, RED, refuse
from accelcheck.commands.parsing import examples
from accelcheck.report import console
from accelcheck.report.run import labels, load


def add(commands: Any) -> None:
    assess = commands.add_parser(
        "assess",
        help="the points of PyTorch's Compute Platform Quality Levels: evidenced by journals, claimed, missing",
        description="Prints PyTorch's Compute Platform Quality Levels for each device of the journals: the points "
        "that cases give, with their ids, figures and date, those that answers claim, and what is missing. Runs "
        "nothing. Exits with 1 if --require names a level that a device does not reach, with 5 if no case of any item "
        "is in the journals.",
    )
    assess.add_argument(
        "journals", nargs="*", type=Path, metavar="JOURNAL", help="journals of runs, of one or several devices"
    )
    assess.add_argument(
        "--answers", type=Path, metavar="FILE", help="TOML file of answers; --answers-template prints one"
    )
    assess.add_argument("--answers-template", action="store_true", help="print a file of answers with all questions")
    shown = assess.add_mutually_exclusive_group()
    shown.add_argument(
        "--markdown", action="store_true", help="print Markdown, for the issue that the process asks for"
    )
    shown.add_argument("--json", action="store_true", help="print JSON, for programs")
    assess.add_argument(
        "--require", choices=("unstable", "stable"), help="exit with 1 if a device does not reach this level"
    )
    examples(
        assess,
        ("accelcheck assess cuda.jsonl", "what the run shows"),
        ("accelcheck assess --answers-template", "a file with all that only people can answer"),
        ("accelcheck assess cuda.jsonl --answers answers.toml --markdown", "what the process asks for"),
    )
    assess.set_defaults(run=_assess)


def _assess(given: argparse.Namespace) -> int:
    from accelcheck.report import assessment, assessment_table, quality

    tables = quality.tables()
    if given.answers_template:
        print("\n".join(quality.template(tables)))
        return GREEN
    if not given.journals:
        return refuse("assess: expected the journal of a run, or --answers-template")
    runs = load(given.journals)
    answers = quality.answers(given.answers, tables) if given.answers is not None else ()
    assessed = [(name, assessment.assess(run, tables, answers)) for name, run in zip(labels(runs), runs, strict=True)]
    if given.json:
        print(json.dumps(assessment_table.as_json(assessed), indent=1))
    elif given.markdown:
        print("\n\n".join("\n".join(assessment_table.markdown(levels, name)) for name, levels in assessed))
    else:
        for number, (name, levels) in enumerate(assessed):
            console.show([*([""] if number else []), *assessment_table.lines(levels, name)])
    if not any(levels.evidenced or assessment.tried(levels) for _, levels in assessed):
        return refuse(f"no case of any item is in the journals: {assessment.HOW}", NOTHING)
    if given.require is not None:
        least = assessment.LEVELS.index(given.require.capitalize())
        if any(assessment.LEVELS.index(levels.level) < least for _, levels in assessed):
            return RED
    return GREEN
