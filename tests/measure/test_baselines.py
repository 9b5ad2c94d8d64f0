from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from process_harness import PATIENT, started

from accelcheck.core.files import file_name
from accelcheck.devices.base import Fingerprint
from accelcheck.measure.baselines import Baseline, BaselineError, Baselines, Place, settings
from accelcheck.measure.regression import Sample

PLACE = Place("cpu", "Some Chip 9000", 2, "2.13", "ATen AVX2")
BASELINE = Baseline(
    "eager/mlp/cpu/float32/speed", "0123abcd", PLACE, Sample(-0.5, 0.01, 10), {"peak-memory": 1048576.0}
)


@pytest.fixture
def store(tmp_path: Path) -> Baselines:
    return Baselines(tmp_path / "baselines")


def path_of(store: Baselines, baseline: Baseline = BASELINE) -> Path:
    return store.root / baseline.place.folder / baseline.name


def test_what_is_written_is_read_back(store: Baselines) -> None:
    assert store.write(BASELINE, replace=True)
    assert store.read(PLACE) == {BASELINE.case: BASELINE}
    assert store.read(replace(PLACE, torch="2.14")) == {}


def test_a_file_is_small_sorted_and_ends_with_a_newline(store: Baselines) -> None:
    store.write(BASELINE, replace=True)
    text = path_of(store).read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert len(text) < 1000


def test_bytes_stay_exact_and_times_keep_six_digits(store: Baselines) -> None:
    figures = {"peak-memory": float(2**40 + 1), "latency": 0.001234567891}
    store.write(replace(BASELINE, figures=figures), replace=True)
    assert store.read(PLACE)[BASELINE.case].figures == {"peak-memory": 2**40 + 1, "latency": 0.00123457}


def test_a_name_is_never_a_path(store: Baselines) -> None:
    strange = replace(BASELINE, case="../../etc/passwd\x00/" + 300 * "x", place=replace(PLACE, chip="../A/B"))
    store.write(strange, replace=True)
    path = path_of(store, strange)
    assert path.resolve().is_relative_to(store.root.resolve())
    assert len(path.name) < 120
    assert store.read(strange.place) == {strange.case: strange}


def test_only_new_ones_are_stored_where_asked(store: Baselines) -> None:
    store.write(BASELINE, replace=True)
    assert not store.write(replace(BASELINE, ratio=Sample(0.0, 0.1, 10)), replace=False)
    assert store.read(PLACE) == {BASELINE.case: BASELINE}


def test_a_changed_workload_replaces_what_it_was(store: Baselines) -> None:
    store.write(BASELINE, replace=True)
    changed = replace(BASELINE, digest="ffff0000")
    assert store.write(changed, replace=False)
    assert list(store.read(PLACE).values()) == [changed]
    assert not path_of(store).exists()


def test_the_place_is_coarse() -> None:
    versions = {"torch": "2.13.1+cu130"}
    differences = Place.of(Fingerprint("cuda", "GPU", 2, 1, "555.1", "CUDA 13.2", versions))
    assert differences == Place("cuda", "GPU", 2, "2.13", "CUDA 13")
    assert differences.folder == "cuda-gpu-x2/torch-2.13-cuda-13"


@pytest.mark.parametrize(
    ("runtime", "coarse"),
    [
        ("HIP 7.2.26015-fc0010cf6a", "HIP 7"),
        ("CUDA 13.0", "CUDA 13"),
        ("ATen AVX2", "ATen AVX2"),
        ("PJRT CPU", "PJRT CPU"),
    ],
)
def test_of_a_runtime_the_major_version_counts(runtime: str, coarse: str) -> None:
    assert Place.of(Fingerprint("rocm", "GPU", 1, runtime=runtime)).runtime == coarse


def test_of_a_device_that_says_little_baselines_can_be_read_back(store: Baselines) -> None:
    place = Place.of(Fingerprint("vendor", "", 1))
    assert place == Place("vendor", "unknown", 1, ".".join(metadata.version("torch").split(".")[:2]), "unknown")
    baseline = replace(BASELINE, place=place, environment={"VENDOR_MODE": ""})
    store.write(baseline, replace=True)
    assert store.read(place) == {BASELINE.case: baseline}


def test_settings_are_what_changes_speed_and_not_which_chips_are_used() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "3", "NVIDIA_TF32_OVERRIDE": "0"}
    assert settings(Fingerprint("cuda", "GPU", 1, environment=environment)) == {"NVIDIA_TF32_OVERRIDE": "0"}


