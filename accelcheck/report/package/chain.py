"""The hash chain of a journal: which of its lines were altered, removed or put in.

h_0 is 32 zero bytes, and h_i = SHA-256(h_(i-1) || line_i), the line without its line end. A link has h_i, the SHA-256 of the line alone, and the case that
the line is about, so that a line that is gone can be named.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from accelcheck.core import bounded
from accelcheck.core.plain import text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START = bytes(32)
MOST_SAID = 20
"""Lines that are named."""
LONGEST = 200
"""Characters of what a link says of its line."""
Link = tuple[str, str, str]
"""Hash of the chain, hash of the line, case or kind of the line."""
_LINK = msgspec.json.Decoder(Link)


class _Case(msgspec.Struct):
    technique: str = ""
    workload: str = ""
    device: str = ""
    dtype: str = ""
    mode: str = ""


class _Line(msgspec.Struct):
    kind: str = ""
    case: _Case | None = None


_LINE = msgspec.json.Decoder(_Line)


def links(journal: bounded.Source) -> Iterator[Link]:
    """The chain of a journal.

    Raises:
        UnreadableFileError: It cannot be read, or exceeds a bound.
    """
    last = START
    for _, raw in bounded.lines(journal):
        line = raw.removesuffix(b"\n")
        last = hashlib.sha256(last + line).digest()
        yield last.hex(), hashlib.sha256(line).hexdigest(), _about(line)


def encode(link: Link) -> bytes:
    """A line of the member that holds a chain."""
    return (json.dumps(link) + "\n").encode("ascii")


def differences(journal: bounded.Source, chain: bounded.Source) -> tuple[list[str], int, str]:
    """What a journal has that its chain has not, and the other way round; nothing where they agree.

    Returns:
        A text for each line that differs; the number of lines of the journal; the last hash of its own chain.

    Raises:
        UnreadableFileError: One of them cannot be read, or exceeds a bound.
    """
    stored = (raw for _, raw in bounded.lines(chain))
    count, head, same = 0, "", True
    for link, raw in zip_longest(links(journal), stored):
        count, head = (count, head) if link is None else (count + 1, link[0])
        same = same and raw is not None and link is not None and encode(link) == raw
    return [] if same else _differences(journal, chain), count, head


def _differences(journal: bounded.Source, chain: bounded.Source) -> list[str]:
    found, known = list(links(journal)), list[Link]()
    for number, raw in bounded.lines(chain):
        try:
            known.append(_LINK.decode(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return [f"{chain}:{number}: not a link of a chain"]
    said = _compared(known, found)
    if not said:
        number = next(n for n, pair in enumerate(zip_longest(known, found), start=1) if pair[0] != pair[1])
        return [f"{chain}:{number}: the first link that was altered"]
    more = len(said) - MOST_SAID
    return [f"{journal}:{line}" for line in said[:MOST_SAID]] + ([f"{journal}: {more} more lines"] if more > 0 else [])


def _compared(known: Sequence[Link], found: Sequence[Link]) -> list[str]:
    """What became of each line, in order: ``NUMBER: CASE: what``."""
    gone, new = _without(known, found), _without(found, known)
    new_by_name: dict[str, list[int]] = {}
    for number in reversed(new):
        new_by_name.setdefault(found[number][2], []).append(number)
    said: list[tuple[int, str]] = []
    for number in gone:
        name = known[number][2]
        if same := new_by_name.get(name):
            said.append((same.pop(), f"{name}: altered"))
        else:
            said.append((number, f"{name}: removed"))
    said += [(number, f"{name}: put in") for name, numbers in new_by_name.items() for number in numbers]
    if not said and [link[1] for link in known] != [link[1] for link in found]:
        moved = next(n for n, (was, now) in enumerate(zip(known, found, strict=True)) if was[1] != now[1])
        said.append((moved, f"{found[moved][2]}: the first line that is out of order"))
    return [f"{number + 1}: {text(what, LONGEST)}" for number, what in sorted(said)]


def _without(links: Sequence[Link], others: Sequence[Link]) -> list[int]:
    """The lines of which the others have fewer, by index."""
    left = Counter(link[1] for link in others)
    found = []
    for index, link in enumerate(links):
        if left[link[1]]:
            left[link[1]] -= 1
        else:
            found.append(index)
    return found


def _about(line: bytes) -> str:
    try:
        found: Any = _LINE.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return "a line that is no record"
    of = found.case
    name = found.kind if of is None else f"{of.technique}/{of.workload}/{of.device}/{of.dtype}/{of.mode}"
    return text(name, LONGEST)
