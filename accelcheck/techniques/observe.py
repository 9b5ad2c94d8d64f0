"""Logs of a run, of dispatched operators or of torch.profiler's events in compiled code, and evidence from counts."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.profiler import profile

from accelcheck.core.case import Evidence
from accelcheck.devices.layouts import contiguous, sparse
from accelcheck.devices.torch_names import DeviceType, TorchDispatchMode, disable_current_modes
from accelcheck.measure.kernels import activities
from accelcheck.workloads.dispatch import called

CONTRACTION = (
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|convolution|convolution_overrideable|_cudnn_rnn|mkldnn_rnn_layer"
    r"|_scaled_dot_product_(flash|efficient|cudnn)_attention|_scaled_dot_product_flash_attention_for_cpu)"
)
"""Pattern of the names of contractions (matrix products, convolutions, attention), without backward operators."""

_HIDDEN = frozenset(
    """profiler::_record_function_enter profiler::_record_function_enter_new profiler::_record_function_exit
    aten::is_leaf aten::output_nr aten::_version""".split()
)
"""Events that torch's own tables leave out."""


class Log(AbstractContextManager["Log"], Protocol):
    """Context manager that records the operators or events of a run. Takes a `torch.device` type, such as ``cuda``."""

    def __init__(self, device_type: str) -> None: ...

    def count(self, pattern: str) -> int:
        """Counts the operators or events whose whole name matches the regular expression `pattern`."""
        ...

    def names(self) -> Counter[str]:
        """Counts operators or events by name."""
        ...


@dataclass(frozen=True, slots=True)
class Operator:
    """Dispatched operator: its name without the overload, such as ``aten::mm``, and metadata of its tensors.

    `inputs` and `outputs` have dtype, contiguity and device type of each tensor argument and of each tensor of the
    result; `formats_in` and `formats_out` have the `memory_format` of each.
    """

    name: str
    inputs: tuple[tuple[torch.dtype, bool, str], ...]
    outputs: tuple[tuple[torch.dtype, bool, str], ...]
    formats_in: tuple[str, ...] = ()
    formats_out: tuple[str, ...] = ()

    def takes(self, dtype: torch.dtype) -> bool:
        """Returns whether a tensor argument has this dtype."""
        return any(seen == dtype for seen, _, _ in self.inputs)


class OperatorLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Logs every operator that reaches the backend, below autograd and autocast: with the dtypes really used.

    Operators inside compiled code are not dispatched, and so not logged: use `ProfilerLog` for these.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.device_type = device_type
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = called(self, func, args, kwargs or {})
        name = func.name().partition(".")[0]  # "aten::add.Tensor" and "aten::mm" both lose their overload
        seen_in = (*args, *(kwargs or {}).values())
        self.operators.append(Operator(name, _facts(seen_in), _facts((out,)), _formats(seen_in), _formats((out,))))
        return out

    def count(self, pattern: str) -> int:
        return sum(1 for operator in self.operators if re.fullmatch(pattern, operator.name))

    def names(self) -> Counter[str]:
        return Counter(operator.name for operator in self.operators)

    def having(self, test: Callable[[Operator], bool]) -> int:
        """Counts the operators that pass a test."""
        return sum(1 for operator in self.operators if test(operator))

    def strays(self) -> Counter[str]:
        """Counts operators, by name, that took a tensor of the device under test and computed a float elsewhere.

        Meta tensors, which jagged tensors contain, have no data and do not count.
        """
        allowed = {self.device_type, "meta"}
        return Counter(
            operator.name
            for operator in self.operators
            if any(device not in allowed and dtype.is_floating_point for dtype, _, device in operator.outputs)
            and any(device == self.device_type for _, _, device in operator.inputs)
        )


unwatched = disable_current_modes
"""Context that hides operators from every `OperatorLog`: for copies to the host that go to a file."""


