"""Emulation of quantization in FP64, from the documented formulas: the results of a correct implementation.

Integers are computed in FP32, as the schemes prescribe: scales are FP32 numbers, and a value x becomes
round(x * (1 / s)) with ties to even. All further arithmetic is FP64. A correct candidate then differs by FP32 rounding
errors, and rarely by one quantum, where a value is within rounding error of a tie: see `Quantizer.flips`.
"""

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor, nn

from accelcheck.devices.torch_names import disable_current_modes
from accelcheck.verify.precision import UNIT_ROUNDOFF, MatrixUnit
from accelcheck.workloads.draw import by_value

EPSILON = torch.finfo(torch.float32).eps
"""Smallest scale of torch.ao's observers and of torchao's Int8Tensor."""
SMALL_SCALE = 6.1e-5
"""Smallest scale of a dynamic activation: the smallest normal FP16 number (ATen/native/quantized/cpu/QuantUtils.h)."""
RELATIVE = 2.0**-20
"""Relative error that is allowed for FP32 activations and their ranges: 2**4 unit roundoffs of 2**-24, for values that
have passed a few layers."""
REACH = 2.0**7 * RELATIVE
"""Distance to a tie, in quanta, within which correct implementations may round either way; for positions up to 2**7."""
SCALE_ERROR = 4 * UNIT_ROUNDOFF["float32"]
"""Relative distance of two correct scales. One rounds up to three times: the reciprocal of the largest magnitude, its
product with the largest integer, and the reciprocal of that; the emulation divides once."""
POSITION_ERROR = 7 * UNIT_ROUNDOFF["float32"]
"""Relative distance of two correct positions of an exact weight. One has a scale that is rounded twice, then its
reciprocal and the product with the weight; the emulation a scale, its reciprocal and the product."""
Scale = tuple[Tensor, int]
"""FP32 scale, broadcastable to the quantized tensor, and zero point."""


def symmetric_scale(x: Tensor, dim: int | None = -1) -> Tensor:
    """Computes the FP32 scale of a symmetric int8 range, max|x| / 127.5 over `dim`, which becomes 1; over all for None.

    The rule of torch.ao's MinMaxObserver and PerChannelMinMaxObserver (``per_tensor_symmetric``,
    ``per_channel_symmetric``, qint8) and of torchao's ``choose_qparams_affine`` (``MappingType.SYMMETRIC``, int8).
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return (largest / 127.5).clamp(min=EPSILON)


class RoundedSides:
    """Sides to which a run rounds values that correct implementations may round to either; no errors without `flips`.

    Scales all err to one side, since an implementation computes them in one way, and elements to one side each. Runs
    come in antithetic pairs, of generators whose seeds differ in the last bit: where one goes up, the other goes down.
    So every pair moves each movable element, and the n-th runs of all draws have the errors of scales on the same side.
    """

    def __init__(self, flips: torch.Generator | None) -> None:
        self._to = 0 if flips is None else 1 - 2 * (flips.initial_seed() % 2)
        self._pair = 0 if flips is None else flips.initial_seed() // 2

    def up(self, value: Tensor) -> Tensor:
        """Marks the elements that go up, by their values: equal ones go to the same side."""
        return (by_value(torch.Generator().manual_seed(self._pair), value) < 0.5) == (self._to > 0)

    def scale(self, scale: Tensor) -> Tensor:
        """Moves FP32 scales to this run's side; returns FP64."""
        return scale.double() * (1 + self._to * SCALE_ERROR)

    def position(self, position: Tensor, value: Tensor, relative: float = POSITION_ERROR) -> Tensor:
        """Moves FP32 positions of values of the same shape, by default exact ones, to a run's sides; returns FP64."""
        if not self._to:
            return position.double()
        return position.double() * (1 + relative * torch.where(self.up(value), 1.0, -1.0))


