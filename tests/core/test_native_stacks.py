"""The native stacks of a process that hangs: by whatever debugger is there, never required, and bounded in time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_harness import started

from accelcheck.core import native_stacks as under_test
from accelcheck.core.clean_process import CleanProcess, CleanProcessError
from accelcheck.core.native_stacks import PROGRAMS, native_stacks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder that programs are looked for in."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def sleeper() -> Iterator[int]:
    with started(["/bin/sleep", "600"]) as process:
        yield process.pid


def install(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


def waits() -> None:
    import time

    time.sleep(600)


def test_without_a_debugger_nothing_is_said(folder: Path) -> None:
    assert native_stacks(1) == ""


def test_the_first_debugger_that_may_look_is_asked_for_the_process(folder: Path) -> None:
    install(folder, "py-spy", "echo 'Error: Permission Denied' >&2; exit 1")
    install(folder, "eu-stack", 'echo "PID $4"; echo "TID 7:"; echo "#0  0x1 in kernel_of_$4"')
    install(folder, "gdb", "echo '#0  0x2 in another'")
    assert native_stacks(42) == "Native stacks, by eu-stack:\nTID 7:\n#0  0x1 in kernel_of_42"


@pytest.mark.parametrize("script", ["exit 1", "echo 'ptrace: Operation not permitted.'", "exec /nonexistent"])
def test_a_debugger_that_may_not_look_says_nothing(folder: Path, script: str) -> None:
    install(folder, "gdb", script)
    assert native_stacks(1) == ""


def test_a_debugger_that_hangs_is_ended_with_what_it_has_started(folder: Path) -> None:
    install(folder, "gdb", "echo '#0  0x2 in another'; sleep 600 & sleep 600")
    assert native_stacks(1, 0.2) == ""


def test_long_stacks_are_cut(folder: Path) -> None:
    install(folder, "gdb", 'for i in $(seq 2000); do echo "#$i 0x1 in frame ()"; done')
    assert len(native_stacks(1)) < under_test.MOST_TEXT + 100


@pytest.mark.skipif(not any(map(shutil.which, PROGRAMS)), reason="no debugger is installed")
def test_a_real_debugger_shows_where_a_program_waits(sleeper: int) -> None:
    stacks = native_stacks(sleeper)
    assert stacks == "" or "sleep" in stacks  # refused, where processes may not look into each other


def test_a_hang_has_both_stacks(folder: Path) -> None:
    install(folder, "gdb", "echo '#0  0x1 in waits_for_a_kernel'")
    clean = CleanProcess([])
    with pytest.raises(CleanProcessError) as raised:
        clean.call(waits, limit=0.2)
    clean.close()
    python, native = raised.value.printed.split("\n\n")
    assert "in waits" in python
    assert native == "Native stacks, by gdb:\n#0  0x1 in waits_for_a_kernel"
    assert sys.executable not in native
