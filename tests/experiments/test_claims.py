"""Claims as a run: its answers, the report and the command."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from claims_harness import Clocked, claim, claims, sides, written

from accelcheck import cli
from accelcheck.commands import common
from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE
from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.devices.base import Device, Memory
from accelcheck.experiments.claims import catalogue, report, run
from accelcheck.experiments.claims.catalogue import Claim, ClaimResult, ClaimStatus, Measured, What, judged
from accelcheck.experiments.claims.experiment import Contest, Experiment, telling
from accelcheck.experiments.curve import WrongError
from accelcheck.report.console import plain
from accelcheck.techniques.base import Unsupported

# Runs


class Scripted(Experiment):
    """Says what a test has it say."""

    name = "one"
    gives = frozenset(What)

    def __init__(self, answer: Capability = SUPPORTED, fault: Exception | None = None) -> None:
        self._answer = answer
        self._fault = fault
        self.contests = 0

    def answer(self, device: Device) -> Capability:
        return self._answer

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        self.contests += 1
        if self._fault is not None:
            raise self._fault
        yield replace(sides(0.004, 0.001), others={What.ERROR: lambda: Measured.exactly(1e-6, "exact")})


def answered(experiment: Scripted, device: Device, *chosen: Claim) -> list[ClaimResult]:
    return list(run.answers(device, chosen, {"one": experiment}))


def test_claims_that_share_an_experiment_share_its_contest() -> None:
    experiment = Scripted()
    answer = answered(experiment, Clocked(), claim(What.SPEED_UP, 9.0, "b"), claim(What.ERROR, 1e-4, "a"))
    assert [(item.claim.name, item.outcome) for item in answer] == [
        ("a", ClaimStatus.CONFIRMED),
        ("b", ClaimStatus.NOT_CONFIRMED),
    ]
    assert experiment.contests == 1


def test_what_does_not_exist_is_not_tried() -> None:
    absent = unsupported(Code.NO_BACKEND, "none here")
    experiment = Scripted(absent)
    (answer,) = answered(experiment, Clocked(), claim(What.SPEED_UP, 2.0))
    assert (answer.outcome, answer.reason, answer.code, answer.broken) == (
        ClaimStatus.NOT_MEASURABLE,
        str(absent),
        "no-backend",
        False,
    )
    assert experiment.contests == 0


class Forgetful(Clocked):
    """Keeps no statistics of memory."""

    def __init__(self) -> None:
        super().__init__("fancy")

    def memory(self) -> Memory:
        return Memory(None, None, "it counts nothing")


def test_a_device_that_counts_no_memory_is_asked_for_the_rest() -> None:
    experiment = Scripted()
    memory, speed = answered(
        experiment, Forgetful(), claim(What.MEMORY, 0.5, "memory"), claim(What.SPEED_UP, 2.0, "speed")
    )
    assert (memory.outcome, memory.code) == (ClaimStatus.NOT_MEASURABLE, "no-feature")
    assert "it counts nothing" in memory.reason
    assert speed.outcome is ClaimStatus.CONFIRMED
    assert telling(Forgetful(), What.GROWTH).code is Code.NO_FEATURE
    answered(experiment, Forgetful(), claim(What.MEMORY, 0.5))
    assert experiment.contests == 1, "nothing is prepared where nothing can be told"


@pytest.mark.parametrize(
    ("fault", "reason", "broken"),
    [
        (WrongError("out: expected 1, got 2"), "out: expected 1, got 2", True),
        (ValueError("first line\nsecond"), "ValueError: first line", True),
        (Unsupported(unsupported(Code.NO_DTYPE, "not these inputs")), "unsupported [no-dtype] not these inputs", False),
    ],
)
def test_a_fault_is_the_answer_to_all_claims_of_the_experiment(fault: Exception, reason: str, broken: bool) -> None:
    answer = answered(Scripted(fault=fault), Clocked(), claim(What.SPEED_UP, 2.0, "a"), claim(What.ERROR, 0.1, "b"))
    assert [(item.outcome, item.reason, item.broken) for item in answer] == [
        (ClaimStatus.NOT_MEASURABLE, reason, broken)
    ] * 2


def test_a_clock_that_stands_still_gives_no_figure() -> None:
    class Stopped(Clocked):
        def elapsed(self, call: Callable[[], object], times: int) -> float:
            return 0.0

    class Still(Scripted):
        @contextlib.contextmanager
        def contest(self, device: Device) -> Iterator[Contest]:
            yield sides(0.0, 0.0, device)

    (answer,) = answered(Still(), Stopped(), claim(What.SPEED_UP, 2.0))
    assert answer.reason.startswith("ClockError: ")
    assert answer.measured is None


# Report

ANSWERS = [
    judged(claim(What.SPEED_UP, 1.5, "speed"), Measured(1.02, 1.0, 1.04, "3 ms against 3 ms")),
    judged(claim(What.MEMORY, 0.5, "memory"), Measured.exactly(0.5, "4 MiB against 8 MiB")),
    judged(claim(What.MEMORY, 0.4, "more"), Measured.exactly(-0.06, "9 MiB against 8 MiB")),
    judged(claim(What.ERROR, 1e-4, "error"), Measured.exactly(2e-7, "in float32")),
    judged(replace(claim(What.SPEED_UP, 2.5, "range"), most=3.5), Measured(3.0, 2.4, 3.2, "1 ms against 3 ms")),
    catalogue.absent(claim(What.EXTRA_TIME, 0.5, "time"), unsupported(Code.NO_FEATURE, "no strides")),
    catalogue.wrong(claim(What.GROWTH, 2.0, "growth"), "out: expected 1, got 2"),
]


def test_the_text_has_claim_beside_measurement_and_every_reason() -> None:
    lines = [" ".join(line.split()) for line in plain(report.text(ANSWERS))]
    assert "speed at least 1.50x 1.02x (1.00x to 1.04x) not confirmed gpu" in lines
    assert "memory at least -50.0 % -50.0 % confirmed gpu" in lines
    assert "more at least -40.0 % +6.0 % not confirmed gpu" in lines
    assert "error at most 0.0001 relative 2e-07 relative confirmed gpu" in lines
    assert "range 2.50x to 3.50x 3.00x (2.40x to 3.20x) undecided gpu" in lines
    assert "time at least +50.0 % - not measurable here gpu" in lines
    assert "growth at most 2x a doubling - not measurable here gpu" in lines
    assert "time: unsupported [no-feature] no strides" in lines
    assert "growth: out: expected 1, got 2" in lines
    assert "speed: some work: 3 ms against 3 ms" in lines
    assert "speed, memory, more, error, range, time, growth: An article's." in lines
    assert lines[-1] == (
        "7 claims: 2 confirmed, 2 not confirmed, 1 undecided, 2 not measurable here; 1 of them wrong or with an error"
    )


def test_json_has_each_claim_by_name_with_its_source_and_its_figures() -> None:
    result = report.as_json(ANSWERS)["claims"]
    assert set(result) == {answer.claim.name for answer in ANSWERS}
    assert (result["speed"]["outcome"], result["speed"]["low"], result["speed"]["least"]) == ("not confirmed", 1.0, 1.5)
    assert (result["time"]["value"], result["time"]["code"]) == (None, "no-feature")
    assert json.loads(json.dumps(result)) == result


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command without a probe; ``answers`` of each claim are all of the one kind that a test sets."""
    told: dict[str, Any] = {"make": lambda one: judged(one, Measured.exactly(one.figure, "as promised"))}

    def answers(device: object, chosen: list[Claim], known: object) -> Iterator[ClaimResult]:
        told["chosen"] = [row.name for row in chosen]
        yield from (told["make"](row) for row in chosen)

    monkeypatch.setattr(common, "refusal", lambda _: None)
    monkeypatch.setattr(run, "answers", answers)
    return told