def rounded(position: Tensor, value: Tensor, flips: torch.Generator | None, reach: float = REACH) -> Tensor:
    """Rounds positions to the nearest integers, ties to even; with `flips`, as some correct implementation rounds them.

    A CPU generator `flips` rounds every element closer than `reach` quanta to a tie to either side with probability
    1/2; elements with equal `value`, of the shape of `position`, go to the same side.
    """
    integer = torch.round(position)
    if flips is None:
        return integer
    beyond = position - integer
    other = torch.where(beyond < 0, integer - 1, integer + 1)
    torn = 0.5 - beyond.abs() < reach
    return torch.where(torn & RoundedSides(flips).up(value), other, integer)


@dataclass(frozen=True)
class Limits:
    """Range of a floating-point format that `torch.finfo` does not know; attributes as of its result."""

    smallest_normal: float
    eps: float
    max: float


def nearest(
    x: Tensor, dtype: torch.dtype | Limits, flips: torch.Generator | None = None, relative: float = RELATIVE
) -> Tensor:
    """Rounds `x` to the nearest numbers of a floating-point `dtype`, within its range, in the dtype of `x`.

    A correct implementation may have a `relative` error of `x`; `flips` is that of `rounded`.
    """
    limits = torch.finfo(dtype) if isinstance(dtype, torch.dtype) else dtype
    _, exponent = torch.frexp(x)
    # Neighbours are eps 2**(exponent - 1) apart, but not closer than subnormal numbers are.
    unit = torch.ldexp(torch.ones_like(x), exponent - 1).clamp(min=limits.smallest_normal) * limits.eps
    reach = relative / limits.eps * 2  # positions are up to 2 / eps
    return (rounded(x / unit, x, flips, reach) * unit).clamp(-limits.max, limits.max)


def nearest_of(numbers: Tensor, position: Tensor) -> Tensor:
    """Rounds positions to the nearest of sorted `numbers`, both FP64; ties go up."""
    upper = torch.searchsorted(numbers, position).clamp(1, len(numbers) - 1)
    down = position - numbers[upper - 1] < (numbers[upper] - numbers[upper - 1]) * 0.5
    return numbers[torch.where(down, upper - 1, upper)]


