"""A run as people see it: header, matrix, journal, JUnit, workers, exit status, progress, and what a failure says."""

from __future__ import annotations

import gc
import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from plugin_harness import ABSENT, CONFTEST, JOURNAL, Suite, only
from process_harness import completed

from accelcheck.core import files
from accelcheck.core.case import stable_seed
from accelcheck.expectations import must_pass
from accelcheck.expectations.must_pass import Floor, MustPass
from accelcheck.plugin.controller import _bracketed, running

OK, FAILED = int(pytest.ExitCode.OK), int(pytest.ExitCode.TESTS_FAILED)


# Those who have accelcheck installed and did not ask for it.

WITNESS = """
import sys
def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        names = ("torch", "accelcheck.techniques.matrix", "accelcheck.plugin.controller", "accelcheck.devices.probe")
        heavy = [name for name in names if name in sys.modules]
        open("loaded.txt", "w").write(" ".join(heavy))
"""


def test_an_unrelated_run_pays_for_no_torch_no_probe_and_no_header(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(WITNESS)
    pytester.makepyfile("def test_nothing(): pass")
    done = pytester.runpytest_subprocess("-v")
    assert done.ret == OK
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["plugins: *accelcheck-*"])
    done.stdout.no_fnmatch_line("accelcheck:*")
    done.stdout.no_fnmatch_line("=* accelcheck =*")
    assert (pytester.path / "loaded.txt").read_text() == ""


