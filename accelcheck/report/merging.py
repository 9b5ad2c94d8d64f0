"""Several journals as one: shards of a run, and runs of several machines. Lines are checked and copied, and no record is kept. No torch.

A merged journal is a journal with several headers. The runs stand in the order of their devices, starts and contents, whatever the order in
which they were given, so that the same journals give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from accelcheck.core import bounded, shards
from accelcheck.core.bounded import MOST_FILE
from accelcheck.core.files import replacing
from accelcheck.core.journal import JournalError
from accelcheck.core.journal_reading import lines, outline, table
from accelcheck.core.plain import text
from accelcheck.report.run import BAD_FIRST, identity, read_header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import IO

    from accelcheck.core.case import Verdict
    from accelcheck.core.journal_reading import Line
    from accelcheck.report.run import UsedLedger

MOST_SECTIONS = 20_000
"""Runs that are merged; more would be a stranger's file of headers."""
MOST_SAID = 20
"""Cases with two verdicts, and fields that differ, that are named."""
MOST_SHOWN = 80
"""Characters that are shown of a value that differs."""
CHUNK = 1 << 20
"""Bytes that are copied at once."""


class MergeError(JournalError):
    """Journals are not merged, because of what they are or of the file that they would go to."""


class DifferentDevicesError(MergeError):
    """They are not all of one device with the same versions, and were to be; the message names what differs."""


@dataclass
class Part:
    """A run in a journal.

    Attributes:
        source: The journal.
        line: Number of its header.
        start: Byte at which it begins.
        header: Its fields.
        identities: What identifies each of its devices, by name: see `accelcheck.report.run.identity`.
        said: What its header says of each of its devices, by field: what differs where two identities do.
        ledgers: By which it was judged, sorted by name.
        verdicts: The worst one of each case.
        bytes: From its header to its last whole line.
        lines: How many.
        digest: SHA-256 of its lines.
        ended: Whether the run came to its end.
        cut: Whether its last line is cut short.
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
    """Cases that it holds with two verdicts, with the better one."""

    @property
    def name(self) -> str:
        """The journal, with the line where the run begins inside of one."""
        return str(self.source) if self.line == 1 else f"{self.source}:{self.line}"

    @property
    def order(self) -> tuple[object, ...]:
        """What runs are sorted by."""
        return (sorted(self.identities), str(self.header.get("started", "")), self.digest)


@dataclass(frozen=True, slots=True)
class Merged:
    """What was merged.

    Attributes:
        parts: The runs, in the order in which they are written.
        notes: What a reader should know: taken once, kept apart, cut off, shards that are missing, cases with two verdicts.
        cases: Number of cases with a verdict, each once for each device.
    """

    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    cases: int


def merge(paths: Sequence[Path], output: Path, *, same_device: bool = False) -> Merged:
    """Write the runs of several journals into one.

    Args:
        paths: Of the journals; merged ones too.
        output: The journal to write; it is written whole or not at all.
        same_device: Refuse runs that are not all of one device, with the same versions.

    Raises:
        JournalError: A journal cannot be read, or is not one; the message names file, line and field.
        DifferentDevicesError: The runs differ although `same_device`.
        MergeError: `output` is one of the journals, or cannot be written.
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
    said, cases = _judged_twice(parts)
    notes += said
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
    found: list[Part] = []
    for path in paths:
        before = len(found)
        for part in _parts(path):
            found.append(part)
            if len(found) > MOST_SECTIONS:
                raise MergeError(f"{path}: expected at most {MOST_SECTIONS:,} runs in all, got more")
        if len(found) == before:
            raise JournalError(f"{path}: expected a journal, got a file without a whole line")
    return found


def _parts(path: Path) -> Iterator[Part]:
    """The runs of a journal, with all of their lines checked."""
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
        # A last line that is whole may lack its line end.
        part.cut = path.stat().st_size > position
        yield part


def _begun(path: Path, line: Line, position: int) -> Part:
    fields = table(line)
    header, fingerprints = read_header(line.where, fields)
    identities = {name: identity(name, found, header) for name, found in fingerprints.items()}
    versions = {name: str(fields.get(name, "")) for name in ("accelcheck", "python")}
    said = {
        name: versions
        | _flat("fingerprint", asdict(found) if found is not None else {})
        | _flat("must_pass", msgspec.to_builtins(header.must_pass.get(name)) or {})
        for name, found in fingerprints.items()
    }
    kept = {name: fields.get(name) for name in ("started", "selection")}
    ledgers = tuple(sorted(header.ledgers, key=lambda used: (used.name, used.sha256)))
    return Part(path, line.number, position, kept, identities, said, ledgers)


def _judged(part: Part, case: str, verdict: Verdict) -> None:
    other = part.verdicts.setdefault(case, verdict)
    if other is not verdict:
        better, worse = sorted((other, verdict), key=BAD_FIRST.index, reverse=True)
        part.twice[case], part.verdicts[case] = better, worse


