"""Measures the cost of an HTML report of many cases: seconds, bytes, and the browser's first paint.

Each of 20,000 synthetic records is a stored one under another workload and device, its figures times a random factor,
so that no two are the same. One in 40 fails.

``python benchmarks/report_speed.py`` exits with 1 where the report takes more than 10 s of CPU time (of its one
thread), 8 MiB, or 2 s to the first paint. Without chromium or selenium (dependency group ``browser``) it says that the
paint is not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STORED = (
    "cpu/level1.jsonl",
    "cpu/level1-speed.jsonl",
    "cpu/level2-speed.jsonl",
    "xla/level1.jsonl",
    "xla/level1-speed.jsonl",
)
DEVICES = ("cpu", "cuda", "rocm", "xla", "tpu")
MOST_SECONDS = 10.0
MOST_BYTES = 8 << 20
MOST_PAINT = 2.0
FAILING = 40
"""Cases per failing case."""


def journals(folder: Path, count: int) -> list[Path]:
    """Write journals of so many cases together, one a device."""
    stored = [
        json.loads(line) for name in STORED for line in (ROOT / "baselines" / name).read_text("ascii").splitlines()
    ]
    header = next(line for line in stored if line["kind"] == "run")
    records = [line for line in stored if line["kind"] == "case"]
    chance = random.Random(0)
    paths = []
    each = -(-count // len(DEVICES))
    for place, device in enumerate(DEVICES):
        number = min(each, count - place * each)
        fingerprint = {
            **next(iter(header["devices"].values()))["fingerprint"],
            "device": device,
            "chip": f"Chip {place}",
        }
        lines = [{**header, "level": 3, "devices": {device: {"capability": "ok", "fingerprint": fingerprint}}}]
        seen = Counter[str]()
        for at in range(number):
            record = records[at % len(records)]
            key = record["case"]["id"].replace("/xla/", "/cpu/")  # the same case of two devices, and of two journals
            seen[key] += 1
            lines.append(_varied(record, device, seen[key], chance))
        lines.append({"kind": "end", "exit": 0, "verdicts": {}})
        path = folder / f"{device}.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "ascii")
        paths.append(path)
    return paths


def _varied(record: dict[str, Any], device: str, copy: int, chance: random.Random) -> dict[str, Any]:
    case = {**record["case"], "device": device, "workload": f"{record['case']['workload']}-{copy}"}
    case["id"] = "/".join(str(case[name]) for name in ("technique", "workload", "device", "dtype", "mode"))
    figures = [
        {**figure, **{name: float(figure[name]) * chance.uniform(0.5, 1.5) for name in ("measured", "allowed")}}
        for figure in record["figures"]
    ]
    changes = {
        **record,
        "case": case,
        "figures": figures,
        "seconds": {phase: spent * chance.uniform(0.5, 1.5) for phase, spent in record["seconds"].items()},
        "measurements": [
            {**measurement, **{name: float(measurement[name]) * chance.uniform(0.9, 1.1)
                               for name in ("value", "low", "high") if measurement[name] is not None}}
            for measurement in record["measurements"]
        ],
        "times": [spent * chance.uniform(0.9, 1.1) for spent in record["times"]],
    }  # fmt: skip
    if record["verdict"] == "pass" and figures and chance.randrange(FAILING) == 0:
        worst = {**figures[0], "measured": 3.7 * figures[0]["allowed"] + 1e-6}
        fault = {
            "kind": "view",
            "place": worst["where"],
            **{name: worst[name] for name in ("path", "view", "measured", "allowed")},
        }
        changes |= {"verdict": "fail", "faults": [fault], "figures": [worst, *figures[1:]]}
    return changes


def paint(path: Path) -> float | str:
    """Seconds to the browser's first contentful paint of a file; or why it was not measured."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        return "chromium and chromium-driver are not installed"
    try:
        from selenium import webdriver
    except ModuleNotFoundError:
        return "selenium is not installed"
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(word)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as shown:
        shown.get(path.as_uri())
        query = "return performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)"
        for _ in range(100):
            if milliseconds := shown.execute_script(query):
                return float(milliseconds[0]) / 1e3
            time.sleep(0.1)
    return "the browser said nothing of a first paint"


def main() -> int:
    """Write the report as a user would, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the report")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = journals(folder, given.cases)
        report = given.keep or folder / "report.html"
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "accelcheck.cli", "report", *map(str, paths), "-o", str(report.resolve())],
            check=True,
            cwd=ROOT,
        )
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        size = report.stat().st_size
        painted = paint(report.resolve())
    print(
        f"{given.cases:,} cases: {seconds:.1f} s of CPU time (at most {MOST_SECONDS:.0f}), {wall:.1f} s by the clock, "
        f"{size / (1 << 20):.2f} MiB (at most {MOST_BYTES >> 20})"
    )
    print(
        f"first paint: not measured: {painted}"
        if isinstance(painted, str)
        else f"first paint: {painted:.2f} s (at most {MOST_PAINT:.0f})"
    )
    late = not isinstance(painted, str) and painted > MOST_PAINT
    return int(seconds > MOST_SECONDS or size > MOST_BYTES or late)


if __name__ == "__main__":
    sys.exit(main())
