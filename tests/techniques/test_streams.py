"""A simulation of GPU streams on the CPU: work that is queued behind a delay runs only when something waits for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fault_harness import failed, passed, seeded
from technique_harness import StubDevice, agrees, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelcheck.core.capability import SUPPORTED, Code
from accelcheck.core.case import Mode
from accelcheck.selftest.faults.asynchrony import FAULTS, Unordered, unordered
from accelcheck.selftest.faults.base import Planted
from accelcheck.techniques.interop import streams
from accelcheck.techniques.interop.streams import GIVE, TECHNIQUES
from accelcheck.verify.oracle import Store

(TECHNIQUE,) = TECHNIQUES


class Stream:
    """A queue: its work runs immediately, or, behind a delay, when something waits for it."""

    made = 0

    def __init__(self, *, non_blocking: bool = False) -> None:
        self.non_blocking = non_blocking
        Stream.made += 1
        self.ptr = self.cuda_stream = Stream.made
        self.pending: list[Callable[[], Any]] = []

    def put(self, work: Callable[[], Any]) -> None:
        if self.pending:
            self.pending.append(work)
        else:
            work()

    def wait_stream(self, other: Stream) -> None:
        if self is current["torch"][0]:  # its work is not queued, so what it waits for must run now
            other.synchronize()
        elif other.pending:
            self.pending.append(other.synchronize)

    def synchronize(self) -> None:
        waiting, self.pending = self.pending, []
        for work in waiting:
            work()

    def query(self) -> bool:
        return not self.pending

    def __enter__(self) -> None:
        current["cupy"].append(self)

    def __exit__(self, *error: object) -> None:
        current["cupy"].pop()


current: dict[str, list[Stream]] = {"torch": [Stream()], "cupy": [Stream()]}


class Queued(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    def __init__(self, stream: Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.stream.put(lambda: func(*args, **(kwargs or {})))
        return args[0]


@contextlib.contextmanager
def stream(of: Stream) -> Iterator[None]:
    current["torch"].append(of)
    try:
        with Queued(of):
            yield
    finally:
        current["torch"].pop()


class Array:
    """CuPy's array, over the memory of a tensor."""

    def __init__(self, tensor: Tensor, ordered: bool) -> None:
        self.tensor = tensor
        self.ordered = ordered

    def __setitem__(self, place: Any, source: Array) -> None:
        # Not with torch, since the mode of torch's current stream would queue it.
        current["cupy"][-1].put(lambda: np.copyto(self.tensor.numpy(), source.tensor.numpy()))

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if self.ordered:
            current["torch"][-1].wait_stream(current["cupy"][-1])
        return self.tensor.__dlpack__(max_version=options.get("max_version"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces CUDA's streams by the queues, and CuPy by a library that orders them or does not."""

    def install(*, imports: bool = True, exports: bool = True) -> None:
        def from_dlpack(tensor: Any) -> Array:
            # As `Tensor.__dlpack__(stream=...)` does for a consumer that names its stream.
            if imports and isinstance(tensor, Tensor):
                current["cupy"][-1].wait_stream(current["torch"][-1])
            return Array(tensor if isinstance(tensor, Tensor) else tensor._tensor, exports)

        cupy = ModuleType("cupy")
        cupy.__dict__.update(from_dlpack=from_dlpack, cuda=SimpleNamespace(Stream=Stream))
        monkeypatch.setitem(sys.modules, "cupy", cupy)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current["torch"][-1])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: current["torch"][-1].pending.append(lambda: cycles))
    monkeypatch.setattr(type(TECHNIQUE), "capability", lambda *_: SUPPORTED)
    return install


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_an_ordered_exchange_gives_the_written_values(gpu: Any, mode: Mode) -> None:
    gpu()
    made = seeded("mlp")
    agrees(TECHNIQUE, lambda: made.problem(1), mode)


def test_without_a_delay_the_evidence_fails(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
    assert run(TECHNIQUE, seeded("mlp").problem(1)).missing() == [
        "tensors handed over before they were written >= 1: 0"
    ]


def test_a_single_stream_fails_the_evidence(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: current["torch"][0])
    assert any("streams of reader" in line for line in run(TECHNIQUE, seeded("mlp").problem(1)).missing())


def test_capability_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for kind in ("cpu", "xla", "tpu", "vendor"):
        assert TECHNIQUE.answer(StubDevice(kind)).code is Code.NO_FEATURE
    assert TECHNIQUE.capability(StubDevice("cuda")).ok
    assert "pip install cupy" in TECHNIQUE.packages["cupy"]


def test_only_floating_point_tensors_are_exchanged() -> None:
    assert TECHNIQUE.exchangeable(torch.ones(2))
    assert not TECHNIQUE.exchangeable(torch.ones(2, dtype=torch.bool))
    assert not TECHNIQUE.exchangeable(torch.ones(0))
    assert {name for name in streams.WORKLOADS if not TECHNIQUE.accepts(seeded(name))} == set()


# Planted: fault 40, a race of streams in an exchange
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_an_ordered_exchange_passes(tmp_path: Any, gpu: Any, mode: Mode) -> None:
    gpu()
    passed(Store(tmp_path), TECHNIQUE, seeded("mlp"), mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("way", ["imports", "exports"])
def test_a_library_that_does_not_order_streams_fails(tmp_path: Any, gpu: Any, mode: Mode, way: str) -> None:
    gpu(**{way: False})
    record = failed(Store(tmp_path), TECHNIQUE, seeded("mlp"), mode)
    assert "NaN pattern" in record.why


@pytest.mark.slow
def test_the_planted_fault_fails(tmp_path: Any, gpu: Any) -> None:
    gpu()
    (fault,) = (fault for fault in FAULTS if fault.name == "dlpack-unordered")
    assert fault.technique == TECHNIQUE.name
    record = failed(Store(tmp_path), Planted(TECHNIQUE, fault.plant(1.0)), seeded("mlp"))
    assert "NaN pattern" in record.why


def test_the_fault_exports_without_a_stream() -> None:
    asked: list[dict[str, Any]] = []

    class Exported:
        def __dlpack__(self, **options: Any) -> None:
            asked.append(options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    program = SimpleNamespace(extras={GIVE: lambda tensor: tensor})
    unordered(1.0)(program)  # type: ignore[arg-type]  # of a program it takes the extras alone
    given = program.extras[GIVE](Exported())
    assert isinstance(given, Unordered)
    given.__dlpack__(stream=7, max_version=(1, 0))
    assert asked == [{"stream": -1, "max_version": (1, 0)}]
    assert given.__dlpack_device__() == (2, 0)
