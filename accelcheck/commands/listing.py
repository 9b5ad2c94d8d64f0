"""``accelcheck list``: the capability table."""

from __future__ import annotations

import fnmatch
import sys
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, add_import
from accelcheck.core import imports, matrix
from accelcheck.devices import torch_names
from accelcheck.devices.probe import probe
from accelcheck.plugin import registered

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from accelcheck.devices.base import Device


def add(commands: Any) -> None:
    """Declare the command."""
    listing = commands.add_parser(
        "list",
        help="all techniques, and whether each device runs them",
        description="Prints the capability table: techniques by family, each device's answer, and the reasons. Runs nothing.",
    )
    listing.add_argument("--device", action="append", default=[], help="devices to ask; repeatable (default: all)")
    add_import(listing)
    listing.add_argument(
        "--technique", action="append", default=[], metavar="GLOB", help="techniques by name; repeatable (default: all)"
    )
    listing.add_argument(
        "--markdown", action="store_true", help="print docs/techniques.md, which is the same on every machine"
    )
    listing.set_defaults(run=_list)


def _list(given: argparse.Namespace) -> int:
    from accelcheck.report import capabilities, console
    from accelcheck.report import capability_table as shown

    # Plugins differ between machines: the documentation has accelcheck's own techniques only.
    config = None if given.markdown else registered.here()
    extra = [] if config is None else registered.devices(config)
    places = capabilities.columns(given.device, [*extra, *_imported(given.device, extra)])
    known = matrix.Matrix.load() if config is None else registered.matrix(config)
    known.check(matrix.Selection((), techniques=tuple(given.technique)))
    rows = [
        row
        for row in capabilities.rows(known, places)
        if not given.technique or any(fnmatch.fnmatchcase(row.name, glob) for glob in given.technique)
    ]
    if given.markdown:
        print("\n".join(shown.markdown(rows, known.workloads.values())))
    else:
        statuses, _ = probe([name for name in places if name != capabilities.GENERIC], extra=extra)
        console.show(shown.text(rows, statuses))
        for reason in torch_names.gone():
            print(f"accelcheck: {reason}: cases that need it are unavailable", file=sys.stderr)
    return GREEN


def _imported(asked: Sequence[str], extra: Sequence[Device]) -> list[Device]:
    """The accelerators that the modules of ``--import`` add to torch; none if all devices asked for are known without."""
    from accelcheck.devices.generic import Generic

    known = matrix.devices(extra)
    if not imports.announced() or (asked and all(name in known for name in asked)):
        return []
    statuses, host = probe(None, extra=extra)
    for name, failure in host.failed_imports.items():
        print(f"accelcheck: --import={name}: {failure}", file=sys.stderr)
    return [Generic(name) for name in statuses if name not in known]


COMMANDS = (add,)
