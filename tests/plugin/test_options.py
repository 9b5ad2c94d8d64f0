"""Every option and its ini twin: what it selects or changes. Probing is stubbed; runs are inside this process."""

from __future__ import annotations

import shlex

import pytest
from plugin_harness import JOURNAL, Ran, Suite, only

from accelcheck.core.capability import Code, unavailable
from accelcheck.devices.probe import builtin
from accelcheck.plugin.options import OPTIONS

COMMAND_LINE, INI = "command line", "ini file"


@pytest.fixture(params=[COMMAND_LINE, INI])
def place(request: pytest.FixtureRequest) -> str:
    word: str = request.param
    return word


def give(suite: Suite, place: str, *arguments: str, **options: str | list[str] | bool) -> Ran:
    """Run with `options` given on the command line or in the ini file, and `arguments` on the command line."""
    if place == INI:
        texts = {f"accel_{k}": shlex.join(v) if isinstance(v, list) else str(v).lower() for k, v in options.items()}
        if isinstance(options.get("journal"), str):
            texts["accel_journal"] = str(options["journal"])
        suite.ini(**texts)
        return suite.run(*arguments)
    words: list[str] = []
    for name, given in options.items():
        flag = f"--accel-{name.replace('_', '-')}"
        if given is True:
            words.append(flag)
        else:
            words += [f"{flag}={value}" for value in (given if isinstance(given, list) else [given])]
    return suite.run(*words, *arguments)


def parts(ran: Ran, index: int) -> set[str]:
    """The different words at one place of the case ids."""
    return {name.split("/")[index] for name in ran.verdicts}


def test_every_option_has_an_ini_twin(suite: Suite) -> None:
    done = suite.inside("--help")
    text = done.stdout.str()
    assert {option.name for option in OPTIONS} == {
        *("device", "technique", "workload", "dtype", "case", "level", "shard"),
        *("require", "explain", "journal", "ledger", "probe_timeout", "timeout", "in_process", "resume", "import"),
        *("effort", "model", "fuzz"),
        *("baseline", "baselines", "limits", "processes", "profile"),
    }
    for option in OPTIONS:
        assert f"--accel-{option.name.replace('_', '-')}" in text
        assert f"  {option.dest} (" in text


@pytest.mark.slow(after=1)
def test_device_is_repeatable_and_keeps_its_order(suite: Suite, place: str) -> None:
    ran = give(suite, place, "--accel-technique=toy", "--accel-workload=tiny", device=["xla", "cpu", "xla"])
    assert ran.ret == 0
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass", "toy/tiny/xla/float32/forward": "unavailable"}
    assert ran.lines("accelcheck: level 1, devices asked for: xla, cpu")
    assert ran.lines("technique +xla +cpu")


@pytest.mark.slow(after=1)
def test_device_auto_takes_what_is_here_and_is_what_runs_unless_said(suite: Suite, place: str) -> None:
    for options in ({"device": ["auto"]}, {}):
        ran = give(suite, place, "--accel-technique=toy", "--accel-workload=tiny", **options)
        assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass"}


@pytest.mark.slow(after=1)
def test_device_all_takes_all_that_are_known(suite: Suite, place: str) -> None:
    ran = give(suite, place, "--accel-technique=toy", "--accel-workload=tiny", device=["all"])
    assert parts(ran, 2) == builtin().keys()
    assert sorted(ran.verdicts.values()) == ["pass", *["unavailable"] * (len(builtin()) - 1)]


def test_an_accelerator_that_only_the_probe_knows_can_be_named(suite: Suite) -> None:
    suite.answer(toyaccel=unavailable(Code.PROBE_FAILED, "it does not answer"))
    ran = suite.run(*only("toy", device="toyaccel"))
    assert ran.verdicts == {"toy/tiny/toyaccel/float32/forward": "unavailable"}


@pytest.mark.slow
def test_technique_and_workload_are_repeatable_and_take_globs(suite: Suite, place: str) -> None:
    ran = give(suite, place, "--accel-device=cpu", "--accel-workload=tiny", technique=["toy-t*", "eager", "toy"])
    assert parts(ran, 0) == {"eager", "toy", "toy-too", "toy-two"}
    ran = give(suite, place, "--accel-device=cpu", "--accel-technique=toy", workload=["s?all", "tiny"])
    assert parts(ran, 1) == {"small", "tiny"}


@pytest.mark.slow
def test_dtype_is_repeatable(suite: Suite, place: str) -> None:
    common = [*only("toy"), "--accel-level=2"]
    assert parts(give(suite, place, *common, dtype=["bfloat16"]), 3) == {"bfloat16"}
    assert parts(give(suite, place, *common, dtype=["bfloat16", "float32"]), 3) == {"bfloat16", "float32"}
    assert parts(give(suite, place, *common, dtype=["float16"]), 3) == set()


@pytest.mark.slow
def test_case_runs_exact_ids_whatever_their_level(suite: Suite, place: str) -> None:
    asked = ["toy/later/cpu/bfloat16/forward", "toy-too/tiny/cpu/float32/forward"]
    ran = give(suite, place, "--accel-device=cpu", case=asked)
    assert ran.verdicts == dict.fromkeys(asked, "pass")


