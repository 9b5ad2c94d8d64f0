"""Commands that work outside of a pytest run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from accelcheck.commands.common import USAGE
from accelcheck.core import imports
from accelcheck.core.registry import DuplicateNameError, UnknownNameError, discover
from accelcheck.plugin.registered import PluginLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code is returned."""
    parser = argparse.ArgumentParser(prog="accelcheck", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in discover("accelcheck.commands", "COMMANDS"):
        add(commands)
    given = parser.parse_args(arguments)
    try:
        if modules := getattr(given, "imports", ()):
            imports.announce(modules)
        return int(given.run(given))
    except (PluginLoadError, DuplicateNameError, UnknownNameError, imports.ModuleImportError) as error:
        print(f"accelcheck: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":  # `python -m accelcheck.cli`, where nothing is installed and only the import path is set
    sys.exit(main())
