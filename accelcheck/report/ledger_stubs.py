"""Suggests ledger entries for the unexpected failures of a run, all but reason, link and owner. No torch."""

import datetime as dt
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Record
from accelcheck.expectations.ledger import SCHEMA, TODO, Ledger, exception, shown
from accelcheck.report.run import DeviceRun

DAYS = 180
"""Days for which a new entry holds."""
ALLOWED = 1.5
"""Ratio of the allowed size to the largest one seen: processors and versions round differently."""
LONGEST = 400
"""Most characters of an exception that a pattern is made of; the rest is left open."""
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)(?![\w])")
_NEEDLESS = re.compile(r"\\([ #&~-])")
_ANY = r"[\w.+-]+"


@dataclass
class Stub:
    """A suggested entry: a sample of its faults, the draws and cases that show it, and the largest fault's size."""

    sample: Fault
    draws: set[str] = field(default_factory=set)
    cases: set[str] = field(default_factory=set)
    largest: float | None = None

    def lines(self, expires: dt.date) -> Iterator[str]:
        """Write the entry as TOML."""
        yield "[[entry]]"
        if len(self.cases) == 1:
            yield f"cases = [{_text(*self.cases)}]"
        else:
            yield "cases = ["
            yield from (f"  {_text(name)}," for name in sorted(self.cases))
            yield "]"
        if raised := exception(self.sample):
            yield 'verdict = "error"'
            yield f"match = {_text(pattern(raised))}"
        else:
            yield 'verdict = "fail"'
            yield f"kind = {_text(self.sample.kind)}"
            yield f"path = {_text(self.sample.path)}"
            if self.sample.view:
                yield f"view = {_text(self.sample.view)}"
            draws = ", ".join(map(_text, sorted(self.draws)))
            yield f"draw = [{draws}]" if len(self.draws) > 1 else f"draw = {draws}"
        yield f"at-most = {self._at_most()}"
        yield f'reason = "{TODO}: one sentence that a maintainer can act on"'
        yield f'link = "{TODO}: where it is reported, or docs/findings.md with a few lines that reproduce it"'
        yield f'owner = "{TODO}: who can fix it"'
        yield f"expires = {expires.isoformat()}"

    def _at_most(self) -> str:
        if exception(self.sample):
            return _text(self.sample.view)
        if self.largest is None:
            return "0"
        if math.isinf(self.largest):
            return f'"{TODO}: the size is infinite, and no entry covers that"'
        if float(self.largest).is_integer() and not self.sample.bounded:
            return f"{self.largest:.0f}"  # counts of elements are exact
        return f"{_up(ALLOWED * self.largest):g}"


def suggest(
    runs: Sequence[DeviceRun],
    ledger: Ledger,
    today: dt.date,
    causes: Callable[[Sequence[DeviceRun]], Mapping[str, str]],
) -> tuple[list[str], int]:
    """Suggest entries for unexpected failures; `causes` maps each case that is not green to the title of its cause.

    Lines of a TOML file that no run can use before a person has written its reasons, and the number of entries.
    """
    titles = causes(runs)
    stubs: dict[tuple[str, str, _Same], Stub] = {}
    others: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        for record in run.records:
            if record.verdict in {Verdict.FAIL, Verdict.ERROR} and shown(record):
                title = titles.get(record.case.id, "")
                for fault in unexpected(record, ledger, today):
                    stub = stubs.setdefault((title, _date(run, today), _same(fault)), Stub(fault))
                    stub.cases.add(record.case.id)
                    stub.draws.add(fault.draw)
                    if fault.size is not None:
                        stub.largest = max(fault.size, stub.largest or 0.0)
            elif not record.verdict.green:
                others[str(record.verdict)].append(record.case.id)
    notes = [f"# {verdict}, which no ledger can expect: {name}" for verdict, names in others.items() for name in names]
    lines = [
        "# Suggested from a run. Each TODO is for a person; no run reads this file before all are written.",
        *notes,
        f"schema = {SCHEMA}",
    ]
    for (title, date, _), stub in sorted(
        stubs.items(), key=lambda item: (item[0][0], min(item[1].cases), str(item[1].sample))
    ):
        expires = dt.date.fromisoformat(date) + dt.timedelta(days=DAYS)
        lines += [
            "",
            *([f"# {_comment(title)}"] if title else []),
            f"# {_comment(exception(stub.sample) or str(stub.sample))}",
            *stub.lines(expires),
        ]
    return lines, len(stubs)


def unexpected(record: Record, ledger: Ledger, today: dt.date) -> list[Fault]:
    """Faults of a failure that no entry expects."""
    entries = ledger.covering(record.case.id, today)
    return [fault for fault in shown(record) if not any(entry.explains(fault) for entry in entries)]


def pattern(line: str) -> str:
    """Make a regular expression for the text of an exception, and for texts that differ from it in numbers alone."""
    pieces, last = list[str](), 0
    kept = line[:LONGEST]
    for number in _NUMBER.finditer(kept):
        pieces += [re.escape(kept[last : number.start()]), _ANY]
        last = number.end()
    pieces.append(re.escape(kept[last:]))
    # `re.escape` also escapes characters that are special only in sets and verbose patterns.
    expression = _NEEDLESS.sub(r"\1", "".join(pieces))
    return f"^{expression}" if len(line) > LONGEST else f"^{expression}$"


_Same = tuple[FaultKind, str, str, bool]
"""Key of faults that one entry expects: kind, path or pattern, view, and absence of a size."""


def _same(fault: Fault) -> _Same:
    raised = exception(fault)
    return fault.kind, pattern(raised) if raised else fault.path, fault.view, fault.size is None


def _date(run: DeviceRun, today: dt.date) -> str:
    try:
        return dt.datetime.fromisoformat(run.started).date().isoformat()
    except ValueError:
        return today.isoformat()


def _up(value: float) -> float:
    """Round up to two digits."""
    if value <= 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / step - 1e-9) * step


def _text(value: str) -> str:
    """Write a TOML string: a literal one if possible, since patterns are full of backslashes."""
    if value.isprintable() and "'" not in value and "\\" in value:
        return f"'{value}'"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(value: str) -> str:
    return "".join(c if c.isprintable() else " " for c in value[:LONGEST])
