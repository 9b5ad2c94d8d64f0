"""Advises the owner of a model from its records: safe techniques, faster ones, and the cost of each. No torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelcheck.core.case import FELL_BACK, SCHEME, Case, Evidence, Figure, Measurement, Mode, Verdict
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.report.console import Table
from accelcheck.report.run import BAD_FIRST

INFERENCE, TRAINING = "inference", "training"
MODES = {INFERENCE: (Mode.FORWARD, Mode.ACCURACY), TRAINING: (Mode.BACKWARD, Mode.TRAIN, Mode.LEARNING)}
"""Modes that a use rests on, besides the timed one."""
TIMED = {INFERENCE: Mode.SPEED, TRAINING: Mode.TRAIN_SPEED}
BASE = "eager"
"""Technique that the others are compared with."""
AGAINST = "against FP32"
"""Column of the errors of schemes such as quantization against the FP32 model."""
WIDE = 1.5
"""Least ratio of the ends of a speed-up's interval that decides nothing: one more process may leave it."""
NAMED = 6
"""Most techniques named in a line."""


@dataclass(frozen=True)
class Row:
    """One technique on one device, in one storage dtype, with its records by mode."""

    technique: str
    device: str
    dtype: str
    records: Mapping[Mode, Record]

    @property
    def label(self) -> str:
        """The technique, with its storage dtype where that is not FP32."""
        return self.technique if self.dtype == "float32" else f"{self.technique}/{self.dtype}"

    @property
    def worst(self) -> Record:
        """The record with the worst verdict; undecided ones are better than all that are wrong."""

        def rank(record: Record) -> tuple[bool, bool, int]:
            return record.verdict.green, bool(_undecided(record)), BAD_FIRST.index(record.verdict)

        return min(self.records.values(), key=rank)

    @property
    def executed(self) -> bool:
        """True if a case ran."""
        return any(record.verdict.executed for record in self.records.values())

    @property
    def undecided(self) -> bool:
        """True if nothing is wrong, and a case could be judged neither right nor wrong."""
        return bool(_undecided(self.worst))

    def safe(self, use: str) -> bool:
        """True if all cases of a use that ran pass, at least one; training needs a right forward pass too."""
        modes = MODES[INFERENCE] if use == INFERENCE else (*MODES[INFERENCE], *MODES[TRAINING])
        verdicts = [r.verdict for mode, r in self.records.items() if mode in modes and r.verdict.executed]
        own = any(mode in MODES[use] and record.verdict.executed for mode, record in self.records.items())
        return own and all(verdict is Verdict.PASS for verdict in verdicts)

    def measured(self, use: str, name: str) -> Measurement | None:
        """Find a figure of the timed case of a use."""
        record = self.records.get(TIMED[use])
        figures = (m for m in (record.measurements if record is not None else ()) if m.name == name)
        return next((m for m in figures if m.value is not None), None)

    def memory(self, use: str) -> float | None:
        """Parameters and peak memory of a call, as a multiple of FP32 eager's; None where not measured."""

        def total(suffix: str) -> float | None:
            parts = [self.measured(use, f"{name}{suffix}") for name in ("parameters", "peak-memory")]
            values = [part.value for part in parts if part is not None and part.value is not None]
            return sum(values) if len(values) == len(parts) else None

        own, plain = total(""), total("-fp32-eager")
        return own / plain if own is not None and plain else None

    @property
    def error(self) -> Figure | None:
        """The largest relative error of a row of an output, against the technique's own scheme where it has one."""
        return self._figure(Mode.FORWARD, "row")

    @property
    def cost(self) -> Figure | None:
        """Largest relative error of a row against the FP32 model, where the technique has a scheme of its own."""
        return self._figure(Mode.FORWARD, SCHEME)

    @property
    def drop(self) -> Figure | None:
        """Upper bound of the loss of accuracy, with its limit."""
        return self._figure(Mode.ACCURACY, "drop")

    @property
    def lost(self) -> str:
        """Lost accuracy with its upper bound; ``-`` where not measured."""
        before, after = (self._figure(Mode.ACCURACY, view) for view in ("before", "after"))
        if self.drop is None or before is None or after is None:
            return "-"
        return f"{before.measured - after.measured:.2%}, at most {self.drop.measured:.2%}"

    def decided(self, use: str) -> bool:
        """True if the speed-up's interval is narrower than `WIDE`."""
        speed = self.measured(use, "speed-up")
        if speed is None or speed.low is None or speed.high is None:
            return speed is not None
        return speed.low > 0 and speed.high <= WIDE * speed.low

    def _figure(self, mode: Mode, view: str) -> Figure | None:
        record = self.records.get(mode)
        return next((f for f in (record.figures if record is not None else ()) if f.view == view), None)

    @property
    def evidence(self) -> Evidence | None:
        """First claim of the first case that has one."""
        ordered = (self.records[mode].evidence for mode in Mode if mode in self.records)
        return next((claims[0] for claims in ordered if claims), None)


