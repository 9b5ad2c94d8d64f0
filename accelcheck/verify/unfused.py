"""Attention as matmul and softmax, so that the rounding of each operator in it is sampled."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.workloads.dispatch import layer_by_layer

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """A context for the oracle and its samples."""
    with sdpa_kernel(SDPBackend.MATH), layer_by_layer():
        yield
