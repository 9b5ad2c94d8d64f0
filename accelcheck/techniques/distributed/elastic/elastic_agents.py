"""Agents: several ``torchrun`` on this machine that form one elastic job, join and leave, as on several machines."""

import contextlib
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import distributed

from accelcheck.core.files import scratch
from accelcheck.core.processes import GRACE, Child, ChildError, Mailbox
from accelcheck.devices.base import Device
from accelcheck.techniques.distributed.elastic.rank import TrainingReport, TrainingTask
from accelcheck.techniques.processes.torchrun import torchrun

Rendezvous = contextlib.AbstractContextManager[list[str]]
"""Context in which agents meet; it gives their options of torchrun."""
PATIENCE = 300.0
"""Seconds that a training may take: at each change of the world, every rank restarts Python."""

CONF: Mapping[str, int] = {
    "is_host": 0,  # this process holds the store of the rendezvous: every agent may leave
    "last_call_timeout": 2,  # seconds to wait for more agents than needed: new ones look every second
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,  # intervals of silence after which an agent counts as lost
}
"""Configuration of the rendezvous. torch's default waits are for machines that boot."""

# A store for each rendezvous. One that is used again gives new ranks the addresses of old ones:
# https://github.com/pytorch/pytorch/issues/135712
ENVIRON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

_FAILED = re.compile(r"exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
"""Pattern of torchrun's output: exit code and process of the rank that failed first."""


@contextlib.contextmanager
def c10d() -> Iterator[list[str]]:
    """Makes a rendezvous in a store of this process; gives its options of torchrun."""
    # mypy: torch's annotations leave the class out.
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    try:
        yield ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}"]
    finally:
        del store


@contextlib.contextmanager
def etcd() -> Iterator[list[str]]:
    """Makes a rendezvous in an etcd server, which runs while the context is active; gives its options of torchrun."""
    from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer

    with tempfile.TemporaryDirectory(prefix="etcd-", dir=scratch()) as folder:
        log = Path(folder) / "log"
        server = EtcdServer(str(Path(folder) / "data"))
        with log.open("w") as out:
            server.start(stderr=out)
        try:
            yield ["--rdzv-backend=etcd-v2", f"--rdzv-endpoint={server.get_endpoint()}"]
        finally:
            server.stop()


class ElasticAgents:
    """Elastic job of `least` to `most` agents with so many ranks each, which meet by options of torchrun.

    An agent restarts its ranks after at most `restarts` failures. Agents are `running`, in the order of their start, or
    were `killed`.
    """

    def __init__(
        self, rendezvous: Rendezvous, device: Device, *, least: int, most: int, ranks: int, restarts: int
    ) -> None:
        self._held = contextlib.ExitStack()
        self.running: list[Child] = []
        self.killed: list[Child] = []
        self._tasks = 0
        try:
            self._folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="elastic-", dir=scratch())))
            self.mailbox = Mailbox(self._folder)
            self.mailbox.put("device", device)
            self._options = [
                *self._held.enter_context(rendezvous),
                f"--rdzv-conf={','.join(f'{key}={value}' for key, value in CONF.items())}",
                "--rdzv-id=accelcheck",
                f"--nnodes={least}:{most}",
                f"--nproc-per-node={ranks}",
                f"--max-restarts={restarts}",
                "--local-addr=localhost",
                f"--log-dir={self._folder / 'logs'}",  # otherwise torchrun leaves a folder behind
                "--monitor-interval=0.1",
            ]
            for _ in range(least):
                self._start()
        except BaseException:
            self.close()
            raise

    def train(self, task: TrainingTask) -> TrainingReport:
        """Returns the ranks' report. Agents are started and killed as the task's steps demand.

        Raises `ChildError`, with their output, if a rank raised, an agent ended, or no report came, and a TypeError if
        the task cannot be pickled.
        """
        number = self._tasks
        self._tasks += 1
        self.mailbox.put(f"task-{number}", task)

        def over() -> bool:
            for request in (f"wanted-{number}-{step}" for step, _ in enumerate(task.worlds)):
                if self.mailbox.has(request):
                    self._resize(self.mailbox.take(request))
                    self.mailbox.remove(request)
            return not all(agent.running for agent in self.running)

        answers = self.mailbox.wait([f"answer-{number}"], PATIENCE, over)
        if answers is None:
            why = f"none after {PATIENCE:g} s" if all(agent.running for agent in self.running) else "an agent ended"
            raise ChildError(f"expected an answer to task {number}: {why}\n{self._output()}")
        report: TrainingReport = answers[0]
        return report

    def victim(self) -> tuple[int, int] | None:
        """Returns the process killed in the last task, and its exit code by torchrun; None if none was killed."""
        name = f"victim-{self._tasks - 1}"
        if not self.mailbox.has(name):
            return None
        pid: int = self.mailbox.take(name)
        codes = {int(of): int(code) for agent in self.running for code, of in _FAILED.findall(agent.output())}
        return pid, codes.get(pid, 0)

    def close(self) -> None:
        """Ends all agents and their ranks, and removes their files."""
        for agent in self.running:
            agent.signal(signal.SIGTERM)  # to all at once: each waits for its ranks
        for agent in (*self.running, *self.killed):
            agent.end(GRACE)
        self.running.clear()
        self._held.close()

    def _start(self) -> None:
        function = "accelcheck.techniques.distributed.elastic.rank:main"
        self.running.append(torchrun(self._options, function, [self._folder], ENVIRON))

    def _resize(self, count: int) -> None:
        """Starts agents, or kills the newest ones, until `count` run."""
        while len(self.running) < count:
            self._start()
        while len(self.running) > count:
            agent = self.running.pop()
            agent.signal(signal.SIGKILL)
            self.killed.append(agent)

    def _output(self) -> str:
        printed = [f"agent {number} printed last:\n{agent.last()}" for number, agent in enumerate(self.running)]
        raised = [f"rank {rank} raised:\n{trace}" for rank, _, trace in self.mailbox.errors()]
        return "\n".join([*printed, *raised])
