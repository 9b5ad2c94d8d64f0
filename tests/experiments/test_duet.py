"""Gate 3: two environments, stubs but for the last test, in processes that take turns."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_harness import reaches
from process_harness import started

import accelcheck
from accelcheck import cli
from accelcheck.core.selection import Selection
from accelcheck.experiments.duet import DuetCase, located, medians, run_pairs
from accelcheck.experiments.duet_side import DuetSide, SideError
from accelcheck.measure.paired import SpeedVerdict

MLP, CNN = "eager/speed-mlp/cpu/float32/speed", "eager/speed-cnn/cpu/float32/speed"

STUB = """#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path({folder!r})
plan = json.loads((folder / "{name}.json").read_text())
job = json.loads(sys.argv[-1])
with (folder / "log").open("a") as log:
    log.write(json.dumps(["{name}", job["task"], job["selection"]["cases"]]) + "\\n")


def say(**record):
    with open(os.environ["ACCELCHECK_MESSAGES"], "a") as messages:
        messages.write(json.dumps(record) + "\\n")


with (folder / "pids").open("a") as pids:
    pids.write(f"{{os.getpid()}} ")


def others():
    pids = set((folder / "pids").read_text().split()) - {{str(os.getpid())}}
    stats = [Path(f"/proc/{{pid}}/stat") for pid in pids]
    return [stat.read_text().split()[2] for stat in stats if stat.exists()]


def turn():
    signal.raise_signal(signal.SIGSTOP)


