"""Traces the life of one case: every function of accelcheck that runs, by process, in the order of its first call.

    python benchmarks/case_trace.py                       # counts of eager/mlp/cpu/float32/forward
    python benchmarks/case_trace.py --calls CASE          # each function too

Runs the suite with this case alone, and counts in three parts:

* before: pytest's process until the case begins: options, devices, registry, collection;
* case: until pytest has its report, in pytest's process and the forks that begin meanwhile;
* after: the rest of pytest's process: summary.

Calls during an import (a module's body, decorators, registration) are counted separately, as imports. Only functions
written in files of accelcheck count: comprehensions and lambdas as part of theirs, generated code such as a dataclass's
`__init__` not at all. Processes started as separate programs, such as device probes, are not followed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelcheck

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType, FrameType

ROOT = Path(accelcheck.__file__).parent
CASE = "eager/mlp/cpu/float32/forward"
BEFORE, DURING, AFTER, IMPORTS = "before", "case", "after", "imports"
PYTEST, CASES, REFERENCES, FORKS = "pytest", "cases", "references", "forks"
"""Processes: pytest's own, those of cases and of references, and those that only fork these."""
_BEGINS, _ENDS = "Controller.pytest_runtest_logstart", "Controller.pytest_runtest_logfinish"


@dataclass(frozen=True)
class Call:
    """The first call of a function in a process and a part of the case's life.

    Attributes:
        process: One of `PYTEST`, `CASES`, `REFERENCES`, `FORKS`.
        part: One of `BEFORE`, `DURING`, `AFTER`, `IMPORTS`.
        file: Its file, below the package's folder.
        function: Its qualified name.
        at: Nanoseconds of a clock that all processes share.
    """

    process: str
    part: str
    file: str
    function: str
    at: int


class _Tracer:
    """Writes each function's first call to a file of the process, at once: forks end without a cleanup."""

    def __init__(self, folder: Path, case: str) -> None:
        self._folder = folder
        self._named = f"[{case}]"
        self._prefix = f"{ROOT}{os.sep}"
        self._part = BEFORE
        self._importing = 0
        self._process = 0
        self._out = -1
        self._seen: set[tuple[str, CodeType]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self._importing += {"call": 1, "return": -1}.get(event, 0)
        if not code.co_filename.startswith(self._prefix):
            return
        if event == "call" and not code.co_name.startswith("<"):
            if code.co_qualname == _BEGINS and frame.f_locals["nodeid"].endswith(self._named):
                self._part = DURING
            self._write(code)
        elif self._part == DURING and event == "return" and code.co_qualname == _ENDS:
            self._part = AFTER

    def _write(self, code: CodeType) -> None:
        if self._process != os.getpid():  # a fork: functions are new there
            self._process = os.getpid()
            self._seen = set()
            self._out = os.open(self._folder / f"{self._process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        part = IMPORTS if self._importing else self._part
        if (part, code) not in self._seen:
            self._seen.add((part, code))
            line = [part, code.co_filename.removeprefix(self._prefix), code.co_qualname, time.monotonic_ns()]
            os.write(self._out, json.dumps(line).encode() + b"\n")


def traced(case: str) -> list[Call]:
    """The calls of a case, those of pytest's process first.

    Raises:
        RuntimeError: The case does not pass.
    """
    with tempfile.TemporaryDirectory(prefix="accelcheck-trace-") as name:
        folder = Path(name)
        words = [sys.executable, __file__, "--into", name, case]
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "ACCELCHECK_"))}
        environ |= {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(words, capture_output=True, text=True, check=False, env=environ, cwd=name)
        if ran.returncode:
            raise RuntimeError(f"{case}: expected a case that passes, got:\n{ran.stdout}{ran.stderr}")
        files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
        calls = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in files}
        named = {path: _process([function for _, _, function, _ in lines]) for path, lines in calls.items()}
        order = [PYTEST, CASES, REFERENCES, FORKS]
        return [
            Call(named[path], *line)
            for path in sorted(files, key=lambda path: order.index(named[path]))
            for line in calls[path]
        ]


def _process(functions: Sequence[str]) -> str:
    if "_compute" not in functions:
        return FORKS if "_keep" in functions else PYTEST
    return CASES if "recorded" in functions or "_record" in functions else REFERENCES


def _trace(folder: Path, case: str) -> int:
    """Run the case in this process, traced."""
    tracer = _Tracer(folder, case)
    sys.setprofile(tracer)
    import pytest

    technique, workload, device, dtype, _ = case.split("/")
    chosen = {"device": device, "technique": technique, "workload": workload, "dtype": dtype, "case": case, "level": 4}
    words = [f"--accel-{name}={value}" for name, value in chosen.items()]
    return int(
        pytest.main(
            [
                "--pyargs",
                "accelcheck.suite",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--accel-journal={folder / 'journal'}",
                *words,
            ]
        )
    )


def table(calls: Sequence[Call]) -> Iterator[str]:
    """A line for each process and part: files and functions."""
    for part in (BEFORE, DURING, AFTER, IMPORTS):
        own = [call for call in calls if call.part == part]
        for process in dict.fromkeys(call.process for call in own):
            yield _counted(part, process, [call for call in own if call.process == process])
        if part == DURING:
            yield _counted(part, "all", own)
    yield _counted("all but imports", "all", [call for call in calls if call.part != IMPORTS])


def _counted(part: str, process: str, calls: Sequence[Call]) -> str:
    functions = {(call.file, call.function) for call in calls}
    return f"{part:16} {process:11} {len({call.file for call in calls}):4} files {len(functions):5} functions"


def main(words: list[str]) -> int:
    """Print counts, and calls where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default=CASE, help=f"id of a case that passes here (default: {CASE})")
    parser.add_argument("--calls", action="store_true", help="print each function")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.into is not None:
        return _trace(given.into, given.case)
    calls = traced(given.case)
    if given.calls:
        print("\n".join(f"{call.process:11} {call.part:8} {call.file}:{call.function}" for call in calls))
    print("\n".join(table(calls)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
