"""Runs the first checks of a GPU within half an hour: each step has a share of the time and keeps its results.

    PYTHONPATH=. python benchmarks/gpu.py --out results            # all steps, 30 minutes
    PYTHONPATH=. python benchmarks/gpu.py --out "$OUT" --minutes 9 --steps list level1 selftest

Installs and fetches nothing: it needs torch, pytest, pytest-xdist, pytest-benchmark and accelcheck's dependencies. A
step that fails, hangs or takes too long is stopped, and the next one begins. One folder gets at most seven files: a
journal of each suite run, the figures of the commands, `log.txt` with all output, and `summary.json`, also printed,
with the findings, the steps left, and the command to continue. Exit status 1 where a step is not done or a verdict is
bad. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.core.journal import JournalError
from accelcheck.core.journal_reading import read

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SUITE = ("-m", "pytest", "--pyargs")
PLUGIN = "accelcheck.plugin.hooks"
GRACE = 20.0
"""Seconds that a step has, after an interrupt, to write its report before it is killed."""
LEAST = 30.0
"""Fewest seconds worth the start of a step."""
SLICES = ("[ab]*", "[cd]*", "[e-h]*", "[i-m]*", "[n-r]*", "s*", "[t-z]*")
"""Faults of `accelcheck selftest` in parts, because it prints its table only at the end."""
LARGE = 8 << 20
"""Bytes from which on a journal is compressed."""
SHOWN = 40
"""Most bad verdicts that the summary lists."""


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        name: Its name on the command line.
        share: Share of the time, in parts.
        words: Function of the command line that gives Python's arguments for each process of the step.
        journal: True where it writes a journal of its name.
    """

    name: str
    share: float
    words: Callable[[argparse.Namespace], list[list[str]]]
    journal: bool = False


@dataclass
class Outcome:
    """Result of a step.

    Attributes:
        name: Its name.
        state: ``done``, ``stopped`` (out of time), ``failed`` (exit status other than 0 or 1) or ``not begun``.
        seconds: Seconds that it ran.
        statuses: Exit statuses of its processes; negative numbers are signals.
        verdicts: Cases by verdict.
        cases: Cases with a verdict.
        selected: Cases that the run was to judge; 0 where it was stopped before it knew.
        bad: Ids of cases with a bad verdict, and the first line of the reason.
    """

    name: str
    state: str = "not begun"
    seconds: float = 0.0
    statuses: list[int] = field(default_factory=list)
    verdicts: dict[str, int] = field(default_factory=dict)
    cases: int = 0
    selected: int = 0
    bad: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"{self.name:9}{self.state:10}{self.seconds:5.0f} s"]
        if self.cases:
            total = f" of {self.selected}" if self.selected else ""
            counts = ", ".join(f"{number} {verdict}" for verdict, number in sorted(self.verdicts.items()))
            parts.append(f"{self.cases}{total} cases: {counts}")
        elif self.statuses:
            parts.append(f"exit status {', '.join(map(str, self.statuses))}")
        return "  ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; the exit status is returned."""
    given = parsed(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    ends = started + 60 * given.minutes
    left = [plan for plan in PLANS if plan.name in given.steps]
    outcomes = [Outcome(plan.name) for plan in left]
    with (given.out / "log.txt").open("ab") as log:
        for number, plan in enumerate(left):
            # Later steps share the time that a step leaves.
            shares = sum(other.share for other in left[number:])
            budget = (ends - time.monotonic()) * plan.share / shares
            if budget >= LEAST * min(1.0, given.minutes / 10):
                print(f"{plan.name}: at most {budget:.0f} s", flush=True)
                run(plan, outcomes[number], budget, given, log)
                print(outcomes[number], flush=True)
            write(given, outcomes)
    print(summary(given, outcomes))
    return 0 if all(outcome.state == "done" and not outcome.bad for outcome in outcomes) else 1


def run(plan: Plan, outcome: Outcome, budget: float, given: argparse.Namespace, log: Any) -> None:
    """Run the processes of a step, one after the other, until its time is over."""
    begun = time.monotonic()
    outcome.state = "done"
    for words in plan.words(given):
        rest = budget - (time.monotonic() - begun)
        if rest <= 0:
            outcome.state = "stopped"
            break
        log.write(f"\n$ python {shlex.join(words)}\n".encode())
        log.flush()
        status, stopped = process(words, rest, log)
        outcome.statuses.append(status)
        if stopped:
            outcome.state = "stopped"
        elif status not in {0, 1}:  # 1: it has found something
            outcome.state = "failed"
    outcome.seconds = round(time.monotonic() - begun, 1)
    if plan.journal:
        judged(given.out / f"{plan.name}.jsonl", outcome)
        outcome.selected = selected(given.out / "log.txt")


def process(words: Sequence[str], limit: float, log: Any) -> tuple[int, bool]:
    """Run Python; return its exit status, and whether it had to be stopped, first by an interrupt."""
    environ = dict(os.environ)
    if not installed():
        # Not installed: pytest has no entry point of the plugin.
        environ["PYTEST_ADDOPTS"] = f"{environ.get('PYTEST_ADDOPTS', '')} -p {PLUGIN}".strip()
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environ,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - under `nohup`
    ) as child:
        try:
            status = child.wait(limit)
            kill(child)  # what it has left running
            return status, False  # noqa: TRY300 - the other ways are below
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
        try:
            return child.wait(GRACE), True
        except subprocess.TimeoutExpired:
            kill(child)
            return child.wait(), True


