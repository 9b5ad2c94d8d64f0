"""Makes the table of gates from sessions of speed_gates.py, and decides which promises are kept.

* A gate with a saved run compares a session with the one before it: each session is saved once and checked once.
  Sessions of different machines or conditions are never compared with each other; their repetitions are added up.
* Gate 1 has one repetition per session and cell.
* Gate 2 compares processes 11 to 13 of a session with the first 10 of the one before: repetitions share no process.
  Random draws of 10 and 3 processes of all sessions, which do share processes, are printed beside it.
* Gate 3 takes the pairs of processes in turns, A and B, in order, until it has an answer or 34 pairs; the next
  repetition takes the pairs that follow. Pairs left over at the end are dropped.

A change is found where the answer is `slower`; with nothing planted, any answer but `same` and `undecided` is false.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planted_work import SLOWDOWNS
from pytest_benchmark.utils import parse_compare_fail
from scipy.stats import binom

from accelcheck.measure import duet, regression

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    Session = dict[str, Any]

CONDITIONS = ("quiet", "busy")
LIMIT = 5
"""Per cent by which a time may differ from the saved one."""
STORED, CHECKED = regression.STORED, regression.CHECKED
PROCESSES, PAIRS = STORED + CHECKED, 5
"""Processes of a session that make a repetition of gate 2, and the fewest pairs that one of gate 3 takes."""
ENOUGH = 80
"""Fewest repetitions of a cell that decide a criterion."""
CHANCE = 0.05
"""Significance level: probability of such counts under a kept promise, below which it counts as broken."""
DRAWS = 2000
WRONG = {"faster", "slower"}
"""Answers that are false where nothing changed."""
COUNTS = ("false", *(f"{per_cent} %" for per_cent in SLOWDOWNS if per_cent))
HEADER = "| gate | a check takes | " + " | ".join(f"{what}, {c}" for c in CONDITIONS for what in COUNTS) + " |"


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All lines of all files; exits with an error that names a line that was cut short."""
    lines = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise SystemExit(f"{path}:{number}: not JSON ({error}): remove the line") from error
    return lines


@dataclass
class Tally:
    """Repetitions and alarms of one gate, by condition and slowdown.

    Attributes:
        name: Name in the table.
        asked, alarms: Counts by condition and column: those of `COUNTS`, and those of gate 2's stated sizes.
        seconds: Seconds of each check.
        cost: Cost of a check, where it is not told in seconds.
    """

    name: str
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    alarms: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    cost: str = ""

    def note(self, condition: str, column: str, alarm: object) -> None:
        """Count a repetition."""
        self.asked[condition, column] += 1
        self.alarms[condition, column] += bool(alarm)

    def sums(self, column: str, conditions: Sequence[str] = CONDITIONS) -> tuple[int, int]:
        """Alarms and repetitions of a column."""
        keys = [(condition, column) for condition in conditions]
        return sum(self.alarms[key] for key in keys), sum(self.asked[key] for key in keys)


def column(per_cent: int) -> str:
    """Heading of the column of a slowdown."""
    return f"{per_cent} %" if per_cent else "false"


def saved_runs(sessions: Sequence[Session]) -> Iterator[Tally]:
    """Tallies of the two tools that compare with a saved time."""
    rule = parse_compare_fail(f"mean:{LIMIT}%")  # type: ignore[no-untyped-call]  # the plugin has no annotations
    theirs = Tally(f"pytest-benchmark, mean against a saved run, {LIMIT} %")
    timer = Tally(f"torch.utils.benchmark, median against a saved run, {LIMIT} %")
    for before, after in consecutive(sessions):
        for name, per_cent in cells(after):
            key, condition = str(per_cent), after["condition"]
            current, saved = after["pytest-benchmark"][name][key], before["pytest-benchmark"][name]["0"]
            theirs.note(condition, column(per_cent), rule.fails(current, saved))
            slower = after["timer"][name][key] / before["timer"][name]["0"] - 1
            timer.note(condition, column(per_cent), slower > LIMIT / 100)
    for session, tally in itertools.product(sessions, (theirs, timer)):
        spent = session["pytest-benchmark-seconds" if tally is theirs else "timer-seconds"]
        tally.seconds.append(spent / len(cells(session)))
    yield theirs
    yield timer


