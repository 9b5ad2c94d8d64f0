"""The fixture `accel`, in a repository that has nothing but the installed package."""

from __future__ import annotations

from pathlib import Path

import pytest
from plugin_harness import Suite

from accelcheck.core.journal_reading import read

MODEL = """
import pytest, torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

X = (torch.linspace(-1, 1, 20).reshape(5, 4),)
BATCHES = [(X[0], torch.arange(5) % 3), (X[0] + 1, torch.arange(5) % 2)]

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""
WRONG = """
def pytest_accel_techniques():
    from torch import nn
    from accelcheck.api import Evidence, Technique
    from accelcheck.api import SUPPORTED

    class Wrong(Technique):
        name, family, promise, source = "wrong", "own", "None.", "https://example.org"

        def prepare(self, program, mode, device):
            module = program.module
            program.call = lambda *inputs: module(*inputs) * 1.01

        def evidence(self, program, log, mode, device):
            yield Evidence("products >= 1", log.count("aten::addmm"), log.count("aten::addmm") >= 1)

    return [Wrong()]
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    made = Suite(pytester, monkeypatch)
    pytester.makeconftest(WRONG)
    return made


def run(suite: Suite, body: str, *words: str) -> pytest.RunResult:
    suite.pytester.makepyfile(test_own=MODEL + body)
    return suite.inside("-q", "-p", "no:randomly", *words)


CHECKS = """
def test_forward_and_backward(accel):
    found = accel.check(net(), X, techniques=["eager", "jit-trace"])
    assert [str(r.case.mode) for r in found["jit-trace"]] == ["forward", "backward"]
    assert all(r.compared for r in found.records)

def test_training(accel):
    accel.check_training(net(), BATCHES, nn.functional.cross_entropy, sgd, techniques=["eager"])

def test_accuracy(accel):
    data = [(torch.randn(200, 4), torch.zeros(200)) for _ in range(2)]
    accel.accuracy(net(), data, lambda out, target: out.argmax(1) == target, techniques=["eager"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--accel-device=cpu",), ("--accel-in-process",)])
def test_models_are_checked_with_options_and_without(suite: Suite, words: tuple[str, ...]) -> None:
    result = run(suite, CHECKS, *words)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*= accelcheck =*", "eager * 4 pass", "jit-trace * 2 pass"])
    result.stdout.fnmatch_lines(["6 cases executed, * elements compared with the oracle: 6 pass"])


@pytest.mark.slow
def test_records_are_in_the_journal(suite: Suite, tmp_path: Path) -> None:
    run(suite, CHECKS, f"--accel-journal={tmp_path / 'j.jsonl'}", "--accel-device=cpu").assert_outcomes(passed=3)
    _, records, *_ = read(tmp_path / "j.jsonl")
    assert {record.case.id for record in records} >= {
        "jit-trace/test-own-test-forward-and-backward/cpu/float32/backward",
        "eager/test-own-test-training/cpu/float32/train",
        "eager/test-own-test-accuracy/cpu/float32/accuracy",
    }


@pytest.mark.slow
def test_a_wrong_technique_fails_the_test_with_the_command_that_repeats_it(suite: Suite) -> None:
    result = run(suite, "\ndef test_it(accel):\n    accel.check(net(), X, techniques=['eager', 'wrong'])\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "wrong/test-own-test-it/cpu/float32/forward: fail",
            "  out: view gain*",
            "  reproduce: pytest test_own.py::test_it",
            "cpu, do not use wrong: fail in forward: out: view *",
        ]
    )
    assert "own_models.py" not in result.stdout.str()


@pytest.mark.slow
def test_the_mark_chooses_techniques_and_dtypes_for_all_checks_of_a_test(suite: Suite) -> None:
    body = """
@pytest.mark.accel(techniques=["eager"], dtypes=["bfloat16"], level=2)
def test_it(accel):
    found = accel.check(net(), X)
    assert {r.case.dtype for r in found.records} == {"bfloat16"}
    found = accel.check(net(), X, dtypes=["float32"])
    assert {(r.case.dtype, r.case.workload) for r in found.records} == {("float32", "test-own-test-it.2")}
