"""Compares the figures of a case with its baseline and its limits, and stores baselines. No torch."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from accelcheck.core.case import Case, Measurement, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.expectations.limits import Limit
from accelcheck.measure.baselines import Baseline, BaselineError, Baselines, Place
from accelcheck.measure.regression import Sample, change
from accelcheck.measure.timing_processes import Timed, TimingError

Measure = Callable[[Sequence[str], int], Mapping[str, Timed]]

KEPT = ("latency", "latency-fp32-eager", "peak-memory", "peak-memory-fp32-eager", "launches", "first-call-cold")
"""Measurements that a baseline keeps besides the ratio."""


class Use(StrEnum):
    """Use of baselines in a run."""

    OFF = "off"
    CHECK = "check"
    UPDATE = "update"
    NEW_ONLY = "new-only"


BUSY = 0.1
"""Share of the time that a case waits for a core from which on a regression mentions it. On two quiet cores half of all
cases wait for 1 to 3 % of the time, and for 77 % where the threads of qnnpack and OpenMP compete."""
STORING = frozenset({Use.UPDATE, Use.NEW_ONLY})


@dataclass
class Gate:
    """Baselines and limits of one run.

    Attributes:
        places: Place of each device, by device name.
        environments: Variables that are set and change speed, by device name.
        words: Options of pytest that the limits come from.
        stored: Baselines of the run's devices, by device name and case id; several of a case after a killed writer or a
            merge of branches.
        timed: Measurements of timing processes, by case id.
        few: Measurements of the first processes for cases that exceeded their limit, by case id; `timed` has those of
            the further ones.
        compared: Number of cases that this run compares with baselines.
        further: Number of processes that time cases again that are faster than eager; 0 with baselines.
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
    further: int = 0

    def wanted(self, cases: Iterable[Case]) -> list[Case]:
        """The timed cases of a run that timing processes must measure."""
        if self.use is Use.OFF:
            return []
        if self.use is Use.CHECK:
            return [case for case in cases if self._comparable(case)]
        return [case for case in cases if case.device in self.places]

    def _comparable(self, case: Case) -> list[Baseline]:
        """Baselines of this case and environment, whatever their digest."""
        here = self.environments.get(case.device, {})
        return [baseline for baseline in self._stored(case) if baseline.environment == here]

    def _stored(self, case: Case) -> Sequence[Baseline]:
        return self.stored.get(case.device, {}).get(case.id, ())

    def time(self, cases: Sequence[Case], counts: tuple[int, int], measure: Measure) -> None:
        """Have cases timed. Cases that exceed their limit are timed again by more processes, and only these count.

        Processes differ in their memory layout: for some cases a third of all take 1.2 times as long as the others, at
        times all of a check. Larger samples show this spread.

        `counts` are the numbers of processes for every case, and of further ones for cases that exceed their limit.
        `measure` times cases, given their ids and the number of processes, and raises `TimingError` where the first
        process measured no case.
        """
        self.compared = len(cases)
        self.timed = measure([case.id for case in cases], counts[0])
        if self.use is Use.CHECK and (named := [case.id for case in cases if self._named(case)]):
            self.few = {case: self.timed[case] for case in named}
            try:
                further = measure(named, counts[1])
            except TimingError as error:
                # The first processes measured their cases: only the repeated cases remain undecided.
                further = dict.fromkeys(named, Timed(reason=str(error), asked=counts[1]))
            self.timed = {**self.timed, **further}

    def _named(self, case: Case) -> bool:
        """True if it exceeds the limit of any baseline that it may have; its digest, known later, selects one."""
        timed = self.timed[case.id]
        if timed.lacking or timed.ended is not None:
            return False
        sample = Sample.of(timed.ratios)
        return any(change(stored.ratio, sample, self.compared).regression for stored in self._comparable(case))

    def judge(self, record: Record) -> Record:
        """Compare a record with baseline and limits; returns it unchanged if nothing was measured."""
        if record.verdict is not Verdict.PASS or not record.measurements or not record.case.timed:
            return record
        figures = {measurement.name: measurement for measurement in record.measurements}
        faults = [fault for limit in self.limits if (fault := limit.broken(record.case.id, figures)) is not None]
        lacking = ""
        if self.use is Use.CHECK:
            stored = self._stored(record.case)
            baseline = next((candidate for candidate in stored if candidate.digest == record.digest), None)
            if reason := self._apart(record, stored, baseline):
                added = [Measurement(CHANGE, None, "x", reason=reason)]
            elif reason := self.timed.get(record.case.id, Timed()).lacking:
                added = [Measurement(CHANGE, None, "x", reason=reason)]
                lacking = f"not compared with its baseline: {reason}"
            else:
                assert baseline is not None  # otherwise there was a reason
                added, regressions = self._checked(record.case, baseline, figures)
                faults += regressions
            record = replace(record, measurements=(*record.measurements, *added))
        if faults:
            return replace(record, verdict=Verdict.FAIL, faults=tuple(faults))
        if lacking:  # the comparison was asked for and not made
            return replace(record, verdict=Verdict.ERROR, code=ErrorCode.NO_BASELINE, reason=lacking)
        return record

    def _checked(
        self, case: Case, baseline: Baseline, found: Mapping[str, Measurement]
    ) -> tuple[list[Measurement], list[Fault]]:
        held = change(baseline.ratio, Sample.of(self.timed[case.id].ratios), self.compared)
        smallest = held.smallest
        if case.id in self.few:  # these processes must exceed the limit first
            few = change(baseline.ratio, Sample.of(self.few[case.id].ratios), self.compared)
            smallest = max(smallest, few.smallest)
        added = [
            Measurement(CHANGE, held.factor, "x", high=held.limit, reason=f"a regression from {held.limit:.4g} on"),
            Measurement(DETECTABLE, smallest, "x", reason="found in 95 of 100 checks like this one"),
        ]
        faults = []
        if held.regression:
            waited = statistics.median(self.timed[case.id].waited or (0.0,))
            beside = f"it waited for a core {waited:.0%} of the time, because of other work or of its own threads"
            got = f"{held.factor:.4g}; {beside}" if waited > BUSY else ""
            sides = "times the baseline's time beside FP32 eager", got, held.factor, held.limit
            faults.append(Fault(FaultKind.REGRESSION, "regression", "time", "", *sides))
        memory, before = found.get("peak-memory"), baseline.figures.get("peak-memory")
        # Exact and reproducible on the CPU, so any growth is real.
        now = memory.value if memory is not None and case.device == "cpu" else None
        if now is not None and before is not None and now > before:
            grown = Fault(FaultKind.REGRESSION, "regression", "memory", expected="bytes", measured=now, allowed=before)
            faults.append(grown)
        return added, faults

    def _apart(self, record: Record, stored: Sequence[Baseline], baseline: Baseline | None) -> str:
        """The reason why a case has no baseline to compare with; empty if it has one."""
        here = self.environments.get(record.case.device, {})
        if baseline is not None:
            if here == baseline.environment:
                return ""
            others = f"the baseline was measured with {_set(baseline.environment)}, this with {_set(here)}"
            return f"{others}: not compared; --accel-baseline=update replaces it"
        if stored:
            why = "the workload has changed since its baseline was stored"
            return f"{why}: store it again with --accel-baseline=new-only"
        place = self.places[record.case.device]
        for near in self.store.near(place, record.case.id, record.digest):
            other = "" if near.environment == here else f", with {_set(near.environment)},"
            return (
                f"no baseline for {place.folder}; for information, with torch {near.place.torch}, {near.place.runtime} "
                f"and {near.place.count} of them{other} the time was {near.ratio.factor:.4g} of FP32 eager's"
            )
        return f"no baseline for {place.folder}: store one with --accel-baseline=new-only"

    def keep(self, record: Record) -> Record:
        """Store the baseline of a passing case; the record with the outcome, an error if it cannot be stored."""
        measured = record.measurements and record.case.timed
        if record.verdict is not Verdict.PASS or not measured or self.use not in STORING:
            return record
        timed = self.timed.get(record.case.id, Timed())
        if timed.lacking:
            outcome = f"not stored: {timed.lacking}"
        else:
            sample = Sample.of(timed.ratios)
            figures = {m.name: m.value for m in record.measurements if m.name in KEPT and m.value is not None}
            device = record.case.device
            place, environment = self.places[device], self.environments.get(device, {})
            baseline = Baseline(record.case.id, record.digest, place, sample, figures, environment)
            try:
                stored = self.store.write(baseline, replace=self.use is Use.UPDATE)
            except BaselineError as error:
                return replace(record, verdict=Verdict.ERROR, reason=str(error))
            outcome = f"stored from {sample.count} processes" if stored else "a baseline exists and is kept"
            if stored and timed.reason:
                outcome += f" of {timed.asked}: {timed.reason}"
        return replace(record, measurements=(*record.measurements, Measurement(CHANGE, None, "x", reason=outcome)))

    def idle(self, records: Iterable[Record]) -> list[str]:
        """Unused limits, a line each: no timed case matches, or has the figure."""
        measured = [(r.case.id, {m.name: m for m in r.measurements}) for r in records if r.measurements]
        return [
            f"limit: {limit.kind} {limit.bound:g} of {', '.join(limit.cases)}: no timed case has this figure"
            for limit in self.limits
            if measured
            and not any(limit.covers(case) and limit.value(figures) is not None for case, figures in measured)
        ]


def _set(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(variables.items())) or "no variable set"


CHANGE = "baseline-change"
"""Name of the measurement: change of the time since the baseline."""
DETECTABLE = "baseline-detectable"
"""Name of the measurement: smallest slowdown that the check finds."""
