"""Ways to plant a change in the call, the result, an operator, every matrix product, or the optimizer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import TorchDispatchMode, disable_current_modes
from accelcheck.selftest.faults.base import Change
from accelcheck.workloads.base import OptimizerMaker, Program, Result

Kernel: TypeAlias = "Callable[..., Tensor]"
"""Function that computes an operator of one result."""
Product: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
Run: TypeAlias = "Callable[[Mode], Result]"

BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Significant bits, the implicit one counted."""


def nothing(program: Program) -> None:
    """Leave the program as it is."""
    del program


def always(how: Callable[[Any], Change]) -> Callable[[Callable[..., Any]], Callable[..., Change]]:
    """A decorator for plants without degrees: ``how(function)`` is the change, and the docstring is the summary."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Change]:
        @functools.wraps(function)
        def plant(strength: float = 1.0) -> Change:
            return how(function)

        return plant

    return decorate


def changing(change: Change) -> Change:
    """Change the program itself."""
    return change


def both(*changes: Change) -> Change:
    """Make several changes, one after the other."""

    def change(program: Program) -> None:
        for part in changes:
            part(program)

    return change


def calling(function: Callable[..., Any]) -> Change:
    """Compute ``function(module, *inputs)`` in place of ``module(*inputs)``; differentiable, so gradients follow."""

    def change(program: Program) -> None:
        program.call = functools.partial(function, program.module)

    return change


def wrapping(function: Callable[..., Any]) -> Change:
    """Compute ``function(call, *inputs)`` in place of ``call(*inputs)``, the technique's own call."""

    def change(program: Program) -> None:
        program.call = functools.partial(function, program.module if program.call is None else program.call)

    return change


def output(function: Callable[[Tensor], Tensor]) -> Change:
    """Apply a function to the outputs of each result."""
    return replacing(out=function)


def replacing(**changes: Callable[[Tensor], Tensor]) -> Change:
    """Apply functions to the tensors of the result whose paths begin with a word (``out``, ``grad``)."""

    def edit(result: Result) -> None:
        for path, tensor in result.items():
            for start, function in changes.items():
                if path.startswith(start):
                    result[path] = function(tensor)

    return editing(edit)


def editing(edit: Callable[[Result], None]) -> Change:
    """Apply `edit` to the result of each run."""

    def run(plain: Run, mode: Mode) -> Result:
        result = plain(mode)
        edit(result)
        return result

    return running(run)


def running(run: Callable[[Run, Mode], Result]) -> Change:
    """Compute ``run(plain, mode)`` in place of ``plain(mode)``, a whole run of the program."""

    def change(program: Program) -> None:
        program.run = functools.partial(run, program.run)  # type: ignore[method-assign]  # on this instance alone

    return change


