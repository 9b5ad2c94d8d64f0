"""Models that ranks share: a run in any mode, and divisions by tensors, sequences, stages. It runs in the ranks.

Torch's modules for meshes and pipelines are imported in the ranks, because that takes seconds.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.distributed.ddp import FullySharded
from accelcheck.techniques.distributed.shards import shards
from accelcheck.techniques.distributed.strategy import RankReport, Strategy, TrainingJob, digest
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.techniques.processes.evidence import program_on
from accelcheck.workloads.base import Program, Result

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Division(FullySharded):
    """Strategy of a `SharedJob`; its tensors may be distributed ones."""

    def settle(self, program: Program) -> None:
        """Gives every rank the parameters that others changed; called by all ranks after a run."""

    def facts(self, program: Program) -> Mapping[str, Any]:
        """Returns this rank's number of elements of each parameter that it holds in part."""
        from torch.distributed.tensor import DTensor

        parts = {name: part for name, part in program.module.named_parameters() if isinstance(part, DTensor)}
        divided = {name: part for name, part in parts.items() if any(place.is_shard() for place in part.placements)}
        return {"elements": {name: part.to_local().numel() for name, part in divided.items()}}


@dataclass(frozen=True)
class SharedJob(TrainingJob):
    """Run in one mode by all ranks, each with the whole problem, which the strategy divides."""

    mode: Mode = Mode.TRAIN

    @classmethod
    def made(cls, program: Program, strategy: Strategy, mode: Mode) -> SharedJob:
        """Makes the job of a program's run, from its current parameters."""
        return replace(cls.of(program, strategy), mode=mode)

    def run(self, device: Device) -> RankReport:
        strategy: Any = self.strategy
        program = program_on(device, self.problem, self.dtype, self.seed)
        device.seed(self.seed)
        with device.strict_float32():
            strategy.prepare(program)
            with ProfilerLog(device.type) as log:
                outcome = program.run(self.mode)
                device.synchronize()
            strategy.settle(program)
        result = {path: strategy.whole(tensor).cpu() for path, tensor in outcome.items()}
        return RankReport(
            pid=os.getpid(),
            backend=distributed.get_backend(),
            result=result if distributed.get_rank() == 0 else {},
            digests={path: digest(tensor) for path, tensor in result.items()},
            calls=[{name: count for name, count in log.names().items() if name.startswith("c10d::")}],
            sent=(),
            facts=strategy.facts(program),
        )


@functools.cache
def mesh_of(device_type: str, *sizes: int) -> DeviceMesh:
    """Makes the mesh of all ranks, named ``data``, ``model`` from the right. Cached: each makes process groups."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes, mesh_dim_names=("data", "model")[-len(sizes) :])


def device_of(program: Program) -> torch.device:
    """Returns the device of a program's parameters or, without any, of its inputs."""
    tensors = (*program.module.parameters(), *program.inputs)
    return next(tensor.device for tensor in tensors if isinstance(tensor, Tensor))


def divide_batch(program: Program, group: Any) -> None:
    """Has a program train on its part of the batch, with gradients that the ranks of a group average."""
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    parts = shards(program.inputs, program.target, world)
    program.inputs, program.target = parts[rank]
    weight = world * len(parts[rank][1]) / sum(len(target) for _, target in parts)

    def step(number: int) -> Tensor:
        mean = Strategy().backpropagate(program, weight)
        distributed.all_reduce(mean, group=group)
        return mean / world

    program.backpropagate = step


