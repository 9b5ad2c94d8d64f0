"""Formats the differences of two runs for a terminal and in Markdown. No torch."""

from collections.abc import Sequence

from accelcheck.report import markdown
from accelcheck.report.console import Table
from accelcheck.report.difference import GROWTH, Aspect, CaseChange, Difference

ROWS = 40
"""Most rows of a table in a terminal."""
TITLES = {
    Aspect.VERDICT: "verdicts",
    Aspect.LOST: "coverage lost: ran before, and not now",
    Aspect.GAINED: "coverage gained: runs now, and did not before",
    Aspect.ERROR: f"errors that are at least {GROWTH:g} times what they were, and larger than rounding samples show, "
    "in units in the last place",
    Aspect.SPEED: "speed beyond both intervals",
}
ACROSS = {Aspect.LOST: "run on the first device alone", Aspect.GAINED: "run on the second device alone"}
REASON = 100
"""Most characters of a reason in a terminal."""


def first_line(difference: Difference) -> str:
    """Say whether something is worse, and how much."""
    both = sum(pair.both for pair in difference.pairs)
    if not difference.worse:
        return f"nothing is worse: {both:,} cases ran in both"
    kinds = ", ".join(f"{worse:,} {kind}" for kind, (_, worse) in difference.counts().items() if worse)
    number = f"{difference.worse:,} change{'s' * (difference.worse != 1)}"
    return f"{number} for the worse ({kinds}); {both:,} cases ran in both"


def terminal(difference: Difference) -> list[str | Table]:
    """Lines and tables for a terminal."""
    parts: list[str | Table] = [first_line(difference)]
    parts += [f"  {pair}" for pair in _pairs(difference)]
    for kind, group in _groups(difference):
        parts += ["", f"{_title(difference, kind)}: {len(group):,}"]
        rows = [_row(change) for change in group[:ROWS]]
        parts.append(Table(_head(kind), [tuple(cell[:REASON] for cell in row) for row in rows], indent=2))
        if len(group) > ROWS:
            parts.append(f"  and {len(group) - ROWS:,} more: --json has all")
    if (worst := next((change for change in difference.changes if change.worse), None)) is not None:
        parts += ["", f"reproduce the first: {worst.reproduction}"]
    return parts


def page(difference: Difference) -> str:
    """Markdown for a pull request."""
    made = markdown.Page()
    made.add(f"## accelcheck diff: {first_line(difference)}")
    made.add(*(f"- {markdown.code(pair)}" for pair in _pairs(difference)))
    for kind, group in _groups(difference):
        rows = [tuple(markdown.cell(cell) for cell in _row(change)) for change in group]
        worse = sum(change.worse for change in group)
        title = f"{_title(difference, kind)}: {len(group):,}, for the worse: {worse:,}"
        made.add(*markdown.fold(title, markdown.table(_head(kind), rows), opened=bool(worse)))
    if commands := list(dict.fromkeys(change.reproduction for change in difference.changes if change.worse)):
        shown = commands[: markdown.NAMED]
        made.add("Reproduce:" if len(shown) == len(commands) else "Reproduce the first:", "", *markdown.block(shown))
    return str(made)


def _pairs(difference: Difference) -> list[str]:
    lines = []
    for pair in difference.pairs:
        if not (pair.old and pair.new):
            lines.append(f"{pair.old or pair.new}: only in the {'old' if pair.old else 'new'} run")
        elif difference.across:
            lines.append(f"{pair.name}: {pair.both:,} cases ran on both; verdicts count, the rest is for information")
        else:
            how = "times are compared"
            if not pair.same:
                how = "its fingerprint differs: ratios to eager are compared, times are not"
            lines.append(f"{pair.name}: {pair.both:,} cases ran in both; {how}")
    return lines


def _groups(difference: Difference) -> list[tuple[Aspect, Sequence[CaseChange]]]:
    groups = ((kind, [change for change in difference.changes if change.kind is kind]) for kind in Aspect)
    return [(kind, group) for kind, group in groups if group]


def _title(difference: Difference, kind: Aspect) -> str:
    return ACROSS.get(kind, TITLES[kind]) if difference.across else TITLES[kind]


def _head(kind: Aspect) -> tuple[str, ...]:
    if kind in {Aspect.ERROR, Aspect.SPEED}:
        return ("", "device", "case", "figure", "before", "after", "times", "")
    return ("", "device", "case", "before", "after", "reason")


def _row(change: CaseChange) -> tuple[str, ...]:
    mark = "worse" if change.worse else ""
    if change.kind in {Aspect.ERROR, Aspect.SPEED}:
        factor = "" if change.factor is None else f"{change.factor:.3g}"
        return (mark, change.devices, change.case, change.what, change.before, change.after, factor, change.reason)
    return (mark, change.devices, change.case, change.before, change.after, change.reason)
