"""Finds installed packages and out-of-tree backends of torch without importing them."""

from collections.abc import Iterable
from importlib import metadata

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.core.entry_points import spec

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Environment variable that, set to 0, keeps `import torch` from loading the installed out-of-tree backends."""
_GROUP = "torch.backends"


def installed(module: str) -> bool:
    """True when a module can be found; its parent packages are not imported."""
    try:
        return spec(module) is not None
    except ValueError:  # it is imported already, without a spec
        return True


def requires(package: str, action: str) -> Capability:
    """`SUPPORTED` if a top-level package is installed, else unavailable with the action."""
    if installed(package):
        return SUPPORTED
    return unavailable(Code.NO_PACKAGE, f"the package {package} is not installed", action)


def requires_torch() -> Capability:
    """The answer of `requires` for torch."""
    return requires("torch", "pip install torch")


def version(distribution: str) -> str:
    """The version of an installed distribution; empty when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def versions(*distributions: str) -> dict[str, str]:
    """Versions of the installed ones of some distributions, by name."""
    return {name: text for name in distributions if (text := version(name))}


def distributions(module: str) -> list[str]:
    """The installed distributions that have a module."""
    return metadata.packages_distributions().get(module.partition(".")[0], [])


def release(text: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 13) of ``2.13.0+cpu``; (0, 0) if there are not two."""
    parts = text.partition("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return 0, 0


def backends() -> tuple[metadata.EntryPoint, ...]:
    """Entry points of the out-of-tree backends that `import torch` loads, sorted by name."""
    return tuple(sorted(metadata.entry_points(group=_GROUP), key=lambda entry: entry.name))


def package_of(entry: metadata.EntryPoint) -> str:
    """The top-level package of an entry point."""
    return entry.module.partition(".")[0]


def load_backend(entries: Iterable[metadata.EntryPoint]) -> None:
    """Loads out-of-tree backends as `import torch` does unless `AUTOLOAD` is 0."""
    for entry in entries:
        entry.load()()
