"""Why a case failed: its layers, its operator or what stands in an operator's place, and the command."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Bed, Planted, bench, built_in, case
from torch.nn import functional

from accelcheck import cli
from accelcheck.checks.execute import Bench
from accelcheck.checks.trial import Trial
from accelcheck.commands import explain as command
from accelcheck.commands.common import GREEN, NOTHING, RED, USAGE
from accelcheck.core.capability import Capability, Code, unsupported
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Record
from accelcheck.devices.base import Device
from accelcheck.explain import compiled, layers
from accelcheck.explain.alone import alone
from accelcheck.explain.calls import OperatorCall
from accelcheck.explain.explain import Explanation, difference, explain, failing_draws
from accelcheck.explain.operators import Seen
from accelcheck.explain.places import ModelPlace
from accelcheck.explain.smallest import Shrinker, Smallest
from accelcheck.explain.text import all_named, as_json, report
from accelcheck.plugin import registered
from accelcheck.report.console import plain
from accelcheck.selftest.faults.base import Change
from accelcheck.selftest.faults.plant import calling, editing, kernels, nothing
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.observe import Log, ProfilerLog
from accelcheck.verify.oracle import FIRST, Store
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Draw


class Named(Planted):
    """A technique of the harness under another name."""

    def __init__(self, name: str, change: Change, *, compiles: bool = False) -> None:
        super().__init__(change, warmups=0)
        self.name = name
        self.family = name
        self.compiles = compiles

    @property
    def watch(self) -> type[Log]:  # type: ignore[override]  # a class attribute of the base
        return ProfilerLog if self.compiles else super().watch


def larger(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs) * 1.01


def benched(store: Store, name: str, *techniques: Named, device: Device | None = None) -> Bench:
    """A bench of several techniques, all of them right but for what is planted."""
    chosen = bench(store, techniques[-1], built_in()[name], device)
    return replace(chosen, matrix=Matrix({t.name: t for t in techniques}, chosen.matrix.workloads))


def explained(
    store: Store, change: Change, name: str = "matmul", mode: Mode = FORWARD, dtype: str = "float32", **options: Any
) -> Explanation:
    there = benched(store, name, Named("eager", nothing), Named("planted", change))
    return explain(there, case(built_in()[name], mode, dtype), **options)


WRONG = kernels(mm=larger, addmm=larger)


@pytest.mark.parametrize(
    ("wrong", "compiles", "blamed"),
    [
        ({"eager", "compile-aot-eager", "planted"}, True, layers.KERNEL),
        ({"compile-aot-eager", "planted"}, True, layers.CAPTURE),
        ({"planted"}, True, layers.COMPILER),
        ({"planted"}, False, layers.TECHNIQUE),
        (set(), False, ""),
    ],
)
def test_the_first_layer_that_is_wrong_is_blamed(fresh: Store, wrong: set[str], compiles: bool, blamed: str) -> None:
    names = ("eager", "compile-aot-eager", "planted")
    techniques = [Named(n, WRONG if n in wrong else nothing, compiles=compiles and n == "planted") for n in names]
    there = benched(fresh, "matmul", *techniques)
    chosen = layers.layers(there, case(built_in()["matmul"]), [FIRST])
    assert layers.blamed(chosen) == blamed
    assert [item.verdict for item in chosen if item.wrong] == [Verdict.FAIL] * len(wrong)
    assert "there is no other device" in chosen[-1].reason


def test_a_technique_that_is_wrong_on_the_cpu_too_is_blamed_itself() -> None:
    kernel = layers.Layer("eager on toy", layers.KERNEL, "pass")
    compiled = layers.Layer("planted on toy", layers.COMPILER, "fail")
    right = layers.Layer("planted on the cpu", layers.TECHNIQUE, "pass")
    wrong = replace(right, verdict="fail")
    assert layers.blamed([kernel, compiled, right]) == layers.COMPILER
    assert layers.blamed([kernel, compiled, wrong]) == layers.TECHNIQUE
    assert layers.blamed([replace(kernel, verdict="fail"), compiled, wrong]) == layers.KERNEL


def test_the_operator_is_named_with_its_place_and_its_error(fresh: Store) -> None:
    explanation = explained(fresh, WRONG)
    assert explanation.failed
    assert all_named(explanation) == ["aten::mm"]
    assert explanation.blamed == layers.TECHNIQUE
    assert explanation.smallest is not None
    text = "\n".join(plain(report(explanation)))
    assert "aten::mm, number " in text
    assert "tensor 1: float32[" in text
    assert "strides" in text
    assert as_json(explanation)["operator"]["name"] == "aten::mm"
    assert as_json(explanation)["blamed"] == layers.TECHNIQUE


def test_an_operator_of_the_backward_pass_is_named(fresh: Store) -> None:
    explanation = explained(fresh, kernels(mm=larger), "mlp", BACKWARD, with_layers=False)
    assert all_named(explanation) == ["aten::mm"]
    assert explanation.culprit is not None
    assert explanation.culprit.place.backward
    assert explanation.culprit.place.module


@pytest.mark.slow
def test_what_stands_in_an_operators_place_is_named_where_each_operator_is_right(fresh: Store) -> None:
    wrong = calling(lambda _, x: functional.gelu(x, approximate="tanh"))
    explanation = explained(fresh, wrong, "gelu", with_layers=False)
    assert explanation.culprit is None
    assert all_named(explanation) == ["aten::gelu"]
    text = "\n".join(plain(report(explanation)))
    assert "each is within the budget of its own rounding" in text
    assert "technique: aten::gelu(approximate=tanh)" in text


class Compiling(Named):
    """Compiles with a backend whose sine is wrong from a graph of its own on: what stands for a compiler."""

    def __init__(self, name: str, wrong: str) -> None:
        super().__init__(name, nothing, compiles=True)
        self.arguments: dict[str, Any] = {"backend": functools.partial(compiler, wrong)}

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.call = torch.compile(program.module, **self.arguments)

    def finish(self) -> None:
        torch.compiler.reset()


def compiler(wrong: str, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Runs a graph of torch's functions or of ATen's as it is, but for the results of one that are too large."""

    class Changed(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            out = super().run_node(n)
            return out * 1.01 if n.op.startswith("call") and str(n.target).find(wrong) >= 0 else out

    return Changed(graph).run


@pytest.mark.slow
def test_the_first_wrong_cut_of_a_compiled_graph_is_named(fresh: Store) -> None:
    there = benched(fresh, "elementwise-5", Named("eager", nothing), Compiling("planted", "sin"))
    explanation = explain(there, case(built_in()["elementwise-5"]), with_layers=False)
    assert all_named(explanation) == ["aten::sin"]
    assert explanation.region is not None
    assert explanation.region.line.startswith("elementwise.py:")
    text = "\n".join(plain(report(explanation)))
    assert "aten::sin in the captured forward graph, number 2 of" in text
    assert "compiled up to the operator before it, it is right" in text


def test_a_compiled_graph_that_is_right_alone_has_no_wrong_cut(fresh: Store) -> None:
    there = benched(fresh, "elementwise-5", Named("eager", nothing), Compiling("planted", "nothing of this name"))
    workload = built_in()["elementwise-5"]
    trial = Trial(case(workload), there.matrix.techniques["planted"], workload, there.devices["cpu"], fresh)
    assert (
        compiled.region(trial, FIRST) == "each captured graph is right when it is compiled by itself with these inputs"
    )


def test_a_technique_that_does_not_say_how_it_compiles_is_not_taken_apart(fresh: Store) -> None:
    workload = built_in()["matmul"]
    there = benched(fresh, "matmul", Named("planted", nothing, compiles=True))
    trial = Trial(case(workload), there.matrix.techniques["planted"], workload, there.devices["cpu"], fresh)
    assert "is not taken apart" in str(compiled.region(trial, FIRST))


@pytest.mark.slow
def test_a_change_after_the_last_operator_names_none(fresh: Store) -> None:
    def edit(result: dict[str, torch.Tensor]) -> None:
        with contextlib.suppress(KeyError):
            result["out"] = torch.from_numpy(result["out"].numpy() * 2)

    explanation = explained(fresh, editing(edit), with_layers=False)
    assert explanation.failed
    assert (explanation.culprit, explanation.difference, all_named(explanation)) == (None, None, [])
    assert "after the last of them" in "\n".join(plain(report(explanation)))


def test_a_case_that_passes_is_not_explained(fresh: Store) -> None:
    explanation = explained(fresh, nothing)
    assert not explanation.failed
    assert explanation.layers == []
    assert plain(report(explanation)) == ["planted/matmul/cpu/float32/forward: pass", "nothing to explain"]


@pytest.mark.slow
def test_a_run_that_raises_names_the_operator_in_which_it_did(fresh: Store) -> None:
    def broken(func: Any, *args: Any) -> Any:
        raise RuntimeError(f"no {func.name()} today: {len(args)} arguments")

    explanation = explained(fresh, kernels(relu=broken), with_layers=False)
    assert explanation.record.verdict is Verdict.ERROR
    assert explanation.notes == ["the run raised RuntimeError in aten::relu; operators dispatched until then: 3"]


def test_a_technique_without_evidence_has_no_operator_to_name(fresh: Store) -> None:
    record = Record(case(built_in()["matmul"]), Verdict.FAIL, reason="not engaged: graphs compiled >= 1: observed 0")
    assert failing_draws(record, [FIRST, Draw(1)]) == []


def test_an_operator_that_is_wrong_now_and_then_is_named_without_a_script(fresh: Store) -> None:
    calls = itertools.count(1)

    def seldom(func: Any, *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs) * (1.01 if next(calls) % 7 == 0 else 1.0)

    explanation = explained(fresh, kernels(mm=seldom), with_layers=False)
    assert explanation.record.verdict is Verdict.FAIL
    assert all_named(explanation) == ["aten::mm"]
    assert explanation.smallest is None
    assert explanation.notes == [
        (
            "no script: aten::mm is right when it is called again with the same inputs; what ran before it matters, or "
            "chance"
        )
    ]


def test_the_draws_that_fail_are_read_from_the_verdict() -> None:
    faults = (
        Fault(FaultKind.EVIDENCE, "graphs", got="0"),
        Fault(FaultKind.VIEW, "out", "row", "tiny", measured=1e-3, allowed=1e-7, place="[3, :]"),
        Fault(FaultKind.VIEW, "out", "gain", "draw 2", measured=1e-3, allowed=1e-7),
        Fault(FaultKind.VIEW, "out", "bias in all draws", measured=2.0, allowed=1.0),
    )
    known = [FIRST, Draw(1), Draw(2), Draw(0, "tiny"), Draw(0, "huge")]
    record = Record(case(built_in()["matmul"]), Verdict.FAIL, faults=faults)
    assert failing_draws(record, known) == [Draw(2), Draw(0, "tiny")]
    own = replace(record, faults=(*faults, Fault(FaultKind.VIEW, "out", "row", measured=1e-3, allowed=1e-7)))
    assert failing_draws(own, known) == [FIRST, Draw(2), Draw(0, "tiny")]


def test_what_is_left_out_comes_before_what_is_added() -> None:
    def run(*names: str) -> list[Seen]:
        return [Seen(name, "", ModelPlace(), (0,)) for name in names]  # type: ignore[arg-type]  # not read

    assert difference(run("mm", "relu"), run("mm", "relu")) is None
    result = difference(run("mm", "gelu", "sum"), run("clone", "mm", "mul", "sum"))
    assert result is not None
    assert ([call.operator for call in result.eager], [call.operator for call in result.technique]) == (
        ["gelu"],
        ["mul"],
    )


class Registered:
    """The matrix of `accelcheck explain`: the harness's techniques, on the CPU."""

    techniques: ClassVar[list[Named]] = []

    @classmethod
    def matrix(cls, config: object, case: str) -> Matrix:
        return Matrix({technique.name: technique for technique in cls.techniques}, {"matmul": built_in()["matmul"]})


class Refusing(Named):
    """A technique that no device has."""

    def capability(self, device: Device) -> Capability:
        return unsupported(Code.NO_BACKEND, f"{device.name} has none")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "refusal", lambda name: None if name == "cpu" else f"no {name} found")
    monkeypatch.setattr(registered, "here", lambda _: None)
    monkeypatch.setattr(registered, "matrix", Registered.matrix)
    monkeypatch.setattr(registered, "device", lambda _: Bed())
    Registered.techniques = [
        Named("eager", nothing),
        Named("wrong", WRONG),
        Refusing("refusing", nothing),
        Named("aborting", kernels(mm=lambda *_, **__: os.abort())),
        Named("hanging", kernels(mm=lambda *_, **__: time.sleep(1e6))),
        Named("exiting", lambda _: sys.exit(3)),
        Named("early", lambda _: os.abort()),
        Named("late", editing(lambda _: os.abort())),
    ]
    yield tmp_path
    Registered.techniques = []