def dynamic_map(*, signed: bool) -> Tensor:
    """Lists the 256 numbers of the dynamic map, FP64 from FP32 values: T. Dettmers, arXiv:1511.04561, 2110.02861."""
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        middles = (10.0 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)).double().tolist()
        values += middles + ([-x for x in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32).double()


def per_token(x: Tensor) -> Scale:
    """Computes torchao's scale of dynamic activations: a symmetric one per row along the last dimension."""
    return symmetric_scale(x), 0


@dataclass(frozen=True)
class DynamicRange:
    """Rule of ATen's ``ChooseQuantizationParams`` for a quint8 activation: one affine scale from the tensor's range.

    `steps`, the largest integer, is 255, or 127 with ``reduce_range`` (fbgemm, x86, oneDNN): two products fit 16 bits.
    """

    steps: int

    def __call__(self, x: Tensor) -> Scale:
        low = min(float(x.amin()), 0.0)
        high = max(float(x.amax()), 0.0)
        scale = (high - low) / self.steps
        if scale < 2.0**-149 or math.isinf(float(1 / torch.tensor(scale, dtype=torch.float32))):
            scale = 0.1
        if scale < SMALL_SCALE:
            factor = SMALL_SCALE / scale
            low, high, scale = low * factor, high * factor, SMALL_SCALE
        # Take the zero point from the end of the range whose terms are smaller, as ATen does.
        from_low, from_high = -low / scale, self.steps - high / scale
        zero = from_low if -abs(low / scale) < self.steps - abs(high / scale) else from_high
        return torch.tensor(scale, dtype=torch.float32), round(min(max(zero, 0.0), float(self.steps)))


class FixedRange:
    """Rule of torch.ao's MinMaxObserver (``per_tensor_affine``, quint8): one affine scale from a calibrated range.

    The range is from `low` to `high`, with `low` > `high` if nothing was seen; integers go from 0 to `steps`.
    """

    def __init__(self, low: float, high: float, steps: int) -> None:
        # Computed once: the calibrated range does not depend on how a run rounds.
        self.scale, self.zero = torch.tensor(1.0), 0  # the observer's defaults without any value
        if low <= high:
            least = torch.tensor(min(low, 0.0), dtype=torch.float32)
            largest = torch.tensor(max(high, 0.0), dtype=torch.float32)
            self.scale = ((largest - least) / float(steps)).clamp(min=EPSILON)
            self.zero = min(max(-round(float(least / self.scale)), 0), steps)

    def __call__(self, x: Tensor) -> Scale:
        return self.scale, self.zero


class Quantizer(nn.Module):
    """Quantizes and dequantizes activations: FP64 in, FP64 out, of the same shape.

    The attribute `flips`, None or a CPU generator, makes a run one of those that a correct implementation may produce.
    With a relative FP32 error e in x, a value whose position p = x / s is within |p| e of n + 1/2 may be rounded either
    way, one quantum apart; a value further from a tie may not. With a generator, every element closer than `REACH` to a
    tie is therefore rounded to either side with probability 1/2, equal values to the same side. Of evenly distributed
    values this is one in 1 / (2 REACH) = 4096. With a symmetric range that has as many steps as integers, it includes
    the largest value of each row, whose position is 127.5 by construction. Every two runs move each such element, see
    `RoundedSides`. The scale, a common factor, changes by up to `RELATIVE`, as the values do, and by `SCALE_ERROR` to
    one side. `rule` returns scale and zero point of an FP32 tensor; integers go from `low` to `high`.
    """

    def __init__(self, rule: Callable[[Tensor], Scale], low: int, high: int) -> None:
        super().__init__()
        self.rule, self.low, self.high = rule, low, high
        self.flips: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        single = x.float()
        scale, zero = self.rule(single)
        if self.flips is not None:
            chance = 2 * torch.rand((), generator=self.flips) - 1
            scale = scale * (1 + RELATIVE * chance)
        integer = rounded(single * (1.0 / scale), single, self.flips)
        return ((integer + zero).clamp(self.low, self.high) - zero).double() * RoundedSides(self.flips).scale(scale)


class Dequantized(nn.Module):
    """Linear layer in FP64 with a dequantized weight: ``held(weight, side)`` of the FP32 one ``(N, K)``.

    The attribute `flips`, None or a CPU generator, makes a run one of those that a correct implementation may produce:
    scales and positions of weights, which are exact, err as far as they can, see `RoundedSides`. The modules `before`
    and `after` quantize and dequantize input and output.
    """

    original: Tensor
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        linear: nn.Linear,
        held: Callable[[Tensor, RoundedSides], Tensor],
        before: nn.Module | None = None,
        after: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("original", linear.weight.detach().float())
        self.register_buffer("weight", held(self.original, RoundedSides(None)))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().double())
        self.held = held
        self.before = nn.Identity() if before is None else before
        self.after = nn.Identity() if after is None else after
        self.flips: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(F.linear(self.before(x), self.taken(), self.bias))
        return out

    def taken(self) -> Tensor:
        """Computes the weight of this run."""
        if self.flips is None:
            return self.weight
        with torch.no_grad(), disable_current_modes():  # the oracle must not round once more
            return self.held(self.original, RoundedSides(self.flips))


def symmetric(weight: Tensor, scale: Tensor, side: RoundedSides) -> Tensor:
    """Rounds an FP32 weight to int8 multiples of FP32 scales; returns FP64."""
    position = side.position(weight * (1.0 / scale), weight)
    return torch.round(position).clamp(-128, 127) * side.scale(scale)


