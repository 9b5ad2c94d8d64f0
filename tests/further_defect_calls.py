"""Calls that meet the conditions of the defects in benchmarks/further_defect_list.py, by their number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

NAN, INFINITE = math.nan, math.inf
LAST = torch.channels_last
sdpa = functional.scaled_dot_product_attention
linalg = torch.linalg


def rand(*shape: int) -> Tensor:
    return torch.rand(shape)


def full(*values: Any) -> Tensor:
    return torch.tensor(values)


def written(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    """A tensor after a change in place."""
    change(x)
    return x


def gradient(x: Tensor, function: Callable[[Tensor], Tensor], power: int = 3) -> Tensor:
    return torch.autograd.grad(function(x.requires_grad_()).pow(power).sum(), x)[0]


def real(x: Tensor) -> Tensor:
    return torch.view_as_real(x)


def softplus_twice() -> Tensor:
    functional.softplus(torch.ones(3))
    return functional.softplus(torch.ones(3), beta=2.0)


def pooled_twice() -> Tensor:
    functional.avg_pool2d(torch.ones(1, 1, 4, 4), 2)
    return functional.avg_pool2d(torch.ones(1, 1, 4, 4), 2, divisor_override=3)


def gaps() -> Tensor:
    parent = torch.zeros(20)
    parent[::2].copy_(torch.arange(20.0)[::2])
    return parent


def source_after() -> Tensor:
    source = torch.arange(8.0) + 0.25
    torch.empty(10, dtype=torch.float16)[2:].copy_(source)
    return source


def out_after() -> Tensor:
    memory = torch.zeros(4, 3)
    torch.add(torch.ones(3, 2), 1.0, out=memory.t()[:, ::2])
    return memory


def cloned() -> Tensor:
    x = torch.arange(6.0)
    copy = x[2:].clone()
    x.zero_()
    return copy


def running() -> Tensor:
    variance = torch.ones(3)
    functional.batch_norm(rand(4, 3), torch.zeros(3), variance, training=True)
    return variance


def bag(indices: Tensor, weight: Tensor, **options: Any) -> Tensor:
    return functional.embedding_bag(indices, weight, torch.tensor([0]), **options)


def ctc() -> Tensor:
    logs = torch.zeros(2, 1, 3).log_softmax(-1).requires_grad_()
    loss = functional.ctc_loss(logs, full([1, 1, 2]), full(2), full(3), reduction="sum", zero_infinity=True)
    return torch.autograd.grad(loss, logs)[0]


def recurrent() -> Tensor:
    layer = torch.nn.GRU(2, 3, num_layers=2, bidirectional=True)
    out: Tensor = layer(rand(4, 1, 2), rand(4, 1, 3))[0]
    return out.detach()


def stepped(kind: Any, count: int, **options: Any) -> Tensor:
    parameters = [torch.ones(2, requires_grad=True) for _ in range(count)]
    optimizer = kind(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.3)
    optimizer.step()
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()
    return torch.stack([parameter.detach() for parameter in parameters])


def zeros_to_nan(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.numel()) % 3 == 0, NAN, x)


CALLS: dict[int, Callable[[], Tensor]] = {
    101: lambda: gradient(rand(2, 7, 4, 3).permute(0, 3, 1, 2), torch.tanh),
    102: lambda: torch.autograd.grad(functional.gelu(x := full(3.0, -0.5).requires_grad_()).sum(), x)[0],
    103: lambda: full(-50.0, -1e4).asinh(),
    104: lambda: full(-0.0, 1.0) < 0,
    105: lambda: full(NAN, 2.0).sign(),
    106: lambda: full(5.5, -5.5, 1e20, *range(5)) % full(INFINITE, -INFINITE, 3.0, *[2.0] * 5),
    107: lambda: full(1e-40) > 0,
    108: lambda: torch.hypot(full(1e20, 3.0), full(1e20, 4.0)),
    109: lambda: full(255).to(torch.uint8) >> 4,
    110: lambda: full(1e-4, 1.0).tanh(),
    111: lambda: full(1e-6, 1.0).log1p(),
    112: lambda: full(54321.0, 1.0).sin(),
    113: lambda: gradient(rand(9), lambda x: functional.gelu(x, approximate="tanh")),
    114: softplus_twice,
    115: lambda: full(28, 208).to(torch.uint8).float(),
    116: gaps,
    117: source_after,
    118: lambda: rand(50).bfloat16(),
    119: out_after,
    120: cloned,
    121: torch.arange(24.0).view(4, 6)[:, :3].amax,
    122: lambda: rand(3, 5000).sum(1),
    123: lambda: torch.logcumsumexp(full([2.0, -INFINITE, -INFINITE, 1.0], [0.0, 1.0, 2.0, 3.0]), -1),
    124: lambda: zeros_to_nan(rand(200)).nanmedian(),
    125: lambda: torch.histogram(full(0.5, -1e-6), full(0.0, 1.0, 2.0))[0],
    126: lambda: full(0.0, -95.0).log_softmax(0),
    127: lambda: torch.zeros(3).index_add(0, full(1, 1), torch.ones(2)),
    128: lambda: torch.zeros(2).index_reduce(0, full(0, 1), full(NAN, 2.0), "amax"),
    129: lambda: torch.zeros(3, 2).scatter_add_(0, full(0, 1, 2)[:, None].expand(3, 2), rand(3, 2)),
    130: lambda: full([1.0, 2.0, 3.0]).flip(0),
    131: lambda: rand(8, 16) @ rand(16, 8),
    132: lambda: full([5000, 1]) @ full([5001], [1]),
    133: lambda: real(torch.addmm(torch.ones(1, 1) * 1j, torch.ones(1, 1) + 0j, torch.ones(1, 1) + 0j, alpha=2j)),
    134: lambda: torch.addmm(torch.ones(2, 2), rand(2, 0), rand(0, 2)),
    135: lambda: torch.addmm(torch.ones(2, 2), torch.eye(2).to_sparse(), rand(2, 2), beta=3),
    136: lambda: functional.conv_transpose2d(rand(1, 1, 3, 3), rand(1, 1, 3, 3), stride=2, padding=2, dilation=2),
    137: lambda: gradient(rand(1, 2, 32, 32), lambda x: functional.conv2d(x, rand(3, 2, 5, 5), stride=3, padding=1)),
    138: lambda: functional.adaptive_max_pool2d(torch.arange(25.0).view(1, 1, 5, 5), 3),
    139: lambda: functional.avg_pool2d(torch.arange(9.0).view(1, 1, 3, 3), 2, ceil_mode=True),
    140: pooled_twice,
    141: lambda: gradient(rand(1, 2, 4, 4).to(memory_format=LAST), lambda x: functional.avg_pool2d(x, 2, 1, 1)),
    142: lambda: functional.interpolate(rand(3, 1, 1), 3, mode="linear", align_corners=True),
    143: lambda: gradient(rand(1, 1, 7, 3), lambda x: functional.interpolate(x, size=(3, 5))),
    144: lambda: functional.interpolate(rand(1, 1, 5, 5), size=(11, 11), mode="bicubic"),
    145: lambda: functional.layer_norm(rand(2, 8) * 0.05, (8,)),
    146: running,
    147: lambda: gradient(rand(4, 2), lambda w: bag(full(1, 1, 2), w, scale_grad_by_freq=True, mode="sum")),
    148: lambda: bag(full(0, 1, 2), rand(3, 2), mode="mean", padding_idx=1),
    149: ctc,
    150: lambda: torch.cdist(rand(3, 4) + 1000, rand(5, 4) + 1000),
    151: lambda: gradient(full([1.0, 2.0], [3.0, 4.0]), lambda x: torch.cdist(x, full([1.0, 2.0]))),
    152: lambda: sdpa(rand(1, 1, 4, 8), rand(1, 1, 4, 8), rand(1, 1, 4, 8), attn_mask=rand(4, 4)),
    153: lambda: sdpa(rand(1, 1, 4, 8), rand(1, 1, 70, 8), rand(1, 1, 70, 8)),
    154: lambda: sdpa(rand(1, 4, 3, 8), rand(1, 2, 3, 8), rand(1, 2, 3, 8), enable_gqa=True),
    155: recurrent,
    156: lambda: real(torch.fft.fft(rand(4, 6), dim=0, norm="ortho")),
    157: lambda: real(torch.fft.fft(rand(1009) + 0j)),
    158: lambda: linalg.inv(torch.eye(2) * 3 + rand(65540, 2, 2)),
    159: lambda: torch.randperm(20),
    160: lambda: torch.randn(5),
    161: lambda: torch.fake_quantize_per_tensor_affine(full(0.5, 1.5, 2.5), 1.0, 0, -128, 127),
    162: lambda: stepped(torch.optim.Adam, 2, fused=True, weight_decay=0.1),
    163: lambda: stepped(torch.optim.SGD, 2, fused=True, lr=0.1, momentum=0.9, dampening=0.5),
    164: lambda: stepped(torch.optim.Adam, 40, foreach=True, capturable=False),
}


def exact(x: Tensor) -> Tensor:
    """Bits that tell apart what is not equal, signs of 0 included."""
    return torch.cat([x.nan_to_num(17.0, 1e30, -1e30).double().reshape(-1), x.signbit().double().reshape(-1)])