def gate_1(sessions: Sequence[Session], kind: str, name: str) -> Tally:
    """Tally of gate 1, in one process; `kind` is ``shared`` or ``own``, for the candidate's tensors."""
    tally = Tally(name)
    for session in sessions:
        for workload, per_cent in cells(session):
            counts = session["gate-1"][kind][workload][str(per_cent)]
            tally.note(
                session["condition"],
                column(per_cent),
                counts["answer"] == "slower" or (not per_cent and counts["answer"] in WRONG),
            )
            tally.seconds.append(counts["seconds"])
    return tally


def gate_2(sessions: Sequence[Session]) -> tuple[Tally, dict[str, list[float]]]:
    """Tally of gate 2, and the smallest changes that it states, by workload.

    The last processes of a session must name a change, and its first ones confirm it, as in `Gate.time`.
    """
    tally = Tally("gate 2: ratios of processes against stored ones", cost=f"{CHECKED} processes, and {STORED} more")
    sizes: dict[str, list[float]] = defaultdict(list)
    for before, after in consecutive(sessions):
        checked = after["processes"][STORED : STORED + CHECKED]
        stored = before["processes"][:STORED]
        if len(checked) < CHECKED or len(stored) < STORED:
            continue
        for name, per_cent in cells(after):
            cases = len(after["names"])
            judgement = held(stored, checked, name, per_cent, cases)
            again = held(stored, after["processes"][:STORED], name, per_cent, cases)
            named = judgement.regression and again.regression
            tally.note(after["condition"], column(per_cent), named)
            if per_cent and judgement.smallest <= 1 + per_cent / 100:
                tally.note(after["condition"], "stated, planted", named)
            if not per_cent:
                sizes[name].append(judgement.smallest - 1)
                size = judgement.smallest
                both = judgement.factor * size > judgement.limit and again.factor * size > again.limit
                tally.note(after["condition"], "stated", both)
    return tally, sizes


def held(stored: Sequence[Any], checked: Sequence[Any], name: str, per_cent: int, cases: int) -> regression.Change:
    """The change of processes with a slowdown against those without."""
    base = regression.Sample.of([process[name]["0"]["ratio"] for process in stored])
    return regression.change(
        base, regression.Sample.of([process[name][str(per_cent)]["ratio"] for process in checked]), cases
    )


def resampled(group: Sequence[Session]) -> str:
    """Gate 2 on random draws of a group's processes: more repetitions, but they share processes."""
    condition, pool = group[0]["condition"], [process for session in group for process in session["processes"]]
    if len(pool) < 2 * (STORED + CHECKED):
        return f"{condition}: too few processes"
    chance, names = random.Random(0), sorted(pool[0])
    alarms, runs = 0, 0
    for _ in range(DRAWS):
        drawn = chance.sample(pool, 2 * STORED + CHECKED)
        stored, checked, further = drawn[:STORED], drawn[2 * STORED :], drawn[STORED : 2 * STORED]
        collected = [
            all(held(stored, those, name, 0, len(names)).regression for those in (checked, further)) for name in names
        ]
        alarms += sum(collected)
        runs += any(collected)
    return f"{condition}: {alarms / DRAWS / len(names):.2%} of checks, {runs / DRAWS:.2%} of runs of {len(names)} cases"


def gate_3(sessions: Sequence[Session]) -> Tally:
    """Tally of gate 3, from pairs of processes that ran in turns."""
    tally = Tally("gate 3: pairs of processes in turns")
    used = []
    for those in groups(sessions):
        pairs = [(first, second) for session in those for first, second in session["pairs"]]
        for name, per_cent in cells(those[0]):
            for judgement in duets(pairs, name, per_cent, len(those[0]["names"])):
                wrong = not per_cent and judgement.answer in WRONG
                tally.note(those[0]["condition"], column(per_cent), judgement.answer == "slower" or wrong)
                used.append(judgement.pairs)
    tally.cost = f"{statistics.fmean(used):.1f} pairs" if used else "-"
    return tally


def duets(pairs: Sequence[tuple[Any, Any]], name: str, per_cent: int, cases: int) -> Iterator[duet.Duet]:
    """Consecutive duets, each of the pairs that the one before it left."""
    ratios: list[float] = []
    for a, b in pairs:
        ratios.append(b[name][str(per_cent)]["seconds"] / a[name]["0"]["seconds"])
        if len(ratios) in duet.LOOKS:
            judgement = duet.judge(ratios, cases)
            if judgement.answer != "undecided" or len(ratios) == duet.LOOKS[-1]:
                yield judgement
                ratios = []


