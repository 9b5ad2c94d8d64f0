"""Data loading: every row once and in order, from other processes, resumable; lost rows and workers fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import built_in, failed, verdict_of
from process_harness import completed
from technique_harness import StubDevice, agrees, differences, engaged, mlp, named, plain, run, workload
from torch import Tensor

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.base import Device
from accelcheck.devices.xla import Xla
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.data.dataloader import (
    FAULTY_ROW,
    TIMEOUT,
    Delivery,
    Feed,
    Rows,
    faulty_pass,
    kill_self,
    raise_unreadable,
)
from accelcheck.techniques.data.feeding import Ahead, FedLoader
from accelcheck.techniques.data.loading import TECHNIQUES, PrefetchLoader, XlaUnreadable
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, Result
from accelcheck.workloads.trainer import Loader

PREFETCH = named(TECHNIQUES, "prefetch-loader")
PINNED = named(TECHNIQUES, "pinned-memory")
KILLED = named(TECHNIQUES, "loader-worker-killed")
XLA_LOADER = named(TECHNIQUES, "xla-device-loader")
MLP = "trajectory-mlp"


@pytest.fixture(autouse=True)
def _no_worker_stays() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN])
def test_rows_come_once_in_order_and_from_two_other_processes(mode: Mode) -> None:
    ran = agrees(PREFETCH, mlp, mode, tolerance=0.0)
    assert [entry.observed for entry in ran.evidence] == ["8 of 8, in order", 2, 0]


def test_tensors_arrive_unchanged_in_new_memory() -> None:
    program = Program.of(mlp(), dtype=torch.bfloat16)
    PREFETCH.prepare(program, Mode.TRAIN, StubDevice())
    (x,), target = program.inputs, program.target
    assert isinstance(target, Tensor)
    program.run(Mode.FORWARD)
    (came,), again = program.inputs, program.target
    assert isinstance(again, Tensor)
    assert torch.equal(came, x)
    assert torch.equal(again, target)
    assert came.data_ptr() != x.data_ptr()
    # Workers persist and see later content, as the engine writes it for further draws.
    first = set(program.extras["what the last pass delivered"].workers)
    came.copy_(torch.arange(came.numel()).view_as(came))
    program.run(Mode.FORWARD)
    assert torch.equal(program.inputs[0], came)
    assert set(program.extras["what the last pass delivered"].workers) == first
    # Another shape needs another loader.
    program.inputs = (torch.randn(5, 16).bfloat16(),)
    program.target = None
    program.run(Mode.FORWARD)
    assert not first & set(program.extras["what the last pass delivered"].workers)
    PREFETCH.finish()


class Losing(PrefetchLoader):
    """A loader whose batches `change` changes."""

    def __init__(self, change: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__()
        self.change = change

    def passing(self, feed: Iterable[Sequence[Tensor]], device: Device) -> Iterable[Sequence[Tensor]]:
        return self.change(list(super().passing(feed, device)))


PLANTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "drops the last partial batch": (lambda batches: batches[:-1], "30 of 32, in order"),
    "gives a batch twice": (lambda batches: [*batches[:2], *batches[1:]], "35 of 32, row 3 where 6 was due"),
    "gives a batch in another's place": (
        lambda batches: [*batches[:2], batches[1], *batches[3:]],
        "32 of 32, row 3 where 6 was due",
    ),
    "swaps two batches": (lambda batches: [batches[1], batches[0], *batches[2:]], "32 of 32, row 3 where 0 was due"),
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_loader_that_loses_or_reorders_fails(store: Store, plant: str) -> None:
    change, seen = PLANTS[plant]
    record = failed(store, Losing(change), built_in()["mlp"])
    assert f"each once, in this order: observed {seen}" in record.why
    # The result is wrong too: it is that of other samples, or in another order.
    assert "\nout: " in record.why


def test_a_loader_that_changes_a_bit_fails(store: Store) -> None:
    def flip(batches: list[Any]) -> list[Any]:
        batches[0][2][0, 0] += 2.0**-20
        return batches

    record = failed(store, Losing(flip), built_in()["mlp"])
    assert "input[0]: mutated: expected it bitwise unchanged" in record.why


def test_an_intact_loader_passes(store: Store) -> None:
    assert verdict_of(store, PREFETCH, built_in()["mlp"]).verdict is Verdict.PASS


def test_a_loader_of_one_process_fails_the_evidence() -> None:
    class Alone(PrefetchLoader):
        def passing(self, feed: Iterable[Sequence[Tensor]], device: Device) -> Iterable[Sequence[Tensor]]:
            assert isinstance(feed, Feed)
            return torch.utils.data.DataLoader(feed.rows, batch_size=3)

    assert run(Alone(), mlp()).missing() == ["processes that read them = 2, and not this one: 1"]


def test_tensors_of_other_sizes_are_no_rows() -> None:
    problem = replace(mlp(), inputs=(torch.randn(8, 16), torch.zeros(3)))
    with pytest.raises(Unsupported, match="needs tensors of one first size"):
        run(PREFETCH, problem)


def trained(change: Callable[[Program], None], steps: int = 6, start: bytes | None = None) -> tuple[Result, Program]:
    program = Program.of(built_in()[MLP].problem(0), seed=0)
    program.steps = steps
    change(program)
    assert program.trainer is not None
    program.trainer.start = start
    torch.manual_seed(0)
    return program.run(Mode.TRAJECTORY), program


def fed(program: Program) -> None:
    PREFETCH.prepare(program, Mode.TRAJECTORY, StubDevice())


def as_it_is(program: Program) -> None:
    del program


@pytest.fixture
def _finished() -> Iterator[None]:
    yield
    PREFETCH.finish()


def saved(program: Program) -> bytes:
    assert program.trainer is not None
    return program.trainer.save(program)


@pytest.mark.usefixtures("_finished")
def test_a_training_gets_its_mini_batches_in_its_own_order() -> None:
    expected, _ = trained(as_it_is)
    result, program = trained(fed)
    assert not differences(result, expected, 0.0)
    # Two mini-batches per step: an epoch of eight, and into the next.
    evidence = list(PREFETCH.evidence(program, PREFETCH.watch("cpu"), Mode.TRAJECTORY, StubDevice()))
    assert [(entry.observed, entry.engaged) for entry in evidence] == [(12, True), (0, True), (2, True), (0, True)]


@pytest.mark.usefixtures("_finished")
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_training_resumes_from_its_own_position_not_the_workers(stop: int) -> None:
    expected, _ = trained(as_it_is)
    _, program = trained(fed, stop)
    resumed, _ = trained(fed, 6 - stop, saved(program))
    later = {path: tensor for path, tensor in expected.items() if path in resumed}
    assert len([path for path in resumed if path.startswith("loss")]) == 6 - stop
    assert not differences(resumed, later, 0.0)


@pytest.mark.usefixtures("_finished")
def test_a_state_with_the_workers_position_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typical fault of prefetching: it saves the state of the sampler, which is four mini-batches ahead."""

    def state(self: FedLoader) -> dict[str, Any]:
        ahead = Loader(self.rows, self.ahead.batches, 0)
        ahead.load_state_dict(Loader.state_dict(self))
        for _ in range(4):
            ahead.draw()
        return ahead.state_dict()

    expected, _ = trained(as_it_is)
    _, program = trained(fed, 3)
    with monkeypatch.context() as patch:
        patch.setattr(FedLoader, "state_dict", state)
        ahead = saved(program)
    resumed, _ = trained(fed, 3, ahead)
    assert "loss[3]" in differences(resumed, {path: expected[path] for path in resumed}, 0.0)


