"""Reading journals, which may be a stranger's: by schema, within bounds, line by line. No torch."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from accelcheck.core import bounded
from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import OLDER, SCHEMA, JournalError, Record
from accelcheck.core.plain import LARGEST, text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


T = TypeVar("T")
KINDS = ("run", "case", "resumed", "end")
"""What a line may be: the header of a run, a case, the mark of a run that went on, the end of a run."""
MOST_SHOWN = 60
"""Characters that an error shows of a wrong value."""


@dataclass(frozen=True, slots=True)
class Section:
    """One run in a journal; a merged journal holds several, one after the other.

    Attributes:
        header: Its first line: schema, start, versions, selection, devices.
        records: Of its cases, in the order in which they finished.
        end: Its last line: counts and exit status; None where the run was cut off.
        cut: Whether its last line was cut short, as a killed run leaves it.
        where: File and number of its first line, for errors.
    """

    header: Mapping[str, Any]
    records: tuple[Record, ...] = ()
    end: Mapping[str, Any] | None = None
    cut: bool = False
    where: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One whole line of a journal.

    Attributes:
        number: From 1.
        kind: One of `KINDS`.
        raw: Its bytes, without the line end.
        where: File and number, for errors.
        outlined: What `outline` reads, where `lines` has read it already.
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


class _Cut(Exception):  # noqa: N818 - how reading ends, no error
    pass


def lines(path: bounded.Source, *, outlined: bool = False) -> Iterator[Line]:
    """The whole lines of a journal: each of a known kind, the first one a header. Cases are not read.

    Args:
        path: Of the journal.
        outlined: Whether `outline` is going to read each case: then both read a line once.

    Raises:
        JournalError: The file cannot be read, exceeds a bound, or a line is not JSON or of no known kind.
    """
    try:
        yield from _lines(path, _outlines() if outlined else None)
    except _Cut:
        return


def sections(path: bounded.Source) -> Iterator[Section]:
    """The runs of a journal, one by one.

    Raises:
        JournalError: The file cannot be read, exceeds a bound, or a line is not JSON, of another schema, or has a wrong field; the
            message names file, line and field. A last line that is cut short is left out, and `Section.cut` says so.
    """
    header: Mapping[str, Any] | None = None
    records: list[Record] = []
    end: Mapping[str, Any] | None = None
    cut, where = False, ""
    found = _lines(path)
    while True:
        try:
            line = next(found, None)
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
    """The header and all case records of a journal of one run; both are empty where the run was cut off in its header.

    Raises:
        JournalError: As `sections`; or the journal holds several runs.
    """
    found = list(sections(path))
    if len(found) > 1:
        raise JournalError(f"{path}: expected the journal of one run, got a merged one of {len(found)}")
    return (dict(found[0].header), list(found[0].records)) if found else ({}, [])


def case(line: Line) -> Record:
    """The record of a line of the kind ``case``.

    Raises:
        JournalError: A field is missing or has a value outside its range; the message names file, line and field.
    """
    record = _decoded(_CASE, line.raw, line.where, "not a case record: ")
    if line.schema == OLDER and record.verdict is Verdict.FAIL:
        faults = tuple(Fault(FaultKind.OTHER, said) for said in record.reason.splitlines())
        return dataclasses.replace(record, reason="", faults=faults)
    return record


def outline(line: Line) -> tuple[str, Verdict]:
    """The case id and the verdict of a line of the kind ``case``; all of its fields are checked, as `case` does, and none is kept.

    A third of the time of `case`: what is only checked needs no records.

    Raises:
        JournalError: As `case`.
    """
    found = line.outlined or _decoded(_outlines(), line.raw, line.where, "not a case record: ")
    if not 0 <= found.compared <= LARGEST:
        case(line)  # which raises what it says of it
    of = found.case
    return f"{of.technique}/{of.workload}/{of.device}/{of.dtype}/{of.mode}", found.verdict


def table(line: Line) -> Mapping[str, Any]:
    """The fields of a line of another kind, of the schema that this accelcheck reads where it is a header.

    Raises:
        JournalError: It is of another schema.
    """
    data = _decoded(_TABLE, line.raw, line.where)
    if line.kind == "run" and data.get("schema") not in (SCHEMA, OLDER):
        raise JournalError(
            f"{line.where}: schema {text(repr(data.get('schema')), MOST_SHOWN)}; this accelcheck reads {OLDER} and {SCHEMA}"
        )
    return data


@functools.cache
def _outlines() -> msgspec.json.Decoder[Any]:
    """A decoder of the fields of `Record`, of the same types, that makes plain structures instead of records that check themselves."""
    record = _plain(Record)
    return msgspec.json.Decoder(
        msgspec.defstruct("Outline", [("kind", Any, None), ("schema", Any, None)], bases=(record,), gc=False),
        strict=False,
    )


def _plain(kind: Any) -> Any:
    """A type with msgspec's structures in place of dataclasses."""
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = []
        for field in dataclasses.fields(kind):
            absent: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
            given: dict[str, Any] = {name: value for name, value in absent.items() if value is not dataclasses.MISSING}
            typed = (field.name, _plain(hints[field.name]))
            fields.append((*typed, msgspec.field(**given)) if given else typed)
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
                found = None if quick is None else _tried(quick, raw)
                said = _decoded(_KIND, raw, where) if found is None else found
                kind = said.kind
            except JournalError:
                if raw.endswith(b"\n"):
                    raise
                raise _Cut from None
            legal = ("run",) if not begun else KINDS
            if not (isinstance(kind, str) and kind in legal):
                got = f"field 'kind' is {text(repr(kind), MOST_SHOWN)}"
                raise JournalError(
                    f"{where}: {got}; expected {', '.join(KINDS[:-1])} or {KINDS[-1]}"
                    if begun
                    else f"{where}: {got}; expected run in the first line, the header"
                )
            begun = True
            if kind == "run":
                schema = said.schema
            yield Line(number, kind, raw.rstrip(b"\n"), where, found if kind == "case" else None, schema)
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
