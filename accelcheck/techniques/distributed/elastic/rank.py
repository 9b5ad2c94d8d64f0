"""Program of each rank of an elastic job.

A rank may be ended at any time, and another one be started in its place, in a world of another size. So every training
continues from its newest snapshot, and a step gives the same bits in a world of any size: the batch has a fixed number
of shares, each has its own backward pass, and their gradients are added up in one order.

Messages in the job's `Mailbox`: ``device``; for training 0, ``task-0`` and ``answer-0``; ``victim-0``, the process that
is about to be killed; ``wanted-0-2``, the number of ranks that step 2 waits for; and the folder ``snapshots-0``.
"""

import datetime as dt
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from accelcheck.core import imports
from accelcheck.core.processes import Mailbox, polls
from accelcheck.devices.base import Device
from accelcheck.techniques.distributed.shards import by_samples, shards
from accelcheck.techniques.processes.evidence import program_on
from accelcheck.techniques.snapshots.files import Snapshots
from accelcheck.techniques.snapshots.stepwise import StepwiseTraining
from accelcheck.workloads.base import Problem, Program
from accelcheck.workloads.signatures import tensors_in
from accelcheck.workloads.states import pack, unpack

SHARES = 6
"""Number of shares of a batch: 2 and 3 ranks get equal numbers of them."""
PATIENCE = 120.0
"""Seconds that ranks wait for each other, or for a world of another size: longer than the start of Python."""

LINGER = 1.0
"""Seconds that a rank waits after it has lost another one, so that torchrun reports the lost one first."""


@dataclass(frozen=True)
class TrainingTask:
    """Training for all ranks: the problem is on the CPU, in the storage dtype.

    Sums depend on the number of torch's `threads` in each rank. A snapshot follows `every` so many steps; the last rank
    is killed during the step `victim`, at the first attempt, none if negative. Each step waits for as many ranks as
    `worlds` has for it, which is empty if none waits.
    """

    problem: Problem
    dtype: torch.dtype
    seed: int
    threads: int
    every: int = 1
    victim: int = -1
    worlds: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainingReport:
    """Report of rank 0 on a training: the `state` of the `StepwiseTraining` at the end, on the CPU.

    `worlds` has the number of ranks that took each step, without attempts that were lost, `starts` the first step of
    each group of ranks; `restarts` counts those by torchrun after failures. `pid` is the process, `place` the device
    type of its parameters; `strays` counts the operators that the backend ran on the CPU, by name.
    """

    state: Mapping[str, Any]
    worlds: tuple[int, ...]
    starts: tuple[int, ...]
    restarts: int
    pid: int
    place: str
    strays: Mapping[str, int]


class SharedBackward:
    """Backward pass of a step that ranks share: see `accelcheck.workloads.base.Program.backpropagate`.

    `between` is called with the step's number, after this rank's own part and before the collective.
    """

    def __init__(self, program: Program, between: Callable[[int], None]) -> None:
        self.program = program
        self.between = between

    def __call__(self, step: int) -> Tensor:
        program = self.program
        count = min([SHARES, *map(len, tensors_in(program.target))])
        parts = shards(program.inputs, program.target, count)
        parameters = [parameter for parameter in program.module.parameters() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in parameters]
        # A row for each share: its gradient and, last, its loss. Other ranks' rows are 0, which changes no sum.
        rows = torch.zeros(count, sum(sizes) + 1)
        own = torch.arange(count).tensor_split(distributed.get_world_size())[distributed.get_rank()]
        for index in own.tolist():
            for parameter in parameters:
                parameter.grad = None
            loss = program.training_loss(*parts[index])
            loss.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            row = torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach().reshape(1)])
            program.synchronize()  # a lazy device would compile the shares of a rank together, with other rounding
            rows[index] = row.cpu()
        self.between(step)
        distributed.all_reduce(rows)
        weights = torch.tensor(by_samples([len(part) for _, part in parts]))
        *pieces, mean = torch.split((weights[:, None] * rows).sum(0), [*sizes, 1])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).to(parameter)
        return mean.squeeze().to(parameters[0].device)


