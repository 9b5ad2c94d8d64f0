"""Elastic training: ranks are killed, agents come and go, and the training ends as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import distributed

from accelcheck.core.capability import Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.processes import GRACE
from accelcheck.techniques.base import Technique
from accelcheck.techniques.distributed.elastic.elastic_agents import ElasticAgents, c10d, etcd
from accelcheck.techniques.distributed.elastic.mailbox import TrainingTask
from accelcheck.techniques.observe import unwatched
from accelcheck.techniques.processes.evidence import repeated, shareable
from accelcheck.techniques.snapshots.stepwise import adopted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.distributed.elastic.mailbox import TrainingReport
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Result

JOB = "elastic job"
"""Key in `Program.extras` of the `DisturbedTraining` of a program."""

_BINARY = "TORCHELASTIC_ETCD_BINARY_PATH"


class DisturbedTraining:
    """What trains one program: the first time it is disturbed, afterwards not.

    Attributes:
        elastic_agents: Those that train.
        disturb: Makes a disturbed task of a quiet one.
        task: The first one, as it is when nothing disturbs it.
        answer: To it, disturbed.
        last: Answer to the last one; None until a judged run has trained.
        victim: The process that was killed in it, and its exit code.
    """

    def __init__(self, elastic_agents: ElasticAgents, disturb: Callable[[TrainingTask], TrainingTask]) -> None:
        self.elastic_agents = elastic_agents
        self.disturb = disturb
        self.task: TrainingTask | None = None
        self.answer: TrainingReport | None = None
        self.last: TrainingReport | None = None
        self.victim: tuple[int, int] | None = None

    def elsewhere(self, program: Program, mode: Mode) -> Result:
        """See `Program.elsewhere`."""
        with unwatched():
            problem = program.problem()
        dtype = next(problem.module.parameters()).dtype
        task = TrainingTask(problem, dtype, program.seed, torch.get_num_threads())
        answer = self.last = self.elastic_agents.train(self.disturb(task) if self.answer is None else task)
        if self.answer is None:
            self.task, self.answer, self.victim = task, answer, self.elastic_agents.victim()
        return adopted(program, answer.state["module"], answer.state["losses"])


class Elastic(Technique):
    """Ranks under torchrun, of which some are lost in the first training. Those after it run in what came out of it.

    They find the processes that were started again, and the rerun shows that the disturbance changed no bit.
    """

    family = "elastic"
    timed = False
    source = "https://docs.pytorch.org/docs/stable/elastic/run.html"
    level = 2
    modes = frozenset({Mode.TRAIN})
    requires = frozenset({"training"})
    # Each share of the batch is normalised by itself: other results, by design. Its ranks take the same batch in each step.
    excludes = frozenset({"batchnorm"})

    def __init__(self) -> None:
        self._held = ExitStack()

    def capability(self, device: Device) -> Capability:
        """Ranks compute on the device, all on the same, and meet over gloo on the CPU."""
        if not (distributed.is_available() and distributed.is_gloo_available()):
            return unsupported(
                Code.WRONG_VERSION, f"torch {torch.__version__} is built without torch.distributed's gloo"
            )
        return shareable(device)

    def elastic_agents(self, device: Device) -> ElasticAgents:
        """The job that trains."""
        raise NotImplementedError(f"{type(self).__name__}.elastic_agents: start them")

    def disturb(self, task: TrainingTask) -> TrainingTask:
        """What is lost, and when."""
        raise NotImplementedError(f"{type(self).__name__}.disturb: say what is lost")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        elastic_agents = self.elastic_agents(device)
        self._held.callback(elastic_agents.close)
        job = program.extras[JOB] = DisturbedTraining(elastic_agents, self.disturb)
        program.elsewhere = job.elsewhere
        program.resets.append(lambda: setattr(job, "last", None))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        job: DisturbedTraining = program.extras[JOB]
        if job.answer is None or job.task is None or job.last is None:
            yield Evidence("trainings by the elastic job >= 1", 0, engaged=False)
            return
        own = os.getpid()
        yield Evidence(f"process that ended the training is another than {own}", job.last.pid, job.last.pid != own)
        yield Evidence(f"ranks computed on {device.type}", job.last.place, engaged=job.last.place == device.type)
        yield Evidence.stayed(job.last.strays, device.name, "in the ranks")
        if job.last is not job.answer:  # nothing was lost in it
            return
        yield from self.lost(job, job.answer, program.steps)
        claim = "parts of the state at the end that differ from those of a training of which nothing was lost = 0"
        elastic_agents, task = job.elastic_agents, job.task
        yield repeated(claim, job.answer.state, lambda: elastic_agents.train(task).state, device)

    def lost(self, job: DisturbedTraining, answer: TrainingReport, steps: int) -> Iterable[Evidence]:
        """What shows that something was lost, and made good."""
        raise NotImplementedError(f"{type(self).__name__}.lost: say what shows it")

    def finish(self) -> None:
        self._held.close()


class Restart(Elastic):
    """One of two ranks is killed in the middle of a step; torchrun starts both again, from the last snapshot."""

    name = "elastic-restart"
    promise = "When a rank is killed, torchrun starts the ranks again, and from the last snapshot all ends the same."

    def elastic_agents(self, device: Device) -> ElasticAgents:
        return ElasticAgents(self.rendezvous(), device, least=1, most=1, ranks=2, restarts=1)

    def rendezvous(self) -> AbstractContextManager[list[str]]:
        """Where agents meet."""
        return c10d()

    def disturb(self, task: TrainingTask) -> TrainingTask:
        # In the last step, and with a snapshot of every second: a whole step is done again besides.
        return replace(task, every=2, victim=task.problem.steps - 1)

    def lost(self, job: DisturbedTraining, answer: TrainingReport, steps: int) -> Iterable[Evidence]:
        pid, code = job.victim or (0, 0)
        yield Evidence(
            f"exit code of the rank that was killed, as torchrun reports it: {int(-signal.SIGKILL)}",
            f"{code} of process {pid}",
            engaged=code == -signal.SIGKILL,
        )
        yield Evidence("restarts by torchrun = 1", answer.restarts, engaged=answer.restarts == 1)
        last = (steps - 1) // 2 * 2
        yield Evidence(
            f"first steps of the groups of ranks: 0, {last}",
            _listed(answer.starts),
            answer.starts == (0, last) and last > 0,
        )
        yield Evidence(
            f"ranks that took each step: {_listed([2] * steps)}", _listed(answer.worlds), answer.worlds == (2,) * steps
        )


class RestartOverEtcd(Restart):
    """As `Restart`, and the agents meet in etcd."""

    name = "elastic-etcd"
    promise = "With the rendezvous in an etcd server, a killed rank costs no more than without."
    source = "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html"
    packages = MappingProxyType({"etcd": "pip install python-etcd"})

    def capability(self, device: Device) -> Capability:
        found = super().capability(device)
        if not found.ok or shutil.which(os.environ.get(_BINARY, "etcd")):
            return found
        return unavailable(
            Code.NO_PACKAGE,
            "there is no etcd server",
            f"install etcd 3.4 or 3.5 (apt-get install etcd-server), which has the v2 interface, or set {_BINARY}",
        )

    def rendezvous(self) -> AbstractContextManager[list[str]]:
        return etcd()


class Resize(Elastic):
    """Two agents of one rank each; a third comes after the first step, and is killed before the last."""

    name = "elastic-resize"
    promise = "Agents that join or leave change the number of ranks, and not what the training ends with."

    def elastic_agents(self, device: Device) -> ElasticAgents:
        return ElasticAgents(c10d(), device, least=2, most=3, ranks=1, restarts=3)

    def disturb(self, task: TrainingTask) -> TrainingTask:
        steps = task.problem.steps
        return replace(task, worlds=tuple(3 if 0 < step < steps - 1 else 2 for step in range(steps)))

    def lost(self, job: DisturbedTraining, answer: TrainingReport, steps: int) -> Iterable[Evidence]:
        worlds = [2, *[3] * (steps - 2), 2]
        yield Evidence(
            f"ranks that took each step: {_listed(worlds)}", _listed(answer.worlds), answer.worlds == tuple(worlds)
        )
        starts = (0, 1, steps - 1)
        yield Evidence(
            f"first steps of the groups of ranks: {_listed(starts)}", _listed(answer.starts), answer.starts == starts
        )
        ends = [end.code for agent in job.elastic_agents.killed if (end := agent.wait(GRACE))]
        yield Evidence(
            f"exit codes of agents that left: {-signal.SIGKILL}", _listed(ends), engaged=ends == [-signal.SIGKILL]
        )
        yield Evidence(
            "agents that stayed = 2", len(job.elastic_agents.running), engaged=len(job.elastic_agents.running) == 2
        )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


TECHNIQUES: tuple[Technique, ...] = (Restart(), RestartOverEtcd(), Resize())
