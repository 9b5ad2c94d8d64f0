"""What conftest.py and other packages bring by hooks: in a pytest run, and for commands what one here would have. No torch."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from accelcheck.core import imports
from accelcheck.core.matrix import Matrix
from accelcheck.core.matrix import devices as known_devices
from accelcheck.plugin import options

if TYPE_CHECKING:
    from accelcheck.devices.base import Device


LINES = 8
"""Last lines of what pytest printed that are shown."""


class PluginLoadError(ValueError):
    """pytest cannot start here, so that nobody knows what its plugins bring."""


def devices(config: pytest.Config) -> list[Device]:
    """Devices besides the built-in ones."""
    return _all(config, "pytest_accel_devices")


def matrix(config: pytest.Config) -> Matrix:
    """Techniques and workloads, the built-in ones and others. Imports torch.

    Raises:
        DuplicateNameError: Two things share a name.
    """
    return Matrix.load(_all(config, "pytest_accel_techniques"), _all(config, "pytest_accel_workloads"))


def _all(config: pytest.Config, name: str) -> list[Any]:
    hook = getattr(config.hook, name, None)  # none where accelcheck is no plugin of this pytest
    return [] if hook is None else [thing for group in hook() for thing in group]


class _Asked:
    """Keeps what pytest knows of this folder, and runs nothing."""

    config: pytest.Config | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        self.config = config
        return 0


@functools.cache
def here() -> pytest.Config:
    """Pytest in this folder: its plugins and conftest.py are loaded, and nothing is collected.

    Without ``addopts``: they are for runs, and some, such as those that ask for coverage, would begin to work.

    Raises:
        BroughtError: It does not start.
    """
    asked, said = _Asked(), io.StringIO()
    given = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        with contextlib.redirect_stderr(said):
            # Its warnings are about accelcheck, which is imported here before pytest could look at it.
            code = pytest.main(["-s", "-p", "no:warnings", "-o", "addopts="], plugins=[asked])
    finally:
        if given is not None:
            os.environ["PYTEST_ADDOPTS"] = given
    if asked.config is not None and not imports.announced():
        imports.announce(options.imports(asked.config))
    if asked.config is None:
        lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
        raise PluginLoadError(f"pytest does not start in {Path.cwd()} (exit {int(code)}): {' | '.join(lines[-LINES:])}")
    # They are taken back when pytest ends, and hooks may import from there when they are called.
    sys.path[:0] = [str(path) for path in asked.config.getini("pythonpath")]
    return asked.config


def device(name: str) -> Device:
    """A device by name, for a command: a built-in one, one that plugins bring, or an accelerator that torch has.

    Raises:
        BroughtError: It is none of the built-in ones, and pytest does not start.
    """
    from accelcheck.devices.generic import Generic

    known = known_devices()
    if name not in known:
        known = known_devices(devices(here()))
    imports.load()
    return known[name] if name in known else Generic(name)
