"""Runs of a workload's program for a reference: in FP64, in FP64 with rounding errors, and in eager."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.devices.layouts import dense, entries
from accelcheck.verify import room
from accelcheck.verify.algorithms import Algorithm
from accelcheck.verify.effort import FULL, Effort
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.reference import OracleError
from accelcheck.verify.resampling import Defined
from accelcheck.verify.rounding import Nearest, Rounding
from accelcheck.workloads.base import OptimizerMaker, Program, Result, Workload, flatten, is_inexact
from accelcheck.workloads.dispatch import unfused
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
    """Properties of a technique that a reference depends on; picklable for the clean process, which prepares none.

    Attributes:
        arithmetic: Precision of the technique's arithmetic for the case's storage dtype.
        oracle, differentiates_twice, emulate, emulate_optimizer: Members of the technique.
    """

    arithmetic: str
    oracle: str
    differentiates_twice: bool
    emulate: Callable[[nn.Module, tuple[Any, ...]], nn.Module]
    emulate_optimizer: Callable[[OptimizerMaker], OptimizerMaker]

    @classmethod
    def of(cls, technique: EmulatedTechnique, dtype: str) -> Self:
        """Arithmetic of a technique for a storage dtype."""
        emulates = technique.oracle != "float64"
        return cls(
            technique.precision(dtype),
            technique.oracle,
            technique.differentiates_twice,
            technique.emulate if emulates else _unchanged,
            technique.emulate_optimizer if emulates else _unchanged,
        )

    def precision(self, dtype: str) -> str:
        """Precision for the dtype that this was made for."""
        return self.arithmetic


def twice(technique: EmulatedTechnique, workload: Workload, mode: Mode) -> bool:
    """True if gradients of gradients are part of the result."""
    return mode is Mode.BACKWARD and technique.differentiates_twice and "twice-differentiable" in workload.traits


@dataclass(frozen=True)
class Source:
    """Makes the program of a draw, afresh for each run."""

    workload: Workload
    technique: EmulatedTechnique
    seed: int
    dtype: str
    mode: Mode
    draw: Draw = field(default_factory=Draw)
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
        """Unit roundoff of the precision."""
        return UNIT_ROUNDOFF[self.precision]

    @property
    def spacing(self) -> float:
        """Distance of the precision's numbers around 0."""
        return SMALLEST_SUBNORMAL[self.precision]

    @property
    def known(self) -> bool:
        """True if the truth is known otherwise than by eager's operators, so that eager is under test too."""
        return "known" in self.workload.traits

    def program(self, dtype: str) -> Program:
        """Program of the draw wholly in a dtype."""
        problem = self.draw.problem(self.workload, self.seed, self.dtype)
        program = Program.of(problem, dtype=getattr(torch, dtype), seed=self.draw.seed(self.seed))
        program.twice = twice(self.technique, self.workload, self.mode)
        program.steps = self.effort.taken(program.steps)
        return program

    def exactly(self) -> Program:
        """Program in FP64, from parameters and inputs as the storage dtype rounds them."""
        program = self.program(self.dtype)
        if self.workload.given and room.layered(program, self.mode) and self.technique.oracle == "float64":
            return room.by_layer(program)
        program = program.widened()
        if self.technique.oracle != "float64":
            # Static quantization calibrates on random inputs, whatever it is asked later.
            plain = replace(self, draw=self.draw.plain).program(self.dtype).widened() if self.draw.probe else program
            program.module = self.technique.emulate(program.module, plain.inputs)
            if program.optimizer is not None:
                program.optimizer = self.technique.emulate_optimizer(program.optimizer)
        return program

    def eager(self, dtype: str) -> Result:
        """Result of eager on the CPU, wholly in a dtype."""
        return self.program(dtype).run(self.mode)

    def spread(self) -> Result | None:
        """Masks by path, True where the class of algorithms gives no finite numbers; None where it does not apply."""
        program = self.program(self.dtype)
        with Algorithm(self.algorithm) as algorithm, unfused():
            result = program.run(self.mode)
        if not algorithm.used:
            return None
        return {path: ~torch.isfinite(tensor) for path, tensor in result.items() if tensor.is_floating_point()}

    def repeated(self, dtype: str) -> Result:
        """Runs `eager` twice: a random model differs there too, at a third of the oracle's time.

        Raises:
            OracleError: The results' bits differ.
        """
        plain = Oracle(self.program(dtype), self.mode, self.effort)
        result = plain.run()
        check_repeatable(plain, result)
        return result

    def eager_wholly(self, precision: str) -> Result | None:
        """Result of eager wholly in the arithmetic precision; None where torch or the workload cannot run in it.

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
    """FP64 program that runs repeatedly from the same state, exactly and with rounding errors."""

    def __init__(self, program: Program, mode: Mode, effort: Effort) -> None:
        self._program = program
        self._mode = mode
        self._effort = effort
        self.unclassified: set[str] = set()
        """Unclassified operators of all samples: see `Rounding`."""
        self._state = {name: _narrowest(value) for name, value in program.module.state_dict().items()}

    def run(self) -> Result:
        """Runs once from the initial state; the result shares no memory with it."""
        result = self.again()
        return {path: result.pop(path).clone() for path in list(result)}  # one by one: never twice the whole result

    def again(self) -> Result:
        """Runs once; the result may be the parameters themselves, and is good until the next run."""
        with Defined():
            return self._ran()

    def _ran(self, update: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> Result:
        """Runs from the initial state, with `update` around optimizer steps, and frees gradients."""
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
        """True if an input holds a NaN."""
        return any(is_inexact(value) and bool(entries(value).isnan().any()) for value in self._program.inputs)

    def without_gradient(self, truth: Result) -> frozenset[str]:
        """Parameters and inputs that require a gradient but have none."""
        asked = {name for name, parameter in self._program.module.named_parameters() if parameter.requires_grad}
        asked |= {f"input[{index}]" for index, value in enumerate(self._program.inputs) if is_inexact(value)}
        return frozenset(name for name in asked if f"grad:{name}" not in truth)

    def calls(self) -> list[tuple[str, list[Tensor], list[Tensor]]]:
        """Runs once, and returns name, inputs and outputs of each call of a module, in the order in which calls end."""
        calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
        handles = [
            part.register_forward_hook(
                lambda _, given, out, name=name: calls.append(
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
        return calls

    def kept(self) -> dict[str, str]:
        """State of modules in words that no `state_dict` restores: numbers, sizes of containers, tensors."""
        words: dict[str, str] = {}
        for name, part in self._program.module.named_modules():
            restored = {*part.state_dict(), *vars(nn.Module())}
            for key, value in {**vars(part), **dict(part.named_buffers(recurse=False))}.items():
                path = f"{name}.{key}".lstrip(".")
                if key in restored:
                    continue
                if isinstance(value, Tensor):
                    size = float(value.to(torch.complex128).abs().norm())
                    words[path] = f"a tensor of shape {tuple(value.shape)} and norm {size:.6g}"
                elif isinstance(value, (bool, int, float, str)):
                    words[path] = str(value)
                elif isinstance(value, Sized) and not isinstance(value, nn.Module):
                    words[path] = f"{len(value)} elements"
        return words

    def sample(self, seed: int, precision: str, dtype: str, algorithm: str = "", number: int = 0) -> Result:
        """Runs with random rounding errors of the arithmetic precision and storage `dtype`, by an algorithm if named.

        Samples of one `number` have the same constants in all draws. The result is good until the next run.
        """
        generator = torch.Generator().manual_seed(seed)
        for part in (*self._program.module.modules(), self._program.optimizer):
            if hasattr(part, "flips"):
                setattr(part, "flips", generator)  # noqa: B010 - nn.Module types its attributes as tensors and modules
        rounding = Rounding(precision, dtype, generator, torch.Generator().manual_seed(number))
        with rounding, Algorithm(algorithm) if algorithm else contextlib.nullcontext():
            result = self._ran(lambda: rounding.at(dtype))
        self.unclassified |= rounding.unclassified
        return result

    def nearest(self, dtype: str) -> Result:
        """Runs with every operator's result rounded to the nearest number of a dtype; good until the next run."""
        with Nearest(getattr(torch, dtype)):
            return self._ran()


