"""Data loading: a program's inputs are moved like batches of a training, and must arrive unchanged."""

import importlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.techniques.base import Holding, Technique, Unsupported
from accelcheck.techniques.data import dataloader
from accelcheck.techniques.data.dataloader import WORKERS, Delivery, Feed, PassEnd, faulty_pass
from accelcheck.techniques.data.feeding import FedLoader, FedTrainer, Feeder
from accelcheck.techniques.memory.offload import page_locked
from accelcheck.techniques.observe import Log, exactly
from accelcheck.workloads.base import Program
from accelcheck.workloads.signatures import tensors_in

BATCH = 3
"""Rows per batch: both workers get batches, and the last one is smaller for most workloads."""

_FEED = "loader"
_DELIVERY = "what the last pass delivered"
_FAULTY_END = "how a faulty pass ended"
_PINNED = "counts of moved tensors, by whether they were pinned"


class ReloadedInputs(Technique):
    """Moves inputs and target to the host and back before each run, which gets new tensors with the same bits.

    The check of unchanged inputs compares the program's inputs after a run with those before, and finds any difference.
    """

    family = "loading"
    timed = False
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    # Errors of batch norm on a device have nothing to do with loading; other techniques show them.
    excludes = frozenset({"batchnorm"})
    works_on = frozenset({"samplewise", "training"})
    early = frozenset({"deep-blocks"})

    def move(self, program: Program, tensors: Sequence[Tensor], device: Device) -> Sequence[Tensor]:
        """Moves CPU tensors to the device: those among the inputs, and the target. `extras` can keep evidence."""
        raise NotImplementedError(f"{type(self).__name__}.move: move the tensors to the device")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:

        def run(program: Program, mode: Mode) -> Any:
            program.elsewhere = None
            try:
                # Not watched: the log reports operators that leave the device, and these are no part of the run.
                with disable_current_modes(), torch.no_grad():
                    self._renew(program, device)
                # `Program.run` of the class: an instance attribute may have replaced it, and be what called this.
                return Program.run(program, mode)
            finally:
                program.elsewhere = run

        program.elsewhere = run
        program.resets.append(lambda: program.extras.update({_DELIVERY: Delivery(), _PINNED: Counter()}))

    def _renew(self, program: Program, device: Device) -> None:
        whole = [*program.inputs, *tensors_in(program.target)]
        left = [value.detach().cpu() for value in whole if isinstance(value, Tensor)]
        came = iter(self.move(program, left, device))
        renewed = [next(came) if isinstance(value, Tensor) else value for value in whole]
        program.inputs = tuple(renewed[: len(program.inputs)])
        target = tuple(renewed[len(program.inputs) :])
        program.target = target if isinstance(program.target, tuple) else target[0] if target else None


class PinnedMemory(ReloadedInputs):
    """``Tensor.pin_memory`` and ``Tensor.to(device, non_blocking=True)``."""

    name = "pinned-memory"
    promise = "Page-locked memory allows transfers during computation, and changes no bit."
    source = "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"
    dtypes = ("float32", "bfloat16", "float16")
    capability = staticmethod(page_locked)

    def move(self, program: Program, tensors: Sequence[Tensor], device: Device) -> Sequence[Tensor]:
        pinned = [tensor.pin_memory() for tensor in tensors]
        program.extras[_PINNED] = Counter(tensor.is_pinned() for tensor in pinned)
        return [tensor.to(device.torch_device(), non_blocking=True) for tensor in pinned]

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen: Counter[bool] = program.extras[_PINNED]
        claim = f"tensors that travelled from page-locked memory = {seen.total()}"
        yield Evidence(claim, seen[True], engaged=seen[True] == seen.total() >= 1)