def groups(sessions: Sequence[Session]) -> Iterator[list[Session]]:
    """Sessions that may be compared, in groups of one machine and condition."""
    calibrations = dict.fromkeys(session["calibration"] for session in sessions)
    for key in itertools.product(calibrations, CONDITIONS):
        if group := [session for session in sessions if (session["calibration"], session["condition"]) == key]:
            yield group


def consecutive(sessions: Sequence[Session]) -> Iterator[tuple[Session, Session]]:
    """Each session of a group with the one before it."""
    for those in groups(sessions):
        yield from itertools.pairwise(those)


def cells(one: Session) -> list[tuple[str, int]]:
    """Workloads and slowdowns of a session."""
    return [(name, per_cent) for name in one["names"] for per_cent in SLOWDOWNS]


def planted(sessions: Sequence[Session]) -> dict[tuple[str, int], list[float]]:
    """Truly planted part of the time in each process, by workload and slowdown."""
    processes = [process for session in sessions for process in session["processes"]]
    return {
        (name, per_cent): [
            process[name][str(per_cent)]["seconds"] / process[name]["0"]["seconds"] - 1 for process in processes
        ]
        for name, per_cent in cells(sessions[0])
    }


def of_workloads(sessions: Sequence[Session], parts: dict[tuple[str, int], list[float]]) -> Iterator[str]:
    """Truly planted slowdowns with quartiles, and the spread of processes."""
    yield "| workload | planted 3 % | 5 % | 10 % | spread between processes: ratio | time |"
    yield "|---|---:|---:|---:|---:|---:|"
    processes = [process for session in sessions for process in session["processes"]]
    for name in sessions[0]["names"]:
        quarters = [statistics.quantiles(parts[name, per_cent], n=4, method="inclusive") for per_cent in SLOWDOWNS[1:]]
        seen = [f"{middle:.1%} ({low:.1%} to {high:.1%})" for low, middle, high in quarters]
        spreads = [
            statistics.stdev(math.log(process[name]["0"][key]) for process in processes) for key in ("ratio", "seconds")
        ]
        yield f"| {name} | {' | '.join(seen)} | {' | '.join(f'{spread:.1%}' for spread in spreads)} |"


