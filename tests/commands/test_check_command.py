"""`accelcheck check`: a table of a model's techniques with a recommendation, and what it could not say."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fault_harness import Planted
from process_harness import completed
from report_page import Page, blocks

from accelcheck.commands.check import USUAL, _usual
from accelcheck.core.case import FELL_BACK, SCHEME, Case, Evidence, Figure, Measurement, Mode, Verdict
from accelcheck.core.journal import ErrorCode, Record
from accelcheck.core.quiet import LEAVES
from accelcheck.report.advice import INFERENCE, TRAINING, Row, advice, recommended, rows, unjudgeable
from accelcheck.report.console import plain
from accelcheck.techniques.matrix import Matrix

ROOT = Path(__file__).parents[2]
NET = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(8, 6), torch.arange(8) % 3)] * 2
    data = [(torch.randn(200, 6), torch.zeros(200, dtype=torch.long)) for _ in range(2)]
    return {
        "model": model, "batches": batches, "loss": nn.functional.cross_entropy, "optimizer": torch.optim.AdamW,
        "data": data, "metric": lambda out, target: out.argmax(1) == target,
    }

def untrained():
    made = make()
    return {"inputs": made["batches"][0][:1], **{key: made[key] for key in ("model", "data", "metric")}}

class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls

def spectral():
    return nn.Linear(4, 4, dtype=torch.complex64), (torch.randn(2, 4, dtype=torch.complex64),)

def counting():
    return Counting(6, 3), (torch.randn(8, 6),)

def broken():
    return nn.Linear(3, 3)
"""


TREED = """
import torchao.quantization
from net import make as of_net
from torch.utils import _pytree

def make():
    made = of_net()
    made["model"].tree = _pytree.tree_flatten((1, 2))[1]
    return made
"""
WRONG = f"""
import sys
sys.path.append({str(ROOT / "tests")!r})

def pytest_accel_techniques():
    from plugin_harness import Toy, after
    wrong = Toy("toy-wrong", after(lambda out: out * 1.5))
    wrong.requires = frozenset()
    return [wrong]
"""


def checked(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "net.py").write_text(NET)
    return pasted(folder, ["accelcheck.cli", "check", *words])


