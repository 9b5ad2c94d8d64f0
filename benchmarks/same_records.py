"""Compares two journals of one selection: verdict, figures, evidence and compared elements of each case must be equal.

Ignores times, memory and the wording of reasons. Exits with 1 where a case differs or is in one journal alone.

    python benchmarks/same_records.py BEFORE.jsonl AFTER.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.core.journal_reading import read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accelcheck.core.journal import Record

SHOWN = 40
"""Most differences printed; all are counted."""


def facts(record: Record) -> dict[str, Any]:
    """Every field of a record that a second run on the same machine repeats, by name; figures by path and view."""
    told: dict[str, Any] = {"verdict": str(record.verdict), "compared": record.compared}
    told["eager_excess"] = record.eager_excess
    told |= {f"evidence {entry.claim}": (entry.observed, entry.engaged) for entry in record.evidence}
    told |= {
        f"figure {figure.path} {figure.view}": (figure.measured, figure.allowed, figure.where, figure.gates)
        for figure in record.figures
    }
    return told


def differences(before: dict[str, Record], after: dict[str, Record]) -> Iterator[tuple[str, str, str]]:
    """The case, the name of a field, and both values, for everything that differs."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield name, "case", f"only in the {'second' if name in after else 'first'} journal"
            continue
        first, second = facts(before[name]), facts(after[name])
        for key in sorted(first.keys() | second.keys()):
            # NaN differs from itself, its text does not.
            if repr(first.get(key)) != repr(second.get(key)):
                yield name, key, f"{first.get(key)!r} -> {second.get(key)!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    given = parser.parse_args()
    before, after = ({record.case.id: record for record in read(path)[1]} for path in (given.before, given.after))
    different = list(differences(before, after))
    for name, key, values in different[:SHOWN]:
        print(f"{name}: {key}: {values}")
    if len(different) > SHOWN:
        print(f"({len(different) - SHOWN} more)")
    kinds = Counter(key.partition(" ")[0] for _, key, _ in different)
    cases = len({name for name, _, _ in different})
    figures = sum(len(record.figures) for record in after.values())
    print(
        f"{len(before)} and {len(after)} cases, {figures} figures: {len(different)} differences in {cases} cases",
        end="",
    )
    print(f" ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))})" if kinds else "")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
