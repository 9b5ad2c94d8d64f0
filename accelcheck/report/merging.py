"""Merges journals into one: shards of a run, and runs of several machines. No torch.

A merged journal has several headers. Lines are checked and copied, and no record is kept. The runs are sorted by their
devices, starts and contents, so that the same journals give the same bytes in any order.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from accelcheck.core import bounded, shards
from accelcheck.core.bounded import MOST_FILE
from accelcheck.core.case import Verdict
from accelcheck.core.files import replacing
from accelcheck.core.journal import JournalError
from accelcheck.core.journal_reading import Line, lines, outline, table
from accelcheck.core.plain import text
from accelcheck.report.run import BAD_FIRST, UsedLedger, identity, read_header

MOST_SECTIONS = 20_000
"""Most runs that are merged; more would be an untrusted file of headers."""
MOST_SAID = 20
"""Most cases with two verdicts, and most differing fields, that are named."""
MOST_SHOWN = 80
"""Most characters shown of a differing value."""
CHUNK = 1 << 20
"""Bytes copied at once."""


class MergeError(JournalError):
    """Journals cannot be merged, or the output cannot be written."""


class DifferentDevicesError(MergeError):
    """Journals are not all of one device with the same versions, as asked for; the message names the differences."""


@dataclass
class Part:
    """A run in a journal.

    Attributes:
        line, start: Number of its header's line, and the byte at which it begins.
        header: Fields of its header that the merge needs.
        identities: Identity of each device, by name: see `accelcheck.report.run.identity`.
        said: Facts about each device, by field, of which some differ where two identities do.
        verdicts: Worst verdict of each case.
        bytes, lines, digest: Size, number and SHA-256 of its whole lines.
        ended: True where the run came to its end.
        cut: True where its last line is cut short.
        twice: Cases with two verdicts, with the better one.
    """

    source: Path
    line: int
    start: int
    header: Mapping[str, Any]
    identities: Mapping[str, tuple[str, ...]]
    said: Mapping[str, Mapping[str, str]]
    ledgers: tuple[UsedLedger, ...] = ()
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    bytes: int = 0
    lines: int = 0
    digest: str = ""
    ended: bool = False
    cut: bool = False
    twice: dict[str, Verdict] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The journal, with the line where the run begins inside of one."""
        return str(self.source) if self.line == 1 else f"{self.source}:{self.line}"

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key of runs."""
        return (sorted(self.identities), str(self.header.get("started", "")), self.digest)


@dataclass(frozen=True, slots=True)
class Merged:
    """The runs in the order in which they are written, remarks, and the number of cases, each once for each device."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    cases: int


def merge(paths: Sequence[Path], output: Path, *, same_device: bool = False) -> Merged:
    """Write the runs of several journals, merged ones too, into one; whole or not at all.

    A `JournalError` where one cannot be read, or is none, names file, line and field; a `DifferentDevicesError` where
    `same_device` is given, and they are not all of one device, with the same versions; a `MergeError` where `output` is
    one of the journals, or cannot be written.
    """
    for path in paths:
        if output.exists() and path.exists() and output.samefile(path):
            raise MergeError(f"{output} is one of the journals that are merged: give -o another file")
    parts, notes = _once(sorted(_gathered(paths), key=lambda part: part.order))
    differing = _differing(parts)
    if same_device and (differing := [*_devices(parts), *differing]):
        raise DifferentDevicesError("the journals are not all of the same device: " + "; ".join(differing))
    notes += [f"kept apart: {line}" for line in differing]
    notes += [
        f"{part.name}: the run was cut off" + (", in the middle of a line" if part.cut else "")
        for part in parts
        if not part.ended
    ]
    notes += [*_ledgers(parts), *_incomplete(parts)]
    twice, cases = _judged_twice(parts)
    notes += twice
    if (size := sum(part.bytes for part in parts)) > MOST_FILE:
        raise MergeError(f"{output}: would have {size:,} bytes, and a journal has at most {MOST_FILE:,}")
    try:
        with replacing(output) as file:
            for part in parts:
                _copy(part, file)
    except OSError as error:
        raise MergeError(f"{output} cannot be written: {error.strerror or error}") from error
    return Merged(tuple(parts), tuple(notes), cases)


