"""Entry points by which installed packages bring devices, techniques and workloads: found without importing anything. No torch."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DEVICES, TECHNIQUES, WORKLOADS = GROUPS = ("accelcheck.devices", "accelcheck.techniques", "accelcheck.workloads")
"""The groups. The value of an entry point names what it brings: `accelcheck.plugin.installed` says which forms it may have."""


def entries(group: str) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of a group, in the same order on every machine."""
    return tuple(sorted(metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value)))


def described(entry: metadata.EntryPoint) -> str:
    """An entry point for people: its name, what it names, the package that declares it, and its group."""
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"entry point {entry.name} = {entry.value}{package} ({entry.group})"


def spec(module: str) -> ModuleSpec | None:
    """Where a module is, without importing it or its parents; None where there is none."""
    top, *below = module.split(".")
    found = importlib.util.find_spec(top)
    for name in below:
        if found is None or found.submodule_search_locations is None:
            return None
        found = PathFinder.find_spec(f"{found.name}.{name}", list(found.submodule_search_locations))
    return found


def beside(device: str, *path: str) -> Path | None:
    """A file that the package of a device ships beside the module which its entry point names; None where there is none.

    Nothing is imported: reports of a journal, which a stranger may have written, look for these files too.

    Args:
        device: Its name, and that of its entry point.
        path: The file's path from the module's folder, such as ``ledgers`` and ``npu.toml``.
    """
    named = [entry for entry in entries(DEVICES) if entry.name == device]
    if len(named) != 1:  # two would be refused when a run begins
        return None
    try:
        found = spec(named[0].module)
    except (ImportError, ValueError):  # a name that is none, or a module without a spec: loading it says so
        return None
    if found is None or not found.origin:
        return None
    file = Path(found.origin).parent.joinpath(*path)
    return file if file.is_file() else None
