"""Logs of a run: every operator that is dispatched, or the events that torch.profiler records of compiled code."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType


CONTRACTION = (
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|convolution|convolution_overrideable|_cudnn_rnn|mkldnn_rnn_layer"
    r"|_scaled_dot_product_(flash|efficient|cudnn)_attention|_scaled_dot_product_flash_attention_for_cpu)"
)
"""Pattern of the names of contractions (matrix products, convolutions, attention), without backward operators."""


class Log(Protocol):
    """A context manager that records what a run executes. Instances are made with a `torch.device` type, such as ``cuda``."""

    def __init__(self, device_type: str) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def count(self, pattern: str) -> int:
        """Number of operators or events whose whole name matches the regular expression `pattern`."""
        ...

    def names(self) -> Counter[str]:
        """Number of operators or events by name."""
        ...


@dataclass(frozen=True, slots=True)
class Operator:
    """One dispatched operator, with metadata of its tensors."""

    name: str
    """Such as ``aten::mm``, without the overload."""
    inputs: tuple[tuple[torch.dtype, bool, str], ...]
    """For each tensor argument: dtype, whether it is contiguous, device type."""
    outputs: tuple[tuple[torch.dtype, bool, str], ...]
    """The same for each tensor of the result."""
    formats_in: tuple[str, ...] = ()
    """`memory_format` of each tensor argument."""
    formats_out: tuple[str, ...] = ()
    """`memory_format` of each tensor of the result."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether a tensor argument has this dtype."""
        return any(seen == dtype for seen, _, _ in self.inputs)


class OperatorLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Logs every operator that reaches the backend. This is below autograd and autocast, so dtypes are those really used.

    Operators inside compiled code are not dispatched, and so not logged: use `ProfilerLog` for these.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.device_type = device_type
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]  # "aten::add.Tensor" and "aten::mm" both lose their overload
        seen_in = (*args, *(kwargs or {}).values())
        self.operators.append(Operator(name, _facts(seen_in), _facts((out,)), _formats(seen_in), _formats((out,))))
        return out

    def count(self, pattern: str) -> int:
        return sum(1 for operator in self.operators if re.fullmatch(pattern, operator.name))

    def names(self) -> Counter[str]:
        return Counter(operator.name for operator in self.operators)

    def having(self, test: Callable[[Operator], bool]) -> int:
        """Number of operators that pass a test."""
        return sum(1 for operator in self.operators if test(operator))

    def strays(self) -> Counter[str]:
        """Operators, by name, that took a tensor of the device under test and computed a floating-point one elsewhere.

        Meta tensors, which jagged tensors contain, have no data and do not count.
        """
        allowed = {self.device_type, "meta"}
        return Counter(
            operator.name
            for operator in self.operators
            if any(device not in allowed and dtype.is_floating_point for dtype, _, device in operator.outputs)
            and any(device == self.device_type for _, _, device in operator.inputs)
        )


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Context in which no `OperatorLog` records anything: for copies to the host that are written to a file."""
    with _disable_current_modes():
        yield


class ProfilerLog:
    """Events that torch.profiler records: compiled regions entered, operators, and device kernels launched, by name."""

    def __init__(self, device_type: str) -> None:
        activities = [ProfilerActivity.CPU]
        if device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._names: Counter[str] | None = None

    def __enter__(self) -> Self:
        self._profile.__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # untyped in torch

    def count(self, pattern: str) -> int:
        return sum(number for name, number in self.names().items() if re.fullmatch(pattern, name))

    def names(self) -> Counter[str]:
        if self._names is None:
            # Not by `key_averages`: it makes a Python object of each event and a tree of them all, which takes ten times as
            # long as a whole training of 50,000 events, and only the names are wanted.
            found = self._profile.profiler and self._profile.profiler.kineto_results
            events = found.events() if found else ()
            self._names = Counter(event.name() for event in events)
        return self._names


def operators(log: Log) -> OperatorLog:
    """The log, checked to be an `OperatorLog`.

    Raises:
        TypeError: It is of another class: the technique's `watch` does not fit its `evidence`.
    """
    if not isinstance(log, OperatorLog):
        raise TypeError(
            f"expected an OperatorLog, got {type(log).__name__}: set `watch = OperatorLog` in the technique"
        )
    return log


def memory_format(tensor: Tensor) -> str:
    """``channels_last``, ``contiguous``, ``both`` (equal where sizes are 1), or ``strided`` for neither."""
    dense = tensor.is_contiguous()
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "both" if dense else "channels_last"
    return "contiguous" if dense else "strided"


def _formats(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(memory_format(tensor) for tensor in _tensors(values))


def _facts(values: Iterable[Any]) -> tuple[tuple[torch.dtype, bool, str], ...]:
    return tuple((tensor.dtype, tensor.is_contiguous(), tensor.device.type) for tensor in _tensors(values))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
