"""Graphs that users capture, up to the hardware: a graph of the CPU that records operators and calls them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from fault_harness import Bed, bench, built_in, case
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.devices.cpu import Cpu
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.staleness import FAULTS
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation import graphed
from accelcheck.verify.oracle import Store

BY_NAME = {technique.name: technique for technique in graphed.TECHNIQUES}


class Recorded(TorchDispatchMode):
    """Operators with the tensors that they took and wrote; a replay writes to the same tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        with torch.profiler.record_function("cudaGraphLaunch"), torch.no_grad():
            for func, args, kwargs, out in self.calls:
                again = func(*args, **kwargs)
                pairs = zip(out, again, strict=True) if isinstance(out, (tuple, list)) else [(out, again)]
                for held, now in pairs:
                    if isinstance(held, Tensor) and held.data_ptr() != now.data_ptr():
                        held.copy_(now)


class Graph:
    """Stands for torch.accelerator.Graph."""

    def __init__(self) -> None:
        self.recorded: Any = Recorded()
        self.replay = self.recorded.replay

    def __enter__(self) -> Self:
        self.recorded.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.recorded.__exit__(*error)


def callables(module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    """Stands for torch.cuda.make_graphed_callables, for modules with one output."""
    parameters = tuple(module.parameters())
    inputs = tuple(value for value in (*samples, *parameters) if value.requires_grad)
    with torch.enable_grad(), Graph() as forward:
        out: Tensor = module(*samples)
    cotangent = torch.zeros_like(out)
    with Graph() as backward:
        grads = torch.autograd.grad(out, inputs, cotangent, retain_graph=True)
    by_place = dict(zip(map(id, inputs), grads, strict=True))

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> Tensor:
            for held, now in zip(samples, given, strict=False):
                held.detach().copy_(now)
            forward.replay()
            return out.detach()

        @staticmethod
        def backward(ctx: Any, *grad: Tensor) -> Any:
            cotangent.copy_(grad[0])
            backward.replay()
            return tuple(by_place.get(id(value)) for value in (*samples, *parameters))

    apply: Any = Graphed.apply
    return lambda *given: apply(*given, *parameters)


class Gpu(Bed):
    """The CPU, which declares graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.features = frozenset({"strided", "cuda-graphs"})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the CPU graphs."""
    monkeypatch.setattr(torch.accelerator, "Graph", Graph, raising=False)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", callables)
    monkeypatch.setattr(torch, "Stream", contextlib.nullcontext)


def judged(store: Store, technique: Technique, workload: str, mode: Mode) -> Record:
    made = bench(store, technique, built_in()[workload], device=Gpu())
    return made.run(case(built_in()[workload], mode, "float32", technique.name))


@pytest.mark.parametrize("name", BY_NAME)
def test_the_cpu_has_no_graphs_and_says_so(name: str) -> None:
    answer = BY_NAME[name].answer(Cpu())
    assert (answer.ok, answer.code) == (False, Code.NO_FEATURE)
    assert "cpu does not declare cuda-graphs" in answer.reason


def test_a_torch_without_graphs_of_accelerators_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.accelerator, "Graph", raising=False)
    answer = BY_NAME["accelerator-graph"].answer(Gpu())
    assert answer.code is Code.WRONG_VERSION
    assert "torch.accelerator.Graph" in answer.reason


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "workload", "mode"),
    [
        ("accelerator-graph", "mlp", Mode.FORWARD),
        ("accelerator-graph", "transformer-block", Mode.FORWARD),
        ("graphed-callables", "mlp", Mode.FORWARD),
        ("graphed-callables", "mlp-blocks", Mode.BACKWARD),
        ("graphed-callables", "elementwise-5", Mode.BACKWARD),
        ("graphed-callables", "train-mlp", Mode.TRAIN),
    ],
)
def test_a_device_with_graphs_passes(name: str, workload: str, mode: Mode, gpu: None, fresh: Store) -> None:
    record = judged(fresh, BY_NAME[name], workload, mode)
    assert record.verdict is Verdict.PASS, f"{record.why}\n{record.traceback}"


def test_a_call_that_replays_nothing_fails(gpu: None, fresh: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, _: module)
    record = judged(fresh, BY_NAME["graphed-callables"], "mlp", Mode.FORWARD)
    assert record.verdict is Verdict.FAIL
    assert "graphs replayed" in str(record.why)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.technique in BY_NAME], ids=lambda fault: fault.name
)
def test_its_faults_are_caught_on_such_a_device(fault: Any, gpu: None, fresh: Store) -> None:
    for cell in fault.cells:
        technique = Planted(BY_NAME[fault.technique], fault.plant(1.0))
        record = judged(fresh, technique, cell.workload, cell.mode)
        assert record.verdict is Verdict.FAIL, record.why