def test_importing_the_plugin_imports_no_torch() -> None:
    code = (
        "import sys, accelcheck.plugin.hooks, accelcheck.plugin.controller, accelcheck.plugin.configuration, "
        "accelcheck.expectations.ledger, "
        "accelcheck.devices.probe, accelcheck.report.terminal; print('torch' in sys.modules)"
    )
    done = completed([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "False"


def test_what_the_registry_imports_is_frozen_before_collection(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the garbage collector goes through torch again and again while pytest makes its items."""
    frozen: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("frozen"))
    assert suite.run(*only("toy"), "--collect-only").ret == OK
    assert frozen == ["frozen"]


def test_the_plugin_can_be_named_by_hand(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--accel-device=NAME" in pytester.runpytest_subprocess("-p", "accelcheck", "--help").stdout.str()
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    done = pytester.runpytest_subprocess("-p", "accelcheck.plugin.hooks", "--help")
    assert done.ret == OK
    assert "--accel-device=NAME" in done.stdout.str()


def test_help_asks_no_device(suite: Suite) -> None:
    assert suite.inside("--accel-device=cpu", "--help").ret == OK
    assert suite.probed == 0


def test_the_plugin_can_be_switched_off(suite: Suite) -> None:
    suite.pytester.makeconftest("")  # hooks that nobody declares would be refused
    suite.pytester.makepyfile("def test_nothing(): pass")
    done = suite.inside("-p", "no:accelcheck")
    done.assert_outcomes(passed=1)


def test_cases_that_were_not_asked_for_are_skipped_with_a_hint(suite: Suite) -> None:
    from accelcheck.suite import test_numerics

    done = suite.inside(test_numerics.__file__, "-rs")
    done.assert_outcomes(skipped=3)
    done.stdout.fnmatch_lines(["SKIPPED*accelcheck was not asked for: give --accel-device=auto"])
    assert (done.ret, suite.probed) == (OK, 0)


@pytest.mark.slow
def test_naming_the_suite_is_asking_for_what_is_here(suite: Suite) -> None:
    done = suite.inside("--pyargs", "accelcheck.suite", "--collect-only", "-q", "-k", "toy/tiny/cpu/float32")
    done.stdout.fnmatch_lines(["*test_equivalence[[]toy/tiny/cpu/float32/forward[]]"])
    assert suite.probed == 1


def test_cases_of_eager_come_first_with_a_model_of_the_command_line(suite: Suite) -> None:
    source = "import torch\ndef make(): return torch.nn.Linear(4, 4), (torch.ones(2, 4),)\n"
    (suite.path / "own.py").write_text(source)
    words = ["--accel-device=cpu", "--accel-technique=amp-bf16", "--accel-technique=eager", "--accel-workload=own"]
    ran = suite.run("--accel-model=own.py:make", *words, "--collect-only", "-q")
    order = [line.partition("[")[2].partition("/")[0] for line in ran.lines(".*/own/cpu/float32/.*")]
    assert len(order) > 3
    assert order == sorted(order, reverse=True)


def test_a_run_that_asks_but_has_no_cases_keeps_its_exit_status(suite: Suite) -> None:
    suite.pytester.makepyfile("def test_nothing(): pass")
    done = suite.inside("--accel-device=xla")
    assert done.ret == OK
    done.stdout.no_fnmatch_line("technique*")


def test_the_header_names_found_devices_and_why_others_are_not_here(suite: Suite) -> None:
    ran = suite.run(*only("toy"))
    top = ran.out.partition("rootdir:")[0].splitlines()
    _, here, *absent = top[top.index("accelcheck: level 1, devices asked for: cpu") :]
    assert here == "  cpu: 2 x Toy processor; ATen; torch 2"
    assert "  cuda: unavailable [no-hardware] no NVIDIA GPU found; run on a machine with one" in absent
    assert absent == [f"  {name}: {ABSENT[name]}" for name in sorted(ABSENT)]


@pytest.mark.slow
def test_the_matrix_counts_verdicts_and_names_the_slowest_cases(suite: Suite) -> None:
    others = ("--accel-workload=small", "--accel-workload=broken", "--accel-device=xla")
    ran = suite.run(*only("toy", "toy-value", "toy-prepare"), *others)
    assert ran.ret == FAILED
    assert ran.lines("technique +cpu +xla")
    assert ran.lines(r"toy +1 error, 2 pass +unavailable \[no-package\]")
    assert ran.lines(r"toy-value +1 error, 2 fail +unavailable \[no-package\]")
    assert ran.lines(r"toy-prepare +3 error +unavailable \[no-package\]")
    slow = ran.lines(r" +\d+\.\d s  toy.*/cpu/float32/forward  \(.*\)")
    assert 1 <= len(slow) <= 5
    compared = sum(record.compared for record in ran.records)
    # 5 x 3 outputs, in four draws, of what is wrong too.
    assert compared == 2 * (4 + 4) * 15
    assert ran.lines(
        f"9 cases executed, {compared} elements compared with the oracle: 5 error, 2 fail, 2 pass, 9 unavailable"
    )
    assert ran.raw[-1]["verdicts"] == {"error": 5, "fail": 2, "pass": 2, "unavailable": 9}


def test_the_journal_begins_with_the_facts_and_ends_with_the_exit_status(suite: Suite) -> None:
    ran = suite.run(*only("toy"))
    assert [line["kind"] for line in ran.raw] == ["run", "case", "end"]
    assert ran.header["devices"]["cpu"]["fingerprint"]["chip"] == "Toy processor"
    assert ran.header["accelcheck"]
    assert ran.raw[-1]["exit"] == OK
    case = ran.raw[1]["case"]
    assert (case["id"], case["seed"]) == ("toy/tiny/cpu/float32/forward", stable_seed("tiny"))
    assert ran.lines(f"journal: .*{JOURNAL}")


@pytest.mark.slow
def test_junit_has_the_properties_of_each_case(suite: Suite) -> None:
    ran = suite.run(*only("toy", "toy-value"), "--accel-device=xla", "--junitxml=junit.xml")
    assert ran.ret == FAILED
    cases = {case.get("name", ""): case for case in ET.parse(suite.path / "junit.xml").iter("testcase")}

    def properties(name: str) -> dict[str, str]:
        result = cases[f"test_equivalence[{name}]"].iter("property")
        return {item.attrib["name"].removeprefix("accelcheck."): item.attrib["value"] for item in result}

    passed = properties("toy/tiny/cpu/float32/forward")
    assert (passed["case"], passed["verdict"]) == ("toy/tiny/cpu/float32/forward", "pass")
    assert passed["evidence.aten::addmm dispatched >= 1"] == "1"
    assert passed["view.row"].endswith(" at out")
    assert properties("toy-value/tiny/cpu/float32/forward")["verdict"] == "fail"
    absent = properties("toy/tiny/xla/float32/forward")
    assert (absent["verdict"], absent["code"]) == ("unavailable", "no-package")


@pytest.mark.slow
def test_a_run_leaves_no_folder_behind(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    place = suite.path / "temporary"
    place.mkdir()
    monkeypatch.setattr(files, "_KNOWN", [place])
    suite.run(*only("toy", "toy-value"))
    suite.run(*only("toy"), "--accel-journal=/")
    suite.run("--accel-technique=nonsuch", "--accel-device=cpu")
    assert not list(place.iterdir())


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_case_that_runs_long_is_named_with_its_limit_while_it_runs(suite: Suite, workers: str) -> None:
    # In a process of its own: there, pytest captures what is written to standard output while a case runs.
    suite.pytester.makeconftest(
        f"{CONFTEST}\nimport accelcheck.plugin.controller\naccelcheck.plugin.controller.PATIENCE = 0.5\n"
    )
    ran = suite.run_apart(*only("toy-slow"), "-n", workers)
    assert ran.ret == OK
    assert ran.lines(r"accelcheck: toy-slow/tiny/cpu/float32/forward: running for \d s of 300 s")


@pytest.mark.parametrize(
    ("seconds", "limit", "text"),
    [
        (30.2, None, "running for 30 s"),
        (30.2, 300.0, "running for 30 s of 300 s"),
        (250.0, 300.0, "running for 250 s of 300 s; then it is ended"),
        (320.0, 300.0, "running for 320 s; each of its runs is ended after 300 s"),
    ],
)
def test_a_limit_is_said_when_it_is_near(seconds: float, limit: float | None, text: str) -> None:
    assert running(seconds, limit) == text


def test_brackets_in_folder_names_do_not_hide_the_case() -> None:
    name = "toy/tiny/cpu/float32/forward"
    assert _bracketed(f"a[b]/test_numerics.py::test_equivalence[{name}]") == name
    assert _bracketed(f"test_numerics.py::test_equivalence[{name}]@group") == name
    assert _bracketed("test_numerics.py::test_plain") == ""


def test_a_test_of_ones_own_takes_the_selected_cases_of_its_modes(suite: Suite) -> None:
    test = suite.pytester.makepyfile("""
        import pytest
        @pytest.mark.accel("forward")
        def test_forward(accel_case, accel_check):
            assert accel_check(accel_case).verdict == "pass"
        def test_all(accel_case):
            pass
        @pytest.mark.accel("train")
        def test_train(accel_case):
            raise AssertionError
    """)
    done = suite.inside("--strict-markers", "-v", str(test), *only("toy", workload="tiny"))
    done.assert_outcomes(passed=2, skipped=1)
    done.stdout.fnmatch_lines_random(
        ["*::test_forward[[]toy/tiny/cpu/float32/forward[]] PASSED*", "*::test_train[[]no-case[]] SKIPPED*"]
    )


def test_the_garbage_collector_leaves_out_what_there_was_before_the_first_case(suite: Suite) -> None:
    gc.unfreeze()
    test = suite.pytester.makepyfile("""
        import gc
        import pytest
        @pytest.mark.accel("forward")
        def test_forward(accel_case, accel_check):
            assert gc.get_freeze_count() > len(gc.get_objects())
    """)
    suite.inside(str(test), *only("toy", workload="tiny")).assert_outcomes(passed=1)
    assert gc.get_freeze_count() == 0


def facts(lines: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    return [(line["case"]["id"], line["case"]["seed"], line["verdict"]) for line in lines]


@pytest.mark.slow
def test_workers_and_none_give_the_same_ids_seeds_and_verdicts_and_two_runs_the_same_figures(suite: Suite) -> None:
    words = ["--accel-device=cpu"]
    words += [f"--accel-technique={name}" for name in ("eager", "inplace", "toy-value")]
    words += [f"--accel-workload={name}" for name in ("mlp", "tiny")]
    first, again = (suite.run(*words, "-n", "0").cases for _ in range(2))
    spread = suite.run(*words, "-n", "2")
    assert len(first) > 4
    assert {line["verdict"] for line in first} >= {"pass", "fail"}
    assert facts(first) == facts(again) == facts(spread.cases)
    for key in ("figures", "evidence", "compared", "eager_excess", "faults", "reason"):
        assert [line.get(key) for line in first] == [line.get(key) for line in again]
    # And the workers said nothing themselves: one header, one matrix, one journal.
    assert len(spread.lines("technique +cpu")) == 1
    assert len(spread.lines("=+ accelcheck =+")) == 1
    assert len(spread.lines("accelcheck: level 1, devices asked for: cpu")) == 1
    assert [line["kind"] for line in spread.raw].count("end") == 1


@pytest.mark.slow
def test_the_controller_of_workers_imports_no_torch(suite: Suite) -> None:
    suite.pytester.makeconftest(CONFTEST + WITNESS)
    # -k and not --accel-technique: names given as options are checked, and that needs torch.
    ran = suite.run_apart("--accel-device=cpu", "-n", "1", "-k", "toy/tiny/cpu/float32")
    assert ran.verdicts == {"toy/tiny/cpu/float32/forward": "pass"}
    assert "torch" not in (suite.path / "loaded.txt").read_text().split()


def test_what_became_unsupported_only_by_trying_is_listed_with_its_message(suite: Suite) -> None:
    ran = suite.run(*only("toy-refused"))
    assert ran.record("toy-refused", "tiny").remark == "found by trying"
    (title,) = ran.lines("unsupported found by trying: .*")
    assert title.startswith("unsupported found by trying: 1 case (docs/verdicts.md")
    assert "  cpu: 1 x unsupported [no-feature] No available kernel" in ran.out.split(title)[1]


@pytest.mark.slow
def test_an_expected_failure_is_xfail_with_its_reason(suite: Suite) -> None:
    ran = suite.run(*only("toy-value"), f"--accel-ledger={suite.ledger()}", "-rx")
    assert ran.ret == OK
    assert ran.verdicts == {"toy-value/tiny/cpu/float32/forward": "xfail"}
    assert ran.record("toy-value").reason.splitlines()[0] == "its factor is 1.5 (https://example.org/1)"
    assert ran.lines(r"XFAIL .*toy-value/tiny/cpu/float32/forward\].*its factor is 1\.5.*")
    assert ran.lines(r"  cpu: 1 x its factor is 1\.5 \(https://example\.org/1\)")


ERROR = {"verdict": "error", "match": "^LookupError: no such pass", "at_most": "LookupError"}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("technique", "entry", "words", "verdict"),
    [
        ("toy-value", {}, ["--runxfail"], "xfail"),
        ("toy-prepare", {"cases": ["toy-prepare/*"], **ERROR}, [], "xfail"),
        ("toy-value", {"expires": "2001-01-01"}, [], "fail"),
        ("toy-value", {**ERROR, "match": "."}, [], "fail"),
    ],
    ids=["runxfail", "an error", "expired", "another verdict"],
)
def test_a_failure_is_expected_as_its_entry_says(
    suite: Suite, technique: str, entry: dict[str, Any], words: list[str], verdict: str
) -> None:
    ran = suite.run(*only(technique), f"--accel-ledger={suite.ledger(**entry)}", *words)
    assert (ran.ret, ran.record(technique).verdict) == (OK if verdict == "xfail" and not words else FAILED, verdict)


def test_a_passing_case_with_an_entry_is_a_failure(suite: Suite) -> None:
    ran = suite.run(*only("toy"), f"--accel-ledger={suite.ledger(cases=['toy/tiny/*'])}")
    assert ran.ret == FAILED
    assert ran.record("toy").verdict == "xpass"
    assert "passes: remove the entry from the ledger" in ran.out
    assert "the ledger expects fail: its factor is 1.5" in ran.out


@pytest.mark.slow
def test_a_failure_with_a_line_that_no_entry_explains_stays_a_failure(suite: Suite) -> None:
    path = suite.ledger(cases=["toy-two/*"])
    ran = suite.run(*only("toy-two"), f"--accel-ledger={path}")
    assert (ran.ret, ran.record("toy-two").verdict) == (FAILED, "fail")
    other = suite.ledger("other.toml", cases=["toy-two/*"], match="^not engaged")
    ran = suite.run(*only("toy-two"), f"--accel-ledger={path}", f"--accel-ledger={other}")
    assert (ran.ret, ran.record("toy-two").verdict) == (OK, "xfail")


# What is wrong with a candidate, and how the failure says so.
@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("technique", "message"),
    [
        ("toy-idle", "not engaged: aten::addmm dispatched >= 1: observed 1"),
        ("toy-device", "out: device: expected cpu, got meta"),
        ("toy-input", "input[0]: mutated: expected it bitwise unchanged, got other bits"),
        ("toy-parameter", "parameter:weight: mutated: expected it bitwise unchanged, got other bits"),
        ("toy-nan", "out: NaN pattern, 3 elements differ, first at [2, 0]: expected 0 of them, got 3"),
        ("toy-dtype", "out: dtype: expected float32, got bfloat16"),
        ("toy-strides", "out: strides: expected (3, 1), got (1, 5)"),
        ("toy-shape", "out: shape: expected (5, 3), got (2, 3)"),
    ],
)
def test_a_wrong_candidate_fails_and_says_what_where_and_how_again(suite: Suite, technique: str, message: str) -> None:
    ran = suite.run(*only(technique))
    assert ran.ret == FAILED
    record = ran.record(technique)
    assert record.verdict == "fail"
    assert message in record.why.splitlines()
    assert f"  {message}" in ran.out.splitlines()
    assert f"{record.case.id}: fail" in ran.out.splitlines()
    assert f"  reproduce: pytest --pyargs accelcheck.suite --accel-device=cpu --accel-case={record.case.id}" in ran.out


@pytest.mark.slow
def test_a_wrong_value_shows_measured_and_allowed_and_its_command_shows_it_again(suite: Suite) -> None:
    ran = suite.run(*only("toy-value"))
    record = ran.record("toy-value")
    beyond = [figure for figure in record.figures if figure.gates and not figure.within]
    assert {figure.path for figure in beyond} == {"out"}
    assert [f for f in beyond if f.view == "row" and 0.1 < f.measured < 1 and f.allowed < 1e-4]
    assert ran.lines(r"  out: view row at .*: expected at most \d\.\d{3}e-\d\d, got \d\.\d{3}e-\d\d")
    assert ran.lines("  row .*  out .*  <-- beyond")
    again = suite.reproduce(ran)
    assert again.ret == FAILED
    assert again.verdicts == ran.verdicts
    assert again.record("toy-value").faults == record.faults


@pytest.mark.slow
def test_a_technique_without_evidence_is_an_error(suite: Suite) -> None:
    ran = suite.run(*only("toy-mute"))
    assert ran.ret == FAILED
    record = ran.record("toy-mute")
    assert (record.verdict, record.why) == ("error", "toy-mute gave no evidence that it ran: a verdict needs some")


# A vendor's device.

VENDOR = """
from accelcheck.devices.base import Device, Fingerprint

class Vendor(Device):
    name = "vendor"
    type = "cpu"
    features = frozenset({"strided"})

    def open(self):
        import torch

    def fingerprint(self):
        return Fingerprint("vendor", "Vendor One", 1, runtime="Vendor runtime 3")

    def torch_device(self):
        import torch
        return torch.device("cpu")

    def synchronize(self):
        pass

class Absent(Vendor):
    name = "vendor-absent"

    def open(self):
        raise OSError("libvendor.so: cannot open shared object file")
"""
VENDOR_HOOK = """
def pytest_accel_devices():
    from vendor_device import Absent, Vendor
    return [Vendor(), Absent()]
"""


@pytest.mark.slow
def test_a_device_of_another_package_is_probed_and_runs_cases_on_workers_too(suite: Suite) -> None:
    (suite.path / "vendor_device.py").write_text(VENDOR)
    suite.pytester.makeconftest(CONFTEST + VENDOR_HOOK)
    ran = suite.run_apart(*only("toy", device="vendor"), "--accel-device=vendor-absent", "-n", "1")
    assert ran.ret == OK, ran.out
    assert ran.verdicts == {
        "toy/tiny/vendor/float32/forward": "pass",
        "toy/tiny/vendor-absent/float32/forward": "unavailable",
    }
    assert ran.lines("  vendor: 1 x Vendor One; Vendor runtime 3")
    assert ran.lines(r"  vendor-absent: unavailable \[import-failed\] .*libvendor\.so.*")
    assert ran.lines("  cpu: .*torch .*")


def test_a_must_pass_case_that_was_not_collected_fails_by_name(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    floors = dict.fromkeys((1, 2, 3, 4), Floor(1, 1, 1))
    levels = {"toy/tiny/float32/forward": 1, "toy-gone/tiny/float32/forward": 1}
    monkeypatch.setattr(must_pass, "of", lambda _: MustPass("cpu", 7, "0" * 64, 1, levels, floors))
    ran = suite.run(*only("toy", "toy-[gt]o*"))
    assert ran.ret == 1
    assert ran.verdicts["toy/tiny/cpu/float32/forward"] == "pass"
    assert ran.verdicts["toy-gone/tiny/cpu/float32/forward"] == "error"
    assert "version 7 of the must-pass list cpu, which was not collected" in ran.out
    assert ran.header["must_pass"] == {"cpu": {"class": "cpu", "version": 7, "sha256": "0" * 64}}
