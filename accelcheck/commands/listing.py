"""``accelcheck list``: prints the capability table, or workloads, traits, devices and cases."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accelcheck.commands.common import GREEN, add_devices, add_many
from accelcheck.commands.parsing import add_json, examples, print_json
from accelcheck.core import imports
from accelcheck.core.case import DTYPES, LEVELS
from accelcheck.core.imports import unknown_device
from accelcheck.core.selection import Selection
from accelcheck.devices import devices, torch_names
from accelcheck.devices.probe import probe
from accelcheck.plugin import registered
from accelcheck.report import catalogue, console
from accelcheck.techniques.matrix import Matrix

if TYPE_CHECKING:
    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Workload


def add(commands: Any) -> None:
    listing = commands.add_parser(
        "list",
        help="all techniques, and whether each device runs them; or workloads, traits, devices, cases",
        description="Prints the capability table: techniques by family, each device's answer, and the reasons; or one "
        "of the other lists. Runs no case.",
    )
    what = listing.add_mutually_exclusive_group()
    for name, meaning in (
        ("workloads", "list workloads: level, modes, dtypes, traits"),
        ("traits", "list the traits of workloads, and how many techniques require or exclude each"),
        ("devices", "list devices, and why absent ones cannot be used"),
        ("cases", "list the ids of cases that pytest would run with these filters"),
    ):
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=meaning)
    what.add_argument(
        "--markdown", action="store_true", help="print docs/techniques.md, which is the same on every machine"
    )
    add_devices(listing, "all; for --cases those that are present")
    add_many(listing, "--model", "FILE:FUNCTION", "model of your own, as a further workload; repeatable")
    for name in ("technique", "workload"):
        add_many(listing, f"--{name}", "GLOB", f"{name}s by name; repeatable (default: all)")
    add_many(listing, "--dtype", None, "with --cases: storage dtypes; repeatable (default: all)", choices=DTYPES)
    level = "with --cases: highest level (default: 1)"
    listing.add_argument("--level", type=int, choices=LEVELS, default=1, help=level)
    add_json(listing)
    examples(
        listing,
        ("accelcheck list", "every technique, and whether each device runs it"),
        ("accelcheck list --device=xla --technique='compile-*'", "some of them on one device"),
        ("accelcheck list --workload=mlp --device=cpu", "what is tried with one workload, and why the rest is not"),
        ("accelcheck list --model=model.py:make --workload=model", "the same for a model of your own"),
        ("accelcheck list --workloads --json", "all workloads, for a program"),
        ("accelcheck list --cases --device=cpu --technique='amp-*'", "ids for --accel-case"),
    )
    listing.set_defaults(run=_list, what="techniques")


def _list(given: argparse.Namespace) -> int:
    if given.what == "devices":
        return _devices(given)
    # Plugins differ between machines: the documentation has only accelcheck's own techniques.
    config = None if given.markdown else registered.here(tuple(given.model))
    extra = [] if config is None else registered.devices(config)
    known = Matrix.load() if config is None else registered.matrix(config)
    known.check(Selection((), techniques=tuple(given.technique), workloads=tuple(given.workload)))
    if given.what == "cases":
        return _cases(given, known, extra)
    if given.what in {"workloads", "traits"}:
        return _workloads(given, known)
    return _techniques(given, known, extra)


def _techniques(given: argparse.Namespace, known: Matrix, extra: Sequence[Device]) -> int:
    places = catalogue.columns(given.device, [*extra, *_imported(given.device, extra)])
    chosen = known if not given.workload else Matrix(known.techniques, _chosen(known.workloads, given.workload))
    rows = [
        row
        for row in catalogue.technique_rows(chosen, places)
        if _named(row.technique.name, given.technique) and (not given.workload or any(row.cases.values()))
    ]
    # Reasons are printed if a workload is asked for.
    refusals = {
        workload.name: {name: why for name, why in known.refusals(workload).items() if _named(name, given.technique)}
        for workload in (chosen.workloads.values() if given.workload else ())
    }
    if given.markdown:
        print("\n".join(catalogue.techniques_markdown(rows, chosen.workloads.values())))
        return GREEN
    statuses, _ = probe([name for name in places if name != catalogue.GENERIC], extra=extra)
    if given.json:
        devices_as_json = {name: status.as_json() for name, status in statuses.items()}
        techniques = catalogue.techniques_as_json(rows)
        print_json("list techniques", {"techniques": techniques, "devices": devices_as_json, "refusals": refusals})
    else:
        console.show(catalogue.techniques(rows, statuses))
        for name, reasons in refusals.items():
            print("\n".join(map(console.escaped, catalogue.refused(name, reasons))))
    for reason in torch_names.gone():
        print(f"accelcheck: {reason}: cases that need it are unavailable", file=sys.stderr)
    return GREEN


def _workloads(given: argparse.Namespace, known: Matrix) -> int:
    techniques = [technique for name, technique in known.techniques.items() if _named(name, given.technique)]
    listed = [
        workload
        for workload in _chosen(known.workloads, given.workload).values()
        if not given.technique
        or any(t.accepts(workload) and (not workload.techniques or t.name in workload.techniques) for t in techniques)
    ]
    if given.what == "traits":
        rows = catalogue.traits(techniques, listed)
        if given.json:
            print_json("list traits", {"traits": rows})
        else:
            console.show([catalogue.traits_table(rows)])
    elif given.json:
        print_json("list workloads", {"workloads": catalogue.workloads_as_json(listed)})
    else:
        console.show([catalogue.workloads(listed)])
    return GREEN


def _cases(given: argparse.Namespace, known: Matrix, extra: Sequence[Device]) -> int:
    if given.device:
        legal = [*devices(extra), *(device.name for device in _imported(given.device, extra))]
        for name in given.device:
            if name not in legal:
                raise unknown_device(name, legal, "--import")
        names = tuple(given.device)
    else:
        names = tuple(name for name, status in probe(None, extra=extra)[0].items() if status.present)
    techniques, workloads, dtypes = tuple(given.technique), tuple(given.workload), tuple(given.dtype)
    cases = known.cases(Selection(names, techniques, workloads, dtypes, level=given.level))
    if given.json:
        print_json("list cases", {"cases": [{"id": case.id, **asdict(case)} for case in cases]})
    else:
        print("\n".join(case.id for case in cases))
    return GREEN


def _devices(given: argparse.Namespace) -> int:
    extra = registered.devices(registered.here())
    legal = list(devices(extra))
    for name in given.device:
        if name not in legal and not imports.announced():
            raise unknown_device(name, legal, "--import")
    statuses, _ = probe(given.device or None, extra=extra)
    if given.json:
        print_json("list devices", {"devices": [status.as_json() for status in statuses.values()]})
    else:
        console.show([catalogue.devices(statuses.values())])
    return GREEN


def _named(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _chosen(known: Mapping[str, Workload], patterns: Sequence[str]) -> dict[str, Workload]:
    return {name: workload for name, workload in known.items() if _named(name, patterns)}


def _imported(asked: Sequence[str], extra: Sequence[Device]) -> list[Device]:
    """Returns the accelerators that ``--import`` adds to torch; none if all named devices are known without it."""
    from accelcheck.devices.generic import Generic

    known = devices(extra)
    if not imports.announced() or (asked and all(name in known for name in asked)):
        return []
    statuses, host = probe(None, extra=extra)
    for name, failure in host.failed_imports.items():
        print(f"accelcheck: --import={name}: {failure}", file=sys.stderr)
    return [Generic(name) for name in statuses if name not in known]
