"""Wrong input of a person, a backend, a plugin or a file, and the run's answer."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from plugin_harness import Ran, Suite, only

OK, FAILED, USAGE, NOTHING_RAN = 0, 1, 4, 5


def refused(ran: Ran) -> str:
    """The one error line of a run that ended before anything was collected."""
    assert ran.ret == USAGE
    assert "collected" not in ran.out
    assert "Traceback" not in ran.out + ran.err
    assert not ran.raw
    (line,) = [line for line in ran.err.splitlines() if line.startswith("ERROR: accelcheck: ")]
    return line


@pytest.mark.parametrize(
    ("option", "word", "nearest", "legal"),
    [
        ("device", "cdua", "cuda", "auto, all, "),
        ("technique", "toy-vlaue", "toy-value", "amp-"),
        ("workload", "tinny", "tiny", "small"),
        ("dtype", "bfloat61", "bfloat16", "float32, bfloat16, float16"),
    ],
)
@pytest.mark.parametrize("twin", [False, True], ids=["command line", "ini file"])
def test_an_unknown_name_is_answered_with_the_legal_ones_and_the_nearest(
    suite: Suite, option: str, word: str, nearest: str, legal: str, twin: bool
) -> None:
    if twin:
        suite.ini(**{f"accel_{option}": word})
    line = refused(suite.run(*([] if twin else [f"--accel-{option}={word}"])))
    assert f"unknown {option} '{word}'. Did you mean '{nearest}'? Legal values: " in line
    assert legal in line.split("Legal values: ")[1]
    assert nearest in line.split("Legal values: ")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--accel-device=qqqqqq", "unknown device 'qqqqqq'. Legal values: auto, all, cpu"),
        ("--accel-technique=nonsuch-*", "unknown technique 'nonsuch-*'"),
    ],
)
def test_a_word_with_no_near_name_is_answered_with_the_legal_ones_alone(suite: Suite, words: str, message: str) -> None:
    assert message in refused(suite.run(words))


VALUES = {
    "level": ("level", "Legal values: 1, 2, 3, 4.", ["5", "0", "-1", "two", "1.5", ""]),
    "probe-timeout": ("probe timeout", "a positive number of seconds", ["0", "-3", "soon", "inf", "nan"]),
    "timeout": ("timeout", "Legal values: a number of seconds, 0 for no limit", ["-1", "soon", "inf"]),
    "effort": ("effort", "auto, full, least", ["leest"]),
    "fuzz": (
        "number of random programs",
        "N or N@FIRST, two whole numbers from 1",
        ["0", "-1", "many", "5@", "5@0", "2.5", "99999999"],
    ),
}


@pytest.mark.parametrize(("option", "word"), [(option, word) for option in VALUES for word in VALUES[option][2]])
def test_a_word_that_is_no_value_is_answered_with_the_legal_ones(suite: Suite, option: str, word: str) -> None:
    line = refused(suite.run(f"--accel-{option}={word}"))
    name, legal, _ = VALUES[option]
    assert f"unknown {name} {word!r}." in line
    assert line.endswith(legal) if option == "level" else legal in line


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tinny/cpu", "tiny/xla"], ids=["unknown workload", "device not asked for"])
def test_an_unknown_case_is_answered_with_the_nearest(suite: Suite, place: str) -> None:
    line = refused(suite.run("--accel-device=cpu", f"--accel-case=toy/{place}/float32/forward"))
    assert f"unknown case 'toy/{place}/float32/forward'" in line
    assert "Expected technique/workload/device/dtype/mode; nearest: toy/tiny/cpu/float32/forward" in line


def test_wrong_words_are_answered_before_the_devices_are_asked(suite: Suite) -> None:
    for words in (["--accel-level=9"], ["--accel-dtype=float8"], ["--accel-probe-timeout=0"], ["--accel-ledger=none"]):
        refused(suite.run(*words))
    assert suite.probed == 0


def test_an_option_that_does_not_exist_is_refused(suite: Suite) -> None:
    ran = suite.run("--accel-devices=cpu")
    assert ran.ret == USAGE
    assert "--accel-devices" in ran.err


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_an_absent_device_skips_its_cases_and_a_run_of_nothing_is_not_green(suite: Suite, workers: str) -> None:
    ran = suite.run(*only("toy", "eager", device="xla"), "-n", workers, "-rs")
    assert ran.ret == NOTHING_RAN
    assert set(ran.verdicts.values()) == {"unavailable"}
    assert len(ran.verdicts) == 2
    assert all(record.code == "no-package" for record in ran.records)
    assert ran.lines(r"SKIPPED \[.\] .*unavailable \[no-package\] the package torch_xla is not installed")
    assert ran.lines(r"  xla: 2 x unavailable \[no-package\] the package torch_xla is not installed")
    assert ran.lines("0 cases executed, 0 elements compared with the oracle: 2 unavailable")
    assert ran.raw[-1] == {"exit": NOTHING_RAN, "kind": "end", "verdicts": {"unavailable": 2}}


@pytest.mark.slow
def test_an_absent_device_beside_one_that_is_here_only_skips(suite: Suite) -> None:
    ran = suite.run(*only("toy"), "--accel-device=tpu")
    assert ran.ret == OK
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass", "toy/tiny/tpu/float32/forward": "unavailable"}


def test_a_selection_without_any_case_is_not_green(suite: Suite) -> None:
    ran = suite.run("--accel-device=cpu", "--accel-technique=toy", "--accel-workload=mlp")
    assert ran.ret == NOTHING_RAN
    assert ran.lines("0 cases executed, 0 elements compared with the oracle: no cases")
    assert "no case of this kind matches the selection" in suite.run(*only("toy", workload="mlp"), "-rs").out


def test_a_required_device_that_is_absent_ends_the_run_before_collection(suite: Suite) -> None:
    line = refused(suite.run(*only("toy", device="all"), "--accel-require"))
    reasons = {"xla": "no-package", "cuda": "no-hardware", "rocm": "no-hardware", "tpu": "no-hardware"}
    assert all(f"{name}: unavailable [{reason}]" in line for name, reason in reasons.items())
    assert "--accel-require: a selected device is absent" in line


@pytest.mark.parametrize(
    ("code", "timeout", "words"),
    [
        ("raise ImportError('undefined symbol: _ZN5torch')", "60", ["import-failed", "undefined symbol: _ZN5torch"]),
        pytest.param(
            "import time; time.sleep(600)",
            "20",
            ["probe-timeout", "no answer within 20 s, during: open xla"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raises", "hangs"],
)
@pytest.mark.slow
def test_a_backend_that_breaks_does_not_stop_the_others(
    suite: Suite, monkeypatch: pytest.MonkeyPatch, code: str, timeout: str, words: list[str]
) -> None:
    (suite.path / "fake").mkdir()
    (suite.path / "fake" / "torch_xla.py").write_text(code)
    # Whatever real torch_xla is installed, believe that this one fits.
    (suite.path / "fit.py").write_text("import accelcheck.devices.xla as xla\nxla.version = lambda name: ''\n")
    monkeypatch.setenv("PYTHONPATH", str(suite.path / "fake"), prepend=":")
    monkeypatch.setenv("PYTHONPATH", str(suite.path), prepend=":")
    ran = suite.run_apart("-p", "fit", *only("toy"), "--accel-device=xla", f"--accel-probe-timeout={timeout}")
    assert ran.ret == OK, ran.out
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass", "toy/tiny/xla/float32/forward": "unavailable"}
    (line,) = ran.lines("  xla: unavailable.*")
    assert all(word in line for word in words), line
    assert ran.lines("  cpu: .*torch .*")


@pytest.mark.parametrize("place", ["file.txt/journal.jsonl", "folder", "/dev/full"])
def test_a_journal_that_cannot_be_written_is_an_error_before_the_first_case(suite: Suite, place: str) -> None:
    if place == "/dev/full" and not Path(place).exists():
        pytest.skip("no device here that is always full")
    (suite.path / "file.txt").write_text("in the way")
    (suite.path / "folder").mkdir()
    marker = suite.pytester.makepyfile(
        "def test_first(accel_case, accel_check): open('ran', 'w').close(); accel_check(accel_case)"
    )
    ran = suite.run(str(marker), *only("toy"), f"--accel-journal={place}")
    line = refused(ran)
    assert f"the journal {suite.path / place} cannot be written: " in line
    assert not (suite.path / "ran").exists()


@pytest.mark.slow
def test_a_workload_that_cannot_be_made_is_the_error_of_its_cases_alone(suite: Suite) -> None:
    ran = suite.run(*only("toy", workload="broken"), "--accel-workload=tiny", "--accel-workload=small")
    assert ran.ret == FAILED
    assert ran.verdicts == {
        "toy/broken/cpu/float32/forward": "error",
        "toy/small/cpu/float32/forward": "pass",
        "toy/tiny/cpu/float32/forward": "pass",
    }
    record = ran.record("toy", "broken")
    assert "LookupError: no such layer" in record.reason
    assert "in broken" in record.traceback
    assert "LookupError: no such layer" in ran.out


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("technique", "error", "place"),
    [
        ("toy-prepare", "LookupError: no such pass", "in raises"),
        ("toy-run", "NotImplementedError: no such kernel", "in _no_kernel"),
    ],
)
def test_a_technique_that_raises_errs_in_its_cases_alone(suite: Suite, technique: str, error: str, place: str) -> None:
    ran = suite.run(*only(technique, "toy"))
    assert ran.ret == FAILED
    assert ran.record("toy").verdict == "pass"
    record = ran.record(technique)
    assert (record.verdict, record.reason) == ("error", error)
    assert record.traceback.startswith("Traceback (most recent call last)")
    assert place in record.traceback
    assert place in ran.out
    assert f"reproduce: pytest --pyargs accelcheck.suite --accel-device=cpu --accel-case={record.case.id}" in ran.out


def test_two_things_of_one_name_are_refused(suite: Suite) -> None:
    suite.pytester.makeconftest("""
        from plugin_harness import Toy, workloads
        def pytest_accel_techniques(): return [Toy("toy"), Toy("toy")]
        def pytest_accel_workloads(): return workloads()
    """)
    line = refused(suite.run(*only("toy")))
    assert "registers a technique named 'toy' too: rename one" in line
    assert "pytest_accel_techniques of" in line
    assert "conftest" in line


ENTRY = """
schema = 2
[[entry]]
cases = ["toy/*"]
verdict = "fail"
match = "^out"
at-most = 2
reason = "known"
link = "https://example.org/1"
owner = "toys"
expires = 2999-01-01
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = ", "not TOML: "),
        (ENTRY.replace("schema = 2", "schema = 7"), "field 'schema': expected 3 or 2, which this accelcheck reads"),
        (ENTRY.replace("schema = 2", "schema = 1"), "(entries of schema 1 had no size: give each an at-most, as"),
        (
            ENTRY.replace("at-most = 2", ""),
            "entry 1: field 'at-most': missing; expected a number of 0 or more for fail",
        ),
        (ENTRY.replace("owner =", "ownr ="), "entry 1: field 'ownr': unknown field 'ownr'. Did you mean 'owner'?"),
        (ENTRY.replace('"fail"', '"sad"'), "entry 1: field 'verdict': expected fail or error, got 'sad'"),
        (
            ENTRY.replace("2999-01-01", '"soon"'),
            "entry 1: field 'expires': expected a date such as 2027-06-30, got 'soon'",
        ),
        (ENTRY.replace('"^out"', '"("'), "entry 1: field 'match': expected a regular expression, got '('"),
        (ENTRY.replace('"known"', '" "'), "entry 1: field 'reason': expected a text"),
        (ENTRY.replace('["toy/*"]', "[]"), "entry 1: field 'cases': expected a list of case ids or globs, got []"),
        (None, "cannot be read: No such file or directory"),
    ],
    ids=["toml", "schema", "older", "size", "fields", "verdict", "expires", "match", "reason", "cases", "absent"],
)
def test_a_broken_ledger_is_refused(suite: Suite, text: str | None, message: str) -> None:
    path = suite.path / "ledger.toml"
    if text is not None:
        path.write_text(text)
    line = refused(suite.run(*only("toy"), f"--accel-ledger={path}"))
    assert str(path) in line
    assert message in line


