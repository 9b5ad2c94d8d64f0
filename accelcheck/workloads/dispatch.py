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
    Without an eps, RMS norm takes that of its dtype, or of FP32 in half precision. Grouped products have no FP64 kernel.
    """
    limits = torch.finfo

    class StoredLimits:  # a class, since annotations in modules that are imported now may name it
        def __new__(cls, dtype: torch.dtype | None = None) -> torch.finfo:  # type: ignore[misc]  # as torch's own gives
            asked = torch.get_default_dtype() if dtype is None else dtype
            return limits(getattr(torch, storage) if asked in {torch.float64, torch.complex128} else asked)

    others = {
        (torch, "rms_norm"): _with_eps(torch.rms_norm, limits(torch.float32).eps),  # `torch.nn.functional` calls it
        (torch, "finfo"): StoredLimits,
        **{(owner, name): grouped_mm for owner, name in _GROUPED if hasattr(owner, name)},
    }
    with sdpa_kernel(SDPBackend.MATH), layer_by_layer(), contextlib.ExitStack() as kept:
        for (owner, name), other in others.items():
            kept.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        yield


_GROUPED = ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes `torch.nn.functional.grouped_mm` by a product for each group; zeros are outside of all.

    Groups, which end at `offs`, are rows of a matrix `mat_a`, columns of a matrix `mat_b`, or both sides' inner parts.
    """
    ends: list[int] = [] if offs is None else offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if offs is None:
        out = mat_a @ mat_b
    elif mat_a.dim() == mat_b.dim():
        out = torch.stack([mat_a[:, group] @ mat_b[group] for group in groups])
    elif mat_b.dim() == 3:
        parts = [mat_a[group] @ b for group, b in zip(groups, mat_b, strict=True)]
        out = torch.cat([*parts, mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])])
    else:
        parts = [a @ mat_b[:, group] for a, group in zip(mat_a, groups, strict=True)]
        out = torch.cat([*parts, mat_b.new_zeros(mat_a.shape[1], mat_b.shape[1] - ends[-1])], -1)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


def _with_eps(original: Callable[..., Tensor], default: float) -> Callable[..., Tensor]:
    def rms_norm(
        input: Tensor,  # noqa: A002 - torch's own name
        shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        return original(input, shape, weight, default if eps is None else eps)

    return rms_norm
