"""Draws tables and progress: by rich on a terminal, plain lines on any other output. No torch.

Text from journals, ledgers and plugins is not interpreted as markup, and unprintable characters are escaped. rich is
imported when something is drawn, not when a command is declared.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console

INTERVAL = 20.0
"""Least seconds between two lines of progress, unless on a terminal."""
_BAR = 20
"""Width of the bar; leaves about 30 of 80 columns for the current step."""
_NARROWEST = 8
"""Least width of a column whose words must be folded to fit a table into a terminal."""
_BREAKS = re.compile(r"(?<=\s)(?=\S)|(?<=\w[-/])(?=[^\W\d])")
"""Places where a cell may be folded: between words, and within names (`sdpa-math`, `mlp/float32`) but not numbers."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a head; columns in `right`, by index, are aligned to the right; lines begin with `indent` spaces."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    indent: int = 0

    def lines(self) -> list[str]:
        """Plain text: every column as wide as its widest cell, nothing cut."""
        cells = [[escaped(cell) for cell in row] for row in (self.head, *self.rows)]
        return [f"{' ' * self.indent}{line}" for line in aligned(cells, self.right)]


def escaped(text: str) -> str:
    """Write control characters, line ends, surrogates and other unprintable characters as Python's escape sequences."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escaped_lines(text: str) -> str:
    """Escape each line of a text, after replacing its tabs by spaces."""
    return "\n".join(escaped(line.expandtabs()) for line in text.split("\n"))


def plain(parts: Iterable[str | Table]) -> list[str]:
    """Lines that `show` writes, unless on a terminal."""
    lines: list[str] = []
    for part in parts:
        lines += part.lines() if isinstance(part, Table) else [escaped(line) for line in part.split("\n")]
    return lines


def show(parts: Iterable[str | Table], file: TextIO | None = None) -> None:
    """Print texts of one or more lines, and tables, on standard output or `file`.

    On a terminal, cells of wide tables are folded to fit into it. Any other output gets whole tables.
    """
    target = sys.stdout if file is None else file
    for part in parts:
        if isinstance(part, Table) and target.isatty():
            _fit(part, console(target))
        else:
            print("\n".join(plain([part])), file=target)
    target.flush()


def console(file: TextIO) -> Console:
    """Make a console that does not interpret markup, emoji codes or numbers; only a terminal obeys FORCE_COLOR."""
    from rich.console import Console

    return Console(file=file, force_terminal=file.isatty(), markup=False, highlight=False, emoji=False)


def _fit(table: Table, on: Console) -> None:
    from rich.padding import Padding
    from rich.table import Table as Fitted
    from rich.text import Text

    rows = [[escaped(cell) for cell in row] for row in (table.head, *table.rows)]
    gap, widths = _widths(rows, on.width - table.indent)
    fitted = Fitted(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    head, *cells = ([Text(_folded(cell, width)) for cell, width in zip(row, widths, strict=True)] for row in rows)
    for index, (name, width) in enumerate(zip(head, widths, strict=True)):
        side: Literal["left", "right"] = "right" if index in table.right else "left"
        fitted.add_column(name, justify=side, overflow="fold", width=width)
    for row in cells:
        fitted.add_row(*row)
    on.print(Padding(fitted, (0, 0, 0, table.indent), expand=False))


def _widths(rows: Sequence[Sequence[str]], room: int) -> tuple[int, list[int]]:
    """Space between columns, and their widths: as wide as their cells, or else as narrow as their longest words.

    rich would narrow the widest columns first, and break words and numbers in the middle.
    """
    columns = list(zip(*rows, strict=True))
    most = [max(map(len, column)) for column in columns]
    widths = [max(len(piece.rstrip()) for cell in column for piece in _BREAKS.split(cell)) for column in columns]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= room else 1
    left = room - sum(widths) - gap * (len(widths) - 1)
    while left < 0 and max(widths) > _NARROWEST:  # the longest words are folded after all
        widths[widths.index(max(widths))] -= 1
        left += 1
    while left > 0 and (narrow := [index for index, width in enumerate(widths) if width < most[index]]):
        for index in narrow[:left]:
            widths[index] += 1
        left -= len(narrow)
    return gap, widths


def _folded(text: str, width: int) -> str:
    lines = [""]
    for piece in _BREAKS.split(text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


@contextlib.contextmanager
def progress(
    unit: str, total: int, file: TextIO | None = None, interval: float = INTERVAL
) -> Iterator[Callable[[str, int], None]]:
    """Show a command's progress, its time, and the time left, on standard error if `file` is None.

    A terminal gets a bar, which is redrawn only when a step is done, because a thread that redraws it would disturb
    timed work. Any other output gets a line after a step, and none within `interval` seconds from the last one.

    Yields:
        A function that takes a text about the current step, and the number of steps done since its last call.
    """
    from rich import progress as rich
    from rich.table import Column

    target = sys.stderr if file is None else file
    on = console(target)
    live = on.is_terminal and not on.is_dumb_terminal
    step = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    bar = rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(bar_width=_BAR),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[doing]}", markup=False, table_column=step),
        console=on,
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stdout=False,  # it may be a file, while standard error is a terminal
        speed_estimate_period=math.inf,  # steps may take minutes
        get_time=time.monotonic,
        disable=not live,
    )
    spoken = time.monotonic()
    with bar:
        task = bar.add_task(unit, total=total, doing="")
        bar.advance(task, 0)  # the pace is estimated from here on

        def done(doing: str, count: int = 0) -> None:
            nonlocal spoken
            bar.update(task, doing=escaped(doing))
            bar.advance(task, count)
            if live:
                bar.refresh()
            elif time.monotonic() - spoken >= interval:
                spoken = time.monotonic()
                state = bar.tasks[0]
                left = "" if state.time_remaining is None else f", {_clock(state.time_remaining)} left"
                note = f": {escaped(doing)}" if doing else ""
                print(
                    f"  {state.completed:.0f} of {total} {unit}, {_clock(state.elapsed or 0.0)} elapsed{left}{note}",
                    file=target,
                    flush=True,
                )

        yield done


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds, as rich writes them."""
    return str(dt.timedelta(seconds=int(seconds)))


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Format a line for each row, columns as wide as their widest text; those in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = [">" if index in right else "<" for index in range(len(widths))]
    form = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return [form.format(*row).rstrip() for row in rows]