def show(lines: Sequence[dict[str, Any]]) -> int:
    """Print a table for each torch and each way to measure, over all machines; 1 where a criterion is not met."""
    ways: dict[tuple[object, ...], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "calibration":
            ways[line["torch"], line["threads"], tuple(line["names"]), line["quick"]].append(line)
    red = 0
    for (torch, threads, *_), calibrations in ways.items():
        machines = {calibration["id"]: calibration["machine"] for calibration in calibrations}
        sessions = [line for line in lines if line["kind"] == "session" and line["calibration"] in machines]
        if sessions:
            used = dict.fromkeys(machines[session["calibration"]] for session in sessions)
            print(f"\n{' and '.join(used)}, torch {torch}, {threads} thread(s)")
            red |= _shown(sessions)
    return red


def spreads(sessions: Sequence[Session]) -> dict[str, tuple[float, float]]:
    """Standard deviations of log ratios without a planted slowdown, by workload: of pairs in turns, and in sequence."""

    def spread(pairs: Sequence[tuple[Any, Any]], name: str) -> float:
        return statistics.stdev(math.log(b[name]["0"]["seconds"] / a[name]["0"]["seconds"]) for a, b in pairs)

    in_turns = [(a, b) for session in sessions for a, b in session["pairs"]]
    in_sequence = [two for session in sessions for two in itertools.pairwise(session["processes"])]
    return {name: (spread(in_turns, name), spread(in_sequence, name)) for name in sessions[0]["names"]}


def gates(sessions: Sequence[Session]) -> tuple[tuple[Tally, Tally, Tally, Tally], dict[str, list[float]]]:
    """The tallies of accelcheck's gates, and the sizes that gate 2 states by workload."""
    first = gate_1(sessions, "shared", "gate 1: paired in one process, tensors shared")
    own = gate_1(sessions, "own", "gate 1: the same, the candidate's tensors its own")
    two, sizes = gate_2(sessions)
    return (first, own, two, gate_3(sessions)), sizes


def rows(tallies: Sequence[Tally]) -> Iterator[str]:
    """The rows of the table of gates, below `HEADER`."""
    for tally in tallies:
        spent = statistics.fmean(tally.seconds) if tally.seconds else 0.0
        counts = [_count(*tally.sums(what, (condition,))) for condition in CONDITIONS for what in COUNTS]
        yield f"| {tally.name} | {tally.cost or f'{spent:.2f} s'} | {' | '.join(counts)} |"


def _shown(sessions: Sequence[Session]) -> int:
    quick = sessions[0]["quick"]
    counted = [
        f"{sum(session['condition'] == condition for session in sessions)} {condition}" for condition in CONDITIONS
    ]
    spent = statistics.fmean(session["seconds"] for session in sessions)
    print(
        f"Sessions: {', '.join(counted)}; {spent:.0f} s each{'; short ones, which decide nothing' if quick else ''}\n"
    )
    (first, own, two, three), sizes = gates(sessions)
    print("\n".join([HEADER, "|---|---:|" + "---:|" * len(COUNTS) * len(CONDITIONS)]))
    print("\n".join(rows([*saved_runs(sessions), first, own, two, three])))
    print("\nNo process is in two repetitions of a cell; those of different slowdowns share processes.\n")
    parts = planted(sessions)
    print("\n".join(of_workloads(sessions, parts)))
    off = max(abs(statistics.median(part) / (per_cent / 100) - 1) for (_, per_cent), part in parts.items() if per_cent)
    stated = ", ".join(f"{name} {statistics.median(size):.1%}" for name, size in sizes.items())
    print(f"\ngate 2 states that it finds, in the median: {stated or 'nothing yet'}")
    result, asked = two.sums("stated, planted")
    print(f"gate 2, planted changes of at least the stated size: {result} of {asked} found")
    print("gate 2, random draws that share processes, false: " + "; ".join(map(resampled, groups(sessions))))
    both = ", ".join(f"{name} {turns:.1%} and {apart:.1%}" for name, (turns, apart) in spreads(sessions).items())
    print(f"spread of log ratios, nothing planted, of pairs in turns and of processes one after the other: {both}")
    calls = statistics.median(s["empty"]["ours"] / s["empty"]["theirs"] for s in sessions)
    print(f"an empty call: {calls:.3f} of torch.utils.benchmark's median\n")
    good = [
        Criterion("gate 1 finds 3 %", *first.sums("3 %"), at_least=0.99),
        Criterion("gate 1, false alarms", *first.sums("false"), at_most=0.005),
        Criterion("gate 2, false alarms", *two.sums("false"), at_most=0.01),
        Criterion("gate 2 finds what it states", *two.sums("stated"), at_least=0.95),
        Criterion("gate 3 finds 5 %", *three.sums("5 %"), at_least=0.95),
        Criterion("gate 3, false alarms", *three.sums("false"), at_most=0.01),
    ]
    answers = [criterion.answer for criterion in good]
    for criterion in good:
        print(criterion)
    enough = not quick and len(sessions) * len(sessions[0]["names"]) >= ENOUGH
    for what, value, limit in (
        ("gate 1, mean seconds of a check", statistics.fmean(first.seconds), 0.5),
        ("an empty call, part that it is off", abs(calls - 1), 0.1),
        ("planted slowdowns, part that one is off", off, 0.15),
    ):
        answers.append(("met" if value <= limit else "not met") if enough else "too few")
        print(f"{answers[-1]:9} {what}: {value:.3f} (at most {limit:g})")
    return int(not quick and "not met" in answers)


@dataclass(frozen=True)
class Criterion:
    """A promise about a share of repetitions, and what was counted."""

    what: str
    alarms: int
    asked: int
    at_least: float = 0.0
    at_most: float = 1.0

    @property
    def answer(self) -> str:
        """Returns ``met``, ``not met``, ``too few`` repetitions, or ``undecided`` where chance may explain it."""
        if self.asked < ENOUGH:
            return "too few"
        if self.at_least <= self.alarms / self.asked <= self.at_most:
            return "met"
        # Probability of so many alarms or misses, or more, at the allowed rate.
        beyond, allowed = (
            (self.asked - self.alarms, 1 - self.at_least) if self.at_least else (self.alarms, self.at_most)
        )
        chance = float(binom.sf(beyond - 1, self.asked, allowed))
        return "undecided" if chance > CHANCE else "not met"

    def __str__(self) -> str:
        limit = f"at least {self.at_least:.1%}" if self.at_least else f"at most {self.at_most:.1%}"
        return f"{self.answer:9} {self.what}: {_count(self.alarms, self.asked)} ({limit})"


def _count(alarms: int, asked: int) -> str:
    return f"{alarms} of {asked}" if asked else "-"
