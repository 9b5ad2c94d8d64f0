"""Collectives alone, between three and four ranks: each dtype, reduction, layout and size."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.distributed.collective_ranks import Calling, CollectiveCalls, calls_of
from accelcheck.techniques.distributed.data_parallel import STRATEGY
from accelcheck.techniques.distributed.model_parallel import ModelParallel
from accelcheck.techniques.distributed.strategy import RankReport
from accelcheck.techniques.observe import at_least, exactly, none_of
from accelcheck.workloads.base import Program, Result, flatten
from accelcheck.workloads.collectives import BUNDLES


class Collectives(ModelParallel):
    """Every rank's result of every call of a bundle."""

    family = "collective"
    dtypes = ("float32", "bfloat16", "float16")
    keeps_strides = False  # a rank's buffers are its own
    did = "called"

    def __init__(self, world: int) -> None:
        promise = f"Collectives between {world} ranks give each the result of its reduction, or the others' very bits."
        source = "https://docs.pytorch.org/docs/stable/distributed.html#collective-functions"
        workloads, modes = frozenset(f"{name}-{world}" for name in BUNDLES), frozenset({Mode.FORWARD})
        super().__init__(f"collectives-{world}", world, CollectiveCalls, promise, source, {}, workloads, modes)

    def share(self, program: Program, mode: Mode) -> Calling:
        return Calling.of(program, program.extras[STRATEGY])

    def returned(self, program: Program, answers: Sequence[RankReport]) -> Result:
        """Returns all ranks' results; raises a RuntimeError if torch refused a call."""
        for label, words in answers[0].facts["refused"].items():
            raise RuntimeError(f"{label}: {words}")
        device = program.inputs[0].device
        return {path: tensor.to(device) for answer in answers for path, tensor in answer.result.items()}

    def shown(self, program: Program, answers: Sequence[RankReport]) -> Iterable[Evidence]:
        calls = list(calls_of(program))
        least = min(sum(answer.calls[0].values()) for answer in answers)
        yield at_least("collectives of each rank", least, len(calls))
        wanted = sum(call.form == "transposed" for call, _ in calls)
        strided = min(answer.facts["strided"] for answer in answers)
        yield exactly("tensors with gaps that each rank sent", strided, wanted)
        digests = answers[0].digests.items()
        unlike = [label for label, own in digests if any(answer.digests[label] != own for answer in answers)]
        yield none_of("calls that gave ranks different bits", unlike)
        if (worst := self.worst(program, answers)) is not None:
            claim = f"errors of sums <= {self.world - 1} roundings of the sum of magnitudes"
            yield Evidence(claim, f"{worst:.2g} of the bound", worst <= 1.0)

    def worst(self, program: Program, answers: Sequence[RankReport]) -> float | None:
        """Returns the largest error of a sum, as a share of its bound for any order; None without floating sums.

        n - 1 additions in any order err by at most (n - 1) u / (1 - (n - 1) u) times the sum of magnitudes (Higham,
        Accuracy and Stability of Numerical Algorithms, 4.2); a division, as for an average, errs by another u.
        """
        results = {path: tensor for answer in answers for path, tensor in answer.result.items()}
        shares = []
        for call, x in calls_of(program):
            own = call.own(x.cpu())
            if call.op not in {"sum", "avg"} or not own.is_floating_point():
                continue
            numbers, exact, kind = x.cpu().to(own.dtype), replace(call, dtype="float64"), torch.finfo(own.dtype)
            u = kind.eps / 2 * (self.world - (call.op == "sum"))
            sizes = flatten(exact(numbers.abs()))
            for (path, truth), (_, size) in zip(flatten(exact(numbers), f"out[{call.label!r}]"), sizes, strict=True):
                error = (results[path].double() - truth).abs() - kind.smallest_normal
                shares.append(float((error / (size * u / (1 - u)).clamp(min=1e-300)).max()))
        return max(shares, default=None)


TECHNIQUES: tuple[Technique, ...] = tuple(map(Collectives, (3, 4)))
