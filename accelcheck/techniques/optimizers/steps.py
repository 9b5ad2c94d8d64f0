"""Faster optimizer steps: foreach, fused, capturable, compiled. Each must equal the plain loop over parameters."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation import compile as compilation
from accelcheck.techniques.observe import Log, Operator, at_least, operators
from accelcheck.workloads import optimizers
from accelcheck.workloads.base import Program

_BANKS = frozenset(workload.name for workload in optimizers.WORKLOADS)
SUBJECTS = _BANKS | {"train-gated-depth", "train-mlp", "train-transformer", "trajectory-mlp"}
"""One training for each optimizer, and one in which some parameters get no gradient."""

_MADE = "the optimizer that was made last"


class OptimizerStep(Technique):
    """Training by the program's own optimizer, with further keyword arguments, `options`."""

    family = "optimizer"
    source = "https://docs.pytorch.org/docs/stable/optim.html"
    modes = frozenset({Mode.TRAIN})
    requires = frozenset({"training"})
    early = frozenset({"train-adagrad", "train-amsgrad", "train-nesterov"})
    workloads = SUBJECTS

    def __init__(self, name: str, promise: str, **options: bool) -> None:
        self.name, self.promise, self.options = name, promise, options

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if program.optimizer is None:
            raise TypeError("the trait `training` needs an optimizer; the program has none")
        kind = type(program.optimizer([nn.Parameter(torch.zeros(1))]))
        for option in self.options:
            if option not in inspect.signature(kind).parameters:
                raise Unsupported(unsupported(Code.NO_FEATURE, f"{kind.__name__} has no option {option!r}"))
        make = program.optimizer

        def made(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = self.changed(_with(make(parameters), self.options), device)
            program.extras[_MADE] = optimizer
            return optimizer

        program.optimizer = made
        program.resets.append(lambda: program.extras.pop(_MADE, None))

    def changed(self, optimizer: torch.optim.Optimizer, device: Device) -> torch.optim.Optimizer:
        """Applies further changes to the optimizer; none by default."""
        return optimizer


def _with(optimizer: torch.optim.Optimizer, options: Mapping[str, bool]) -> torch.optim.Optimizer:
    """Makes the same optimizer anew with further options, which its maker need not take."""
    if not options:
        return optimizer
    kind = type(optimizer)
    takes = inspect.signature(kind).parameters
    words = {name: value for name, value in optimizer.defaults.items() if name in takes}
    groups = [{**group, **options} for group in optimizer.param_groups]
    made: torch.optim.Optimizer = kind(groups, **{**words, **options})
    return made


class Foreach(OptimizerStep):
    """``foreach=True``: each operation of a step runs on lists of all parameters and states."""

    modes = frozenset({Mode.TRAIN, Mode.TRAJECTORY})

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:

        def updates(operator: Operator) -> bool:
            # Operators that change parameters, not in place on XLA. Clipping has others; step counts may be on the CPU.
            known = re.fullmatch(r"aten::_foreach_(add|addcdiv)_?", operator.name) is not None
            return known and any(at == device.type for _, _, at in operator.inputs)

        yield at_least("updates of lists of parameters", operators(log).having(updates), program.steps)


class Fused(OptimizerStep):
    """``fused=True``: the whole step runs in one kernel."""

    dtypes = ("float32", "bfloat16", "float16")

    def capability(self, device: Device) -> Capability:
        known = device.type in torch_names.fused_kernel_devices()
        reason = f"torch has no fused optimizers for {device.type}"
        return SUPPORTED if known else unsupported(Code.NO_FEATURE, reason)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield at_least("fused steps", log.count(r"aten::_fused_(sgd|adam|adamw|adagrad)_"), program.steps)


class Capturable(OptimizerStep):
    """``capturable=True``: the host reads nothing of a step, and the step count is a tensor on the device."""

    def capability(self, device: Device) -> Capability:
        known = device.type in torch_names.capturable_devices()
        reason = f"optimizers refuse capturable=True for {device.type}: there is nothing to capture"
        return SUPPORTED if known else unsupported(Code.NO_FEATURE, reason)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        optimizer: torch.optim.Optimizer | None = program.extras.get(_MADE)
        if optimizer is None:
            yield Evidence("optimizers made >= 1", 0, engaged=False)
            return
        counts = [state["step"] for state in optimizer.state.values()]
        on_device = sum(isinstance(count, Tensor) and count.device.type == device.type for count in counts)
        yield Evidence(f"step counts on {device.type} = {len(counts)}", on_device, engaged=on_device == len(counts) > 0)
        flags = {bool(group["capturable"]) for group in optimizer.param_groups}
        yield Evidence("groups are capturable", ", ".join(map(str, sorted(flags))), engaged=flags == {True})


class CompiledStep(OptimizerStep, compilation.Compilation):
    """``torch.compile`` around the step. Few workloads, since every training makes and compiles an optimizer."""

    source = "https://docs.pytorch.org/tutorials/recipes/compiling_optimizer.html"
    level = 2
    workloads = frozenset({"train-amsgrad", "train-mlp", "train-nesterov", "train-transformer"})
    warmups = 0

    def capability(self, device: Device) -> Capability:
        return SUPPORTED if device.has("torch-xla") else compilation.inductor_capability(device)

    def changed(self, optimizer: torch.optim.Optimizer, device: Device) -> torch.optim.Optimizer:
        # Code of earlier optimizers counts towards the limit beyond which Dynamo silently runs eagerly.
        compilation.reset_compiler()
        step: Any = torch.compile(optimizer.step, backend="openxla" if device.has("torch-xla") else "inductor")
        vars(optimizer)["step"] = step
        return optimizer

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        steps = program.steps
        yield at_least("compiled regions entered", log.count(compilation.REGION), steps)
        yield at_least("graphs compiled", compilation.graphs())
        if not device.has("torch-xla"):
            yield at_least("inductor graphs called", log.count(compilation.INDUCTOR_GRAPH), steps)
        yield Evidence("graph breaks (any number)", compilation.graph_breaks(), engaged=True)


_LOOP, _STEP = "equals the loop over single parameters.", "equals the plain step."

TECHNIQUES: tuple[Technique, ...] = (
    Foreach("optimizer-foreach", f"A step on lists of all parameters {_LOOP}", foreach=True),
    Fused("optimizer-fused", f"A step in one kernel {_LOOP}", fused=True),
    Capturable("optimizer-capturable", f"A step that keeps its step count on the device {_STEP}", capturable=True),
    CompiledStep("optimizer-compiled", f"A compiled step {_STEP}"),
)
