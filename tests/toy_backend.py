"""An out-of-tree accelerator written in Python: a real PrivateUse1 device named ``toy`` that computes on the CPU.

Loaded as an entry point of the group ``torch.backends`` would be, by `load`. Needs torch >= 2.10.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree
from torch.utils import backend_registration


class Module:
    """Functions of ``torch.toy``."""

    seeds: ClassVar[list[int]] = []

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)

    def get_device_name(self, index: int) -> str:
        return f"Toy {index}"

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class Bare:
    """`Module` of a backend with only what torch asks every backend for: no autocast, no streams, no names."""

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass


_VALUES: dict[int, Tensor] = {}
"""The values of each tensor, on the CPU, by the address of its storage, which `detach` shares."""


def _made(values: Tensor) -> Tensor:
    made: Tensor = torch._C._acc.create_empty_tensor(tuple(values.shape), values.dtype)
    _VALUES[made.untyped_storage()._cdata] = values
    return made


def _inside(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "toy":
        return torch.device("cpu")
    if isinstance(value, Tensor) and value.device.type == "toy":
        return _VALUES[value.untyped_storage()._cdata]
    return value


def _call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    of = {id(_inside(value)): value for value in given}
    out = operator(*pytree.tree_map(_inside, args), **pytree.tree_map(_inside, kwargs))

    def outside(value: Any) -> Any:
        # What an in-place operator returns is its argument. Views are copies: torch has no way to make one in Python.
        return (of.get(id(value)) if id(value) in of else _made(value)) if isinstance(value, Tensor) else value

    return pytree.tree_map(outside, out)


def _empty(size: list[int], *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return _made(torch.empty(size, dtype=dtype))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _inside(target).copy_(_inside(source))
    return target


_LIBRARIES: list[Any] = []  # an implementation lives as long as its library


def load(module: object | None = None) -> None:
    """Register the device, with `Module` or another module."""
    backend_registration._setup_privateuseone_for_python_backend("toy", backend_module=module or Module())
    distributed.Backend.default_device_backend_map["toy"] = "gloo"
    make: Any = torch.library.Library  # torch does not annotate it
    every, aten = make("_", "IMPL"), make("aten", "IMPL")
    every.fallback(_call, "PrivateUse1")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty, "PrivateUse1")
    aten.impl("_copy_from", _copy, "PrivateUse1")
    _LIBRARIES.extend((every, aten))
