"""Files are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_harness import started

from accelcheck.core import files
from accelcheck.core.files import PARTIAL, replacing


def test_a_file_is_replaced_when_its_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        (partial,) = tmp_path.glob(f".*{PARTIAL}")
        assert partial.read_bytes() == b"new"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_raises_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("a text")  # type: ignore[call-overload]  # what raises here
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_durable_file_is_synchronised_with_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[int] = []
    monkeypatch.setattr(os, "fsync", synchronised.append)
    for durable, count in ((False, 0), (True, 2)):  # the file, and its name in the folder
        with replacing(tmp_path / "file", durable=durable) as file:
            file.write(b"new")
        assert len(synchronised) == count


def test_the_error_of_a_folder_that_does_not_exist_is_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none"), replacing(tmp_path / "none" / "file"):
        pass


def test_processes_share_a_folder_that_ends_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv(files.SCRATCH, raising=False)
    code = """
import os, subprocess, sys, time
from accelcheck.core.files import private, scratch
from accelcheck.core.processes import Child
child = Child(["-c", "from accelcheck.core.files import scratch; print(scratch())"])
child.wait()
print(scratch(), child.output().strip(), private("x-").parent, flush=True)
time.sleep(600)
"""
    with started([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        folders = process.stdout.readline().split()
        assert len(folders) == 3
        assert len(set(folders)) == 1
        assert {path.name[:2] for path in Path(folders[0]).iterdir()} == {"ch", "x-"}
        process.kill()
        process.wait()
    for _ in range(500):
        if not [*tmp_path.iterdir()]:
            break
        time.sleep(0.01)
    assert [*tmp_path.iterdir()] == []
