"""Reads untrusted journals by schema, within bounds, line by line. No torch.

Each reader raises `JournalError`, whose message names file, line and field, where the file cannot be read, exceeds a
bound, or a line is not JSON, of no known kind, of another schema, or has a field that is missing or out of range.
"""

import dataclasses
import functools
import operator
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from accelcheck.core import bounded
from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import OLDER, SCHEMA, JournalError, Record
from accelcheck.core.plain import LARGEST, text

T = TypeVar("T")
KINDS = ("run", "case", "resumed", "end")
"""Kinds of lines: the header of a run, a case, the mark of a run that went on, the end of a run."""
MOST_SHOWN = 60
"""Longest text of a wrong value in an error, in characters."""


@dataclass(frozen=True, slots=True)
class Section:
    """One run in a journal; a merged journal holds several, one after the other.

    Attributes:
        header: First line: schema, start, versions, selection, devices.
        records: Records of its cases, in the order in which they finished.
        end: Last line: counts and exit status; None where the run was cut off.
        cut: True when its last line was cut short, as a killed run leaves it.
        where: File and number of its first line, for errors.
    """

    header: Mapping[str, Any]
    records: tuple[Record, ...] = ()
    end: Mapping[str, Any] | None = None
    cut: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One whole line of a journal, without its end: number from 1, one of `KINDS`, bytes, and the place for errors.

    Attributes:
        outlined: The outline, where `lines` has read it already.
        schema: Version that the last header names.
    """

    number: int
    kind: str
    raw: bytes
    where: str
    outlined: Any = None
    schema: Any = SCHEMA


class _Kind(msgspec.Struct):
    kind: Any = None
    schema: Any = None


_KIND = msgspec.json.Decoder(_Kind)
_CASE = msgspec.json.Decoder(Record, strict=False)  # `inf` and `nan` are texts in JSON
_TABLE = msgspec.json.Decoder(dict[str, Any])


class _Cut(Exception):  # noqa: N818 - the end of reading, no error
    pass


def lines(path: bounded.Source, *, outlined: bool = False) -> Iterator[Line]:
    """The whole lines of a journal: each of a known kind, the first one a header. Cases are not read.

    With `outlined`, where `outline` is going to read each case, each line is parsed once.
    """
    try:
        yield from _lines(path, _outlines() if outlined else None)
    except _Cut:
        return


def sections(path: bounded.Source) -> Iterator[Section]:
    """The runs of a journal, one by one. A last line cut short is left out, and `Section.cut` says so."""
    header: Mapping[str, Any] | None = None
    records: list[Record] = []
    end: Mapping[str, Any] | None = None
    cut, where = False, ""
    remaining = _lines(path)
    while True:
        try:
            line = next(remaining, None)
        except _Cut:
            line, cut = None, True
        if line is None or line.kind == "run":
            if header is not None:
                yield Section(header, tuple(records), end, cut, where)
            if line is None:
                return
            header, records, end, where = table(line), [], None, line.where
        elif line.kind == "case":
            records.append(case(line))
        elif line.kind == "end":
            end = table(line)


def read(path: bounded.Source) -> tuple[dict[str, Any], list[Record]]:
    """The header and all case records of a journal of one run; both are empty where it was cut off in its header."""
    runs = list(sections(path))
    if len(runs) > 1:
        raise JournalError(f"{path}: expected the journal of one run, got a merged one of {len(runs)}")
    return (dict(runs[0].header), list(runs[0].records)) if runs else ({}, [])


def case(line: Line) -> Record:
    """The record of a line of the kind ``case``."""
    record = _decoded(_CASE, line.raw, line.where, "not a case record: ")
    if line.schema == OLDER and record.verdict is Verdict.FAIL:
        faults = tuple(Fault(FaultKind.OTHER, text_line) for text_line in record.reason.splitlines())
        return dataclasses.replace(record, reason="", faults=faults)
    return record


def outline(line: Line) -> tuple[str, Verdict]:
    """The case id and the verdict of a line of the kind ``case``, whose fields are all checked.

    It takes a third of the time of `case`, since it makes no records.
    """
    outlined = line.outlined or _decoded(_outlines(), line.raw, line.where, "not a case record: ")
    if not 0 <= outlined.compared <= LARGEST:
        case(line)  # raises the error for it
    of = outlined.case
    return f"{of.technique}/{of.workload}/{of.device}/{of.dtype}/{of.mode}", outlined.verdict


def table(line: Line) -> Mapping[str, Any]:
    """The fields of a line that is no case."""
    data = _decoded(_TABLE, line.raw, line.where)
    if line.kind == "run" and (schema := data.get("schema")) not in (SCHEMA, OLDER):
        got = text(repr(schema), MOST_SHOWN)
        raise JournalError(f"{line.where}: schema {got}; this accelcheck reads {OLDER} and {SCHEMA}")
    return data


@functools.cache
def _outlines() -> msgspec.json.Decoder[Any]:
    """A decoder of the fields of `Record`, of the same types, into plain structures that do not check themselves."""
    fields = [("kind", Any, None), ("schema", Any, None)]
    outline = msgspec.defstruct("Outline", fields, bases=(_plain(Record),), gc=False)
    return msgspec.json.Decoder(outline, strict=False)


def _plain(kind: Any) -> Any:
    """A type with msgspec's structures in place of dataclasses."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = []
        for field in dataclasses.fields(kind):
            absent: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
            default = {name: value for name, value in absent.items() if value is not dataclasses.MISSING}
            typed = (field.name, _plain(hints[field.name]))
            fields.append((*typed, msgspec.field(**default)) if default else typed)
        return msgspec.defstruct(getattr(kind, "__name__", "Plain"), fields, gc=False)
    arguments = tuple(part if part is Ellipsis else _plain(part) for part in get_args(kind))
    if not arguments:
        return kind
    if isinstance(kind, types.UnionType):
        return functools.reduce(operator.or_, arguments)
    return get_origin(kind)[arguments]


def _lines(path: bounded.Source, quick: msgspec.json.Decoder[Any] | None = None) -> Iterator[Line]:
    begun, schema = False, None
    try:
        for number, raw in bounded.lines(path):
            where = f"{path}:{number}"
            try:
                outlined = None if quick is None else _tried(quick, raw)
                fields = _decoded(_KIND, raw, where) if outlined is None else outlined
                kind = fields.kind
            except JournalError:
                if raw.endswith(b"\n"):
                    raise
                raise _Cut from None
            if not (isinstance(kind, str) and kind in (KINDS if begun else KINDS[:1])):
                legal = f"{', '.join(KINDS[:-1])} or {KINDS[-1]}" if begun else "run in the first line, the header"
                got = text(repr(kind), MOST_SHOWN)
                raise JournalError(f"{where}: field 'kind' is {got}; expected {legal}")
            begun = True
            if kind == "run":
                schema = fields.schema
            yield Line(number, kind, raw.rstrip(b"\n"), where, outlined if kind == "case" else None, schema)
    except bounded.UnreadableFileError as error:
        raise JournalError(f"the journal {error}") from error


def _tried(decoder: msgspec.json.Decoder[T], raw: bytes) -> T | None:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError):
        return None


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes, where: str, what: str = "") -> T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise JournalError(f"{where}: {what}{error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise JournalError(f"{where}: not JSON: {error}") from error
