"""Snapshots: written ones come back, damaged ones are refused by name, a killed writer leaves no mixture."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from process_harness import started
from torch import nn

from accelcheck.techniques.snapshots.files import DamagedError, Snapshots, read, write
from accelcheck.workloads.states import pack, unpack

STATE: dict[str, Any] = {
    "module": {"weight": torch.arange(6.0).reshape(2, 3)},
    "numbers": [1, 2.5, True, None],
    "words": ("a", {3: "b"}),
}


def state(step: int, size: int = 100) -> dict[str, Any]:
    """One that shows mixtures: every part of it says which step it is of."""
    return {"step": step, "weights": torch.full((size,), float(step)), "biases": torch.full((size,), float(step))}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "one.snapshot"
    write(path, STATE)
    return path


def test_what_is_written_comes_back(good: Path) -> None:
    got = read(good)
    assert torch.equal(got["module"]["weight"], STATE["module"]["weight"])
    assert got["numbers"] == STATE["numbers"]
    assert got["words"] == STATE["words"]


def test_the_size_is_that_of_the_file(tmp_path: Path) -> None:
    assert write(tmp_path / "x", STATE) == (tmp_path / "x").stat().st_size


def test_parameters_and_ordered_dicts_become_plain(tmp_path: Path) -> None:
    module = nn.BatchNorm1d(3)
    write(tmp_path / "x", {"module": module.state_dict(), "weight": module.weight})
    got = read(tmp_path / "x")
    assert type(got["weight"]) is torch.Tensor
    nn.BatchNorm1d(3).load_state_dict(got["module"])


def test_a_view_does_not_take_its_base_along(tmp_path: Path) -> None:
    assert write(tmp_path / "x", {"row": torch.zeros(1000, 1000)[0]}) < 10_000


def test_what_is_packed_shares_no_memory() -> None:
    tensor = torch.zeros(3)
    packed = pack({"x": tensor})
    tensor.fill_(1.0)
    assert not unpack(packed)["x"].any()


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"a": {"b": [object()]}}, r"state\['a'\]\['b'\]\[0\]: expected tensors, numbers"),
        ({"a": lambda: None}, r"state\['a'\]: expected"),
        ({"a": {(1, object()): 1}}, r"a key of state\['a'\]"),
        ({"a": nn.Linear(1, 1)}, r"state\['a'\].*Linear"),
    ],
    ids=["object", "function", "key", "module"],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, bad: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        write(tmp_path / "x", bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", [0.0, 0.001, 0.05, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(good: Path, part: float) -> None:
    content = good.read_bytes()
    good.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(DamagedError, match="expected") as caught:
        read(good)
    assert caught.value.path == good
    assert str(good) in str(caught.value)


def test_a_flipped_bit_is_refused_wherever_it_is(good: Path) -> None:
    content = good.read_bytes()
    chosen = random.Random(0)
    for _ in range(300):
        place = chosen.randrange(len(content))
        good.write_bytes(content[:place] + bytes([content[place] ^ (1 << chosen.randrange(8))]) + content[place + 1 :])
        with pytest.raises(DamagedError):
            read(good)


def test_what_was_expected_and_what_came_is_said(good: Path) -> None:
    content = good.read_bytes()
    header, _, rest = content.partition(b"\n")
    expected = json.loads(header)
    good.write_bytes(content[:-10])
    with pytest.raises(DamagedError, match=f"expected {len(rest)} bytes after the header, got {len(rest) - 10}"):
        read(good)
    changed = rest[:-1] + bytes([rest[-1] ^ 1])
    good.write_bytes(header + b"\n" + changed)
    with pytest.raises(DamagedError, match=f"expected {expected['sha256']}, got {hashlib.sha256(changed).hexdigest()}"):
        read(good)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "other"}, "format: expected 'accelcheck-snapshot', got 'other'"),
        ({"version": 2}, "version: expected 1, got 2"),
        ({"sha256": None}, "sha256: expected 64 hexadecimal digits, got None"),
        ({"sha256": "00"}, "sha256: expected 64 hexadecimal digits, got '00'"),
        ({"bytes": "many"}, "bytes: expected a number, got 'many'"),
        ({"bytes": True}, "bytes: expected a number, got True"),
    ],
    ids=["format", "version", "no digest", "short digest", "size", "bool"],
)
def test_another_schema_is_refused(good: Path, change: dict[str, Any], said: str) -> None:
    header, _, rest = good.read_bytes().partition(b"\n")
    good.write_bytes(json.dumps({**json.loads(header), **change}).encode() + b"\n" + rest)
    with pytest.raises(DamagedError) as caught:
        read(good)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"[]\n", "got 'list'"),
        (b"{}\n", "got None"),
        (b"x" * 5000, "its end is missing"),
        (b"\xff\n", "a header in JSON"),
    ],
    ids=["empty", "list", "no format", "no line", "no text"],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=said):
        read(path)


def test_a_file_of_torch_save_alone_is_refused(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x")
    with pytest.raises(DamagedError):
        read(tmp_path / "x")


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Harmful()}, tmp_path / "content")
    content = (tmp_path / "content").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    header = {"format": "accelcheck-snapshot", "version": 1, "bytes": len(content), "sha256": digest}
    (tmp_path / "x").write_bytes(json.dumps(header).encode() + b"\n" + content)
    with pytest.raises(DamagedError, match=r"torch\.load refused"):
        read(tmp_path / "x")
    assert not (tmp_path / "harmed").exists()


def test_an_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DamagedError(Path("x"), "broken")))
    assert str(error) == "x: broken"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "s", keep=2)
    assert snapshots.latest() is None
    for step in range(5):
        snapshots.save(step, state(step))
    assert sorted(path.name for path in snapshots.folder.glob("*.snapshot")) == [
        "step-00000003.snapshot",
        "step-00000004.snapshot",
    ]
    latest = snapshots.latest()
    assert latest is not None
    assert (latest.step, latest.state["step"], latest.refused) == (4, 4, ())


def test_the_last_good_one_is_used_and_the_damaged_ones_are_named(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, keep=3)
    paths = [snapshots.save(step, state(step)) for step in range(3)]
    paths[2].write_bytes(b"")
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    latest = snapshots.latest()
    assert latest is not None
    assert (latest.step, latest.state["step"]) == (0, 0)
    assert [error.path for error in latest.refused] == [paths[2], paths[1]]
    assert ["empty" in latest.refused[0].wrong, "size" in latest.refused[1].wrong] == [True, True]


def test_a_damaged_one_is_replaced_when_its_step_is_taken_again(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for step in (1, 2):
        snapshots.save(step, state(step))
    (tmp_path / "step-00000002.snapshot").write_bytes(b"")
    snapshots.save(2, state(2))
    latest = snapshots.latest()
    assert latest is not None
    assert (latest.step, latest.refused) == (2, ())


def test_that_all_are_damaged_is_an_error(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path)
    for step in (1, 2):
        snapshots.save(step, state(step)).write_bytes(b"")
    with pytest.raises(DamagedError, match=r"all 2 are damaged: step-00000002\.snapshot: .*step-00000001"):
        snapshots.latest()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "step-x.snapshot", "step-00000009.snapshot.bak"):
        (tmp_path / name).write_text("mine")
    snapshots = Snapshots(tmp_path, keep=1)
    for step in (1, 2):
        snapshots.save(step, state(step))
    latest = snapshots.latest()
    assert latest is not None
    assert latest.step == 2
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "step-x.snapshot").read_text() == "mine"


@pytest.mark.parametrize(("keep", "step"), [(0, 1), (1, -1)])
def test_numbers_that_make_no_sense(tmp_path: Path, keep: int, step: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        Snapshots(tmp_path, keep).save(step, STATE)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from test_snapshots import state
from accelcheck.techniques.snapshots.files import Snapshots

folder, chosen, caught = Path(sys.argv[1]), random.Random(0), 0
for kill in range(100):
    found = Snapshots(folder).latest()
    first = 0 if found is None else found.step + 1
    writer = os.fork()
    if writer == 0:  # no threads yet: torch was only imported
        for step in range(first, 10**6):
            Snapshots(folder).save(step, state(step, 200_000))
    time.sleep(0.05 + 0.1 * chosen.random())
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    caught += len(list(folder.glob("*.partial")))
    print(caught, flush=True)
    if kill > 5 and caught > 2:
        break
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """Killed again and again in the middle of saves: whatever is there is whole, and the next writer is not held up."""
    last, caught = -1, 0
    with started(
        [sys.executable, "-c", KILLED, tmp_path],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as parent:
        assert parent.stdout is not None
        for line in parent.stdout:
            caught = int(line)
            latest = Snapshots(tmp_path).latest()
            if latest is None:
                continue
            assert not latest.refused
            assert latest.state["step"] == latest.step >= last
            assert bool((latest.state["weights"] == latest.step).all())
            assert bool((latest.state["biases"] == latest.step).all())
            last = latest.step
    assert parent.returncode == 0
    assert last > 0
    assert caught > 2  # killed while they wrote
    Snapshots(tmp_path).save(last + 1, state(last + 1))
    assert not list(tmp_path.glob("*.partial"))


def test_a_writer_waits_for_another(tmp_path: Path) -> None:
    writer = threading.Thread(target=Snapshots(tmp_path).save, args=(1, state(1)))
    with FileLock(tmp_path / ".lock"):
        writer.start()
        writer.join(0.2)
        waits = writer.is_alive() and not list(tmp_path.glob("*.snapshot"))
    writer.join()
    assert waits
    assert Snapshots(tmp_path).latest() is not None
