"""Finds devices, techniques and workloads by searching their packages, so that no list must be edited."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Protocol, TypeVar

from accelcheck.core.errors import InputError


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)

MOST_LISTED = 500
"""Most words that an error lists one by one."""


class DuplicateNameError(InputError):
    """Two devices, techniques or workloads have the same name."""


class UnknownNameError(InputError):
    """A name is unknown; the message gives the legal names and the nearest one."""


def modules(package: str) -> Iterator[ModuleType]:
    """Imports `package`, its modules and its packages, sorted by name.

    Modules whose name begins with an underscore are not imported: they may import compilers, which would slow every
    collection.
    """
    import pkgutil

    root = importlib.import_module(package)
    yield root
    for module in sorted(pkgutil.iter_modules(root.__path__), key=lambda info: info.name):
        if not module.name.startswith("_"):
            name = f"{package}.{module.name}"
            yield from modules(name) if module.ispkg else (importlib.import_module(name),)


def discover(package: str, attribute: str) -> list[Any]:
    """All members of `attribute`, such as ``DEVICES`` or ``WORKLOADS``, of the `modules` of `package`."""
    return [member for module in modules(package) for member in getattr(module, attribute, ())]


def index(kind: str, things: Iterable[T]) -> Mapping[str, T]:
    """Things by name, sorted by name, so that their order is the same on every machine; no two share a name."""
    by_name: dict[str, T] = {}
    for thing in things:
        other = by_name.setdefault(thing.name, thing)
        if other is not thing:
            places = f"{type(other).__module__} and {type(thing).__module__}"
            raise DuplicateNameError(f"two {kind}s are named {thing.name!r}: {places}; rename one")
    return MappingProxyType(dict(sorted(by_name.items())))


def unknown(kind: str, word: str, legal: Sequence[str]) -> UnknownNameError:
    """The error for an unknown word. It lists the legal words, many of them by their first part, and names the nearest."""
    import difflib

    from accelcheck.core.strangers import QUOTED, quoted  # late: every pytest start imports this module

    near = difflib.get_close_matches(word[:QUOTED], legal, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"unknown {kind} {quoted(word)}.{hint} Legal values: {', '.join(_listed(legal))}.")


def _listed(words: Sequence[str]) -> Sequence[str]:
    """Words as an error lists them: more than `MOST_LISTED` by their first part, such as ``op-* (1093)``."""
    if len(words) <= MOST_LISTED:
        return words
    parts: dict[str, list[str]] = {}
    for word in words:
        first, dash, _ = word.partition("-")
        parts.setdefault(first + dash, []).append(word)
    return [f"{part}* ({len(names)})" if len(names) > 1 else names[0] for part, names in parts.items()]
