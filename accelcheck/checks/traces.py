"""Side effects that a run must not have: on running statistics, flags, hooks, generators and other tensors' memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accelcheck.checks.trial import State, Trial, mutations, snapshot
from accelcheck.core.case import Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify.generators import Generators
from accelcheck.verify.oracle import FIRST, Store
from accelcheck.workloads.base import Problem, Program, Result
from accelcheck.workloads.probes import random_modules


@dataclass(frozen=True)
class Habits:
    """Side effects that eager itself has with a workload on a device: changed buffers, and generators it draws from.

    `shared` has pairs of an output and the input, parameter or buffer whose memory it shares.
    """

    buffers: frozenset[str]
    generators: frozenset[str]
    shared: frozenset[tuple[str, str]]


class Traces:
    """Compares the surroundings of a run before and after it.

    The program has not run yet, and `state` is that of its parameters and buffers then. `asked` is True for each
    parameter that required a gradient when the technique was prepared.
    """

    def __init__(
        self, trial: Trial, program: Program, state: State, asked: Mapping[str, bool], *, training: bool
    ) -> None:
        self._trial = trial
        self._program = program
        self._state = state
        self._inputs = [snapshot(value) for value in program.inputs]
        self._training = training
        self._asked = asked
        self._hooks = _hooks(program)
        self.before = self.after = Generators.now(trial.device.torch_device())

    def end(self) -> None:
        """Records the generators after the run."""
        self.after = Generators.now(self._trial.device.torch_device())

    def faults(self, result: Result, former: Traces | None = None) -> list[Fault]:
        """Returns faults of changed inputs and parameters, and of traces that eager does not leave.

        `former` are the traces of a previous run with other initial generators: ending in its final state means that
        the technique sets them.
        """
        faults = mutations(self._program.inputs, self._inputs)
        if self._trial.case.mode is not Mode.TRAIN:
            faults += self._state.mutations()
        faults += [*self._flags(), *self._generators(former)]
        shared = _shared(self._program, result)
        buffers = [] if self._training else self._state.changed_buffers()
        if (shared or buffers) and (habits := habits_of(self._trial)):
            moved = (name for name in buffers if name not in habits.buffers)
            faults += [_left(f"buffer:{name}", "the bits that evaluation found", "others") for name in moved]
            # Compared by output alone: inputs may share memory in eager and not under a technique.
            aliased = {path for path, _ in habits.shared}
            for path, other in sorted(pair for pair in shared if pair[0] not in aliased):
                own = Fault(FaultKind.METADATA, path, "storage", expected="memory of its own", got=f"that of {other}")
                faults.append(own)
        return faults

    def _generators(self, former: Traces | None) -> Iterator[Fault]:
        moved = self.before.moved(self.after)
        if not moved or not (habits := habits_of(self._trial)):
            return
        elsewhere = [] if former is None else former.before.moved(self.before)
        ended = [] if former is None else former.after.moved(self.after)
        for name in moved:
            sides = None
            if name not in habits.generators:
                sides = ("it left alone, as eager leaves it", "numbers drawn from it")
            elif name in elsewhere and name not in ended:
                sides = ("it advanced, as eager does", "it set to the same state twice")
            if sides is not None:
                yield Fault(FaultKind.STATE, name, "", "", *sides)

    def _flags(self) -> Iterator[Fault]:
        program = self._program
        for name, asks in asking(program).items():
            if self._asked.get(name, asks) != asks:
                yield _left(f"parameter:{name}", f"requires_grad {not asks}", f"{asks}")
        for place, hooks in _hooks(program).items():
            if self._hooks.get(place, ()) != hooks:
                yield _left(place, f"{len(self._hooks.get(place, ()))} hooks", f"{len(hooks)} hooks, not the same")
        if program.elsewhere is None:
            modes = _modes(program)
            program.switch(training=self._training)
            for name, training in _modes(program).items():
                if modes.get(name, training) != training:
                    yield _left(f"module:{name}", f"training {training}", f"{not training}")


def _left(path: str, expected: str, got: str) -> Fault:
    return Fault(FaultKind.MUTATED, path, expected=expected, got=got)


def asking(program: Program) -> dict[str, bool]:
    """Returns True by name for each parameter that requires a gradient."""
    return {name: parameter.requires_grad for name, parameter in program.module.named_parameters()}


def _modes(program: Program) -> dict[str, bool]:
    return {name: module.training for name, module in program.module.named_modules()}


def _hooks(program: Program) -> dict[str, tuple[Any, ...]]:
    """Collects the hooks of modules and parameters, by path."""
    kinds_by_path = {
        f"module:{name}": [v for key, v in vars(module).items() if key.endswith("_hooks") and isinstance(v, dict)]
        for name, module in program.module.named_modules()
    }
    for name, parameter in program.module.named_parameters():
        own = (getattr(parameter, kind) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        kinds_by_path[f"parameter:{name}"] = [hooks for hooks in own if hooks]
    hooks_by_path = {path: [hook for kind in kinds for hook in kind.values()] for path, kinds in kinds_by_path.items()}
    return {path: tuple(hooks) for path, hooks in hooks_by_path.items() if hooks}


def _shared(program: Program, result: Result) -> frozenset[tuple[str, str]]:
    """Pairs each output with the input, parameter or buffer whose memory it shares."""
    named: dict[str, Any] = {f"input[{index}]": value for index, value in enumerate(program.inputs)}
    named |= {f"parameter:{name}": value for name, value in program.module.named_parameters()}
    named |= {f"buffer:{name}": value for name, value in program.module.named_buffers()}
    owners = {ref: name for name, value in named.items() if (ref := storage(value)) is not None}
    outs = {path: storage(tensor) for path, tensor in result.items() if path.startswith("out")}
    return frozenset((path, owners[ref]) for path, ref in outs.items() if ref is not None and ref in owners)


def storage(value: Any) -> StorageWeakRef | None:
    """Returns a weak reference to a tensor's memory; None where it has none."""
    if not isinstance(value, Tensor) or not value.numel():
        return None
    try:
        return StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]  # untyped in torch
    except (NotImplementedError, RuntimeError):  # a lazy device's tensors, and some wrappers
        return None