class Rank:
    """Part of this process in one training: the task of a number in the job's mailbox."""

    def __init__(self, mailbox: Mailbox, number: int, device: Device) -> None:
        self.mailbox, self.number, self.device = mailbox, number, device
        self.task: TrainingTask = mailbox.take(f"task-{number}")
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.worlds: list[int] = []
        self.starts: list[int] = []

    def train(self) -> TrainingReport:
        """Trains from the newest snapshot, or from the beginning, to the end. Raises a RuntimeError if a rank left."""
        task = self.task
        torch.set_num_threads(task.threads)
        self.device.seed(task.seed)
        self.device.reset_fallbacks()
        program = program_on(self.device, task.problem, task.dtype, task.seed)
        program.backpropagate = SharedBackward(program, self._fall)
        session = StepwiseTraining(program)
        snapshots = Snapshots(self.mailbox.folder / f"snapshots-{self.number}")
        # All ranks find the same newest snapshot, because none writes before all have met.
        if (latest := snapshots.latest()) is not None:
            session.load(latest.state["training"])
            self.worlds, self.starts = latest.state["worlds"], latest.state["starts"]
        self.starts.append(session.step)
        while session.step < program.steps:
            self._meet(session.step)
            session.take()
            self.worlds.append(self.world)
            if self.rank == 0 and session.step % task.every == 0:
                state = {"training": session.state(), "worlds": self.worlds, "starts": self.starts}
                snapshots.save(session.step, state)
        return TrainingReport(
            state=unpack(pack(session.state())),
            worlds=tuple(self.worlds),
            starts=tuple(self.starts),
            restarts=self.restarts,
            pid=os.getpid(),
            place=next(program.module.parameters()).device.type,
            strays=dict(self.device.fallbacks()),
        )

    def _fall(self, step: int) -> None:
        """Kills the victim by SIGKILL, as the kernel does when memory is short, so that nothing is cleaned up."""
        if step == self.task.victim and self.restarts == 0 and self.rank == self.world - 1:
            self.mailbox.put(f"victim-{self.number}", os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)

    def _meet(self, step: int) -> None:
        """Waits until the world has the size that the step demands; these ranks end when it changes.

        Raises a RuntimeError, of the collective, if a rank has left, and a TimeoutError if the world did not change.
        """
        if not self.task.worlds or self.task.worlds[step] == self.world:
            return
        if self.rank == 0:
            self.mailbox.put(f"wanted-{self.number}-{step}", self.task.worlds[step])
        for _ in polls(PATIENCE):
            distributed.all_reduce(torch.zeros(1))
            time.sleep(0.02)
        raise TimeoutError(
            f"step {step}: expected a world of {self.task.worlds[step]} ranks, after {PATIENCE:g} s it is {self.world}"
        )


def main(arguments: Sequence[str]) -> None:
    """Joins the other ranks, then does all tasks, from the first without an answer, until the process is ended.

    Any exception is reported to the mailbox, whose folder is given, and raised `LINGER` s later.
    """
    mailbox = Mailbox(Path(arguments[0]))
    try:
        imports.load()
        device: Device = mailbox.take("device")
        device.open()
        distributed.init_process_group("gloo", timeout=dt.timedelta(seconds=PATIENCE))
        first = next(number for number in itertools.count() if not mailbox.has(f"answer-{number}"))
        for number in itertools.count(first):
            mailbox.coming(f"task-{number}")
            with device.strict_float32():
                answer = Rank(mailbox, number, device).train()
            if distributed.get_rank() == 0:
                mailbox.put(f"answer-{number}", answer)
    except BaseException as error:
        mailbox.raised(os.environ["RANK"], error)
        time.sleep(LINGER)
        raise
