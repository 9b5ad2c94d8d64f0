"""A model that somebody else wrote, as it is: torch's transformer encoder, with a mask as a keyword argument.

Run it in this folder, for instance exported and traced:

    $ pytest --pyargs accelcheck.suite --accel-device=cpu --accel-workload=encoder --accel-technique=export --accel-technique=jit-trace

It prints, among other lines:

    technique  cpu
    export     3 pass
    jit-trace  3 pass
"""

from __future__ import annotations

import torch
from torch import nn

from accelcheck.api import Workload, workload_of


def pytest_accel_workloads() -> list[Workload]:
    """Register the model with example inputs: what it can do is found by looking at it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.arange(10) >= torch.tensor([[10], [7], [4]])
    return [workload_of(model, (torch.randn(3, 10, 32),), {"src_key_padding_mask": padding}, name="encoder")]
