"""Finds common causes of failures: an operator, a missing feature or a fault. No torch."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.report.run import DeviceRun, labelled, labels
from accelcheck.report.signatures import SHARED, Kind, Signature, signatures

MOST_PATHS = 3
"""Most parts of a result named in a title."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The common cause of several cases that are not green, or that the ledger expects to fail.

    Attributes:
        title: Text such as ``aten::convolution: no kernel``.
        cases: Labels of devices with records, sorted. A case that shows two causes stands under both.
        example: Simplest record: of the lowest level, then of the first mode, then with the shortest reason.
        link: Link of the ledger, where the failure is expected.
        reproduction: Command that runs the example alone.
    """

    title: str
    kind: Kind
    cases: tuple[tuple[str, Record], ...]
    example: Record
    link: str = ""
    reproduction: str = ""


@dataclass(frozen=True, slots=True)
class _Fault:
    device: str
    record: Record
    signature: Signature


def causes(runs: Sequence[DeviceRun]) -> tuple[Cause, ...]:
    """Group all cases that are not green by cause, the one with the most cases first."""
    faults = [
        _Fault(label, record, signature)
        for label, record in labelled(runs)
        if not record.verdict.green
        for signature in signatures(record)
    ]
    groups: dict[tuple[Kind, str], list[_Fault]] = defaultdict(list)
    for fault in faults:
        if not fault.signature.paths:
            groups[fault.signature.kind, fault.signature.title].append(fault)
    _group_values(groups, [fault for fault in faults if fault.signature.paths], _judged(runs))
    ordered = _sorted(
        _cause(runs, title, kind, ((fault.device, fault.record) for fault in group))
        for (kind, title), group in groups.items()
    )
    return tuple(cause for index, cause in enumerate(ordered) if not _within(cause, ordered[:index]))


_ACCOMPANYING = frozenset({Kind.EVIDENCE, Kind.METADATA})
"""Kinds of which one case may show several for one cause: each failing observation has a line of its own."""


def _within(cause: Cause, larger: Sequence[Cause]) -> bool:
    """True if all cases of a cause show a larger one of the same kind too."""
    if cause.kind not in _ACCOMPANYING:
        return False
    own = _names(cause)
    return any(other.kind is cause.kind and own <= _names(other) for other in larger)


def _names(cause: Cause) -> set[tuple[str, str]]:
    return {(label, record.case.id) for label, record in cause.cases}


def expected(runs: Sequence[DeviceRun]) -> tuple[Cause, ...]:
    """Group expected failures by the ledgers' reasons, the one with the most cases first."""
    groups: dict[tuple[str, str], list[tuple[str, Record]]] = {}
    for label, record in labelled(runs):
        if record.verdict is Verdict.XFAIL:
            # Older journals have the reasons as one text.
            reasons = dict.fromkeys((known.reason, known.link) for known in record.known)
            for reason in reasons or [(record.headline, "")]:
                groups.setdefault(reason, []).append((label, record))
    return _sorted(_cause(runs, reason, Kind.LEDGER, cases, link) for (reason, link), cases in groups.items())


def counted(groups: Sequence[Cause]) -> str:
    """Count cases and causes, such as ``61 cases, 5 causes``."""
    cases = len(set[tuple[str, str]]().union(*map(_names, groups)))
    return f"{cases:,} case{'s' * (cases != 1)}, {len(groups):,} cause{'s' * (len(groups) != 1)}"


def _cause(
    runs: Sequence[DeviceRun], title: str, kind: Kind, cases: Iterable[tuple[str, Record]], link: str = ""
) -> Cause:
    unique = {(label, record.case.id): (label, record) for label, record in cases}
    ordered = tuple(unique[key] for key in sorted(unique))
    modes = list(Mode)
    label, example = min(
        ordered, key=lambda c: (c[1].case.level, modes.index(c[1].case.mode), len(c[1].why), c[0], c[1].case.id)
    )
    run = runs[labels(runs).index(label)]
    return Cause(title, kind, ordered, example, link, run.reproduction(example.case))


def _sorted(unsorted: Iterable[Cause]) -> tuple[Cause, ...]:
    return tuple(sorted(unsorted, key=lambda cause: (-len(cause.cases), cause.title, cause.kind, cause.link)))


_Trait = tuple[str, str]
"""A property of a case, such as ``("technique", "amp-bf16")``."""


def _traits(record: Record) -> tuple[_Trait, ...]:
    """Properties that may explain wrong values, the most telling first, which decides among equals."""
    case = record.case
    return ("workload", case.workload), ("technique", case.technique), ("dtype", case.dtype), ("mode", case.mode)


def _judged(runs: Sequence[DeviceRun]) -> Counter[tuple[str, _Trait]]:
    """Count the cases whose values were judged, by device and trait."""
    return Counter(
        (label, trait)
        for label, record in labelled(runs)
        if record.verdict in _WITH_VALUES
        for trait in _traits(record)
    )


def _group_values(
    groups: dict[tuple[Kind, str], list[_Fault]], faults: Sequence[_Fault], judged: Mapping[tuple[str, _Trait], int]
) -> None:
    """Group wrong values by the trait that explains most of them.

    A buffer's name alone names its writer. Otherwise the trait with the most failing cases, weighed with their share of
    its cases that ran, explains a group; then the same among the rest. So a technique that is wrong in 7 of its 8 cases
    comes before a workload that is wrong in 7 of its 60. A dtype or a mode explains a group only if most of its cases
    are wrong.
    """
    left: dict[tuple[str, str], list[_Fault]] = defaultdict(list)
    for fault in faults:
        if fault.signature.paths.isdisjoint(SHARED):
            where = " and ".join(sorted(fault.signature.paths)[:MOST_PATHS])
            groups[fault.signature.kind, f"{where}: {fault.signature.title}"].append(fault)
        else:
            left[fault.device, fault.signature.title].append(fault)
    for (device, what), unexplained in left.items():
        rest = unexplained
        while rest:
            trait = _telling(rest, device, judged)
            group = [fault for fault in rest if trait in _traits(fault.record)]
            parts = sorted({path for fault in group for path in fault.signature.paths})
            where = ", ".join(parts[:MOST_PATHS]) + (", …" if len(parts) > MOST_PATHS else "")
            groups[Kind.VALUES, f"{trait[1]}: {what} in {where}"] += group
            rest = [fault for fault in rest if trait not in _traits(fault.record)]


_WITH_VALUES = frozenset({Verdict.PASS, Verdict.FAIL, Verdict.XFAIL, Verdict.XPASS, Verdict.FLAKY, Verdict.WAIVED})
_BROAD = frozenset({"dtype", "mode"})
"""Traits that many unrelated cases share."""


def _telling(faults: Sequence[_Fault], device: str, judged: Mapping[tuple[str, _Trait], int]) -> _Trait:
    failing = Counter(trait for fault in faults for trait in _traits(fault.record))
    order = {name: place for place, (name, _) in enumerate(_traits(faults[0].record))}
    fitting = [
        trait for trait in failing if trait[0] not in _BROAD or 2 * failing[trait] > judged.get((device, trait), 0)
    ]
    return min(
        fitting, key=lambda trait: (-Fraction(failing[trait] ** 2, judged[device, trait]), order[trait[0]], trait[1])
    )
