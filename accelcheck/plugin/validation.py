"""Checks what other packages register when they do: a misspelt word would silently mean fewer cases."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from accelcheck.core.foreign import ForeignCodeError
from accelcheck.core.registry import unknown
from accelcheck.core.strangers import quoted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload

REQUIRED = ("name", "family", "promise", "source")
"""Attributes that every technique sets to a text."""


_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*", re.IGNORECASE)
"""Names of devices: parts of case ids and of names of files."""


def devices(found: Sequence[tuple[str, Any]], builtin: Mapping[str, Device]) -> list[Device]:
    """The devices that were registered; as `techniques`, and without an import of torch.

    Raises:
        ForeignCodeError: One cannot be what it claims to be.
    """
    from accelcheck.devices.base import FEATURES, TRIED, Device

    _distinct("device", found, builtin)
    for what, one in found:
        said = f"{what}: device {quoted(one.name)}"
        if not isinstance(one, Device):
            raise ForeignCodeError(f"{said}: expected an instance of a subclass of Device, got {quoted(one)}")
        if not _NAME.fullmatch(one.name):
            raise ForeignCodeError(f"{said}: expected a name of letters, digits, and -_. between them")
        if not isinstance(getattr(one, "type", None), str):
            raise ForeignCodeError(f"{said}: set `type`, the type of its torch.device")
        _known(f"{said}: dtypes", one.dtypes)
        _known(f"{said}: features", one.features, FEATURES)
        _known(f"{said}: denied", one.denied, dict.fromkeys([*TRIED, *FEATURES]))
        for word in one.denied:
            if word in one.dtypes | one.features:
                raise ForeignCodeError(f"{said}: denied: {word!r} is declared too: leave it out of one of them")
            if not isinstance(one.denied[word], str) or not one.denied[word].strip():
                raise ForeignCodeError(f"{said}: denied: {word!r}: expected the reason, got {quoted(one.denied[word])}")
    return [one for _, one in found]


def techniques(found: Sequence[tuple[str, Any]], builtin: Mapping[str, Technique]) -> list[Technique]:
    """The techniques that hooks returned.

    Args:
        found: What registered each, for errors, and the technique.
        builtin: Those of accelcheck, by name.

    Raises:
        ForeignCodeError: One cannot be what it claims to be; the message says what to do.
    """
    from accelcheck.techniques.base import Technique

    _distinct("technique", found, builtin)
    for what, one in found:
        said = f"{what}: technique {quoted(one.name)}"
        if not isinstance(one, Technique):
            raise ForeignCodeError(f"{said}: expected an instance of a subclass of Technique, got {quoted(one)}")
        for attribute in REQUIRED:
            if not isinstance(getattr(one, attribute, None), str):
                raise ForeignCodeError(f"{said}: set `{attribute}`, a text: Technique.{attribute} says which")
        _known(f"{said}: modes", one.modes, _modes())
        _known(f"{said}: dtypes", one.dtypes, _dtypes())
        _known(f"{said}: workloads", one.workloads)
        _known(f"{said}: early", one.early)
        emulates = [
            name
            for name in ("emulate", "emulate_optimizer")
            if getattr(type(one), name) is not getattr(Technique, name)
        ]
        if emulates and one.oracle == "float64":
            raise ForeignCodeError(
                f"{said}: it overrides `{emulates[0]}`, which is called only where `oracle` is not 'float64': set `oracle` to a "
                "name for the scheme, such as 'int8-weight-channel'. Techniques with the same name share references"
            )
    return [one for _, one in found]


def workloads(
    found: Sequence[tuple[str, Any]], builtin: Mapping[str, Workload], known: Iterable[Technique]
) -> list[Workload]:
    """The workloads that hooks returned; as `techniques`.

    Args:
        found: What registered each, for errors, and the workload.
        builtin: Those of accelcheck, by name.
        known: All techniques: what they ask for are legal traits.

    Raises:
        ForeignCodeError: One cannot be what it claims to be.
    """
    from accelcheck.devices.base import FEATURES
    from accelcheck.workloads.base import Workload
    from accelcheck.workloads.probes import PROBES
    from accelcheck.workloads.problem import TRAITS

    _distinct("workload", found, builtin)
    asked = list(known)
    traits = {*TRAITS, *(name for one in asked for name in one.requires | one.excludes | one.works_on)}
    for what, one in found:
        said = f"{what}: workload {quoted(one.name)}"
        if not isinstance(one, Workload):
            raise ForeignCodeError(f"{said}: expected a Workload, got {quoted(one)}")
        if not _takes_two(one.make):
            raise ForeignCodeError(f"{said}: `make`: expected make(generator, extent), got {quoted(one.make)}")
        _known(f"{said}: traits", one.traits, sorted(traits))
        _known(f"{said}: modes", one.modes, _modes())
        _known(f"{said}: dtypes", one.dtypes, _dtypes())
        _known(f"{said}: features", one.features, FEATURES)
        _known(f"{said}: probes", one.probes, PROBES)
        _known(f"{said}: techniques", one.techniques, [technique.name for technique in asked])
    return [one for _, one in found]


def _takes_two(make: object) -> bool:
    """Whether it can be called with two positional arguments, as far as it can be known."""
    if not callable(make):
        return False
    try:
        inspect.signature(make).bind(None, 0)
    except TypeError:
        return False
    except ValueError:
        return True  # it has no signature
    return True


def _distinct(kind: str, found: Iterable[tuple[str, Any]], builtin: Mapping[str, object]) -> None:
    """Names are unique: who else has one is said by the hook, not by the class, which may be accelcheck's."""
    owners = {name: ("accelcheck itself", one) for name, one in builtin.items()}
    for what, one in found:
        owner, other = owners.setdefault(one.name, (what, one))
        if other is not one:
            raise ForeignCodeError(f"{what}: {owner} registers a {kind} named {quoted(one.name)} too: rename one")


def _known(said: str, words: Collection[str], legal: Collection[str] | None = None) -> None:
    """Words of a set: each a text, and one of the legal ones where these are known."""
    if isinstance(words, str):
        raise ForeignCodeError(f"{said}: expected a set of texts, got the text {quoted(words)}")
    for word in words:
        if not isinstance(word, str):
            raise ForeignCodeError(f"{said}: expected texts, got {quoted(word)}")
        if legal is not None and word not in legal:
            raise ForeignCodeError(f"{said}: {unknown('word', word, list(legal))}")


def _modes() -> list[str]:
    from accelcheck.core.case import Mode

    return [str(mode) for mode in Mode]


def _dtypes() -> list[str]:
    import torch

    from accelcheck.verify.precision import UNIT_ROUNDOFF

    return [name for name in UNIT_ROUNDOFF if hasattr(torch, name)]  # TF32 is no storage dtype
