"""Padded batches and their tokens one after the other: ``(B, S, ...)`` with lengths, to ``(tokens, ...)`` and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """Sequences without their padding.

    Attributes:
        rows: Their tokens, ``(tokens, ...)``.
        offsets: Where each begins, and the end of the last: ``(B + 1,)``, int64.
        within: Which places of the padded batch hold a token: bool ``(B, S)``.
    """

    rows: Tensor
    offsets: Tensor
    within: Tensor

    @classmethod
    def of(cls, padded: Tensor, lengths: Tensor) -> Jagged:
        """The first ``lengths (B,)`` tokens of each sequence of a padded batch ``(B, S, ...)``."""
        within = torch.arange(padded.size(1), device=padded.device) < lengths.unsqueeze(-1)
        return cls(padded[within], functional.pad(lengths.cumsum(0), (1, 0)), within)

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        return int(self.offsets.diff().max())

    def padded(self, rows: Tensor) -> Tensor:
        """Other rows of the same tokens, as a padded batch with zeros beyond the ends."""
        batch = rows.new_zeros(*self.within.shape, *rows.shape[1:])
        batch[self.within] = rows
        return batch
