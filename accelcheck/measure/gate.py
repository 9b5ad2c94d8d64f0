"""Holds what a case measured against its baseline and the limits set for it, and stores baselines. No torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from accelcheck.core.case import Measurement, Verdict
from accelcheck.measure.baselines import Baseline, BaselineError, Baselines
from accelcheck.measure.regression import Sample, change
from accelcheck.measure.timing_processes import Timed, TimingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from accelcheck.core.case import Case
    from accelcheck.core.journal import Record
    from accelcheck.expectations.limits import Limit
    from accelcheck.measure.baselines import Place

    Measure = Callable[[Sequence[str], int], Mapping[str, Timed]]

KEPT = ("latency", "latency-fp32-eager", "peak-memory", "peak-memory-fp32-eager", "launches", "first-call-cold")
"""Measurements that a baseline keeps besides the ratio."""


class Use(StrEnum):
    """What is done with baselines."""

    OFF = "off"
    CHECK = "check"
    UPDATE = "update"
    NEW_ONLY = "new-only"


BUSY = 0.1
"""Part of the time that a case may wait for a core before it is said of a regression. On two quiet cores half of all cases wait for
1 to 3 % of it, and 77 % where qnnpack's threads and OpenMP's are in each other's way."""
STORING = frozenset({Use.UPDATE, Use.NEW_ONLY})


