"""Counts false alarms and detected planted slowdowns in checks against a stored baseline.

    python benchmarks/baseline_checks.py                        # level 1: baseline, 20 checks, 20 with slowdowns: 1 h
    python benchmarks/baseline_checks.py --level 2 --planted 0  # a baseline and 20 checks of level 2: 3 h
    python benchmarks/baseline_checks.py --table                # only the table

A check repeats the measurement of `--accel-baseline=check`: three processes time each case that has a baseline, ten
more time the cases reported as slower, and the mean is compared with the stored one. Each check with slowdowns plants
1.5 times the smallest one that earlier checks stated as detectable, in another fifth of the cases
(planted_slowdown.py). Stored baselines, and checks in the folder of the same device and level, are not measured again.
All checks share one baseline, so they are not independent. The exit status is 1 where an unchanged case is reported, or
too few planted slowdowns are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import planted_slowdown

from accelcheck.core.case import Case, Mode
from accelcheck.devices import devices
from accelcheck.measure import timing_processes
from accelcheck.measure.baselines import Baselines, Place, settings
from accelcheck.measure.gate import Gate, Use
from accelcheck.measure.regression import CHECKED, STORED, Change, Sample, change

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Line = dict[str, Any]

DETECTABLE = 1.5
"""Planted slowdown, as a multiple of the smallest one stated as detectable."""
EVERY = 5
"""Cases per planted slowdown, in each check."""
NAMED = 0.95
"""Least share of planted slowdowns that must be named."""


def command(device: str, level: int) -> list[str]:
    """Arguments of pytest that select the timed cases."""
    return ["--pyargs", "accelcheck.suite.test_speed", f"--accel-device={device}", f"--accel-level={level}", "-q"]


def store(folder: Path, device: str, level: int) -> None:
    """Time the suite in ten processes and store the outcome."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *command(device, level), "-n", "0"),
            *("--accel-baseline=update", f"--accel-baselines={folder.resolve()}"),
        ],
        check=False,
    )
    if run.returncode:
        raise SystemExit(f"storing baselines ended with {run.returncode}")


def check(
    store: Baselines, place: Place, environment: Mapping[str, str], level: int, parts: Mapping[str, float]
) -> Line:
    """One check, with these slowdowns planted."""
    start = time.perf_counter()
    plugin = ["-p", "planted_slowdown"] if parts else []
    stored = {case: baseline.ratio for case, baseline in store.read(place).items()}
    told: list[Mapping[str, timing_processes.Timed]] = []
    with tempfile.TemporaryDirectory() as name:
        if parts:
            (Path(name) / "parts.json").write_text(json.dumps(parts), encoding="utf-8")
            os.environ[planted_slowdown.VARIABLE] = str(Path(name) / "parts.json")

        def measure(cases: Sequence[str], count: int) -> Mapping[str, timing_processes.Timed]:
            folder = Path(tempfile.mkdtemp(dir=name))
            words = [*plugin, *command(place.device, level), "-n", "0"]
            told.append(timing_processes.measure(words, cases, count, folder, Path.cwd(), lambda _: None))
            return told[-1]

        gate = Gate(
            Use.CHECK,
            store,
            {place.device: place},
            {place.device: environment},
            stored={place.device: store.cases(place)},
        )
        gate.time([_case(case, level) for case in stored], (CHECKED, STORED), measure)
    return {
        "parts": dict(parts),
        "stored": {case: asdict(sample) for case, sample in stored.items()},
        "ratios": {case: timing.ratios for case, timing in gate.timed.items()},
        "waited": {case: timing.waited for case, timing in gate.timed.items()},
        "first": {case: told[0][case].ratios for case in (told[1] if len(told) > 1 else ())},
        "seconds": time.perf_counter() - start,
    }


def changes(line: Line) -> dict[str, Change]:
    """Judges each case that enough of a check's processes measured."""

    def held(case: str, ratios: Sequence[float]) -> Change:
        return change(Sample(**line["stored"][case]), Sample.of(ratios), len(line["stored"]))

    judgement = {case: held(case, ratios) for case, ratios in line["ratios"].items() if len(ratios) > 1}
    for case, few in line["first"].items():  # they must name it before more are asked
        if case in judgement:
            smallest = max(judgement[case].smallest, held(case, few).smallest)
            judgement[case] = replace(judgement[case], smallest=smallest)
    return judgement


def _case(case: str, level: int) -> Case:
    technique, workload, device, dtype, mode = case.split("/")
    return Case(technique, workload, device, dtype, Mode(mode), level)