def _gathered(paths: Sequence[Path]) -> list[Part]:
    parts: list[Part] = []
    for path in paths:
        before = len(parts)
        for part in _parts(path):
            parts.append(part)
            if len(parts) > MOST_SECTIONS:
                raise MergeError(f"{path}: expected at most {MOST_SECTIONS:,} runs in all, got more")
        if len(parts) == before:
            raise JournalError(f"{path}: expected a journal, got a file without a whole line")
    return parts


def _parts(path: Path) -> Iterator[Part]:
    """Read the runs of a journal, and check all of their lines."""
    part: Part | None = None
    content = hashlib.sha256()
    position = 0
    for line in lines(path, outlined=True):
        if line.kind == "run":
            if part is not None:
                part.digest = content.hexdigest()
                yield part
            part, content = _begun(path, line, position), hashlib.sha256()
        assert part is not None  # `lines` gives a header first
        if line.kind == "case":
            _judged(part, *outline(line))
        elif line.kind == "end":
            table(line)
            part.ended = True
        length = len(line.raw) + 1
        part.bytes += length
        part.lines += 1
        position += length
        content.update(line.raw)
        content.update(b"\n")
    if part is not None:
        part.digest = content.hexdigest()
        # A whole last line may lack its line end.
        part.cut = path.stat().st_size > position
        yield part


def _begun(path: Path, line: Line, position: int) -> Part:
    fields = table(line)
    header, fingerprints = read_header(line.where, fields)
    identities = {name: identity(name, fingerprint, header) for name, fingerprint in fingerprints.items()}
    versions = {name: str(fields.get(name, "")) for name in ("accelcheck", "python")}
    facts = {
        name: versions
        | _flat("fingerprint", asdict(fingerprint) if fingerprint is not None else {})
        | _flat("must_pass", msgspec.to_builtins(header.must_pass.get(name)) or {})
        for name, fingerprint in fingerprints.items()
    }
    kept = {name: fields.get(name) for name in ("started", "selection")}
    ledgers = tuple(sorted(header.ledgers, key=lambda used: (used.name, used.sha256)))
    return Part(path, line.number, position, kept, identities, facts, ledgers)


def _judged(part: Part, case: str, verdict: Verdict) -> None:
    other = part.verdicts.setdefault(case, verdict)
    if other is not verdict:
        better, worse = sorted((other, verdict), key=BAD_FIRST.index, reverse=True)
        part.twice[case], part.verdicts[case] = better, worse


def _once(parts: Sequence[Part]) -> tuple[list[Part], list[str]]:
    """Leave out runs that are there twice, or are the beginning of another one; the rest, and a line for each."""
    kept: dict[str, Part] = {}
    notes: list[str] = []
    for part in parts:
        other = kept.setdefault(part.digest, part)
        if other is not part:
            notes.append(f"{part.name}: taken once: the same run as {other.name}")
    heads: dict[str, list[Part]] = defaultdict(list)
    for part in kept.values():
        heads[repr((part.order[:2], part.said))].append(part)
    for group in heads.values():
        for part, other in _continued(group):
            notes.append(f"{part.name}: left out: it is the beginning of the run in {other.name}")
            kept.pop(part.digest)
    return list(kept.values()), notes


def _continued(group: Sequence[Part]) -> Iterator[tuple[Part, Part]]:
    """Pair each run that is the beginning of another one with the first such one; reads each run once at most."""
    cut = {part.digest: part for part in group if not part.ended}
    lengths = {part.bytes for part in cut.values()}
    origins: dict[str, Part] = {}
    for other in group if cut and len(group) > 1 else ():
        for digest in _digests(other, lengths):
            origins.setdefault(digest, other)
    yield from ((part, origins[digest]) for digest, part in cut.items() if digest in origins)


def _digests(part: Part, lengths: Collection[int]) -> Iterator[str]:
    """Digests of those beginnings of a run that end with a line and have one of these lengths in bytes."""
    content, position = hashlib.sha256(), 0
    try:
        for _, raw in bounded.lines(bounded.Piece(part.source, part.start, part.bytes, part.name)):
            content.update(raw)
            position += len(raw)
            if position in lengths and position < part.bytes:
                yield content.hexdigest()
    except bounded.UnreadableFileError as error:
        raise MergeError(f"the journal {error}") from error


