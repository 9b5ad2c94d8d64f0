"""PyTorch's Compute Platform Quality Levels: the tables, their items, and people's answers. No torch."""

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from accelcheck.core import toml
from accelcheck.core.errors import InputError
from accelcheck.core.registry import unknown

FOLDER = Path(__file__).parent / "quality_levels"
SCHEMA = 1
STABLE, UNSTABLE = 99, 86
"""Points of the levels; `STABLE` also needs every item of priority P0."""
MOST_TEXT = 500
"""Most characters of a text in a file of answers."""
_LINK = re.compile(r"https://[^\s<>()\[\]\"'`|\\]{1,500}")


class QualityError(InputError):
    """A file of items or answers cannot be read or is malformed; the message names file, entry and field."""


class Rule(StrEnum):
    """The rule by which cases give an item's points; items.toml explains each."""

    ALL = "all"
    FAST = "fast"
    EACH = "each"
    FLAKY = "flaky"


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item of a table, described by `what` in one sentence.

    Attributes:
        points: Most points of the item.
        cases, rule: Globs of case ids, and their rule, for an item that is measured.
        question: Question for a person; empty for a measured item.
        steps: Least fractions, with the points of each; empty where the answer is yes or no.
        contradicted: Cases that take the points away where they ran and did not pass.
    """

    name: str
    table: str
    points: int
    priority: Literal["P0", "P1", "P2"]
    what: str
    cases: tuple[str, ...] = ()
    rule: Rule | None = None
    question: str = ""
    steps: tuple[tuple[float, int], ...] = ()
    contradicted: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        """True for an item that a stable platform must have."""
        return self.priority == "P0"


class ItemTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table: its most points, whatever its items add up to, and the reason where that is another number."""

    name: str
    title: str
    points: int
    items: tuple[Item, ...] = ()
    note: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: Literal[1]
    item: tuple[Item, ...] = ()
    table: tuple[ItemTable, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a person or team to an item, with a link to the evidence, for one device, or for all if empty."""

    item: str
    yes: bool
    link: str
    by: str
    date: dt.date
    fraction: float | None = None
    device: str = ""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value.strip()) <= MOST_TEXT


_ANSWER = {
    "item": toml.Field("the id of an item", toml.is_text),
    "answer": toml.Field("true or false", lambda value: isinstance(value, bool)),
    "link": toml.Field(
        "a URL that begins with https:// and has no spaces, quotes or brackets",
        lambda value: isinstance(value, str) and bool(_LINK.fullmatch(value)),
    ),
    "by": toml.Field(f"who answers, in at most {MOST_TEXT} characters", _is_text),
    "date": toml.Field("a date such as 2026-11-30, without quotes", lambda value: type(value) is dt.date),
    "fraction": toml.Field("a number from 0 to 1", lambda value: toml.is_number(value, 0, 1), required=False),
    "device": toml.Field("the name of a device", _is_text, required=False),
}


def tables(folder: Path = FOLDER) -> tuple[ItemTable, ...]:
    """Read the tables, in their order; a `QualityError` where a file is malformed."""
    items: dict[str, list[Item]] = {}
    for item in _own(folder / "items.toml").item:
        if not (bool(item.rule) == bool(item.cases) != bool(item.question)):
            raise QualityError(f"items.toml: {item.name}: expected either `cases` and `rule`, or `question`")
        items.setdefault(item.table, []).append(item)
    own_tables = _own(folder / "tables.toml").table
    return tuple(msgspec.structs.replace(table, items=tuple(items.pop(table.name))) for table in own_tables)


def _own(path: Path) -> _File:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError) as error:
        raise QualityError(f"{path}: {error}") from error


def answers(path: Path, known: Sequence[ItemTable]) -> tuple[Answer, ...]:
    """Read answers; a `QualityError` where the file is malformed, names an unknown or measured item, or one twice."""
    items = {item.name: item for table in known for item in table.items}
    by_device: dict[tuple[str, str], Answer] = {}
    for entry in toml.read(path, "answer", _ANSWER, QualityError, SCHEMA):
        name = entry["item"]
        if name not in items:
            asked = [item.name for item in items.values() if item.question]
            raise entry.wrong("item", str(unknown("item", name, asked)))
        item = items[name]
        if not item.question:
            raise entry.wrong("item", f"{name} is measured: its points come from the cases {', '.join(item.cases)}")
        fraction = entry.values.get("fraction")
        if item.steps and entry["answer"] and fraction is None:
            raise entry.wrong("fraction", f"missing; {name} asks for a number from 0 to 1")
        if not item.steps and fraction is not None:
            raise entry.wrong("fraction", f"{name} is answered by true or false alone")
        fraction = None if fraction is None else float(fraction)
        device = entry.values.get("device", "")
        answer = Answer(name, entry["answer"], entry["link"], entry["by"], entry["date"], fraction, device)
        if (name, device) in by_device:
            raise entry.wrong("item", f"{name} is answered twice")
        by_device[name, device] = answer
    return tuple(by_device.values())


def answer_to(item: Item, device: str, given: Sequence[Answer]) -> Answer | None:
    """Find the answer for a device; one that names the device comes before one for all."""
    fitting: Mapping[str, Answer] = {answer.device: answer for answer in given if answer.item == item.name}
    return fitting.get(device, fitting.get(""))


def template(known: Sequence[ItemTable]) -> list[str]:
    """Make a file of answers with every question, each answered by false."""
    lines = [
        "# Answers to what accelcheck cannot measure, for `accelcheck assess JOURNAL... --answers FILE`.",
        "# An answer is a claim: the table shows it as one, with its link. Remove what you do not answer.",
        '# `device = "cuda"` restricts an answer to one device.',
        f"schema = {SCHEMA}",
    ]
    for table in known:
        asked = [item for item in table.items if item.question]
        if asked:
            lines += ["", f"# {table.title}"]
        for item in asked:
            points = f"{item.points} points" + (", needed by a stable platform" if item.required else "")
            steps = ", ".join(f"{points} from {fraction:.0%} on" for fraction, points in item.steps)
            lines += [
                "",
                f"# {item.question} ({points}{': ' + steps if steps else ''})",
                "[[answer]]",
                f'item = "{item.name}"',
                "answer = false",
                *(["fraction = 0.0"] if item.steps else []),
                'link = "https://example.org/evidence"',
                'by = "name or team"',
                f"date = {dt.datetime.now(tz=dt.UTC).date()}",
            ]
    return lines
