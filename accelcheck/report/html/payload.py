"""Encodes records for a report's script: columns and tables of repeated texts, compressed. No torch.

A block is JSON, compressed with gzip and written in base64, which has no character with a meaning in HTML. The index,
which filters and the list of cases need, is one block; details are blocks of some hundred cases, of which the script
opens the one it needs.
"""

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.plain import text
from accelcheck.report.html import figures
from accelcheck.report.run import BAD_FIRST, DeviceRun

BLOCK = 400
"""Cases of one block of details, which opens in some milliseconds."""
MOST_REASON = 20_000
"""Most characters of a reason or a traceback in a report; the journal has the rest."""
MOST_FIGURES = 400
"""Most figures of a case in a report: those that used most of their budgets."""
MOST_TIMES = 400
DIGITS = 4


@dataclass
class _Texts:
    """Numbered texts, each once; unprintable characters are escaped."""

    found: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def __call__(self, word: str, most: int = MOST_REASON) -> int:
        number = self.numbers.get(word)
        if number is None:
            number = self.numbers[word] = len(self.found)
            self.found.append(text(word, most))
        return number


def blocks(
    runs: Sequence[DeviceRun],
    names: Sequence[str],
    causes: Mapping[tuple[int, str], list[int]],
    more: Mapping[str, Any],
) -> tuple[str, list[str]]:
    """Encode the index and the blocks of details.

    `names` are the devices' labels, and `more` is JSON-ready. `causes` maps the number of a run and the id of a case to
    the numbers of its causes.
    """
    texts = _Texts()
    families = {record.case.technique: record.family for run in runs for record in run.records if record.family}
    columns: dict[str, list[Any]] = {
        name: []
        for name in (
            "run", "technique", "family", "workload", "dtype", "mode", "verdict", "level",
            "used", "seconds", "speed", "cause", "note",
        )
    }  # fmt: skip
    commands: list[tuple[Record, str]] = []
    verdicts, modes = {verdict: n for n, verdict in enumerate(BAD_FIRST)}, {mode: n for n, mode in enumerate(Mode)}
    for place, run in enumerate(runs):
        for record in run.records:
            case = record.case
            family = families.get(case.technique) or case.technique.partition("-")[0]  # of an older journal
            row = (
                place,
                texts(case.technique, 500),
                texts(family, 500),
                texts(case.workload, 500),
                texts(case.dtype, 500),
                modes[case.mode],
                verdicts[record.verdict],
                case.level,
                _number(max((figure.used for figure in record.figures if figure.gates), default=None), 3),
                _number(sum(record.seconds.values()), 3),
                _number(figures.value(record, "speed-up"), 3),
                causes.get((place, case.id), []),
                texts(record.headline, 300),
            )
            for column, cell in zip(columns.values(), row, strict=True):
                column.append(cell)
            commands.append((record, run.reproduction(case)))
    details = [_details(commands[start : start + BLOCK]) for start in range(0, len(commands), BLOCK)]
    index = {
        **more,
        "runs": [text(name, 500) for name in names],
        "devices": [text(run.device, 500) for run in runs],
        "modes": list(Mode),
        "verdicts": list(BAD_FIRST),
        "against": [verdict for verdict in Verdict if not verdict.green],
        "block": BLOCK,
        "columns": columns,
        "texts": texts.found,
    }
    return packed(index), details


def packed(value: Any) -> str:
    """Encode JSON-ready values as base64 of gzip of JSON; the same values give the same text."""
    raw = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    return base64.b64encode(gzip.compress(raw, compresslevel=6, mtime=0)).decode("ascii")


def _details(records: Sequence[tuple[Record, str]]) -> str:
    texts = _Texts()
    rows = [_detail(record, command, texts) for record, command in records]
    return packed({"texts": texts.found, "rows": rows})


def _detail(record: Record, command: str, texts: _Texts) -> list[Any]:
    shown = record.figures
    if len(shown) > MOST_FIGURES:
        shown = tuple(sorted(shown, key=lambda figure: (-figure.gates, -figure.used)))[:MOST_FIGURES]
    evidence = ((texts(e.label), _observed(e.observed, texts), int(e.engaged)) for e in record.evidence)
    budgets = (
        (texts(f.path), texts(f.view), _number(f.measured), _number(f.allowed), texts(f.where), int(f.gates))
        for f in shown
    )
    measurements = (
        (texts(m.name), _number(m.value), texts(m.unit), _number(m.low), _number(m.high), texts(m.reason))
        for m in record.measurements
    )
    flat = chain.from_iterable
    return [
        *map(texts, (record.why, record.traceback, record.remark, record.code, record.digest)),
        record.compared,
        _number(record.eager_excess),
        texts(command),
        [*flat(evidence)],
        [*flat(budgets)],
        len(record.figures) - len(shown),
        [*flat((texts(phase), _number(spent)) for phase, spent in record.seconds.items())],
        [*flat(measurements)],
        [_number(item) for item in record.times[:MOST_TIMES]],
    ]


def _observed(value: float | str, texts: _Texts) -> Any:
    """Keep a number; put a text's number in a list, so that it cannot be taken for one."""
    if isinstance(value, str):
        return [texts(value)]
    return _number(value, 12) if isinstance(value, float) else [texts(str(value))]


def _number(value: float | None, digits: int = DIGITS) -> Any:
    """Round a float to significant digits; non-finite ones become their names."""
    if value is None:
        return None
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
