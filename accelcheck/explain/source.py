"""Source code of a call: lines of a script that make its tensors, move them to the device, and call the operator."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelcheck.explain import tensor_file
from accelcheck.explain.calls import OperatorCall, aside, memory
from accelcheck.explain.smallest import SEED

DATA = ".safetensors"
"""Suffix of the file beside a script."""
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
LITERAL = 24
"""Most numbers that are written into a script; more go into the file."""


class NotWrittenError(ValueError):
    """There is no script; the message says why."""


class Tensors:
    """The tensors of a script, its list ``t``, on their devices; `values` is that of the `Smallest`.

    Attributes:
        data: Tensors of the file, by name; filled by `made`.
    """

    def __init__(self, tensors: Sequence[Tensor], values: str) -> None:
        self.tensors, self.values = tensors, values
        self.data: dict[str, Tensor] = {}

    def made(self, seed: str = str(SEED)) -> Iterator[str]:
        """Lines that make the list, on the CPU; `seed` is the source of the seed of normal numbers."""
        few = sum(tensor.numel() for tensor in self.tensors) <= LITERAL
        if self.values == "normal":
            yield f"g = torch.Generator().manual_seed({seed})"
        yield "t = []"
        for number, tensor in enumerate(self.tensors):
            plain = _plain(tensor)
            with aside():
                held = (tensor.reshape(-1) if plain else memory(tensor)).detach().cpu()
            dtype = str(tensor.dtype)
            shape = list(tensor.shape) if plain else [held.numel()]
            if tensor.is_floating_point() and self.values == "ones":
                made = f"torch.ones({shape}, dtype={dtype})"
            elif tensor.is_floating_point() and self.values == "normal":
                made = f"torch.randn({shape}, generator=g).to({dtype})"
            elif few:
                made = f"torch.tensor([{', '.join(map(literal, held.tolist()))}], dtype={dtype}).reshape({shape})"
            else:
                self.data[f"t{number}"] = held.clone()
                made = f'read("t{number}").reshape({shape})'
            if not plain:
                made += f".as_strided({list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()})"
            yield f"t.append({made})"

    def moved(self) -> Iterator[str]:
        """Lines that move the tensors to the device, in their strides."""
        for number, tensor in enumerate(self.tensors):
            if tensor.device.type == "cpu":
                continue
            if _plain(tensor):
                yield f"t[{number}] = t[{number}].to(device)"
            else:
                view = f"{list(tensor.shape)}, {list(tensor.stride())}, {tensor.storage_offset()}"
                flat = f"t[{number}].as_strided([{memory(tensor).numel()}], [1], 0)"
                yield f"t[{number}] = {flat}.to(device).as_strided({view})"


def head(title: str, modules: Iterable[str], device: str, data: Mapping[str, Tensor], file: str) -> list[str]:
    """First lines of a script: its title, what it imports, its device, and the function that reads its file."""
    imports = [f"import {name}" for name in (*(["json"] if data else []), *modules)]
    return [f'"""{title}"""', *imports, f'device = "{device}"', *(tensor_file.reading(file) if data else ())]


def expression(call: OperatorCall, name: str) -> str:
    """Write a call as source; its tensors are those of the list `name`, in order."""
    counted = itertools.count()

    def source(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{name}[{next(counted)}]"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(source, value))}]"
        return literal(value)

    words = [source(value) for value in call.args] + [f"{key}={source(value)}" for key, value in call.kwargs.items()]
    return f"{overload(call.func)}({', '.join(words)})"


def overload(func: Any) -> str:
    """Write an operator's overload as source."""
    namespace, _, rest = func.name().partition("::")
    name, _, which = rest.partition(".")
    return f"torch.ops.{namespace}.{name}.{which or 'default'}"


def literal(value: Any) -> str:
    """Write an argument that is no tensor as source; a `NotWrittenError` where it has none, such as a generator."""
    if isinstance(value, torch.device):
        return '"cpu"' if value.type == "cpu" else "device"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    raise NotWrittenError(f"an argument is a {type(value).__name__}, which has no source")


def written(path: Path, text: str, data: Mapping[str, Tensor]) -> None:
    """Write a script, and its data beside it; a `NotWrittenError` where the file format has no such dtype."""
    if strange := {str(tensor.dtype) for tensor in data.values()} - {f"torch.{name}" for name in tensor_file.NAMES}:
        raise NotWrittenError(f"a file in the format safetensors has no {', '.join(sorted(strange))}")
    if data:
        path.with_suffix(DATA).write_bytes(tensor_file.packed(dict(data)))
    path.write_text(text, encoding="utf-8")


def _plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.storage_offset()
