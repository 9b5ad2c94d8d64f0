"""Rows of tensors, read by a DataLoader's worker processes, with a record of the rows and of their readers."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

WORKERS = 2
PREFETCH = 2
"""Number of batches that each worker reads ahead."""
TIMEOUT = 60
"""Seconds after which a missing batch counts as a hang. Workers only copy, but may have to import torch first."""
FAULTY_ROW = 5
"""Number of the row at which a fault happens; each worker has delivered at least two rows before."""
UNREADABLE = "this row cannot be read"


class Rows(Dataset[tuple[Any, ...]]):
    """Data set whose items are a row's number, the id of the process that reads it, and that row of each tensor.

    All tensors have the same first size. They are in shared memory, so that persistent workers see later `fill` calls.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        copies = (tensor.clone() for tensor in tensors)
        self.tensors = [copy.share_memory_() for copy in copies]  # type: ignore[no-untyped-call]  # untyped in torch

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return row, os.getpid(), *(tensor[row] for tensor in self.tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether `fill` accepts these tensors."""
        return [(own.shape, own.dtype) for own in self.tensors] == [(new.shape, new.dtype) for new in tensors]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Replaces the content by that of tensors with the same shapes and dtypes."""
        for own, new in zip(self.tensors, tensors, strict=True):
            own.copy_(new)


@dataclass
class Delivery:
    """Record of a pass over a loader: number of batches, of those in page-locked memory, and their device types.

    Row numbers are in the order of their arrival, with the id of the process that read each.
    """

    batches: int = 0
    rows: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    pinned: int = 0
    places: set[str] = field(default_factory=set)

    def take(self, batch: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Records a collated batch of `Rows`; returns its row numbers and tensors."""
        rows, workers, *tensors = batch
        self.batches += 1
        self.rows += rows.tolist()
        self.workers += workers.tolist()
        self.pinned += all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors)
        self.places |= {tensor.device.type for tensor in tensors}
        return rows.tolist(), tensors


class Feed:
    """DataLoader of CPU tensors with the same first size, whose workers persist from pass to pass.

    `sampler` gives the row numbers of each batch; it is iterated again for each pass.
    """

    def __init__(self, tensors: Sequence[Tensor], sampler: Iterable[list[int]], *, pinned: bool) -> None:
        self.rows = Rows(tensors)
        self.loader = _loader(self.rows, PREFETCH, TIMEOUT, batch_sampler=sampler, pin_memory=pinned)

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        """Starts a new pass; one that has not ended is abandoned."""
        return iter(self.loader)

    def close(self) -> None:
        """Ends the workers."""
        _end(self.loader)


def kill_self() -> None:
    """Kills this process with SIGKILL, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def raise_unreadable() -> None:
    """Raises the OSError of an unreadable file."""
    raise OSError(UNREADABLE)


class FaultyRows(Rows):
    """Rows with a fault: reading `FAULTY_ROW` calls `fault` in the worker. Other rows repeat those of the tensors."""

    def __init__(self, tensors: Sequence[Tensor], fault: Callable[[], None]) -> None:
        super().__init__(tensors)
        self.fault = fault

    def __len__(self) -> int:
        return FAULTY_ROW + 2 * WORKERS * PREFETCH

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        if row == FAULTY_ROW:
            self.fault()
        return row, *super().__getitem__(row % super().__len__())[1:]


@dataclass(frozen=True, slots=True)
class PassEnd:
    """End of a pass with a fault in the middle, after the number of rows that arrived before.

    `worker` is the id of the process with the fault, 0 if too few rows arrived to tell; `error` has type and text of
    the exception that the program got, and of its cause: empty if there was none.
    """

    worker: int
    error: str
    rows: int


def faulty_pass(
    tensors: Sequence[Tensor],
    fault: Callable[[], None],
    through: Callable[[Any], Iterable[Sequence[Tensor]]] = lambda loader: loader,
) -> PassEnd:
    """Iterates over rows, one of which causes a fault in the worker that reads it.

    Workers read one row ahead, so that the worker with the fault has sent everything before. A batch arrives as a file
    descriptor, which its sender must pass on: if the sender is dead by then, the program may get a ConnectionResetError
    that names no worker.

    `fault` is picklable, and called in the worker that reads row `FAULTY_ROW`. `through` makes the program's iterable.
    """
    loader = _loader(FaultyRows(tensors, fault), 1, TIMEOUT // 4)
    seen, error = Delivery(), ""
    try:
        for batch in through(loader):
            seen.take(batch)
    except (RuntimeError, OSError) as raised:  # torch's SIGCHLD handler may raise a RuntimeError at any point
        messages = [f"{type(e).__name__}: {e}".strip() for e in (raised, raised.__cause__) if e is not None]
        error = ", because of ".join(messages)
    finally:
        _end(loader)
    # Workers take turns: a worker is sent its next row when its last one has arrived.
    worker = next(iter(seen.workers[FAULTY_ROW - WORKERS :]), 0)
    return PassEnd(worker, error, len(seen.rows))


def _loader(rows: Rows, ahead: int, timeout: int, **options: Any) -> DataLoader[Any]:
    options |= {"num_workers": WORKERS, "prefetch_factor": ahead, "persistent_workers": True, "timeout": timeout}
    # Each pass draws a seed, which must not come from the training's generator.
    return DataLoader(rows, generator=torch.Generator(), **options)


def _end(loader: DataLoader[Any]) -> None:
    """Ends a loader's persistent workers now. Torch would end them when the last reference to them is gone."""
    keeper: Any = loader._iterator  # noqa: SLF001 - torch has no public way
    if keeper is not None:
        keeper._shutdown_workers()  # noqa: SLF001 - as above