class PrefetchLoader(Holding, ReloadedInputs):
    """DataLoader with two persistent worker processes that read two batches ahead each, in long trainings as well."""

    name = "prefetch-loader"
    promise = "Worker processes that read ahead deliver every row once and in order, and trainings can be resumed."
    source = "https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading"
    modes = ReloadedInputs.modes | {Mode.TRAJECTORY}
    level = 2

    def feed(self, tensors: Sequence[Tensor], sampler: Iterable[list[int]], device: Device) -> Feed:
        """Makes a loader whose workers are ended by `finish`."""
        made = Feed(tensors, sampler, pinned=page_locked(device).ok)
        self.held.callback(made.close)
        return made

    def passing(self, feed: Iterable[Sequence[Tensor]], device: Device) -> Iterable[Sequence[Tensor]]:
        """Returns the collated batches of a pass over a loader."""
        return feed

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if mode is not Mode.TRAJECTORY:
            super().prepare(program, mode, device)
        elif program.trainer is not None:
            feeder: Feeder = lambda tensors, sampler: self.feed(tensors, sampler, device)  # noqa: E731 - as an argument
            program.trainer = FedTrainer(program.trainer.recipe, feeder, device.torch_device())

    def move(self, program: Program, tensors: Sequence[Tensor], device: Device) -> Sequence[Tensor]:
        feed: Feed | None = program.extras.get(_FEED)
        if feed is not None and feed.rows.fits(tensors):
            feed.rows.fill(tensors)
        else:
            sizes = {len(tensor) if tensor.dim() else None for tensor in tensors}
            if len(sizes) != 1 or None in sizes:
                reason = f"loading row by row needs tensors of one first size, got {[*sizes]}"
                raise Unsupported(unsupported(Code.NO_FEATURE, reason))
            if (rows := len(tensors[0])) < WORKERS:
                reason = f"{rows} rows are {rows} batches at most: of {WORKERS} processes one would read none"
                raise Unsupported(unsupported(Code.NO_EFFECT, reason))
            size = min(BATCH, rows // WORKERS)
            feed = program.extras[_FEED] = self.feed(tensors, BatchSampler(range(rows), size, drop_last=False), device)
        seen = program.extras[_DELIVERY] = Delivery()
        batches = [seen.take(batch)[1] for batch in self.passing(feed, device)]
        return [torch.cat(column).to(device.torch_device(), non_blocking=True) for column in zip(*batches, strict=True)]

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        if mode is Mode.TRAJECTORY:
            trainer, loader = _fed(program)
            seen, due = loader.seen, program.steps * trainer.recipe.accumulation
            yield exactly("mini-batches delivered", seen.batches, due)
            yield exactly("mini-batches with other rows than the training draws", loader.astray, 0)
        else:
            seen = program.extras[_DELIVERY]
            rows = len(program.extras[_FEED].rows)
            claim = f"rows delivered = 0 to {rows - 1}, each once, in this order"
            wrong = [f"row {row} where {place} was due" for place, row in enumerate(seen.rows) if row != place]
            told = f"{len(seen.rows)} of {rows}, {[*wrong, 'in order'][0]}"
            yield Evidence(claim, told, engaged=seen.rows == list(range(rows)))
        workers = set(seen.workers)
        engaged = len(workers) == WORKERS and os.getpid() not in workers
        yield Evidence(f"processes that read them = {WORKERS}, and not this one", len(workers), engaged=engaged)
        pinned = seen.batches if page_locked(device).ok else 0
        yield exactly("batches in page-locked memory", seen.pinned, pinned)


class XlaDeviceLoader(PrefetchLoader):
    """``MpDeviceLoader`` of torch_xla around a DataLoader: threads move batches to the device ahead of the program."""

    name = "xla-device-loader"
    promise = "Batches that threads move to the device ahead of time arrive once and in order."
    source = (
        "https://docs.pytorch.org/xla/release/r2.9/learn/api-guide.html#module-torch_xla.distributed.parallel_loader"
    )
    modes = ReloadedInputs.modes

    def capability(self, device: Device) -> Capability:
        reason = f"torch_xla's MpDeviceLoader moves to xla devices, not to {device.type}"
        return SUPPORTED if device.has("torch-xla") else unsupported(Code.NO_BACKEND, reason)

    def passing(self, feed: Iterable[Sequence[Tensor]], device: Device) -> Iterable[Sequence[Tensor]]:
        loader = importlib.import_module("torch_xla.distributed.parallel_loader").MpDeviceLoader
        batches: Iterable[Sequence[Tensor]] = loader(feed, device.torch_device())
        return batches

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        places = sorted(program.extras[_DELIVERY].places)
        yield Evidence(f"batches are delivered on {device.type}", ", ".join(places), engaged=places == [device.type])


class FaultyLoader(PrefetchLoader):
    """Fault in the middle of a pass, which must raise an error in the program; a new loader then delivers the batch."""

    modes = frozenset({Mode.FORWARD})
    fault: Callable[[], None]
    """Function that the worker calls in the middle of the pass."""

    def run_faulty(self, tensors: Sequence[Tensor], device: Device) -> PassEnd:
        """Runs the pass with the fault."""
        return faulty_pass(tensors, self.fault, lambda loader: self.passing(loader, device))

    def check_error(self, end: PassEnd) -> tuple[str, bool]:
        """Returns the error that the program must get, in words, and whether it got it."""
        raise NotImplementedError(f"{type(self).__name__}.check_error: say which error must have been raised")

    def move(self, program: Program, tensors: Sequence[Tensor], device: Device) -> Sequence[Tensor]:
        if _FAULTY_END not in program.extras:
            program.extras[_FAULTY_END] = self.run_faulty(tensors, device)
        return super().move(program, tensors, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        end: PassEnd = program.extras[_FAULTY_END]
        claim, raised = self.check_error(end)
        yield Evidence(claim, end.error or f"nothing: the pass ended after {end.rows} rows", engaged=raised)
        yield from super().evidence(program, log, mode, device)


class WorkerKilled(FaultyLoader):
    """Worker process killed with SIGKILL."""

    name = "loader-worker-killed"
    promise = "A worker's death raises an error that names it, without a hang, and a new loader works."
    source = "https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.DataLoader"
    fault = staticmethod(dataloader.kill_self)

    def check_error(self, end: PassEnd) -> tuple[str, bool]:
        named = re.search(rf"RuntimeError: .*\b{end.worker}\b", end.error)
        return f"a RuntimeError names worker {end.worker}, which was killed", named is not None


class XlaUnreadable(FaultyLoader, XlaDeviceLoader):
    """Unreadable row, with `MpDeviceLoader`'s threads between the loader and the program."""

    name = "xla-device-loader-error"
    promise = "An error in the loader is raised in the program."
    fault = staticmethod(dataloader.raise_unreadable)

    def check_error(self, end: PassEnd) -> tuple[str, bool]:
        return "an OSError says that a row cannot be read", dataloader.UNREADABLE in end.error


def _fed(program: Program) -> tuple[FedTrainer, FedLoader]:
    trainer = program.trainer
    if not isinstance(trainer, FedTrainer) or trainer.loader is None:
        raise TypeError(f"expected the FedTrainer that `prepare` made, after a training; got {type(trainer).__name__}")
    return trainer, trainer.loader


TECHNIQUES: tuple[Technique, ...] = tuple(
    kind() for kind in (PinnedMemory, PrefetchLoader, XlaDeviceLoader, WorkerKilled, XlaUnreadable)
)
