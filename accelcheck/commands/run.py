"""``accelcheck run``: runs the suite on the devices of this machine, with a journal and a report."""

import argparse
import datetime as dt
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelcheck.commands import session
from accelcheck.commands.common import GREEN, NOTHING, RED, add_selection, check_new, devices_of
from accelcheck.commands.parsing import examples
from accelcheck.commands.session import LEVEL, RAN, Half, Session
from accelcheck.core import foreground
from accelcheck.core.case import LEVELS
from accelcheck.core.journal import JournalError, Record
from accelcheck.core.journal_reading import read
from accelcheck.report.console import escaped
from accelcheck.report.qualification import whole
from accelcheck.report.run import counts, load

_OURS = ("--accel-device", "--accel-level", "--accel-journal", "--accel-resume", "--accel-technique")


def add(commands: Any) -> None:
    command = commands.add_parser(
        "run",
        help="run the suite on this machine's devices, with a journal and a report",
        description="Runs the suite as `pytest --pyargs accelcheck.suite` does, on each device in turn: first every "
        "case with one worker a core (CPU) or a chip, then the timed cases alone on the machine. Exits with pytest's "
        "exit code: 0 all right, 1 some cases are not, 2 interrupted, 4 wrong usage, 5 nothing could run.",
    )
    add_selection(command)
    level = f"1 smoke, 2 standard, 3 full, 4 soak (default: ${LEVEL}, or 1)"
    command.add_argument("--level", type=int, choices=LEVELS, default=_level(), help=level)
    journal = "new file for the records (default: accelcheck-DEVICE-DATE.jsonl in this folder)"
    command.add_argument("--journal", type=Path, metavar="FILE", help=f"{journal}; timed cases go to FILE-speed")
    command.add_argument(
        "--report", type=Path, metavar="FILE", help="HTML report (default: accelcheck-DATE.html in this folder)"
    )
    command.add_argument("--no-speed", action="store_true", help="leave out the second half, which times cases")
    command.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of pytest, after --")
    examples(
        command,
        ("accelcheck run", "level 1 on every device that is present"),
        ("accelcheck run --device=cuda --level=2", "the standard level on a GPU"),
        ("accelcheck run --technique='compile-*' --no-speed", "some techniques, not timed"),
        ("accelcheck run --device=cpu -- -x --accel-dtype=float32", "more options of pytest"),
    )
    command.set_defaults(run=_run, refuse=command.error)


def _level() -> int:
    """Returns the level that the environment names, else 1."""
    given = os.environ.get(LEVEL, "")
    return int(given) if given in set(map(str, LEVELS)) else 1


_RESUME = (
    "--accel-resume after --: to go on with a run, give it to pytest itself, with the command that the run printed"
)


def _run(given: argparse.Namespace) -> int:
    for word in given.arguments:
        name = word.partition("=")[0]
        if name in _OURS:
            option = f"--{name.removeprefix('--accel-')}"
            given.refuse(_RESUME if option == "--resume" else f"{name} after --: give {option} before it")
    if not (devices := devices_of(given)):
        return NOTHING
    stamp = dt.datetime.now(tz=dt.UTC).strftime("%Y%m%d-%H%M%S")
    planned = [_session(given, device, stamp) for device in devices]
    report = given.report or Path(f"accelcheck-{stamp}.html")
    for path in (*(path for device_session in planned for path in _journals(given, device_session)), report):
        if why := check_new(path):
            given.refuse(why)
    codes: list[int] = []
    for device_session in planned:
        codes += device_session.run(_start, lambda: None if given.no_speed else ())
        if codes[-1] not in RAN:
            break
    code = verdict(codes)
    _close({device_session.device: _journals(given, device_session) for device_session in planned}, report, code)
    return code


def _session(given: argparse.Namespace, device: str, stamp: str) -> Session:
    journal = given.journal or Path(f"accelcheck-{device}-{stamp}.jsonl")
    if given.journal is not None and len(set(given.device)) != 1:
        journal = journal.with_stem(f"{journal.stem}-{device}")
    own = [f"--technique={name}" for name in given.technique] + [f"--import={name}" for name in given.imports]
    chosen = [f"--accel-level={given.level}", *(word.replace("--", "--accel-", 1) for word in own)]
    more = ["--", *given.arguments] if given.arguments else []
    # Without the second half the summary recommends commands of pytest, one of which times cases.
    command = "" if given.no_speed else shlex.join(["accelcheck", "run", f"--device={device}", *own, *more])
    return Session(device, journal, chosen, given.arguments, command)


def _journals(given: argparse.Namespace, device_session: Session) -> tuple[Path, ...]:
    return device_session.journals[:1] if given.no_speed else device_session.journals


def _start(half: Half) -> int:
    print(f"accelcheck: {shlex.join(['python', '-m', 'pytest', *half.words])}", flush=True)
    return foreground.run([sys.executable, "-m", "pytest", *half.words], half.environ)


def verdict(codes: Sequence[int]) -> int:
    """Combines exit codes of runs: one that ended early, else red, else green; 5 if none had a case."""
    early = (code for code in codes if code not in RAN)
    return next(early, RED if RED in codes else GREEN if GREEN in codes else NOTHING)


def _close(planned: Mapping[str, Sequence[Path]], report: Path, code: int) -> None:
    """Prints the verdict of each device by its journals, the paths, and the exit code."""
    print()
    for device, journals in planned.items():
        written = [path for path in journals if path.exists()]
        cut = "" if code in RAN else "cut off: "
        print(f"accelcheck: {device}: {cut}{_tally(written)}")
        for line in _qualified(written):
            print(f"accelcheck: {line}")
    written = [path for journals in planned.values() for path in journals if path.exists()]
    for path in written:
        print(f"accelcheck: journal: {path.resolve()}")
    if written:
        made = foreground.run([sys.executable, *session.report(written, report)])
        if made == GREEN:
            print(f"accelcheck: report: {report.resolve()}")
        else:
            print(f"accelcheck: no report: accelcheck report ended with {made}", file=sys.stderr)
    print(f"accelcheck: exit {code}", flush=True)


def _tally(journals: Sequence[Path]) -> str:
    """Describes the verdict of a device."""
    records: list[Record] = []
    for path in journals:
        try:
            records += read(path)[1]
        except JournalError as error:
            return f"no verdict: {escaped(str(error))}"
    executed = [record for record in records if record.verdict.executed]
    wrong = [record for record in records if not record.verdict.green]
    tally = ", ".join(f"{number} {name}" for name, number in counts(records).items())
    if not executed:
        return f"nothing ran{': ' + tally if tally else ''}"
    if wrong:
        return f"{len(wrong)} of {len(executed)} executed cases are not right: {tally}"
    return f"{len(executed)} cases executed, none of them wrong unless the ledger expects it: {tally}"


def _qualified(journals: Sequence[Path]) -> list[str]:
    """Describes whether a device qualifies, and why not, if the whole of a level was asked for."""
    try:
        qualified = [level for run in load(journals) if (level := whole(run)) is not None]
    except JournalError:
        return []  # the tally reports it
    return [escaped(line) for level in qualified for line in (str(level), *(f"  {why}" for why in level.reasons))]
