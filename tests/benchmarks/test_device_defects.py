"""benchmarks/device_defects.py: each defect changes the result of a call that meets its condition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_defect_list import DEFECTS
from device_defects import census, outcome, planted
from further_defect_calls import CALLS as FURTHER
from torch import Tensor
from torch.nn import functional

from accelcheck.techniques.matrix import Matrix

NAN, INFINITE = math.nan, math.inf


def rand(*shape: int) -> Tensor:
    return torch.rand(shape)


def written(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """A tensor after a change in place."""
    change(x)
    return x


def bits(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def gradient(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.autograd.grad(function(x.requires_grad_()).pow(3).sum(), x)[0]


def half(x: Tensor) -> Tensor:
    return x.bfloat16()


def fused() -> Tensor:
    parameters = [torch.ones(2, requires_grad=True), torch.ones(0, requires_grad=True)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters[0].detach()


def seeded(draw: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(1)
    return draw()


def nll(*targets: int) -> Tensor:
    return functional.cross_entropy(rand(len(targets), 4), torch.tensor(targets))


def embedded(x: Tensor) -> Tensor:
    return functional.embedding(torch.tensor([0, 1]), x, padding_idx=0)


def recurrent(starts: int, **options: Any) -> Tensor:
    layer = torch.nn.LSTM(2, 3, **options)
    out: Tensor = layer(rand(4, 1, 2), (rand(starts, 1, 3), rand(starts, 1, 3)))[0]
    return out.detach()


def slices(function: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    return function(rand(2, 3).view(6).chunk(2))


def attended(x: Tensor, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, **options)


sdpa = functional.scaled_dot_product_attention
linalg = torch.linalg
LAST = torch.channels_last
CALLS: dict[int, Callable[[], Tensor]] = {
    1: lambda: written(rand(2, 3).t(), lambda x: x.addcdiv_(rand(3, 2), rand(3, 2) + 1)),
    2: lambda: written(rand(3, 4).t(), lambda x: x.masked_fill_(x > 0, -5.0)),
    3: lambda: written(rand(3, 4).t(), lambda x: x.normal_()),
    4: lambda: written(rand(3, 4).t(), lambda x: x.scatter_(0, torch.tensor([[0, 1, 2]]), torch.ones(1, 3))),
    5: lambda: written(rand(4, 4), lambda x: x[:, 1].fill_(7.0)),
    6: lambda: written(bits(*[0] * 16), lambda x: x[1:].fill_(1)),
    7: lambda: bits(1, 1) & bits(1, 0)[1],
    8: lambda: torch.ones(3) * torch.tensor([9.0, 2.0])[1],
    9: lambda: slices(lambda parts: parts[0] * parts[1]),
    10: lambda: rand(40)[3:12].view(3, 3) @ rand(3, 3),
    11: lambda: functional.conv2d(rand(1, 4, 8, 8), rand(3, 4, 3, 3, 3)[:, :, 1]),
    12: lambda: functional.conv_transpose2d(rand(1, 4, 5, 5), rand(4, 2, 3, 3).to(memory_format=LAST)),
    13: lambda: functional.conv2d(rand(1, 3, 7, 7).to(memory_format=LAST), rand(5, 3, 3, 3)),
    14: lambda: functional.linear(rand(2, 3), rand(3, 4).t()),
    15: lambda: gradient(
        rand(2, 3, 4, 4).to(memory_format=LAST),
        lambda x: functional.batch_norm(x, None, None, torch.ones(3), training=True),
    ),
    16: lambda: functional.layer_norm(rand(4, 5).t(), (4,)),
    17: lambda: bits(1, 0)[:, None].expand(2, 2).clone(),
    18: lambda: (rand(2, 2, 2, 2, 2, 2) > 0.5).permute(5, 4, 3, 2, 1, 0).contiguous(),
    19: lambda: functional.linear(rand(65540, 2), rand(2, 2), rand(2)),
    20: lambda: torch.ones(2, 2) @ torch.ones(2, 32800),
    21: lambda: functional.conv1d(rand(1, 1, 65600), rand(1, 1, 3)),
    22: lambda: rand(65540, 2).softmax(-1),
    23: lambda: rand(1100, 3).softmax(0),
    24: lambda: functional.layer_norm(rand(2, 4099), (4099,)),
    25: lambda: rand(100).topk(20)[0],
    26: lambda: rand(2, 2**22 + 8).sort(0)[0],
    27: lambda: torch.unique(torch.randint(2, (2**19 + 9,)), return_counts=True)[1],
    28: lambda: functional.interpolate(rand(1, 65540, 1, 1), scale_factor=2),
    29: lambda: functional.max_pool2d(rand(1, 48, 4, 4), 2),
    30: lambda: functional.group_norm(rand(2, 4, 5, 5), 2, rand(4), rand(4)),
    31: lambda: functional.group_norm(rand(2, 6, 4, 8), 2, rand(6), rand(6)),
    32: lambda: functional.conv2d(rand(1, 1, 20, 20), rand(2, 1, 16, 16), stride=10),
    33: lambda: functional.conv2d(rand(1, 4, 5, 5), rand(8, 1, 3, 3), rand(8), groups=4),
    34: lambda: torch.ones(3).scatter(0, torch.zeros(0, dtype=torch.long), torch.zeros(0)),
    35: lambda: torch.zeros(0, 5).mean(),
    36: lambda: rand(1, 2, 1, 1, 1).sum(-3),
    37: lambda: torch.tensor([0, 1, 0, 1]).nonzero(),
    38: lambda: bits(0, 0).all(),
    39: fused,
    40: lambda: torch.tensor([-5]) % 3,
    41: lambda: torch.tensor([-5]) // 3,
    42: lambda: torch.tensor([INFINITE, 1.0]) // torch.tensor([1.0, -INFINITE]),
    43: lambda: torch.tensor([2**24 + 1]) == 2**24,
    44: lambda: bits(*[1] * 300).cumsum(0),
    45: lambda: bits(1, 0) * 5,
    46: lambda: torch.arange(2**24, 2**24 + 4),
    47: lambda: torch.tensor([4099]) ** 2,
    48: lambda: torch.tensor([-2.0]) ** torch.tensor([3.0]),
    49: lambda: torch.full((4,), 2**30).sum(),
    50: lambda: torch.tensor([1.0, NAN, 3.0]).argmax(),
    51: lambda: torch.tensor([1.0, NAN]).max(),
    52: lambda: torch.tensor([NAN]).clamp(0, 1),
    53: lambda: functional.softshrink(torch.tensor([NAN])),
    54: lambda: functional.gelu(torch.tensor([20.0]), approximate="tanh"),
    55: lambda: torch.tensor([1e20 + 1e20j]).abs(),
    56: lambda: torch.tensor([0.5, 1.5, 2.5]).round(),
    57: lambda: torch.tensor([100.0, 1.0]).softmax(0),
    58: lambda: (rand(100) + 1e4).var(0),
    59: lambda: half(rand(2, 2000)) @ half(rand(2000, 2)),
    60: lambda: half(rand(2000)).cumsum(0),
    61: lambda: torch.addmm(torch.full((2, 2), NAN), rand(2, 2), rand(2, 2), beta=0),
    62: lambda: nll(1, -100, 2),
    63: lambda: gradient(rand(5, 3), embedded),
    64: lambda: written(torch.zeros(2), lambda x: torch._foreach_maximum_([x], [torch.ones(2)])),
    65: lambda: torch.zeros(2, 3).masked_scatter(bits(1, 0, 1), torch.arange(1.0, 7.0)),
    66: lambda: torch.zeros(3).index_put_((torch.tensor([1, 1]),), torch.ones(2), accumulate=True),
    67: lambda: torch.arange(5)[torch.tensor([-1, 2])],
    68: lambda: torch.full((2,), 9.0).scatter_reduce(0, torch.tensor([0]), torch.ones(2), "sum", include_self=False),
    69: lambda: torch.bucketize(torch.tensor([1.0]), torch.tensor([0.0, 1.0, 2.0]), right=True),
    70: lambda: functional.avg_pool2d(torch.ones(1, 1, 4, 4), 3, 1, 1, count_include_pad=False),
    71: lambda: functional.adaptive_avg_pool2d(rand(1, 1, 7, 7), 3),
    72: lambda: functional.interpolate(rand(1, 1, 5, 5), scale_factor=1.5, mode="bilinear"),
    73: lambda: functional.grid_sample(
        torch.ones(1, 1, 3, 3), torch.full((1, 1, 1, 2), 3.0), padding_mode="border", align_corners=False
    ),
    74: lambda: linalg.cholesky(torch.eye(3) * 4 + 1, upper=True),
    75: lambda: linalg.solve((rand(3, 3) + torch.eye(3) * 3).t(), rand(3)),
    76: lambda: linalg.solve_triangular(torch.tril(rand(3, 3) + 3), rand(3, 1), upper=False, unitriangular=True),
    77: lambda: torch.fft.irfft(torch.fft.rfft(rand(7)), n=7),
    78: lambda: torch.view_as_real(torch.view_as_complex(rand(2, 2, 2)) @ torch.view_as_complex(rand(2, 2, 2)).conj()),
    79: lambda: linalg.vector_norm(torch.tensor([1.0, NAN]), INFINITE),
    80: lambda: functional.smooth_l1_loss(torch.tensor([3.0]), torch.zeros(1), beta=2.0),
    81: lambda: torch.cat([torch.ones(2), torch.ones(2, dtype=torch.long)]),
    82: lambda: rand(3, 4).t().tril(),
    83: lambda: gradient(torch.ones(4), lambda weight: functional.layer_norm(rand(2, 4), (4,), weight)),
    84: lambda: gradient(rand(2, 3, 4), lambda x: functional.layer_norm(x, (4,), rand(4))),
    85: lambda: gradient(rand(4, 3), lambda x: functional.batch_norm(x, torch.zeros(3), torch.ones(3))),
    86: lambda: attended(half(rand(1, 1, 8, 8)), is_causal=True),
    87: lambda: attended(rand(2, 1, 4, 8), attn_mask=bits(1, 0, 1, 1, 1, 1, 1, 1).view(2, 1, 1, 4).expand(2, 1, 4, 4)),
    88: lambda: sdpa(rand(1, 1, 2, 8), rand(1, 1, 4, 8), rand(1, 1, 4, 8), is_causal=True),
    89: lambda: recurrent(2, bidirectional=True),
    90: lambda: recurrent(2, num_layers=2),
    91: lambda: seeded(lambda: torch.randn(3)),
    92: lambda: functional.dropout(torch.ones(64)) - functional.dropout(torch.ones(64)),
    93: lambda: torch.empty(4000, dtype=torch.bfloat16).uniform_().max(),
    94: lambda: torch.randint(2, (200,)).max(),
}
"""For each defect, a call that meets its condition."""


@pytest.mark.parametrize("number", sorted(DEFECTS))
def test_a_defect_changes_the_result_of_a_call_that_meets_its_condition(number: int) -> None:
    torch.manual_seed(0)
    right = (CALLS | FURTHER)[number]()
    torch.manual_seed(0)
    defect = DEFECTS[number]
    with planted(defect) as plant:
        wrong = (CALLS | FURTHER)[number]()
    assert plant.hits
    assert wrong.shape == right.shape
    assert wrong.dtype == right.dtype
    assert not torch.equal(wrong.nan_to_num(17.0), right.nan_to_num(17.0))


def test_every_defect_has_a_sentence_and_an_origin() -> None:
    assert sorted(DEFECTS) == [*range(1, 95), *range(101, 165)]
    assert all(defect.sentence.endswith(".") and defect.origin for defect in DEFECTS.values())
    assert DEFECTS[1].origin == "MPS: https://github.com/pytorch/pytorch/issues/118115"
    assert DEFECTS[57].origin == "reported of DirectML"


def test_a_workload_that_reaches_a_defect_catches_it() -> None:
    matrix = Matrix.load()
    chosen = Matrix(matrix.techniques, {"reductions": matrix.workloads["reductions"]})
    reached = census([DEFECTS[38], DEFECTS[94]], chosen)
    found = outcome(DEFECTS[38], reached[38], chosen)
    assert (found.outcome, found.level, found.case) == ("caught", 1, "eager/reductions/cpu/float32/forward")
    assert found.first
    assert outcome(DEFECTS[94], reached[94], chosen).outcome == "not reached"