_SEEN: WeakKeyDictionary[Store, dict[str, Habits | None]] = WeakKeyDictionary()
"""Habits by the run's store and by case without its technique."""


def habits_of(trial: Trial) -> Habits | None:
    """Finds eager's traces in a case, once per process; None where eager does not run, which its case reports."""
    seen = _SEEN.setdefault(trial.store, {})
    key = replace(trial.case, technique="").id
    if key not in seen:
        before = Generators.now()
        try:
            with trial.state.restored():
                habits = _of_eager(trial, FIRST.problem(trial.workload, trial.case.seed, trial.case.dtype))
                # Techniques may draw at dropout rates of 0, as here; at the workload's own rates eager draws too.
                own = trial.workload.problem(trial.case.seed)
                drawn = _of_eager(trial, own).generators if random_modules(own.module) else frozenset()
                seen[key] = replace(habits, generators=habits.generators | drawn)
        except Exception:  # noqa: BLE001 - a workload or backend may raise anything
            seen[key] = None
        before.restore()
    return seen[key]


def _of_eager(trial: Trial, problem: Problem) -> Habits:
    """Runs a problem once under eager and returns its traces."""
    program = trial.place(problem, trial.case.seed)
    state = State(program)
    trial.device.seed(trial.case.seed)
    began = Generators.now(trial.device.torch_device())
    result = program.run(trial.case.mode)
    moved = began.moved(Generators.now(trial.device.torch_device()))
    return Habits(frozenset(state.changed_buffers()), frozenset(moved), _shared(program, result))