def summed(a: Tensor, b: Tensor, unit: MatrixUnit) -> Tensor:
    """Multiplies ``(M, K)`` by ``(K, N)``, FP64 with values of a float8 dtype, as a matrix unit adds up; FP64 too."""
    whole = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    part = torch.zeros_like(whole)
    exponents = _exponent(a), _exponent(b)
    for first in range(0, a.shape[1], unit.terms):
        here = slice(first, first + unit.terms)
        products = a[:, here].unsqueeze(1) * b[here].t()  # (M, N, terms), exact
        largest = (exponents[0][:, here].unsqueeze(1) + exponents[1][here].t()).amax(-1).maximum(_exponent(part))
        step = torch.ldexp(torch.ones_like(part), largest - unit.fraction)
        total = ((products / step.unsqueeze(-1)).trunc().sum(-1) + (part / step).trunc()) * step
        step = torch.ldexp(torch.ones_like(part), _exponent(total) - unit.kept)
        part = (total / step).trunc() * step
        if unit.promoted and (first + unit.terms) % unit.promoted == 0:
            whole = (whole + part).float().double()
            part = torch.zeros_like(part)
    return (whole + part).float().double()


def _exponent(x: Tensor) -> Tensor:
    """Returns exponents e with 1 <= ``|x|`` / 2**e < 2, and for 0 one far below all others."""
    return torch.where(x == 0, -999, torch.frexp(x).exponent - 1)


class EmulatedLinear(Dequantized):
    """FP64 emulation of a linear layer with an int8 weight: see `Dequantized`.

    The weight has one scale per output channel for a `dim` of -1, a single one for None. With `integer_bias` the bias
    is rounded to int32, with the product of both scales as its scale: `before` must then have a fixed one.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        dim: int | None = -1,
        before: Quantizer | None = None,
        after: Quantizer | None = None,
        integer_bias: bool = False,
    ) -> None:
        super().__init__(
            linear, lambda weight, side: symmetric(weight, symmetric_scale(weight, dim), side), before, after
        )
        if integer_bias and self.bias is not None and before is not None:
            step = before.rule(self.original)[0].double() * symmetric_scale(self.original, dim).double().flatten()
            self.bias = torch.round(self.bias / step) * step


@dataclass
class Ranges:
    """Ranges of the inputs and outputs of a layer over all calls, as in MinMaxObserver."""

    low_in: float = math.inf
    high_in: float = -math.inf
    low_out: float = math.inf
    high_out: float = -math.inf

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
        """Updates the ranges; a forward hook."""
        self.low_in = min(self.low_in, float(inputs[0].amin()))
        self.high_in = max(self.high_in, float(inputs[0].amax()))
        self.low_out = min(self.low_out, float(out.amin()))
        self.high_out = max(self.high_out, float(out.amax()))


def is_linear(module: nn.Module) -> bool:
    """Returns whether quantization converts a module: `nn.Linear`, but no subclass such as attention's projection."""
    return type(module) is nn.Linear


def calibrate(module: nn.Module, inputs: tuple[Any, ...]) -> dict[nn.Module, Ranges]:
    """Runs the module once without quantization; returns the ranges of each linear layer's inputs and outputs."""
    seen = {layer: Ranges() for layer in module.modules() if is_linear(layer)}
    with ExitStack() as hooks, torch.no_grad():
        for layer, watcher in seen.items():
            hooks.enter_context(layer.register_forward_hook(watcher))
        module(*inputs)
    return seen


def replaced(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Replaces each linear layer of a module in place by ``make(layer)``; a layer used twice gets one replacement.

    Returns `module`, or its replacement if it is a linear layer itself.
    """
    made: dict[nn.Module, nn.Module] = {}

    def replacement(layer: nn.Module) -> nn.Module:
        if not isinstance(layer, nn.Linear) or not is_linear(layer):
            return layer
        if layer not in made:
            made[layer] = make(layer)
        return made[layer]

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            setattr(parent, name, replacement(child))
    return replacement(module)


def eval_copy(module: nn.Module) -> nn.Module:
    """Makes a deep copy in evaluation mode."""
    return copy.deepcopy(module).eval()
