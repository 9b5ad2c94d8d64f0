"""Finds what the packages `devices`, `techniques` and `workloads` and other plugins register. One file, no list to edit."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


class DuplicateNameError(ValueError):
    """Two things of one kind were registered under one name."""


class UnknownNameError(ValueError):
    """A name that nothing is registered under; the message gives the legal ones and the nearest."""


def discover(package: str, attribute: str) -> list[Any]:
    """All members of `attribute` (``DEVICES``, ``TECHNIQUES``, ``WORKLOADS``) of the modules of `package` and its packages.

    Modules whose name begins with an underscore hold machinery and are not imported: one that imports a compiler at its top
    would cost every run that only collects.

    Raises:
        ImportError: A module cannot be imported.
    """
    import pkgutil

    root = importlib.import_module(package)
    found: list[Any] = [*getattr(root, attribute, ())]
    for module in sorted(pkgutil.iter_modules(root.__path__), key=lambda info: info.name):
        if module.name.startswith("_"):
            continue
        name = f"{package}.{module.name}"
        found += discover(name, attribute) if module.ispkg else getattr(importlib.import_module(name), attribute, ())
    return found


def index(kind: str, things: Iterable[T]) -> Mapping[str, T]:
    """Things by name, sorted by name, so that order is the same everywhere.

    Raises:
        DuplicateNameError: Two have the same name.
    """
    by_name: dict[str, T] = {}
    for thing in things:
        other = by_name.setdefault(thing.name, thing)
        if other is not thing:
            raise DuplicateNameError(
                f"two {kind}s are named {thing.name!r}: {type(other).__module__} and {type(thing).__module__}; rename one"
            )
    return MappingProxyType(dict(sorted(by_name.items())))


def unknown(kind: str, word: str, legal: Sequence[str]) -> UnknownNameError:
    """The error for a word that is not among the legal ones: it says which are, and which is nearest."""
    import difflib

    near = difflib.get_close_matches(word, legal, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"unknown {kind} {word!r}.{hint} Legal values: {', '.join(legal)}.")
