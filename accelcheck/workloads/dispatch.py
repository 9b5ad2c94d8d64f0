"""Calls of operators within a dispatch mode as without one, and of layers without their fused kernels."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.devices.torch_names import (
    DispatchKey,
    DispatchKeySet,
    ForceDispatchKeyGuard,
    excluded_keys,
    included_keys,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from accelcheck.devices.torch_names import TorchDispatchMode

FUSED = frozenset({"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"})
"""Kernels that call other operators: torch's fast path of `torch.nn.TransformerEncoderLayer` and
`torch.nn.MultiheadAttention` in evaluation mode without gradients."""
_AUTOCAST = tuple(name for name in dir(DispatchKey) if name.startswith("Autocast"))


def called(mode: TorchDispatchMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls an operator from a mode's ``__torch_dispatch__``.

    An active autocast casts the operators that a kernel of `FUSED` calls, as without a mode; within one, torch leaves
    autocast out. The mode sees these operators too.
    """
    if func.name() not in FUSED:
        return func(*args, **kwargs)
    device = next(value.device.type for value in args if isinstance(value, Tensor))
    name = {"cpu": "CPU", "cuda": "CUDA"}.get(device, "PrivateUse1")  # torch takes the fast path on no other device
    with _as_entered(), mode:
        return func.redispatch(DispatchKeySet(getattr(DispatchKey, name)), *args, **kwargs)


@contextlib.contextmanager
def _as_entered() -> Iterator[None]:
    """Restores autocast's state of the operator's call inside a context."""
    with torch.overrides.enable_reentrant_dispatch():
        entered = excluded_keys()
    excluded = excluded_keys()
    for name in _AUTOCAST:
        key = getattr(DispatchKey, name)
        if not entered.has(key):
            excluded = excluded.remove(key)
    with ForceDispatchKeyGuard(included_keys(), excluded):
        yield


@contextlib.contextmanager
def layer_by_layer() -> Iterator[None]:
    """Disables the fast path of attention and encoder layers: linear layers are called, attention is an operator."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextlib.contextmanager
def unfused(storage: str = "float32") -> Iterator[None]:
    """Makes a context for the oracle and its samples: no fast path, attention by its definition, limits of `storage`.

    A program that asks FP64 for its limits, such as the smallest number for a mask or an eps, would be another function.
    Without an eps, RMS norm takes that of its dtype, or of FP32 in half precision.
    """
    norm, limits = torch.rms_norm, torch.finfo  # the former is what `torch.nn.functional` calls

    class StoredLimits:  # a class, since annotations in modules that are imported now may name it
        def __new__(cls, dtype: torch.dtype | None = None) -> torch.finfo:  # type: ignore[misc]  # as torch's own gives
            asked = torch.get_default_dtype() if dtype is None else dtype
            return limits(getattr(torch, storage) if asked in {torch.float64, torch.complex128} else asked)

    with sdpa_kernel(SDPBackend.MATH), layer_by_layer():
        try:
            # Torch's stubs have it as a constant.
            setattr(torch, "rms_norm", _with_eps(norm, limits(torch.float32).eps))  # noqa: B010
            setattr(torch, "finfo", StoredLimits)  # noqa: B010
            yield
        finally:
            setattr(torch, "rms_norm", norm)  # noqa: B010
            setattr(torch, "finfo", limits)  # noqa: B010


def _with_eps(original: Callable[..., Tensor], default: float) -> Callable[..., Tensor]:
    def rms_norm(
        input: Tensor,  # noqa: A002 - torch's own name
        shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        return original(input, shape, weight, default if eps is None else eps)

    return rms_norm
