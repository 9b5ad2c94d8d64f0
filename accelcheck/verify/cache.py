"""Values computed once for all processes of a run, in a clean process, and stored in the run's own folder."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from accelcheck.core.clean_process import CleanProcess
from accelcheck.core.files import replacing
from accelcheck.verify import known_answers
from accelcheck.verify.global_state import GlobalState

THREADS_BEGIN = 3.0
"""Time limit in seconds of a first computation with several threads: it takes 0.1 s, or hangs where this process has
threads that `accelcheck.core.forking` cannot end."""


MAPPED = 2**20
"""Least bytes of a stored value that is mapped; smaller ones are read faster than mapped."""


@dataclass(frozen=True)
class Cache:
    """Computes values once, and stores them in a folder.

    The folder is trusted, private to the run and removed with it. The `clean` process computes the values and runs no
    technique; None stands for this process.
    """

    folder: Path
    clean: CleanProcess | None = None

    def once(self, key: str, make: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Value of ``make(*arguments)``, read from the folder if it is stored under this key.

        The key names everything that the value depends on. `make` returns tensors, numbers, text, and lists and dicts
        of them; if it raises, nothing is stored.

        Raises:
            CleanProcessError: The clean process died, or something cannot be sent there.
            KnownAnswerError: The clean process has wrong operators.
        """
        path = self.folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.pt"
        # Another worker waits for a slow maker's lock rather than computing the same.
        with FileLock(f"{path}.lock"):
            if not path.exists():
                if self.clean is None:
                    _make(path, make, *arguments)
                else:
                    self.clean.call(_make, path, make, *arguments)
            # Mapped pages are shared by all processes, and the system can take them back.
            loaded: dict[str, Any] = torch.load(path, weights_only=True, mmap=path.stat().st_size >= MAPPED)
            return loaded


def clean_process(known: Iterable[object]) -> CleanProcess:
    """Clean process that computes with torch. Call it before anything runs that may change how this process computes.

    `known` are arguments of `Cache.once` that cannot be pickled: techniques, workloads, their makers.
    """
    alone = (_without_threads, 60.0)
    return CleanProcess(known, (alone,) if torch.get_num_threads() == 1 else ((compute, THREADS_BEGIN), alone))


def _make(path: Path, make: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    known_answers.check()
    state = GlobalState.now()
    try:
        made = make(*arguments)
    finally:
        left = state.restore()
    if left:
        raise LeftChangedError(f"the workload leaves changed what later ones compute with: {'; '.join(map(str, left))}")
    with replacing(path, durable=False) as file:  # the folder does not outlive the run
        torch.save(made, file)


class LeftChangedError(RuntimeError):
    """A workload leaves the global state changed."""


def compute() -> None:
    """Computes something with all threads; hangs in a fork that has inherited a pool of threads."""
    size = 64 * 1024
    torch.ones(size).exp().sum()
    torch.ones(512, 512).mm(torch.ones(512, 512))


def _without_threads() -> None:
    torch.set_num_threads(1)
    compute()
