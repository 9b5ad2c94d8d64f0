"""Makes a summary for a pull request, in GitHub's Markdown. No torch.

Text of journals stands in code alone: nothing in it is a link, a mention, a tag or an end of a table or a block.
"""

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from accelcheck.core.case import Verdict
from accelcheck.core.journal import Record
from accelcheck.report import causes
from accelcheck.report.console import escaped
from accelcheck.report.qualification import whole
from accelcheck.report.run import BAD_FIRST, DeviceRun, counts, labelled, labels

MOST = 65_536
"""Most characters of a comment on GitHub; counted in bytes here, which are no fewer."""
ROWS = 100
"""Most rows of a table; longer ones are for the HTML page."""
NAMED = 20
"""Most cases named of a cause."""
LINES = 12
"""Most lines of a reason."""
WIDTH = 300
"""Most characters of a reason's line."""
_LEFT_OUT = 300
"""Bytes kept for the sentence about left-out parts."""


class Page:
    """Blocks of Markdown with at most `most` bytes in all."""

    def __init__(self, most: int = MOST) -> None:
        self._blocks: list[str] = []
        self._left = most - _LEFT_OUT
        self._out = 0

    def add(self, *lines: str) -> None:
        """Add a block, or count it as left out where it does not fit, or one before it did not."""
        block = "\n".join(lines)
        needed = len(block.encode()) + 2
        if self._out or needed > self._left:
            self._out += 1
            return
        self._left -= needed
        self._blocks.append(block)

    def __str__(self) -> str:
        parts = list(self._blocks)
        if self._out:
            what = "One further part is" if self._out == 1 else f"{self._out:,} further parts are"
            shown = "`accelcheck report JOURNAL -o report.html` shows all."
            parts.append(f"**{what} left out: GitHub takes at most {MOST:,} characters. {shown}**")
        return "\n\n".join(parts) + "\n"


def code(text: str) -> str:
    """Format a line as inline code that also stands in a table; an empty one is a dash."""
    line = escaped(" ".join(text.split()))
    if not line:
        return "-"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}"


def cell(text: str) -> str:
    """Format `code` for a cell of a table, where a vertical bar would end the cell."""
    return code(text).replace("|", "\\|")


def block(lines: Iterable[str]) -> list[str]:
    """Format lines as a block of code."""
    kept = [escaped(line) for line in lines]
    fence = "`" * max(3, 1 + max((len(run) for line in kept for run in re.findall("`+", line)), default=0))
    return [f"{fence}text", *kept, fence]