def planted(lines: Sequence[Line]) -> dict[str, float]:
    """The part to plant next, by case: from the median size stated by checks without planted slowdowns."""
    stated: dict[str, list[float]] = {}
    for line in lines:
        for case, held in changes(line).items() if not line["parts"] else ():
            stated.setdefault(case, []).append(held.smallest - 1)
    those = sorted(stated)[sum(bool(line["parts"]) for line in lines) % EVERY :: EVERY]
    return {case: DETECTABLE * statistics.median(stated[case]) for case in those}


def show(lines: Sequence[Line]) -> int:
    """Print the outcome; 1 where a false regression is named, a planted slowdown is missed, or a case is missing."""
    healthy = [changes(line) for line in lines if not line["parts"]]
    slowed = [(line["parts"], changes(line)) for line in lines if line["parts"]]
    false = [(case, held) for process in healthy for case, held in process.items() if held.regression]
    false += [(c, h) for parts, process in slowed for c, h in process.items() if h.regression and c not in parts]
    clean = sum(not any(held.regression for held in process.values()) for process in healthy)
    again = sum(len(line["first"]) for line in lines if not line["parts"])
    print(
        f"nothing planted: no regression in {clean} of {len(healthy)} checks; {again} times more processes were asked"
    )
    for case, held in false:
        print(f"  {case}: {held.factor:.4f} with a limit of {held.limit:.4f}")
    missing = [case for line in lines for case in line["stored"].keys() - changes(line).keys()]
    if missing:
        print(f"  {len(missing)} times too few processes measured a case: {', '.join(sorted(set(missing)))}")
    stated = sorted(held.smallest for process in healthy for held in process.values())
    if stated:
        cases = len({case for process in healthy for case in process})
        print(f"  {cases} cases; smallest slowdown found, as stated: {_spread([s - 1 for s in stated])}")
    asked, named = Counter[str](), Counter[str]()
    for parts, changed in slowed:
        for case in parts.keys() & changed.keys():
            asked[case] += 1
            named[case] += changed[case].regression
    missed = {case: f"{named[case]} of {count}" for case, count in asked.items() if named[case] < count}
    few = bool(asked) and named.total() < NAMED * asked.total()
    if asked:
        parts = [part for parts, _ in slowed for part in parts.values()]
        print(
            f"planted, {DETECTABLE} times that: {_spread(sorted(parts))}; named in {named.total()} of {asked.total()}, "
            f"always in {len(asked) - len(missed)} of {len(asked)} cases"
        )
        for case, count in sorted(missed.items()):
            print(f"  {case}: {count}")
    return 1 if false or few or missing else 0


def _spread(parts: Sequence[float]) -> str:
    return f"{parts[0]:.1%} to {parts[-1]:.1%}, half of them below {statistics.median(parts):.1%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=int, default=1, help="of the suite (default 1)")
    parser.add_argument("--checks", type=int, default=20, help="with nothing planted (default 20)")
    parser.add_argument("--planted", type=int, default=20, help="with slowdowns (default 20)")
    parser.add_argument("--device", default="cpu", help="default: cpu; slowdowns can be planted there alone")
    parser.add_argument("--folder", type=Path, default=Path("build/baseline-checks"), help="of results")
    parser.add_argument(
        "--baselines",
        type=Path,
        help="store of the baseline, of this level's cases alone (default: beside the results)",
    )
    parser.add_argument("--table", action="store_true", help="print what the folder holds, and measure nothing")
    given = parser.parse_args()
    folder = given.folder / f"{given.device}-level-{given.level}"
    path = folder / "checks.jsonl"
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if given.table:
        return show(lines)
    if given.planted and given.device != "cpu":
        parser.error(f"slowdowns can be planted on the cpu alone, not on {given.device}: add --planted 0")
    fingerprint = devices()[given.device].fingerprint()
    place, environment = Place.of(fingerprint), settings(fingerprint)
    held = Baselines(given.baselines or folder)
    if not held.read(place):
        store(held.root, given.device, given.level)
    folder.mkdir(parents=True, exist_ok=True)
    for wanted, slowed in ((given.checks, False), (given.planted, True)):
        for number in range(sum(bool(line["parts"]) is slowed for line in lines), wanted):
            line = check(held, place, environment, given.level, planted(lines) if slowed else {})
            lines.append(line)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
            named = [case for case, judgement in changes(line).items() if judgement.regression]
            what = "slowdowns planted" if slowed else "nothing planted"
            print(f"check {number + 1} of {wanted}, {what}: {len(named)} named in {line['seconds']:.0f} s", flush=True)
    return show(lines)


if __name__ == "__main__":
    sys.exit(main())