def _once(parts: Sequence[Part]) -> tuple[list[Part], list[str]]:
    """The runs without those that are already in, wholly or as the beginning of one that went on; and a line for each left out."""
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
    """Each run that is the beginning of another one, with the first such one. Each run is read once at most, however many there are."""
    cut = {part.digest: part for part in group if not part.ended}
    lengths = {part.bytes for part in cut.values()}
    found: dict[str, Part] = {}
    for other in group if cut and len(group) > 1 else ():
        for digest in _digests(other, lengths):
            found.setdefault(digest, other)
    yield from ((part, found[digest]) for digest, part in cut.items() if digest in found)


def _digests(part: Part, lengths: Collection[int]) -> Iterator[str]:
    """Of the beginnings of a run that end with a line and have one of these lengths in bytes; not of the whole."""
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
    first = parts[0]
    other = next((part for part in parts if set(part.identities) != set(first.identities)), None)
    if other is None:
        return []
    named = [f"{', '.join(sorted(part.identities)) or 'none'} in {part.name}" for part in (first, other)]
    return [f"devices: {', '.join(named)}"]


def _differing(parts: Sequence[Part]) -> list[str]:
    """For each device of which there are several: each field that differs, with the values."""
    found: dict[str, dict[tuple[str, ...], Part]] = defaultdict(dict)
    for part in parts:
        for name, key in part.identities.items():
            found[name].setdefault(key, part)
    said = []
    for name, (first, *others) in ((name, [*of.values()]) for name, of in found.items()):
        for other in others:
            was, now = first.said[name], other.said[name]
            fields = [key for key in dict.fromkeys([*was, *now]) if was.get(key) != now.get(key)]
            shown = [f"{key} {_value(was, key)} and {_value(now, key)}" for key in fields[:MOST_SAID]]
            shown += [f"{len(fields) - MOST_SAID} more fields"] if len(fields) > MOST_SAID else []
            said.append(f"{text(name, MOST_SHOWN)} in {first.name} and in {other.name}: {'; '.join(shown)}")
    return said


def _value(fields: Mapping[str, str], key: str) -> str:
    return text(repr(fields[key]), MOST_SHOWN) if key in fields else "nothing"


def _flat(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {name: str(value)}
    return {inner: found for key, part in value.items() for inner, found in _flat(f"{name}.{key}", part).items()}


def _owners(part: Part) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each case of a run, with what identifies its device."""
    for name in part.verdicts:
        device = name.split("/", 3)[2]
        yield name, part.identities.get(device, (device,))


def _ledgers(parts: Sequence[Part]) -> Iterator[str]:
    """Runs of one device that were judged by different ledgers: what one expects to fail, the other does not."""
    first: dict[tuple[str, ...], Part] = {}
    for part in parts:
        for name, key in part.identities.items():
            other = first.setdefault(key, part)
            if other.ledgers != part.ledgers:
                differing = sorted({used.name for used in {*other.ledgers} ^ {*part.ledgers}})
                shown = text(", ".join(differing), MOST_SHOWN)
                yield f"{text(name, MOST_SHOWN)}: {other.name} and {part.name} were judged by other ledgers: {shown}"


def _incomplete(parts: Sequence[Part]) -> Iterator[str]:
    """The shards that are missing, device by device."""
    found: dict[tuple[tuple[str, ...], ...], list[Mapping[str, Any]]] = defaultdict(list)
    for part in parts:
        selection = part.header.get("selection")
        if isinstance(selection, dict):
            found[tuple(sorted(part.identities.values()))].append(selection)
    for selections in found.values():
        yield from shards.absent(selections)


def _judged_twice(parts: Sequence[Part]) -> tuple[list[str], int]:
    """A line for each case with two verdicts, and the number of cases."""
    seen: dict[tuple[tuple[str, ...], str], tuple[Part, Verdict]] = {}
    said: list[str] = []
    for part in parts:
        said += [
            f"{name}: {better} and {part.verdicts[name]} in {part.name}; the worse of those that ran counts"
            for name, better in part.twice.items()
        ]
        for name, owner in _owners(part):
            verdict = part.verdicts[name]
            first, other = seen.setdefault((owner, name), (part, verdict))
            if other is not verdict:
                said.append(
                    f"{name}: {other} in {first.name}, {verdict} in {part.name}; the worse of those that ran counts"
                )
    more = len(said) - MOST_SAID
    rest = [f"{more} more cases with two verdicts; the worse of those that ran count"] if more > 0 else []
    return said[:MOST_SAID] + rest, len(seen)


def _copy(part: Part, file: IO[bytes]) -> None:
    content = hashlib.sha256()
    for chunk in _chunks(part, part.bytes):
        content.update(chunk)
        file.write(chunk)
    if content.hexdigest() != part.digest:
        raise MergeError(f"{part.name}: changed while it was merged: merge again when the run has ended")


def _chunks(part: Part, most: int) -> Iterator[bytes]:
    """The first bytes of a run; one line end more than the file has where its last line lacks it."""
    with part.source.open("rb") as file:
        file.seek(part.start)
        while most and (chunk := file.read(min(most, CHUNK))):
            most -= len(chunk)
            yield chunk
    if most == 1:
        yield b"\n"
