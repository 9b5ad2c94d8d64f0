"""The hash chain of a journal, which shows the lines that were altered, removed or put in.

h_0 is 32 zero bytes, and h_i = SHA-256(h_(i-1) || line_i), the line without its line end. A link has h_i, the SHA-256
of the line alone, and the line's case, so that a removed line can be named.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec

from accelcheck.core import bounded
from accelcheck.core.plain import text

START = bytes(32)
MOST_SAID = 20
"""Most lines that are named."""
LONGEST = 200
"""Most characters of a line's case or kind."""
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
    """Compute the chain of a journal; an `UnreadableFileError` where it cannot be read, or exceeds a bound."""
    last = START
    for _, raw in bounded.lines(journal):
        line = raw.removesuffix(b"\n")
        last = hashlib.sha256(last + line).digest()
        yield last.hex(), hashlib.sha256(line).hexdigest(), _about(line)


def encode(link: Link) -> bytes:
    """Encode a link as a line of the chain's member."""
    return (json.dumps(link) + "\n").encode("ascii")


def differences(journal: bounded.Source, chain: bounded.Source) -> tuple[list[str], int, str]:
    """Compare a journal with its chain: a text for each line that differs, the number of lines, the last hash.

    The last two are the journal's own. An `UnreadableFileError` where one of them cannot be read, or exceeds a bound.
    """
    stored = (raw for _, raw in bounded.lines(chain))
    count, head, same = 0, "", True
    for link, raw in zip_longest(links(journal), stored):
        count, head = (count, head) if link is None else (count + 1, link[0])
        same = same and raw is not None and link is not None and encode(link) == raw
    return [] if same else _differences(journal, chain), count, head


def _differences(journal: bounded.Source, chain: bounded.Source) -> list[str]:
    actual, known = list(links(journal)), list[Link]()
    for number, raw in bounded.lines(chain):
        try:
            known.append(_LINK.decode(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return [f"{chain}:{number}: not a link of a chain"]
    changes = _compared(known, actual)
    if not changes:
        number = next(n for n, (was, now) in enumerate(zip_longest(known, actual), start=1) if was != now)
        return [f"{chain}:{number}: the first link that was altered"]
    more = len(changes) - MOST_SAID
    rest = [f"{journal}: {more} more lines"] if more > 0 else []
    return [f"{journal}:{change}" for change in changes[:MOST_SAID]] + rest


def _compared(known: Sequence[Link], actual: Sequence[Link]) -> list[str]:
    """Name the changed lines, in order: ``NUMBER: CASE: CHANGE``."""
    new: dict[str, list[int]] = defaultdict(list)
    for number in reversed(_without(actual, known)):
        new[actual[number][2]].append(number)
    changes: list[tuple[int, str]] = []
    for number in _without(known, actual):
        name = known[number][2]
        changes.append((new[name].pop(), f"{name}: altered") if new[name] else (number, f"{name}: removed"))
    changes += [(number, f"{name}: put in") for name, numbers in new.items() for number in numbers]
    moved = (n for n, (was, now) in enumerate(zip(known, actual, strict=False)) if was[1] != now[1])
    if not changes and (first := next(moved, None)) is not None:
        changes.append((first, f"{actual[first][2]}: the first line that is out of order"))
    return [f"{number + 1}: {text(change, LONGEST)}" for number, change in sorted(changes)]


def _without(links: Sequence[Link], others: Sequence[Link]) -> list[int]:
    """Indices of lines that the others lack, or have less often."""
    left = Counter(link[1] for link in others)
    indices = []
    for index, (_, line, _) in enumerate(links):
        left[line] -= 1
        if left[line] < 0:
            indices.append(index)
    return indices


def _about(line: bytes) -> str:
    try:
        record = _LINE.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
        return "a line that is no record"
    case = record.case
    name = record.kind if case is None else "/".join(msgspec.structs.astuple(case))
    return text(name, LONGEST)