def aside(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a kernel of a function: it computes on CPU copies of its tensors, outside of dispatch modes.

    The result goes back to the device of the first tensor; gradients do not pass.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        device = next(value.device for value in args if isinstance(value, Tensor))
        with disable_current_modes(), torch.no_grad():
            held = (value.detach().cpu() if isinstance(value, Tensor) else value for value in args)
            return function(*held, **kwargs).to(device)

    return call


def backwards(wrong: Callable[..., Tensor]) -> Change:
    """Give the module's forward pass the gradients of ``wrong(module, *inputs)``; for one output, without buffers."""

    def call(module: Any, *inputs: Any) -> Any:
        apply: Any = _Backwards.apply
        return apply(module, wrong, len(inputs), *inputs, *module.parameters())

    return calling(call)


class _Backwards(torch.autograd.Function):
    """See `backwards`."""

    @staticmethod
    def forward(ctx: Any, module: Any, wrong: Callable[..., Tensor], count: int, *tensors: Tensor) -> Tensor:
        ctx.module, ctx.wrong, ctx.count = module, wrong, count
        ctx.save_for_backward(*tensors)
        out: Tensor = module(*tensors[:count])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        again = torch.is_grad_enabled()  # as in a double backward pass
        tensors = ctx.saved_tensors
        asked = [tensor for tensor in tensors if tensor.requires_grad]
        with torch.enable_grad():
            out = ctx.wrong(ctx.module, *tensors[: ctx.count])
            gradients = iter(torch.autograd.grad(out, asked, grads[0], create_graph=again))
        return None, None, None, *(next(gradients) if tensor.requires_grad else None for tensor in tensors)


def within(dispatch: Callable[[], TorchDispatchMode]) -> Change:
    """Run the program, backward pass included, under a dispatch mode, below autograd."""

    def run(plain: Run, mode: Mode) -> Result:
        with dispatch():
            return plain(mode)

    def change(program: Program) -> None:  # benchmarks/explain_faults.py knows plants of kernels by this function
        running(run)(program)

    return change


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates the mode only in part
    """Calls ``kernel(func, *args, **kwargs)`` for operators that have one, unless it is set idle."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.kernels = kernels
        self.idle = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0].removeprefix("aten::")
        kernel = None if self.idle else self.kernels.get(name)
        return func(*args, **(kwargs or {})) if kernel is None else kernel(func, *args, **(kwargs or {}))


def kernels(**by_name: Callable[..., Any]) -> Change:
    """Replace kernels, by operator."""
    return within(lambda: Kernels(by_name))


def kernel(*names: str, plant: Callable[..., Change] = kernels) -> Callable[[Callable[..., Any]], Change]:
    """Replace the kernels of these operators by one function; `plant` is `kernels` or `backward_kernels`."""
    return lambda function: plant(**dict.fromkeys(names, function))


def convolution(**by_pass: Callable[..., Any]) -> Change:
    """Replace kernels of convolution, under their names on all backends."""
    names = {"forward": "convolution", "backward": "convolution_backward"}
    by_operator = {names[word]: kernel for word, kernel in by_pass.items()}
    return kernels(**by_operator, **{f"{name}_overrideable": kernel for name, kernel in by_operator.items()})


def backward_kernels(**by_name: Callable[..., Any]) -> Change:
    """Replace kernels, by operator, in the backward pass alone."""

    def change(program: Program) -> None:
        mode = Kernels(by_name)

        def forward(call: Callable[..., Any], *inputs: Any) -> Any:
            mode.idle = True
            try:
                return call(*inputs)
            finally:
                mode.idle = False

        both(wrapping(forward), within(lambda: mode))(program)

    return change


def products(product: Product, plant: Callable[..., Change] = kernels) -> Change:
    """Replace the kernel of every matrix product, ``(..., M, K) @ (..., K, N)``, computed on the CPU.

    The product's result is rounded to the dtype of its tensors. `plant` is `kernels`, or `backward_kernels` for the
    backward pass alone.
    """
    product = aside(product)

    def mm(func: Any, a: Tensor, b: Tensor) -> Tensor:
        out = product(a, b).to(a.dtype)
        func(a, b)  # so that observers of the run see the operator
        return out

    def addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        # A correct kernel adds the bias in its accumulator: once, before the result is rounded to the storage dtype.
        out = (product(a, b).to(accumulator(a)) + bias.to(accumulator(a))).to(a.dtype)
        func(bias, a, b)
        return out

    return plant(mm=mm, bmm=mm, addmm=addmm)


def optimizing(make: Callable[[Any], torch.optim.Optimizer]) -> Change:
    """Replace the optimizer by one made from the parameters."""

    def change(program: Program) -> None:
        program.optimizer = make

    return change


@dataclass(frozen=True)
class Spoiled:
    """A maker of the program's own optimizer that changes it, and can be sent to other processes."""

    make: OptimizerMaker
    spoil: Callable[[torch.optim.Optimizer], None]
    """Change of the optimizer; at the top of a module where it is sent to other processes."""

    def __call__(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self.make(parameters)
        self.spoil(optimizer)
        return optimizer


@always
def spoiling(spoil: Callable[[torch.optim.Optimizer], None]) -> Change:
    """Change the program's own optimizer whenever it is made."""

    def change(program: Program) -> None:
        if program.optimizer is None:
            raise TypeError("expected a program with an optimizer")
        program.optimizer = Spoiled(program.optimizer, spoil)

    return change


def accumulator(tensor: Tensor) -> torch.dtype:
    """The dtype in which correct kernels accumulate."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    """Multiply every element by a factor, rounded once; integers are unchanged."""
    return lambda tensor: _times(tensor, factor) if tensor.is_floating_point() else tensor


@aside
def _times(tensor: Tensor, factor: float) -> Tensor:
    return (tensor.double() * factor).to(tensor.dtype)


@aside
def rounded_to(bits: int, tensor: Tensor) -> Tensor:
    """Rounds FP32 to `bits` significant bits, to nearest, ties to even; gradients do not pass."""
    drop = 24 - bits
    raw = tensor.contiguous().view(torch.int32)
    even = (raw >> drop) & 1
    rounded = ((raw + (1 << (drop - 1)) - 1 + even) >> drop << drop).view(torch.float32)
    return torch.where(torch.isfinite(tensor), rounded, tensor)


@aside
def truncated_to(bits: int, tensor: Tensor) -> Tensor:
    """Truncates FP32 to `bits` significant bits; gradients do not pass."""
    drop = 24 - bits
    return (tensor.contiguous().view(torch.int32) >> drop << drop).view(torch.float32)


def truncated(product: Product, x: Tensor, y: Tensor) -> Tensor:
    """Computes ``product(x, y)``, truncated to their dtype instead of rounded to nearest."""
    if x.dtype == torch.float32:
        exact = product(x.double(), y.double())
        near = exact.float()
        beyond = near.double().abs() > exact.abs()  # farther from 0 than the exact product
        return torch.where(beyond, near.nextafter(torch.zeros_like(near)), near)
    return truncated_to(BITS[x.dtype], product(x.float(), y.float())).to(x.dtype)
