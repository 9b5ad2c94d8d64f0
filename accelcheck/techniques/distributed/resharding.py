"""Distributed checkpoints: ranks save a training in shards; more or fewer ranks load and continue it.

`torch.distributed.checkpoint` reads its metadata by pickle: the folder is private to the run.
"""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from accelcheck.core.case import Evidence, Mode
from accelcheck.core.files import scratch
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.distributed.data_parallel import ANSWERS, RankedTraining, listed
from accelcheck.techniques.distributed.pool import rank_pool
from accelcheck.techniques.distributed.resharding_ranks import RANKS, WORLD, Loaded, Resharded
from accelcheck.techniques.distributed.strategy import RankReport, Strategy
from accelcheck.techniques.snapshots.stepwise import adopted
from accelcheck.workloads.base import Program, Result


class Reshard(RankedTraining):
    """Training by two ranks, then three, then one, with a sharded checkpoint before each change."""

    family = "snapshot"
    excludes = RankedTraining.excludes | {"batches"}  # the sharded training takes the same batch in each step
    job = Resharded
    did = "took part"

    def __init__(self) -> None:
        promise = "A checkpoint that ranks wrote in shards is read by more ranks or fewer, and no bit of it changes."
        source = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"
        super().__init__("dcp-reshard", WORLD, Strategy, promise, source)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.check_batches(program)

        def elsewhere(program: Program, mode: Mode) -> Result:
            with tempfile.TemporaryDirectory(prefix="reshard-", dir=scratch()) as folder:
                job = self.job.within(Path(folder), program)
                answers = program.extras[ANSWERS] = rank_pool(device, self.world).train(job)
            losses = [answers[0].result[f"loss[{step}]"] for step in range(program.steps)]
            module = {name: answers[0].result[f"module.{name}"] for name in program.module.state_dict()}
            return adopted(program, module, losses)

        program.elsewhere = elsewhere
        program.resets.append(lambda: program.extras.pop(ANSWERS, None))

    def shown(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        loads: Sequence[Loaded] = answers[0].facts["loads"]
        files, wanted = listed(load.files for load in loads), listed(RANKS)
        yield Evidence(f"files of the checkpoints, one by each rank that saved: {wanted}", files, files == wanted)
        names = [name for name, _ in program.module.named_parameters()]
        for ranks, load in zip(RANKS, loads, strict=True):
            shard = f"split by dimension 0 over {ranks}" if ranks > 1 else "whole"
            count = load.shards.count(shard)
            yield Evidence(
                f"parameters saved as {shard} = {len(names)}", count, count == len(load.shards) == len(names)
            )
        for number, (load, ranks) in enumerate(zip(loads, (*RANKS[1:], RANKS[0]), strict=True)):
            # Every parameter, and at least one tensor that the optimizer remembers of each.
            least = 2 * len(names)
            claim = f"tensors saved by {RANKS[number]} and loaded by {ranks} >= {least}, none of them changed"
            seen = f"{load.tensors}, changed: {', '.join(load.differing) or 'none'}"
            yield Evidence(claim, seen, engaged=load.tensors >= least and not load.differing)


TECHNIQUES: tuple[Technique, ...] = (Reshard(),)
