"""Further calls of a prepared program, more than a cache has entries: results stay right, and memory does not grow."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accelcheck.checks.traces import storage
from accelcheck.checks.trial import Trial
from accelcheck.core.case import Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify.judge import apart
from accelcheck.workloads.base import Program, Result, flatten, stored

CALLS = 64
"""Most further calls of a case."""
SHARE, SECONDS = 0.02, 0.03
"""Limits of the further calls: a share of the time that the case has taken, or seconds; the longer counts."""
WAITING = 8
"""Multiple of that limit allowed as wall time: other processes run, and a device computes while this thread waits."""
FEWEST = 8
"""Least number of calls whose results must all be alive to report growing memory: a cache may hold a few."""


def called_often(
    trial: Trial, program: Program, first: Result, judge: Callable[[Result], Sequence[Fault]]
) -> list[Fault]:
    """Calls a program in evaluation mode with clones of its inputs, as often as time allows; in forward mode alone.

    The program has just run and given the `first` result, on the CPU; `judge` returns the faults of a result.

    Returns:
        Faults of the result that differs most from the first one, and one if no result or no clone was freed.
    """
    if program.elsewhere is not None or trial.case.mode is not Mode.FORWARD:
        return []
    kept, call = program.inputs, program.repeated(Mode.FORWARD)
    limit = max(SECONDS, SHARE * sum(trial.clock.seconds.values()))
    computed, passed = time.thread_time(), time.perf_counter()

    def used() -> float:
        """Seconds that this thread has computed, or a share of the wall time."""
        return max(time.thread_time() - computed, (time.perf_counter() - passed) / WAITING)

    worst, number = (0.0, 0, first), 0
    given: set[StorageWeakRef] = set()
    made: set[StorageWeakRef] = set()
    try:
        while number < CALLS and used() < limit:
            number += 1
            program.inputs = tuple(cloned(value, strided=trial.device.has("strided")) for value in kept)
            given |= _storages(dict(enumerate(program.inputs)))
            out = dict(flatten(call()))
            made |= _storages(out)
            result = {path: stored(tensor) for path, tensor in out.items()} | program.left()
            worst = max(worst, (_distance(first, result), number, result), key=lambda outcome: outcome[0])
            del out, result
    finally:
        program.inputs = kept
    wrong = judge(worst[2]) if worst[0] else ()
    faults = [replace(fault, place=f"{fault.place} in call {worst[1]}".lstrip()) for fault in wrong]
    del worst
    return faults + [
        _growth(name, number, len(alive))
        for name, refs in (("results", made), ("inputs", given))
        if len(alive := _alive(refs, number)) >= number >= FEWEST
    ]


def cloned(value: Any, *, strided: bool = True) -> Any:
    """Clones a tensor with its strides, where its device has them; other values, and marked tensors, are unchanged."""
    if type(value) is not Tensor or value.layout is not torch.strided or vars(value):
        return value
    if not strided:
        return value.detach().clone()
    base = value._base  # noqa: SLF001 - torch's own name, which compilers guard
    if type(base) is Tensor and (copy := base.detach().clone()).stride() == base.stride():
        # The clone of a view is a view of a base of the same shape and strides.
        return copy.as_strided(value.shape, value.stride(), value.storage_offset() - base.storage_offset())
    if value.is_contiguous():
        return value.detach().clone()
    size = value.untyped_storage().nbytes() // value.element_size()
    whole = value.detach().as_strided((size,), (1,), 0).clone()
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _distance(first: Result, result: Result) -> float:
    return max(apart(first, {path: tensor.cpu() for path, tensor in result.items()}).values())


def _storages(tensors: dict[Any, Any]) -> set[StorageWeakRef]:
    return {ref for value in tensors.values() if (ref := storage(value)) is not None}


def _alive(refs: set[StorageWeakRef], calls: int) -> list[StorageWeakRef]:
    alive = [ref for ref in refs if not ref.expired()]  # type: ignore[no-untyped-call]  # untyped in torch
    if len(alive) >= calls:
        gc.collect()  # reference cycles are no leak
        alive = [ref for ref in alive if not ref.expired()]  # type: ignore[no-untyped-call]  # untyped in torch
    return alive


def _growth(name: str, calls: int, alive: int) -> Fault:
    expected = f"the memory of {name} of {calls} calls given back"
    return Fault(FaultKind.RULE, "memory", "grows with calls", expected=expected, got=f"{alive} of them alive")
