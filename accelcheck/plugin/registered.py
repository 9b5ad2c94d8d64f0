"""Collects devices, techniques and workloads that conftest.py and other packages register. No torch at import."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from accelcheck.core import imports, quiet
from accelcheck.core.errors import InputError
from accelcheck.core.foreign import ForeignCodeError, calling
from accelcheck.core.registry import UnknownNameError
from accelcheck.core.strangers import quoted
from accelcheck.devices import devices as known_devices
from accelcheck.devices.probe import PROBED
from accelcheck.plugin import installed, options, validation
from accelcheck.techniques.matrix import Matrix

if TYPE_CHECKING:
    from accelcheck.core.selection import Selection
    from accelcheck.devices.base import Device
    from accelcheck.workloads.base import Workload

LINES = 8
"""Number of last lines of pytest's output that an error quotes."""


class PluginLoadError(InputError):
    """pytest cannot start in this folder, so that the registered things of its plugins are unknown."""


def devices(config: pytest.Config) -> list[Device]:
    """Devices besides the built-in ones; raises `ForeignCodeError` where a hook fails, or two devices share a name."""
    return validation.devices(_all(config, "pytest_accel_devices"), known_devices())


def failed(config: pytest.Config) -> dict[str, str]:
    """Reasons why entry points could not be loaded so far, by entry point."""
    return installed.of(config).failed


def check(config: pytest.Config, known: Matrix, selection: Selection) -> None:
    """Calls `Matrix.check`, and adds the entry points that could not be loaded to its `UnknownNameError`."""
    try:
        known.check(selection)
    except UnknownNameError as error:
        raise UnknownNameError(f"{error}{installed.lines(failed(config).values())}") from error


def matrix(config: pytest.Config, case: str = "") -> Matrix:
    """Built-in and registered techniques and workloads, and the random programs that are named. Imports torch.

    Options of pytest may name programs, and `case` may be the id of a case of one. A `ForeignCodeError` where a hook
    raised, did not return, returned no technique or workload, or shares a name.
    """
    from accelcheck.workloads.programs import named

    own = Matrix.load(seconds=options.seconds(config))  # before the hooks, whose time limit it would exhaust
    techniques = validation.techniques(_all(config, "pytest_accel_techniques"), own.techniques)
    known = [*own.techniques.values(), *techniques]
    models = [(f"--accel-model={spec}", model) for spec, made in own_models(config).items() for model in made]
    workloads = validation.workloads([*_all(config, "pytest_accel_workloads"), *models], own.workloads, known)
    return own.extended(techniques, [*workloads, *named([*options.programs(config), case])])


def own_models(config: pytest.Config) -> Mapping[str, Sequence[Workload]]:
    """The workloads of each model that the command line names, by its words there. Imports torch where it names one."""
    if not (given := options.models(config)):
        return {}
    from accelcheck.workloads.own_file import workloads_of

    taken = frozenset(Matrix.load(seconds=options.seconds(config)).workloads)
    with quiet.torchao_imported():
        return {spec: workloads_of(spec, folder, taken) for spec, folder in given}


def model_facts(config: pytest.Config) -> dict[str, dict[str, str]]:
    """Each model's words on the command line, which commands need, and summary, by workload, for a journal's header."""
    pairs = [(spec, model) for spec, made in own_models(config).items() for model in made]
    return {model.name: {"spec": spec, "summary": model.summary} for spec, model in pairs}


def _all(config: pytest.Config, name: str) -> list[tuple[str, Any]]:
    """Things of the hooks of this name and of the entry points of its group, each with its source."""
    hook = getattr(config.hook, name, None)  # none where accelcheck is no plugin of this pytest
    if hook is None:
        return []
    limit = options.seconds(config)
    things = [*installed.of(config).load(installed.GROUPS[name], limit)]
    # A wrapper calls the others itself, so that none of them can be called alone.
    if any(hooked.wrapper or hooked.hookwrapper for hooked in hook.get_hookimpls()):
        with calling(name, limit):
            return [*things, *((name, thing) for group in hook() for thing in group)]
    for hooked in reversed(hook.get_hookimpls()):  # each by itself, so that an error can name its plugin
        what = f"{name} of {hooked.plugin_name} ({hooked.function.__module__}.{hooked.function.__qualname__})"
        with calling(what, limit):
            group = _listed(what, hooked.function())
        things += [(what, thing) for thing in group]
    return things


def _listed(what: str, given: Any) -> list[Any]:
    """The result of a hook as a list of things with a name; empty for None."""
    if given is None:
        return []
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise ForeignCodeError(f"{what}: expected a list of what it registers, got {quoted(given)}")
    things = list(given)
    for thing in things:
        if not isinstance(getattr(thing, "name", None), str):
            expected = "things with a name, such as instances of the class that it registers"
            raise ForeignCodeError(f"{what}: expected {expected}, got {quoted(thing)}")
    return things


class _Asked:
    """Keeps the configuration of pytest for this folder, and runs no test."""

    config: pytest.Config | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        self.config = config
        return 0


@functools.cache
def here(models: tuple[str, ...] = ()) -> pytest.Config:
    """The configuration of pytest in this folder, with its plugins and conftest.py; nothing is collected.

    ``addopts`` are left out: they are meant for runs, and some, such as coverage's, would start to work. `models` are
    values of ``--accel-model``. It raises `PluginLoadError` where pytest does not start.
    """
    asked, errors = _Asked(), io.StringIO()
    given = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        with contextlib.redirect_stderr(errors):
            # The warnings would be about accelcheck, which is imported here before pytest could rewrite it.
            words = ["-s", "-p", "no:warnings", "-o", "addopts=", *(f"--accel-model={spec}" for spec in models)]
            code = pytest.main(words, plugins=[asked])
    finally:
        if given is not None:
            os.environ["PYTEST_ADDOPTS"] = given
    if asked.config is None:
        lines = [line.strip() for line in errors.getvalue().splitlines() if line.strip()]
        raise PluginLoadError(f"pytest does not start in {Path.cwd()} (exit {int(code)}): {' | '.join(lines[-LINES:])}")
    if not imports.announced():
        imports.announce(options.imports(asked.config))
    installed.of(asked.config, told=True)
    # pytest removes them when it ends, but hooks may import from these folders when they are called.
    sys.path[:0] = [str(path) for path in asked.config.getini("pythonpath")]
    return asked.config


def device(name: str) -> Device:
    """A device by name, for a command: built-in, registered by a plugin, or an accelerator that torch has.

    It imports the modules of ``--import``, and raises `PluginLoadError` where it needs pytest, which does not start.
    """
    from accelcheck.devices.generic import Generic

    known = known_devices()
    if name not in known:
        known = known_devices(devices(here()))
    imports.load()
    named = known[name] if name in known else Generic(name)
    if name in PROBED:
        named.learn(PROBED[name])
    return named
