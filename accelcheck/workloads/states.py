"""The state of a training as bytes: what ``torch.save`` writes of it, and ``torch.load`` reads as data alone."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_VALUES = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


def pack(state: Mapping[str, Any]) -> bytes:
    """A state moved to the CPU, as ``torch.save`` writes it: it shares no memory with what lives on.

    Args:
        state: Tensors of any device, numbers, text, and dicts, lists and tuples of them.

    Raises:
        TypeError: Something else is in it, named by its path: it could be written, and not be read with
            ``weights_only=True``.
    """
    file = io.BytesIO()
    torch.save(_plain(state, "state"), file)
    return file.getvalue()


def unpack(content: bytes) -> Any:
    """What was packed, with all tensors on the CPU. Nothing in it is run.

    Raises:
        RuntimeError, pickle.UnpicklingError, EOFError: It is something else.
    """
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _plain(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        host = value.detach().cpu()
        whole = host.untyped_storage().nbytes() == host.nbytes
        return host if whole else host.clone()  # a view would take all that it is a view of along
    if isinstance(value, Mapping):
        return {_plain(key, f"a key of {path}"): _plain(item, f"{path}[{key!r}]") for key, item in value.items()}
    if kind in {list, tuple, torch.Size}:
        items = (_plain(item, f"{path}[{index}]") for index, item in enumerate(value))
        return list(items) if kind is list else tuple(items)
    if kind in _VALUES:
        return value
    hint = "; what is sharded is for torch.distributed.checkpoint" if isinstance(value, Tensor) else ""
    raise TypeError(f"{path}: expected tensors, numbers, text, and dicts, lists and tuples of them, got {kind}{hint}")
