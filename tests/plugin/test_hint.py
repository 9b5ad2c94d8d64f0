"""A run that asks for accelcheck and has none of its cases names the suite."""

from __future__ import annotations

import pytest
from plugin_harness import Suite

OWN = "def test_own():\n    pass\n"
HINT = "accelcheck: no collected test takes accel_case, so nothing was verified; accelcheck's own tests: "


def hints(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if line.startswith(HINT)]


@pytest.mark.parametrize("own", ["", OWN], ids=["an empty repository", "tests of one's own"])
def test_a_run_without_cases_names_the_suite(suite: Suite, own: str) -> None:
    if own:
        suite.pytester.makepyfile(own)
    words = ["--accel-device=cpu", "--accel-level", "2", "-q"]
    assert hints(suite.inside(*words)) == [f"{HINT}pytest --pyargs accelcheck.suite --accel-device=cpu --accel-level 2"]


def test_a_run_that_has_cases_or_asks_for_nothing_names_nothing(suite: Suite) -> None:
    suite.pytester.makepyfile("def test_own(accel_case):\n    pass\n")
    assert hints(suite.inside("--accel-device=cpu", "--accel-technique=toy", "-q")) == []
    assert hints(suite.inside("-q")) == []


def test_settings_of_the_ini_file_alone_name_nothing(suite: Suite) -> None:
    suite.ini(accel_device="cpu")
    suite.pytester.makepyfile(OWN)
    assert hints(suite.inside("-q")) == []


def test_the_suite_of_which_everything_is_deselected_is_not_named(suite: Suite) -> None:
    result = suite.inside(
        "--pyargs", "accelcheck.suite", "--accel-device=cpu", "--accel-technique=toy", "-k", "none", "-q"
    )
    assert hints(result) == []