@pytest.mark.usefixtures("_finished")
def test_workers_with_other_rows_fail_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Ahead):
        def __iter__(self) -> Iterator[list[int]]:
            stream = super().__iter__()
            next(stream)
            return stream

    monkeypatch.setattr("accelcheck.techniques.data.feeding.Ahead", Other)
    _, program = trained(fed)
    evidence = list(PREFETCH.evidence(program, PREFETCH.watch("cpu"), Mode.TRAJECTORY, StubDevice()))
    assert [entry.engaged for entry in evidence] == [True, False, True, True]
    assert evidence[1].observed == 12


def test_a_pass_does_not_change_torchs_generator() -> None:
    """A loader draws its workers' seed from torch's generator by default, which changes trainings."""
    tensors = [torch.arange(6.0)]
    feed = Feed(tensors, [[0, 1, 2], [3, 4, 5]], pinned=False)
    before = torch.random.get_rng_state()
    assert [batch[2].tolist() for batch in feed] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert torch.equal(torch.random.get_rng_state(), before)
    feed.close()


@pytest.mark.usefixtures("_finished")
def test_a_pass_that_draws_from_torchs_generator_changes_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's DataLoader without a generator of its own does this."""

    def begin(feed: Feed) -> Iterator[Sequence[Tensor]]:
        feed.loader.generator = None
        return iter(feed.loader)

    monkeypatch.setattr(Feed, "__iter__", begin)
    expected, _ = trained(as_it_is)
    result, _ = trained(fed)
    assert "loss[0]" in differences(result, expected, 1e-3)


