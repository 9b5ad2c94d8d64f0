"""Feeds every reader of untrusted files with mutated files, and counts the outcomes.

``python benchmarks/fuzz_readers.py --count 1000`` prints for each reader of `READERS` the files that it read or refused
with its own error, and the longest time of one file. The exit status is 1 where a reader raised anything else or took
longer than a second.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from accelcheck.expectations import chips, limits
from accelcheck.expectations.chips import ChipError
from accelcheck.expectations.ledger import Ledger, LedgerError
from accelcheck.expectations.limits import LimitError
from accelcheck.measure.baselines import Baseline, BaselineError, Baselines, Place
from accelcheck.measure.regression import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST_SECONDS = 1.0
"""Seconds that a reader may take for one file."""


class Draw(Protocol):
    """Draws whole numbers; `random.Random.randint` is one."""

    def __call__(self, low: int, high: int, /) -> int:
        """A number from `low` to `high`, both included."""


@dataclass(frozen=True)
class Reader:
    """Reader of files of a kind.

    Attributes:
        seed: A valid file.
        read: Function that reads a file with this content and may write into this empty folder.
        error: Class of its exceptions for an invalid file.
    """

    seed: bytes
    read: Callable[[bytes, Path], object]
    error: type[Exception]


def _written(content: bytes, folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _read_ledger(content: bytes, folder: Path) -> object:
    return Ledger.load((_written(content, folder, "ledger.toml"),))


def _read_limits(content: bytes, folder: Path) -> object:
    return limits.load((_written(content, folder, "limits.toml"),))


def _read_chip(content: bytes, folder: Path) -> object:
    _written(content, folder, "toy_1.toml")
    return chips.load("toy_1", folder)


_BASELINE = Baseline(
    "eager/mlp/cpu/float32/speed",
    "0123abcd",
    Place("cpu", "Some Chip 9000", 2, "2.13", "ATen AVX2"),
    Sample(-0.5, 0.01, 10),
    {"peak-memory": 1048576.0},
    {"SOME_VARIABLE": "1"},
)


def _read_baseline(content: bytes, folder: Path) -> object:
    place = folder / _BASELINE.place.folder
    place.mkdir(parents=True, exist_ok=True)
    _written(content, place, _BASELINE.name)
    return Baselines(folder).read(_BASELINE.place)


def _stored_baseline() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Baselines(Path(folder)).write(_BASELINE, replace=True)
        return (Path(folder) / _BASELINE.place.folder / _BASELINE.name).read_bytes()


_LEDGER = b"""schema = 3

[[entry]]
cases = ["export/straight-through/xla/float32/backward", "compile-*/mlp/*"]
verdict = "fail"
kind = "view"
path = "grad:*"
view = ["row", "column"]
draw = "nan[?]"
at-most = 12.5
reason = "the reason"
link = "https://example.org/1"
owner = "someone"
expires = 2999-01-01

[[entry]]
cases = ["toy/*"]
verdict = "error"
match = "^RuntimeError: no such kernel"
at-most = "RuntimeError"
reason = "another reason"
link = "https://example.org/2"
owner = "someone"
expires = 2999-01-01
"""
_LIMITS = b"""schema = 1

[[limit]]
cases = ["compile-*/*"]
speed-up-at-least = 1.2
memory-at-most = 2
first-call-at-most = 60.0
reason = "what it was"
"""
_CHIP = b"""schema = 1