def test_a_folder_that_may_not_be_read_or_written_is_named(store: Baselines, monkeypatch: pytest.MonkeyPatch) -> None:
    # As for others than root: what os.path cannot look into is not there, and pathlib raises.
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.exists", refused)
    monkeypatch.setattr("pathlib.Path.iterdir", refused)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BaselineError, match=f"{store.root.parent}: expected a folder that can be written"):
        store.writable(PLACE)
    for place in (PLACE, None):
        with pytest.raises(BaselineError, match="cannot be read: Permission denied"):
            list(store.stored(place))


def test_a_file_that_may_not_be_read_is_not_called_spoilt(store: Baselines, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(BASELINE, replace=True)

    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(BaselineError) as raised:
        list(store.stored(PLACE))
    assert str(raised.value) == f"{path_of(store)} cannot be read: Permission denied"


def test_a_file_that_another_run_replaces_while_this_one_reads_is_none(store: Baselines) -> None:
    beside = replace(BASELINE, case="eager/cnn/cpu/float32/speed")
    for item in (beside, BASELINE):
        store.write(item, replace=True)
    reading = store.stored(PLACE)
    assert next(reading)[1] == beside
    path_of(store).unlink()
    assert list(reading) == []


def test_file_names_are_plain() -> None:
    assert file_name("AMD EPYC (Zen 4)/../x") == "amd-epyc-zen-4-..-x"
    assert file_name("..") == ""


def test_places_with_the_same_chip_are_near_the_same_number_first(store: Baselines) -> None:
    fewer = replace(PLACE, count=1)
    newer = replace(PLACE, torch="2.14")
    other = replace(PLACE, chip="Another")
    for place in (fewer, newer, other, PLACE):
        store.write(replace(BASELINE, place=place), replace=True)
    store.write(replace(BASELINE, digest="ffff0000", place=replace(PLACE, torch="2.15")), replace=True)
    near = store.near(PLACE, BASELINE.case, BASELINE.digest)
    assert [result.place for result in near] == [newer, fewer]


def test_of_other_torches_the_nearest_comes_first_and_before_that_another_runtime(store: Baselines) -> None:
    versions = ["2.9", "2.10", "2.12", "2.15", "3.0"]
    for place in (replace(PLACE, runtime="ATen AVX512"), *(replace(PLACE, torch=version) for version in versions)):
        store.write(replace(BASELINE, place=place), replace=True)
    near = [result.place for result in store.near(PLACE, BASELINE.case, BASELINE.digest)]
    assert PLACE.torch == "2.13"
    assert [place.torch for place in near] == ["2.13", "2.12", "2.15", "2.10", "2.9", "3.0"]


def test_what_is_near_and_spoilt_is_left_out(store: Baselines) -> None:
    newer, older = (replace(BASELINE, place=replace(PLACE, torch=torch)) for torch in ("2.14", "2.12"))
    for baseline in (newer, older):
        store.write(baseline, replace=True)
    path_of(store, older).write_text("{")
    assert store.near(PLACE, BASELINE.case, BASELINE.digest) == [newer]


def test_of_two_digests_the_one_that_is_stored_again_stays(store: Baselines) -> None:
    former = replace(BASELINE, digest="ffff0000")
    store.write(former, replace=True)
    text = path_of(store, former).read_text()
    store.write(BASELINE, replace=True)
    path_of(store, former).write_text(text)  # as a merge of two branches leaves them
    assert not store.write(BASELINE, replace=False)
    assert [result for _, result in store.stored(PLACE)] == [BASELINE]


def test_whether_baselines_can_be_written_is_known_before_they_are(tmp_path: Path) -> None:
    Baselines(tmp_path / "new" / "one").writable(PLACE)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(BaselineError, match=r"file: expected a folder that can be written"):
        Baselines(tmp_path / "file").writable(PLACE)


def edited(change: Callable[[Any], None]) -> Callable[[str], str]:
    def text(was: str) -> str:
        data = json.loads(was)
        change(data)
        return json.dumps(data)

    return text


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("cut short", lambda text: text[:40]),
        ("not JSON", lambda _: "\x00\xff"),
        ("the file", lambda _: "[]"),
        ("schema", edited(lambda data: data.update(schema=99))),
        ("surplus", edited(lambda data: data.update(surplus=1))),
        ("case", edited(lambda data: data.update(case="eager/cnn/cpu/float32/speed"))),
        ("case", edited(lambda data: data.update(case=7))),
        ("digest", edited(lambda data: data.pop("digest"))),
        ("device", edited(lambda data: data["device"].update(chip="Another"))),
        ("device.count", edited(lambda data: data["device"].update(count=0))),
        ("device.count", edited(lambda data: data["device"].update(count=1.5))),
        ("device.torch", edited(lambda data: data["device"].pop("torch"))),
        ("device.environment", edited(lambda data: data["device"].update(environment=["A=1"]))),
        ("device.environment.A", edited(lambda data: data["device"].update(environment={"A": 1}))),
        ("ratio", edited(lambda data: data.update(ratio=[]))),
        ("ratio.mean", edited(lambda data: data["ratio"].update(mean="fast"))),
        ("ratio.mean", edited(lambda data: data["ratio"].update(mean=True))),
        ("ratio.mean", edited(lambda data: data["ratio"].update(mean=-1000))),
        ("ratio.mean", edited(lambda data: data["ratio"].update(mean=10**400))),
        ("not JSON", lambda text: text.replace("-0.5", 5000 * "9")),
        ("ratio.processes", edited(lambda data: data["ratio"].update(processes=1e18))),
        ("ratio.spread", edited(lambda data: data["ratio"].update(spread=-0.1))),
        ("ratio.processes", edited(lambda data: data["ratio"].update(processes=1))),
        ("figures.latency", edited(lambda data: data["figures"].update(latency=-1))),
        ("figures.latency", lambda text: text.replace('"peak-memory": 1048576', '"latency": NaN')),
    ],
)
def test_a_spoilt_file_is_named_with_its_field(store: Baselines, field: str, spoil: Callable[[str], str]) -> None:
    store.write(BASELINE, replace=True)
    beside = replace(BASELINE, case="eager/cnn/cpu/float32/speed")
    store.write(beside, replace=True)
    kept = path_of(store, beside).read_bytes()
    path = path_of(store)
    path.write_text(spoil(path.read_text()), encoding="latin-1")
    with pytest.raises(BaselineError) as raised:
        store.read(PLACE)
    assert str(path) in str(raised.value)
    assert field in str(raised.value)
    assert "restore the file" in str(raised.value)
    assert path_of(store, beside).read_bytes() == kept


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BaselineError, match=r"file.*eager/mlp.*cannot be written"):
        Baselines(tmp_path / "file").write(BASELINE, replace=True)


