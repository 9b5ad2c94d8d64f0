"""Finds the entry points of packages with devices, techniques and workloads, without importing anything. No torch."""

import importlib.util
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DEVICES, TECHNIQUES, WORKLOADS = GROUPS = ("accelcheck.devices", "accelcheck.techniques", "accelcheck.workloads")
"""The groups; `accelcheck.plugin.installed` says which forms the value of an entry point may have."""


def entries(group: str) -> tuple[metadata.EntryPoint, ...]:
    """The entry points of a group, in the same order on every machine."""
    return tuple(sorted(metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value)))


def described(entry: metadata.EntryPoint) -> str:
    """An entry point for people: its name, what it names, the package that declares it, and its group."""
    package = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"entry point {entry.name} = {entry.value}{package} ({entry.group})"


def spec(module: str) -> ModuleSpec | None:
    """The spec of a module, found without importing it or its parents; None where there is none."""
    top, *below = module.split(".")
    current = importlib.util.find_spec(top)
    for name in below:
        if current is None or current.submodule_search_locations is None:
            return None
        current = PathFinder.find_spec(f"{current.name}.{name}", list(current.submodule_search_locations))
    return current


def beside(device: str, *path: str) -> Path | None:
    """A file beside the module that a device's entry point names, such as ``ledgers/npu.toml``; None without one.

    Nothing is imported: reports of untrusted journals look for these files too.
    """
    named = [entry for entry in entries(DEVICES) if entry.name == device]
    if len(named) != 1:  # two would be refused when a run begins
        return None
    try:
        module = spec(named[0].module)
    except (ImportError, ValueError):  # an invalid name, or a module without a spec: loading it says so
        return None
    if module is None or not module.origin:
        return None
    file = Path(module.origin).parent.joinpath(*path)
    return file if file.is_file() else None
