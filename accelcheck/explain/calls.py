"""One call of an operator, as it was dispatched: its tensors, a copy of it, and the same call in FP64 on the CPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.devices.torch_names import disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Operators whose result has no values yet."""
SAME_ON_THE_CPU = {
    "convolution_overrideable": "convolution",
    "convolution_backward_overrideable": "convolution_backward",
}
"""Operators of other backends, by the one that the CPU has in their place."""
_TRAINING = 5
"""Position of the argument of batch norm that says whether it updates the running statistics, which are the two before the last but one."""


@dataclass(frozen=True)
class OperatorCall:
    """One call.

    Attributes:
        func: The overload that was dispatched.
        args, kwargs: Its arguments.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Without namespace and overload, such as ``mm``."""
        name: str = self.func.name()
        return name.partition(".")[0].rpartition("::")[2]

    def run(self) -> Any:
        """Call the operator."""
        return self.func(*self.args, **self.kwargs)

    def each(self, change: Callable[[Any], Any]) -> OperatorCall:
        """The call with other arguments: `change` of each one, and of those in lists."""
        return OperatorCall(
            self.func, mapped(self.args, change), {name: mapped(one, change) for name, one in self.kwargs.items()}
        )

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return found((self.args, *self.kwargs.values()))

    def named(self) -> dict[str, Any]:
        """The arguments by the names of the operator's schema, defaults included."""
        given = {}
        for position, argument in enumerate(self.func._schema.arguments):  # noqa: SLF001 - OpOverload has no public schema
            if position < len(self.args):
                given[argument.name] = self.args[position]
            else:
                given[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return given

    def written(self) -> list[tuple[str, Tensor]]:
        """The tensors that the operator writes to, with the names of the arguments."""
        given, listed = self.named(), list[tuple[str, Tensor]]()
        for argument in self.func._schema.arguments:  # noqa: SLF001 - as above
            if argument.alias_info is not None and argument.alias_info.is_write:
                held = found((given[argument.name],))
                many = isinstance(given[argument.name], (list, tuple))
                listed += [(f"{argument.name}[{i}]" if many else argument.name, one) for i, one in enumerate(held)]
        if self.name in {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"} and self.args[_TRAINING]:
            # Their schemas do not say so.
            listed += [(f"running[{i}]", one) for i, one in enumerate(self.args[3:5]) if isinstance(one, Tensor)]
        return listed

    def results(self, out: Any) -> dict[str, Tensor]:
        """All tensors that the operator made, by their place: what it wrote to, and what it returned."""
        written = self.written()
        seen = {id(one) for _, one in written}
        made = dict(written)
        returned = out if isinstance(out, (tuple, list)) else (out,)
        for place, one in enumerate(returned):
            for tensor in found((one,)):
                if id(tensor) not in seen:
                    made[f"out[{place}]" if isinstance(out, (tuple, list)) else "out"] = tensor
        return made

    def kept(self) -> OperatorCall:
        """A copy with tensors of its own, on their devices and in their strides: for an operator that writes to its arguments, or for later."""
        return self.each(lambda one: copied(one.detach()) if isinstance(one, Tensor) else one)

    def on_host(self) -> OperatorCall:
        """A copy on the CPU."""
        return self.each(_hosted)

    def widened(self) -> OperatorCall:
        """The same call in FP64 on the CPU, from the very values that it was given."""
        func = self.func
        if self.name in SAME_ON_THE_CPU:
            func = getattr(torch.ops.aten, SAME_ON_THE_CPU[self.name]).default
        wide = self.each(widened)
        return OperatorCall(func, wide.args, {name: one for name, one in wide.kwargs.items() if name != "pin_memory"})

    def not_computed(self) -> str:
        """Why the operator is not computed again, in a few words; empty where it is."""
        if self.func.is_view:
            return "a view"
        if self.name in UNINITIALISED:
            return "has no values yet"
        if torch.Tag.nondeterministic_seeded in self.func.tags and self.named().get("dropout_p", 1.0) != 0.0:
            return "draws random numbers"
        return ""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Context for computing in FP64: below every mode that is active, without gradients, with FP64 as the default dtype."""
    before = torch.get_default_dtype()
    with disable_current_modes(), torch.no_grad():
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, and the same distance to the beginning of its memory."""
    if tensor.layout is not torch.strided or (tensor.is_contiguous() and not tensor.storage_offset()):
        return tensor.clone()
    return memory(tensor).clone().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def memory(tensor: Tensor) -> Tensor:
    """All elements of the storage behind a tensor, 1-D."""
    size = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
    return tensor.as_strided((size,), (1,), 0)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of a value, or of each one in nested lists and tuples."""
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(mapped(one, change) for one in value)
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
    """An argument for the same work in FP64 on the CPU: a tensor there, in FP64 where it is floating-point; a floating-point dtype, or a device, as that."""
    if isinstance(value, Tensor):
        host = value.detach().cpu()
        return host.to(torch.float64) if host.is_floating_point() else host.clone()
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    return torch.device("cpu") if isinstance(value, torch.device) else value
