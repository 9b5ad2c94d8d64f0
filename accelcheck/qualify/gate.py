"""Holds what a case measured against its baseline and the limits set for it, and stores baselines. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from accelcheck.case import Measurement, Verdict
from accelcheck.measure.baselines import Baseline, Baselines
from accelcheck.measure.regression import Sample, change

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.case import Case
    from accelcheck.journal import Record
    from accelcheck.measure.baselines import Place
    from accelcheck.qualify.limits import Limit

KEPT = ("latency", "latency-fp32-eager", "peak-memory", "peak-memory-fp32-eager", "launches", "first-call-cold")
"""Measurements that a baseline keeps besides the ratio."""


class Use(StrEnum):
    """What is done with baselines."""

    OFF = "off"
    CHECK = "check"
    UPDATE = "update"
    NEW_ONLY = "new-only"


@dataclass
class Gate:
    """Of one run.

    Attributes:
        use: What is done with baselines.
        store: Where they are.
        places: Where cases run, by device name.
        ratios: Time to FP32 eager's, one a process, by case id.
        limits: What people set.
        compared: How many cases are held against baselines in this run.
    """

    use: Use
    store: Baselines
    places: Mapping[str, Place]
    ratios: Mapping[str, Sequence[float]]
    limits: tuple[Limit, ...] = ()
    compared: int = 1
    _read: dict[str, dict[str, Baseline]] = field(default_factory=dict)

    def wanted(self, cases: Iterable[Case]) -> list[Case]:
        """Of the timed cases of a run, those that processes of their own must time.

        Raises:
            BaselineError: A baseline cannot be read.
        """
        if self.use is Use.OFF:
            return []
        if self.use is Use.CHECK:
            return [case for case in cases if case.id in self._stored(case.device)]
        return list(cases)

    def _stored(self, device: str) -> Mapping[str, Baseline]:
        if device not in self._read:
            self._read[device] = self.store.read(self.places[device]) if device in self.places else {}
        return self._read[device]

    def judge(self, record: Record) -> Record:
        """The record with what the baseline and the limits say of it; unchanged where nothing was measured.

        Raises:
            BaselineError: A baseline cannot be read or written.
        """
        if record.verdict is not Verdict.PASS or not record.measurements:
            return record
        found = {measurement.name: measurement for measurement in record.measurements}
        faults = [line for limit in self.limits if (line := limit.broken(record.case.id, found))]
        if self.use is Use.CHECK:
            added, regressions = self._checked(record, found)
            faults += regressions
            record = replace(record, measurements=(*record.measurements, *added))
        elif self.use is not Use.OFF:
            record = replace(record, measurements=(*record.measurements, self._kept(record, found)))
        return replace(record, verdict=Verdict.FAIL, reason="\n".join(faults)) if faults else record

    def _checked(self, record: Record, found: Mapping[str, Measurement]) -> tuple[Sequence[Measurement], Sequence[str]]:
        case = record.case
        stored = self._stored(case.device).get(case.id)
        ratios = self.ratios.get(case.id, ())
        if stored is None or stored.digest != record.digest:
            return [Measurement(CHANGE, None, "x", reason=self._absent(record, stored))], []
        if len(ratios) < 2:
            reason = f"{len(ratios)} processes measured it, two are needed"
            return [Measurement(CHANGE, None, "x", reason=reason)], []
        held = change(stored.ratio, Sample.of(ratios), self.compared)
        said = f"regression from {held.limit:.4g} on; a slowdown of {held.smallest:.4g} would have been seen"
        added = [Measurement(CHANGE, held.factor, "x", high=held.limit, reason=said)]
        faults = []
        if held.regression:
            faults.append(
                f"regression: expected at most {held.limit:.4g} times the baseline's time beside FP32 eager, got {held.factor:.4g}"
            )
        memory, before = found.get("peak-memory"), stored.figures.get("peak-memory")
        # Exact on the CPU, and the same every time: what has grown has grown.
        now = memory.value if memory is not None and case.device == "cpu" else None
        if now is not None and before is not None and now > before:
            faults.append(f"regression: expected a peak of at most {before:.0f} bytes, got {now:.0f}")
        return added, faults

    def _absent(self, record: Record, stored: Baseline | None) -> str:
        if stored is not None:
            return (
                "the workload has changed since its baseline was stored: store it again with --accel-baseline=new-only"
            )
        place = self.places[record.case.device]
        for other in self.store.near(place):
            near = self.store.read(other).get(record.case.id)
            if near is not None and near.digest == record.digest:
                return (
                    f"no baseline for {place.folder}; for information, with torch {other.torch}, {other.runtime} and "
                    f"{other.count} of them the time was {near.ratio.factor:.4g} of FP32 eager's"
                )
        return f"no baseline for {place.folder}: store one with --accel-baseline=new-only"

    def _kept(self, record: Record, found: Mapping[str, Measurement]) -> Measurement:
        ratios = self.ratios.get(record.case.id, ())
        if len(ratios) < 2:
            return Measurement(
                CHANGE, None, "x", reason=f"not stored: {len(ratios)} processes measured it, two are needed"
            )
        figures = {name: found[name].value for name in KEPT if name in found}
        baseline = Baseline(
            record.case.id,
            record.digest,
            self.places[record.case.device],
            Sample.of(ratios),
            {name: value for name, value in figures.items() if value is not None},
        )
        stored = self.store.write(baseline, replace=self.use is Use.UPDATE)
        said = f"stored over {len(ratios)} processes" if stored else "there is a baseline: kept"
        return Measurement(CHANGE, None, "x", reason=said)


CHANGE = "baseline-change"
"""The measurement that says how the time has changed since the baseline."""
