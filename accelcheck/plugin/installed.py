"""What installed packages bring by entry points: loaded when a run or a command asks, each by itself. No torch.

An entry point of the groups ``accelcheck.devices``, ``accelcheck.techniques`` and ``accelcheck.workloads`` names an object: a class,
an instance, a list or tuple of these, or a function without arguments that returns one of them. An entry point that cannot be loaded is
kept with its traceback, and the others go on.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from accelcheck.core import entry_points
from accelcheck.core.foreign import ForeignCodeError, calling
from accelcheck.core.strangers import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint

GROUPS = dict(
    zip(
        ("pytest_accel_devices", "pytest_accel_techniques", "pytest_accel_workloads"),
        entry_points.GROUPS,
        strict=True,
    )
)
"""The group of entry points that brings what a hook returns."""


@dataclass(slots=True)
class Installed:
    """What the entry points of each group gave.

    Attributes:
        found: By group: what brought each thing, for errors, and the thing.
        failed: By entry point: why it could not be loaded, with the end of the traceback.
        told: Whether a failure is written to standard error at once, as for commands, which have no summary.
    """

    found: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    told: bool = False

    def load(self, group: str, seconds: float) -> list[tuple[str, Any]]:
        """The things of a group; they are loaded once.

        Args:
            group: One of `accelcheck.core.entry_points.GROUPS`.
            seconds: That each entry point may take.
        """
        if group not in self.found:
            self.found[group] = []
            for entry in entry_points.entries(group):
                self.found[group] += self._loaded(entry, seconds)
        return self.found[group]

    def _loaded(self, entry: EntryPoint, seconds: float) -> list[tuple[str, Any]]:
        what = entry_points.described(entry)
        with_torch = "torch" in sys.modules
        try:
            with calling(what, seconds):
                things = [*_things(entry.load())]
            _check(what, entry, things)
            if entry.group == entry_points.DEVICES and not with_torch and "torch" in sys.modules:
                raise ForeignCodeError(  # noqa: TRY301 - as the others: the run goes on without it
                    f"{what}: it imports torch when it is loaded, before the controller knows whether torch can be imported: import it "
                    "inside of methods"
                )
        except ForeignCodeError as error:
            self.failed[what] = str(error)
            if self.told:
                print(f"accelcheck: {error}", file=sys.stderr)
            return []
        return [(what, thing) for thing in things]


_INSTALLED: pytest.StashKey[Installed] = pytest.StashKey()


def of(config: pytest.Config, *, told: bool = False) -> Installed:
    """What is loaded for a run.

    Args:
        config: Configuration of the run.
        told: As the attribute, where it is not known yet.
    """
    return config.stash.setdefault(_INSTALLED, Installed(told=told))


def lines(failed: Iterable[str]) -> str:
    """Why entry points could not be loaded, to follow another error; empty if all were."""
    return "".join(f"\nnot loaded: {reason}" for reason in failed)


def _things(value: Any) -> Iterable[Any]:
    """The instances of what an entry point names."""
    if inspect.isclass(value):
        return [value()]
    if callable(value) and not hasattr(value, "name"):
        return _things(value())
    if isinstance(value, (list, tuple)):
        return [thing for one in value for thing in _things(one)]
    return [value]


def _check(what: str, entry: EntryPoint, things: Iterable[Any]) -> None:
    for thing in things:
        if not isinstance(getattr(thing, "name", None), str):
            raise ForeignCodeError(
                f"{what}: expected a class or instance with a name, a list of them or a function that returns one, got {quoted(thing)}"
            )
        if entry.group == entry_points.DEVICES and thing.name != entry.name:
            # So that the files which its package ships are found, and a failure is known by the name that was asked for.
            raise ForeignCodeError(
                f"{what}: expected a device with the name of the entry point, got {quoted(thing.name)}: give each device an entry point"
            )