@pytest.mark.slow
def test_level_1_is_what_runs_unless_said(suite: Suite) -> None:
    ran = suite.run(*only("toy", workload="*"))
    level_1 = {f"toy/{name}/cpu/float32/forward" for name in ("broken", "small", "tiny")}
    assert set(ran.verdicts) == level_1 | {"toy/timed/cpu/float32/speed"}


@pytest.mark.slow
def test_level_adds_slower_cases(suite: Suite, place: str) -> None:
    common = ["--accel-device=cpu", "--accel-technique=toy", "--accel-workload=tiny", "--accel-workload=later"]
    ran = give(suite, place, *common, level="2")
    assert set(ran.verdicts) == {
        "toy/tiny/cpu/float32/forward",
        "toy/tiny/cpu/bfloat16/forward",  # a further dtype waits one level more
        "toy/later/cpu/float32/forward",
    }
    assert ran.header["level"] == 2
    assert len(give(suite, place, *common, level="3").records) == 4


@pytest.mark.slow(after=1)
def test_require_refuses_an_absent_device(suite: Suite, place: str) -> None:
    ran = give(suite, place, *only("toy", device="xla"), "--accel-device=cpu", require=True)
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert "xla: unavailable [no-package] the package torch_xla is not installed" in ran.err
    assert not ran.records
    assert give(suite, place, *only("toy"), require=True).ret == 0


def test_require_can_be_switched_off_in_the_ini_file(suite: Suite) -> None:
    suite.ini(accel_require="false")
    assert suite.run(*only("toy", device="xla"), "--accel-device=cpu").ret == 0


@pytest.mark.slow(after=1)
def test_journal_keeps_a_line_a_case(suite: Suite, place: str) -> None:
    words = ["--pyargs", "accelcheck.suite", *only("toy", "toy-too")]
    if place == INI:
        suite.ini(accel_journal=f"folder/{JOURNAL}")
    else:
        words.append(f"--accel-journal=folder/{JOURNAL}")
    done = suite.inside(*words)
    written = suite.path / "folder" / JOURNAL
    assert done.ret == 0
    assert len(written.read_text().splitlines()) == 4
    done.stdout.fnmatch_lines([f"journal: {written}"])


@pytest.mark.slow
def test_ledger_is_repeatable(suite: Suite, place: str) -> None:
    first = suite.ledger("one.toml")
    other = suite.ledger("other.toml", cases=["toy-idle/*"], match="not engaged")
    ran = give(suite, place, *only("toy-value", "toy-idle"), ledger=[str(first), str(other)])
    assert set(ran.verdicts.values()) == {"xfail"}
    assert ran.ret == 0


def test_files_named_in_the_ini_file_are_relative_to_it(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.ledger()
    suite.ini(accel_ledger="ledger.toml", accel_journal=f"folder/{JOURNAL}")
    (suite.path / "below").mkdir()
    monkeypatch.chdir(suite.path / "below")
    done = suite.inside("--pyargs", "accelcheck.suite", *only("toy-value"))
    assert done.ret == 0
    done.stdout.fnmatch_lines(["toy-value *1 xfail", f"journal: {suite.path / 'folder' / JOURNAL}"])


@pytest.mark.slow
def test_files_on_the_command_line_are_relative_to_the_start(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.ini()
    (suite.path / "below").mkdir()
    monkeypatch.chdir(suite.path / "below")
    suite.ledger("below/ledger.toml")
    words = [*only("toy-value"), "--accel-ledger=ledger.toml", f"--accel-journal={JOURNAL}"]
    done = suite.inside("--pyargs", "accelcheck.suite", *words)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["toy-value *1 xfail", f"journal: {suite.path / 'below' / JOURNAL}"])


@pytest.mark.slow
def test_probe_timeout_reaches_the_probe(suite: Suite, place: str) -> None:
    give(suite, place, *only("toy"), probe_timeout="7.5")
    assert suite.timeout == 7.5
    suite.ini()
    suite.run(*only("toy"))
    assert suite.timeout == 60.0


def test_the_command_line_replaces_the_ini_file(suite: Suite) -> None:
    suite.ini(accel_device="xla", accel_technique="toy-too toy-idle", accel_workload="small", accel_level="2")
    ran = suite.run(*only("toy"), "--accel-level=1")
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass"}


def test_any_ini_value_asks_for_accelcheck(suite: Suite) -> None:
    suite.ini(accel_device="cpu")
    suite.pytester.makepyfile("def test_nothing(): pass")
    done = suite.inside()
    done.stdout.fnmatch_lines(["accelcheck: level 1, devices asked for: cpu"])
    assert (done.ret, suite.probed) == (0, 1)


@pytest.mark.slow
def test_fuzz_adds_programs_of_consecutive_numbers_and_the_journal_says_so(suite: Suite, place: str) -> None:
    ran = give(suite, place, *only("eager", workload="program-*"), fuzz="2@5001")
    assert parts(ran, 1) == {"program-5001", "program-5002"}
    assert ran.header["selection"]["fuzz"] == "2@5001"
    ran = suite.run("--accel-case=eager/program-5001/cpu/float32/forward", "--accel-device=cpu")
    assert parts(ran, 1) == {"program-5001"}
