"""Known remarks of other packages that a person can do nothing about, kept out of the output. No torch."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


LEAVES = "`isinstance(treespec, LeafSpec)` is deprecated"
"""The beginning of a FutureWarning where a tree of outputs is copied: torch makes the leaves in a way that it deprecates itself."""


@contextlib.contextmanager
def without(logger: str, *words: str) -> Iterator[None]:
    """Context in which a logger leaves out the messages that have any of these words; all others come through."""

    def passes(said: logging.LogRecord) -> bool:
        return not any(one in said.getMessage() for one in words)

    found = logging.getLogger(logger)
    found.addFilter(passes)
    try:
        yield
    finally:
        found.removeFilter(passes)


@contextlib.contextmanager
def torchao_imported() -> Iterator[None]:
    """Context for what may import torchao, such as transformers.

    At import torchao 0.18 registers enumerations in a way that torch 2.13 deprecates: only torchao can change that. It names the
    kernels of its own that it cannot load, such as those for CUDA beside a torch for CPUs: no technique here needs them.
    """
    kernels = without("torchao", "Skipping import of cpp extensions", "Failed to load ")
    with without("torch.utils._pytree", "is an Enum subclass"), kernels:
        yield


def ignore_copied_trees() -> None:
    """Leave out the warning of `LEAVES` from here on."""
    warnings.filterwarnings("ignore", message=re.escape(LEAVES), category=FutureWarning)


@contextlib.contextmanager
def copied_trees() -> Iterator[None]:
    """Context for exporters, which copy such a tree."""
    with warnings.catch_warnings():
        ignore_copied_trees()
        yield
