"""The two halves of a run: files of their own, and a worker for each core or chip."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelcheck.commands import session
from accelcheck.commands.session import FILES, WORKERS, Half, Session
from accelcheck.core.capability import SUPPORTED
from accelcheck.devices import hardware


def machine(monkeypatch: pytest.MonkeyPatch, **chips: int) -> None:
    """Make this a machine of 6 cores with so many chips of each vendor."""
    monkeypatch.setattr(hardware, "usable_cores", lambda: 6)
    for vendor in ("nvidia", "amd", "tpu"):
        card = hardware.Hardware(chips.get(vendor, 0), (), "", SUPPORTED)
        monkeypatch.setattr(hardware, vendor, lambda found=card: found)
    for name in (WORKERS, "PJRT_DEVICE"):
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
def test_workers_are_cores_or_chips(device: str, workers: str, on_tpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, nvidia=4)
    assert session.workers(device) == workers
    machine(monkeypatch, nvidia=4, tpu=8)
    assert session.workers(device) == on_tpu
    monkeypatch.setenv(WORKERS, "3")
    assert session.workers(device) == "3"


def test_xla_without_a_tpu_has_the_client_that_is_named_or_that_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    assert [session.client(device) for device in ("xla", "cpu")] == [{"PJRT_DEVICE": "CPU"}, {}]
    monkeypatch.setenv("PJRT_DEVICE", "VENDOR")
    assert session.client("xla") == {"PJRT_DEVICE": "VENDOR"}
    machine(monkeypatch, tpu=1)
    assert session.client("xla") == {}


@pytest.mark.parametrize("option", FILES)
def test_each_half_has_files_of_its_own(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    for words in ([f"{option}=out/a.b.xml", "-x"], [option, "out/a.b.xml", "-x"]):
        both = Session("cpu", Path("j.jsonl"), (), words)
        assert list(both.judged().words[-len(words) :]) == words
        assert list(both.timed().words[-4:]) == [f"{option}=out/a.b-speed.xml", "-x", "-n", "0"]
    assert session.beside(Path("out/a.b.xml")) == Path("out/a.b-speed.xml")


def test_a_value_that_is_no_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    timed = Session("cpu", Path("j.jsonl"), (), ["-k", "journal", f"{FILES[0]}="]).timed()
    assert list(timed.words[-5:-2]) == ["-k", "journal", f"{FILES[0]}="]
    assert timed.journal == Path("j-speed.jsonl")


@pytest.mark.parametrize(("code", "ran"), [(0, 2), (1, 2), (5, 2), (2, 1), (3, 1), (137, 1)])
def test_nothing_is_timed_after_a_first_half_that_was_cut_off(code: int, ran: int) -> None:
    started: list[Half] = []

    def start(half: Half) -> int:
        started.append(half)
        return code

    assert Session("cpu", Path("j.jsonl")).run(start) == [code] * ran
    assert [half.timed for half in started] == [False, True][:ran]


def test_the_caller_says_what_is_timed_when_everything_is_judged() -> None:
    started: list[Half] = []

    def start(half: Half) -> int:
        started.append(half)
        return 0

    def chosen() -> list[str]:
        assert len(started) == 1
        return ["--accel-case=one"]

    Session("cpu", Path("j.jsonl")).run(start, chosen)
    assert ["--accel-case=one" in half.words for half in started] == [False, True]
    Session("cpu", Path("j.jsonl")).run(start, lambda: None)
    assert len(started) == 3
