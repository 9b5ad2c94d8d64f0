"""The operator ``example::precise_linear``: kernel, built on first use, shapes without data, gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

if TYPE_CHECKING:
    from torch._ops import OpOverload  # what torch.ops gives has no public name

SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def operator() -> OpOverload[[Tensor, Tensor, Tensor], Tensor]:
    """The operator: ``x`` (N, K), ``weight`` (M, K) and ``bias`` (M), float32 on the CPU, to (N, M).

    Raises:
        RuntimeError: The kernel does not compile.
    """
    cpp_extension.load("example_precise_linear", [str(SOURCE)], extra_cflags=["-O2"], is_python_module=False)
    torch.library.register_fake("example::precise_linear", _fake)
    torch.library.register_autograd("example::precise_linear", _backward, setup_context=_keep)
    result: OpOverload[[Tensor, Tensor, Tensor], Tensor] = torch.ops.example.precise_linear.default
    return result


def _fake(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Shape and dtype alone: what torch.compile traces with."""
    return x.new_empty(x.shape[0], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.t() @ x, grad.sum(0)
