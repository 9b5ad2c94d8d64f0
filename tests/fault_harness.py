"""Plants faults, and correct variants, in the suite's own workloads, and has the engine judge them. No test by itself."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from technique_harness import StubDevice
from torch.utils._python_dispatch import TorchDispatchMode

from accelcheck.capability import SUPPORTED
from accelcheck.case import Case, Evidence, Mode, Verdict
from accelcheck.devices.base import Status
from accelcheck.matrix import DTYPES, Matrix
from accelcheck.qualify.execute import Bench
from accelcheck.qualify.ledger import Ledger
from accelcheck.registry import discover
from accelcheck.techniques.base import Technique

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from accelcheck.devices.base import Device
    from accelcheck.journal import Record
    from accelcheck.techniques.observe import Log
    from accelcheck.verify.oracle import Store
    from accelcheck.workloads.base import Program, Result, Workload

    Change = Callable[[Program], None]
    Product = Callable[[Tensor, Tensor], Tensor]

FORWARD, BACKWARD, TRAIN = Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN


class Bed(StubDevice):
    """The CPU, in every dtype, without probing its matmul for each case."""

    name = "cpu"
    dtypes = frozenset(DTYPES)

    def __init__(self, kind: str = "cpu") -> None:
        super().__init__(kind, error=lambda: 0.0)


class Planted(Technique):
    """Changes the program as a faulty, or another correct, implementation would."""

    name = "planted"
    family = "planted"
    promise = "None."
    source = "https://example.invalid"
    dtypes = DTYPES

    def __init__(self, change: Change, *, warmups: int = 0, keeps_strides: bool = False) -> None:
        self.change = change
        self.warmups = warmups
        self.keeps_strides = keeps_strides

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode, device
        self.change(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del program, log, mode, device
        yield Evidence("the program was changed", 1, engaged=True)


@functools.cache
def built_in() -> Mapping[str, Workload]:
    """The suite's workloads by name."""
    return {thing.name: cast("Workload", thing) for thing in discover("accelcheck.workloads", "WORKLOADS")}


def seeded(name: str, number: int = 0) -> Workload:
    """A built-in workload; with a number other than 0 under another name, and so from another seed."""
    workload = built_in()[name]
    return replace(workload, name=f"{name}+{number}") if number else workload


def bench(store: Store, technique: Technique, workload: Workload, device: Device | None = None) -> Bench:
    """A bench of one technique and one workload, on the CPU if nothing else is said."""
    place = Bed() if device is None else device
    return Bench(
        matrix=Matrix({technique.name: technique}, {workload.name: workload}),
        devices={place.name: place},
        statuses={place.name: Status(place.name, SUPPORTED)},
        store=store,
        ledger=Ledger(),
    )


def case(workload: Workload, mode: Mode = FORWARD, dtype: str = "float32", technique: str = "planted") -> Case:
    """The case of a workload."""
    return Case(technique, workload.name, "cpu", dtype, mode, 1)


def verdict_of(
    store: Store, technique: Technique, workload: Workload, mode: Mode = FORWARD, dtype: str = "float32"
) -> Record:
    """The engine's record of a technique on a workload."""
    return bench(store, technique, workload).run(case(workload, mode, dtype, technique.name))


def faults(record: Record) -> dict[str, set[str]]:
    """What was wrong, by path: the views that caught it, without their place, or the kind of fault."""
    found: dict[str, set[str]] = {}
    if record.verdict is Verdict.FAIL:
        for line in record.reason.splitlines():
            path, what, *_ = line.split(": ")
            found.setdefault(path, set()).add(what.partition(" at ")[0].partition(", first")[0])
    return found


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch uses one thread: operators are tiny, and threads of several workers would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def nothing(program: Program) -> None:
    """Leave the program as it is."""
    del program


def calling(function: Callable[..., Any]) -> Change:
    """``function(module, *inputs)`` in place of ``module(*inputs)``; differentiable, so gradients follow."""

    def change(program: Program) -> None:
        program.call = functools.partial(function, program.module)

    return change


def replacing(**changes: Callable[[Tensor], Tensor]) -> Change:
    """Of the result, each tensor whose path begins with a word (``out``, ``grad``) goes through a function."""

    def edit(result: Result) -> None:
        for path, tensor in result.items():
            for start, function in changes.items():
                if path.startswith(start):
                    result[path] = function(tensor)

    return editing(edit)


def editing(edit: Callable[[Result], None]) -> Change:
    """The result, after each run, as `edit` leaves it."""

    def change(program: Program) -> None:
        plain = program.run

        def run(mode: Mode) -> Result:
            result = plain(mode)
            edit(result)
            return result

        program.run = run  # type: ignore[method-assign]  # on this instance alone

    return change


def within(dispatch: Callable[[], TorchDispatchMode]) -> Change:
    """The whole run, backward pass included, under a dispatch mode: faults below autograd, as kernels have them."""

    def change(program: Program) -> None:
        plain = program.run

        def run(mode: Mode) -> Result:
            with dispatch():
                return plain(mode)

        program.run = run  # type: ignore[method-assign]  # on this instance alone

    return change


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates the mode only in part
    """Calls ``kernel(func, *args, **kwargs)`` for the operators it has one for."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.kernels = kernels

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition(".")[0].removeprefix("aten::")
        kernel = self.kernels.get(name)
        return func(*args, **(kwargs or {})) if kernel is None else kernel(func, *args, **(kwargs or {}))


def kernels(**by_name: Callable[..., Any]) -> Change:
    """Other kernels, by operator."""
    return within(lambda: Kernels(by_name))


def products(product: Product) -> Change:
    """Another kernel under every matrix product: ``(..., M, K) @ (..., K, N)``, forward and backward."""

    def mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
        del func
        return product(a, b).to(a.dtype)

    def addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        del func
        # A correct kernel adds the bias in its accumulator: once, before the result is rounded to the storage dtype.
        return (product(a, b).to(accumulator(a)) + bias.to(accumulator(a))).to(a.dtype)

    return kernels(mm=mm, bmm=mm, addmm=addmm)


def accumulator(tensor: Tensor) -> torch.dtype:
    """What correct kernels add in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def rounded_to(bits: int, tensor: Tensor) -> Tensor:
    """FP32 to the nearest number of `bits` significant bits, ties to even; gradients do not pass."""
    drop = 24 - bits
    raw = tensor.contiguous().view(torch.int32)
    even = (raw >> drop) & 1
    return ((raw + (1 << (drop - 1)) - 1 + even) >> drop << drop).view(torch.float32)


def truncated_to(bits: int, tensor: Tensor) -> Tensor:
    """FP32 towards zero to `bits` significant bits."""
    drop = 24 - bits
    return (tensor.contiguous().view(torch.int32) >> drop << drop).view(torch.float32)
