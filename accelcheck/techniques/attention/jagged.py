"""Conversion between padded batches ``(B, S, ...)`` with lengths and jagged ones, ``(tokens, ...)`` with offsets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Jagged:
    """Sequences without their padding: the tokens of all in `rows`, one after the other, ``(tokens, ...)``.

    Sequences begin at `offsets`, with the end of the last one, ``(B + 1,)``, int64; `within`, bool ``(B, S)``, marks
    the positions of the padded batch that hold a token.
    """

    rows: Tensor
    offsets: Tensor
    within: Tensor

    @classmethod
    def of(cls, padded: Tensor, lengths: Tensor | None) -> Jagged:
        """Takes the first ``lengths (B,)``, or all, tokens of each sequence of a padded batch ``(B, S, ...)``."""
        if lengths is None:
            lengths = torch.full((padded.size(0),), padded.size(1), device=padded.device)
        within = torch.arange(padded.size(1), device=padded.device) < lengths.unsqueeze(-1)
        return cls(padded[within], functional.pad(lengths.cumsum(0), (1, 0)), within)

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return int(self.offsets.diff().max())

    def padded(self, rows: Tensor) -> Tensor:
        """Pads `rows`, ``(tokens, ...)`` of the same sequences, with zeros to a batch ``(B, S, ...)``."""
        batch = rows.new_zeros(*self.within.shape, *rows.shape[1:])
        batch[self.within] = rows
        return batch
