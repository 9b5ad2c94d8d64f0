"""Faults of data loaders, in the worker processes that read and collate rows, and of page-locked buffers."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import data_fetch as fetch
from accelcheck.selftest.faults.base import Cell, alike, fault, single, trained
from accelcheck.selftest.faults.sowing import Around, replacing, swapped
from accelcheck.techniques.data import dataloader

_FETCH: Callable[[Any, list[int]], Any] = fetch._MapDatasetFetcher.fetch  # noqa: SLF001 - torch has no public way


def reading(wrong: Callable[[int], None]) -> Around:
    """Call a function at the start of each worker process, which imports it by its name."""

    @functools.wraps(wrong)
    def made(plain: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return plain(*args, **options, worker_init_fn=wrong)

    return replacing(dataloader, "DataLoader")(made)


def row_repeated(worker: int) -> None:
    """A worker reads a row twice, and another not at all. The last row is read from the place of the one before."""

    def fetched(own: Any, rows: list[int]) -> Any:
        return _FETCH(own, [*rows[:-1], rows[-2]] if len(rows) > 1 else rows)

    fetch._MapDatasetFetcher.fetch = fetched  # type: ignore[method-assign]  # noqa: SLF001 - in this worker alone


def buffer_stale(worker: int) -> None:
    """A worker sends a batch of which the last row holds the values of the one before."""

    def fetched(own: Any, rows: list[int]) -> Any:
        batch: Any = _FETCH(own, rows)
        for tensor in batch[2:]:
            if len(tensor) > 1:
                tensor[-1] = tensor[-2].clone()
        return batch

    fetch._MapDatasetFetcher.fetch = fetched  # type: ignore[method-assign]  # noqa: SLF001 - as above


def one_buffer(strength: float) -> AbstractContextManager[None]:
    """A page-locked buffer of the run before is copied to the device. All tensors of one size share it."""
    kept: dict[Any, torch.Tensor] = {}

    def wrong(plain: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        return kept.setdefault((tensor.shape, tensor.dtype), plain(tensor, *args))

    return swapped(torch.Tensor, "pin_memory", wrong)


loader = alike(technique="prefetch-loader", seeds=2)

FAULTS = (
    loader("loader-row-repeated")(trained("train-mlp"), around=reading(row_repeated)),
    loader("loader-buffer-stale")(single("mlp-blocks"), around=reading(buffer_stale)),
    loader(
        "loader-trajectory-stale",
        "In a long training a worker sends mini-batches of which the last row holds the values of the one before.",
    )(single("trajectory-mlp", Mode.TRAJECTORY), around=reading(buffer_stale), seeds=1),
    fault("pinned-buffer-reused")(Cell("mlp"), around=one_buffer, technique="pinned-memory"),
)
