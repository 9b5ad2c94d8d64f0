"""Reads TOML files that people write: a list of tables with known fields. No torch.

An error names the file, the number of the entry, the field, what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelcheck.core import bounded, strangers
from accelcheck.core.bounded import UnreadableFileError
from accelcheck.core.plain import text
from accelcheck.core.registry import unknown
from accelcheck.core.strangers import StrangerError, quoted

LARGEST = bounded.MIB
"""Largest file in bytes; the largest of accelcheck's own has 26 kB."""
SCHEMA = "schema"
"""Field of a file with the version of its layout."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an entry: its legal values in words, for the error, and a function that is True for them."""

    expected: str
    legal: Callable[[Any], bool]
    required: bool = True


@dataclass(frozen=True, slots=True)
class TomlTable:
    """One table of a file; its fields are checked.

    Attributes:
        where: File and number, and the name where it has one.
        values: Values by field, without omitted fields.
        raises: Class of the file's errors.
        schema: Version of the file's layout; 0 where it has none.
    """

    where: str
    values: Mapping[str, Any]
    raises: type[ValueError]
    schema: int = 0

    def __getitem__(self, field: str) -> Any:
        return self.values[field]

    def wrong(self, field: str, what: str) -> ValueError:
        """The error for a wrong field: also for rules that a `Field` cannot express."""
        return self.raises(f"{self.where}: field {quoted(field, 80)}: {what}")

    def checked(self, fields: Mapping[str, Field]) -> TomlTable:
        """The entry, if its fields are legal; an error of the class `raises` where one is missing, unknown or wrong."""
        for name in self.values:
            if name not in fields:
                raise self.wrong(name, str(unknown("field", name, sorted(fields))))
        for name, field in fields.items():
            if name in self.values and not field.legal(self.values[name]):
                raise self.wrong(name, f"expected {field.expected}, got {quoted(self.values[name])}")
            if name not in self.values and field.required:
                raise self.wrong(name, f"missing; expected {field.expected}")
        return self


def read(
    path: Path,
    kind: str,
    fields: Mapping[str, Field],
    raises: type[ValueError],
    schema: int | tuple[int, ...] = (),
    older: str = "",
) -> list[TomlTable]:
    """The tables ``[[kind]]`` of a file that has no others; an error of the class `raises` for any other file.

    The field ``schema`` may have these versions of the layout; it is absent where there are none. For a file of an
    older one the error has the advice `older`.
    """
    try:
        data = strangers.toml(bounded.read(path, LARGEST))
    except UnreadableFileError as error:
        raise raises(str(error)) from error
    except StrangerError as error:
        raise raises(f"{path}: {error}") from error
    known = {kind: Field(f"a list of tables, [[{kind}]]", lambda value: isinstance(value, list), required=False)}
    versions = (schema,) if isinstance(schema, int) else schema
    if versions:
        legal = f"{' or '.join(map(str, versions))}, which this accelcheck reads" + (f" ({older})" if older else "")
        known = {SCHEMA: Field(legal, lambda value: type(value) is int and value in versions), **known}
    tables = []
    whole = TomlTable(str(path), data, raises).checked(known).values
    for number, raw in enumerate(whole.get(kind, []), start=1):
        name = raw.get("name") if isinstance(raw, dict) else None
        where = f"{path}: {kind} {number}" + (f" ({text(name, 80)})" if isinstance(name, str) else "")
        if not isinstance(raw, dict):
            raise raises(f"{where}: field {kind!r}: expected a table, got {quoted(raw)}")
        tables.append(TomlTable(where, raw, raises, whole.get(SCHEMA, 0)).checked(fields))
    return tables


def is_text(value: object) -> bool:
    """True for a text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def is_texts(value: object) -> bool:
    """True for a list of texts that are not blank, one at least."""
    return isinstance(value, list) and bool(value) and all(map(is_text, value))


def is_number(value: object, low: float, high: float) -> bool:
    """True for a number, no bool, within these bounds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