def pasted(folder: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a module of Python with its words, in a folder as a user has it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ACCELCHECK_"))}
    return completed([sys.executable, "-m", *words], cwd=folder, env=environ | {"PYTHONPATH": str(ROOT)}, timeout=400)


@pytest.mark.slow
def test_a_model_is_judged_timed_and_recommended_for(tmp_path: Path) -> None:
    words = ("net.py:make", "--device=cpu", "--technique=jit-trace", "--technique=eager", "--technique=sdpa-math")
    done = checked(tmp_path, *words, "--journal=j.jsonl", "--report=r.html", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert done.stderr.startswith("reading net.py:make\none forward pass takes ")
    by_name = {row["technique"]: row for row in document["rows"]}
    assert by_name["jit-trace"]["verdicts"] == dict.fromkeys(
        ("forward", "backward", "train", "speed", "train-speed", "accuracy"), "pass"
    )
    assert set(by_name["jit-trace"]["speed_up"]) == {"inference", "training"}
    assert by_name["jit-trace"]["safe"] == {"inference": True, "training": True}
    assert by_name["jit-trace"]["accuracy_lost"][0] <= 0.01
    assert {e["claim"] for e in by_name["jit-trace"]["evidence"]} > {"no operator left cpu for the CPU"}
    assert by_name["eager"]["speed_up"] == {}  # it would be timed against itself
    assert document["refused"] == {"sdpa-math": "needs attention (calls of scaled_dot_product_attention)"}
    assert set(document["recommended"]["cpu"]) == {"inference", "training"}
    assert {path.name for path in tmp_path.iterdir()} >= {"j.jsonl", "j-speed.jsonl", "r.html"}


@pytest.mark.slow
def test_a_file_may_have_the_name_of_a_workload(tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(NET)
    done = pasted(
        tmp_path, ["accelcheck.cli", "check", "mlp.py:make", "--device=cpu", "--technique=eager", "--no-speed"]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("mlp.make: Sequential with 163 parameters.\n")


@pytest.mark.slow
def test_each_command_of_a_check_works_when_it_is_pasted(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(WRONG)
    words = ("net.py:untrained", "--device=cpu", "--technique=inplace", "--technique=toy-wrong", "--report=r.html")
    done = checked(tmp_path, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    page = Page((tmp_path / "r.html").read_text("utf-8"))
    assert "qualif" not in page.text
    _, (block,) = blocks(page)
    of_cases = {block["texts"][row[7]]: block["texts"][row[0]] for row in block["rows"]}
    shown = re.findall("pytest --pyargs [^\n]*", "\n".join(page.words))
    printed = re.findall("reproduce: (pytest .*)", done.stdout)
    assert shown
    assert printed
    assert {*shown, *printed} <= set(of_cases)
    assert {word.rpartition("/")[2].split()[0] for word in of_cases} >= {"forward", "backward", "speed", "accuracy"}
    for command, why in of_cases.items():
        again = pasted(tmp_path, shlex.split(command))
        assert again.returncode == (1 if why else 0), again.stdout + again.stderr
        assert "1 cases executed" in again.stdout


@pytest.mark.slow
def test_remarks_of_torchao_and_pytree_are_in_no_output_of_a_check(tmp_path: Path) -> None:
    (tmp_path / "treed.py").write_text(TREED)
    (tmp_path / "conftest.py").write_text("def pytest_sessionfinish(session): session.exitstatus = 3")
    names = ("int8-torchao-weight-only", "export", "compile-static")
    done = checked(tmp_path, "treed.py", "--device=cpu", *(f"--technique={name}" for name in names), "--no-speed")
    assert "ended with 3" in done.stderr  # so that the end of pytest's output is printed
    assert "Sequential with 163 parameters" in done.stdout
    (tmp_path / "conftest.py").unlink()
    # A check prints the output of cases where they could not run: here it is.
    chosen = [
        *(f"--accel-technique={name}" for name in names),
        "--accel-dtype=float32",
        "--accel-level=2",
        "--accel-device=cpu",
    ]
    words = ["--accel-model=treed.py", "--accel-workload=treed", f"-Wignore:{LEAVES}:FutureWarning", *chosen]
    cases = pasted(tmp_path, ["pytest", "-s", "--pyargs", "accelcheck.suite.test_numerics", *words])
    assert cases.returncode == 0, cases.stdout + cases.stderr
    printed = [*(done.stdout + done.stderr + cases.stdout + cases.stderr).splitlines()]
    assert [s for s in printed if re.search("_pytree|Enum sub|Failed to load|cpp ext|is deprecated, use", s)] == []


@pytest.mark.slow
def test_the_table_ends_with_a_recommendation(tmp_path: Path) -> None:
    done = checked(
        tmp_path, "net.py:make", "--device=cpu", "--technique=channels-last", "--technique=inplace", "--no-speed"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "net: Sequential with 163 parameters." in done.stdout
    assert "cpu, inference: right, but not timed: inplace" in done.stdout
    assert "1 x needs conv (NCHW convolutions): channels-last" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"net.py", "__pycache__"}  # nothing is left in the folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("net.py:broken",), "accelcheck: net.py:broken: expected (model, inputs)"),
        (("none.py:make",), "accelcheck: none.py:make: there is no file"),
        (("net.py:spectral", "--dtype=float16"), "--dtype=float16: the model has complex numbers"),
        (("net.py:make", "--technique=eagr"), "unknown technique 'eagr'. Did you mean 'eager'"),
        (("net.py:make", "--journal=net.py"), "net.py exists, and is kept: give another name"),
        (("net.py:make", "--report=no/r.html"), "no/r.html: there is no folder no"),
    ],
)
def test_wrong_words_are_answered_and_nothing_runs(tmp_path: Path, words: Sequence[str], message: str) -> None:
    done = checked(tmp_path, *words)
    assert done.returncode == 4, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def record(
    technique: str, mode: Mode, verdict: Verdict = Verdict.PASS, speed: Sequence[float] = (), memory: float = 1.0
) -> Record:
    measurements = [] if not speed else [Measurement("speed-up", speed[1], "x", speed[0], speed[2])]
    if speed:
        for name in ("peak-memory", "parameters"):
            measurements += [Measurement(name, memory, "B"), Measurement(f"{name}-fp32-eager", 1.0, "B")]
    return Record(
        Case(technique, "net", "cpu", "float32", mode, 1),
        verdict,
        reason="" if verdict is Verdict.PASS else "out: view row: expected at most 1, got 2\nand more",
        evidence=(Evidence("graphs >= 1", 1, engaged=True),),
        figures=(Figure("out", "row", 1e-7, 3e-7, "", gates=True),),
        compared=1,
        measurements=tuple(measurements),
    )


def of(
    technique: str, *, train: Verdict = Verdict.PASS, speed: Sequence[float] = (), memory: float = 1.0
) -> list[Record]:
    timed = [record(technique, Mode.SPEED, speed=speed, memory=memory)] if speed else []
    return [record(technique, Mode.FORWARD), record(technique, Mode.TRAIN, train), *timed]


def test_the_fastest_of_those_that_are_right_is_recommended_with_its_costs() -> None:
    table = rows(
        [
            *of("eager"),
            *of("slow", speed=(0.4, 0.5, 0.6)),
            *of("fast", speed=(1.8, 2.0, 2.2)),
            *of("faster", speed=(2.5, 3.0, 3.5), memory=0.5),
        ]
    )
    recommendations = recommended(table, INFERENCE)
    assert recommendations == (
        "inference: use faster. It is right, 3.00 times as fast as FP32 eager (2.50 or more), "
        "needs 0.50 times its memory and is off by at "
        "most 1.0e-07. Faster and right too: fast 2.00x. Least memory: faster, 0.50 times eager's."
    )


def test_what_may_be_no_faster_is_not_recommended() -> None:
    differences = rows([*of("eager"), *of("maybe", speed=(0.98, 1.1, 1.2))])
    assert (
        recommended(differences, INFERENCE)
        == "inference: stay with eager. None of the 1 techniques that are right and were timed is faster."
    )


def test_an_interval_wider_than_a_half_is_undecided_and_not_recommended() -> None:
    differences = rows([*of("eager"), *of("wide", speed=(1.1, 1.4, 1.7)), *of("fast", speed=(1.1, 1.2, 1.3))])
    recommendations = recommended(differences, INFERENCE)
    assert recommendations.startswith("inference: use fast. ")
    assert recommendations.endswith(
        "Undecided, since their times vary too much: wide; measure again on a quiet machine."
    )
    assert "wide 1.4" not in recommendations
    lines = plain(advice([*of("eager"), *of("wide", speed=(1.1, 1.4, 1.7))], {}))
    assert any(line.startswith("wide") and "undecided (1.10-1.70)" in line for line in lines)
    assert any("cpu, inference: right, but no speed could be decided. Undecided" in line for line in lines)


def test_the_accuracy_lost_is_shown_beside_its_bound() -> None:
    kept = record("lossy", Mode.ACCURACY)
    figures = [("drop", 0.0141, 0.02), ("before", 0.9, math.inf), ("after", 0.8961, math.inf)]
    made = tuple(Figure("accuracy", view, value, most, "", gates=view == "drop") for view, value, most in figures)
    lines = plain(advice([*of("eager"), *of("lossy"), replace(kept, figures=made)], {}))
    assert any(line.startswith("lossy") and "0.39%, at most 1.41%" in line for line in lines)


def test_what_is_wrong_in_training_is_safe_for_inference_alone() -> None:
    records = [*of("eager"), *of("odd", train=Verdict.FAIL, speed=(2.0, 2.0, 2.0))]
    odd = rows(records)[1]
    assert odd.safe(INFERENCE)
    assert not odd.safe(TRAINING)
    lines = plain(advice(records, {}))
    assert "cpu, do not use odd: fail in train: out: view row: expected at most 1, got 2" in lines


def test_what_is_wrong_is_said_with_the_command_that_reproduces_it() -> None:
    lines = plain(advice([*of("eager"), *of("odd", train=Verdict.FAIL)], {}, lambda case: f"run {case.id}"))
    wrong = next(place for place, line in enumerate(lines) if line.startswith("cpu, do not use odd"))
    assert lines[wrong + 1] == "  reproduce: run odd/net/cpu/float32/train"


def test_a_wrong_forward_pass_makes_no_training_safe() -> None:
    records = [record("odd", Mode.FORWARD, Verdict.FAIL), record("odd", Mode.TRAIN)]
    assert not rows(records)[0].safe(TRAINING)


def test_memory_is_parameters_and_the_peak_of_a_call_or_not_measured() -> None:
    names = ("parameters", "parameters-fp32-eager", "peak-memory", "peak-memory-fp32-eager")

    def row(*values: float | None) -> Row:
        plain = record("small", Mode.SPEED, speed=(1.0, 1.0, 1.0))
        sizes = [Measurement(name, value, "B") for name, value in zip(names, values, strict=True)]
        return rows([replace(plain, measurements=(plain.measurements[0], *sizes))])[0]

    assert row(100.0, 400.0, 1.0, 1.0).memory(INFERENCE) == pytest.approx(101 / 401)
    assert row(100.0, 400.0, None, 1.0).memory(INFERENCE) is None
    lines = plain(advice([*of("eager"), *row(100.0, 400.0, None, 1.0).records.values()], {}))
    assert any(line.startswith("small") and "not measured" in line for line in lines)


def test_the_error_of_a_scheme_against_the_fp32_model_is_what_a_recommendation_names() -> None:
    coarse = of("coarse", speed=(2.0, 2.0, 2.0))
    cost = Figure("out", SCHEME, 1.4e-2, math.inf, "", gates=False)
    coarse[0] = replace(coarse[0], figures=(*coarse[0].figures, cost))
    lines = plain(advice([*of("eager"), *coarse], {}))
    assert any(line.startswith("technique") and "against FP32" in line for line in lines)
    assert any("use coarse" in line and "is off by at most 1.4e-02 from the FP32 model" in line for line in lines)


def test_operators_that_the_device_lacks_are_named() -> None:
    lacking = replace(
        Evidence.stayed({"aten::topk": 3, "aten::_embedding_bag": 1}, "cpu"), claim=FELL_BACK, engaged=True
    )
    records = [replace(r, evidence=(*r.evidence, lacking)) for r in of("eager")]
    lines = plain(advice([Record.from_json(r.as_json()) for r in records], {}))
    assert f"cpu, {FELL_BACK}: aten::_embedding_bag, aten::topk." in lines


def test_eager_that_cannot_be_judged_is_said_once_and_nothing_else_is() -> None:
    lost = [
        replace(
            record(name, Mode.BACKWARD, Verdict.ERROR), reason="OracleError: the model keeps state: calls (1, then 2)"
        )
        for name in ("eager", "other")
    ]
    lines = plain(advice(lost, {"packed": "needs packed"}))
    assert lines == [
        "cpu: eager cannot be judged in backward mode, and so no technique can:",
        "  OracleError: the model keeps state: calls (1, then 2)",
    ]


def test_eager_that_cannot_be_timed_or_not_in_half_precision_ends_no_check() -> None:
    lost = record("eager", Mode.FORWARD, Verdict.ERROR)
    assert unjudgeable([lost]) is lost
    assert unjudgeable([replace(lost, case=replace(lost.case, mode=Mode.SPEED))]) is None
    assert unjudgeable([replace(lost, case=replace(lost.case, dtype="bfloat16"))]) is None
    assert unjudgeable([replace(lost, case=replace(lost.case, technique="other"))]) is None


def test_eager_that_is_wrong_is_no_technique_to_leave() -> None:
    lines = plain(advice([record("eager", Mode.FORWARD, Verdict.FAIL)], {}))
    assert any(line.startswith("cpu, eager itself is not right: fail in forward") for line in lines)
    assert not any("do not use eager" in line for line in lines)


def test_the_usual_techniques_exist_and_other_peoples_are_among_them() -> None:
    known = Matrix.load()
    assert set(known.techniques) >= USUAL

    class Own(Planted):
        name = "own"

    own = replace(known, techniques={**known.techniques, "own": Own(lambda _: None)})
    assert _usual(own) == USUAL | {"own"}


@pytest.mark.slow
@pytest.mark.parametrize("named", [(), ("--technique=channels-last", "--technique=export")], ids=["usual", "named"])
def test_a_check_ends_where_eager_cannot_be_judged(named: tuple[str, ...], tmp_path: Path) -> None:
    done = checked(tmp_path, "net.py:counting", "--device=cpu", "--no-speed", "--journal=j.jsonl", *named)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cpu: eager cannot be judged in" in done.stdout
    assert "keeps state between calls" in done.stdout
    assert "eager" in (tmp_path / "j.jsonl").read_text()


def test_an_undecided_case_is_no_reason_against_a_technique() -> None:
    reason = "300 samples are too few: some 1,500 would decide"
    vague = record("vague", Mode.ACCURACY, Verdict.ERROR)
    vague = replace(vague, code=ErrorCode.UNDECIDED, reason=f"UndecidedError: {reason}")
    lines = plain(advice([*of("eager"), *of("vague"), vague], {}))
    assert not any("do not use" in line for line in lines)
    assert f"  vague: {reason}" in lines
    assert any(line.startswith("vague") and " undecided " in line for line in lines)


def test_an_undecided_case_hides_no_wrong_one() -> None:
    vague = replace(record("odd", Mode.ACCURACY, Verdict.ERROR), code=ErrorCode.UNDECIDED, reason="OracleError: none")
    lines = plain(advice([*of("eager"), *of("odd", train=Verdict.FAIL), vague], {}))
    assert any(line.startswith("cpu, do not use odd: fail in train") for line in lines)


def test_what_did_not_run_is_listed_with_its_reason() -> None:
    absent = Record(Case("gpu", "net", "cpu", "float32", Mode.FORWARD, 1), Verdict.UNSUPPORTED, reason="no GPU here")
    lines = plain(advice([*of("eager"), absent], {"packed": "needs packed"}))
    assert "  gpu: unsupported, no GPU here" in lines
    assert "not tried, because they mean nothing for this model: 1 technique" in lines
    assert "  1 x needs packed: packed" in lines
