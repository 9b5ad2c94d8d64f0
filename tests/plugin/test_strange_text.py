"""Names and texts of other packages with control characters: nothing that a run prints holds one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import plugin_harness
import pytest
from plugin_harness import PRESENT, Suite, Toy, only

from accelcheck.core.capability import Code, unavailable, unsupported
from accelcheck.techniques.base import Unsupported
from accelcheck.workloads.base import Program, Workload

STRANGE = "\x1b[2J\a\n\u202efirst"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202e]")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def says(program: Program) -> None:
    print(STRANGE)
    raise LookupError(STRANGE)


def refuses(program: Program) -> None:
    raise Unsupported(unsupported(Code.NO_FEATURE, f"no kernel{STRANGE}", tried=True))


def strange_techniques() -> list[Toy]:
    return [Toy(f"toy{STRANGE}", says), Toy(f"toy-refused{STRANGE}", refuses), Toy(f"toy-right{STRANGE}")]


def strange_workloads() -> list[Workload]:
    (tiny,) = (workload for workload in plugin_harness.workloads() if workload.name == "tiny")
    return [replace(tiny, name=f"tiny{STRANGE}")]


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_no_control_character_of_others_is_printed(suite: Suite, monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    suite.answer(cuda=unavailable(Code.NO_HARDWARE, f"no GPU{STRANGE}", STRANGE))
    assert PRESENT.fingerprint is not None
    strange = replace(PRESENT, fingerprint=replace(PRESENT.fingerprint, chip=f"Toy{STRANGE}", driver=STRANGE))
    monkeypatch.setattr(plugin_harness, "PRESENT", strange)
    suite.pytester.makeconftest(
        f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        + plugin_harness.CONFTEST.replace("plugin_harness.techniques", "test_strange_text.strange_techniques")
        .replace("plugin_harness.workloads", "test_strange_text.strange_workloads")
        .replace("import plugin_harness", "import test_strange_text")
    )
    ran = suite.run(*only("toy*", workload="tiny*"), "-n", workers, "-rA", "-v")
    assert sorted(str(record.verdict) for record in ran.records) == ["error", "pass", "unsupported"]
    printed = COLOURS.sub("", ran.out + ran.err)
    assert r"LookupError: \x1b[2J\x07" in printed
    assert r"Toy\x1b[2J" in printed
    assert [line for line in printed.splitlines() if CONTROL.search(line)] == []
    assert not [line for line in printed.splitlines() if line.startswith("first")]


def test_a_wrong_word_is_quoted_without_control_characters(suite: Suite) -> None:
    ran = suite.run(f"--accel-device=a{STRANGE}")
    assert ran.ret == pytest.ExitCode.USAGE_ERROR
    assert r"unknown device 'a\x1b[2J\x07" in ran.err
    assert not CONTROL.search(ran.err)
