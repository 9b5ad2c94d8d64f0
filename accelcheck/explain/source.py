"""A call as source code: how a script makes its tensors, moves them to the device, and calls the operator."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.explain import tensor_file
from accelcheck.explain.calls import aside, memory
from accelcheck.explain.smallest import SEED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from accelcheck.explain.calls import OperatorCall

DATA = ".safetensors"
"""Ending of the file beside a script."""
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
LITERAL = 24
"""Numbers that are written into a script; more go into the file."""


class NotWrittenError(ValueError):
    """There is no script; the message says why."""


class Tensors:
    """The tensors that a script needs, as its list ``t``.

    Args:
        tensors: In order, on their devices.
        values: What the floating-point ones are: as of `accelcheck.explain.smallest.Smallest`.

    Attributes:
        data: What goes into the file, by name; filled by `made`.
    """

    def __init__(self, tensors: Sequence[Tensor], values: str) -> None:
        self.tensors, self.values = tensors, values
        self.data: dict[str, Tensor] = {}

    def made(self, seed: str = str(SEED)) -> Iterator[str]:
        """Lines that make the list, on the CPU; `seed` is that of normal numbers, as source."""
        few = sum(one.numel() for one in self.tensors) <= LITERAL
        if self.values == "normal":
            yield f"g = torch.Generator().manual_seed({seed})"
        yield "t = []"
        for number, one in enumerate(self.tensors):
            plain = _plain(one)
            with aside():
                held = (one.reshape(-1) if plain else memory(one)).detach().cpu()
            dtype = str(one.dtype)
            shape = list(one.shape) if plain else [held.numel()]
            if one.is_floating_point() and self.values == "ones":
                made = f"torch.ones({shape}, dtype={dtype})"
            elif one.is_floating_point() and self.values == "normal":
                made = f"torch.randn({shape}, generator=g).to({dtype})"
            elif few:
                made = f"torch.tensor({_list(held)}, dtype={dtype}).reshape({shape})"
            else:
                self.data[f"t{number}"] = held.clone()
                made = f'read("t{number}").reshape({shape})'
            if not plain:
                made += f".as_strided({list(one.shape)}, {list(one.stride())}, {one.storage_offset()})"
            yield f"t.append({made})"

    def moved(self) -> Iterator[str]:
        """Lines that move the tensors to the device, in their strides."""
        for number, one in enumerate(self.tensors):
            if one.device.type == "cpu":
                continue
            if _plain(one):
                yield f"t[{number}] = t[{number}].to(device)"
            else:
                view = f"{list(one.shape)}, {list(one.stride())}, {one.storage_offset()}"
                yield f"t[{number}] = t[{number}].as_strided([{memory(one).numel()}], [1], 0).to(device).as_strided({view})"


def expression(call: OperatorCall, name: str) -> str:
    """The call as source: its tensors are those of the list `name`, in order."""
    counted = itertools.count()

    def said(one: Any) -> str:
        if isinstance(one, Tensor):
            return f"{name}[{next(counted)}]"
        if isinstance(one, (list, tuple)):
            return f"[{', '.join(map(said, one))}]"
        return literal(one)

    words = [said(one) for one in call.args] + [f"{key}={said(one)}" for key, one in call.kwargs.items()]
    return f"{overload(call.func)}({', '.join(words)})"


def overload(func: Any) -> str:
    """An operator's overload as source."""
    namespace, _, rest = func.name().partition("::")
    name, _, which = rest.partition(".")
    return f"torch.ops.{namespace}.{name}.{which or 'default'}"


def literal(one: Any) -> str:
    """An argument that is no tensor, as source.

    Raises:
        NotWrittenError: It has none, as a generator has not.
    """
    if isinstance(one, torch.device):
        return '"cpu"' if one.type == "cpu" else "device"
    if isinstance(one, float) and not math.isfinite(one):
        return f'float("{one}")'
    if one is None or isinstance(one, _PLAIN):
        return repr(one)
    raise NotWrittenError(f"an argument is a {type(one).__name__}, which has no source")


def written(path: Path, text: str, data: Mapping[str, Tensor]) -> None:
    """Write a script, and its data beside it.

    Raises:
        NotWrittenError: The file format has no such dtype.
    """
    if strange := {str(one.dtype) for one in data.values()} - {f"torch.{name}" for name in tensor_file.NAMES}:
        raise NotWrittenError(f"a file in the format safetensors has no {', '.join(sorted(strange))}")
    if data:
        path.with_suffix(DATA).write_bytes(tensor_file.packed(dict(data)))
    path.write_text(text, encoding="utf-8")


def _plain(one: Tensor) -> bool:
    return one.is_contiguous() and not one.storage_offset()


def _list(held: Tensor) -> str:
    return f"[{', '.join(map(literal, held.tolist()))}]"