class ProfilerLog:
    """Log of torch.profiler's events by name: compiled regions entered, operators, and device kernels launched."""

    def __init__(self, device_type: str) -> None:
        self._profile = profile(activities=activities(device_type))
        self._names: Counter[str] | None = None

    def __enter__(self) -> Self:
        self._profile.__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch

    def count(self, pattern: str) -> int:
        return sum(number for name, number in self.names().items() if re.fullmatch(pattern, name))

    def names(self) -> Counter[str]:
        if self._names is None:
            # Not `key_averages`, which makes Python objects of all events first: 8 s for a training of 60,000.
            results = self._profile.profiler and self._profile.profiler.kineto_results
            self._names = _called(results.events() if results else ())
        return self._names


def _called(events: Iterable[Any]) -> Counter[str]:
    """Counts the profiler's events by name; an overload that only calls another of its name counts once.

    Ranges count where the host entered them, not where the device shows them over its kernels, as in torch's tables
    (``is_user_annotation`` in torch/autograd/profiler_util.py).
    """
    names: Counter[str] = Counter()
    threads: dict[int, list[tuple[int, int, str]]] = {}
    for event in events:
        name = event.name()
        on_host = event.device_type() == DeviceType.CPU
        if name in _HIDDEN or event.is_hidden_event() or (event.is_user_annotation() and not on_host):
            continue
        names[name] += 1
        same_thread = event.start_thread_id() == event.end_thread_id()
        if on_host and not event.is_async() and same_thread:
            threads.setdefault(event.start_thread_id(), []).append((event.start_ns(), -event.end_ns(), name))
    for spans in threads.values():
        open_: list[tuple[int, str, list[str]]] = []  # end, name and children of the events that a span may lie in
        closed: list[tuple[str, list[str]]] = []
        for start, minus_end, name in sorted(spans, key=itemgetter(0, 1)):
            while open_ and (start >= open_[-1][0] or -minus_end > open_[-1][0]):
                closed.append(open_.pop()[1:])
            if open_:
                open_[-1][2].append(name)
            open_.append((-minus_end, name, []))
        for name, children in [*closed, *(rest[1:] for rest in open_)]:
            if children == [name]:
                names[name] -= 1
    return names


def at_least(claim: str, count: int, least: int = 1) -> Evidence:
    """Makes evidence that a count is large enough: ``claim >= least``."""
    return Evidence(f"{claim} >= {least}", count, engaged=count >= least)


def exactly(claim: str, count: int, wanted: int) -> Evidence:
    """Makes evidence that a count is right: ``claim = wanted``."""
    return Evidence(f"{claim} = {wanted}", count, engaged=count == wanted)


def none_of(claim: str, names: Iterable[str]) -> Evidence:
    """Makes evidence that there are no names of a kind, ``claim = 0``; lists them otherwise."""
    listed = list(names)
    return Evidence(f"{claim} = 0", ", ".join(listed) or 0, engaged=not listed)


def counted(counts: Mapping[str, int]) -> list[str]:
    """Lists names with their counts, ``name x2``, sorted."""
    return [f"{name} x{count}" for name, count in sorted(counts.items())]


def operators(log: Log) -> OperatorLog:
    """Returns the log, and raises `TypeError` if it is no `OperatorLog`: `watch` does not fit `evidence`."""
    if not isinstance(log, OperatorLog):
        message = f"expected an OperatorLog, got {type(log).__name__}: set `watch = OperatorLog` in the technique"
        raise TypeError(message)
    return log


def memory_format(tensor: Tensor) -> str:
    """Returns ``channels_last``, ``contiguous``, ``both`` where sizes are 1, ``strided``, or a sparse layout.

    A dense tensor without four dimensions has no format: the text is empty.
    """
    if sparse(tensor):
        return str(tensor.layout).removeprefix("torch.")
    if tensor.dim() != 4:
        return ""
    dense = tensor.is_contiguous()
    if tensor.is_contiguous(memory_format=torch.channels_last):
        return "both" if dense else "channels_last"
    return "contiguous" if dense else "strided"


def _formats(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(memory_format(tensor) for tensor in _tensors(values))


def _facts(values: Iterable[Any]) -> tuple[tuple[torch.dtype, bool, str], ...]:
    return tuple((tensor.dtype, contiguous(tensor), tensor.device.type) for tensor in _tensors(values))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