def misbehave(how):
    if how == "crash":
        print("about to crash", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hang":
        time.sleep(600)
    if how == "exit":
        print("first\\nsecond\\nlast words", file=sys.stderr, flush=True)
        os._exit(3)
    if how == "leave":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os._exit(3)


if "settings" in plan:
    plan["hello"]["runtime"] = str({{name: os.environ.get(name) for name in plan["settings"]}})
misbehave(plan.get("start"))
if "refused" in plan:
    say(**plan["refused"])
    say(end=True)
    sys.exit()
say(hello=plan["hello"])
asked = job["selection"]["cases"] or list(plan["cases"])
say(cases=asked)
print("noise", flush=True)
misbehave(plan.get(job["task"] + "-start"))
if job["task"] == "measure":
    count = folder / "{name}.count"
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
for case in asked:
    facts = plan["cases"][case]
    say(begin=case)
    with open(os.environ["ACCELCHECK_MESSAGES"], "a") as messages:
        messages.write("not JSON\\n")
    misbehave(facts.get(job["task"]))
    if job["task"] == "judge":
        say(done=case, **facts.get("verdict", {{}}))
    elif facts.get("needs_all") and others():
        say(done=case, wrong="error: OutOfMemoryError", broken=True)
    elif "answer" in facts:
        say(done=case, **facts["answer"])
    else:
        seconds = facts["seconds"]
        for _ in range(facts.get("turns", 1)):
            turn()
            with (folder / "turns").open("a") as log:
                log.write("{name}" + str(asked.index(case)))
            if "beside" in facts:
                (folder / "states").open("a").write(" ".join(others()) + "\\n")
        say(done=case, seconds=seconds[number % len(seconds)], to_eager=0.5)
    if job["task"] == "measure":
        misbehave(facts.get("after"))
        turn()
if job["task"] == "measure":
    misbehave(plan.get("end"))
say(end=True)
"""
HELLO = {
    "protocol": 3,
    "python": "3.12.0",
    "torch": "2.13.0",
    "accelcheck": "0.1.0",
    "runtime": "ATen AVX2",
    "exclusive": False,
}


def steady(seconds: float = 0.01, **facts: Any) -> dict[str, Any]:
    return {"seconds": [seconds], **facts}


@dataclass
class Stage:
    """Two stub interpreters, and what they were asked."""

    folder: Path
    told: list[tuple[str, int]] = field(default_factory=list)

    def side(self, name: str, **plan: Any) -> Path:
        """An interpreter with a plan."""
        (self.folder / f"{name}.json").write_text(json.dumps({"hello": HELLO, "cases": {MLP: steady()}, **plan}))
        path = self.folder / name
        path.write_text(STUB.format(python=sys.executable, folder=str(self.folder), name=name))
        path.chmod(0o755)
        return path

    def run_pairs(
        self, a: Mapping[str, Any], b: Mapping[str, Any], looks: Sequence[int] = (2, 4), **options: Any
    ) -> list[DuetCase]:
        sides = DuetSide("A", str(self.side("A", **a))), DuetSide("B", str(self.side("B", **b)))
        _, rows = run_pairs(sides, Selection(("cpu",)), lambda *told: self.told.append(told), looks, **options)
        return rows

    def row(self, a: Mapping[str, Any], b: Mapping[str, Any], **options: Any) -> DuetCase:
        (row,) = self.run_pairs({"cases": {MLP: a}}, {"cases": {MLP: b}}, **options)
        return row

    @property
    def log(self) -> list[tuple[str, str, Any]]:
        """Side, task and cases of every process, in order."""
        lines = (self.folder / "log").read_text().splitlines()
        return [(side, task, cases) for side, task, cases in map(json.loads, lines)]

    @property
    def turns(self) -> list[str]:
        """Side and number of the case, in the order in which they were measured."""
        text = (self.folder / "turns").read_text()
        return [text[at : at + 2] for at in range(0, len(text), 2)]

    @property
    def measured(self) -> str:
        return "".join(side for side, task, _ in self.log if task == "measure")

    def cli(self, a: Mapping[str, Any], b: Mapping[str, Any], *words: str) -> int:
        return cli.main(["duet", f"--python={self.side('A', **a)}", f"--python={self.side('B', **b)}", *words])


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def answer(row: DuetCase) -> SpeedVerdict:
    assert row.found is not None, row
    return row.found.answer


# The parent: order, stopping, answers
def test_processes_alternate_and_judging_comes_first(stage: Stage) -> None:
    wild = {"seconds": [0.01, 0.02, 0.005, 0.04]}
    assert answer(stage.row(wild, steady(), looks=(2, 4))) is SpeedVerdict.UNDECIDED
    assert [(side, task) for side, task, _ in stage.log[:2]] == [("A", "judge"), ("B", "judge")]
    assert stage.measured == "ABBAABBA"


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0101, SpeedVerdict.SAME), (0.0105, SpeedVerdict.SLOWER), (0.0095, SpeedVerdict.FASTER)]
)
def test_b_is_what_is_judged(stage: Stage, seconds: float, expected: SpeedVerdict) -> None:
    row = stage.row(steady(0.01), steady(seconds))
    assert answer(row) is expected
    assert row.found is not None
    assert row.found.ratio == pytest.approx(seconds / 0.01)
    assert stage.measured == "ABBA"  # decided at the first look
    assert row.worse == (expected is SpeedVerdict.SLOWER)


def test_two_processes_measure_a_case_in_turns(stage: Stage) -> None:
    stage.row(steady(turns=4), steady(turns=4), looks=(2,))
    # Both have begun, A first; then it is B's turn. The second pair goes the other way round.
    assert "".join(turn[0] for turn in stage.turns) == "BAABBAAB" + "ABBAABBA"


def test_a_process_that_needs_fewer_turns_waits_for_the_other_before_the_next_case(stage: Stage) -> None:
    stage.run_pairs(
        {"cases": {MLP: steady(turns=1), CNN: steady(turns=2)}},
        {"cases": {MLP: steady(turns=4), CNN: steady(turns=2)}},
        looks=(2,),
    )
    first = stage.turns[:9]
    assert sorted(first[:5]) == ["A0", "B0", "B0", "B0", "B0"]
    assert sorted(first[5:]) == ["A1", "A1", "B1", "B1"]


def test_the_process_whose_turn_it_is_not_is_stopped(stage: Stage) -> None:
    stage.row(steady(turns=3, beside=True), steady(turns=3, beside=True), looks=(2,))
    assert (stage.folder / "states").read_text().split() == ["T"] * 12


@pytest.mark.parametrize("holder", ["A", "B"])
def test_where_one_process_alone_can_hold_the_device_they_run_in_turn(stage: Stage, holder: str) -> None:
    plans: dict[str, dict[str, Any]] = {name: {"cases": {MLP: steady(turns=3)}} for name in "AB"}
    plans[holder] |= {"hello": {**HELLO, "exclusive": True}}
    assert [len(row.samples[0]) for row in stage.run_pairs(plans["A"], plans["B"], looks=(2,))] == [2]
    assert stage.turns == ["A0"] * 3 + ["B0"] * 6 + ["A0"] * 3


def test_a_decided_case_is_not_measured_again(stage: Stage) -> None:
    wild = {"seconds": [0.01, 0.02, 0.005, 0.04]}
    rows = stage.run_pairs({"cases": {MLP: steady(), CNN: wild}}, {"cases": {MLP: steady(), CNN: steady()}})
    assert [row.case for row in rows] == [MLP, CNN]
    assert [cases for _, task, cases in stage.log if task == "measure"] == [[MLP, CNN]] * 4 + [[CNN]] * 4
    assert [len(row.samples[0]) for row in rows] == [2, 4]
    assert stage.told == [
        ("A: judging the cases", 0),
        ("B: judging the cases", 0),
        *[("measuring 2 of 2 cases", 1)] * 2,
        ("1 of 2 cases done", 0),
        *[("measuring 1 of 2 cases", 1)] * 2,
        ("1 of 2 cases done", 0),
    ]


def test_the_margin_is_the_callers(stage: Stage) -> None:
    assert answer(stage.row(steady(0.01), steady(0.0105), margin=0.1)) is SpeedVerdict.SAME


def test_medians_are_over_processes(stage: Stage) -> None:
    row = stage.row({"seconds": [0.01, 0.02, 0.04, 0.03]}, steady())
    assert medians(row.samples[0]).seconds == pytest.approx(0.025)
    assert medians(row.samples[1]).to_eager == 0.5


# The parent: what goes wrong with a case
def test_a_case_that_crashes_on_a_side_is_said_and_the_others_go_on(stage: Stage) -> None:
    three = {"one": steady(), MLP: steady(), CNN: steady()}
    rows = stage.run_pairs({"cases": three}, {"cases": {**three, MLP: steady(measure="crash")}})
    first, crashed, last = rows
    assert answer(first) is answer(last) is SpeedVerdict.SAME
    assert "died of SIGSEGV" in crashed.absent["B"]
    assert "in misbehave" in crashed.absent["B"]  # where: faulthandler's last lines
    assert crashed.worse
    measured = [(side, cases) for side, task, cases in stage.log if task == "measure"]
    # The one that did not crash is given up with the other: what is left is measured by two that run at the same time.
    # What crashed is tried without another process beside it.
    assert measured[:4] == [("A", ["one", MLP, CNN]), ("B", ["one", MLP, CNN]), ("A", [MLP]), ("B", [MLP])]
    assert measured[4:] == [("A", [CNN]), ("B", [CNN]), ("B", ["one", CNN]), ("A", ["one", CNN])]
    assert [len(row.samples[0]) for row in rows] == [len(row.samples[1]) for row in rows] == [2, 0, 2]


@pytest.mark.slow
def test_a_case_that_hangs_is_ended_and_said(stage: Stage) -> None:
    start = time.monotonic()
    rows = stage.run_pairs(
        {"cases": {MLP: steady(measure="hang"), CNN: steady()}}, {"cases": {MLP: steady(), CNN: steady()}}, timeout=2.0
    )
    assert time.monotonic() - start < 60
    assert rows[0].absent == {"A": "hangs: silent for 2 s (--timeout); its last output: noise"}
    assert not rows[0].worse  # it is A that fails
    assert answer(rows[1]) is SpeedVerdict.SAME


def test_a_process_that_leaves_others_with_its_output_is_over_when_it_is(stage: Stage) -> None:
    start = time.monotonic()
    row = stage.row(steady(), steady(measure="leave"))
    assert time.monotonic() - start < 60
    assert row.absent["B"].startswith("the process ended with status 3")


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [("fail: out: view row: expected 1e-7, got 0.3", True), ("unsupported [no-feature] it has none", False)],
    ids=["wrong", "absent"],
)
def test_what_is_wrong_or_absent_on_a_side_is_never_timed(stage: Stage, wrong: str, broken: bool) -> None:
    row = stage.row(steady(), steady(verdict={"wrong": wrong, "broken": broken}))
    assert row.absent == {"B": wrong}
    assert row.worse == broken
    assert not stage.measured


def test_what_crashes_while_it_is_judged_does_not_hide_the_rest(stage: Stage) -> None:
    rows = stage.run_pairs(
        {"cases": {MLP: steady(judge="crash"), CNN: steady()}}, {"cases": {MLP: steady(), CNN: steady()}}
    )
    assert "SIGSEGV" in rows[0].absent["A"]
    assert answer(rows[1]) is SpeedVerdict.SAME


def test_what_fails_on_both_sides_is_no_reason_against_b(stage: Stage) -> None:
    wrong = steady(verdict={"wrong": "fail: out", "broken": True})
    assert not stage.row(wrong, wrong).worse


def test_a_case_of_one_side_only_is_said(stage: Stage) -> None:
    rows = stage.run_pairs({"cases": {MLP: steady()}}, {"cases": {MLP: steady(), CNN: steady()}})
    assert rows[1].absent == {"A": "its matrix has no such case"}
    assert not rows[1].worse
    assert answer(rows[0]) is SpeedVerdict.SAME


def test_an_error_while_measuring_ends_that_case(stage: Stage) -> None:
    row = stage.row(steady(), steady(answer={"wrong": "error: RuntimeError: no", "broken": True}))
    assert row.absent == {"B": "error: RuntimeError: no"}
    assert stage.measured == "ABAB"  # in turns, and apart


def test_what_fails_beside_another_process_is_measured_apart(stage: Stage) -> None:
    # As where one of two processes has taken the device's memory.
    rows = stage.run_pairs(
        {"cases": {MLP: steady(needs_all=True), CNN: steady(turns=2)}},
        {"cases": {MLP: steady(needs_all=True), CNN: steady(turns=2)}},
        looks=(2,),
    )
    assert [answer(row) for row in rows] == [SpeedVerdict.SAME, SpeedVerdict.SAME]
    measured = [(side, cases) for side, task, cases in stage.log if task == "measure"]
    assert measured[:4] == [("A", [MLP, CNN]), ("B", [MLP, CNN]), ("A", [MLP]), ("B", [MLP])]
    assert measured[4:] == [("B", [MLP]), ("A", [MLP]), ("B", [CNN]), ("A", [CNN])]  # it is remembered
    # The other case goes on in turns, and is not lost.
    assert sorted(turn for turn in stage.turns if turn[1] == "1") == ["A1", "A1", "B1", "B1"]


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_process_that_dies_when_it_has_answered_everything_loses_nothing(stage: Stage, *, exclusive: bool) -> None:
    (row,) = stage.run_pairs(
        {"cases": {MLP: steady()}, "end": "crash", "hello": {**HELLO, "exclusive": exclusive}},
        {"cases": {MLP: steady()}},
        looks=(2,),
    )
    assert answer(row) is SpeedVerdict.SAME
    assert stage.measured == "ABBA"


def test_a_process_that_dies_between_two_cases_loses_neither(stage: Stage) -> None:
    rows = stage.run_pairs(
        {"cases": {MLP: steady(after="crash"), CNN: steady()}}, {"cases": {MLP: steady(), CNN: steady()}}, looks=(2,)
    )
    assert [answer(row) for row in rows] == [SpeedVerdict.SAME, SpeedVerdict.SAME]


@pytest.mark.parametrize("task", ["judge", "measure"])
def test_a_process_that_answers_nothing_loses_everything(stage: Stage, task: str) -> None:
    rows = stage.run_pairs(
        {"cases": {MLP: steady(), CNN: steady()}, f"{task}-start": "exit"}, {"cases": {MLP: steady(), CNN: steady()}}
    )
    assert all(row.absent["A"].startswith("not reached: the process ended with status 3") for row in rows)
    assert not any(row.worse for row in rows)


@pytest.mark.parametrize(
    "figures",
    [
        {"seconds": 0.0, "to_eager": 1.0},
        {"seconds": math.nan, "to_eager": 1.0},
        {"seconds": "x", "to_eager": 1.0},
        {"to_eager": 1.0},
    ],
)
def test_figures_that_are_none_are_refused(stage: Stage, figures: dict[str, Any]) -> None:
    with pytest.raises(SideError, match=r"B \(.*expected"):
        stage.row(steady(), steady(answer=figures))


def test_an_environment_that_cannot_start_is_a_usage_error(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.cli({}, {"start": "exit"}) == 4
    printed = capsys.readouterr().err
    assert "accelcheck: B (" in printed
    assert "expected a Python in which torch and an accelcheck that has duets can be imported" in printed
    assert "status 3; its last output: first | second | last words" in printed
    assert "--env-b PYTHONPATH=FOLDER" in printed


def test_a_python_that_is_absent_is_misuse(stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["duet", f"--python={tmp_path}/none"]) == 4
    assert (
        f"expected the path of a python executable such as /env/bin/python, got {tmp_path}/none"
        in capsys.readouterr().err
    )
    empty = tmp_path / "empty"
    empty.write_text("neither a script nor a program")
    empty.chmod(0o755)
    assert cli.main(["duet", f"--python={empty}"]) == 4
    assert "expected a python executable" in capsys.readouterr().err


def test_a_python_that_is_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "python"
    link.symlink_to(sys.executable)  # as a virtual environment's is: what it links to has other packages
    assert located(str(link)) == str(link)


def test_an_accelcheck_of_another_protocol_is_a_usage_error(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.cli({"hello": {**HELLO, "protocol": 7}}, {}) == 4
    assert "expected an accelcheck that speaks protocol 3 of duets, got 7" in capsys.readouterr().err


def test_unknown_names_are_misuse_and_absent_devices_no_fault(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.cli({"refused": {"refused": "unknown workload 'x'", "absent": False}}, {}) == 4
    assert "unknown workload 'x'" in capsys.readouterr().err
    assert stage.cli({}, {"refused": {"refused": "cuda: no NVIDIA GPU", "absent": True}}) == 5
    assert "B (" in capsys.readouterr().err


def test_the_command_prints_versions_figures_and_answers(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    newer = {"hello": {**HELLO, "torch": "2.15.0"}, "cases": {MLP: steady(0.0106), CNN: steady(5e-5)}}
    assert stage.cli({"cases": {MLP: steady(0.01), CNN: steady(1e-4)}}, newer, "--pairs=2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "   python 3.12.0, torch 2.13.0, accelcheck 0.1.0, ATen AVX2"
    assert lines[3] == "   python 3.12.0, torch 2.15.0, accelcheck 0.1.0, ATen AVX2"
    slower, faster = lines[6:8]
    assert " ".join(slower.split()) == f"{MLP} 10.000 ms 10.600 ms 1.060 1.060 to 1.060 2 0.500 0.500 slower"
    assert " ".join(faster.split()) == f"{CNN} 100.0 us 50.0 us 0.500 0.500 to 0.500 2 0.500 0.500 faster"


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [
        (steady(), steady(), 0),
        (steady(), steady(0.005), 0),
        (steady(), {"seconds": [0.01, 0.02]}, 0),
        (steady(), steady(0.02), 1),
        (steady(), steady(measure="crash"), 1),
        (steady(measure="crash"), steady(), 5),
        (steady(verdict={"wrong": "unsupported", "broken": False}), steady(), 5),
    ],
    ids=["same", "faster", "undecided", "slower", "B crashes", "A crashes", "on one side only"],
)
def test_exit_codes(stage: Stage, a: dict[str, Any], b: dict[str, Any], code: int) -> None:
    assert stage.cli({"cases": {MLP: a}}, {"cases": {MLP: b}}, "--pairs=2") == code


def test_the_commands_margin_counts(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    plans = {"cases": {MLP: steady(0.01)}}, {"cases": {MLP: steady(0.0105)}}
    assert stage.cli(*plans, "--pairs=2") == 1
    assert "Differences within 2.0% count as the same" in capsys.readouterr().out
    assert stage.cli(*plans, "--pairs=2", "--margin=0.1") == 0
    assert "Differences within 10.0% count as the same" in capsys.readouterr().out


def test_what_is_not_compared_is_printed_with_its_reason(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.cli({}, {"cases": {MLP: steady(measure="crash")}}, "--pairs=2")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(MLP)]
    assert " - not compared: B: the process died of SIGSEGV" in " ".join(line.split())


def test_one_python_with_two_settings(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    first = stage.side("A", settings=["ONEDNN_MAX_CPU_ISA", "SHARED"], hello=HELLO)
    words = [
        f"--python={first}",
        "--env-a=ONEDNN_MAX_CPU_ISA=AVX2",
        "--env-b=ONEDNN_MAX_CPU_ISA=A=B",
        "--env-b=SHARED=1",
    ]
    assert cli.main(["duet", *words, "--pairs=2"]) == 0
    printed = capsys.readouterr().out
    assert f"A: {first} ONEDNN_MAX_CPU_ISA=AVX2" in printed
    assert "{'ONEDNN_MAX_CPU_ISA': 'AVX2', 'SHARED': None}" in printed
    assert "{'ONEDNN_MAX_CPU_ISA': 'A=B', 'SHARED': '1'}" in printed


def test_what_is_selected_reaches_both_sides(stage: Stage) -> None:
    for name in "AB":
        path = stage.side(name)
        path.write_text(path.read_text().replace('job["selection"]["cases"]])', 'job["selection"]])'))
    words = ["--technique=amp*", "--workload=speed-mlp", "--workload=speed-cnn", "--level=3", "--device=cpu"]
    words.append(f"--case={MLP}")
    cli.main(["duet", f"--python={stage.folder / 'A'}", f"--python={stage.folder / 'B'}", *words, "--pairs=2"])
    seen = [selection for _, task, selection in stage.log if task == "judge"]
    assert (
        seen
        == [
            {
                "devices": ["cpu"],
                "techniques": ["amp*"],
                "workloads": ["speed-mlp", "speed-cnn"],
                "dtypes": [],
                "cases": [MLP],
                "level": 3,
                "shard": None,
                "fuzz": "",
            }
        ]
        * 2
    )


@pytest.mark.parametrize(
    "words",
    [["--python=a", "--python=b", "--python=c"], ["--pairs=1"], ["--timeout=0"]],
    ids=["three pythons", "one pair", "no time"],
)
def test_senseless_options_are_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["duet", *words]) == 4
    assert "expected --python at most twice" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--margin=0"], ["--margin=1.5"], ["--env-a=NAME"], ["--env-b==1"], ["--level=9"]])
def test_options_that_cannot_be_read_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["duet", *words])
    assert ended.value.code == 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_a_killed_parent_leaves_no_stopped_process(tmp_path: Path) -> None:
    parent = f"""
        import json, time
        from dataclasses import asdict
        from accelcheck.core.selection import Selection
        from accelcheck.experiments.duet_side import DuetSide, Process

        job = json.dumps({{"task": "measure", "selection": asdict(Selection(("cpu",), cases=({MLP!r},)))}})
        child = Process(DuetSide("A", {sys.executable!r}), ["-m", "accelcheck.experiments.duet_process", job], 600)
        child.turn()
        print(child.ended, child._child.pid, flush=True)
        time.sleep(600)
        """
    environ = {**os.environ, "PYTHONPATH": str(Path(accelcheck.__file__).parents[1])}
    words = [sys.executable, "-c", textwrap.dedent(parent)]
    with started(words, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        ended, pid = process.stdout.readline().split()
        stat = Path(f"/proc/{pid}/stat")
        assert ended == "None"  # it has handed over
        assert reaches(stat, "T")
        process.kill()
        process.communicate()
        assert reaches(stat, "Z", "gone")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_duet_that_is_terminated_leaves_no_process(stage: Stage) -> None:
    pythons = [
        f"--python={stage.side('A', cases={MLP: steady()})}",
        f"--python={stage.side('B', cases={MLP: steady(measure='hang')})}",
    ]
    code = "import sys; from accelcheck import cli; sys.exit(cli.main(sys.argv[1:]))"
    environ = {**os.environ, "PYTHONPATH": str(Path(accelcheck.__file__).parents[1])}
    pids = stage.folder / "pids"
    with started([sys.executable, "-c", code, "duet", *pythons], env=environ, stderr=subprocess.PIPE) as duet_itself:
        for _ in range(600):  # both judged, then both measuring: A is stopped, B hangs
            sides = pids.read_text().split() if pids.exists() else []
            if len(sides) == 4 and reaches(Path(f"/proc/{sides[2]}/stat"), "T"):
                break
            time.sleep(0.05)
        duet_itself.terminate()
        duet_itself.communicate()
        assert duet_itself.returncode == 128 + signal.SIGTERM
        assert all(reaches(Path(f"/proc/{pid}/stat"), "Z", "gone") for pid in sides[2:])


@pytest.mark.slow
def test_two_real_environments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(accelcheck.__file__).parents[1]))
    assert cli.main(["duet", f"--case={MLP}", "--env-b=OMP_NUM_THREADS=1", "--pairs=2", "--margin=0.99"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"A: {sys.executable}"
    assert lines[2] == f"B: {sys.executable} OMP_NUM_THREADS=1"
    assert all(f"torch {torch.__version__}, accelcheck {accelcheck.__version__}" in lines[at] for at in (1, 3))
    assert lines[6].startswith(MLP)
    assert " ms" in lines[6]
