"""Training that ranks share: the job, each rank's part in it, and its report. It runs in the ranks."""

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, distributed

from accelcheck.core.case import Mode
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import TorchDispatchMode, get_current_dispatch_mode_stack
from accelcheck.techniques.distributed.shards import shards
from accelcheck.techniques.processes.evidence import program_on
from accelcheck.workloads.base import Problem, Program, Result, batches_to, to

HANDED = {"allreduce_": 0, "allgather_": 1, "_allgather_base_": 1, "_reduce_scatter_base_": 1}
"""Collectives that carry gradients and parameters (``c10d::``), and the index of the argument that a rank sends."""


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Counts the collectives that Python and DistributedDataParallel's C++ call, by name, and the bytes that they send.

    Callbacks of hooks may run in threads of the process group, without a dispatch mode: calls of
    `torch.distributed.all_reduce` are counted there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.calls: Counter[str] = Counter()
        self.sent = 0

    def __enter__(self) -> Self:
        self._all_reduce = distributed.all_reduce
        distributed.all_reduce = self._called
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        distributed.all_reduce = self._all_reduce

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        library, _, name = func.name().partition(".")[0].partition("::")
        if library == "c10d" and name in HANDED:
            self._count(name, args[HANDED[name]])
        return func(*args, **(kwargs or {}))

    def _called(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not get_current_dispatch_mode_stack():
            self._count("allreduce_", tensor)
        return self._all_reduce(tensor, *args, **kwargs)

    def _count(self, name: str, handed: Tensor | Sequence[Tensor]) -> None:
        self.calls[name] += 1
        self.sent += sum(tensor.nbytes for tensor in ([handed] if isinstance(handed, Tensor) else handed))


@dataclass(frozen=True)
class RankReport:
    """Report of one rank on a training: process id, and backend of its collectives in torch.distributed's spelling.

    Rank 0 has the whole `result`, on the CPU, others an empty one. `digests` are those of each parameter's bytes after
    the training; `calls` has the numbers of collectives of each step, by name, `sent` the bytes of each step, and
    `facts` those of the strategy.
    """

    pid: int
    backend: str
    result: Result
    digests: Mapping[str, str]
    calls: Sequence[Mapping[str, int]]
    sent: Sequence[int]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Strategy:
    """Division of a training among ranks: each gets a pickled copy for it. The class must be at the top of a module."""

    def prepare(self, program: Program) -> None:
        """Changes a rank's program, which has the whole module and the rank's own part of the batch."""
        raise NotImplementedError(f"{type(self).__name__}.prepare: say how the module is shared")

    def backpropagate(self, program: Program, weight: float) -> Tensor:
        """Runs the backward pass of a step; returns the loss of the rank's part of the batch, times `weight`.

        With this factor, the mean over ranks is the mean over the joined batch, also for uneven parts.
        """
        loss = program.training_loss(program.inputs, program.target) * weight
        loss.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
        return loss.detach()

    def whole(self, tensor: Tensor) -> Tensor:
        """Joins a tensor of the result from each rank's part; called by all ranks."""
        return tensor

    def facts(self, program: Program) -> Mapping[str, Any]:
        """Returns evidence after the training that it was shared in this way: plain numbers and words."""
        return {}


@dataclass(frozen=True)
class TrainingJob:
    """Training for all ranks: problem on the CPU in the storage dtype, with the whole batch, and each rank's seed."""

    problem: Problem
    dtype: torch.dtype
    seed: int
    strategy: Strategy

    @classmethod
    def of(cls, program: Program, strategy: Strategy) -> Self:
        """Makes the job of a program's training, from its current parameters."""
        tensors = [part for part in (*program.module.parameters(), *program.inputs) if isinstance(part, Tensor)]
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        problem = Problem(
            copy.deepcopy(program.module).cpu(),
            tuple(to(value, "cpu", dtype) for value in program.inputs),
            target=to(program.target, "cpu", dtype),
            loss=program.loss,
            optimizer=program.optimizer,
            steps=program.steps,
            further=batches_to(program.further, "cpu", dtype),
        )
        return cls(problem, dtype, program.seed, strategy)

    def run(self, device: Device) -> RankReport:
        """Does this rank's part; raises `Unsupported` if the batch cannot be divided."""
        rank, world = distributed.get_rank(), distributed.get_world_size()
        parts = shards(self.problem.inputs, self.problem.target, world)
        inputs, target = parts[rank]
        weight = world * len(target) / sum(len(part) for _, part in parts)
        further = tuple(shards(*batch, world)[rank] for batch in self.problem.further)
        problem = replace(self.problem, inputs=inputs, target=target, further=further)
        program = program_on(device, problem, self.dtype, self.seed)
        traffic: list[Traffic] = []

        def step(number: int) -> Tensor:
            with Traffic() as seen:
                loss = self.strategy.backpropagate(program, weight)
            traffic.append(seen)
            distributed.all_reduce(loss)
            return loss / world

        program.backpropagate = step
        device.seed(self.seed)
        with device.strict_float32():
            self.strategy.prepare(program)
            trained = program.run(Mode.TRAIN)
        result = {path: self.strategy.whole(tensor).cpu() for path, tensor in trained.items()}
        return RankReport(
            pid=os.getpid(),
            backend=distributed.get_backend(),
            result=result if rank == 0 else {},
            digests={path: digest(tensor) for path, tensor in result.items() if path.startswith("parameter:")},
            calls=[dict(seen.calls) for seen in traffic],
            sent=[seen.sent for seen in traffic],
            facts=self.strategy.facts(program),
        )


def digest(tensor: Tensor) -> str:
    """Computes a digest of a tensor's bits."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()
