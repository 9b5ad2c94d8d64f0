"""The totals of a run of the suite, from its journal: what is kept of a run whose journal is too large to store.

python benchmarks/level_summary.py journal.jsonl baselines/cpu/level2.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.core.journal_reading import read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.core.journal import Record


def summary(header: dict[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Cases by verdict, elements compared, seconds of all cases together, and what the run says of its machine."""
    return {
        "level": header["level"],
        "started": header["started"],
        "python": header["python"],
        "platform": header["platform"],
        "devices": {name: device.get("fingerprint") for name, device in header["devices"].items()},
        "verdicts": dict(sorted(Counter(str(record.verdict) for record in records).items())),
        "executed": sum(record.verdict.executed for record in records),
        "elements": sum(record.compared for record in records),
        "seconds": round(sum(sum(record.seconds.values()) for record in records)),
        "techniques": {
            name: dict(sorted(Counter(str(r.verdict) for r in records if r.case.technique == name).items()))
            for name in sorted({record.case.technique for record in records})
        },
    }


def main() -> None:
    """Read the journal and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path, help="what --accel-journal wrote")
    parser.add_argument("summary", type=Path, help="file to write")
    given = parser.parse_args()
    given.summary.write_text(json.dumps(summary(*read(given.journal)), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
