"""The matrix of cases. Ids and their order are the same on every machine, because no device is asked."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from accelcheck.core.case import LEVELS, Case, Mode
from accelcheck.core.foreign import SECONDS, calling
from accelcheck.core.registry import UnknownNameError, discover, index, unknown
from accelcheck.core.selection import Selection
from accelcheck.core.strangers import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload

T = TypeVar("T")
_Cell: TypeAlias = tuple[str, str, str, Mode, int]
"""Technique, workload, dtype, mode and level: a case, but for its device."""


@dataclass(frozen=True)
class Matrix:
    """All registered techniques and workloads, built-in and of other plugins."""

    techniques: Mapping[str, Technique]
    workloads: Mapping[str, Workload]
    seconds: float = SECONDS
    """That a technique may take to say which cases it has."""

    @classmethod
    def load(cls, seconds: float = SECONDS) -> Matrix:
        """Import the built-in families, and with them torch.

        Args:
            seconds: As the attribute.
        """
        return cls(
            index("technique", discover("accelcheck.techniques", "TECHNIQUES")),
            index("workload", discover("accelcheck.workloads", "WORKLOADS")),
            seconds,
        )

    def extended(self, techniques: Iterable[Technique], workloads: Iterable[Workload]) -> Matrix:
        """The same, with what others registered.

        Raises:
            DuplicateNameError: Two things share a name.
        """
        return replace(
            self,
            techniques=index("technique", [*self.techniques.values(), *techniques]),
            workloads=index("workload", [*self.workloads.values(), *workloads]),
        )

    def parts(self) -> list[object]:
        """Techniques, workloads, and the functions that these hold, which may be local to a plugin: all that a run can name."""
        others = [
            other for one in self.workloads.values() if one.sizes is not None for other in one.sizes.workloads.values()
        ]
        workloads = [*self.workloads.values(), *others]
        held = [value for workload in workloads for value in vars(workload).values() if callable(value)]
        return [*self.techniques.values(), *workloads, *held]

    def cases(self, selection: Selection, modes: Iterable[Mode] = tuple(Mode)) -> list[Case]:
        """The selected cases, sorted by device (as asked), technique, workload, dtype, mode."""
        chosen = self._chosen(selection, tuple(modes)) if selection.shard is None else self._dealt(selection, modes)
        cases = [
            Case(technique, workload, device, dtype, mode, cost)
            for device in selection.devices
            for technique, workload, dtype, mode, cost in chosen
        ]
        if selection.cases:
            return [case for case in cases if case.id in selection.cases]
        return cases

    def _dealt(self, selection: Selection, modes: Iterable[Mode]) -> list[_Cell]:
        """What is in the selection's shard.

        Neither the modes nor the devices have a say in it: a run collects its modes one after the other, and machines that do
        not have the same devices still agree.
        """
        assert selection.shard is not None
        cells = self._chosen(selection, tuple(Mode))
        if selection.cases:
            named = {_without_device(word) for word in selection.cases}
            cells = [cell for cell in cells if "/".join(cell[:4]) in named]
        wanted = frozenset(modes)
        return [cell for cell in selection.shard.take(cells, lambda cell: cell[3]) if cell[3] in wanted]

    def levels(self, selection: Selection) -> Counter[int]:
        """Number of cases on one device by their level, whatever devices and cases are selected; makes no `Case`."""
        return Counter(cost for *_, cost in self._chosen(replace(selection, cases=()), tuple(Mode)))

    def _chosen(self, selection: Selection, modes: Sequence[Mode]) -> list[_Cell]:
        workloads = _matching(self.workloads, selection.workloads)  # once: each technique goes through all of them
        found: list[tuple[str, str, str, Mode, int]] = []
        for technique in _matching(self.techniques, selection.techniques):
            kind = type(technique)
            what = f"technique {quoted(technique.name)} ({kind.__module__}.{kind.__qualname__}), asked for its cases,"
            with calling(what, self.seconds):
                found += _cases_of(technique, workloads, selection, modes)
        return found

    def refusals(self, workload: Workload) -> Mapping[str, str]:
        """Why each technique has no case with a workload, by technique; without those that have one."""
        found = {}
        for technique in self.techniques.values():
            if reason := _refusal(technique, workload):
                found[technique.name] = reason
        return found

    def check(self, selection: Selection) -> None:
        """Check that every selected name exists.

        Raises:
            UnknownNameError: A name does not exist; the message gives the legal names and the nearest one.
        """
        for kind, words, legal in (
            ("technique", selection.techniques, self.techniques),
            ("workload", selection.workloads, self.workloads),
        ):
            for word in words:
                if not fnmatch.filter(legal, word):
                    raise unknown(kind, word, list(legal))
        if selection.cases:
            everything = Selection(selection.devices, level=max(LEVELS))
            known = {case.id for case in self.cases(everything)}
            for word in selection.cases:
                if word not in known:
                    raise unknown_case(word, sorted(known))


def _cases_of(
    technique: Technique, workloads: Sequence[Workload], selection: Selection, modes: Sequence[Mode]
) -> list[tuple[str, str, str, Mode, int]]:
    covered = [mode for mode in modes if technique.covers(mode)]
    return [
        (technique.name, workload.name, dtype, mode, cost)
        for workload in (workloads if covered else ())
        if technique.accepts(workload) and (not workload.techniques or technique.name in workload.techniques)
        for dtype in technique.dtypes
        if dtype in workload.dtypes and (not selection.dtypes or dtype in selection.dtypes)
        for mode in covered
        if mode in workload.modes
        if (cost := level(technique, workload, dtype, mode)) <= selection.level or selection.cases
    ]


def _refusal(technique: Technique, workload: Workload) -> str:
    """Why a technique has no case with a workload, in a few words; empty where it has one."""
    if workload.techniques and technique.name not in workload.techniques:
        return f"is none of the techniques that {workload.name} names"
    if not technique.accepts(workload):
        return technique.refusal(workload) or "is shown by a few other workloads of accelcheck"
    if not any(map(technique.covers, workload.modes)):
        return (
            f"has none of its modes, {', '.join(sorted(workload.modes))}: it has {', '.join(sorted(technique.modes))}"
        )
    if not workload.dtypes & set(technique.dtypes):
        return f"has none of its dtypes, {', '.join(sorted(workload.dtypes))}: it has {', '.join(technique.dtypes)}"
    return ""


def level(technique: Technique, workload: Workload, dtype: str, mode: Mode) -> int:
    """The level of a case. A slow technique, a large workload and a further dtype each raise it by one."""
    further = int(dtype != technique.dtypes[0])
    usual = technique.level + workload.level - 1 - int(workload.name in technique.early)
    levels = workload.levels
    cost = levels.get(f"{technique.name}/{mode}", levels.get(technique.name, usual)) + further
    return min(max(LEVELS), max(min(LEVELS), cost))


def unknown_case(word: str, legal: Sequence[str]) -> Exception:
    """The error for an unknown case id. It gives the nearest ids, because there are too many to list."""
    near = difflib.get_close_matches(word, legal, n=3, cutoff=0.3)
    return UnknownNameError(
        f"unknown case {word!r}. Expected technique/workload/device/dtype/mode; nearest: {', '.join(near) or 'none'}."
    )


def _without_device(case: str) -> str:
    return "/".join(part for place, part in enumerate(case.split("/")) if place != 2)


def _matching(things: Mapping[str, T], patterns: Sequence[str]) -> list[T]:
    if not patterns:
        return list(things.values())
    matches = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]
    return [thing for name, thing in things.items() if any(match(name) for match in matches)]
