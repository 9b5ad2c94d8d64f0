"""Runs ``accelcheck check`` on the twelve models of ``examples/models``, and prints a table of verdicts and seconds.

    pip install transformers                                          # the source of two models; no weights
    python benchmarks/check_models.py                                 # an hour on two cores
    python benchmarks/check_models.py --device=xla --model=unet -- --no-speed
    python benchmarks/check_models.py --json=baselines/cpu/check_models.json -- --no-speed  # half an hour

The words after ``--`` are options of ``accelcheck check``. A cell is a technique in a mode. Undecided cells are those where
rounding alone decides the result. The exit status is 1 where a model got no answer: nothing ran, or eager is not right.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from accelcheck.core.journal import ErrorCode
from accelcheck.core.journal_reading import read

MODELS = Path(__file__).parents[1] / "examples" / "models"


def checked(name: str, device: str, more: list[str]) -> dict[str, Any]:
    """Checks a model; returns seconds, verdicts by kind, wrong and undecided cells, and recommendations."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accelcheck-models-") as folder:
        journal = Path(folder) / "journal.jsonl"
        words = ["check", f"{MODELS / name}.py:make", f"--device={device}", "--json", f"--journal={journal}", *more]
        ended = subprocess.run(
            [sys.executable, "-m", "accelcheck", *words], capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
        if not journal.is_file():
            raise SystemExit(f"{name}: no case ran (exit status {ended.returncode})\n{ended.stderr[-2000:]}")
        _, records = read(journal)
    recommended = json.loads(ended.stdout)["recommended"].get(device, {})
    counts: Counter[str] = Counter()
    notes: dict[str, str] = {}
    for record in records:
        kind = str(record.code) if record.code == ErrorCode.UNDECIDED else str(record.verdict)
        counts[kind] += 1
        if not record.verdict.green:
            notes[f"{record.case.technique}/{record.case.mode}"] = f"{kind}: {next(iter(record.why.splitlines()), '')}"
    eager = {f"eager/{mode}" for mode in ("forward", "backward", "train")}
    answered = counts["pass"] > 0 and not any(note.startswith("fail") for cell, note in notes.items() if cell in eager)
    return {
        "seconds": round(seconds),
        "verdicts": dict(sorted(counts.items())),
        "notes": notes,
        "recommended": recommended,
        "answered": answered,
    }


def fastest(advice: str) -> str:
    """Returns technique and speed-up of a recommendation, `eager` if none is faster, or `-` if none was timed."""
    if known := re.search(r"use (\S+)\. It is right, ([\d.]+) times", advice):
        return "{} {}x".format(*known.groups())
    return "eager" if "stay with eager" in advice else "-"


def main() -> int:
    names = sorted(path.stem for path in MODELS.glob("*.py"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", choices=names, help="repeatable (default: all)")
    parser.add_argument("--device", default="cpu", help="default: cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="result; models that it has are kept")
    parser.add_argument("more", nargs="*", metavar="OPTION", help="options of accelcheck check, after --")
    given = parser.parse_args()
    silent = True
    print("| Model | Right | Wrong | Undecided | Not for this device | Inference | Training | Seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for name in given.model or names:
        facts = checked(name, given.device, given.more)
        verdicts = facts["verdicts"]
        absent = verdicts.get("unsupported", 0) + verdicts.get("unavailable", 0)
        wrong = sum(verdicts.values()) - absent - verdicts.get("pass", 0) - verdicts.get("undecided", 0)
        best = [fastest(facts["recommended"].get(use, "")) for use in ("inference", "training")]
        cells = [name, verdicts.get("pass", 0), wrong, verdicts.get("undecided", 0), absent, *best, facts["seconds"]]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        for cell, note in facts["notes"].items():
            print(f"  {name} {cell}: {note}", file=sys.stderr, flush=True)
        silent = silent and facts["answered"]
        if given.json is not None:
            kept = json.loads(given.json.read_text(encoding="utf-8")) if given.json.is_file() else {"models": {}}
            kept |= {"device": given.device, "torch": torch.__version__}
            kept["models"][name] = facts
            given.json.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return int(not silent)


if __name__ == "__main__":
    sys.exit(main())
