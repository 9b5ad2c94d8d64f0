"""Records whether a device or technique runs on this machine, or is `unsupported` or `unavailable`. No torch."""

from dataclasses import dataclass
from enum import StrEnum

from accelcheck.core.case import Verdict
from accelcheck.core.plain import text


class Code(StrEnum):
    """Stable codes, which reports count, of the reasons why a device or a technique does not run."""

    OK = "ok"
    # unavailable: another machine, or this one with more hardware or software, could run it
    NO_HARDWARE = "no-hardware"
    NO_PACKAGE = "no-package"
    WRONG_BUILD = "wrong-build"
    IMPORT_FAILED = "import-failed"
    NOT_ASKED = "not-asked"
    PROBE_FAILED = "probe-failed"
    PROBE_TIMEOUT = "probe-timeout"
    # unsupported: the device does not have it
    NO_DTYPE = "no-dtype"
    NO_FEATURE = "no-feature"
    NO_BACKEND = "no-backend"
    NO_EFFECT = "no-effect"
    TOO_LARGE = "too-large"
    WRONG_VERSION = "wrong-version"


@dataclass(frozen=True, slots=True)
class Capability:
    """The answer whether a device or technique runs on this machine.

    Attributes:
        code: ``ok``, or why it does not run.
        reason: One sentence with the fact that was found; empty when it runs.
        action: Advice to the user, such as an install command; may be empty.
        verdict: ``None`` when it runs, else ``unsupported`` or ``unavailable``.
        tried: True when a trial on the chip at hand gave the answer, False when a device's declaration did.
    """

    code: Code
    reason: str
    action: str
    verdict: Verdict | None
    tried: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", text(self.reason))
        object.__setattr__(self, "action", text(self.action))

    @property
    def ok(self) -> bool:
        """True when it runs."""
        return self.verdict is None

    def __str__(self) -> str:
        """The answer as one line for a header, a skip reason or a table."""
        if self.verdict is None:
            return "ok"
        return f"{self.verdict} [{self.code}] {self.reason}" + (f"; {self.action}" if self.action else "")


SUPPORTED = Capability(Code.OK, "", "", None)
BY_TRIAL = Capability(Code.OK, "", "", None, tried=True)
"""Runs, as a trial on the chip at hand has shown."""


def unsupported(code: Code, reason: str, action: str = "", *, tried: bool = False) -> Capability:
    """The answer for a device that lacks it, on any machine. `tried` as in `Capability`."""
    return Capability(code, reason, action, Verdict.UNSUPPORTED, tried)


def unavailable(code: Code, reason: str, action: str = "", *, tried: bool = False) -> Capability:
    """The answer where this machine lacks hardware, a package or a build. `tried` as in `Capability`."""
    return Capability(code, reason, action, Verdict.UNAVAILABLE, tried)
