"""The two halves of a run: files of their own, and a worker for each core or chip."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelcheck.commands import halves
from accelcheck.core.capability import SUPPORTED
from accelcheck.devices import hardware


def machine(monkeypatch: pytest.MonkeyPatch, **chips: int) -> None:
    """Make this a machine of 6 cores with so many chips of each vendor."""
    monkeypatch.setattr(hardware, "usable_cores", lambda: 6)
    for vendor in ("nvidia", "amd", "tpu"):
        found = hardware.Hardware(chips.get(vendor, 0), (), "", SUPPORTED)
        monkeypatch.setattr(hardware, vendor, lambda found=found: found)
    for name in (halves.WORKERS, "PJRT_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("device", "workers", "on_tpu"),
    [
        ("cpu", "6", "6"),
        ("xla", "6", "8"),
        ("tpu", "1", "8"),
        ("cuda", "4", "4"),
        ("rocm", "1", "1"),
        ("vendor", "1", "1"),
    ],
)
def test_there_is_a_worker_for_each_core_or_chip(
    device: str, workers: str, on_tpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, nvidia=4)
    assert halves.workers(device) == workers
    machine(monkeypatch, nvidia=4, tpu=8)
    assert halves.workers(device) == on_tpu
    monkeypatch.setenv(halves.WORKERS, "3")
    assert halves.workers(device) == "3"


def test_xla_without_a_tpu_computes_with_the_client_that_is_named_or_that_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch)
    assert [halves.client(device) for device in ("xla", "cpu")] == [{"PJRT_DEVICE": "CPU"}, {}]
    monkeypatch.setenv("PJRT_DEVICE", "VENDOR")
    assert halves.client("xla") == {"PJRT_DEVICE": "VENDOR"}
    machine(monkeypatch, tpu=1)
    assert halves.client("xla") == {}


@pytest.mark.parametrize("option", halves.FILES)
def test_each_half_has_files_of_its_own(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    for words in ([f"{option}=out/a.b.xml", "-x"], [option, "out/a.b.xml", "-x"]):
        assert halves.judged("cpu", (), words)[-len(words) :] == words
        assert halves.timed("cpu", (), words)[-4:] == [f"{option}=out/a.b-speed.xml", "-x", "-n", "0"]
    assert halves.beside(Path("out/a.b.xml")) == Path("out/a.b-speed.xml")


def test_a_value_that_is_no_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert halves.timed("cpu", (), ["-k", "journal", f"{halves.FILES[0]}="])[-5:-2] == [
        "-k",
        "journal",
        f"{halves.FILES[0]}=",
    ]
