"""Imports backends of torch that no entry point loads, in every process that uses a device. No torch.

An environment variable carries their names, because all child processes inherit it.
"""

import importlib
import os
from collections.abc import Iterable, MutableMapping, Sequence

from accelcheck.core.registry import UnknownNameError, unknown

VARIABLE = "ACCELCHECK_IMPORT"
"""Environment variable with the names, separated by commas."""
OPTION = "--accel-import"
ADVICE = "install the package, or put its folder on PYTHONPATH"
"""Advice of the error for a module that cannot be imported."""


class ModuleImportError(ImportError):
    """A module cannot be imported; the message names it, its exception, and what to do."""


def announce(modules: Iterable[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets the modules that `load` imports, in this process and in those that it starts from now on; none removes them.

    An `UnknownNameError` where a name is not that of a module.
    """
    names = tuple(dict.fromkeys(modules))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UnknownNameError(f"module {name!r}: expected a name such as torch_vendor")
    if names:
        environ[VARIABLE] = ",".join(names)
    else:
        environ.pop(VARIABLE, None)


def announced() -> tuple[str, ...]:
    """The modules that `load` imports."""
    return tuple(name for name in os.environ.get(VARIABLE, "").split(",") if name)


def load() -> None:
    """Imports the announced modules, in order. Call it in every process before it uses or unpickles a device."""
    for name in announced():
        load_one(name)


def load_one(name: str) -> None:
    """Imports one module; raises `ModuleImportError` where it cannot be imported."""
    try:
        importlib.import_module(name)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ModuleImportError(f"module {name}: cannot be imported: {why}; {ADVICE}") from error


def unknown_device(word: str, legal: Sequence[str], option: str = OPTION) -> UnknownNameError:
    """The error for an unknown device; the `option`, of the pytest run or of the command, takes a module."""
    return UnknownNameError(
        f"{unknown('device', word, legal)} A backend that only conftest.py imports is not found, because child "
        f"processes look for devices: give {option}=MODULE, or install it as a package with a torch.backends entry "
        "point."
    )
