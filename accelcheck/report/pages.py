"""Pages of the documentation that records refer to: where they are on this machine. No torch."""

from __future__ import annotations

from pathlib import Path

import accelcheck

FINDINGS = "docs/findings.md"
"""What accelcheck found, each with a reproduction: ledgers refer to it."""


def place(page: str) -> Path | None:
    """The file of a page such as `FINDINGS`: in the installed package, or in a checkout; None where it is in neither."""
    package = Path(accelcheck.__file__).parent
    return next((path for path in (package / page, package.parent / page) if path.is_file()), None)