@dataclass
class Gate:
    """Of one run.

    Attributes:
        use: What is done with baselines.
        store: Where they are.
        places: Where cases run, by device name.
        environments: The variables set there that change speed, by device name.
        limits: What people set.
        words: The options of pytest that this comes from.
        stored: Baselines of the devices where cases run, by device name and case id: more than one where a writer was killed, or
            two branches merged.
        timed: What processes of their own measured, by case id.
        few: What the first processes measured of the cases that they named, by case id: what is in `timed` are further ones.
        compared: How many cases are held against baselines in this run.
    """

    use: Use
    store: Baselines
    places: Mapping[str, Place]
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    words: tuple[str, ...] = ()
    stored: Mapping[str, Mapping[str, Sequence[Baseline]]] = field(default_factory=dict)
    timed: Mapping[str, Timed] = field(default_factory=dict)
    few: Mapping[str, Timed] = field(default_factory=dict)
    compared: int = 1

    def wanted(self, cases: Iterable[Case]) -> list[Case]:
        """Of the timed cases of a run, those that processes of their own must time."""
        if self.use is Use.OFF:
            return []
        if self.use is Use.CHECK:
            return [case for case in cases if self._comparable(case)]
        return [case for case in cases if case.device in self.places]

    def _comparable(self, case: Case) -> list[Baseline]:
        """Baselines that it may have, whichever its digest is."""
        here = self.environments.get(case.device, {})
        return [one for one in self._stored(case) if one.environment == here]

    def _stored(self, case: Case) -> Sequence[Baseline]:
        return self.stored.get(case.device, {}).get(case.id, ())

    def time(self, cases: Sequence[Case], counts: tuple[int, int], measure: Measure) -> None:
        """Have cases timed. What a check of few processes names is timed by more, and these alone count for it.

        A process lands where it lands: of some cases a third of all processes take 1.2 times as long as the others, and now
        and then the few of a check are all of these. Samples of more show their own spread.

        Args:
            cases: As `wanted` gives them.
            counts: How many processes time each, and how many more those that a check names.
            measure: Times the cases of these ids in so many processes.

        Raises:
            RoundError: The first of the processes came to no case.
        """
        self.compared = len(cases)
        self.timed = measure([case.id for case in cases], counts[0])
        if self.use is Use.CHECK and (named := [case.id for case in cases if self._named(case)]):
            self.few = {case: self.timed[case] for case in named}
            try:
                further = measure(named, counts[1])
            except TimingError as error:
                # The first ones came to theirs: what these named is not settled, and it is no other case's matter.
                further = dict.fromkeys(named, Timed(reason=str(error), asked=counts[1]))
            self.timed = {**self.timed, **further}

    def _named(self, case: Case) -> bool:
        """Whether it is a regression against a baseline that it may have: which one, its digest will say."""
        timed = self.timed[case.id]
        if timed.lacking or timed.ended is not None:
            return False
        sample = Sample.of(timed.ratios)
        return any(change(one.ratio, sample, self.compared).regression for one in self._comparable(case))

    def judge(self, record: Record) -> Record:
        """The record with what the baseline and the limits say of it; unchanged where nothing was measured."""
        if record.verdict is not Verdict.PASS or not record.measurements:
            return record
        found = {measurement.name: measurement for measurement in record.measurements}
        faults = [line for limit in self.limits if (line := limit.broken(record.case.id, found))]
        verdict = Verdict.FAIL
        if self.use is Use.CHECK:
            stored = self._stored(record.case)
            baseline = next((one for one in stored if one.digest == record.digest), None)
            if reason := self._apart(record, stored, baseline):
                added = [Measurement(CHANGE, None, "x", reason=reason)]
            elif reason := self._lacking(record.case):
                added = [Measurement(CHANGE, None, "x", reason=reason)]
                if not faults:  # asked for, and not done
                    verdict, faults = Verdict.ERROR, [f"not held against its baseline: {reason}"]
            else:
                assert baseline is not None  # or it is apart
                added, regressions = self._checked(record.case, baseline, found)
                faults += regressions
            record = replace(record, measurements=(*record.measurements, *added))
        return replace(record, verdict=verdict, reason="\n".join(faults)) if faults else record

    def _checked(
        self, case: Case, baseline: Baseline, found: Mapping[str, Measurement]
    ) -> tuple[list[Measurement], list[str]]:
        held = change(baseline.ratio, Sample.of(self.timed[case.id].ratios), self.compared)
        smallest = held.smallest
        if case.id in self.few:  # they must name it before more are asked
            smallest = max(
                smallest, change(baseline.ratio, Sample.of(self.few[case.id].ratios), self.compared).smallest
            )
        added = [
            Measurement(CHANGE, held.factor, "x", high=held.limit, reason=f"a regression from {held.limit:.4g} on"),
            Measurement(DETECTABLE, smallest, "x", reason="found in 95 of 100 checks like this one"),
        ]
        faults = []
        if held.regression:
            waited = statistics.median(self.timed[case.id].waited or (0.0,))
            beside = (
                f"; {waited:.0%} of the time it waited for a core: other work, or threads of its own"
                if waited > BUSY
                else ""
            )
            faults.append(
                f"regression: expected at most {held.limit:.4g} times the baseline's time beside FP32 eager, got {held.factor:.4g}{beside}"
            )
        memory, before = found.get("peak-memory"), baseline.figures.get("peak-memory")
        # Exact on the CPU, and the same every time: what has grown has grown.
        now = memory.value if memory is not None and case.device == "cpu" else None
        if now is not None and before is not None and now > before:
            faults.append(f"regression: expected a peak of at most {before:.0f} bytes, got {now:.0f}")
        return added, faults

    def _apart(self, record: Record, stored: Sequence[Baseline], baseline: Baseline | None) -> str:
        """Why a case has no baseline to be held against; empty where it has."""
        if baseline is not None:
            here = self.environments.get(record.case.device, {})
            if here == baseline.environment:
                return ""
            return (
                f"the baseline was measured with {_set(baseline.environment)}, this with {_set(here)}: not compared; "
                "--accel-baseline=update replaces it"
            )
        if stored:
            return (
                "the workload has changed since its baseline was stored: store it again with --accel-baseline=new-only"
            )
        place = self.places[record.case.device]
        for near in self.store.near(place, record.case.id, record.digest):
            here = self.environments.get(record.case.device, {})
            other = "" if near.environment == here else f", with {_set(near.environment)},"
            return (
                f"no baseline for {place.folder}; for information, with torch {near.place.torch}, {near.place.runtime} "
                f"and {near.place.count} of them{other} the time was {near.ratio.factor:.4g} of FP32 eager's"
            )
        return f"no baseline for {place.folder}: store one with --accel-baseline=new-only"

    def _lacking(self, case: Case) -> str:
        """Why there is no sample of a case; empty where there is one."""
        return self.timed.get(case.id, Timed()).lacking

    def keep(self, record: Record) -> Record:
        """The record of a case that passes with what became of its baseline, where baselines are stored: an error if it cannot be."""
        if record.verdict is not Verdict.PASS or not record.measurements or self.use not in STORING:
            return record
        said = self._lacking(record.case)
        if said:
            said = f"not stored: {said}"
        else:
            timed = self.timed[record.case.id]
            sample = Sample.of(timed.ratios)
            figures = {m.name: m.value for m in record.measurements if m.name in KEPT and m.value is not None}
            device = record.case.device
            baseline = Baseline(
                record.case.id, record.digest, self.places[device], sample, figures, self.environments.get(device, {})
            )
            try:
                stored = self.store.write(baseline, replace=self.use is Use.UPDATE)
            except BaselineError as error:
                return replace(record, verdict=Verdict.ERROR, reason=str(error))
            said = f"stored over {sample.count} processes" if stored else "there is a baseline: kept"
            if stored and timed.reason:
                said += f" of {timed.asked}: {timed.reason}"
        return replace(record, measurements=(*record.measurements, Measurement(CHANGE, None, "x", reason=said)))

    def idle(self, records: Iterable[Record]) -> list[str]:
        """Limits that were held against nothing, a line each: of no case that was timed, or of a figure that none has."""
        measured = [
            (record.case.id, {measurement.name: measurement for measurement in record.measurements})
            for record in records
            if record.measurements
        ]
        return [
            f"limit: {limit.kind} {limit.bound:g} of {', '.join(limit.cases)}: no case that was timed here has such a figure"
            for limit in self.limits
            if measured and not any(limit.covers(case) and limit.value(found) is not None for case, found in measured)
        ]


def _set(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "no variable set"


CHANGE = "baseline-change"
"""The measurement that says how the time has changed since the baseline."""
DETECTABLE = "baseline-detectable"
"""The measurement that says how small a slowdown the check would have found."""