class TensorParallel(Division):
    """Linear layers and embeddings in parts: `fc1` by columns and `fc2` by rows, others by columns that are gathered.

    With `sequence`, norms and residuals have a part of the sequence on each rank, too. FSDP2 divides the batch and the
    parts among `data` groups of ranks.
    """

    def __init__(self, *, sequence: bool = False, data: int = 1) -> None:
        self.sequence, self.data = sequence, data

    def prepare(self, program: Program) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        world, kind = distributed.get_world_size(), device_of(program).type
        mesh = mesh_of(kind, self.data, world // self.data) if self.data > 1 else mesh_of(kind, world)
        dimension = program.inputs[0].dim() - (2 if program.inputs[0].is_floating_point() else 1)
        parallelize_module(program.module, mesh["model"], self.plan(program.module, dimension))
        if self.data > 1:
            self.shard(program.module, mesh["data"])
            divide_batch(program, mesh["data"].get_group())

    def plan(self, module: nn.Module, dimension: int) -> dict[str, Any]:
        """Returns the style of each layer by its name; activations have the sequence in a `dimension`."""
        from torch.distributed.tensor import Replicate, Shard, parallel

        whole, part = Replicate(), Shard(dimension)
        styles: dict[str, Any] = {}
        for name, layer in module.named_modules():
            if isinstance(layer, nn.Linear):
                styles[name] = parallel.ColwiseParallel(output_layouts=whole)
            elif isinstance(layer, nn.Embedding):
                styles[name] = parallel.RowwiseParallel(input_layouts=whole)
        for name, block in module.named_modules():
            inside, norms = name + "." * bool(name), [key for key, _ in block.named_children() if "norm" in key]
            if not hasattr(block, "fc2"):
                continue
            between = part if self.sequence and norms else whole
            styles[f"{inside}fc1"] = parallel.ColwiseParallel(input_layouts=between)
            styles[f"{inside}fc2"] = parallel.RowwiseParallel(output_layouts=between)
            if hasattr(block, "attention"):  # heads are packed as (3, heads, depth): no rank's part has whole heads
                styles[f"{inside}attention.qkv"] = parallel.ColwiseParallel(input_layouts=between, output_layouts=whole)
                styles[f"{inside}attention.out"] = parallel.RowwiseParallel(input_layouts=whole, output_layouts=between)
            if between is part:
                styles |= {f"{inside}{norm}": parallel.SequenceParallel(sequence_dim=dimension) for norm in norms}
                styles[name] = parallel.PrepareModuleInputOutput(
                    input_layouts=(whole,),
                    desired_input_layouts=(part,),
                    use_local_input=True,
                    output_layouts=part,
                    desired_output_layouts=whole,
                )
        return styles


class CompiledShards(Division):
    """FSDP2 in a compiled module, whose graphs end where shards are gathered."""

    def prepare(self, program: Program) -> None:
        torch.compiler.reset()
        torch_names.counters.clear()
        super().prepare(program)
        program.call = torch.compile(program.module)  # compile() of a layer of torch.nn alone compiles nothing
        divide_batch(program, distributed.group.WORLD)

    def facts(self, program: Program) -> Mapping[str, Any]:
        return {**super().facts(program), "graphs": torch_names.counters["stats"]["unique_graphs"]}


MICRO_BATCHES = 4


class Pipelined(Division):
    """Stages of the module on ranks, some on each, between which `torch.distributed.pipelining` sends micro-batches."""

    scaled = True
    """True if gradients are divided by the number of micro-batches."""

    def __init__(self, schedule: str, stages: int = 1) -> None:
        self.schedule, self.stages = schedule, stages
        self.orders: dict[int, str] = {}
        self.owners: dict[str, int] = {}

    def prepare(self, program: Program) -> None:
        from torch.distributed import pipelining

        rank, world = distributed.get_rank(), distributed.get_world_size()
        program.module.train()
        parts = shards(program.inputs, program.target, MICRO_BATCHES)
        if len({len(target) for _, target in parts}) > 1:
            raise Unsupported(unsupported(Code.NO_FEATURE, "torch's schedules average micro-batches of one size"))
        starts = dict.fromkeys(cuts(program.module, world * self.stages), pipelining.SplitPoint.BEGINNING)
        pipe = pipelining.pipeline(program.module, parts[0][0], split_spec=starts)
        for number in range(pipe.num_stages):
            names = [name for name, _ in pipe.get_stage_module(number).named_parameters()]
            self.owners |= dict.fromkeys(names, number % world)
        own = [pipe.build_stage(number, device_of(program)) for number in range(rank, pipe.num_stages, world)]
        for stage in own:
            self.watch(stage)
        schedule = getattr(pipelining, self.schedule)(
            own if self.stages > 1 else own[0], MICRO_BATCHES, loss_fn=self.loss(program), scale_grads=self.scaled
        )
        last = (pipe.num_stages - 1) % world

        def step(number: int) -> Tensor:
            losses: list[Tensor] = []
            given = program.inputs if rank == 0 else ()
            schedule.step(*given, **({"target": program.target, "losses": losses} if rank == last else {}))
            mean = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=device_of(program))
            distributed.broadcast(mean, last)
            return mean

        program.backpropagate = step

    def loss(self, program: Program) -> Any:
        """Returns the loss of a micro-batch."""
        return program.loss

    def watch(self, stage: Any) -> None:
        """Notes the order in which a stage computes: ``F`` for a micro-batch forward, ``B`` for one backward."""
        self.orders[stage.stage_index] = ""

        def noted(letter: str, function: Any, *args: Any, **kwargs: Any) -> Any:
            self.orders[stage.stage_index] += letter
            return function(*args, **kwargs)

        for name in ("forward_one_chunk", "backward_one_chunk"):
            setattr(stage, name, functools.partial(noted, name[0].upper(), getattr(stage, name)))

    def settle(self, program: Program) -> None:
        for name, parameter in program.module.named_parameters():
            distributed.broadcast(parameter.detach(), self.owners[name])

    def facts(self, program: Program) -> Mapping[str, Any]:
        return {"orders": self.orders, "owners": Counter(self.owners.values())}


