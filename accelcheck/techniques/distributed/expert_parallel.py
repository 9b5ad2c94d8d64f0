"""Experts on ranks: tokens go to the ranks of their experts by an all-to-all, and come back by another one."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from accelcheck.core.capability import Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.distributed.data_parallel import listed
from accelcheck.techniques.distributed.model_parallel import ModelParallel
from accelcheck.techniques.distributed.sharing import Division, device_of, mesh_of
from accelcheck.techniques.distributed.strategy import RankReport, TrainingJob
from accelcheck.techniques.observe import at_least, exactly
from accelcheck.workloads.base import Program

TAKEN = "tokens that experts take"
ALIGNED = 8
"""Rows of which each expert gets a multiple, padded by zeros: grouped products need such on some devices."""


class ExpertParallel(Division):
    """Strategy of ranks with some tokens and some experts each, computed in a loop or, if `grouped`, in one product."""

    def __init__(self, *, grouped: bool = False) -> None:
        self.grouped = grouped
        self.sent: list[list[int]] = []
        self.padded = 0

    def prepare(self, program: Program) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        self.module: Any = program.module
        self.mesh = mesh_of(device_of(program).type, distributed.get_world_size())
        for name in ("up", "down"):
            part = nn.Parameter(distribute_tensor(getattr(self.module, name).detach(), self.mesh, [Shard(0)]))
            setattr(self.module, name, part)
        router: Any = self.module.router
        router.weight.register_post_accumulate_grad_hook(self.reduced)
        program.call = self.call

    def reduced(self, weight: Tensor) -> None:
        """Adds up the gradients of the router, which each rank has of its own tokens."""
        if weight.grad is not None:
            distributed.all_reduce(weight.grad)

    def call(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Computes the whole result, of which this rank's tokens are a part."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        own = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        weights = self.module.route(own, lengths.tensor_split(self.mesh.size())[self.mesh.get_rank()])
        expert, token = (weights != 0).flatten(0, 1).t().nonzero().unbind(1)  # by expert, then by token
        rows = self.through(own.flatten(0, 1)[token], expert) * weights.flatten(0, 1)[token, expert, None]
        out = torch.zeros_like(own).flatten(0, 1).index_add(0, token, rows).view_as(own)
        return DTensor.from_local(out, self.mesh, [Shard(0)]).full_tensor()

    def through(self, rows: Tensor, expert: Tensor) -> Tensor:
        """Sends rows, ordered by their expert, to the experts' ranks; returns their results in the same order."""
        from torch.distributed.nn import functional as collectives

        exchange: Any = collectives.all_to_all_single
        world, experts = self.mesh.size(), self.module.router.out_features
        counts = torch.bincount(expert, minlength=experts).view(world, -1)  # by rank and its experts
        coming = torch.empty_like(counts)
        distributed.all_to_all_single(coming, counts)
        sent, received = counts.sum(1).tolist(), coming.sum(1).tolist()
        self.sent.append(sent)
        held = exchange(rows.new_empty(sum(received), rows.size(1)), rows, received, sent)
        # Rows come by rank, and by expert within each rank.
        of = torch.arange(coming.size(1), device=rows.device).repeat(world).repeat_interleave(coming.flatten())
        order = of.argsort(stable=True)
        results = torch.zeros_like(held).index_copy(0, order, self.experts(held[order], coming.sum(0).tolist()))
        return self.returned(exchange(torch.empty_like(rows), results, sent, received))

    def experts(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Computes this rank's experts on their rows, which follow each other."""
        up, down = self.module.up.to_local(), self.module.down.to_local()
        parts = torch.split(rows, list(sizes))
        if not self.grouped:
            return torch.cat([functional.silu(part @ up[i]) @ down[i] for i, part in enumerate(parts)])
        full = [functional.pad(part, (0, 0, 0, -len(part) % ALIGNED)) for part in parts]
        self.padded += sum(map(len, full)) - len(rows)
        ends = torch.tensor([len(part) for part in full], device=rows.device).cumsum(0).to(torch.int32)
        product: Any = functional.grouped_mm
        out = product(functional.silu(product(torch.cat(full), up, offs=ends)), down, offs=ends)
        results = out.split([len(part) for part in full])
        return torch.cat([result[: len(part)] for result, part in zip(results, parts, strict=True)])

    def returned(self, rows: Tensor) -> Tensor:
        """Returns the rows that came back."""
        return rows

    def facts(self, program: Program) -> Mapping[str, Any]:
        return {**super().facts(program), "sent": self.sent, "padded": self.padded}


class Routed(ModelParallel):
    """Mixture of experts whose experts are on ranks."""

    def __init__(self, name: str, world: int, promise: str, *, level: int = 2, grouped: bool = False) -> None:
        source = "https://arxiv.org/abs/2006.16668"
        divide = partial(ExpertParallel, grouped=grouped)
        calls = {"alltoall_base_": 5, "allreduce_": 1}  # of counts; tokens and results, and both gradients
        workloads = frozenset({"experts", "train-experts"})
        super().__init__(name, world, divide, promise, source, calls, workloads, level=level)
        self.grouped = grouped

    def capability(self, device: Device) -> Capability:
        if self.grouped and not hasattr(functional, "grouped_mm"):
            return unsupported(Code.WRONG_VERSION, f"torch {torch.__version__} has no torch.nn.functional.grouped_mm")
        return super().capability(device)

    def share(self, program: Program, mode: Mode) -> TrainingJob:
        module: Any = program.module
        program.extras[TAKEN] = int((module.route(*program.inputs) != 0).sum())  # before a training changes it
        return super().share(program, mode)

    def exchanged(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        yield from super().exchanged(program, answers)
        taken: int = program.extras[TAKEN]
        splits = [answer.facts["sent"][0] for answer in answers]
        yield exactly("tokens that ranks sent to experts, over all ranks,", sum(map(sum, splits)), taken)
        wanted = int(program.inputs[1].sum()) * 2
        yield Evidence(f"tokens over an expert's capacity > 0, of {wanted}", wanted - taken, engaged=wanted > taken)
        yield at_least("different numbers of tokens sent from rank to rank", len({n for s in splits for n in s}), 2)
        held = [answer.facts["elements"].get("up", 0) for answer in answers]
        size = sum(part.numel() for name, part in program.module.named_parameters() if name == "up") // self.world
        yield Evidence(f"elements of `up` on each rank = {size}", listed(held), engaged=set(held) == {size})
        if self.grouped:
            yield at_least("rows of zeros in grouped products", min(answer.facts["padded"] for answer in answers))


_PROMISE = "Tokens sent to experts on {} ranks, unevenly, come back as from a loop over all experts{}."

TECHNIQUES: tuple[Technique, ...] = (
    Routed("expert-parallel", 2, _PROMISE.format(2, "")),
    Routed("expert-parallel-4", 4, _PROMISE.format(4, ""), level=3),
    Routed("expert-parallel-grouped", 2, _PROMISE.format(2, ", by grouped products of padded rows"), grouped=True),
)
