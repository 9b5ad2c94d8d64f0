"""Training states as bytes that ``torch.save`` writes and ``torch.load`` reads with ``weights_only=True``."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_VALUES = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


def pack(state: Mapping[str, Any]) -> bytes:
    """Moves a state to the CPU and writes it by ``torch.save``.

    It may contain tensors of any device, numbers, text, and dicts, lists and tuples of them. Any other type raises
    `TypeError` with its path, since ``torch.load`` could not read it with ``weights_only=True``.
    """
    file = io.BytesIO()
    torch.save(_plain(state, "state"), file)
    return file.getvalue()


def unpack(content: bytes) -> Any:
    """Reads a state that `pack` wrote, with all tensors on the CPU, without executing code in it."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _plain(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        host = value.detach().cpu()
        whole = host.untyped_storage().nbytes() == host.nbytes
        return host if whole else host.clone()  # torch.save writes the whole storage behind a view
    if isinstance(value, Mapping):
        return {_plain(key, f"a key of {path}"): _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if kind in {list, tuple, torch.Size}:
        items = (_plain(item, f"{path}[{index}]") for index, item in enumerate(value))
        return list(items) if kind is list else tuple(items)
    if kind in _VALUES:
        return value
    hint = "; save sharded tensors with torch.distributed.checkpoint" if isinstance(value, Tensor) else ""
    raise TypeError(f"{path}: expected tensors, numbers, text, and dicts, lists and tuples of them, got {kind}{hint}")
