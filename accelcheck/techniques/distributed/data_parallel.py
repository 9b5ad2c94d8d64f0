"""Training by several processes, equal to that of one process on the joined batch: DistributedDataParallel and FSDP2.

`torchrun` starts the ranks. They use gloo on the CPU, elsewhere the device's own collectives, with one device a rank.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.distributed.ddp import Accumulating, FullySharded, Replicated
from accelcheck.techniques.distributed.pool import rank_pool
from accelcheck.techniques.distributed.shards import shards
from accelcheck.techniques.distributed.sharing import device_of
from accelcheck.techniques.distributed.strategy import RankReport, Strategy, TrainingJob
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.techniques.processes.torchrun import devices_of_ranks
from accelcheck.workloads.base import Program, Result

STRATEGY = "strategy"
"""Key in `Program.extras` of the ranks' strategy; it may be replaced after `prepare`."""
ANSWERS = "answers"
"""Key in `Program.extras` of the ranks' last reports, by rank."""
DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
FSDP = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
SMALL_BUCKET = 256 / 2**20
"""MiB at which a bucket is full: small enough for several buckets in models of a few KB."""
Size = Callable[[Sequence[torch.Size], int], int]
"""``size(shapes, step)``: bytes that a rank sends by collectives in a step, from the shapes of the parameters."""


