"""The capability table: the same answers that cases get, on a terminal and in the documentation."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from accelcheck import cli
from accelcheck.core.capability import BY_TRIAL, SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Verdict
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Device, Status
from accelcheck.report import catalogue
from accelcheck.report.console import plain
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix


@functools.cache
def matrix() -> Matrix:
    return Matrix.load()


DOCS = Path(__file__).parents[2] / "docs" / "techniques.md"


class Choosy(Eager):
    """Does not exist on xla; elsewhere it needs a package that nobody has."""

    name = "choosy"
    family = "test"
    packages = {"no_such_package": "pip install no-such-package"}  # noqa: RUF012 - an instance of this test's own

    def capability(self, device: Device) -> Capability:
        return unsupported(Code.NO_BACKEND, "not there") if device.name == "xla" else SUPPORTED


def choosy() -> catalogue.TechniqueRow:
    known = Matrix({"choosy": Choosy()}, matrix().workloads)
    (row,) = catalogue.technique_rows(known, catalogue.columns(("cpu", "xla")))
    return row


def test_what_does_not_exist_is_said_before_what_is_absent() -> None:
    assert choosy().answers == {
        "cpu": unavailable(Code.NO_PACKAGE, "no_such_package is not installed", "pip install no-such-package"),
        "xla": unsupported(Code.NO_BACKEND, "not there"),
    }


def test_the_documentation_does_not_depend_on_what_is_installed() -> None:
    (line,) = [line for line in catalogue.techniques_markdown([choosy()], []) if line.startswith("| `choosy`")]
    _, _, _, cpu, xla, needs, _, _ = (cell.strip() for cell in line.split("|"))
    assert (cpu, xla, needs) == ("yes", "no-backend", "`no_such_package`")


class Asking(Eager):
    """Asks the device itself."""

    name = "asking"

    def capability(self, device: Device) -> Capability:
        raise AssertionError("Torch not compiled with CUDA enabled")


def test_what_only_the_device_can_tell_is_said() -> None:
    (row,) = catalogue.technique_rows(Matrix({"asking": Asking()}, matrix().workloads), catalogue.columns(("cuda",)))
    assert row.answers["cuda"].code is Code.NOT_ASKED
    assert "| asked there |" in "\n".join(catalogue.techniques_markdown([row], []))


class Tried(Eager):
    """Runs on the chip at hand, as a trial shows."""

    name = "tried"

    def capability(self, device: Device) -> Capability:
        return BY_TRIAL


@pytest.mark.parametrize("packages", [{}, {"no_such_package": "pip install no-such-package"}])
def test_the_documentation_is_the_same_on_any_chip(packages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tried, "packages", packages)
    (row,) = catalogue.technique_rows(Matrix({"tried": Tried()}, matrix().workloads), catalogue.columns(("cpu",)))
    assert "| asked there |" in "\n".join(catalogue.techniques_markdown([row], []))


def test_cases_are_counted_up_to_each_level() -> None:
    row = choosy()
    known = Matrix({"choosy": Choosy()}, matrix().workloads)
    for level in (1, 2, 3):
        assert row.cases[level] == len(known.cases(Selection(("cpu",), level=level)))


def test_the_text_has_answers_codes_and_every_reason_once() -> None:
    lines = plain(
        catalogue.techniques([choosy(), choosy()], {"xla": Status("xla", unavailable(Code.NO_HARDWARE, "no chip"))})
    )
    assert lines[0] == "xla: unavailable [no-hardware] no chip"
    assert [line.split()[:3] for line in lines if line.startswith("choosy")] == [
        ["choosy", "no-package", "no-backend"]
    ] * 2
    assert lines[-2:] == [
        "cpu: unavailable [no-package] no_such_package is not installed; pip install no-such-package",
        "xla: unsupported [no-backend] not there",
    ]


def test_devices_and_techniques_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--markdown", "--device=xla", "--technique=amp-*"]) == 0
    told = capsys.readouterr().out
    assert "| technique | promise | xla | needs | cases |" in told
    assert "`amp-bf16`" in told
    assert "`eager`" not in told


@pytest.mark.parametrize(("option", "nearest"), [("--device=xlaa", "xla"), ("--technique=amp-bf1", "amp-bf16")])
def test_an_unknown_name_is_answered_with_the_nearest(
    option: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["list", "--markdown", option]) == 4
    assert f"Did you mean {nearest!r}?" in capsys.readouterr().err


def test_every_technique_has_cases_at_level_2_and_more_at_level_3_and_tells_its_promise() -> None:
    for row in catalogue.technique_rows(matrix(), {}):
        assert row.cases[3] > 0, row.technique.name
        assert row.technique.promise.endswith("."), row.technique.name
        assert row.technique.source.startswith("https://"), row.technique.name


def test_every_family_has_a_workload_at_level_2_and_one_at_level_3() -> None:
    """The lowest level at which a workload meets any technique of the family."""
    known = matrix()
    lowest: dict[str, dict[str, int]] = {}
    for case in known.cases(Selection(("cpu",), level=3)):
        levels = lowest.setdefault(known.techniques[case.technique].family, {})
        levels[case.workload] = min(levels.get(case.workload, 3), case.level)
    for family, levels in lowest.items():
        if family == "platform":  # its items are asked for at every level, and have no larger ones
            assert set(levels.values()) == {1}
            continue
        assert any(level <= 2 for level in levels.values()), family
        assert 3 in levels.values(), family


def test_a_generic_device_declares_nothing() -> None:
    (row,) = catalogue.technique_rows(
        Matrix({"eager": Eager()}, matrix().workloads), catalogue.columns((catalogue.GENERIC,))
    )
    assert row.answers[catalogue.GENERIC].verdict is not Verdict.UNAVAILABLE