def test_a_killed_worker_is_named_without_a_hang() -> None:
    begun = time.monotonic()
    end = faulty_pass([torch.arange(6.0)], kill_self)
    assert time.monotonic() - begun < TIMEOUT
    assert end.error.startswith(f"RuntimeError: DataLoader worker (pid(s) {end.worker})") or (
        end.error.startswith(f"RuntimeError: DataLoader worker (pid {end.worker})")
    )
    assert 4 <= end.rows <= FAULTY_ROW
    assert end.worker not in {0, os.getpid()}


def test_an_unreadable_row_raises_in_the_pass() -> None:
    end = faulty_pass([torch.arange(6.0)], raise_unreadable)
    assert "OSError: Caught OSError in DataLoader worker process 1." in end.error
    assert "this row cannot be read" in end.error
    assert end.rows == FAULTY_ROW


def test_the_error_is_evidence_and_the_next_loader_works() -> None:
    ran = engaged(KILLED, mlp())
    assert str(ran.evidence[0].observed).startswith("RuntimeError: DataLoader worker")
    assert ran.evidence[1].observed == "8 of 8, in order"
    assert not differences(ran.result, plain(mlp()), 0.0)


def test_a_hidden_death_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hiding(type(KILLED)):  # type: ignore[misc]  # a class all the same
        def run_faulty(self, tensors: Sequence[Tensor], device: Device) -> Any:

            def quietly(loader: Any) -> Iterator[Any]:
                try:
                    yield from loader
                except RuntimeError:
                    return

            return faulty_pass(tensors, kill_self, quietly)

    (line,) = run(Hiding(), mlp()).missing()
    assert "which was killed: nothing: the pass ended after" in line


def test_an_error_that_threads_swallow_fails_the_evidence() -> None:
    """torch_xla's MpDeviceLoader does this: see the ledger."""

    class Swallowing(XlaUnreadable):
        def passing(self, feed: Iterable[Sequence[Tensor]], device: Device) -> Iterator[Sequence[Tensor]]:
            try:
                yield from feed
            except OSError:
                return

    ran = run(Swallowing(), mlp(), device=StubDevice("cpu"))
    assert ran.missing() == [
        f"an OSError says that a row cannot be read: nothing: the pass ended after {FAULTY_ROW} rows"
    ]


