"""One dispatched call of an operator: its tensors, a copy of it, and the same call in FP64 on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelcheck.devices.torch_names import disable_current_modes

UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Operators whose result has no values yet."""
SAME_ON_THE_CPU = {
    "convolution_overrideable": "convolution",
    "convolution_backward_overrideable": "convolution_backward",
}
"""Names of other backends' operators, with the CPU's operator in their place."""
_TRAINING = 5
"""Position of batch norm's argument ``training``; the running statistics are the arguments 3 and 4."""


@dataclass(frozen=True)
class OperatorCall:
    """One call of an overload with its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name without namespace and overload, such as ``mm``."""
        name: str = self.func.name()
        return name.partition(".")[0].rpartition("::")[2]

    def run(self) -> Any:
        """Call the operator."""
        return self.func(*self.args, **self.kwargs)

    def each(self, change: Callable[[Any], Any]) -> OperatorCall:
        """Apply `change` to each argument, and to each item of lists; the call with the results."""
        kwargs = {name: mapped(value, change) for name, value in self.kwargs.items()}
        return OperatorCall(self.func, mapped(self.args, change), kwargs)

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return found((self.args, *self.kwargs.values()))

    def named(self) -> dict[str, Any]:
        """Map the names of the operator's schema to the arguments, defaults included."""
        arguments = self.func._schema.arguments  # noqa: SLF001 - no public schema
        given = dict(zip((argument.name for argument in arguments), self.args, strict=False))
        return {a.name: self.kwargs.get(a.name, a.default_value) for a in arguments} | given

    def written(self) -> list[tuple[str, Tensor]]:
        """List the tensors that the operator writes to, with the names of the arguments."""
        given, listed = self.named(), list[tuple[str, Tensor]]()
        for argument in self.func._schema.arguments:  # noqa: SLF001 - as above
            if argument.alias_info is not None and argument.alias_info.is_write:
                name, held = argument.name, found((given[argument.name],))
                many = isinstance(given[name], (list, tuple))
                listed += [(f"{name}[{i}]" if many else name, tensor) for i, tensor in enumerate(held)]
        if self.name in {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"} and self.args[_TRAINING]:
            # Their schemas do not say so.
            listed += [(f"running[{i}]", x) for i, x in enumerate(self.args[3:5]) if isinstance(x, Tensor)]
        return listed

    def results(self, out: Any) -> dict[str, Tensor]:
        """Map places to the tensors that the operator wrote to or returned."""
        made = dict(self.written())
        seen = {id(part) for part in made.values()}
        many = isinstance(out, (tuple, list))
        for place, part in enumerate(out if many else (out,)):
            for tensor in found((part,)):
                if id(tensor) not in seen:
                    made[f"out[{place}]" if many else "out"] = tensor
        return made

    def kept(self) -> OperatorCall:
        """Copy the call and its tensors, with their devices and strides; for later, or for an operator that writes."""
        return self.each(lambda value: copied(value.detach()) if isinstance(value, Tensor) else value)

    def on_host(self) -> OperatorCall:
        """A copy on the CPU."""
        return self.each(_hosted)

    def widened(self) -> OperatorCall:
        """The same call in FP64 on the CPU, from the same values."""
        func = self.func
        if self.name in SAME_ON_THE_CPU:
            func = getattr(torch.ops.aten, SAME_ON_THE_CPU[self.name]).default
        wide = self.each(widened)
        kwargs = {name: value for name, value in wide.kwargs.items() if name != "pin_memory"}
        return OperatorCall(func, wide.args, kwargs)

    def not_computed(self) -> str:
        """Reason why the operator is not computed again, in a few words; empty where it is."""
        if self.func.is_view:
            return "a view"
        if self.name in UNINITIALISED:
            return "has no values yet"
        if torch.Tag.nondeterministic_seeded in self.func.tags and self.named().get("dropout_p", 1.0) != 0.0:
            return "draws random numbers"
        return ""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Compute in FP64: below every active mode, without gradients, with FP64 as the default dtype."""
    before = torch.get_default_dtype()
    with disable_current_modes(), torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def copied(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides and its storage offset."""
    if tensor.layout is not torch.strided or (tensor.is_contiguous() and not tensor.storage_offset()):
        return tensor.clone()
    return memory(tensor).clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def memory(tensor: Tensor) -> Tensor:
    """All elements of the storage behind a tensor, 1-D."""
    size = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
    return tensor.as_strided((size,), (1,), 0)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a value, or to each one in nested lists and tuples."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(mapped(item, change) for item in value)
    return change(value)


def found(values: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples, in order."""
    listed: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            listed.append(value)
        elif isinstance(value, (list, tuple)):
            listed += found(value)
    return listed


def _hosted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return copied(value.detach()).cpu() if value.device.type == "cpu" else value.detach().cpu()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def widened(value: Any) -> Any:
    """Convert an argument for FP64 on the CPU: floating-point tensors and dtypes become FP64, devices the CPU."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        return host.to(torch.float64) if host.is_floating_point() else host.clone()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(value, torch.device) else value