def in_flight(order: str) -> int:
    """Counts the most micro-batches of which a stage holds activations at a time."""
    return max(accumulate(1 if letter == "F" else -1 for letter in order))


def cuts(module: nn.Module, stages: int) -> list[str]:
    """Returns the names of the layers or blocks with which stages after the first one begin."""
    layers: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            layers += [f"{name}.{number}" for number in range(len(child))]
        elif next(child.parameters(), None) is not None:
            layers.append(name)
    return [layers[round(number * len(layers) / stages)] for number in range(1, stages)]


class ContextParallel(Division):
    """Attention over a sequence in parts: `context_parallel` sends keys and values by ``allgather`` or ``alltoall``."""

    sequence = 2

    def __init__(self, rotation: str) -> None:
        self.rotation = rotation
        self.lengths: list[int] = []

    def prepare(self, program: Program) -> None:
        program.elsewhere = self.attend

    def attend(self, program: Program, mode: Mode) -> Result:
        """Computes the output, and gradients of the whole inputs."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        place = device_of(program).type
        mesh = mesh_of(place, distributed.get_world_size())
        torch_names.set_rotate_method(self.rotation)
        wanted = program.cotangent("out", torch.empty_like(program.inputs[0]))
        buffers = [value.detach().clone() for value in (*program.inputs, wanted)]
        dimensions = [self.sequence] * len(buffers)
        kernel = SDPBackend.MATH if place == "cpu" else SDPBackend.FLASH_ATTENTION
        divided = context_parallel(mesh, buffers=buffers, buffer_seq_dims=dimensions, no_restore_buffers=set(buffers))
        with sdpa_kernel(kernel), divided:
            leaves = [buffer.detach().requires_grad_() for buffer in buffers[:-1]]
            self.lengths += [leaf.size(self.sequence) for leaf in leaves]
            out = program.module(*leaves)
            out.backward(buffers[-1])
        tensors = [out.detach(), *(leaf.grad for leaf in leaves)]
        paths = ["out", *(f"grad:input[{place}]" for place in range(len(leaves)))]
        return dict(zip(paths, torch_names.context_parallel_unshard(mesh, tensors, dimensions), strict=True))

    def facts(self, program: Program) -> Mapping[str, Any]:
        return {"lengths": self.lengths}