def kill(child: subprocess.Popen[bytes]) -> None:
    """End what is left of a process's group."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def installed() -> bool:
    """Returns True where pytest finds the plugin by itself."""
    return any(point.value == PLUGIN for point in metadata.entry_points(group="pytest11"))


def judged(path: Path, outcome: Outcome) -> None:
    """Reads a journal; a large one is compressed."""
    try:
        _, records = read(path)
    except (JournalError, OSError) as error:
        outcome.bad.append(f"{path.name}: {error}")
        return
    outcome.cases = len(records)
    outcome.verdicts = dict(Counter(str(record.verdict) for record in records))
    outcome.bad += [
        f"{record.case.id}: {record.verdict}: {record.headline[:200]}" for record in records if not record.verdict.green
    ]
    if path.stat().st_size > LARGE:
        with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        path.unlink()


def selected(log: Path) -> int:
    """Reads the number of cases of the last run of the suite from the plugin's first lines; 0 where it is missing."""
    matches = re.findall(r"^accelcheck: level \d+: (\d+) cases on ", log.read_text(errors="replace"), re.MULTILINE)
    return int(matches[-1]) if matches else 0


def write(given: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    """Store what is known until now."""
    data = {"device": given.device, "minutes": given.minutes, "steps": [asdict(outcome) for outcome in outcomes]}
    (given.out / "summary.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def summary(given: argparse.Namespace, outcomes: Sequence[Outcome]) -> str:
    """The steps, the bad verdicts, and what is left."""
    lines = ["", *map(str, outcomes)]
    bad = [line for outcome in outcomes for line in outcome.bad]
    if bad:
        lines += ["", f"{len(bad)} bad:", *(f"  {line}" for line in bad[:SHOWN])]
        lines += [f"  ... and {len(bad) - SHOWN} more in the journals"] if len(bad) > SHOWN else []
    left = [outcome.name for outcome in outcomes if outcome.state != "done"]
    if left:
        again = [
            "python",
            "benchmarks/gpu.py",
            "--device",
            given.device,
            "--out",
            f"{given.out}-more",
            "--steps",
            *left,
        ]
        lines += ["", f"left: {shlex.join(again)}"]
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [plan.name for plan in PLANS]
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--device", default="cuda", help="device under test (default: cuda)")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for the results")
    parser.add_argument("--minutes", type=float, default=30.0, help="time of all steps together (default: 30)")
    parser.add_argument(
        "--steps", nargs="+", choices=names, default=names, metavar="STEP", help=f"of {', '.join(names)}"
    )
    parser.add_argument(
        "--workers", type=int, default=max(1, min(8, cores - 1)), help="processes that share the device"
    )
    parser.add_argument("--only", default="", help="expression of pytest's -k for the suite, for a short try")
    return parser.parse_args(arguments)


def suite(level: int, name: str, *, timed: bool = False) -> Callable[[argparse.Namespace], list[list[str]]]:
    """A run of the suite; with `timed`, of the timed cases alone, on an otherwise idle machine."""

    def words(given: argparse.Namespace) -> list[list[str]]:
        tests = ["accelcheck.suite.test_speed"] if timed else ["accelcheck.suite"]
        workers = (
            ["-n", "0"] if timed or given.workers == 1 else ["-n", str(given.workers), "--max-worker-restart=1000"]
        )
        chosen = ["-k", given.only] if given.only else []
        asked = [f"--accel-device={given.device}", f"--accel-level={level}", "--accel-require"]
        journal = f"--accel-journal={given.out / name}.jsonl"
        return [[*SUITE, *tests, *asked, journal, *workers, "-p", "no:cacheprovider", "-q", "-rfE", *chosen]]

    return words


def command(*words: str, json_file: str = "") -> Callable[[argparse.Namespace], list[list[str]]]:
    """A command of accelcheck on the device."""

    def made(given: argparse.Namespace) -> list[list[str]]:
        file = ["--json", str(given.out / json_file)] if json_file else []
        return [["-m", "accelcheck.cli", words[0], "--device", given.device, *words[1:], *file]]

    return made


def plants(given: argparse.Namespace) -> list[list[str]]:
    """The selftest in parts, one seed each."""
    jobs = ["--seeds", "1", "--jobs", str(max(1, given.workers // 2))]
    return [["-m", "accelcheck.cli", "selftest", "--device", given.device, *jobs, "--fault", part] for part in SLICES]


PLANS = (
    Plan("list", 1, command("list")),
    Plan("level1", 5, suite(1, "level1"), journal=True),
    Plan("selftest", 6, plants),
    Plan("level2", 10, suite(2, "level2"), journal=True),
    Plan("timing", 4, suite(1, "timing", timed=True), journal=True),
    Plan("curve", 2, command("curve", "--counts", "1,5,20", json_file="curve.json")),
    Plan("claims", 2, command("claims", json_file="claims.json")),
)
"""Steps in order: what the device can do, correctness, planted faults, more cases, speed."""


if __name__ == "__main__":
    raise SystemExit(main())
