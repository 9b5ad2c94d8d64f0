"""Elastic training: ranks are killed, agents join and leave, and the training ends as an undisturbed one."""

import os
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import distributed

from accelcheck.core.capability import Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.processes import GRACE
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Holding, Technique
from accelcheck.techniques.distributed.data_parallel import listed
from accelcheck.techniques.distributed.elastic.elastic_agents import ElasticAgents, c10d, etcd
from accelcheck.techniques.distributed.elastic.rank import TrainingReport, TrainingTask
from accelcheck.techniques.observe import Log, exactly, unwatched
from accelcheck.techniques.processes.evidence import repeated, shareable
from accelcheck.techniques.snapshots.stepwise import adopted
from accelcheck.workloads.base import Program, Result

JOB = "elastic job"
"""Key in `Program.extras` of the `DisturbedTraining` of a program."""

_BINARY = "TORCHELASTIC_ETCD_BINARY_PATH"


class DisturbedTraining:
    """Trainings of one program: the first one is disturbed, later ones are not.

    `task` is the first one, undisturbed, and `answer` the report on it, disturbed; `last` is the report on the last,
    None until a judged run has trained. `victim` is the process that was killed in the first task, with its exit code.
    """

    def __init__(self, elastic_agents: ElasticAgents, disturb: Callable[[TrainingTask], TrainingTask]) -> None:
        self.elastic_agents = elastic_agents
        self.disturb = disturb
        self.task: TrainingTask | None = None
        self.answer: TrainingReport | None = None
        self.last: TrainingReport | None = None
        self.victim: tuple[int, int] | None = None

    def elsewhere(self, program: Program, mode: Mode) -> Result:
        """Trains the program: see `Program.elsewhere`."""
        with unwatched():
            problem = program.problem()
        dtype = next(problem.module.parameters()).dtype
        task = TrainingTask(problem, dtype, program.seed, torch.get_num_threads())
        answer = self.last = self.elastic_agents.train(self.disturb(task) if self.answer is None else task)
        if self.answer is None:
            self.task, self.answer, self.victim = task, answer, self.elastic_agents.victim()
        return adopted(program, answer.state["module"], answer.state["losses"])


class Elastic(Holding):
    """Training under torchrun whose first run loses ranks. Reruns in the restarted ones show that no bit changed."""

    family = "elastic"
    timed = False
    source = "https://docs.pytorch.org/docs/stable/elastic/run.html"
    level = 2
    modes = frozenset({Mode.TRAIN})
    requires = frozenset({"training"})
    # Each share of the batch is normalised by itself: other results, by design.
    excludes = frozenset({"batchnorm"})
    rendezvous = staticmethod(c10d)
    """Function that makes the context in which agents meet."""
    counts: Mapping[str, int]
    """Numbers of agents, of ranks of each, and of restarts: see `ElasticAgents`."""

    def capability(self, device: Device) -> Capability:
        """Tells whether ranks can share the device and meet over gloo on the CPU."""
        reason = f"torch {torch.__version__} is built without torch.distributed's gloo"
        gloo = distributed.is_available() and distributed.is_gloo_available()
        return shareable(device) if gloo else unsupported(Code.WRONG_VERSION, reason)

    def disturb(self, task: TrainingTask) -> TrainingTask:
        """Makes a disturbed task of a quiet one: sets the ranks or agents that are lost, and when."""
        raise NotImplementedError(f"{type(self).__name__}.disturb: say what is lost")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        elastic_agents = ElasticAgents(self.rendezvous(), device, **self.counts)
        self.held.callback(elastic_agents.close)
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
        """Yields evidence that ranks or agents were lost, and that the training went on."""
        raise NotImplementedError(f"{type(self).__name__}.lost: say what shows it")


class Restart(Elastic):
    """Loss of one of two ranks in the middle of a step; torchrun starts both again, from the last snapshot."""

    name = "elastic-restart"
    promise = "When a rank is killed, torchrun starts the ranks again, and from the last snapshot all ends the same."
    counts = MappingProxyType({"least": 1, "most": 1, "ranks": 2, "restarts": 1})

    def disturb(self, task: TrainingTask) -> TrainingTask:
        # In the last step, with a snapshot every two steps: a whole step is repeated besides.
        return replace(task, every=2, victim=task.problem.steps - 1)

    def lost(self, job: DisturbedTraining, answer: TrainingReport, steps: int) -> Iterable[Evidence]:
        pid, code = job.victim or (0, 0)
        claim = f"exit code of the rank that was killed, as torchrun reports it: {int(-signal.SIGKILL)}"
        yield Evidence(claim, f"{code} of process {pid}", engaged=code == -signal.SIGKILL)
        yield exactly("restarts by torchrun", answer.restarts, 1)
        last = (steps - 1) // 2 * 2
        claim = f"first steps of the groups of ranks: 0, {last}"
        yield Evidence(claim, listed(answer.starts), engaged=answer.starts == (0, last) and last > 0)
        yield _each("ranks that took each step", answer.worlds, [2] * steps)


class RestartOverEtcd(Restart):
    """Variant of `Restart` whose agents meet in etcd."""

    name = "elastic-etcd"
    promise = "With the rendezvous in an etcd server, a killed rank costs no more than without."
    source = "https://docs.pytorch.org/docs/stable/elastic/rendezvous.html"
    packages = MappingProxyType({"etcd": "pip install python-etcd"})
    rendezvous = staticmethod(etcd)

    def capability(self, device: Device) -> Capability:
        ranks = super().capability(device)
        if not ranks.ok or shutil.which(os.environ.get(_BINARY, "etcd")):
            return ranks
        action = f"install etcd 3.4 or 3.5 (apt-get install etcd-server), which has the v2 interface, or set {_BINARY}"
        return unavailable(Code.NO_PACKAGE, "there is no etcd server", action)


class Resize(Elastic):
    """Job of two agents of one rank each; a third joins after the first step, and is killed before the last."""

    name = "elastic-resize"
    promise = "Agents that join or leave change the number of ranks, and not what the training ends with."
    counts = MappingProxyType({"least": 2, "most": 3, "ranks": 1, "restarts": 3})

    def disturb(self, task: TrainingTask) -> TrainingTask:
        steps = task.problem.steps
        return replace(task, worlds=tuple(3 if 0 < step < steps - 1 else 2 for step in range(steps)))

    def lost(self, job: DisturbedTraining, answer: TrainingReport, steps: int) -> Iterable[Evidence]:
        yield _each("ranks that took each step", answer.worlds, [2, *[3] * (steps - 2), 2])
        yield _each("first steps of the groups of ranks", answer.starts, [0, 1, steps - 1])
        ends = [end.code for agent in job.elastic_agents.killed if (end := agent.wait(GRACE))]
        yield _each("exit codes of agents that left", ends, [-signal.SIGKILL])
        yield exactly("agents that stayed", len(job.elastic_agents.running), 2)


def _each(what: str, numbers: Sequence[int], wanted: Sequence[int]) -> Evidence:
    return Evidence(f"{what}: {listed(wanted)}", listed(numbers), engaged=list(numbers) == wanted)


TECHNIQUES: tuple[Technique, ...] = (Restart(), RestartOverEtcd(), Resize())
