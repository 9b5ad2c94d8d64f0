"""Measures time and memory of `accelcheck merge` for 200 journals of 2,000 records; exits with 1 above the limits.

    python benchmarks/merge_speed.py [--journals 200] [--records 2000] [--folder FOLDER]

Each journal is a shard with records of a stored journal, in their own sizes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS, GIB = 10.0, 1.0
"""Limits, in seconds and GiB."""
STORED = Path(__file__).parent.parent / "baselines" / "cpu" / "level1.jsonl"


def write(folder: Path, journals: int, records: int) -> list[Path]:
    """Write the journals of one device's shards: each case is in one of them."""
    header, *stored = STORED.read_text(encoding="utf-8").splitlines()
    cases = [record for line in stored if (record := json.loads(line))["kind"] == "case"]
    paths = []
    for number in range(1, journals + 1):
        path = folder / f"{number}.jsonl"
        selection = {"devices": ["cpu"], "shard": {"number": number, "of": journals}}
        with path.open("w", encoding="utf-8") as file:
            file.write(
                json.dumps({**json.loads(header), "selection": selection}, sort_keys=True, separators=(",", ":")) + "\n"
            )
            for index in range(records):
                record = cases[index % len(cases)]
                case = {**record["case"], "workload": f"workload-{number}-{index}"}
                file.write(json.dumps({**record, "case": case}, sort_keys=True, separators=(",", ":")) + "\n")
            file.write(json.dumps({"kind": "end", "exit": 0}) + "\n")
        paths.append(path)
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--journals", type=int, default=200)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where the journals are written, 800 MB (default: a temporary one)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="accelcheck-merge-", dir=given.folder) as name:
        paths = write(Path(name), given.journals, given.records)
        size = sum(path.stat().st_size for path in paths)
        output = Path(name) / "merged.jsonl"
        started = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "accelcheck.cli", "merge", *map(str, paths), "-o", str(output)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        seconds = time.monotonic() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        whole = output.stat().st_size == size
    gib = used.ru_maxrss / 2**20
    print(
        f"{given.journals} journals of {given.records:,} records, {size / given.journals / given.records:,.0f} B each: "
        f"{seconds:.1f} s (at most {SECONDS:g}), of which {used.ru_utime + used.ru_stime:.1f} s of CPU time; "
        f"{gib:.2f} GiB (at most {GIB:g})"
    )
    return int(seconds > SECONDS or gib > GIB or not whole)


if __name__ == "__main__":
    sys.exit(main())