@pytest.mark.slow
def test_reproduce_commands_survive_a_shell(suite: Suite) -> None:
    ran = suite.run(*only("toy-value"))
    (line,) = set(ran.lines("  reproduce: .*"))  # under CI=true pytest repeats the whole message in its short summary
    assert shlex.split(line.split("reproduce: ")[1]) == [
        "pytest",
        "--pyargs",
        "accelcheck.suite",
        "--accel-device=cpu",
        "--accel-case=toy-value/tiny/cpu/float32/forward",
    ]


@pytest.mark.slow
def test_an_unknown_mode_in_a_mark_names_the_test(suite: Suite) -> None:
    test = suite.pytester.makepyfile("""
        import pytest
        @pytest.mark.accel("sideways")
        def test_mine(accel_case): pass
    """)
    done = suite.inside(str(test), "--accel-device=cpu")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*test_mine*: mark accel: unknown mode 'sideways'. Legal values: forward, *"])


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "below"])
def test_what_follows_failed_in_the_short_summary_runs_the_case_again(suite: Suite, folder: str) -> None:
    suite.ini()  # pytest's root, whatever folder it is called in
    (suite.path / "below").mkdir()
    os.chdir(suite.path / folder)
    ran = suite.run(*only("toy-value", "toy"))
    (line,) = ran.lines(r"FAILED .*")
    words = shlex.split(line.removeprefix("FAILED ").partition(" - ")[0])
    assert words == [
        "--pyargs",
        "accelcheck.suite",
        "--accel-device=cpu",
        "--accel-case=toy-value/tiny/cpu/float32/forward",
    ]
    assert suite.run(*words).ret == FAILED


