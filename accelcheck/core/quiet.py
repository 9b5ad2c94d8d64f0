"""Hides messages of other packages that users can do nothing about. No torch."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

LEAVES = "`isinstance(treespec, LeafSpec)` is deprecated"
"""Beginning of the FutureWarning with which torch deprecates its own way of copying a tree of outputs."""


@contextlib.contextmanager
def without(logger: str, *words: str) -> Iterator[None]:
    """A context in which a logger omits the messages with any of these words."""

    def passes(record: logging.LogRecord) -> bool:
        return not any(word in record.getMessage() for word in words)

    filtered = logging.getLogger(logger)
    filtered.addFilter(passes)
    try:
        yield
    finally:
        filtered.removeFilter(passes)


@contextlib.contextmanager
def torchao_imported() -> Iterator[None]:
    """A context for imports of torchao, such as that of transformers.

    torchao 0.18 registers enumerations in a way that torch 2.13 deprecates. It also names its own kernels that it
    cannot load, such as those for CUDA beside a torch for CPUs, which no technique here needs.
    """
    kernels = without("torchao", "Skipping import of cpp extensions", "Failed to load ")
    with without("torch.utils._pytree", "is an Enum subclass"), kernels:
        yield


def ignore_copied_trees() -> None:
    """Hides the warning of `LEAVES` from here on."""
    warnings.filterwarnings("ignore", message=re.escape(LEAVES), category=FutureWarning)


@contextlib.contextmanager
def copied_trees() -> Iterator[None]:
    """A context for exporters, which copy such a tree."""
    with warnings.catch_warnings():
        ignore_copied_trees()
        yield
