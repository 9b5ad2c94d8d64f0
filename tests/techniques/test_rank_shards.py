"""Shares of a batch among ranks, and their books."""

from __future__ import annotations

import pytest
import torch

from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.distributed.compression import Account, Int8
from accelcheck.techniques.distributed.shards import by_samples, shards


def test_uneven_shards_are_weighted_by_their_samples() -> None:
    x = torch.arange(8.0)
    parts = shards((x, 2), x, 3)
    assert [(given[0].tolist(), given[1], wanted.tolist()) for given, wanted in parts] == [
        ([0.0, 1.0, 2.0], 2, [0.0, 1.0, 2.0]),
        ([3.0, 4.0, 5.0], 2, [3.0, 4.0, 5.0]),
        ([6.0, 7.0], 2, [6.0, 7.0]),
    ]
    assert by_samples([3, 3, 2]) == [0.375, 0.375, 0.25]


@pytest.mark.parametrize(("samples", "targets"), [(2, 2), (8, 4)])
def test_a_batch_that_cannot_be_split_is_refused(samples: int, targets: int) -> None:
    with pytest.raises(Unsupported, match="a batch for 3 ranks: expected inputs and a target of one first size"):
        shards((torch.randn(samples, 4),), torch.randn(targets, 2), 3)


def test_error_feedback_keeps_all_that_compression_drops() -> None:
    torch.manual_seed(0)
    codec, account, residual = Int8(), Account(5), torch.zeros(5)
    for _ in range(20):
        gradient = torch.randn(5) * torch.tensor([1.0, 1e-3, 1e-9, 7e4, 0.0])
        wanted = gradient + residual
        sent = codec.decode(codec.encode(wanted), 5)
        account.add(gradient, residual, sent)
        residual = wanted - sent
    assert not account.unbalanced(residual).any()
    # The largest element has no rounding error, and a gradient of 0 has nothing to lose.
    assert account.unbalanced(None).tolist() == [True, True, True, False, False]
