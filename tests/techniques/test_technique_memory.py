"""Techniques that lower peak memory: checkpointed segments, in-place activations, offloaded activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fault_harness import failed, verdict_of
from technique_harness import StubDevice, agrees, differences, engaged, named, plain, run, trained, workload
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.base import Device, Memory
from accelcheck.techniques.memory import checkpoint_segments, inplace, offload
from accelcheck.techniques.memory.checkpoint_segments import SEGMENTS, TorchSegments
from accelcheck.techniques.memory.inplace import Inplace
from accelcheck.techniques.memory.offload import Counted, Offload, Tally, page_locked
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.deep import WORKLOADS, WideBlock
from accelcheck.workloads.draw import initialise, normal

SEGMENTED = named(checkpoint_segments.TECHNIQUES, "checkpoint-segments")
XLA_SEGMENTED = named(checkpoint_segments.TECHNIQUES, "checkpoint-segments-xla")
INPLACE = named(inplace.TECHNIQUES, "inplace-memory")
OFFLOAD = named(offload.TECHNIQUES, "offload-cpu")
PINNED = named(offload.TECHNIQUES, "offload-cpu-pinned")
MODES = (Mode.BACKWARD, Mode.TRAIN)


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WideBlock(16, 64) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(depth: int = 9) -> Problem:
    module = Stack(depth)
    generator = torch.Generator().manual_seed(0)
    initialise(module, generator)
    return trained(module, normal(generator, 64, 16), normal(generator, 64, 16))


def make(generator: torch.Generator, extent: int) -> Problem:
    module = Stack(4)
    initialise(module, generator)
    return Problem(module, (normal(generator, 96 + extent, 16),))


SMALL = Workload("small-stack", "Four blocks.", make, traits=frozenset({"blocks", "activations", "inplace"}))


@pytest.mark.parametrize("mode", MODES)
def test_segments_except_the_last_are_recomputed_and_lower_the_peak(mode: Mode) -> None:
    ran = engaged(SEGMENTED, stack(), mode)
    # Nine blocks: three segments of two, and a last one of three.
    steps = 3 if mode is Mode.TRAIN else 1
    assert ran.evidence[0].observed == " ".join(map(str, [2 * steps] * 6 + [steps] * 3))
    assert "peak memory" in ran.evidence[1].claim
    assert not differences(ran.result, plain(stack(), mode), 0.0)


def test_a_measured_run_leaves_no_trace() -> None:
    torch.manual_seed(1)
    ran = run(SEGMENTED, stack(), Mode.TRAIN)
    after = torch.rand(3)
    torch.manual_seed(1)
    expected = plain(stack(), Mode.TRAIN)
    assert torch.equal(after, torch.rand(3))
    for name, parameter in ran.program.module.named_parameters():
        assert torch.equal(parameter, expected[f"parameter:{name}"])
        assert parameter.grad is None


def test_the_suites_deep_blocks_need_less_than_half_the_memory() -> None:
    deep = next(workload for workload in WORKLOADS if workload.name == "deep-blocks")
    measured = run(SEGMENTED, deep.problem(0), Mode.BACKWARD).evidence[1]
    assert isinstance(measured.observed, int)
    assert 0 < measured.observed < 0.5 * int(measured.claim.split(" < ")[1].split(",")[0])


class Storing(TorchSegments):
    """Segments that are stored, not recomputed."""

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        for block in blocks:
            x = block(x)
        return x


class Drifting(TorchSegments):
    """Recomputes a block with an input that is wrong by 1 %."""

    def chain(self, blocks: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Any:
        def drifting(block: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            calls: list[int] = []

            def call(value: Tensor) -> Any:
                calls.append(1)
                return block(value if len(calls) == 1 else value * 1.01)

            return call

        return super().chain([drifting(block) for block in blocks], x)


def test_stored_segments_fail_both_observations() -> None:
    ran = run(Storing(SEGMENTED.name, "", ""), stack(), Mode.BACKWARD)
    assert [entry.engaged for entry in ran.evidence] == [False, False]


def test_recomputing_with_other_inputs_fails(fresh: Store) -> None:
    assert verdict_of(fresh, SEGMENTED, SMALL, Mode.BACKWARD).verdict is Verdict.PASS
    record = failed(fresh, Drifting(SEGMENTED.name, "", ""), SMALL, Mode.BACKWARD)
    assert "grad:input[0]: view row" in record.why
    assert "not engaged" not in record.why


def test_without_statistics_evidence_gives_the_reason() -> None:
    ran = engaged(SEGMENTED, stack(), Mode.BACKWARD, StubDevice("fancy"))
    (forwards,) = ran.evidence
    assert forwards.claim.endswith("(no peak: stub offers no memory statistics)")


def test_too_few_blocks_are_an_error() -> None:
    with pytest.raises(TypeError, match=f"ModuleList of at least {SEGMENTS} blocks"):
        run(SEGMENTED, stack(SEGMENTS - 1), Mode.BACKWARD)


def test_capability_of_segments_by_device() -> None:
    assert XLA_SEGMENTED.capability(StubDevice("cpu")).code is Code.NO_BACKEND
    assert XLA_SEGMENTED.capability(StubDevice("xla")).ok
    # torch.utils.checkpoint fails on xla: the ledger has these failures, and `capability` must not hide them.
    assert SEGMENTED.capability(StubDevice("xla")).ok


def test_the_bytes_saved_are_those_of_one_activation() -> None:
    ran = engaged(INPLACE, stack())
    x, hidden = 64 * 16 * 4, 64 * 64 * 4
    saved = ran.evidence[-1]
    # Plain: a block's input, and the input and output of its activation. In place: the block's input, the activation's
    # output, and the next layer's output.
    assert f"peak of {x + 2 * hidden} " in saved.claim
    assert saved.observed == (x + 2 * hidden) - (2 * x + hidden)
    assert not differences(ran.result, plain(stack()), 0.0)


def test_a_module_that_copies_saves_nothing() -> None:
    class Copying(nn.SiLU):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.SiLU gives it
            return input.copy_(functional.silu(input)) if self.inplace else functional.silu(input)

    def copying() -> Problem:
        problem = stack()
        for block in problem.module.blocks:  # type: ignore[union-attr]  # a ModuleList
            block.act = Copying()
        return problem

    assert run(Inplace(), copying()).engaged
    assert run(INPLACE, copying()).missing() == [f"bytes saved of the plain run's peak of {4 * 64 * 144} >= 1: 0"]


def test_in_place_needs_memory_that_can_be_measured() -> None:
    assert INPLACE.capability(StubDevice()).ok
    answer = INPLACE.capability(StubDevice("fancy"))
    assert (answer.code, answer.reason) == (Code.NO_FEATURE, "stub offers no memory statistics")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("technique", [OFFLOAD, PINNED], ids=lambda technique: technique.name)
def test_saved_tensors_go_to_the_host_and_back(technique: Offload, mode: Mode) -> None:
    ran = agrees(technique, lambda: stack(3), mode, tolerance=0.0)
    observed = {entry.claim: entry.observed for entry in ran.evidence}
    saved, steps = 0, 3 if mode is Mode.TRAIN else 1
    # A block saves the input of `up`, and the input and output of the activation. A weight is saved if the input of its
    # product requires a gradient, which the first one's does not in training.
    rows, width, hidden, weight = 64, 16, 64, 16 * 64
    for block in range(3):
        first = block == 0 and mode is Mode.TRAIN
        saved += 4 * (rows * width + 2 * rows * hidden + (1 if first else 2) * weight)
    if mode is Mode.TRAIN:
        saved += 4 * rows * width  # saved by the loss
    assert observed["bytes saved in host memory >= 1"] == steps * saved
    count = next(entry.observed for entry in ran.evidence if "returned for" in entry.claim)
    copied = 0 if technique is OFFLOAD else count
    assert observed[f"tensors saved in their own memory = {copied}"] == copied


class Halving(Counted):
    """Saves tensors in half precision, and returns them in the right dtype."""

    def __init__(self, tally: Tally, **options: Any) -> None:
        super().__init__(tally, **options)
        pack, unpack = self.pack_hook, self.unpack_hook
        self.pack_hook = lambda tensor: pack(tensor.bfloat16())
        self.unpack_hook = lambda packed: unpack(packed).float()


class Lossy(Offload):
    def saving(self, tally: Tally, device: Device) -> Any:
        return Halving(tally)


def test_an_offload_that_loses_bits_fails(fresh: Store) -> None:
    assert verdict_of(fresh, OFFLOAD, SMALL, Mode.BACKWARD).verdict is Verdict.PASS
    record = failed(fresh, Lossy(OFFLOAD.name, "", pinned=False), SMALL, Mode.BACKWARD)
    assert "grad:input[0]: view row" in record.why


def test_an_offload_that_loses_the_dtype_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        saved_tensors_hooks.__init__(
            self, lambda tensor: (tensor.device, tensor.bfloat16()), lambda packed: packed[1].to(packed[0]).float()
        )

    monkeypatch.setattr(save_on_cpu, "__init__", init)
    ran = run(OFFLOAD, stack(3), Mode.BACKWARD)
    missing = [claim.partition(" = ")[0] for claim in ran.missing()]
    assert "tensors saved or returned with another dtype, shape or device" in missing


def test_an_offload_that_moves_nothing_fails_the_evidence() -> None:
    class Idle(Offload):
        def saving(self, tally: Tally, device: Device) -> Any:
            return contextlib.nullcontext()

    assert (
        "bytes saved in host memory >= 1: 0" in run(Idle("idle", "", pinned=False), stack(3), Mode.BACKWARD).missing()
    )


class Counting(StubDevice):
    """A device with memory statistics, in which each measured run takes less than the one before."""

    def __init__(self, step: int) -> None:
        super().__init__("fancy")
        self.step, self.top = step, 1000

    def memory(self) -> Memory:
        return Memory(0, self.top)

    def reset_memory(self) -> None:
        self.top += self.step


@pytest.mark.parametrize("step", [-10, 0, 10])
def test_on_other_devices_the_peak_must_be_lower(step: int) -> None:
    ran = run(OFFLOAD, stack(3), Mode.BACKWARD, Counting(step))
    measured = ran.evidence[-1]
    assert measured.claim == f"peak memory of a run, in bytes, < {1000 + step}, the plain run's"
    assert measured.observed == 1000 + 2 * step
    assert measured.engaged is (step < 0)


def test_devices_that_can_pin_host_memory() -> None:
    assert page_locked(StubDevice("cpu")).code is Code.NO_EFFECT
    assert page_locked(StubDevice("xla")).code is Code.NO_FEATURE
    assert page_locked(StubDevice("cuda")).ok  # a ROCm build's type too
    answer = page_locked(StubDevice("fancy"))
    if not torch.accelerator.is_available():
        assert answer.code is Code.NO_FEATURE
        assert "torch cannot pin memory for stub: " in answer.reason


def test_a_device_that_pins_nothing_when_asked_to_has_no_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty(1)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: plain)
    answer = page_locked(StubDevice("fancy"))
    assert answer.code is Code.NO_EFFECT
    assert answer.reason == "stub has no page-locked memory: a tensor that torch was asked to pin is not"


def test_workloads() -> None:
    for technique in (SEGMENTED, XLA_SEGMENTED, INPLACE, OFFLOAD, PINNED):
        assert technique.accepts(SMALL)
        assert not technique.accepts(workload("blocks", "inplace"))
        assert Mode.TRAJECTORY not in technique.modes