def test_the_command_measures_the_claims_that_were_asked_for_and_writes_them(
    scripted: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "claims.json"
    assert cli.main(["claims", "--claim", "int8-*", "--claim", "fp16-speed", "--json", str(path)]) == GREEN
    assert sorted(scripted["chosen"]) == [
        "fp16-speed", "int8-dynamic-memory", "int8-dynamic-speed", "int8-static-memory", "int8-static-speed",
    ]  # fmt: skip
    data = json.loads(path.read_text())
    assert (data["kind"], sorted(data["claims"])) == ("claims", sorted(scripted["chosen"]))
    told = capsys.readouterr()
    assert "5 claims: 5 confirmed" in told.out
    assert [line.split(",")[0] for line in told.err.splitlines()] == [f"  {done} of 5 claims" for done in range(1, 6)]


def test_a_claim_that_is_not_confirmed_is_green_and_a_wrong_result_is_not(scripted: dict[str, Any]) -> None:
    scripted["make"] = lambda one: judged(one, Measured.exactly(one.figure * 0.5, "less"))
    assert cli.main(["claims", "--claim", "fp16-*"]) == GREEN
    scripted["make"] = lambda one: catalogue.wrong(one, "out: expected 1, got 2")
    assert cli.main(["claims"]) == RED
    scripted["make"] = lambda one: catalogue.absent(one, unsupported(Code.NO_BACKEND, "none here"))
    assert cli.main(["claims"]) == NOTHING


def test_unknown_names_are_met_with_legal_ones(scripted: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["claims", "--claim", "fp15-speed"]) == USAGE
    printed = capsys.readouterr().err
    assert "unknown claim 'fp15-speed'. Did you mean 'fp16-speed'? Legal values: " in printed
    assert all(item.name in printed for item in claims())
    assert "chosen" not in scripted


def test_a_file_of_claims_that_is_wrong_ends_the_command_before_anything_is_measured(
    scripted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalogue, "PACKAGED", written(tmp_path / "mine.toml", least='"2x"'))
    assert cli.main(["claims"]) == USAGE
    assert "mine.toml: claim 1 (mine): field 'least'" in capsys.readouterr().err
    assert "chosen" not in scripted


def test_declaring_the_commands_imports_no_torch() -> None:
    code = "import sys, accelcheck.commands.claims, accelcheck.commands.curve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
