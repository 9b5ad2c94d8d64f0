"""The lines FAILED and ERROR of pytest's short summary: what follows the word can be given to pytest again.

The suite's tests are outside of the folder that pytest runs in, so pytest would not find their node ids there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

REPRODUCE = "  reproduce: pytest "
SUITE = "--pyargs accelcheck.suite"


def make_pasteable(reporter: pytest.TerminalReporter) -> None:
    """Replace the node ids of the suite's failed cases by the arguments that run each of them alone."""
    config = reporter.config
    for kind in ("failed", "error"):
        for report in reporter.stats.get(kind, ()):
            words = arguments(getattr(report, "longreprtext", ""))
            if words:
                # pytest shows node ids, which it takes for paths below its root, as seen from where it was called.
                here = config.invocation_params.dir
                report.nodeid = words if here == config.rootpath else str(Path(here) / words)


def arguments(message: str) -> str:
    """What the command of a failure's message gives to pytest; empty if it does not run the suite."""
    for line in message.splitlines():
        if line.startswith(REPRODUCE + SUITE):
            return line.removeprefix(REPRODUCE)
    return ""
