"""``torch.compile`` around more than a module: around a whole training step, and around autocast."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import Capability
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation import compile as compilation
from accelcheck.techniques.compilation.capture import Capture
from accelcheck.techniques.compilation.custom import CAPTURE
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability, entered
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.techniques.precision.amp import stored_in_float32
from accelcheck.workloads.base import Program
from accelcheck.workloads.problem import CONTRACTING
from accelcheck.workloads.signatures import Target

RECOMPILATIONS = 64
"""Limit of recompilations of one function. Each training makes an optimizer, whose step is compiled twice, without and
with its state. With torch's limit of 8, meant for one optimizer, the fifth training would run eagerly."""

CONTRACTIONS = frozenset(
    {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "conv1d", "conv2d", "scaled_dot_product_attention"}
)
"""Operators that autocast gives half-precision operands, by their names in Dynamo's graphs."""


class TrainingStep(compilation.Compilation):
    """Forward pass, loss, backward pass and optimizer step in one compiled function.

    Dynamo breaks the graph at ``backward`` and at the optimizer, which gives three graphs per step: forward pass and
    loss; backward pass and accumulation of gradients, captured by compiled autograd; optimizer step.
    """

    name = "compile-training-step"
    family = "compile"
    promise = "A compiled training step (forward, loss, backward and optimizer) updates parameters as eager does."
    source = "https://docs.pytorch.org/tutorials/intermediate/compiled_autograd_tutorial.html"
    level = 2
    modes = frozenset({Mode.TRAIN})
    requires = frozenset({"training"})
    excludes = frozenset({"branching"})  # control flow on data breaks the graph, so that a step has more than three
    capability = staticmethod(compiler_capability)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        from accelcheck.devices.torch_names import dynamo_config as config

        super().prepare(program, mode, device)
        self.held.enter_context(
            config.patch(compiled_autograd=True, recompile_limit=RECOMPILATIONS, fail_on_recompile_limit_hit=True)
        )

        def training_step(optimizer: torch.optim.Optimizer, inputs: tuple[Any, ...], target: Target) -> Tensor:
            loss = program.training_loss(inputs, target)
            loss.backward()  # type: ignore[no-untyped-call]  # torch annotates Tensor.backward only in part
            optimizer.step()
            return loss

        backend = backend_for(device)
        if backend == "openxla":
            compilation.count_xla_runs(program)
        step = torch.compile(training_step, backend=backend, dynamic=False)
        program.advance = lambda optimizer, _: step(optimizer, program.inputs, program.target).detach().clone()

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        steps = program.steps
        kinds: Mapping[str, Callable[[Any], bool]] = {
            "forward passes and losses": lambda record: str(record.co_name) == "training_step",
            "backward passes": lambda record: str(record.compile_id).startswith("!"),  # such as ``!0/1/0``
            "optimizer steps": lambda record: PurePath(str(record.co_filename)).parent.name == "optim",
        }
        for what, test in kinds.items():
            ran = entered(log, test).total()
            yield Evidence(f"compiled {what} run = {steps}, one a step", ran, engaged=ran == steps)
        backend = backend_for(device)
        if backend == "inductor":
            yield at_least("inductor graphs called", log.count(compilation.INDUCTOR_GRAPH), 3 * steps)
        elif backend == "openxla":
            yield compilation.xla_ran(program, 3 * steps)
        yield at_least("graphs compiled", compilation.graphs(), 3)


class AutocastInside(nn.Module):
    """Module with autocast inside, as users compile it."""

    def __init__(self, inner: nn.Module, device_type: str) -> None:
        super().__init__()
        self.inner = inner
        self.device_type = device_type

    def forward(self, *inputs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            return self.inner(*inputs)


class CompiledAutocast(compilation.Compilation):
    """Autocast to bfloat16 inside the compiled region, whose casts become part of the forward and backward graphs."""

    name = "compile-autocast-bf16"
    family = "compile"
    works_on = CONTRACTING
    workloads = frozenset({"conv-strided", "mlp", "transformer-block"})  # one for each kind of contraction
    promise = "Autocast inside a compiled region is captured: contractions take bfloat16, parameters stay float32."
    source = "https://docs.pytorch.org/docs/stable/amp.html"
    level = 2
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})

    def capability(self, device: Device) -> Capability:
        autocast = self.needs(device, "autocast-bfloat16")
        return compiler_capability(device) if autocast.ok else autocast

    def precision(self, dtype: str) -> str:
        return "bfloat16"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        name = backend_for(device)
        if name == "openxla":
            compilation.count_xla_runs(program)
        program.extras[CAPTURE] = backend = Capture(inner=name)
        program.call = torch.compile(AutocastInside(program.module, device.type), backend=backend, dynamic=False)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        backend: Capture = program.extras[CAPTURE]
        yield from compilation.compiled(log, mode, backend_for(device))
        if backend_for(device) == "openxla":
            yield compilation.xla_ran(program)
        nodes = [node for graph in backend.graphs for node in graph.nodes]
        yield at_least("autocast regions captured", sum(node.target == "_enter_autocast" for node in nodes))
        dtypes = [node.dtype for node in nodes if node.target in CONTRACTIONS]
        yield at_least("captured contractions in bfloat16", dtypes.count(torch.bfloat16))
        yield exactly("captured contractions in float32", dtypes.count(torch.float32), 0)
        yield stored_in_float32(program)


TECHNIQUES: tuple[Technique, ...] = (TrainingStep(), CompiledAutocast())