ID = "{}/matmul/cpu/float32/forward"


@pytest.mark.slow
def test_the_command_explains_a_case_and_writes_a_script(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", ID.format("wrong")]) == RED
    out = capsys.readouterr().out
    assert "=> technique" in out
    assert "aten::mm, number " in out
    (script,) = installed.glob("explain-*.py")
    assert script.name in out
    # The fault is in the technique, which the script does not have: that is said.
    assert "it exits with 0 (it is right alone" in out


@pytest.mark.parametrize(
    ("word", "code", "text"),
    [
        (ID.format("eager"), GREEN, "nothing to explain"),
        (ID.format("refusing"), NOTHING, "nothing to explain: the case did not run (no-backend)"),
        ("wronk/matmul/cpu/float32/forward", USAGE, "nearest: wrong/matmul/cpu/float32/forward"),
        ("wrong", USAGE, "Expected technique/workload/device/dtype/mode"),
        ("wrong/matmul/moon/float32/forward", NOTHING, "nothing to explain: moon cannot be used here: no moon found"),
    ],
)
def test_a_case_that_does_not_fail_or_is_not_there_is_said_not_to(
    installed: Path, capsys: pytest.CaptureFixture[str], word: str, code: int, text: str
) -> None:
    assert cli.main(["explain", word]) == code
    out, err = capsys.readouterr()
    assert text in (out if word.startswith(("eager", "refusing")) else err)
    assert not list(installed.glob("*.py"))


@pytest.mark.parametrize(
    ("name", "verdict", "end"),
    [
        ("aborting", "crash", "died of SIGABRT"),
        pytest.param("hanging", "hang", "ran for longer than 3 s and was killed", marks=pytest.mark.slow),
    ],
)
def test_the_operator_that_was_running_when_a_process_ended_is_named(
    installed: Path, capsys: pytest.CaptureFixture[str], name: str, verdict: str, end: str
) -> None:
    assert cli.main(["explain", ID.format(name), "--timeout=3"]) == RED
    out = capsys.readouterr().out
    assert f"{ID.format(name)}: {verdict}\n  the process that ran it {end}" in out
    assert re.search(rf"{name} on cpu +technique +{verdict} .* its process {end}", out)
    assert "=> technique" in out
    assert "aten::mm, number 1: it had begun, and not returned" in out
    (script,) = installed.glob("explain-*.py")
    assert f"{script}: with the inputs of the case\nrun alone, it exits with 0 (the operator returns alone" in out


@pytest.mark.slow
def test_the_limit_of_a_case_is_not_that_of_a_start(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (installed / "sitecustomize.py").write_text("import time; time.sleep(4)\n")
    assert cli.main(["explain", ID.format("aborting"), "--timeout=3", "--no-layers"]) == RED
    assert "run alone, it exits with 0 (the operator returns alone" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("installed")
def test_what_ends_a_process_between_operators_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", ID.format("early"), "--no-layers"]) == RED
    assert "none had begun: it ends while parameters and inputs are brought to the device" in capsys.readouterr().out
    assert cli.main(["explain", ID.format("late"), "--no-layers", "--json"]) == RED
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["script"]) == ("crash", None)
    assert document["ended"]["returned"] is True
    assert document["named"] == [document["ended"]["operator"]]


def test_a_script_ends_its_own_process_where_the_operator_does(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import os\nos.abort()\n")
    assert alone(path, {}) == "run alone, it died of SIGABRT"
    path.write_text("import time\ntime.sleep(100)\n")
    assert alone(path, {}, 0.5) == "run alone, it ran for longer than 0.5 s and was killed"
    path.write_text("print(1)\nraise SystemExit(3)\n")
    assert alone(path, {3: "three"}) == "run alone, it exits with 3 (three): 1"
    path.write_text("raise ValueError('x')\n")
    assert alone(path, {1: "the fault is there"}) == "run alone, it exits with 1 (an error): ValueError: x"


def shrunk_if_there_is_time(self: Shrinker, call: OperatorCall, shrink: Any = Shrinker.shrink) -> Smallest | None:
    if self._end > time.monotonic():
        os.abort()
    answer: Smallest | None = shrink(self, call)
    return answer


BEGUN = "aten::mm, number 1: it had begun, and not returned"
CRASH = "crash\n  the process that ran it died of SIGABRT"


@pytest.mark.slow(after=1)
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "options", "texts"),
    [
        ("aborting", ["--timeout=0", "--no-layers"], [CRASH, BEGUN]),
        ("aborting", ["--timeout=60", "--no-layers"], [CRASH, BEGUN]),
        ("exiting", [], [f"{ID.format('exiting')}: error\n  SystemExit: 3"]),
        (
            "wrong",
            ["--no-layers", "--script=not/there.py"],
            ["aten::mm, number ", "note: no script: [Errno 2] No such file or directory"],
        ),
        (
            "wrong",
            ["--no-layers"],
            ["aten::mm, number ", "note: not shrunk: the process that explained it died of SIGABRT"],
        ),
    ],
    ids=["crash without a limit", "crash within it", "exit", "no folder for the script", "crash of a smaller case"],
)
def test_what_ends_a_process_or_keeps_a_script_from_being_written_costs_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, options: list[str], texts: list[str]
) -> None:
    if (name, options) == ("wrong", ["--no-layers"]):
        monkeypatch.setattr(Shrinker, "shrink", shrunk_if_there_is_time)
    assert cli.main(["explain", ID.format(name), *options]) == RED
    out = capsys.readouterr().out
    assert [text for text in texts if text not in out] == []


def test_modes_without_an_fp64_oracle_are_said_to_have_none(fresh: Store) -> None:
    workload = built_in()["matmul"]
    there = benched(fresh, "matmul", Named("planted", WRONG))
    accuracy = Case("planted", workload.name, "cpu", "float32", Mode.ACCURACY, 1)
    explanation = explain(there, accuracy)
    assert explanation.record.verdict is Verdict.ERROR  # the workload has no such task
    assert "alone are explained" in explanation.notes[0]
