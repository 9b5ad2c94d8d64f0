"""Checks devices, techniques and workloads of other packages: a misspelt word would silently mean fewer cases.

Each check takes pairs of the source of a thing, for errors, and the thing, and accelcheck's own things by name. It
returns the things, or raises a `ForeignCodeError` that says what to do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelcheck.core.case import Mode
from accelcheck.core.foreign import ForeignCodeError
from accelcheck.core.registry import unknown
from accelcheck.core.strangers import quoted

if TYPE_CHECKING:
    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload

REQUIRED = ("name", "family", "promise", "source")
"""Attributes that every technique sets to a text."""
_MODES = tuple(map(str, Mode))
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*", re.IGNORECASE)
"""Form of names of devices, which are parts of case ids and of names of files."""


def devices(found: Sequence[tuple[str, Any]], builtin: Mapping[str, Device]) -> list[Device]:
    """The registered devices, checked without an import of torch."""
    from accelcheck.devices.base import FEATURES, TRIED, Device

    _distinct("device", found, builtin)
    for what, candidate in found:
        where = f"{what}: device {quoted(candidate.name)}"
        if not isinstance(candidate, Device):
            raise ForeignCodeError(f"{where}: expected an instance of a subclass of Device, got {quoted(candidate)}")
        if not _NAME.fullmatch(candidate.name):
            raise ForeignCodeError(f"{where}: expected a name of letters, digits, and -_. between them")
        if not isinstance(getattr(candidate, "type", None), str):
            raise ForeignCodeError(f"{where}: set `type`, the type of its torch.device")
        _known(f"{where}: dtypes", candidate.dtypes)
        _known(f"{where}: features", candidate.features, FEATURES)
        _known(f"{where}: denied", candidate.denied, dict.fromkeys([*TRIED, *FEATURES]))
        for word, reason in candidate.denied.items():
            if word in candidate.dtypes | candidate.features:
                raise ForeignCodeError(f"{where}: denied: {word!r} is declared too: leave it out of one of them")
            if not isinstance(reason, str) or not reason.strip():
                raise ForeignCodeError(f"{where}: denied: {word!r}: expected the reason, got {quoted(reason)}")
    return [candidate for _, candidate in found]


def techniques(found: Sequence[tuple[str, Any]], builtin: Mapping[str, Technique]) -> list[Technique]:
    """The registered techniques, checked."""
    from accelcheck.techniques.base import Technique

    _distinct("technique", found, builtin)
    for what, technique in found:
        where = f"{what}: technique {quoted(technique.name)}"
        if not isinstance(technique, Technique):
            raise ForeignCodeError(f"{where}: expected an instance of a subclass of Technique, got {quoted(technique)}")
        for attribute in REQUIRED:
            if not isinstance(getattr(technique, attribute, None), str):
                raise ForeignCodeError(f"{where}: set `{attribute}`, a text: Technique.{attribute} says which")
        _known(f"{where}: modes", technique.modes, _MODES)
        _known(f"{where}: dtypes", technique.dtypes, _dtypes())
        _known(f"{where}: workloads", technique.workloads)
        _known(f"{where}: early", technique.early)
        own = type(technique)
        for name in ("emulate", "emulate_optimizer"):
            if getattr(own, name) is not getattr(Technique, name) and technique.oracle == "float64":
                raise ForeignCodeError(
                    f"{where}: it overrides `{name}`, which is called only where `oracle` is not 'float64': set "
                    "`oracle` to a name for the scheme, such as 'int8-weight-channel'. Techniques with the same name "
                    "share references"
                )
    return [technique for _, technique in found]


def workloads(
    found: Sequence[tuple[str, Any]], builtin: Mapping[str, Workload], known: Iterable[Technique]
) -> list[Workload]:
    """The registered workloads, checked; the required and excluded traits of all known techniques are legal."""
    from accelcheck.devices.base import FEATURES
    from accelcheck.workloads.base import Workload
    from accelcheck.workloads.probes import PROBES
    from accelcheck.workloads.problem import TRAITS

    _distinct("workload", found, builtin)
    asked = list(known)
    traits = {*TRAITS, *(name for t in asked for name in t.requires | t.excludes | t.works_on)}
    for what, workload in found:
        where = f"{what}: workload {quoted(workload.name)}"
        if not isinstance(workload, Workload):
            raise ForeignCodeError(f"{where}: expected a Workload, got {quoted(workload)}")
        if not _takes_two(workload.make):
            raise ForeignCodeError(f"{where}: `make`: expected make(generator, extent), got {quoted(workload.make)}")
        _known(f"{where}: traits", workload.traits, sorted(traits))
        _known(f"{where}: modes", workload.modes, _MODES)
        _known(f"{where}: dtypes", workload.dtypes, _dtypes())
        _known(f"{where}: features", workload.features, FEATURES)
        _known(f"{where}: probes", workload.probes, PROBES)
        _known(f"{where}: techniques", workload.techniques, [technique.name for technique in asked])
    return [workload for _, workload in found]


def _takes_two(make: object) -> bool:
    """True for a function that takes two positional arguments, as far as its signature is known."""
    try:
        inspect.signature(make).bind(None, 0)  # type: ignore[arg-type]  # a `TypeError` where it cannot be called
    except TypeError:
        return False
    except ValueError:
        pass  # it has no signature
    return True


def _distinct(kind: str, found: Iterable[tuple[str, Any]], builtin: Mapping[str, object]) -> None:
    """Checks that names are unique; an error names the hooks, since both classes may be accelcheck's."""
    owners = {name: ("accelcheck itself", thing) for name, thing in builtin.items()}
    for what, thing in found:
        owner, other = owners.setdefault(thing.name, (what, thing))
        if other is not thing:
            raise ForeignCodeError(f"{what}: {owner} registers a {kind} named {quoted(thing.name)} too: rename one")


def _known(where: str, words: Collection[str], legal: Collection[str] | None = None) -> None:
    """Checks that words are a set of texts, of the legal ones where these are known."""
    if isinstance(words, str):
        raise ForeignCodeError(f"{where}: expected a set of texts, got the text {quoted(words)}")
    for word in words:
        if not isinstance(word, str):
            raise ForeignCodeError(f"{where}: expected texts, got {quoted(word)}")
        if legal is not None and word not in legal:
            raise ForeignCodeError(f"{where}: {unknown('word', word, list(legal))}")


def _dtypes() -> list[str]:
    import torch

    from accelcheck.verify.precision import UNIT_ROUNDOFF

    return [name for name in UNIT_ROUNDOFF if hasattr(torch, name)]  # TF32 is no storage dtype