def fold(title: str, lines: Iterable[str], *, opened: bool = False) -> list[str]:
    """Fold lines under a visible one, in HTML, in which Markdown is not read."""
    return [f"<details{' open' * opened}>", f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def tag(text: str) -> str:
    """Format a line as code in HTML."""
    return f"<code>{html.escape(escaped(' '.join(text.split())))}</code>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Format a table of cells that are Markdown already, cut to `ROWS` rows."""
    sides = ["---:" if index in set(right) else "---" for index in range(len(head))]
    lines = [f"| {' | '.join(row)} |" for row in (head, sides, *rows[:ROWS])]
    more = len(rows) - ROWS
    return [*lines, "", f"{more:,} further rows are not shown."] if more > 0 else lines


def page(runs: Sequence[DeviceRun]) -> str:
    """Make the whole summary: verdict, devices, causes with reproductions, and cases that did not run."""
    names = labels(runs)
    wrong = causes.causes(runs)
    made = Page()
    made.add(f"## accelcheck: {verdict(runs, wrong)}")
    made.add(*_devices(runs, names))
    for name, run in zip(names, runs, strict=True):
        level = whole(run)  # where the whole of a level was asked for
        notes = [*([] if level is None else [str(level), *level.reasons]), *run.remarks]
        if notes:
            made.add(*(f"- {code(name)}: {code(note)}" for note in notes))
    if matrix := _matrix(runs, names):
        made.add("### Not right", "", *matrix)
    if wrong:
        made.add(f"### {causes.counted(wrong)}")
        for cause in wrong:
            made.add(*_cause(cause))
    if foreseen := causes.expected(runs):
        counted = causes.counted(foreseen).replace("cause", "reason")
        rows = [(f"{len(cause.cases):,}", cell(cause.title), cell(cause.link)) for cause in foreseen]
        made.add(*fold(f"Expected to fail, by the ledger: {counted}", table(("cases", "reason", "see"), rows, (0,))))
    if absent := _not_run(runs):
        idle = sum(len(run.records) - run.executed for run in runs)
        made.add(*fold(f"Not run: {idle:,} cases", absent))
    return str(made)


def verdict(runs: Sequence[DeviceRun], groups: Sequence[causes.Cause]) -> str:
    """Count the cases that are not right, in a line."""
    executed = sum(run.executed for run in runs)
    if not executed:
        return "nothing ran"
    wrong = sum(not record.verdict.green for run in runs for record in run.records)
    if not wrong:
        known = sum(record.verdict is Verdict.XFAIL for run in runs for record in run.records)
        beside = f", {known:,} of them fail as the ledger expects" if known else ""
        return f"no unexpected failure in {executed:,} cases that ran{beside}"
    return f"{wrong:,} of {executed:,} cases that ran are not right, {len(groups):,} cause{'s' * (len(groups) != 1)}"


def _devices(runs: Sequence[DeviceRun], names: Sequence[str]) -> list[str]:
    verdicts = {record.verdict for run in runs for record in run.records}
    seen = [verdict for verdict in BAD_FIRST if verdict in verdicts]
    rows = []
    for name, run in zip(names, runs, strict=True):
        tally = counts(run.records)
        chip = run.fingerprint.chip if run.fingerprint is not None else run.capability
        torch = run.fingerprint.versions.get("torch", "") if run.fingerprint is not None else ""
        numbers = (f"{tally.get(str(verdict), 0):,}" for verdict in seen)
        rows.append((cell(name), cell(chip), cell(torch), f"{run.level}", *numbers))
    head = ("device", "chip", "torch", "level", *map(str, seen))
    return table(head, rows, range(3, len(head)))


def _matrix(runs: Sequence[DeviceRun], names: Sequence[str]) -> list[str]:
    """Make a row for each technique that is not green everywhere, and a column for each device."""
    cells: dict[tuple[str, str], list[Record]] = {}
    for name, record in labelled(runs):
        cells.setdefault((record.case.technique, name), []).append(record)
    wrong = sorted({name for (name, _), group in cells.items() if not all(record.verdict.green for record in group)})
    rows = [(cell(technique), *(_counted(cells.get((technique, name), [])) for name in names)) for technique in wrong]
    return table(("technique", *map(cell, names)), rows) if rows else []


def _counted(records: Sequence[Record]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts(records).items()) or "-"


def _cause(cause: causes.Cause) -> list[str]:
    count = len(cause.cases)
    named = [f"{label}: {record.case.id}: {record.verdict}" for label, record in cause.cases[:NAMED]]
    more = count - NAMED
    reason = [line[:WIDTH] for line in cause.example.why.splitlines()[:LINES]]
    cases = block([*named, *([f"and {more:,} more"] if more > 0 else [])])
    title = f"{count:,} case{'s' * (count != 1)}: {tag(cause.title)} ({cause.kind})"
    return fold(title, [*block([cause.reproduction, "", *reason]), "", *cases])


def _not_run(runs: Sequence[DeviceRun]) -> list[str]:
    tally = Counter(
        (name, (record.headline or record.verdict)[:WIDTH])
        for name, record in labelled(runs)
        if not record.verdict.executed
    )
    ordered = sorted(tally.items(), key=lambda item: (-item[1], item[0]))
    rows = [(f"{number:,}", cell(name), cell(reason)) for (name, reason), number in ordered]
    return table(("cases", "device", "reason"), rows, (0,)) if rows else []
