"""Foreign hooks and methods that raise, hang or return nonsense are named, or the run goes on without them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
from plugin_harness import Suite, only

from accelcheck.core.capability import Capability, Code
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.probe import _detect

USAGE = pytest.ExitCode.USAGE_ERROR
BODIES = {
    "raises": ("raise LookupError('no such file')", "raised LookupError: no such file"),
    "exits": ("import sys; sys.exit(0)", "raised SystemExit: 0"),
    "hangs": ("import time; time.sleep(600)", "did not return within 1 s"),
    "nonsense": ("return [1]", "expected things with a name"),
}
METHODS = {
    "accepts": ("def accepts(self, workload): raise LookupError(self.name)", "in accepts"),
    "covers": ("def covers(self, mode): raise LookupError(self.name)", "in covers"),
    "hangs": ("def accepts(self, workload): __import__('time').sleep(600)", "in accepts"),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("hook", ["pytest_accel_devices", "pytest_accel_techniques"])
def test_a_hook_that_does_not_give_what_it_should_is_named(suite: Suite, hook: str, body: str) -> None:
    code, message = BODIES[body]
    suite.pytester.syspathinsert()
    suite.pytester.makepyfile(toy_plugin=f"def {hook}():\n    {code}\n")
    ran = suite.run("-p", "toy_plugin", *only("eager", workload="mlp"), "--accel-probe-timeout=1")
    assert ran.ret == USAGE
    assert f"ERROR: accelcheck: {hook} of toy_plugin (toy_plugin.{hook})" in ran.err
    assert message in ran.err
    assert body == "nonsense" or "in " + hook in ran.err
    assert ran.verdicts == {}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_technique_that_cannot_say_its_cases_is_named_once(suite: Suite, method: str, workers: str) -> None:
    code, place = METHODS[method]
    suite.pytester.makeconftest(f"""
def pytest_accel_techniques():
    from accelcheck.techniques.eager import Eager
    class Broken(Eager):
        name = "broken-one"
        {code}
    return [Broken()]
""")
    limit = ["--accel-probe-timeout=5"] if method == "hangs" else []  # longer than the built-in ones take
    ran = suite.run("--accel-device=cpu", "-n", workers, *limit)
    assert ran.ret == USAGE
    printed = ran.out + ran.err
    assert printed.count("ERROR: accelcheck: technique 'broken-one' (") == 1
    assert place in printed
    assert ran.verdicts == {}


class Toy(Cpu):
    """A device whose `detect` does what a test says."""

    name = "toy-device"

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def detect(self) -> Capability:
        return self._act()  # type: ignore[return-value]  # that is the case


def hangs() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("act", "code", "reason"),
    [
        (lambda: 1 // 0, Code.PROBE_FAILED, "raised ZeroDivisionError"),
        (lambda: sys.exit(0), Code.PROBE_FAILED, "raised SystemExit: 0"),
        (hangs, Code.PROBE_TIMEOUT, "did not return within 0.2 s"),
        (lambda: True, Code.PROBE_FAILED, "expected a Capability, got True"),
    ],
)
def test_a_device_whose_detect_does_not_answer_is_absent(act: Callable[[], object], code: Code, reason: str) -> None:
    result = _detect(Toy(act), 0.2)
    assert not result.ok
    assert result.code is code
    assert result.reason.startswith("test_foreign_code.Toy.detect")
    assert reason in result.reason
