"""Graphs of kernels that a user captures: ``torch.cuda.make_graphed_callables`` and ``torch.accelerator.Graph``."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import GRAPH_LAUNCH
from accelcheck.techniques.observe import Log, ProfilerLog, at_least
from accelcheck.techniques.quantization.int8 import Holder
from accelcheck.workloads.base import Program


class GraphedCallables(Technique):
    """Module whose kernels, forward and backward, are captured with the first inputs of each size."""

    name = "graphed-callables"
    family = "compile"
    promise = "Forward and backward passes, captured in graphs and replayed, compute what eager computes."
    source = "https://docs.pytorch.org/docs/stable/generated/torch.cuda.make_graphed_callables.html"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    watch = ProfilerLog
    warmups = 1
    differentiates_twice = False
    workloads = frozenset("elementwise-5 mlp train-mlp mlp-blocks transformer-block".split())

    def capability(self, device: Device) -> Capability:
        reason = f"{device.name} does not declare cuda-graphs: torch refuses to capture its kernels"
        return SUPPORTED if device.has("cuda-graphs") else unsupported(Code.NO_FEATURE, reason)

    def captured(self, module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
        """Captures a module, which then computes by replays."""
        make: Any = torch.cuda.make_graphed_callables
        graphed: Callable[..., Any] = make(Holder(module), samples)
        return graphed

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        made: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

        def call(*inputs: Tensor) -> Any:
            sizes = tuple(value.shape for value in inputs)
            if sizes not in made:  # this run knows which inputs get gradients
                samples = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in inputs)
                made[sizes] = self.captured(program.module, samples)
            return made[sizes](*inputs)

        program.call = call
        program.overwrites = "outputs of a captured graph are overwritten by its next replay (CUDA semantics of torch)"

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        runs = program.steps if mode is Mode.TRAIN else 1
        yield at_least("captured graphs replayed", log.count(GRAPH_LAUNCH), runs * (1 + (mode is not Mode.FORWARD)))


class AcceleratorGraph(GraphedCallables):
    """Module whose forward kernels are captured after two runs, in which libraries set up what graphs may not hold."""

    name = "accelerator-graph"
    promise = "A forward pass, captured in a graph of any accelerator and replayed, computes what eager computes."
    source = "https://docs.pytorch.org/docs/stable/generated/torch.accelerator.Graph.html"
    modes = frozenset({Mode.FORWARD})

    def capability(self, device: Device) -> Capability:
        if not hasattr(torch.accelerator, "Graph"):
            return unsupported(Code.WRONG_VERSION, f"torch {torch.__version__} has no torch.accelerator.Graph")
        return super().capability(device)

    def captured(self, module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
        graph: Any = vars(torch.accelerator)["Graph"]()
        with torch.Stream():
            for _ in range(2):
                module(*samples)
            with graph:
                out = module(*samples)

        def replayed(*inputs: Tensor) -> Any:
            for held, value in zip(samples, inputs, strict=True):
                held.copy_(value)
            graph.replay()
            return out

        return replayed


TECHNIQUES: tuple[Technique, ...] = (GraphedCallables(), AcceleratorGraph())