class Pins:
    """Tensors that claim to be pinned, as on a machine with a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: set[int] = set()
        self.moved: list[dict[str, Any]] = []
        to = Tensor.to

        def pin(tensor: Tensor) -> Tensor:
            copy = tensor.clone()
            self.pinned.add(copy.data_ptr())
            return copy

        def move(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if "non_blocking" in options:
                self.moved.append({"pinned": tensor.data_ptr() in self.pinned, **options})
            return to(tensor, *args, **options)

        monkeypatch.setattr(Tensor, "pin_memory", pin)
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in self.pinned)
        monkeypatch.setattr(Tensor, "to", move)


def test_inputs_and_target_go_through_pinned_memory_and_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = Pins(monkeypatch)
    ran = engaged(PINNED, mlp(), Mode.TRAIN, StubDevice("cuda"))
    assert ran.evidence[0].observed == 2
    assert pins.moved == [{"pinned": True, "non_blocking": True}] * 2
    assert not differences(ran.result, plain(mlp(), Mode.TRAIN), 0.0)


def test_memory_that_is_not_pinned_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    assert run(PINNED, mlp(), device=StubDevice("cuda")).missing() == [
        "tensors that travelled from page-locked memory = 2: 0"
    ]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a torch that can pin nothing")
def test_where_nothing_can_be_pinned_it_is_unsupported() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)accelerator|nvidia"):
        run(PINNED, mlp(), device=StubDevice("cuda"))


def test_capability_by_device() -> None:
    assert PINNED.capability(StubDevice("cpu")).code is Code.NO_EFFECT
    assert PINNED.capability(StubDevice("xla")).code is Code.NO_FEATURE
    assert PINNED.capability(StubDevice("cuda")).ok
    for kind in ("cpu", "xla", "cuda", "fancy"):
        assert PREFETCH.capability(StubDevice(kind)).ok
        assert KILLED.capability(StubDevice(kind)).ok
        assert XLA_LOADER.capability(StubDevice(kind)).ok is (kind == "xla")


def test_workloads() -> None:
    assert PREFETCH.accepts(workload("training"))
    assert not PREFETCH.accepts(workload("training", "batchnorm"))
    assert not PREFETCH.accepts(workload("linear"))
    assert PREFETCH.accepts(built_in()["mlp"])
    assert {technique.name for technique in TECHNIQUES if Mode.TRAJECTORY in technique.modes} == {"prefetch-loader"}


def test_rows_check_shapes_and_dtypes() -> None:
    rows = Rows([torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)])
    assert rows.fits([torch.ones(4, 3), torch.ones(4, dtype=torch.int64)])
    assert not rows.fits([torch.ones(4, 3), torch.ones(4)])
    assert not rows.fits([torch.ones(5, 3), torch.ones(5, dtype=torch.int64)])
    rows.fill([torch.ones(4, 3), torch.arange(4)])
    number, process, row, index = rows[2]
    assert (number, process, row.tolist(), int(index)) == (2, os.getpid(), [1.0, 1.0, 1.0], 2)


def test_a_delivery_records_devices_and_order() -> None:
    seen = Delivery()
    numbers, (tensor,) = seen.take([torch.tensor([4, 2]), torch.tensor([7, 7]), torch.zeros(2, 3)])
    assert (numbers, tensor.shape) == ([4, 2], (2, 3))
    assert (seen.batches, seen.rows, seen.workers, seen.pinned, seen.places) == (1, [4, 2], [7, 7], 0, {"cpu"})


# XLA, if it is installed: in another process, since torch_xla changes torch.

PLANTED = """
import json
from pathlib import Path
from fault_harness import bench, built_in
from accelcheck.core.case import Case, Mode
from accelcheck.devices.xla import Xla
from accelcheck.selftest.faults import asynchrony
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.data import loading
from accelcheck.techniques.memory import offload
from accelcheck.verify.oracle import Store

xla, mlp, store = Xla(), built_in()["mlp"], Store(Path({folder!r}))
found = []
for base, mode in ((loading.XlaDeviceLoader(), Mode.FORWARD), (offload.TECHNIQUES[0], Mode.BACKWARD)):
    for plant in (nothing, asynchrony.unsynced(1.0), asynchrony.fallen_back(1.0)):
        technique = Planted(base, plant)
        record = bench(store, technique, mlp, xla).run(Case(technique.name, "mlp", "xla", "float32", mode, 1))
        found.append([str(record.verdict), record.why])
print(json.dumps(found))
"""


@pytest.mark.skipif(not Xla().detect().ok, reason="needs torch_xla")
def test_results_that_are_unsynced_or_computed_on_the_cpu_fail_on_xla(tmp_path: Path) -> None:
    """Fault 41, with a loader that moves batches ahead of time and with activations that are offloaded to the host."""
    here = Path(__file__).parents[1]
    done = completed(
        [sys.executable, "-c", PLANTED.format(folder=str(tmp_path))],
        timeout=300,
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert [verdict for verdict, _ in document] == ["pass", "fail", "fail"] * 2
    for _, reason in (document[1], document[4]):
        assert "out: view row" in reason
    for _, reason in (document[2], document[5]):
        assert "no operator left xla for the CPU: observed aten::" in reason
