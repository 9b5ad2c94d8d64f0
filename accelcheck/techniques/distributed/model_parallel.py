"""One model over several ranks: tensor, sequence, pipeline and context parallelism, and compiled FSDP2."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from accelcheck.core.capability import Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import inductor_capability
from accelcheck.techniques.distributed import sharing
from accelcheck.techniques.distributed.data_parallel import FSDP, STRATEGY, RankedTraining, listed
from accelcheck.techniques.distributed.strategy import RankReport, Strategy, TrainingJob
from accelcheck.techniques.observe import at_least, exactly
from accelcheck.workloads import builtin
from accelcheck.workloads.base import Program, Workload

PARALLEL = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
PIPELINES = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
CONTEXT = "https://docs.pytorch.org/tutorials/unstable/context_parallel.html"
ALL_REDUCE = "allreduce_"
GATHER = "allgather_into_tensor_coalesced_|_allgather_base_"
SCATTER = "reduce_scatter_tensor_coalesced_|_reduce_scatter_base_"


@dataclass(eq=False)
class ModelParallel(RankedTraining):
    """Runs that ranks share in any mode, each with the whole batch, of workloads whose layers the strategy knows.

    Each rank must make the `calls` (``c10d::``, alternatives by ``|``) so often at least.
    """

    family = "model-parallel"
    requires = frozenset()
    excludes = frozenset()
    differentiates_twice = False

    name: str
    world: int
    strategy: Callable[[], Strategy]
    promise: str
    source: str
    calls: Mapping[str, int]
    workloads: frozenset[str]
    modes: frozenset[Mode] = frozenset({Mode.BACKWARD, Mode.TRAIN})
    level: int = 2

    def refusal(self, workload: Workload) -> str:
        if workload.name not in builtin():
            return "divides the layers of built-in models: any other model needs a division of its own"
        return super().refusal(workload)

    def check_batches(self, program: Program) -> None:
        return

    def share(self, program: Program, mode: Mode) -> TrainingJob:
        return sharing.SharedJob.made(program, program.extras[STRATEGY], mode)

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        for names, least in self.calls.items():
            counts = [sum(answer.calls[0].get(f"c10d::{name}", 0) for name in names.split("|")) for answer in answers]
            yield at_least(f"{names.split('|')[0].strip('_')} of each rank", min(counts), least)


class Divided(ModelParallel):
    """Weights of layers in parts on the ranks, as distributed tensors."""

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        layers = [name for name, part in program.module.named_modules() if isinstance(part, (nn.Linear, nn.Embedding))]
        elements = [answer.facts["elements"] for answer in answers]
        parameters = dict(program.module.named_parameters())
        divided = {
            name
            for name in elements[0]
            if max(held[name] for held in elements) < (size := parameters[name].numel())
            and sum(held[name] for held in elements) % size == 0
        }
        weights = sum(f"{name}.weight" in divided for name in layers)
        yield exactly("weights of layers in parts, all of them on some rank,", weights, len(layers))
        yield exactly("parameters in parts, all of them on some rank,", len(divided), len(elements[0]))


class CompiledLayers(Divided):
    """FSDP2 in a compiled module."""

    def capability(self, device: Device) -> Capability:
        ranks = super().capability(device)
        return inductor_capability(device) if ranks.ok else ranks

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        yield at_least("graphs compiled by each rank", min(answer.facts["graphs"] for answer in answers))


class Pipeline(ModelParallel):
    """Stages of the model on ranks, with at `most` so many micro-batches in flight on each."""

    def __init__(self, *arguments: Any, most: Sequence[int], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.most = tuple(most)

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        orders = dict(sorted(item for answer in answers for item in answer.facts["orders"].items()))
        passes = program.steps * sharing.MICRO_BATCHES
        complete = [order for order in orders.values() if order.count("F") == order.count("B") == passes]
        yield exactly(f"stages that ran {passes} micro-batches forward and backward", len(complete), len(self.most))
        most = listed(sharing.in_flight(order) for order in orders.values())
        wanted = listed(self.most)
        yield Evidence(f"most micro-batches in flight, by stage: {wanted}", most, engaged=most == wanted)
        owners = min(len(answer.facts["owners"]) for answer in answers)
        yield exactly("ranks with parameters of their own", owners, self.world)


class Context(ModelParallel):
    """Attention over a sequence that ranks have in parts."""

    def __init__(self, rotation: str, promise: str, calls: Mapping[str, int], early: Iterable[str] = ()) -> None:
        name, divide = f"context-parallel-{rotation}", partial(sharing.ContextParallel, rotation)
        workloads, modes = frozenset({"attention", "attention-causal"}), frozenset({Mode.BACKWARD})
        super().__init__(name, 2, divide, promise, CONTEXT, calls, workloads, modes)
        self.rotation, self.early = rotation, frozenset(early)

    def capability(self, device: Device) -> Capability:
        if device.has("host") and self.rotation == "alltoall":
            fact = "torch sends keys and values around for a GPU's kernels alone: the CPU's math kernel gathers them"
            return unsupported(Code.NO_FEATURE, fact)
        return super().capability(device)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        if device.has("host") and getattr(program.module, "causal", False):
            fact = "context_parallel has no causal rule for the math kernel, the CPU's only one that it divides"
            words = "aten.add.Tensor got mixed torch.Tensor and DTensor"
            raise Unsupported(unsupported(Code.NO_FEATURE, f"{fact}: {words}"))

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        lengths = {length for answer in answers for length in answer.facts["lengths"]}
        yield exactly("positions of each rank, all together", sum(lengths) * self.world, program.inputs[0].size(2))


_MLP, _TRANSFORMER = frozenset({"train-mlp", "train-transformer"}), frozenset({"train-transformer"})
_BLOCKS = frozenset({"mlp-blocks", "transformer-block"})
_TRAIN = frozenset({Mode.TRAIN})
_SHARDED, _SUMMED = {GATHER: 1, SCATTER: 1}, {ALL_REDUCE: 1}
_COLUMNS = "Linear layers by columns and rows on {} ranks compute what whole ones do."
_SEQUENCE = (
    "Norms and residuals of a part of the sequence on each rank, between divided layers, compute what whole ones do."
)
_GROUPS = (
    "Two groups of two ranks, with half of the batch each, train divided layers as one process does the whole batch."
)
_COMPILED = "FSDP2 in a compiled module trains as one process on the joined batch does."
_GATHERED = "Attention over gathered keys and values of all ranks is that over the whole sequence."
_AROUND = "Attention over keys and values that go around the ranks is that over the whole sequence."
_STAGED = "{} of micro-batches through stages on {} ranks gives the training of one process on the whole batch."


def _pipeline(name: str, schedule: str, world: int, stages: int, most: Sequence[int], level: int = 2) -> Pipeline:
    promise, divide = _STAGED.format(schedule, world), partial(sharing.Pipelined, f"Schedule{schedule}", stages)
    workloads = _MLP if stages == 1 and world == 2 else _TRANSFORMER
    calls = dict.fromkeys(("send", "recv_"), 4 * sharing.MICRO_BATCHES)
    return Pipeline(name, world, divide, promise, PIPELINES, calls, workloads, modes=_TRAIN, level=level, most=most)


_ALL, _PARTS = _BLOCKS | _MLP, sharing.TensorParallel
_NORMS = "https://arxiv.org/abs/2205.05198"

TECHNIQUES: tuple[Technique, ...] = (
    Divided("tensor-parallel", 2, _PARTS, _COLUMNS.format(2), PARALLEL, _SUMMED, _ALL),
    Divided("tensor-parallel-4", 4, _PARTS, _COLUMNS.format(4), PARALLEL, _SUMMED, _ALL, level=3),
    Divided(
        "sequence-parallel", 2, partial(_PARTS, sequence=True), _SEQUENCE, _NORMS, _SHARDED, _BLOCKS | _TRANSFORMER
    ),
    Divided("tp-fsdp2", 4, partial(_PARTS, data=2), _GROUPS, PARALLEL, _SUMMED | _SHARDED, _MLP, modes=_TRAIN, level=3),
    CompiledLayers("compiled-fsdp2", 2, sharing.CompiledShards, _COMPILED, FSDP, _SHARDED, _MLP, modes=_TRAIN, level=3),
    _pipeline("pipeline-gpipe", "GPipe", 2, 1, (4, 4)),
    _pipeline("pipeline-1f1b", "1F1B", 2, 1, (2, 1)),
    _pipeline("pipeline-interleaved", "Interleaved1F1B", 2, 2, (4, 3, 2, 1), level=1),
    _pipeline("pipeline-1f1b-4", "1F1B", 4, 1, (4, 3, 2, 1)),
    Context("allgather", _GATHERED, {GATHER: 1}, ("attention",)),
    Context("alltoall", _AROUND, {"alltoall_base_": 1}),
)
