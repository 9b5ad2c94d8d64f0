"""The kill table: faults, the views that catch them, and false alarms. No torch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from accelcheck.report.console import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from accelcheck.selftest.runner import Ground, SeedResult

SHOWN = 4
"""Largest number of views that a row names, the most frequent first."""


def whole(outcomes: Sequence[SeedResult], device: str, ground: Ground | None = None) -> list[str | Table]:
    """The report as titles, tables and lines; with coverage of the matrix where `ground` is given."""
    lines: list[str | Table] = []
    parts: tuple[tuple[str, Sequence[str | Table]], ...] = (
        ("Faults", [table(outcomes)]),
        ("Views", [alone(outcomes)]),
        ("Planted, in rows of the kill table", [] if ground is None else planted(outcomes, ground)),
        ("Cells without such a fault", [] if ground is None else list(ground.absent)),
        (f"Not planted on {device}", refused(outcomes)),
        ("Slowest plants, seconds a verdict", slowest(outcomes)),
        ("Wrong verdicts", wrong(outcomes)),
    )
    for title, part in parts:
        lines += ["", title, *part] if part else []
    return [*lines, "", counts(outcomes)]


def table(outcomes: Sequence[SeedResult]) -> Table:
    """A row per fault, strength, dtype and reason for hiding: share of verdicts that caught it, and their views."""
    groups: dict[tuple[str, float, str, str], list[SeedResult]] = {}
    for outcome in outcomes:
        row = outcome.row
        if outcome.ran and not row.correct:
            groups.setdefault((row.plant, -row.strength, row.dtype, row.hidden), []).append(outcome)
    rows = []
    for (plant, strength, dtype, hidden), group in sorted(groups.items()):
        caught = [outcome for outcome in group if outcome.caught]
        views = Counter(view for outcome in caught for view in outcome.views)
        by = ", ".join(f"{view} {count}" for view, count in views.most_common(SHOWN))
        degree = "" if strength == -1.0 else f"{-strength:g}"
        note = f"  hidden: {hidden}" if hidden else ""
        rows.append((plant, degree, dtype, f"{len(caught)}/{len(group)}", f"{by}{note}"))
    return Table(("fault", "strength", "dtype", "caught", "by"), rows, right=(1, 3))


def alone(outcomes: Iterable[SeedResult]) -> Table:
    """A row per view: number of verdicts that it caught, and faults that it alone sees in every seed."""
    caught: Counter[str] = Counter()
    views: dict[str, list[set[str]]] = {}
    for outcome in outcomes:
        if not outcome.row.correct and outcome.ran:
            caught.update(set(outcome.views))
            views.setdefault(str(outcome.row), []).append(set(outcome.views))
    sole: dict[str, list[str]] = {}
    for name, seen in sorted(views.items()):
        always = set.intersection(*seen)
        if len(always) == 1:
            sole.setdefault(always.pop(), []).append(name)
    rows = []
    for view, count in caught.most_common():
        only = sole.get(view, [])
        more = f" and {len(only) - 1} more" if len(only) > 1 else ""
        rows.append((view, str(count), only[0] + more if only else "-"))
    return Table(("view", "caught", "it alone sees in every seed"), rows, right=(1,))


def planted(outcomes: Iterable[SeedResult], ground: Ground) -> list[str | Table]:
    """Coverage of the matrix: a row per family of techniques, and the names of what has no fault.

    Numbers count rows of the kill table that must be caught, by mode and by dtype; ``emulated`` are those in
    accelcheck's own code, and ``hidden`` are further ones, below their documented detectability.
    """
    rows = {outcome.row for outcome in outcomes if outcome.ran and not outcome.row.correct}
    owed = {row for row in rows if not row.hidden}
    counts: dict[str, Counter[str]] = {family: Counter() for family in sorted(set(ground.families.values()))}
    for row in rows:
        kinds = ("hidden",) if row.hidden else (row.mode, row.dtype, *(["emulated"] if row.emulated else []))
        counts[ground.families[row.technique]].update(map(str, kinds))
    techniques, modes = {row.technique for row in owed}, {row.mode for row in owed}
    columns = [*map(str, filter(modes.__contains__, ground.modes)), *ground.dtypes, "emulated", "hidden"]
    lines = [
        (
            family,
            _part(techniques, [name for name in ground.techniques if ground.families[name] == family]),
            *(str(numbers[column] or "-") for column in columns),
        )
        for family, numbers in counts.items()
    ]
    head = ("family", "techniques", *columns)
    parts: list[str | Table] = [Table(head, lines, right=range(1, len(head)))]
    seen: tuple[tuple[str, Iterable[str], Sequence[str]], ...] = (
        ("techniques", techniques, ground.techniques),
        ("workloads", {row.workload for row in owed}, ground.workloads),
        ("modes", modes, ground.modes),
        ("dtypes", {row.dtype for row in owed}, ground.dtypes),
    )
    for what, names, every in seen:
        left = ", ".join(name for name in every if name not in names)
        parts.append(f"{_part(names, every)} {what} have a planted fault{f'; none has: {left}' if left else ''}")
    parts.append(
        f"{len(rows) - len(owed)} rows are hidden, {len(ground.absent)} cells have no such fault: each says why"
    )
    return parts


def _part(seen: Iterable[str], every: Iterable[str]) -> str:
    names = set(every)
    return f"{len(names.intersection(seen))} of {len(names)}"


def slowest(outcomes: Iterable[SeedResult], most: int = 5) -> list[str]:
    """The plants that took longest on average, with the seconds of their phases."""
    totals: dict[str, Counter[str]] = {}
    verdicts: Counter[str] = Counter()
    for outcome in outcomes:
        name = f"{outcome.row.plant} in {outcome.row.workload}"
        totals.setdefault(name, Counter()).update(outcome.seconds)
        verdicts[name] += 1
    ordered = sorted(totals, key=lambda name: -totals[name].total() / verdicts[name])
    lines = []
    for name in ordered[:most]:
        parts = ", ".join(f"{phase} {seconds / verdicts[name]:.2f}" for phase, seconds in totals[name].most_common(3))
        lines.append(f"{totals[name].total() / verdicts[name]:6.2f}  {name} ({parts})")
    return lines


def refused(outcomes: Iterable[SeedResult]) -> list[str]:
    """Plants that do not apply to this device, with the reason, each once."""
    # A cell that fails without a plant is reported once, not once for each plant.
    absent = (outcome for outcome in outcomes if not outcome.ran)
    return sorted({o.reason if o.code == "device-fails" else f"{o.row.plant}: {o.reason}" for o in absent})


def wrong(outcomes: Iterable[SeedResult], most: int = 40) -> list[str]:
    """Survivors, false alarms and errors, a line per row with seeds and first reason."""
    rows: dict[str, list[SeedResult]] = {}
    for outcome in outcomes:
        if not outcome.good:
            rows.setdefault(str(outcome.row), []).append(outcome)
    lines = []
    for name, group in sorted(rows.items()):
        kind = "false alarm" if group[0].row.correct else "survived"
        kind = kind if any(outcome.judged for outcome in group) else "no verdict"
        seeds = ", ".join(str(outcome.seed) for outcome in sorted(group, key=lambda o: o.seed))
        first = next((line for outcome in group for line in outcome.reason.splitlines()[:1]), "")
        lines.append(f"{kind}: {name}: {group[0].verdict} with seeds {seeds}{': ' + first if first else ''}")
    more = len(lines) - most
    return [*lines[:most], f"and {more} more"] if more > 0 else lines


def counts(outcomes: Sequence[SeedResult]) -> str:
    """Numbers of caught faults, false alarms, and runs without a verdict, in one line."""
    ran = [outcome for outcome in outcomes if outcome.ran]
    faulty = [outcome for outcome in ran if not outcome.row.correct]
    owed = [outcome for outcome in faulty if not outcome.row.hidden]
    correct = [outcome for outcome in ran if outcome.row.correct]
    names = len({outcome.row.plant for outcome in faulty})
    hidden = len(faulty) - len(owed)
    emulated = sum(outcome.row.emulated for outcome in owed)
    fewer = {outcome.row for outcome in faulty if outcome.row.seeds}
    most = max((outcome.row.seeds for outcome in faulty), default=0)
    plain = sum(outcome.plain for outcome in correct)
    silent = sum(not outcome.judged for outcome in ran)
    return (
        f"{names} faults: {sum(outcome.caught for outcome in owed)} of {len(owed)} verdicts caught them"
        f"{f' ({hidden} more are below their documented detectability)' if hidden else ''}"
        f"{f', {emulated} of them planted in an emulation' if emulated else ''}"
        f"{f', {len(fewer)} rows of slow techniques with at most {most} seeds' if fewer else ''}; "
        f"{len({outcome.row.plant for outcome in correct if not outcome.plain})} correct variants: "
        f"{sum(outcome.judged and not outcome.good for outcome in correct)} false alarms in {len(correct)} verdicts "
        f"({plain} of them of techniques with nothing planted)"
        f"{f'; {silent} without a verdict' if silent else ''}"
    )
