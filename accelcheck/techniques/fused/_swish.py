"""Swish as a user writes it in Triton: a kernel for blocks of elements, and operators of torch that launch it."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton
from triton.runtime.interpreter import InterpretedFunction


def swish_kernel(x: Any, out: Any, count: Any, width: tl.constexpr) -> None:
    """Writes a block of the result."""
    place = tl.program_id(0) * width + tl.arange(0, width)
    value = tl.load(x + place, mask=place < count)
    tl.store(out + place, value / (1.0 + tl.exp(-value)), mask=place < count)


COMPILED, INTERPRETED = triton.jit(swish_kernel), InterpretedFunction(swish_kernel)


def launch(kernel: Any, x: Tensor) -> Tensor:
    """Launches a kernel over blocks of 128 elements of a dense tensor; returns the result."""
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 128),)](x, out, x.numel(), width=128)
    return out


def slope(x: Tensor) -> Tensor:
    """Computes the derivative."""
    share = torch.sigmoid(x)
    return share * (1.0 + x * (1.0 - share))


def swish(make: Any, name: str, run: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    """Defines ``accelcheck::NAME`` by `make`, which launches ``run(x)``; returns a function that takes a layer first."""

    def launched(x: Tensor) -> Tensor:
        return launch(run(x), x)

    whole = make(name, launched, mutates_args=(), schema="(Tensor x) -> Tensor")
    whole.register_autograd(
        lambda ctx, grad: grad * slope(*ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005 - by keyword
    )
    if make is custom_op:  # tracing does not look inside
        whole.register_fake(torch.empty_like)
    return lambda _, x, *__: whole(x.contiguous())


by_operator = swish(custom_op, "accelcheck::silu", lambda x: INTERPRETED if x.device.type == "cpu" else COMPILED)
by_traced_operator = swish(triton_op, "accelcheck::silu_traced", lambda _: wrap_triton(COMPILED))