def _devices(parts: Sequence[Part]) -> list[str]:
    others = [part for part in parts if set(part.identities) != set(parts[0].identities)]
    named = [f"{', '.join(sorted(part.identities)) or 'none'} in {part.name}" for part in (parts[0], *others[:1])]
    return [f"devices: {', '.join(named)}"] if others else []


def _differing(parts: Sequence[Part]) -> list[str]:
    """Describe the fields that differ, with their values, between runs of devices of one name."""
    by_device: dict[str, dict[tuple[str, ...], Part]] = defaultdict(dict)
    for part in parts:
        for name, key in part.identities.items():
            by_device[name].setdefault(key, part)
    lines = []
    for name, firsts in by_device.items():
        first, *others = firsts.values()
        for other in others:
            was, now = first.said[name], other.said[name]
            fields = [key for key in dict.fromkeys([*was, *now]) if was.get(key) != now.get(key)]
            shown = [f"{key} {_value(was, key)} and {_value(now, key)}" for key in fields[:MOST_SAID]]
            shown += [f"{len(fields) - MOST_SAID} more fields"] if len(fields) > MOST_SAID else []
            lines.append(f"{text(name, MOST_SHOWN)} in {first.name} and in {other.name}: {'; '.join(shown)}")
    return lines


def _value(fields: Mapping[str, str], key: str) -> str:
    return text(repr(fields[key]), MOST_SHOWN) if key in fields else "nothing"


def _flat(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {name: str(value)}
    return {inner: leaf for key, part in value.items() for inner, leaf in _flat(f"{name}.{key}", part).items()}


def _ledgers(parts: Sequence[Part]) -> Iterator[str]:
    """Name the runs of one device that were judged by different ledgers."""
    first: dict[tuple[str, ...], Part] = {}
    for part in parts:
        for name, key in part.identities.items():
            other = first.setdefault(key, part)
            if other.ledgers != part.ledgers:
                differing = sorted({used.name for used in {*other.ledgers} ^ {*part.ledgers}})
                shown = text(", ".join(differing), MOST_SHOWN)
                yield f"{text(name, MOST_SHOWN)}: {other.name} and {part.name} were judged by other ledgers: {shown}"


def _incomplete(parts: Sequence[Part]) -> Iterator[str]:
    """Name the missing shards, device by device."""
    by_devices: dict[tuple[tuple[str, ...], ...], list[Mapping[str, Any]]] = defaultdict(list)
    for part in parts:
        selection = part.header.get("selection")
        if isinstance(selection, dict):
            by_devices[tuple(sorted(part.identities.values()))].append(selection)
    for selections in by_devices.values():
        yield from shards.absent(selections)


def _judged_twice(parts: Sequence[Part]) -> tuple[list[str], int]:
    """Lines about cases with two verdicts, and the number of cases."""
    seen: dict[tuple[tuple[str, ...], str], tuple[Part, Verdict]] = {}
    lines: list[str] = []
    for part in parts:
        lines += [
            f"{name}: {better} and {part.verdicts[name]} in {part.name}; the worse of those that ran counts"
            for name, better in part.twice.items()
        ]
        for name, verdict in part.verdicts.items():
            device = name.split("/", 3)[2]
            owner = part.identities.get(device, (device,))
            first, other = seen.setdefault((owner, name), (part, verdict))
            if other is not verdict:
                both = f"{other} in {first.name}, {verdict} in {part.name}"
                lines.append(f"{name}: {both}; the worse of those that ran counts")
    more = len(lines) - MOST_SAID
    rest = [f"{more} more cases with two verdicts; the worse of those that ran count"] if more > 0 else []
    return lines[:MOST_SAID] + rest, len(seen)


def _copy(part: Part, file: IO[bytes]) -> None:
    content, left = hashlib.sha256(), part.bytes
    with part.source.open("rb") as source:
        source.seek(part.start)
        while left and (chunk := source.read(min(left, CHUNK)) or b"\n" * (left == 1)):  # it may lack its line end
            content.update(chunk)
            left -= file.write(chunk)
    if content.hexdigest() != part.digest:
        raise MergeError(f"{part.name}: changed while it was merged: merge again when the run has ended")
