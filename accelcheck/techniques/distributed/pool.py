"""A process pool of ranks: real processes under ``torchrun``, started once, that do one training after the other."""

from __future__ import annotations

import atexit
import re
import signal
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck.techniques.processes.torchrun import GRACE, SAID, RanksError, Torchrun, looks, put, take

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.devices.base import Device
    from accelcheck.techniques.distributed.strategy import RankReport, TrainingJob

PATIENCE = 120.0
"""Seconds that a job may take, and that a rank waits for the others: a training takes less than one."""

_FAILURE = re.compile(r"^\s*rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*(-?\d+)", re.MULTILINE)
"""In torchrun's report: a rank that failed, and its exit code (a negative one: the signal that ended it)."""


@dataclass(frozen=True)
class PoolMailbox:
    """The files of a private folder by which a pool and its ranks exchange messages."""

    folder: Path

    @property
    def device(self) -> Path:
        """What ranks run on."""
        return self.folder / "device"

    @property
    def logs(self) -> Path:
        """What ranks print, as torchrun sorts it."""
        return self.folder / "logs"

    def here(self, rank: int) -> Path:
        """The process of a rank that is ready for jobs."""
        return self.folder / f"here-{rank}"

    def job(self, number: int) -> Path:
        """A job for all ranks."""
        return self.folder / f"job-{number}"

    def answer(self, number: int, rank: int) -> Path:
        """What a rank answers to a job."""
        return self.folder / f"answer-{number}-{rank}"

    def trouble(self, rank: int) -> Path:
        """Type and text of what a rank raised, and the traceback."""
        return self.folder / f"trouble-{rank}"


class RankPool:
    """Ranks on this machine, one a device; on the CPU they share it.

    Args:
        device: What they run on; it travels to them by pickle.
        world: Number of ranks.

    Attributes:
        pids: Process of each rank.

    Raises:
        RanksError: They did not come up; the message has what they said.
    """

    def __init__(self, device: Device, world: int) -> None:
        self.world = world
        self._jobs = 0
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="accelcheck-ranks-")))
            self._mailbox = PoolMailbox(folder)
            put(self._mailbox.device, device)
            # Each rank's output goes to files of its own, so that an error can quote the one that failed.
            options = ["--standalone", f"--nproc-per-node={world}", "--redirects=3", f"--log-dir={self._mailbox.logs}"]
            self._torchrun = Torchrun(
                options, "accelcheck.techniques.distributed.pool_rank", [str(folder)], folder / "log", {}
            )
            held.callback(self._torchrun.close)
            self.pids: list[int] = self._awaited([self._mailbox.here(rank) for rank in range(world)])
            self._held = held.pop_all()

    @property
    def running(self) -> bool:
        """Whether it can be given a job."""
        return self._torchrun.running

    def train(self, job: TrainingJob) -> list[RankReport]:
        """What each rank answers, by rank.

        Raises:
            RanksError: A rank raised, ended or stayed silent; the message says which. The pool is closed then.
            TypeError: The job cannot be pickled.
        """
        paths = [self._mailbox.answer(self._jobs, rank) for rank in range(self.world)]
        put(self._mailbox.job(self._jobs), job)
        try:
            answers: list[RankReport] = self._awaited(paths)
        except BaseException:  # an interrupt, too: what ranks still answer would be taken for the next job's
            self.close()
            raise
        for path in (self._mailbox.job(self._jobs), *paths):
            path.unlink()
        self._jobs += 1
        return answers

    def close(self) -> None:
        """End the ranks, and remove what they left."""
        self._held.close()

    def _awaited(self, paths: Sequence[Path]) -> list[Any]:
        """What is in each of the files, as soon as all are there; else the error says why they are not."""
        raised = [self._mailbox.trouble(rank) for rank in range(self.world)]
        for _ in looks(PATIENCE):
            if all(path.exists() for path in paths):
                return [take(path) for path in paths]
            if not self.running or any(path.exists() for path in raised):
                break
        else:
            missing = ", ".join(path.name for path in paths if not path.exists())
            raise RanksError(f"no {missing} after {PATIENCE:g} s; torchrun said:\n{self._torchrun.said()}")
        for _ in looks(GRACE):  # torchrun ends when a rank has; its report says which, and how
            if not self.running:
                break
        raise RanksError(
            self._killed() or self._raised() or f"the ranks ended; torchrun said:\n{self._torchrun.said()}"
        )

    def _killed(self) -> str:
        """Which rank a signal ended, and what it said last: others then raise for want of it. Empty where none was."""
        report = _FAILURE.findall(self._torchrun.log.read_text(errors="replace"))
        signals = [(rank, -int(code)) for rank, code in report if int(code) < 0 and -int(code) != signal.SIGTERM]
        if not signals:
            return ""
        rank, number = signals[0]
        logs = sorted(self._mailbox.logs.glob(f"*/attempt_*/{rank}/*.log"))
        said = [line for path in logs for line in path.read_text(errors="replace").splitlines()[-SAID:]]
        head = f"rank {rank} of {self.world} was ended by signal {number}; its last output:"
        return "\n".join([head, *(said or ["(none)"])])

    def _raised(self) -> str:
        """What ranks raised, the first one first: others often raise for want of it. Empty where none did."""
        paths = {rank: self._mailbox.trouble(rank) for rank in range(self.world)}
        told = sorted((path.stat().st_mtime_ns, rank, *take(path)) for rank, path in paths.items() if path.exists())
        lines = [f"rank {rank} of {self.world} raised {brief}" for _, rank, brief, _ in told]
        return "\n".join([*lines, *(trace for *_, trace in told[:1])])


_pools: dict[tuple[str, int], RankPool] = {}


def rank_pool(device: Device, world: int) -> RankPool:
    """The ranks that this process keeps for a device: started at first use, again after they failed, ended at exit.

    Raises:
        RanksError: They did not come up.
    """
    key = device.name, world
    if key not in _pools or not _pools[key].running:
        _pools[key] = RankPool(device, world)
    return _pools[key]


@atexit.register
def close_all() -> None:
    """End all rank pools of this process."""
    while _pools:
        _pools.popitem()[1].close()
