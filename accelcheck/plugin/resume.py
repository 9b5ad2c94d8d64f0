"""Going on with a run that was cut off: what its journal holds, if the run that is beginning is the same. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelcheck.core.journal import SCHEMA, JournalError
from accelcheck.core.journal_reading import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from accelcheck.core.journal import Record

SAME = ("accelcheck", "python", "platform", "selection", "devices", "must_pass")
"""Fields of the header that two parts of a run have in common."""
MOST = 5
"""Differences that a refusal names."""


class ResumeError(JournalError):
    """A run cannot go on with a journal: it is that of another run; the message names what differs."""


def finished(path: Path, facts: Mapping[str, Any]) -> Sequence[Record]:
    """The records of a run that was cut off.

    Args:
        path: Of its journal.
        facts: What the header of the run that is beginning would hold.

    Raises:
        JournalError: The journal cannot be read.
        ResumeError: It is that of a run on another device, with other versions or another selection.
    """
    header, records = read(path)
    if header and header["schema"] != SCHEMA:
        raise ResumeError(
            f"cannot go on with {path}, which an older accelcheck has written: its records are of schema {header['schema']}, and "
            f"those of this one of {SCHEMA}; begin anew with --accel-journal"
        )
    differing = [line for name in SAME for line in _differing(name, header.get(name), facts[name])]
    if differing:
        more = [f"and {len(differing) - MOST} more"] if len(differing) > MOST else []
        raise ResumeError(
            f"cannot go on with {path}, which is of another run: {'; '.join([*differing[:MOST], *more])}; "
            "run with the same options on the same machine, or begin anew with --accel-journal"
        )
    return records


def _differing(name: str, was: Any, now: Any) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*was, *now]):
            yield from _differing(f"{name}.{key}", was.get(key), now.get(key))
    elif was != now:
        yield f"{name} was {was!r}, and is {now!r}"