"""
    run(suite, body).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("tecniques=['eager']", "unknown argument 'tecniques'. Did you mean 'techniques'"),
        ("techniques='eager'", "techniques: expected a list of texts, got 'eager'"),
        ("limits={'memory': 1}", "limits: unknown limit 'memory'. Did you mean 'memory-at-most'"),
        ("dtypes=['float23']", "dtypes: unknown dtype 'float23'. Did you mean 'float32'"),
        ("'foward'", "unknown mode 'foward'. Did you mean 'forward'"),
    ],
)
def test_a_mark_with_a_wrong_word_ends_the_run_with_the_legal_ones(suite: Suite, mark: str, words: str) -> None:
    result = run(suite, f"\n@pytest.mark.accel({mark})\ndef test_it(accel):\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*test_own.py::test_it: mark accel: {words.replace('[', '[[]')}*"])


def test_a_mark_without_the_fixture_is_an_error_that_names_the_test(suite: Suite) -> None:
    result = run(suite, "\n@pytest.mark.accel(techniques=['eager'])\ndef test_it():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            (
                "*test_own.py::test_it: it has the mark accel and takes neither accel, to check a model of its own, "
                "nor accel_case,*"
            )
        ]
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("accel.check(net(), X[0])",
            "inputs: expected a tuple of the positional arguments, got Tensor; for one argument give (x,)"),
        ("accel.check(net(), X, techniques=['eagr'])", "unknown technique 'eagr'. Did you mean 'eager'"),
        ("accel.check(net(), X, devices=['cdua'])", "unknown device 'cdua'. Did you mean 'cuda'"),
        ("accel.check(net(), X, techniques=['sdpa-math'])",
            "none of the techniques asked for can be tried with this model: sdpa-math needs attention"),
        ("accel.check(lambda x: 'no', X)", "out: expected tensors, or containers and dataclasses of them; got str"),
        ("accel.check_training(net(), [], None, sgd)",
            "batches: expected at least one pair of input and target, got none"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_at_the_line_of_the_test(suite: Suite, call: str, words: str) -> None:
    result = run(suite, f"\ndef test_it(accel):\n    {call}\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f">*{call.replace('[', '[[]')}", f"E*{words.replace('[', '[[]')}*"])
    assert "plugin/own_models.py" not in result.stdout.str()


def test_a_device_that_is_absent_skips_with_its_reason(suite: Suite) -> None:
    result = run(
        suite, "\ndef test_it(accel):\n    accel.check(net(), X, techniques=['eager'], devices=['tpu'])\n", "-rs"
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no TPU chip found*"])


@pytest.mark.slow
def test_a_technique_that_crashes_ends_its_case_alone(suite: Suite) -> None:
    suite.pytester.makeconftest(WRONG.replace("module = program.module", "import os; os.abort()"))
    result = run(
        suite,
        "\ndef test_it(accel):\n    accel.check(net(), X, techniques=['eager', 'wrong'])\ndef test_on():\n    pass\n",
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["wrong/test-own-test-it/cpu/float32/forward: crash", "eager * 2 pass"])


@pytest.mark.slow
def test_the_callers_process_and_model_are_as_they_were(suite: Suite) -> None:
    body = """
def test_it(accel):
    model = net().eval()
    (X[0] @ X[0].t()).sum()
    threads, before = torch.get_num_threads(), [p.clone() for p in model.parameters()]
    accel.check(model, X, techniques=["eager", "amp-bf16"])
    assert not model.training and torch.get_num_threads() == threads
    assert all(map(torch.equal, before, model.parameters()))
    assert not torch.is_autocast_enabled("cpu")
"""
    run(suite, body).assert_outcomes(passed=1)


@pytest.mark.slow
def test_timing_is_skipped_with_workers(suite: Suite) -> None:
    body = "\ndef test_it(accel):\n    accel.benchmark(net(), X, techniques=['eager'])\n"
    result = run(suite, body, "-n", "1", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*timing needs the machine for itself: run this test without -n"])


@pytest.mark.slow
def test_a_limit_that_is_not_kept_fails_the_benchmark(suite: Suite) -> None:
    body = (
        "\ndef test_it(accel):\n"
        "    accel.benchmark(net(), X, techniques=['jit-trace'], limits={'speed-up-at-least': 1000})\n"
    )
    result = run(suite, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["  limit: speed up: expected at least 1000 (a limit of the test), got *"])


def test_tests_that_do_not_use_it_pay_for_no_probe(suite: Suite) -> None:
    result = run(suite, "\ndef test_it():\n    pass\n")
    result.assert_outcomes(passed=1)
    assert "accelcheck" not in result.stdout.str().replace("accelcheck-", "")


def test_a_test_that_seeds_nothing_has_the_same_model_each_time(suite: Suite) -> None:
    body = """
def test_it(accel, pytestconfig):
    import random
    with open("drawn.txt", "a") as file:
        print(torch.rand(()).item(), random.random(), file=file)
"""
    for _ in range(2):
        run(suite, body).assert_outcomes(passed=1)
    first, other = (suite.pytester.path / "drawn.txt").read_text(encoding="utf-8").splitlines()
    assert first == other


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_of_own_models_alone_says_nothing_of_levels_and_must_pass_lists(suite: Suite, workers: str) -> None:
    body = """
def test_it(accel):
    accel.check(net(), X, techniques=["eager"])
"""
    result = run(suite, body, "--accel-device=cpu", "-n", workers)
    result.assert_outcomes(passed=1)
    shown = result.stdout.str()
    assert "2 cases executed" in shown
    assert "qualif" not in shown
    assert "not looked at" not in shown
