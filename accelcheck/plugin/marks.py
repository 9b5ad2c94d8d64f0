"""Reads and checks the arguments and the place of the mark ``accel``. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from accelcheck.core.case import DTYPES, Mode
from accelcheck.core.registry import unknown
from accelcheck.expectations.limits import KINDS
from accelcheck.report.console import escaped_lines

KEYWORDS = ("techniques", "devices", "dtypes", "limits", "level")
"""Keyword arguments of the mark, and of each check."""
NAMES = ("techniques", "devices", "dtypes")


class WordsError(ValueError):
    """An argument of the mark or of a check is wrong; the message names it, its place, and the legal values."""


@dataclass(frozen=True)
class Words:
    """The techniques, devices, storage dtypes and highest level of a check, and its limits of time and memory."""

    techniques: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    level: int | None = None

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any]) -> Words:
        """The words in keyword arguments; raises `WordsError` where an argument is unknown or of another type."""
        __tracebackhide__ = True
        for key, value in given.items():
            if key not in KEYWORDS:
                raise WordsError(f"{where}: {unknown('argument', key, KEYWORDS)}")
            texts = isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(word, str) for word in value)
            if key in NAMES and not texts:
                raise WordsError(f"{where}: {key}: expected a list of texts, got {value!r}")
        limits = given.get("limits") or {}
        for argument, kind, legal in (("limits", "limit", KINDS), ("dtypes", "dtype", DTYPES)):
            for word in given.get(argument) or ():
                if word not in legal:
                    raise WordsError(f"{where}: {argument}: {unknown(kind, word, legal)}")
        names = {key: tuple(given[key]) for key in NAMES if given.get(key)}
        return cls(**names, limits=limits, level=given.get("level"))

    def over(self, other: Words) -> Words:
        """These words, with those of `other` for empty fields."""
        return replace(other, **{name: given for name, given in vars(self).items() if given not in (None, (), {})})


def check(items: Iterable[pytest.Item]) -> None:
    """Checks the marks of some tests; a usage error for a wrong word, or a test that takes no fixture that reads it."""
    marks = [(item, mark) for item in items for mark in item.own_markers if mark.name == "accel"]
    try:
        for item, mark in marks:
            _check(item, mark)
    except WordsError as error:
        raise pytest.UsageError(escaped_lines(f"accelcheck: {error}")) from error


def _check(item: pytest.Item, mark: pytest.Mark) -> None:
    where = f"{item.nodeid}: mark accel"
    for word in mark.args:
        if word not in set(Mode):
            raise WordsError(f"{where}: {unknown('mode', str(word), [str(mode) for mode in Mode])}")
    Words.of(where, mark.kwargs)
    if not {"accel", "accel_case"} & set(getattr(item, "fixturenames", ())):
        raise WordsError(
            f"{item.nodeid}: it has the mark accel and takes neither accel, to check a model of its own, nor "
            "accel_case, to run cases of accelcheck: nothing would be checked"
        )