def rows(records: Iterable[Record]) -> list[Row]:
    """Make a row for each technique, device and storage dtype, eager first."""
    records_by_row: dict[tuple[str, str, str], dict[Mode, Record]] = {}
    for record in records:
        case = record.case
        records_by_row.setdefault((case.device, case.technique, case.dtype), {})[case.mode] = record
    made = [Row(technique, device, dtype, own) for (device, technique, dtype), own in records_by_row.items()]
    return sorted(made, key=lambda row: (row.device, row.technique != BASE, row.technique, row.dtype != "float32"))


@dataclass(frozen=True)
class Advice:
    """The advice about a model on one device.

    Attributes:
        lost: Eager's case that is an error, so that nothing else is known; None where eager was judged.
        table: Table of the techniques that ran; None where none did.
        uses: Sentences that recommend a technique, for each use that ran, and one on operators that the device lacks.
        wrong: Line about each technique that is not right, with its worst case.
        unsaid: Line for each reason why techniques did not run.
    """

    device: str
    lost: Record | None = None
    table: Table | None = None
    uses: Sequence[str] = ()
    wrong: Sequence[tuple[str, Case]] = ()
    unsaid: Sequence[str] = ()


def by_device(records: Sequence[Record]) -> Iterator[Advice]:
    """Advice for each device of the records of one model."""
    for device in dict.fromkeys(record.case.device for record in records):
        if lost := unjudgeable(record for record in records if record.case.device == device):
            yield Advice(device, lost)
            continue
        own = [row for row in rows(records) if row.device == device]
        shown = [row for row in own if row.executed]
        uses = [line for use in TIMED if (line := recommended(shown, use))]
        evidence = [e for row in shown for record in row.records.values() for e in record.evidence]
        if lacking := sorted({name for e in evidence if e.claim == FELL_BACK for name, _ in e.strays}):
            uses.append(f"{FELL_BACK}: {', '.join(lacking)}.")
        wrong = [(_wrong(row), row.worst.case) for row in shown if not (row.worst.verdict.green or row.undecided)]
        yield Advice(device, None, _table(shown) if shown else None, uses, wrong, list(_unsaid(own)))


def advice(
    records: Sequence[Record], refused: Mapping[str, str], reproduction: Callable[[Case], str] | None = None
) -> Iterator[str | Table]:
    """Table of the techniques that ran, the recommendation, and the reasons why others did not run.

    `refused` has the reasons why techniques were not tried, by name; `reproduction` makes the command of a case.
    """
    parts = list(by_device(records))
    for part in parts:
        if part.lost is not None:
            yield f"{part.device}: eager cannot be judged in {part.lost.case.mode} mode, and so no technique can:"
            yield f"  {part.lost.headline}"
            continue
        if part.table is not None:
            yield part.table
        for line in part.uses:
            yield ""
            yield f"{part.device}, {line}"
        for line, case in part.wrong:
            yield f"{part.device}, {line}"
            if reproduction is not None:
                yield f"  reproduce: {reproduction(case)}"
        if part.unsaid:
            yield from ("", f"{part.device}, could not be said:", *(f"  {line}" for line in part.unsaid))
    if refused and any(part.lost is None for part in parts):
        yield ""
        plural = "s" * (len(refused) != 1)
        yield f"not tried, because they mean nothing for this model: {len(refused)} technique{plural}"
        tally = Counter(refused.values())
        for reason, number in tally.most_common():
            yield f"  {number} x {reason}: {_some([name for name, why in refused.items() if why == reason])}"


