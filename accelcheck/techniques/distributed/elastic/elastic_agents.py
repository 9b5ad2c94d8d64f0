"""Agents: several ``torchrun`` on this machine that form one elastic job, as on several machines; they come and go."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed

from accelcheck.techniques.distributed.elastic.mailbox import ElasticMailbox
from accelcheck.techniques.processes.torchrun import RanksError, Torchrun, looks, put, take

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accelcheck.devices.base import Device
    from accelcheck.techniques.distributed.elastic.mailbox import TrainingReport, TrainingTask

PATIENCE = 300.0
"""Seconds that a training may take: each change of the world starts Python anew in every rank."""

CONF: Mapping[str, int] = {
    "is_host": 0,  # the store of the rendezvous is in this process: every agent may go
    "last_call_timeout": 2,  # seconds to wait for more agents than are needed: those that come look every second
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,  # intervals of silence after which an agent is gone
}
"""Of the rendezvous. Torch's own waits are for machines that boot."""

ENVIRON = {
    # Each round with a store of its own. A store that outlives a round gives new ranks the addresses of old ones:
    # https://github.com/pytorch/pytorch/issues/135712
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}

_FAILED = re.compile(r"exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
"""In torchrun's output, of the rank that failed first."""


@contextlib.contextmanager
def c10d() -> Iterator[list[str]]:
    """A rendezvous in a store of this process, as options of torchrun."""
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch's annotations leave it out
    try:
        yield ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}"]
    finally:
        del store


@contextlib.contextmanager
def etcd() -> Iterator[list[str]]:
    """A rendezvous in an etcd server, which is started, and ends with the context."""
    from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer

    with tempfile.TemporaryDirectory(prefix="accelcheck-etcd-") as folder:
        log = Path(folder) / "log"
        server = EtcdServer(str(Path(folder) / "data"))
        with log.open("w") as out:
            server.start(stderr=out)
        try:
            yield ["--rdzv-backend=etcd-v2", f"--rdzv-endpoint={server.get_endpoint()}"]
        finally:
            server.stop()


class ElasticAgents:
    """One elastic job.

    Args:
        rendezvous: Where its agents meet.
        device: What the ranks compute on.
        least, most: Number of agents.
        ranks: Of each agent.
        restarts: Failures after which an agent starts its ranks again.

    Attributes:
        running: Agents, in the order in which they came.
        killed: Those that are no more.
    """

    def __init__(
        self,
        rendezvous: contextlib.AbstractContextManager[list[str]],
        device: Device,
        *,
        least: int,
        most: int,
        ranks: int,
        restarts: int,
    ) -> None:
        self._held = contextlib.ExitStack()
        self.running: list[Torchrun] = []
        self.killed: list[Torchrun] = []
        self._tasks = 0
        try:
            self._folder = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix="accelcheck-elastic-")))
            self.mailbox = ElasticMailbox(self._folder)
            put(self.mailbox.device, device)
            self._options = [
                *self._held.enter_context(rendezvous),
                f"--rdzv-conf={','.join(f'{key}={value}' for key, value in CONF.items())}",
                "--rdzv-id=accelcheck",
                f"--nnodes={least}:{most}",
                f"--nproc-per-node={ranks}",
                f"--max-restarts={restarts}",
                "--local-addr=localhost",
                f"--log-dir={self._folder / 'logs'}",  # or torchrun leaves one behind
                "--monitor-interval=0.1",
            ]
            for _ in range(least):
                self._start()
        except BaseException:
            self.close()
            raise

    def train(self, task: TrainingTask) -> TrainingReport:
        """What the ranks answer. Agents come and go as the task's steps want it.

        Raises:
            RanksError: A rank raised, an agent ended, or nothing came; the message has their output.
            TypeError: The task cannot be pickled.
        """
        number = self._tasks
        self._tasks += 1
        put(self.mailbox.task(number), task)
        for _ in looks(PATIENCE):
            if self.mailbox.answer(number).exists():
                answer: TrainingReport = take(self.mailbox.answer(number))
                return answer
            if not all(agent.running for agent in self.running):
                raise RanksError(f"an agent ended, expected an answer to task {number}; {self._said()}")
            for step, _ in enumerate(task.worlds):
                request = self.mailbox.wanted(number, step)
                if request.exists():
                    self._resize(take(request))
                    request.unlink()
        raise RanksError(f"no answer to task {number} after {PATIENCE:g} s; {self._said()}")

    def victim(self) -> tuple[int, int] | None:
        """Of the last task, the process that was killed, and its exit code as torchrun reports it. None: nobody was."""
        path = self.mailbox.victim(self._tasks - 1)
        if not path.exists():
            return None
        pid: int = take(path)
        codes = {int(of): int(code) for agent in self.running for code, of in _FAILED.findall(agent.log.read_text())}
        return pid, codes.get(pid, 0)

    def close(self) -> None:
        """End all agents and their ranks, and remove what they left."""
        for agent in self.running:
            agent.kill(signal.SIGTERM)  # all at once: each waits for its ranks
        for agent in (*self.running, *self.killed):
            agent.close()
        self.running.clear()
        self._held.close()

    def _start(self) -> None:
        log = self._folder / f"log-{len(self.running) + len(self.killed)}"
        self.running.append(
            Torchrun(self._options, "accelcheck.techniques.distributed.elastic.rank", [str(self._folder)], log, ENVIRON)
        )

    def _resize(self, count: int) -> None:
        """Start agents, or kill the youngest, until there are so many."""
        while len(self.running) < count:
            self._start()
        while len(self.running) > count:
            agent = self.running.pop()
            agent.kill()
            self.killed.append(agent)

    def _said(self) -> str:
        printed = [f"agent {number} said:\n{agent.said()}" for number, agent in enumerate(self.running)]
        raised = [f"{path.name} of a rank:\n{take(path)}" for path in sorted(self._folder.glob("trouble-*"))]
        return "\n".join([*printed, *raised])
