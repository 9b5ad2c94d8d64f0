"""Loads devices, techniques and workloads of installed packages by entry points, on demand. No torch.

An entry point of the groups ``accelcheck.devices``, ``accelcheck.techniques`` and ``accelcheck.workloads`` names a
class, an instance, a list or tuple of these, or a function without arguments that returns one of them. The traceback of
one that cannot be loaded is kept, and the others are loaded all the same.
"""

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from accelcheck.core import entry_points
from accelcheck.core.foreign import ForeignCodeError, calling
from accelcheck.core.strangers import quoted

GROUPS = {
    "pytest_accel_devices": entry_points.DEVICES,
    "pytest_accel_techniques": entry_points.TECHNIQUES,
    "pytest_accel_workloads": entry_points.WORKLOADS,
}
"""Group of entry points for the same things as a hook, by hook."""


@dataclass(slots=True)
class Installed:
    """Things that the entry points of each group gave.

    Attributes:
        found: Pairs of the source of a thing, for errors, and the thing, by group.
        failed: Reasons of failures with the end of the traceback, by entry point.
        told: True to print a failure to standard error at once, as for commands, which have no summary.
    """

    found: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    told: bool = False

    def load(self, group: str, seconds: float) -> list[tuple[str, Any]]:
        """The things of a group of entry points, loaded once, with a time limit of each in seconds."""
        if group not in self.found:
            entries = entry_points.entries(group)
            self.found[group] = [pair for entry in entries for pair in self._loaded(entry, seconds)]
        return self.found[group]

    def _loaded(self, entry: EntryPoint, seconds: float) -> list[tuple[str, Any]]:
        what = entry_points.described(entry)
        with_torch = "torch" in sys.modules
        try:
            with calling(what, seconds):
                things = [*_things(entry.load())]
            _check(what, entry, things)
            if entry.group == entry_points.DEVICES and not with_torch and "torch" in sys.modules:
                raise ForeignCodeError(  # noqa: TRY301 - the run goes on without it
                    f"{what}: it imports torch when it is loaded, before the controller knows whether torch can be "
                    "imported: import it inside of methods"
                )
        except ForeignCodeError as error:
            self.failed[what] = str(error)
            if self.told:
                print(f"accelcheck: {error}", file=sys.stderr)
            return []
        return [(what, thing) for thing in things]


_INSTALLED: pytest.StashKey[Installed] = pytest.StashKey()


def of(config: pytest.Config, *, told: bool = False) -> Installed:
    """The loaded things of a run; `told` sets the attribute in the first call for a run."""
    return config.stash.setdefault(_INSTALLED, Installed(told=told))


def lines(failed: Iterable[str]) -> str:
    """Lines about entry points that could not be loaded, to follow another error."""
    return "".join(f"\nnot loaded: {reason}" for reason in failed)


def _things(value: Any) -> Iterable[Any]:
    """The instances that an entry point names."""
    if inspect.isclass(value):
        return [value()]
    if callable(value) and not hasattr(value, "name"):
        return _things(value())
    if isinstance(value, (list, tuple)):
        return [thing for item in value for thing in _things(item)]
    return [value]


def _check(what: str, entry: EntryPoint, things: Iterable[Any]) -> None:
    for thing in things:
        if not isinstance(getattr(thing, "name", None), str):
            expected = "a class or instance with a name, a list of them or a function that returns one"
            raise ForeignCodeError(f"{what}: expected {expected}, got {quoted(thing)}")
        if entry.group == entry_points.DEVICES and thing.name != entry.name:
            # The name finds the files that its package ships, and relates a failure to a selected device.
            expected = f"a device with the name of the entry point, got {quoted(thing.name)}"
            raise ForeignCodeError(f"{what}: expected {expected}: give each device an entry point")
