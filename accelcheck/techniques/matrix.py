"""Matrix of cases. Ids and their order are the same on every machine, because no device is asked."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from accelcheck.core.case import LEVELS, Case, Mode
from accelcheck.core.foreign import SECONDS, calling
from accelcheck.core.registry import UnknownNameError, discover, index, unknown
from accelcheck.core.selection import Selection
from accelcheck.core.strangers import quoted

if TYPE_CHECKING:  # the plugin and the commands import this module without torch
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload

T = TypeVar("T")
_Cell: TypeAlias = tuple[str, str, str, Mode, int]
"""Technique, workload, dtype, mode and level: a case, but for its device."""


@dataclass(frozen=True)
class Matrix:
    """Registry of all techniques and workloads, built-in and of other plugins."""

    techniques: Mapping[str, Technique]
    workloads: Mapping[str, Workload]
    seconds: float = SECONDS
    """Time limit for a technique to list its cases, in seconds."""

    @classmethod
    def load(cls, seconds: float = SECONDS) -> Matrix:
        """Imports the built-in families, and with them torch."""
        return cls(
            index("technique", discover("accelcheck.techniques", "TECHNIQUES")),
            index("workload", discover("accelcheck.workloads", "WORKLOADS")),
            seconds,
        )

    def extended(self, techniques: Iterable[Technique], workloads: Iterable[Workload]) -> Matrix:
        """Adds techniques and workloads that others registered, or raises `DuplicateNameError`."""
        return replace(
            self,
            techniques=index("technique", [*self.techniques.values(), *techniques]),
            workloads=index("workload", [*self.workloads.values(), *workloads]),
        )

    def parts(self) -> list[object]:
        """Lists techniques, workloads, and their functions, which may be local to a plugin: all that a run can name."""
        sizes = [workload.sizes for workload in self.workloads.values() if workload.sizes is not None]
        workloads = [*self.workloads.values(), *(other for size in sizes for other in size.workloads.values())]
        held = [value for workload in workloads for value in vars(workload).values() if callable(value)]
        return [*self.techniques.values(), *workloads, *held]

    def cases(self, selection: Selection, modes: Iterable[Mode] = tuple(Mode)) -> list[Case]:
        """Lists the selected cases, sorted by device (as asked), technique, workload, dtype, mode."""
        chosen = self._chosen(selection, tuple(modes)) if selection.shard is None else self._dealt(selection, modes)
        cases = [
            Case(technique, workload, device, dtype, mode, cost)
            for device in selection.devices
            for technique, workload, dtype, mode, cost in chosen
        ]
        return [case for case in cases if case.id in selection.cases] if selection.cases else cases

    def _dealt(self, selection: Selection, modes: Iterable[Mode]) -> list[_Cell]:
        """Lists the cells in the selection's shard, which depends on neither modes nor devices.

        A run collects its modes one after the other, and machines with other devices must agree.
        """
        assert selection.shard is not None
        cells = self._chosen(selection, tuple(Mode))
        if selection.cases:
            parts = [word.split("/") for word in selection.cases]
            named = {"/".join(words[:2] + words[3:]) for words in parts}  # without the device
            cells = [cell for cell in cells if "/".join(cell[:4]) in named]
        wanted = frozenset(modes)
        return [cell for cell in selection.shard.take(cells, lambda cell: cell[3]) if cell[3] in wanted]

    def levels(self, selection: Selection) -> Counter[int]:
        """Counts the cases on one device by their level, whatever devices and cases are selected; makes no `Case`."""
        return Counter(cost for *_, cost in self._chosen(replace(selection, cases=()), tuple(Mode)))

    def _chosen(self, selection: Selection, modes: Sequence[Mode]) -> list[_Cell]:
        workloads = _matching(self.workloads, selection.workloads)  # once: each technique goes through all of them
        cells: list[_Cell] = []
        for technique in _matching(self.techniques, selection.techniques):
            kind = type(technique)
            what = f"technique {quoted(technique.name)} ({kind.__module__}.{kind.__qualname__}), asked for its cases,"
            with calling(what, self.seconds):
                cells += _cases_of(technique, workloads, selection, modes)
        return cells

    def refusals(self, workload: Workload) -> Mapping[str, str]:
        """Returns the reasons of techniques that have no case with a workload, by technique."""
        return {t.name: reason for t in self.techniques.values() if (reason := _refusal(t, workload))}

    def check(self, selection: Selection) -> None:
        """Raises `UnknownNameError`, with the legal names and the nearest one, if a selected name does not exist."""
        names = (
            ("technique", selection.techniques, self.techniques),
            ("workload", selection.workloads, self.workloads),
        )
        for kind, words, legal in names:
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
) -> list[_Cell]:
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
    """Returns a short reason why a technique has no case with a workload; empty where it has one."""
    if workload.techniques and technique.name not in workload.techniques:
        return f"is none of the techniques that {workload.name} names"
    if not technique.accepts(workload):
        return technique.refusal(workload) or "is shown by a few other workloads of accelcheck"
    if not any(map(technique.covers, workload.modes)):
        modes = ", ".join(sorted(technique.modes))
        return f"has none of its modes, {', '.join(sorted(workload.modes))}: it has {modes}"
    if not workload.dtypes & set(technique.dtypes):
        return f"has none of its dtypes, {', '.join(sorted(workload.dtypes))}: it has {', '.join(technique.dtypes)}"
    return ""


def level(technique: Technique, workload: Workload, dtype: str, mode: Mode) -> int:
    """Returns the level of a case. A slow technique, a large workload and a further dtype each raise it by one."""
    further = int(dtype != technique.dtypes[0])
    usual = technique.level + workload.level - 1 - int(workload.name in technique.early)
    levels = workload.levels
    cost = levels.get(f"{technique.name}/{mode}", levels.get(technique.name, usual)) + further
    return min(max(LEVELS), max(min(LEVELS), cost))


def unknown_case(word: str, legal: Sequence[str]) -> Exception:
    """Makes the error for an unknown case id. It gives the nearest ids, because there are too many to list."""
    near = ", ".join(difflib.get_close_matches(word, legal, n=3, cutoff=0.3)) or "none"
    return UnknownNameError(f"unknown case {word!r}. Expected technique/workload/device/dtype/mode; nearest: {near}.")


def _matching(things: Mapping[str, T], patterns: Sequence[str]) -> list[T]:
    if not patterns:
        return list(things.values())
    matches = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]
    return [thing for name, thing in things.items() if any(match(name) for match in matches)]