def test_a_write_that_fails_leaves_nothing_behind(store: Baselines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(BaselineError, match="No space left on device"):
        store.write(BASELINE, replace=True)
    assert store.partial() == []
    assert store.read(PLACE) == {}


WRITER = """
import pathlib, sys, time
from accelcheck.measure.regression import Sample
from accelcheck.measure.baselines import Baseline, Baselines, Place

def halt():
    print("halted", flush=True)
    time.sleep(600)

opened = pathlib.Path.open

def halting(self, mode="r", *words, **names):
    file = opened(self, mode, *words, **names)
    if "w" in mode and sys.argv[2] == "half written":
        write = file.write
        file.write = lambda text: (write(text[: len(text) // 2]), file.flush(), halt())
    return file

pathlib.Path.open = halting
if sys.argv[2] == "not yet in place":
    pathlib.Path.replace = lambda self, target: halt()
place = Place("cpu", "Some Chip 9000", 2, "2.13", "ATen AVX2")
new = Baseline("eager/mlp/cpu/float32/speed", "0123abcd", place, Sample(0.5, 0.01, 10))
Baselines(pathlib.Path(sys.argv[1])).write(new, replace=True)
"""


@pytest.mark.parametrize("moment", ["half written", "not yet in place"])
def test_a_writer_that_is_killed_leaves_the_old_file(store: Baselines, moment: str) -> None:
    store.write(BASELINE, replace=True)
    with started([sys.executable, "-c", WRITER, store.root, moment], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "halted\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert writer.returncode == -signal.SIGKILL
    assert store.read(PLACE) == {BASELINE.case: BASELINE}
    newer = replace(BASELINE, ratio=Sample(0.25, 0.01, 10))
    assert store.write(newer, replace=True)  # its lock went with it
    assert store.read(PLACE) == {BASELINE.case: newer}


def test_writers_side_by_side_lose_nothing(store: Baselines) -> None:
    first = """
import sys
from pathlib import Path
from accelcheck.measure.regression import Sample
from accelcheck.measure.baselines import Baseline, Baselines, Place
place = Place("cpu", "Some Chip 9000", 2, "2.13", "ATen AVX2")
for number in range(25):
    case = f"eager/{sys.argv[2]}-{number}/cpu/float32/speed"
    Baselines(Path(sys.argv[1])).write(Baseline(case, "0123abcd", place, Sample(0.0, 0.01, 10)), replace=True)
"""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(started([sys.executable, "-c", first, store.root, n])) for n in ("a", "b", "c")]
        assert [writer.wait(PATIENT) for writer in writers] == [0, 0, 0]
    assert len(store.read(PLACE)) == 75
