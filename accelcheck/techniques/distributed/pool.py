"""Pool of ranks: processes under ``torchrun`` that are started once, and do one training after the other."""

import atexit
import re
import signal
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelcheck.core.files import scratch
from accelcheck.core.processes import GRACE, LINES, ChildError, Mailbox
from accelcheck.devices.base import Device
from accelcheck.techniques.distributed.strategy import RankReport, TrainingJob
from accelcheck.techniques.processes.torchrun import torchrun

PATIENCE = 120.0
"""Seconds that a job may take, and that a rank waits for the others. A training takes less than one."""
_FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)
"""Pattern of torchrun's report: a failed rank and its exit code, which is negative for a signal."""


class RankPool:
    """Ranks on this machine, each with a device of its own; on the CPU they share it. The device is sent as a pickle.

    `pids` has the process id of each rank. Raises `ChildError`, with their output, if they do not start.
    """

    def __init__(self, device: Device, world: int) -> None:
        self.world = world
        self._jobs = 0
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ranks-", dir=scratch())))
            self._mailbox = Mailbox(folder)
            self._mailbox.put("device", device)
            # Each rank's output goes to files of its own, so that an error can quote the rank that failed.
            self._logs = folder / "logs"
            options = ["--standalone", f"--nproc-per-node={world}", "--redirects=3", f"--log-dir={self._logs}"]
            self._torchrun = torchrun(options, "accelcheck.techniques.distributed.pool_rank:main", [folder])
            held.callback(self._torchrun.end, GRACE)
            self.pids: list[int] = self._awaited([f"pid-{rank}" for rank in range(world)])
            self._held = held.pop_all()

    @property
    def running(self) -> bool:
        """True if it can take a job."""
        return self._torchrun.running

    def train(self, job: TrainingJob) -> list[RankReport]:
        """Runs a job, which is sent as a pickle, and returns the reports, by rank.

        Raises `ChildError`, and closes the pool, if a rank raised, ended or was too slow; the message says which.
        """
        names = [f"answer-{self._jobs}-{rank}" for rank in range(self.world)]
        self._mailbox.put(f"job-{self._jobs}", job)
        try:
            answers: list[RankReport] = self._awaited(names)
        except BaseException:  # an interrupt, too: late answers would be taken for those to the next job
            self.close()
            raise
        self._mailbox.remove(f"job-{self._jobs}", *names)
        self._jobs += 1
        return answers

    def close(self) -> None:
        """Ends the ranks, and removes their files."""
        self._held.close()

    def _awaited(self, names: Sequence[str]) -> list[Any]:
        """Waits for the values that ranks put under these names; raises `ChildError` if one ended or raised."""
        box = self._mailbox
        values = box.wait(names, PATIENCE, lambda: not self.running or bool(box.errors()))
        if values is not None:
            return values
        if self.running and not box.errors():
            missing = ", ".join(name for name in names if not box.has(name))
            raise ChildError(f"no {missing} after {PATIENCE:g} s; torchrun's output:\n{self._torchrun.last()}")
        self._torchrun.wait(GRACE)  # it ends when a rank has ended, and reports which one, and how
        why = self._killed() or self._raised() or f"the ranks ended; torchrun's output:\n{self._torchrun.last()}"
        raise ChildError(why)

    def _killed(self) -> str:
        """Names the rank that a signal ended, with its last output; empty if none. Others may raise because of it."""
        report = _FAILURE.findall(self._torchrun.output())
        signals = [(rank, -int(code)) for rank, code in report if int(code) < 0 and -int(code) != signal.SIGTERM]
        if not signals:
            return ""
        rank, number = signals[0]
        logs = sorted(self._logs.glob(f"*/attempt_*/{rank}/*.log"))
        printed = [line for path in logs for line in path.read_text(errors="replace").splitlines()[-LINES:]]
        head = f"rank {rank} of {self.world} was ended by signal {number}; its last output:"
        return "\n".join([head, *(printed or ["(none)"])])

    def _raised(self) -> str:
        """Lists the exceptions of ranks, the first one with its traceback; empty if there are none."""
        errors = self._mailbox.errors()
        lines = [f"rank {rank} of {self.world} raised {brief}" for rank, brief, _ in errors]
        return "\n".join([*lines, *(trace for *_, trace in errors[:1])])


_pools: dict[tuple[str, int], RankPool] = {}


def rank_pool(device: Device, world: int) -> RankPool:
    """Returns this process's pool for a device: started at first use, restarted after a failure, ended at exit."""
    key = device.name, world
    if key not in _pools or not _pools[key].running:
        _pools[key] = RankPool(device, world)
        # Last in, first out: the ranks end before the folder for scratch files goes, which the first pool asks for.
        atexit.unregister(close_all)
        atexit.register(close_all)
    return _pools[key]


def close_all() -> None:
    """Ends all rank pools of this process."""
    while _pools:
        _pools.popitem()[1].close()