class RankedTraining(Technique):
    """Training by `world` processes, whose strategy the function `strategy` makes."""

    family = "distributed"
    timed = False
    level = 2
    modes = frozenset({Mode.TRAIN})
    requires = frozenset({"training"})
    # Batch norm: each rank normalises by its own part of the batch, so that results differ by design. Branches on data:
    # ranks run different operators; DDP then lacks gradients that it waits for, and FSDP's collectives deadlock.
    excludes = frozenset({"batchnorm", "branching"})
    did = "trained"
    """Work of the ranks, in words for evidence."""

    def __init__(
        self, name: str, world: int, strategy: Callable[[], Strategy], promise: str, source: str = DDP
    ) -> None:
        self.name, self.world, self.strategy, self.promise, self.source = name, world, strategy, promise, source

    @property
    def parts(self) -> int:
        """Number of parts of a batch."""
        return self.world

    def capability(self, device: Device) -> Capability:
        """Tells whether torch has collectives for the device, and this process sees a device for each rank."""
        if not distributed.is_available():
            return unsupported(Code.WRONG_VERSION, f"torch {torch.__version__} is built without torch.distributed")
        if not (collectives := library(device)).ok:
            return collectives
        count = self.world if device.has("host") else devices_of_ranks(device)  # the CPU is shared
        if count >= self.world:
            return SUPPORTED
        reason = f"{self.world} ranks need {self.world} devices, {device.name} shows {count}"
        action = "run it where as many are visible, without a mask that hides them"
        return unavailable(Code.NO_HARDWARE, reason, action)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.extras[STRATEGY] = self.strategy()
        program.resets.append(lambda: program.extras.pop(ANSWERS, None))
        self.check_batches(program)

        def elsewhere(program: Program, mode: Mode) -> Result:
            answers = program.extras[ANSWERS] = rank_pool(device, self.world).train(self.share(program, mode))
            return self.returned(program, answers)

        program.elsewhere = elsewhere

    def share(self, program: Program, mode: Mode) -> TrainingJob:
        """Makes the job of the ranks."""
        return TrainingJob.of(program, program.extras[STRATEGY])

    @torch.no_grad()
    def returned(self, program: Program, answers: Sequence[RankReport]) -> Result:
        """Returns rank 0's result on the program's device, and copies it into the program's parameters and buffers."""
        result, device = answers[0].result, device_of(program)
        if "loss[0]" not in result:  # not of a training
            return {path: tensor.to(device) for path, tensor in result.items()}
        state: Result = {f"parameter:{name}": parameter for name, parameter in program.module.named_parameters()}
        state |= {f"buffer:{name}": buffer for name, buffer in program.module.named_buffers()}
        for path, tensor in state.items():
            tensor.copy_(result[path])
        return {path: state.get(path, tensor.to(device)) for path, tensor in result.items()}

    def check_batches(self, program: Program) -> None:
        """Raises `Unsupported`, before processes start, if a batch cannot be divided."""
        for batch in ((program.inputs, program.target), *program.further):
            shards(*batch, self.parts)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        answers: Sequence[RankReport] = program.extras.get(ANSWERS, ())
        ranks = {answer.pid for answer in answers} - {os.getpid()}
        yield exactly(f"processes that {self.did}", len(ranks), self.world)
        if answers:
            yield from self.shown(program, answers)

    def shown(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        """Yields evidence that the run was right, from the reports of all ranks."""
        digests = answers[0].digests
        unlike = [name for name in digests if len({answer.digests[name] for answer in answers}) > 1]
        yield Evidence("parameters that differ between ranks = 0", ", ".join(unlike) or 0, not unlike and bool(digests))
        yield from self.exchanged(program, answers)

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        """Yields evidence that the ranks exchanged gradients and parameters."""
        raise NotImplementedError(f"{type(self).__name__}.exchanged: say what shows that gradients were exchanged")


def whole(width: int) -> Size:
    """Makes the `Size` of all gradients, with `width` bytes an element."""
    return lambda shapes, _: width * sum(shape.numel() for shape in shapes)


class DataParallel(RankedTraining):
    """Training with DistributedDataParallel, in several buckets a step if `buckets`.

    `size` gives the bytes that each rank has to send; None for all its gradients in FP32.
    """

    def __init__(self, *arguments: Any, size: Size | None = None, buckets: bool = False) -> None:
        super().__init__(*arguments)
        self.size = whole(4) if size is None else size
        self.buckets = buckets

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        shapes = [parameter.shape for parameter in trained(program)]
        expected = sum(self.size(shapes, step) for step in range(program.steps))
        sent = [sum(answer.sent) for answer in answers]
        yield Evidence(f"bytes sent by each rank = {expected}", listed(sent), engaged=set(sent) == {expected})
        if self.buckets:
            # torch makes one bucket of all parameters until the first step has shown the order of ready gradients.
            least = min(sum(calls.values()) for answer in answers for calls in answer.calls[1:])
            sizes = [whole(4)([shape], 0) for shape in shapes]
            # A bucket is closed once it is full: the rest, without the largest parameter, opens another one for sure.
            wanted = 2 if sum(sizes) - max(sizes) > SMALL_BUCKET * 2**20 else 1
            yield at_least("all-reduces of a step, after the first,", least, wanted)


class BucketViews(DataParallel):
    """Gradients are views into the buckets: there are as many storages as buckets."""

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        count, first = len(trained(program)), answers[0]
        buckets, storages = [sum(calls.values()) for calls in first.calls], first.facts["storages"]
        claim = f"storages of the {count} gradients, by step, = buckets: {listed(buckets)}"
        yield Evidence(claim, listed(storages), engaged=storages == buckets and max(storages) < count)


class Accumulated(DataParallel):
    """Gradients of two micro-batches; only the second pass exchanges them."""

    @property
    def parts(self) -> int:
        return 2 * self.world

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        passes: list[int] = [number for answer in answers for number in answer.facts["passes"]]
        first, second = passes[::2], passes[1::2]
        claim = "all-reduces of each first pass = 0, of each second one >= 1"
        yield Evidence(claim, f"{max(first)} at most, {min(second)} at least", engaged=not any(first) and all(second))


class Sharded(RankedTraining):
    """FSDP2: each rank holds a part of each parameter."""

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        parameters = trained(program)
        yield exactly("sharded parameters", min(answer.facts["sharded"] for answer in answers), len(parameters))
        total = sum(parameter.nbytes for parameter in parameters)
        held = [answer.facts["bytes held"] for answer in answers]
        claim = f"bytes of parameters that ranks hold, {total} together, each < {total}"
        yield Evidence(claim, listed(held), engaged=sum(held) == total and max(held) < total)
        for name in ("_allgather_base_", "_reduce_scatter_base_"):
            least = min(calls.get(name, 0) for answer in answers for calls in answer.calls)
            yield at_least(f"{name.strip('_')} of each step", least)
        sent = [sum(answer.sent) for answer in answers]
        # Parameters are gathered in parts at least once, in the forward pass; gradients are sent whole.
        floor = program.steps * total
        yield Evidence(f"bytes sent by each rank > {floor}, all gradients", listed(sent), engaged=min(sent) > floor)


def trained(program: Program) -> list[nn.Parameter]:
    """Returns the parameters that get gradients."""
    return [parameter for parameter in program.module.parameters() if parameter.requires_grad]


def listed(numbers: Iterable[int]) -> str:
    """Joins numbers by commas."""
    return ", ".join(map(str, numbers))


def library(device: Device) -> Capability:
    """Tells whether torch has collectives between processes for such devices."""
    if device.has("torch-xla") and (client := getattr(device, "client", "CPU")) != "CPU":
        fact = f"PJRT gives a chip to one process, and this one holds its {client} chips: none is free for ranks"
        return unavailable(Code.NO_HARDWARE, fact)
    if device.has("torch-xla"):
        fact = "torch_xla has no collectives between processes on PJRT's CPU client"
        return unsupported(Code.NO_BACKEND, f"{fact}: https://github.com/pytorch/xla/issues/9089")
    try:
        backend = distributed.get_default_backend_for_device(device.type)
    except ValueError:
        return unsupported(Code.NO_BACKEND, f"torch.distributed has no backend for devices of type {device.type}")
    if not distributed.is_backend_available(backend):
        reason = f"torch {torch.__version__} is built without {backend}"
        return unavailable(Code.WRONG_BUILD, reason, "install a build that has it")
    return SUPPORTED


_EQUAL = "{} ranks that average their gradients train as one process on the joined batch does, in several buckets."
_PARTS = "{} ranks that each hold a part of every parameter train as one process on the joined batch does."
_VIEWS = "Gradients that are views into their buckets are those that ranks average, without a copy."
_ONCE = "Gradients accumulated without exchange and exchanged once are those of the joined batch."
_SMALL = partial(Replicated, bucket_mb=SMALL_BUCKET)

TECHNIQUES: tuple[Technique, ...] = (
    *(DataParallel(f"ddp-{world}", world, _SMALL, _EQUAL.format(world), buckets=True) for world in (2, 3)),
    BucketViews("ddp-bucket-view", 2, partial(_SMALL, views=True), _VIEWS, buckets=True),
    Accumulated("ddp-no-sync", 2, Accumulating, _ONCE),
    *(Sharded(name, world, FullySharded, _PARTS.format(world), FSDP) for name, world in (("fsdp2", 2), ("fsdp2-3", 3))),
)
