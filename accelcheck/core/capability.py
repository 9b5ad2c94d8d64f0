"""Whether a device or technique can run on this machine; if not, whether it is `unsupported` or `unavailable`, and why. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from accelcheck.core.case import Verdict
from accelcheck.core.plain import text


class Code(StrEnum):
    """Why a device or a technique does not run: stable codes that reports can count."""

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
    """Whether a device or technique runs on this machine.

    Attributes:
        code: ``ok``, or why it does not run.
        reason: One sentence with the fact that was found; empty when it runs.
        action: What the user can do about it, such as an install command; may be empty.
        verdict: ``None`` when it runs, else ``unsupported`` or ``unavailable``.
        tried: Whether it was found by trying, and so holds for the chip at hand: it ran, or the chip or its library refused or
            did nothing. What a device declares is not.
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
        """Whether it runs."""
        return self.verdict is None

    def __str__(self) -> str:
        """The answer as one line for a header, a skip reason or a table."""
        if self.verdict is None:
            return "ok"
        return f"{self.verdict} [{self.code}] {self.reason}" + (f"; {self.action}" if self.action else "")


SUPPORTED = Capability(Code.OK, "", "", None)
BY_TRIAL = Capability(Code.OK, "", "", None, tried=True)
"""It runs where a trial on the chip at hand shows that it does."""


def unsupported(code: Code, reason: str, action: str = "", *, tried: bool = False) -> Capability:
    """The device does not have it: no change to this machine would make it run. `tried` as in `Capability`."""
    return Capability(code, reason, action, Verdict.UNSUPPORTED, tried)


def unavailable(code: Code, reason: str, action: str = "", *, tried: bool = False) -> Capability:
    """It could run, but this machine lacks hardware, a package or a build. `tried` as in `Capability`."""
    return Capability(code, reason, action, Verdict.UNAVAILABLE, tried)
