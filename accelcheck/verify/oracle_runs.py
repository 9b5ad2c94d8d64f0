"""Runs of a workload's program that a reference is computed from: in FP64, in FP64 with rounding errors, and in eager."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.verify import room
from accelcheck.verify.algorithms import Algorithm
from accelcheck.verify.effort import FULL, Effort
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.reference import OracleError
from accelcheck.verify.rounding import Nearest, Rounding
from accelcheck.workloads.base import Program, Result, flatten, is_inexact
from accelcheck.workloads.dispatch import unfused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from accelcheck.workloads.base import OptimizerMaker, Workload
    from accelcheck.workloads.probes import Draw

MOST_NAMED = 3
"""Most attributes that an error names."""
_NO_KERNEL = re.compile(r"not implemented for|scalar type|dtype")
"""Torch's messages for an operator without a CPU kernel for a dtype, or a workload with constants in another one."""


def _unchanged(value: Any, *_: Any) -> Any:
    return value


class EmulatedTechnique(Protocol):
    """The members of a technique that decide which results are right."""

    @property
    def oracle(self) -> str: ...
    @property
    def differentiates_twice(self) -> bool: ...
    def precision(self, dtype: str, /) -> str: ...
    def emulate(self, module: nn.Module, inputs: tuple[Any, ...], /) -> nn.Module: ...
    def emulate_optimizer(self, make: OptimizerMaker, /) -> OptimizerMaker: ...


@dataclass(frozen=True)
class Arithmetic:
    """What a reference depends on of a technique; it can be sent to the clean process, where no technique is ever prepared.

    Attributes:
        arithmetic: The precision of its arithmetic for the case's storage dtype.
        oracle, differentiates_twice, emulate, emulate_optimizer: The technique's own.
    """

    arithmetic: str
    oracle: str
    differentiates_twice: bool
    emulate: Callable[[nn.Module, tuple[Any, ...]], nn.Module]
    emulate_optimizer: Callable[[OptimizerMaker], OptimizerMaker]

    @classmethod
    def of(cls, technique: EmulatedTechnique, dtype: str) -> Self:
        """Of a technique, for a storage dtype."""
        emulates = technique.oracle != "float64"
        return cls(
            technique.precision(dtype),
            technique.oracle,
            technique.differentiates_twice,
            technique.emulate if emulates else _unchanged,
            technique.emulate_optimizer if emulates else _unchanged,
        )

    def precision(self, dtype: str) -> str:
        """As `Technique.precision`, for the dtype that this was made for."""
        return self.arithmetic


def twice(technique: EmulatedTechnique, workload: Workload, mode: Mode) -> bool:
    """Whether gradients of gradients are part of the result."""
    return mode is Mode.BACKWARD and technique.differentiates_twice and "twice-differentiable" in workload.traits


@dataclass(frozen=True)
class Source:
    """Makes the program of a draw, afresh for each run."""

    workload: Workload
    technique: EmulatedTechnique
    seed: int
    dtype: str
    mode: Mode
    draw: Draw
    effort: Effort = FULL
    algorithm: str = ""

    def __str__(self) -> str:
        return f"{self.workload.name} ({self.draw})"

    @property
    def precision(self) -> str:
        """The precision of the technique's arithmetic."""
        return self.technique.precision(self.dtype)

    @property
    def unit(self) -> float:
        """Its unit roundoff."""
        return UNIT_ROUNDOFF[self.precision]

    @property
    def spacing(self) -> float:
        """The distance of its numbers around 0."""
        return SMALLEST_SUBNORMAL[self.precision]

    def program(self, dtype: str) -> Program:
        """Wholly in a dtype."""
        problem = self.draw.problem(self.workload, self.seed, self.dtype)
        program = Program.of(problem, dtype=getattr(torch, dtype), seed=self.draw.seed(self.seed))
        program.twice = twice(self.technique, self.workload, self.mode)
        program.steps = self.effort.taken(program.steps)
        return program

    def exactly(self) -> Program:
        """In FP64, from parameters and inputs as the storage dtype rounds them."""
        program = self.program(self.dtype)
        if self.workload.given and room.layered(program, self.mode) and self.technique.oracle == "float64":
            return room.by_layer(program)
        program = program.widened()
        if self.technique.oracle != "float64":
            # Static quantization calibrates on random inputs, whatever it is then asked.
            plain = replace(self, draw=self.draw.plain).program(self.dtype).widened() if self.draw.probe else program
            program.module = self.technique.emulate(program.module, plain.inputs)
            if program.optimizer is not None:
                program.optimizer = self.technique.emulate_optimizer(program.optimizer)
        return program

    def eager(self, dtype: str) -> Result:
        """Eager on the CPU, wholly in a dtype."""
        return self.program(dtype).run(self.mode)

    def spread(self) -> Result | None:
        """By path, where eager by the class of algorithms computes no finite numbers; None where the class does not apply."""
        program = self.program(self.dtype)
        with Algorithm(self.algorithm) as algorithm, unfused():
            found = program.run(self.mode)
        if not algorithm.used:
            return None
        return {path: ~torch.isfinite(tensor) for path, tensor in found.items() if tensor.is_floating_point()}

    def repeated(self, dtype: str) -> Result:
        """`eager`, run twice: what is random is random there too, at a third of the oracle's time.

        Raises:
            OracleError: The bits differ.
        """
        plain = Oracle(self.program(dtype), self.mode, self.effort)
        result = plain.run()
        check_repeatable(plain, result)
        return result

    def eager_wholly(self, precision: str) -> Result | None:
        """Eager wholly in the arithmetic precision, where torch has it as a dtype and the workload runs in it.

        Not for training: parameters kept in half precision lose updates that autocast's FP32 parameters do not.
        """
        if getattr(torch, precision, None) is None or self.mode is Mode.TRAIN:
            return None
        try:
            return self.eager(precision)
        except (NotImplementedError, RuntimeError) as error:
            # A user-owned model may be written for FP32: Fourier transforms, for one, have no half precision.
            if not self.workload.owned and not _NO_KERNEL.search(str(error)):
                raise OracleError(
                    f"{self}: eager {precision} on the CPU raised {type(error).__name__}: {error}"
                ) from error
            return None  # samples alone