[[statement]]
cases = ["float8-*"]
supported = false
since = "2.9"
fact = "no such instructions"
source = "https://example.org/chip"
"""

READERS: Mapping[str, Reader] = {
    "ledger": Reader(_LEDGER, _read_ledger, LedgerError),
    "limits": Reader(_LIMITS, _read_limits, LimitError),
    "chip statements": Reader(_CHIP, _read_chip, ChipError),
    "baseline": Reader(_stored_baseline(), _read_baseline, BaselineError),
}

PIECES: tuple[bytes, ...] = (
    *(b"", b"\x00", b"\xff", b"\x1b[2J", b"\r", b"\n", b'"', b"'''", b"\\", b"\\ud800", "\u202e".encode(), b"nan"),
    *(b"-inf", b"1e999", b"-0", b"true", b"null", b"NaN", b"9" * 5000, b"0x" + b"f" * 5000, b"1" * 400),
    *(b"[" * 100_000, b"{a=" * 20_000, b'{"a":' * 100_000, b"a." * 100_000 + b"a = 1\n"),
    *(b"[" + b"a." * 100_000 + b"a]\n", b"[[entry]]\n" * 1000, b"[[[", b"= ", b"2026-13-45", b"2026-01-01T00:00:00Z"),
    *(b"(a+)+$", b"((((((((a{900}){900}", b"(?=x)", b"x" * 100_000, b"# " * 10_000, b"schema = 1\n", b"schema = 2\n"),
    *(b"schema = 3\n", b'"schema": 1,'),
)
"""Pieces put into a file, on which other readers have broken."""
VALUES: tuple[bytes, ...] = (
    *(b'""', b'" "', b'"\\u001b[2J\\u202e"', b'"' + b"x" * 100_000 + b'"', b'"(a+)+$"', b'"(?=x)"', b'"("', b'"2.9"'),
    *(b'"' + b"9" * 5000 + b'.1"', b'"https://x"', b"0", b"-1", b"2", b"1e999", b"-1e-999", b"9" * 400, b"9" * 5000),
    *(b"0x" + b"f" * 5000, b"nan", b"NaN", b"inf", b"Infinity", b"true", b"null", b"[]", b"[[]]", b'["x"]', b"[1]"),
    *(b"{}", b"{a = 1}", b'{"a": 1}', b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    *(b"{a=" * 20_000 + b"1" + b"}" * 20_000, b"{" + b"a." * 100_000 + b"a = 1}", b"1999-01-01"),
    b"0001-01-01T00:00:00",
)
"""Replacements of a value."""
_VALUE = re.compile(rb"(?<=[=:] )[^\n]+?(?=,?\n)")
MOST_CHANGES = 4
"""Most changes of one file."""


def mutated(seed: bytes, draw: Draw) -> bytes:
    """Changes a file a few times: drops or doubles a part, changes a byte or a value, inserts one of `PIECES`."""
    content = seed
    for _ in range(draw(1, MOST_CHANGES)):
        values = [match.span() for match in _VALUE.finditer(content)]
        if values and draw(0, 1):
            start, end = values[draw(0, len(values) - 1)]
            content = content[:start] + VALUES[draw(0, len(VALUES) - 1)] + content[end:]
            continue
        start = draw(0, len(content))
        end = min(len(content), start + draw(0, 40))
        part = content[start:end]
        kind = draw(0, 3)
        if kind == 0:
            new = b""
        elif kind == 1:
            new = part * 2
        elif kind == 2:
            new = bytes([draw(0, 255)])
        else:
            new = PIECES[draw(0, len(PIECES) - 1)]
        content = content[:start] + new + content[end:]
    return content


def fed(reader: Reader, content: bytes) -> tuple[str, float]:
    """Outcome of one file (read, refused or raised), and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        try:
            reader.read(content, Path(folder))
        except reader.error:
            outcome = "refused"
        except Exception:  # noqa: BLE001 - that is what is looked for
            traceback.print_exc()
            outcome = "raised"
        else:
            outcome = "read"
        return outcome, time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="files for each reader (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default 0)")
    parser.add_argument("--reader", choices=sorted(READERS), action="append", help="only this one (repeatable)")
    given = parser.parse_args()
    bad = 0
    print(f"{'reader':<20}{'files':>8}{'read':>8}{'refused':>9}{'raised':>8}{'slowest':>10}")
    for name in given.reader or READERS:
        draw = random.Random(given.seed).randint
        outcomes, slowest = Counter[str](), 0.0
        for _ in range(given.count):
            outcome, seconds = fed(READERS[name], mutated(READERS[name].seed, draw))
            outcomes[outcome] += 1
            slowest = max(slowest, seconds)
        bad += outcomes["raised"] + (slowest > MOST_SECONDS)
        print(
            f"{name:<20}{given.count:>8}{outcomes['read']:>8}{outcomes['refused']:>9}"
            f"{outcomes['raised']:>8}{slowest:>8.2f} s"
        )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
