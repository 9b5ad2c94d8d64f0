"""Helpers of commands: exit codes, types of arguments, and usable devices. No torch."""

import argparse
import fnmatch
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from accelcheck.core import imports
from accelcheck.core.capability import Code
from accelcheck.core.registry import unknown
from accelcheck.devices import devices, hardware
from accelcheck.devices.base import Device
from accelcheck.devices.probe import probe
from accelcheck.plugin import registered
from accelcheck.report import console

T = TypeVar("T")
N = TypeVar("N", int, float)

GREEN, RED, USAGE, NOTHING = 0, 1, 4, 5
"""Exit codes, as pytest's."""


def refuse(why: object, code: int = USAGE) -> int:
    """Prints why a command ends early, and returns its exit code."""
    console.show([f"accelcheck: {why}"], sys.stderr)
    return code


def number(kind: Callable[[str], N], legal: Callable[[N], bool], expected: str) -> Callable[[str], N]:
    """A type for argparse: a legal number of a kind."""

    def parse(text: str) -> N:
        value = kind(text)
        if not legal(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


positive = number(int, lambda value: value >= 1, "a number of at least 1")


def add_many(command: argparse.ArgumentParser, option: str, metavar: str | None, meaning: str, **more: Any) -> None:
    """Declares a repeatable option, whose value is a list, empty by default."""
    command.add_argument(option, action="append", default=[], metavar=metavar, help=meaning, **more)


def add_device(command: argparse.ArgumentParser, purpose: str) -> None:
    """Declares ``--device`` and ``--import`` for a command of one device, with a `purpose` such as ``measure``."""
    command.add_argument("--device", default="cpu", help=f"device to {purpose} on (default: cpu)")
    add_import(command)


def add_import(command: argparse.ArgumentParser) -> None:
    """Declares ``--import`` for a command that takes a device; `announce` reads it."""
    meaning = (
        "module to import in every process that uses a device; repeatable: a backend of torch that no entry point loads"
    )
    add_many(command, "--import", "MODULE", meaning, dest="imports")


def add_results(command: argparse.ArgumentParser) -> None:
    """Declares ``--json FILE`` for a command whose results are stored."""
    meaning = "write the results as JSON, in the format of the files in baselines/"
    command.add_argument("--json", type=Path, metavar="FILE", help=meaning)


def add_devices(command: argparse.ArgumentParser, default: str) -> None:
    """Declares ``--device`` and ``--import`` for a command of several devices; `default` describes the default."""
    add_many(command, "--device", "NAME", f"device; repeatable (default: {default})")
    add_import(command)


def add_selection(command: argparse.ArgumentParser) -> None:
    """Declares ``--device``, ``--import`` and ``--technique``."""
    add_devices(command, "all that are present")
    add_many(command, "--technique", "GLOB", "techniques by name; repeatable (default: all)")


def devices_of(given: argparse.Namespace, models: tuple[str, ...] = ()) -> list[str]:
    """Returns the named devices, or all that are present; prints the reason and returns none if one is unusable.

    `models` are those of `registered.here`, so that the command's configuration of pytest is used. Raises as `refusal`.
    """
    for name in given.device:
        if (why := refusal(name, models)) is not None:
            print(f"accelcheck: {name}: {why}; accelcheck doctor says more", file=sys.stderr)
            return []
    if given.device:
        return list(dict.fromkeys(given.device))
    statuses, _ = probe(None, extra=registered.devices(registered.here(models)))
    present = [name for name, status in statuses.items() if status.present]
    if not present:
        print("accelcheck: no device can be tested: accelcheck doctor says why", file=sys.stderr)
    return present


def usable(device: str) -> bool:
    """Returns True for a device that this machine can use, else prints the reason; raises as `refusal`."""
    absent = refusal(device)
    if absent is not None:
        print(f"accelcheck: {device}: {absent}", file=sys.stderr)
    return absent is None


def chosen(kind: str, items: Sequence[T], patterns: Sequence[str], name: Callable[[T], str]) -> list[T]:
    """Selects the items whose name fits one of the patterns, each of which must fit one; all without patterns."""
    legal = sorted({name(item) for item in items})
    for pattern in patterns:
        if not fnmatch.filter(legal, pattern):
            raise unknown(kind, pattern, legal)
    return [item for item in items if not patterns or any(fnmatch.fnmatchcase(name(item), p) for p in patterns)]


def check_new(path: Path) -> str:
    """Returns why a file cannot be written as a new one; empty if it can."""
    if path.exists() or path.is_symlink():
        return f"{path} exists, and is kept: give another name"
    return "" if path.parent.is_dir() else f"{path}: there is no folder {path.parent}: make it first"


def refusal(name: str, models: tuple[str, ...] = ()) -> str | None:
    """Returns why a device cannot be used on this machine; None if it can. `models` is as in `devices_of`.

    A `PluginLoadError` where it is not built in, and pytest, which loads plugins, does not start; an `UnknownNameError`
    where there is no such device.
    """
    known, extra = devices(), list[Device]()
    if name not in known:
        extra = registered.devices(registered.here(models))
        known = devices(extra)
    if name == "xla" and not hardware.tpu().count:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    statuses, _ = probe([name], extra=extra)
    if name not in known and statuses[name].capability.code is Code.NO_PACKAGE:
        raise imports.unknown_device(name, sorted(known), "--import")
    return None if statuses[name].present else str(statuses[name].capability)