class Oracle:
    """An FP64 program that is run several times from the same state, exactly and with rounding errors."""

    def __init__(self, program: Program, mode: Mode, effort: Effort) -> None:
        self._program = program
        self._mode = mode
        self._effort = effort
        self.unclassified: set[str] = set()
        """Of all samples: see `Rounding`."""
        self._state = {name: _narrowest(value) for name, value in program.module.state_dict().items()}

    def run(self) -> Result:
        """Run once from the initial state; the result shares no memory with it."""
        result = self._ran()
        return {path: result.pop(path).clone() for path in list(result)}  # one by one: never twice the whole result

    def again(self) -> Result:
        """The same; the result may be the parameters themselves, and is good until the next run."""
        return self._ran()

    def _ran(self, update: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> Result:
        """Run from the initial state, optimizer steps in a context of their own; what the run alone needs is given back."""
        module, effort = self._program.module, self._effort

        def tidied() -> AbstractContextManager[Any]:
            effort.tidy()  # what the backward pass has freed, before the optimizer makes its states
            return update()

        self._program.update = tidied
        module.load_state_dict(self._state)
        result = self._program.run(self._mode)
        if self._mode is Mode.TRAIN:
            module.zero_grad(set_to_none=True)
        return result

    @property
    def is_given_nan(self) -> bool:
        """Presence of a NaN among the inputs."""
        return any(is_inexact(value) and bool(value.isnan().any()) for value in self._program.inputs)

    def without_gradient(self, truth: Result) -> frozenset[str]:
        """Parameters and inputs that require a gradient and have none."""
        asked = {name for name, parameter in self._program.module.named_parameters() if parameter.requires_grad}
        asked |= {f"input[{index}]" for index, value in enumerate(self._program.inputs) if is_inexact(value)}
        return frozenset(name for name in asked if f"grad:{name}" not in truth)

    def calls(self) -> list[tuple[str, list[Tensor], list[Tensor]]]:
        """Run once more: name, inputs and outputs of each call of a module, in the order in which the calls end."""
        found: list[tuple[str, list[Tensor], list[Tensor]]] = []
        handles = [
            part.register_forward_hook(
                lambda _, given, out, name=name: found.append(
                    (name, *([tensor.detach().clone() for tensor in _tensors(values)] for values in (given, out)))
                )
            )
            for name, part in self._program.module.named_modules()
        ]
        try:
            self.run()
        finally:
            for handle in handles:
                handle.remove()
        return found

    def kept(self) -> dict[str, str]:
        """Numbers, sizes of containers and tensors, in words, that modules keep and no `state_dict` restores."""
        found: dict[str, str] = {}
        for name, part in self._program.module.named_modules():
            restored = {*part.state_dict(), *vars(nn.Module())}
            for key, value in {**vars(part), **dict(part.named_buffers(recurse=False))}.items():
                path = f"{name}.{key}".lstrip(".")
                if key in restored:
                    continue
                if isinstance(value, Tensor):
                    size = float(value.to(torch.complex128).abs().norm())
                    found[path] = f"a tensor of shape {tuple(value.shape)} and norm {size:.6g}"
                elif isinstance(value, (bool, int, float, str)):
                    found[path] = str(value)
                elif isinstance(value, Sized) and not isinstance(value, nn.Module):
                    found[path] = f"{len(value)} elements"
        return found

    def sample(self, seed: int, precision: str, dtype: str, algorithm: str = "") -> Result:
        """With random rounding errors of the arithmetic precision, by a class of algorithms where one is named.

        `dtype` is the storage's. As good for as long as `again` is.
        """
        generator = torch.Generator().manual_seed(seed)
        for part in (*self._program.module.modules(), self._program.optimizer):
            if hasattr(part, "flips"):
                setattr(part, "flips", generator)  # noqa: B010 - nn.Module types its attributes as tensors and modules
        rounding = Rounding(precision, dtype, generator)
        with rounding, Algorithm(algorithm) if algorithm else contextlib.nullcontext():
            result = self._ran(lambda: rounding.at(dtype))
        self.unclassified |= rounding.unclassified
        return result

    def nearest(self, dtype: str) -> Result:
        """With every operator's result rounded to the nearest number of a dtype. As good for as long as `again` is."""
        with Nearest(getattr(torch, dtype)):
            return self._ran()


def _narrowest(value: Tensor) -> Tensor:
    """A copy in FP32 where that holds the same numbers, as it does those that were widened; NaN is not the same as itself."""
    if value.dtype == torch.float64:
        narrow = value.float()
        if torch.equal(narrow.double(), value):
            return narrow
    return value.clone()


def check_truth(source: Source, oracle: Oracle, truth: Result) -> None:
    """See that the oracle's result can be compared with.

    Raises:
        OracleError: It has no elements, lacks a gradient, or is NaN: in training anywhere, else throughout a tensor,
            though no input has a NaN. Any other NaN is a result that a candidate must have too.
    """
    if not truth or not sum(tensor.numel() for tensor in truth.values()):
        raise OracleError(f"{source}: the oracle produced no elements to compare; its outputs: {sorted(truth)}")
    idle = source.workload.idle
    # In somebody's own model, what gets no gradient is as the owner made it.
    if source.mode is Mode.BACKWARD and not source.workload.given and (lost := oracle.without_gradient(truth) - idle):
        raise OracleError(
            f"{source}: the oracle has no gradient for {', '.join(sorted(lost))}, which require one: name them in `Workload.idle` "
            "if nothing depends on them, else mend the workload"
        )
    if source.draw.special or (source.mode is not Mode.TRAIN and (source.workload.divisible or oracle.is_given_nan)):
        return
    of_tensor = Tensor.any if source.mode is Mode.TRAIN else Tensor.all
    numbers = {path: tensor for path, tensor in truth.items() if tensor.is_floating_point() and tensor.numel()}
    if undefined := [path for path, tensor in numbers.items() if bool(of_tensor(tensor.isnan()))]:
        raise OracleError(
            f"{source}: the FP64 oracle is NaN at {', '.join(undefined)}, with which nothing can be compared: give the model "
            "parameters and inputs for which it is finite"
        )


def check_repeatable(oracle: Oracle, truth: Result) -> None:
    """Run the oracle again: bits that differ come from random numbers, whose errors would make every budget a wide one.

    Raises:
        OracleError: They differ; the message names the module.
    """
    again = oracle.again()
    differing = [path for path in truth if path not in again or not _same_bits(truth[path], again[path])]
    if not differing:
        return
    before = oracle.kept()
    calls = zip(oracle.calls(), oracle.calls(), strict=False)
    after = oracle.kept()
    if moved := [key for key in after if before.get(key) != after[key]]:
        listed = ", ".join(f"{key} ({before.get(key, 'nothing')}, then {after[key]})" for key in moved[:MOST_NAMED])
        raise OracleError(
            f"two runs from the same state differ in {differing[0]}: the model keeps state between calls, which no "
            f"state_dict restores: {listed}. Reset it at the start of `forward`, or register it as a buffer"
        )
    for (name, given, out), (_, same, other) in calls:
        if _alike(given, same) and not _alike(out, other):  # the innermost one: inner calls end first
            where = f"the output of the module {name!r}" if name else "what the module itself computes"
            break
    else:
        where = "the loss or the backward pass"
    raise OracleError(
        f"two runs from the same state differ in {differing[0]}: {where} is random. Set its rate of dropout to 0 in the workload, "
        "or draw its numbers in `make` and pass them as an input"
    )


def _alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(_same_bits, one, other))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(nan=0.25), other.nan_to_num(nan=0.25))


def _tensors(out: Any) -> list[Tensor]:
    try:
        return [tensor for _, tensor in flatten(out)]
    except TypeError:  # of a submodule: only the whole module's outputs must be tensors
        return []


@contextlib.contextmanager
def blamed(who: str) -> Iterator[None]:
    """Turn any exception into an `OracleError` that names the failing part."""
    try:
        yield
    except OracleError as error:
        raise OracleError(f"{who}: {error}") from error
    except Exception as error:
        raise OracleError(f"{who} raised {type(error).__name__}: {error}") from error
