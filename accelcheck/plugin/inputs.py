"""What a journal says of the inputs of its run, besides its selection: installed packages, and ledgers by their hash. No torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from typing import TYPE_CHECKING, Any

from accelcheck.expectations.ledger import shipped

if TYPE_CHECKING:
    from accelcheck.plugin.configuration import RunConfiguration

_NAME, _VERSION = (re.compile(rf"^{field}: *(\S.*?) *$", re.MULTILINE | re.IGNORECASE) for field in ("Name", "Version"))


def of(run: RunConfiguration) -> dict[str, Any]:
    """The fields ``packages``, versions by name, and ``ledgers``, each with the name of its file and the SHA-256 of its content.

    Names alone: paths are of no use on another machine, and say where somebody works.
    """
    paths = (*shipped(run.selection.devices), *run.ledgers)
    return {
        "packages": packages(),
        "ledgers": [{"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in paths],
    }


def packages() -> dict[str, str]:
    """The versions of the installed distributions by name; of two with the same name the one that is imported.

    It reads two lines of each: parsing all metadata takes 2 ms a package, and environments have hundreds.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
        name, version = _NAME.search(head), _VERSION.search(head)
        if name and version:
            found.setdefault(name[1], version[1])
    return dict(sorted(found.items()))
