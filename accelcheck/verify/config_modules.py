"""Settings of torch's compilers that differ from torch's defaults, by module, such as ``torch._dynamo.config``."""

import copy
import functools
import sys
from collections.abc import Mapping
from typing import Any

CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.compiler.config",
    "torch.fx.experimental._config",
)
"""Modules that are compared once something has imported them."""
_NOTES = frozenset({"aot_inductor.metadata"})
"""Settings in which torch itself records compilations."""


class Copied:
    """Wraps a value that equals no copy of itself, such as a compiler's pass: equal to each of its class."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Copied) and type(self.value) is type(other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return type(self.value).__qualname__


def changed(name: str) -> tuple[tuple[str, Any], ...]:
    """Settings of a module that differ from torch's defaults, with their values; none before it is imported."""
    if name not in sys.modules:
        return ()
    now, usual = sys.modules[name].get_config_copy(), _defaults(name)
    return tuple((key, _comparable(now[key])) for key in now if key not in _NOTES and now[key] != usual[key])


def change(name: str, values: tuple[tuple[str, Any], ...]) -> None:
    """Restores the settings that `changed` returned, and torch's defaults elsewhere."""
    wanted = _defaults(name) | dict(values)
    for key, _ in (*changed(name), *values):
        value = wanted[key]
        setattr(sys.modules[name], key, value.value if isinstance(value, Copied) else value)


def _comparable(value: Any) -> Any:
    # Config modules give deep copies.
    compares: Any = type(value).__eq__
    return Copied(value) if compares is object.__eq__ and copy.deepcopy(value) is not value else value


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    module = sys.modules[name]
    entries: Mapping[str, Any] = vars(module)["_config"]
    now = module.get_config_copy()
    # A bare object stands for a value that no variable of the environment gives.
    fixed = {key for key in now if type(entries[key].env_value_force) is type(entries[key].env_value_default) is object}
    return {key: entries[key].default if key in fixed else now[key] for key in now}
