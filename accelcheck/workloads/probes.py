"""Draws: sets of parameters and inputs that a case is judged with, random and structured ones (probes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.core.registry import unknown
from accelcheck.devices.layouts import sparse
from accelcheck.devices.torch_names import dropout_base
from accelcheck.workloads.base import Problem, Workload

SCALES = (1.0, 0.75, 0.875, 0.625)
"""Factors of the random inputs, by draw. A constant that is rounded once biases results in one direction at one scale,
but not at all. No factor is above 1: workloads choose ranges without overflows, with well-conditioned functions."""
DRAWS = len(SCALES)
_STRIDE = 7919
"""Distance between the seeds of draws, too large for the seed of a warm-up run (the case's seed plus 1, 2, ...)."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Set of parameters and inputs of a case.

    Attributes:
        number: Number of the random parameters and inputs, from 0 to ``DRAWS - 1``; 0 has the case's own seed.
        probe: Name of the probe applied to them; empty for random inputs.
    """

    number: int = 0
    probe: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.probe, f"draw {self.number}" if self.number or not self.probe else "")))

    @property
    def plain(self) -> Draw:
        """Draw with the same number and random inputs."""
        return Draw(self.number)

    @property
    def parameters(self) -> tuple[int, bool]:
        """Key that two draws share if and only if they have the same parameters: number, and change by a probe."""
        return self.number, self.probe == "channels"

    @property
    def special(self) -> bool:
        """True if the probe puts a NaN or an infinite element into an input."""
        return self.probe.startswith(("nan", "inf", "-inf"))

    def seed(self, seed: int) -> int:
        """Seed of the problem, from the case's seed."""
        return seed + _STRIDE * self.number

    def problem(self, workload: Workload, seed: int, dtype: str) -> Problem:
        """Problem of this draw: on the CPU, in FP32, bitwise the same in every process and on every machine.

        Its random modules drop nothing: see `quieted`. Seed and storage dtype, such as ``bfloat16``, are those of the
        case; the dtype decides which numbers are subnormal.
        """
        problem = quieted(workload.problem(self.seed(seed)))
        if self.probe:
            return PROBES[self.probe].apply(problem, getattr(torch, dtype))
        scale = 1.0 if "domain" in workload.traits else SCALES[self.number % len(SCALES)]
        return problem if scale == 1.0 else _changed(problem, lambda x: x * scale)


@dataclass(frozen=True)
class Probe:
    """Structured input, such as zeros or one NaN. A workload lists the names of its meaningful probes.

    Attributes:
        name: Name in `Workload.probes` and in failures.
        summary: Faults that it exposes.
        apply: ``apply(problem, dtype)`` returns the problem with other inputs (or parameters), possibly changed in
            place. ``dtype`` is the case's storage dtype.
        modes: Modes that use it. In backward mode, no value may lie where a function is not differentiable.
        reshapes: True if inputs get another shape. Slow techniques and lazy devices, which would recompile, skip it.
        repeated: True to apply it to the other random draws too, to find a bias that all of them share.
    """

    name: str
    summary: str
    apply: Callable[[Problem, torch.dtype], Problem]
    modes: frozenset[Mode] = frozenset({Mode.FORWARD})
    reshapes: bool = False
    repeated: bool = False


def draws(workload: Workload, mode: Mode, admitted: Callable[[Probe], bool]) -> list[Draw]:
    """Lists all draws of a case: draw 0, the further random draws, then the probes applied to draw 0.

    Only probes of the mode that are `admitted`, as by `Technique.admits`, are among them. A workload's name of an
    unknown probe raises `UnknownNameError`.
    """
    for name in workload.probes - PROBES.keys():
        raise unknown("probe", name, sorted(PROBES))
    probes = [PROBES[name] for name in sorted(workload.probes)]
    probes = [probe for probe in probes if mode in probe.modes and admitted(probe)]
    chosen = [Draw()]
    for number in range(1, workload.draws or DRAWS):
        chosen += [Draw(number), *(Draw(number, probe.name) for probe in probes if probe.repeated)]
    # Probes that change shapes come last: the others still run the code compiled for the first shape.
    return [*chosen, *(Draw(0, probe.name) for probe in sorted(probes, key=lambda probe: probe.reshapes))]


def _changed(problem: Problem, change: Callable[[Tensor], Tensor], *only: int) -> Problem:
    """Problem with other floating-point inputs: all, or those at `only`, else `ValueError`. Strides stay the same."""
    floating = {place for place, value in enumerate(problem.inputs) if _dense(value)}
    if not set(only) <= floating:
        raise ValueError(
            f"a probe changes input {', '.join(map(str, only))}; "
            f"floating-point inputs of the workload: {sorted(floating)}"
        )

    def replaced(index: int, value: Any) -> Any:
        if not _dense(value) or (only and index not in only):
            return value
        return _refilled(value, change(value))

    return replace(problem, inputs=tuple(replaced(index, value) for index, value in enumerate(problem.inputs)))


def _dense(value: Any) -> bool:
    """True for a strided floating-point tensor: probes do not change what is sparse."""
    return isinstance(value, Tensor) and value.is_floating_point() and not sparse(value)


def _refilled(value: Tensor, content: Tensor) -> Tensor:
    """Gives `content` the strides of `value`; of elements that share memory (expanded dimensions), the first counts."""
    if content.stride() == value.stride() or content.shape != value.shape:
        return content
    size = value.untyped_storage().nbytes() // value.element_size()
    base = value.as_strided((size,), (1,), 0).clone()
    view = base.as_strided(value.shape, value.stride(), value.storage_offset())
    expanded = [0 if stride == 0 else slice(None) for stride in value.stride()]
    view[tuple(expanded)] = content[tuple(expanded)]
    return view


def _each(change: Callable[[Tensor], Tensor], *only: int) -> Callable[[Problem, torch.dtype], Problem]:
    """Makes the `Probe.apply` of a change that depends on the inputs alone, not on the dtype."""
    return lambda problem, _: _changed(problem, change, *only)


def _hot(x: Tensor) -> Tensor:
    """One-hot rows: row r is 1 at position r modulo the width, and 0 elsewhere."""
    rows = x.numel() // max(1, x.shape[-1])
    hot = torch.zeros(rows, x.shape[-1])
    hot[torch.arange(rows), torch.arange(rows) % x.shape[-1]] = 1.0
    return hot.reshape(x.shape)


def _exponents(count: int) -> Tensor:
    return 2.0 ** (torch.arange(count) % 9 - 4)


def _channels(problem: Problem, dtype: torch.dtype) -> Problem:
    """Scales parameters, not inputs: each output channel by another power of two."""
    with torch.no_grad():
        for parameter in problem.module.parameters():
            if parameter.dim() > 1:
                scales = _exponents(parameter.shape[0])
                parameter.mul_(scales.reshape(-1, *[1] * (parameter.dim() - 1)))
    return problem


def _midpoints(x: Tensor) -> Tensor:
    """Midpoints between neighbours of bfloat16 (even rows) and float16 (odd rows), exact in FP32."""
    rows = torch.arange(x.numel() // max(1, x.shape[-1])).reshape(*x.shape[:-1], 1)
    odd = 2 * (torch.arange(x.numel()).reshape(x.shape) % 128) + 1
    return torch.where(x < 0, -1.0, 1.0) * (1.0 + odd * torch.where(rows % 2 == 0, 2.0**-8, 2.0**-11))


def _cancel(x: Tensor) -> Tensor:
    """One large number among ones: a sum in half precision loses the ones."""
    x = torch.ones_like(x)
    x[..., 0] = 2048.0
    return x


def _tiny(problem: Problem, dtype: torch.dtype) -> Problem:
    """Replaces inputs by about half the smallest normal number: results are subnormal, or 0 where they are flushed."""
    return _changed(problem, lambda x: torch.where(x < 0, -0.5, 0.5) * torch.finfo(dtype).tiny * (1.0 + x.abs() / 8))


def _huge(x: Tensor) -> Tensor:
    """Numbers of about 1e4, whose squares overflow float16."""
    return 8e3 * torch.where(x < 0, -1.0, 1.0) + 1e3 * x / x.abs().max()


def _future(x: Tensor) -> Tensor:
    """A last key or value much larger than all others: a query that wrongly sees it has a wrong output."""
    x = x.clone()
    x[..., -1, :] *= 16.0
    return x


def _slice(problem: Problem, dtype: torch.dtype) -> Problem:
    """Drops the first sample: each other one must give its result in the whole batch."""
    return replace(problem, inputs=tuple(v[1:].clone() if isinstance(v, Tensor) else v for v in problem.inputs))


def _special(number: float, operand: int) -> Callable[[Problem, torch.dtype], Problem]:
    def change(x: Tensor) -> Tensor:
        # `_refilled` takes the first of elements that share memory.
        place = tuple(0 if stride == 0 else size // 2 for size, stride in zip(x.shape, x.stride(), strict=True))
        x = x.clone()
        x[place] = number
        return x

    return _each(change, operand)


BOTH = frozenset({Mode.FORWARD, Mode.BACKWARD})

PROBES = {
    probe.name: probe
    for probe in (
        Probe("zeros", "Zeros: only the bias is left, and zero points of integer grids must stand for 0.",
            _each(torch.zeros_like)),
        Probe("ones", "Ones: wrong padding and wrong counts of terms.", _each(torch.ones_like)),
        Probe("one-hot", "Each row selects one weight: wrong indices, strides and tails.", _each(_hot)),
        Probe("one-hot-values", "Values that make the output of attention its weights.", _each(_hot, 2), repeated=True),
        Probe("powers", "Features of different magnitudes: absolute tolerances and shared scales.",
            _each(lambda x: x * _exponents(x.shape[-1]))),
        Probe("channels", "Output channels of different magnitudes: scales along the wrong axis.", _channels),
        Probe("midpoints", "Ties of half precision: truncation in place of rounding to nearest.", _each(_midpoints)),
        Probe("cancel", "One large number among ones: accumulation in half precision.", _each(_cancel)),
        Probe("tiny", "Subnormal numbers, forward and backward: flushing to zero.", _tiny, BOTH),
        Probe("huge", "Inputs near 1e4: squares that overflow.", _each(_huge)),
        # The outputs of a homogeneous workload are scaled exactly: every rounding is the same.
        Probe("scaled", "1024 times the inputs: saturation, clipping.", _each(lambda x: 1024 * x)),
        Probe("future", "A large last key and value, which earlier queries must not see.", _each(_future, 1, 2)),
        # Queries scaled by 8: attention weights near 0 and 1, where an error of the scores matters most.
        Probe("sharp", "Attention to few keys: a wrong scale of the scores.", _each(lambda x: 8 * x, 0)),
        Probe("slice", "A part of the batch: samples that depend on each other, stale shapes.", _slice, reshapes=True),
        *(
            Probe(f"{word}[{operand}]", f"One {word} in an operand: must reach exactly the results that depend on it.",
                _special(number, operand))
            for word, number in (("nan", float("nan")), ("inf", float("inf")), ("-inf", float("-inf")))
            for operand in range(3)
        ),
    )
}  # fmt: skip
"""All probes, by name."""


def random_modules(module: nn.Module) -> dict[str, str]:
    """Modules that draw random numbers in training: descriptions by name."""
    return {name or "the module itself": str(part) for name, part, _ in _dropping(module)}


def quieted(problem: Problem) -> Problem:
    """Problem with its random modules changed in place so that they drop nothing."""
    for _, part, rate in _dropping(problem.module):
        setattr(part, rate, 0.0)
    return problem


def _dropping(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yields name, module, and name of the rate's attribute of each module that drops anything."""
    for name, part in module.named_modules():
        rate = "p" if isinstance(part, dropout_base) else "dropout"
        if isinstance(part, (dropout_base, nn.MultiheadAttention, nn.RNNBase)) and getattr(part, rate) > 0:
            yield name, part, rate