MAKERS = {
    "returns a tuple": ("lambda g, e: (nn.Linear(4, 3), (torch.ones(5, 4),))",
        "the maker of the workload theirs returned tuple: expected a Problem"),
    "returns a function": ("lambda g, e: print",
        "the maker of the workload theirs returned builtin_function_or_method: expected a Problem"),
    "a function": ("lambda g, e: Problem(torch.relu, (torch.ones(5, 4),))",
        "Problem.module: expected an nn.Module, got builtin_function_or_method"),
    "no tuple": ("lambda g, e: Problem(nn.Linear(4, 3), torch.ones(5, 4))",
        ("Problem.inputs: expected a tuple of the module's positional arguments, got Tensor; for one argument give "
        "(x,)")),
    "a clock": ("lambda g, e: Problem(nn.Linear(4, 3), (torch.randn(5, 4) + time.perf_counter() % 1,))",
        "theirs (draw 0): the workload's maker gives another input[0] when it is called again with the same seed"),
    "a text": ("lambda g, e: Problem(Gives(lambda x: {'a': x, 'b': 'c'}), (torch.ones(5, 4),))",
        ("out['b']: expected a tensor, or tuples, lists and mappings of them; got str, which cannot be compared: let "
        "the module return its tensors alone")),
    "a generator": ("lambda g, e: Problem(Gives(iter), (torch.ones(5, 4),))",
        "which cannot be compared: let the module return its tensors alone"),
    "random": ("lambda g, e: Problem(Gives(lambda x: x + torch.rand_like(x)), (torch.ones(5, 4),))",
        "two runs from the same state differ in out: what the module itself computes is random"),
    "NaN": ("lambda g, e: Problem(Gives(lambda x: x / 0 * 0), (torch.ones(5, 4),))",
        ("the FP64 oracle is NaN at out, with which nothing can be compared: give the model parameters and inputs for "
        "which it is finite")),
}  # fmt: skip


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_maker_gives_wrongly_is_named(suite: Suite, kind: str) -> None:
    code, message = MAKERS[kind]
    suite.pytester.makeconftest(f"""
import time, torch
from torch import nn
from accelcheck.api import Mode, Problem, Workload

class Gives(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.linear, self.out = nn.Linear(4, 3), out
    def forward(self, x):
        return self.out(self.linear(x))

def pytest_accel_workloads():
    return [Workload("theirs", "One.", {code}, modes=frozenset({{Mode.FORWARD}}), dtypes=frozenset({{"float32"}}))]
""")
    ran = suite.run(*only("eager", workload="theirs"))
    record = ran.record("eager", "theirs")
    assert record.verdict == "error"
    assert message in record.reason
    assert message in ran.out


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 'mlp'", "expected a list of what it registers, got 'mlp'"),
        ("return 3", "expected a list of what it registers, got 3"),
        ("return ['mlp']", "expected things with a name"),
        ("raise LookupError('no such model')", "raised LookupError: no such model"),
        (
            "import accelcheck.api as a; return [a.Workload('theirs', 'One.', lambda g: None)]",
            "workload 'theirs': `make`: expected make(generator, extent), got ",
        ),
    ],
)
def test_a_hook_of_a_conftest_that_raises_or_gives_nonsense_is_named(suite: Suite, body: str, message: str) -> None:
    suite.pytester.makeconftest(f"def pytest_accel_workloads():\n    {body}\n")
    line = refused(suite.run(*only("eager", workload="mlp")))
    assert "pytest_accel_workloads of" in line
    assert message in line
