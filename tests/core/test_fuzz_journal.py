"""Whatever is in a file, reading and merging journals works or raises a JournalError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from accelcheck.core.journal import SCHEMA, JournalError
from accelcheck.core.journal_reading import read
from accelcheck.report.merging import merge
from accelcheck.report.run import load

STORED = Path(__file__).parents[2] / "baselines" / "cpu" / "level1.jsonl"
LINES = STORED.read_bytes().splitlines()[:4]
NUMBERS = st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, True, None])
VALUES = st.recursive(
    NUMBERS | st.text(max_size=20) | st.sampled_from(["inf", "nan", "\x1b[2J", "\ud800", "pass", "9" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FUZZ = settings(
    derandomize=True, deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def survives(folder: Path, content: bytes) -> None:
    path = folder / "a.jsonl"
    path.write_bytes(content)
    output = folder / "merged.jsonl"
    output.unlink(missing_ok=True)
    lines = []
    for act in (lambda: read(path), lambda: load([path]), lambda: merge([path, STORED], output)):
        try:
            act()
        except JournalError as error:
            lines.append(str(error))
        else:
            lines.append("")
    # What can be read can be merged, and what cannot is not written.
    assert bool(lines[1]) == bool(lines[2]), lines
    assert output.exists() is not bool(lines[2])
    assert all("\n" not in line[:200] or str(path) in line for line in lines)


@FUZZ
@given(st.binary(max_size=300))
@example(b"")
@example(b"\n")
@example(b"[" * 100_000)
@example(b'{"kind":' * 50_000 + b"\n")
@example(b'{"kind": "run", "schema": 2, "devices": ' + b'{"a":' * 2_000)
@example(b"\xff\xfe\n")
@example(b'{"kind": "run", "schema": ' + b"9" * 5_000 + b"}\n")
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    survives(tmp_path, content)


@FUZZ
@given(st.data())
def test_any_mutation_of_a_journal(tmp_path: Path, data: Any) -> None:
    content = bytearray(b"\n".join(LINES) + b"\n")
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1))
        stop = min(len(content), start + data.draw(st.integers(0, 40)))
        content[start:stop] = data.draw(st.binary(max_size=8) | st.just(bytes(content[start:stop]) * 2))
    survives(tmp_path, bytes(content))


@pytest.mark.slow
@FUZZ
@given(st.data())
def test_any_value_in_any_field(tmp_path: Path, data: Any) -> None:
    lines = [json.loads(line) for line in LINES]
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = data.draw(st.sampled_from(lines))
        while True:
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            inner = at[key]
            if not (isinstance(inner, (dict, list)) and inner) or data.draw(st.booleans()):
                break
            at = inner
        at[key] = data.draw(VALUES)
    survives(tmp_path, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


@pytest.mark.slow
@FUZZ
@given(header=st.dictionaries(st.sampled_from(["devices", "level", "packages", "ledgers", "selection"]), VALUES))
def test_any_header(tmp_path: Path, header: dict[str, Any]) -> None:
    line = {"kind": "run", "schema": SCHEMA, **header}
    survives(tmp_path, b"".join(json.dumps(item).encode() + b"\n" for item in (line, json.loads(LINES[1]))))


def test_a_reader_that_raises_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise RecursionError

    monkeypatch.setitem(globals(), "read", broken)
    with pytest.raises(RecursionError):
        survives(tmp_path, b"")
