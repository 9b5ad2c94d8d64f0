"""Rows of tensors that come out of a DataLoader's worker processes, with a record of what came, and from whom."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

WORKERS = 2
PREFETCH = 2
"""Batches that each worker is ahead."""
PATIENCE = 60
"""Seconds that a batch may take: workers only copy, so longer is a hang. A worker may have to import torch first."""
SPOILT = 5
"""The row at which something happens: each worker has then given two or more."""
UNREADABLE = "this row cannot be read"


class Rows(Dataset[tuple[Any, ...]]):
    """Of each row its number, the process that reads it, and the row of each tensor; all have one first size.

    The tensors lie in shared memory: workers that stay alive see what is filled in later.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.clone().share_memory_() for tensor in tensors]  # type: ignore[no-untyped-call]  # untyped in torch

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        return row, os.getpid(), *(tensor[row] for tensor in self.tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `fill` can take these."""
        return [(own.shape, own.dtype) for own in self.tensors] == [(new.shape, new.dtype) for new in tensors]

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Other content, of the same shapes and dtypes."""
        for own, new in zip(self.tensors, tensors, strict=True):
            own.copy_(new)


@dataclass
class Delivery:
    """What came of a pass.

    Attributes:
        batches: Number of them.
        rows: Row numbers in the order in which they came.
        workers: By whom each of them was read.
        pinned: Batches that came in page-locked memory.
        places: Device types on which batches came.
    """

    batches: int = 0
    rows: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    pinned: int = 0
    places: set[str] = field(default_factory=set)

    def take(self, batch: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Note down a collated batch of `Rows`; gives its row numbers and tensors."""
        rows, workers, *tensors = batch
        self.batches += 1
        self.rows += rows.tolist()
        self.workers += workers.tolist()
        self.pinned += all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors)
        self.places |= {tensor.device.type for tensor in tensors}
        return rows.tolist(), tensors


class Feed:
    """A DataLoader whose workers stay from pass to pass.

    Args:
        tensors: On the CPU, of one first size.
        sampler: The row numbers of each batch; asked anew for each pass.
        pinned: Whether batches go through page-locked memory.
    """

    def __init__(self, tensors: Sequence[Tensor], sampler: Iterable[list[int]], *, pinned: bool) -> None:
        self.rows = Rows(tensors)
        self.loader = DataLoader(
            self.rows,
            batch_sampler=sampler,
            num_workers=WORKERS,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            pin_memory=pinned,
            timeout=PATIENCE,
            # Else each pass draws a seed for its workers from torch's own generator, from which the training draws too.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Sequence[Tensor]]:
        """A new pass; one that has not ended is given up."""
        return iter(self.loader)

    def close(self) -> None:
        """End the workers."""
        _end(self.loader)


def be_killed() -> None:
    """End this process as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def be_unreadable() -> None:
    """Fail as a file does."""
    raise OSError(UNREADABLE)


class Spoilt(Rows):
    """As many rows as it takes, over and over the same, and one at which something happens to the worker."""

    def __init__(self, tensors: Sequence[Tensor], happens: Callable[[], None]) -> None:
        super().__init__(tensors)
        self.happens = happens

    def __len__(self) -> int:
        return SPOILT + 2 * WORKERS * PREFETCH

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        if row == SPOILT:
            self.happens()
        return row, *super().__getitem__(row % super().__len__())[1:]


@dataclass(frozen=True, slots=True)
class Ending:
    """How a pass ended, in the middle of which something happened.

    Attributes:
        worker: The process to which it happened; 0 where too few rows came to tell.
        error: Type and text of what the program got, and of its cause; empty where it got nothing.
        rows: How many came before.
    """

    worker: int
    error: str
    rows: int


def spoilt_pass(
    tensors: Sequence[Tensor],
    happens: Callable[[], None],
    through: Callable[[Any], Iterable[Sequence[Tensor]]] = lambda loader: loader,
) -> Ending:
    """Go through rows one of which is spoilt.

    Workers are one row ahead, so that the one to which it happens has nothing under way. A batch comes as a file descriptor
    that its sender must hand over: where that is dead, the program may get a ConnectionResetError that names nobody.

    Args:
        tensors: Of one first size.
        happens: To the worker that reads row `SPOILT`; picklable.
        through: What the program iterates over, given the DataLoader.
    """
    loader = DataLoader(
        Spoilt(tensors, happens),
        num_workers=WORKERS,
        prefetch_factor=1,
        persistent_workers=True,
        timeout=PATIENCE // 4,
        generator=torch.Generator(),
    )
    seen, error = Delivery(), ""
    try:
        for batch in through(loader):
            seen.take(batch)
    except (RuntimeError, OSError) as raised:  # RuntimeErrors may come from torch's handler of SIGCHLD, wherever we are
        told = [f"{type(one).__name__}: {one}".strip() for one in (raised, raised.__cause__) if one is not None]
        error = ", because of ".join(told)
    finally:
        _end(loader)
    # Workers take turns, and one is sent its next row when its last has come.
    worker = next(iter(seen.workers[SPOILT - WORKERS :]), 0)
    return Ending(worker, error, len(seen.rows))


def _end(loader: DataLoader[Any]) -> None:
    """End the workers of a loader that keeps them. By itself torch does so with the last reference to them."""
    keeper: Any = loader._iterator  # noqa: SLF001 - there is no other way
    if keeper is not None:
        keeper._shutdown_workers()  # noqa: SLF001 - as above