def unjudgeable(records: Iterable[Record]) -> Record | None:
    """Find eager's first case in FP32 that is an error, after which no technique can be judged."""
    for record in records:
        case = record.case
        judged = case.technique == BASE and case.dtype == "float32" and case.mode not in TIMED.values()
        if judged and record.verdict is Verdict.ERROR:
            return record
    return None


def as_json(records: Sequence[Record], refused: Mapping[str, str]) -> dict[str, Any]:
    """Rows with their figures, recommendations by device and use, and reasons, as JSON."""
    all_rows = rows(records)
    devices = dict.fromkeys(row.device for row in all_rows)
    return {
        "rows": [_row_as_json(row) for row in all_rows],
        "recommended": {
            device: {
                use: recommended([row for row in all_rows if row.device == device and row.executed], use)
                for use in TIMED
            }
            for device in devices
        },
        "refused": dict(refused),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    speeds = {use: row.measured(use, "speed-up") for use in TIMED}
    return {
        "technique": row.technique,
        "device": row.device,
        "dtype": row.dtype,
        "verdicts": {str(mode): str(record.verdict) for mode, record in row.records.items()},
        "safe": {use: row.safe(use) for use in TIMED},
        "speed_up": {use: [m.low, m.value, m.high] for use, m in speeds.items() if m is not None},
        "memory": {use: row.memory(use) for use in TIMED},
        "error": None if row.error is None else [row.error.measured, row.error.allowed],
        "error_against_fp32": None if row.cost is None else row.cost.measured,
        "accuracy_lost": None if row.drop is None else [row.drop.measured, row.drop.allowed],
        "evidence": [
            {"case": record.case.id, "claim": e.label, "observed": e.observed, "engaged": e.engaged}
            for record in row.records.values()
            for e in record.evidence
        ],
        "reasons": {record.case.id: why for record in row.records.values() if (why := record.why)},
    }


def _table(shown: Sequence[Row]) -> Table:
    modes = [mode for mode in Mode if any(mode in row.records for row in shown) and mode not in TIMED.values()]
    uses = [use for use in TIMED if any(TIMED[use] in row.records for row in shown)]
    head = ["technique", *map(str, modes)]
    for use in uses:
        head += [f"{use} speed", "memory"]
    head += ["worst error", *([AGAINST] if any(row.cost for row in shown) else [])]
    head += [*(["accuracy lost"] if any(row.drop for row in shown) else []), "evidence"]
    return Table(head, [_cells(row, modes, uses, head) for row in shown])


def _cells(row: Row, modes: Sequence[Mode], uses: Sequence[str], head: Sequence[str]) -> list[str]:
    cells = [row.label, *(_verdict(row, mode) for mode in modes)]
    for use in uses:
        memory = row.memory(use)
        unknown = "-" if row.measured(use, "speed-up") is None else "not measured"
        cells += [_speed(row, use), unknown if memory is None else f"{memory:.2f}x"]
    cells.append("-" if row.error is None else f"{row.error.measured:.1e} of {row.error.allowed:.1e}")
    if AGAINST in head:
        cells.append("-" if (off := row.cost or row.error) is None else f"{off.measured:.1e}")
    if "accuracy lost" in head:
        cells.append(row.lost)
    cells.append("-" if row.evidence is None else f"{row.evidence.label}: {row.evidence.observed}")
    return cells


def _verdict(row: Row, mode: Mode) -> str:
    record = row.records.get(mode)
    return "-" if record is None else _undecided(record) or str(record.verdict)


def _undecided(record: Record) -> str:
    return str(record.code) if record.verdict is Verdict.ERROR and record.code == ErrorCode.UNDECIDED else ""


def _speed(row: Row, use: str) -> str:
    speed = row.measured(use, "speed-up")
    if speed is None or speed.value is None:
        return "-"
    return (
        f"{speed.value:.2f}x"
        if speed.low is None or speed.high is None
        else f"{speed.value:.2f}x ({speed.low:.2f}-{speed.high:.2f})"
        if row.decided(use)
        else f"undecided ({speed.low:.2f}-{speed.high:.2f})"
    )


def recommended(shown: Sequence[Row], use: str) -> str:
    """Recommend a technique for a use, with its figures; empty where no case of the use ran."""
    if not any(mode in row.records for row in shown for mode in MODES[use]):
        return ""
    safe = [row for row in shown if row.safe(use)]
    timed = [row for row in safe if row.technique != BASE and row.measured(use, "speed-up") is not None]
    open_ones = [row.label for row in timed if not row.decided(use)]
    timed = [row for row in timed if row.decided(use)]
    faster = sorted((row for row in timed if _speeds(row, use)[1] > 1.0), key=lambda row: -_speeds(row, use)[0])
    smaller = [row for row in safe if (memory := row.memory(use)) is not None and memory < 0.95]
    others = [row.label for row in safe if row.technique != BASE]
    if faster:
        text = f"{use}: use {faster[0].label}. It is right, {_costs(faster[0], use)}."
        if len(faster) > 1:
            others = [f"{row.label} {_speeds(row, use)[0]:.2f}x" for row in faster[1:]]
            text += f" Faster and right too: {_some(others)}."
    elif timed:
        text = f"{use}: stay with eager. None of the {len(timed)} techniques that are right and were timed is faster."
    elif open_ones:
        text = f"{use}: right, but no speed could be decided."
    elif others:
        text = f"{use}: right, but not timed: {_some(others)}."
    else:
        return f"{use}: no technique but eager was found right."
    if open_ones:
        text += f" Undecided, since their times vary too much: {_some(open_ones)}; measure again on a quiet machine."
    if smaller:
        least = min(smaller, key=lambda row: row.memory(use) or 0.0)
        text += f" Least memory: {least.label}, {least.memory(use):.2f} times eager's."
    return text


def _costs(row: Row, use: str) -> str:
    speed, low = _speeds(row, use)
    clauses = [f"{speed:.2f} times as fast as FP32 eager ({low:.2f} or more)"]
    if (memory := row.memory(use)) is not None:
        clauses.append(f"needs {memory:.2f} times its memory")
    if (off := row.cost or row.error) is not None:
        clauses.append(f"is off by at most {off.measured:.1e}{' from the FP32 model' if row.cost else ''}")
    if row.drop is not None:
        clauses.append(f"loses at most {row.drop.measured:.2%} of accuracy")
    return ", ".join(clauses[:-1]) + " and " + clauses[-1] if len(clauses) > 1 else clauses[0]


def _speeds(row: Row, use: str) -> tuple[float, float]:
    """The speed-up and the lower end of its interval; 0 where not known."""
    speed = row.measured(use, "speed-up")
    return ((speed.value or 0.0), (speed.low or 0.0)) if speed is not None else (0.0, 0.0)


def _wrong(row: Row) -> str:
    advice = "eager itself is not right" if row.technique == BASE else f"do not use {row.label}"
    return f"{advice}: {row.worst.verdict} in {row.worst.case.mode}: {row.worst.headline}"


def _unsaid(own: Sequence[Row]) -> Iterator[str]:
    """Lines about techniques that did not run, with the reasons."""
    tally: dict[str, list[str]] = {}
    for row in own:
        if row.executed and not row.undecided:
            continue
        record = row.worst
        # The headline of a refusal begins with its verdict, that of an undecided case with an exception's class.
        reason = record.headline if record.code else f"{record.verdict}, {record.headline}"
        if row.undecided:
            reason = reason.partition(": ")[2] or reason
        tally.setdefault(reason, []).append(row.label)
    for why, names in sorted(tally.items(), key=lambda item: -len(item[1])):
        yield f"{_some(names)}: {why}"


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