def _narrowest(value: Tensor) -> Tensor:
    """Copy in FP32 where that holds the same numbers, which a NaN prevents; else in FP64."""
    if value.dtype == torch.float64:
        narrow = value.float()
        if torch.equal(dense(narrow.double()), dense(value)):
            return narrow
    return value.clone()


def check_truth(source: Source, oracle: Oracle, truth: Result) -> None:
    """Checks that the oracle's result can serve for comparison.

    Raises:
        OracleError: It has no elements, lacks a gradient, or is NaN: in training anywhere, else throughout a tensor,
            though no input has a NaN. A candidate must have any other NaN too.
    """
    if not truth or not sum(tensor.numel() for tensor in truth.values()):
        raise OracleError(f"{source}: the oracle produced no elements to compare; its outputs: {sorted(truth)}")
    idle = source.workload.idle
    # A `given` model may leave parameters without a gradient.
    if source.mode is Mode.BACKWARD and not source.workload.given and (lost := oracle.without_gradient(truth) - idle):
        raise OracleError(
            f"{source}: the oracle has no gradient for {', '.join(sorted(lost))}, which require one: name them in "
            "`Workload.idle` if nothing depends on them, else mend the workload"
        )
    if source.draw.special or (source.mode is not Mode.TRAIN and (source.workload.divisible or oracle.is_given_nan)):
        return
    of_tensor = Tensor.any if source.mode is Mode.TRAIN else Tensor.all
    numbers = {path: tensor for path, tensor in truth.items() if tensor.is_floating_point() and tensor.numel()}
    if undefined := [path for path, tensor in numbers.items() if bool(of_tensor(tensor.isnan()))]:
        raise OracleError(
            f"{source}: the FP64 oracle is NaN at {', '.join(undefined)}, with which nothing can be compared: give the "
            "model parameters and inputs for which it is finite"
        )


def check_repeatable(oracle: Oracle, truth: Result) -> None:
    """Runs the oracle again: differing bits come from random numbers, whose errors would widen every budget.

    Raises:
        OracleError: The bits differ; the message names the module.
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
        f"two runs from the same state differ in {differing[0]}: {where} is random. Set its rate of dropout to 0 in "
        "the workload, or draw its numbers in `make` and pass them as an input"
    )


def _alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(_same_bits, one, other))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(nan=0.25), other.nan_to_num(nan=0.25))


def _tensors(out: Any) -> list[Tensor]:
    try:
        return [tensor for _, tensor in flatten(out)]
    except TypeError:  # a submodule may return anything: only the whole module's outputs must be tensors
        return []


@contextlib.contextmanager
def blamed(who: str) -> Iterator[None]:
    """Turns any exception into an `OracleError` that names the failing part."""
    try:
        yield
    except OracleError as error:
        raise OracleError(f"{who}: {error}") from error
    except Exception as error:
        raise OracleError(f"{who} raised {type(error).__name__}: {error}") from error
