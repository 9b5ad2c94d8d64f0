"""Requirements of a compute platform: a workload for each item, run by the technique ``platform`` alone.

The inputs of a dtype's workload are bit patterns as int64, which `accelcheck.checks.platform` takes for its numbers.
"""

from functools import partial

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.draw import initialise, integers, learned, normal, separated
from accelcheck.workloads.mlp import Mlp

NAME = "platform"
"""Name of the technique."""
RANDOM = 96
"""Random bit patterns of a format of more than 8 bits."""
CLASSES = 10


def _patterns(bits: int, generator: torch.Generator, extent: int) -> Problem:
    """Every bit pattern of a format of up to 8 bits; else single set or cleared bits, runs of low bits, random ones."""
    if bits <= 8:
        patterns = torch.arange(1 << bits)
    else:
        ones = torch.ones((), dtype=torch.int64) << torch.arange(bits)
        random = integers(generator, -(1 << 63), (1 << 63) - 1, RANDOM)
        patterns = torch.cat([ones, ~ones, ones - 1, torch.tensor([0, -1]), random])
        if bits < 64:
            patterns &= (1 << bits) - 1
    return Problem(nn.Identity(), (patterns,))


def _vectors(generator: torch.Generator, extent: int) -> Problem:
    """Two vectors of small integers: their sums and products are exact in FP32."""
    return Problem(nn.Identity(), tuple(integers(generator, -99, 100, 64 + extent).float() for _ in range(2)))


def _layers(generator: torch.Generator, extent: int) -> Problem:
    return Problem(initialise(Mlp(), generator, relu=True), (separated(generator, 32 + extent, 48),))


def _timed(generator: torch.Generator, extent: int) -> Problem:
    module = initialise(Mlp(features=512, hidden=1024, classes=CLASSES), generator, relu=True)
    batch = 128 + extent
    x = separated(generator, batch, 512)
    return learned(module, x, integers(generator, 0, CLASSES, batch), rate=0.01, steps=1)


def _nothing(generator: torch.Generator, extent: int) -> Problem:
    """Problem with an unused input: the item is about other processes."""
    empty: Tensor = normal(generator, 1)
    return Problem(nn.Identity(), (empty,))


_DTYPES = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "float4": 4,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4,
}  # fmt: skip
"""Bits of each dtype with a point of its own in PyTorch's Compute Platform Quality Levels."""
_workload = partial(Workload, dtypes=frozenset({"float32"}), techniques=frozenset({NAME}))
_item = partial(_workload, modes=frozenset({Mode.PLATFORM}))

WORKLOADS = (
    *(
        _item(f"dtype-{name}",
            f"Tensors of {name}: made, copied, cast, added, multiplied, reduced; "
            f"{'every bit pattern' if bits <= 8 else 'extreme and random numbers'}.",
            partial(_patterns, bits))
        for name, bits in _DTYPES.items()
    ),
    *(
        _workload(f"{mode}-{work}",
            "Three linear layers, 512 to 1024 to 1024 to 10, on 128 samples in "
            f"{mode} mode, beside the host's CPU: {what}.",
            _timed, modes=frozenset({Mode.PLATFORM_SPEED}), traits=frozenset({"matmul", "linear", "training"}))
        for mode in ("eager", "graph")
        for work, what in (("inference", "a forward pass"), ("training", "a training step"))
    ),
    _item("distributed-backend",
        "The device's library of collectives: an all-reduce and an all-gather of 64 numbers of each rank.", _vectors),
    _item("cpp-extension", "An operator in C++, compiled by torch.utils.cpp_extension, that computes on the device.",
        _vectors),
    _item("profiler", "Three linear layers under torch.profiler: the operators, and the device's own events.", _layers),
    _item("import-with-hardware", "A new process that imports torch, and computes on the device.", _nothing),
    _item("import-without-hardware",
        "A new process that imports torch where the device is hidden, and computes on the CPU.", _nothing),
)  # fmt: skip
