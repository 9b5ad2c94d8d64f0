"""The budget of one operator's own rounding: FP64 from its inputs, and the errors of correct implementations beside it.

Samples are those of a whole workload (`accelcheck.verify.oracle`): FP64 with random rounding errors, with correct
rounding, and, on another device than the CPU, the CPU's own operator where the samples explain it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.fault import Fault, FaultKind
from accelcheck.explain import fused, holding
from accelcheck.explain.calls import OperatorCall, aside
from accelcheck.explain.holding import NoTruthError
from accelcheck.verify.judge import Judgement, value_fault
from accelcheck.verify.operators import CONTRACTIONS, EXACT
from accelcheck.verify.precision import ACCUMULATOR, UNIT_ROUNDOFF
from accelcheck.verify.reference import Reference
from accelcheck.verify.resampling import Defined
from accelcheck.verify.rounding import Nearest, Rounding

ROUNDERS = frozenset({"native_dropout_backward"})
"""Operators of `EXACT` that multiply; exact only as part of a workload."""
ADDING = frozenset({"index_put", "index_put_", "put", "put_"})
"""Operators of `EXACT` that add where they accumulate."""
INDICES = frozenset("max min sort topk kthvalue median mode cummax cummin argmax argmin".split())
"""Operators that return places along a dimension; of equal values, any place is right."""


@dataclass(frozen=True)
class OperatorFinding:
    """The judgement of one operator: its faults with their paths, if any.

    Judgements and references are by dtype of its results; there are none where every bit is the nearest one.
    """

    faults: tuple[Fault, ...] = ()
    judged: Mapping[str, Judgement] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)


def by_dtype(
    results: Mapping[str, Tensor], judge: Callable[[Mapping[str, Tensor], str], tuple[Judgement, Reference]]
) -> OperatorFinding:
    """Judge the results of each dtype together, by ``judge(results, dtype)``."""
    judged: dict[str, Judgement] = {}
    references: dict[str, Reference] = {}
    for dtype in dict.fromkeys(holding.named(tensor.dtype) for tensor in results.values()):
        own = {path: tensor for path, tensor in results.items() if holding.named(tensor.dtype) == dtype}
        judged[dtype], references[dtype] = judge(own, dtype)
    faults = tuple(fault for judgement in judged.values() for fault in judgement.faults)
    return OperatorFinding(faults, judged, references)


@dataclass(frozen=True)
class OperatorBudgets:
    """Holds operators to their budgets.

    `arithmetic` is the precision of contractions of the case's `storage` dtype by the technique's promise, such as
    ``tf32``. `careful` of `accelcheck.explain.holding.COUNTS` are left out: 1 begins with more samples. `strict` holds
    functions such as GELU, whose usual formulas cancel, to a whole workload's budget.
    """

    arithmetic: str = "float32"
    storage: str = "float32"
    careful: int = 0
    strict: bool = False

    def find(self, call: OperatorCall, results: Mapping[str, Tensor], *, peers: bool = False) -> OperatorFinding:
        """Judge the results of an operator by place, from a call with its arguments from before it ran.

        `peers` is True where the CPU's own operator is another implementation than the one that is judged. A
        `NoTruthError` where FP64 has no such operator, or it raised.
        """

        def judge(own: Mapping[str, Tensor], dtype: str) -> tuple[Judgement, Reference]:
            precision = self.precision(call, dtype)
            sample = partial(_sample, wide, own, precision, dtype, strict=self.strict)
            eager = dict(_of_cpu(call, own)) if peers else {}
            return holding.judged(own, truth, precision, sample, eager=eager, careful=self.careful)

        results = {path: tensor.detach().cpu() for path, tensor in results.items()}
        if any(tensor.is_complex() for tensor in results.values()):
            raise NoTruthError("complex results are not judged")
        with aside():
            wide = call.widened()
            truth = _computed(wide, results)
            faults = list(_metadata(truth, results)) or list(_integers(call, truth, results))
            if faults:
                return OperatorFinding(tuple(faults))
            floats = {path: tensor for path, tensor in results.items() if tensor.is_floating_point()}
            unlike = {path: tensor for path, tensor in floats.items() if not holding.nearest(tensor, truth[path])}
            adds = call.name in ADDING and call.named().get("accumulate")
            if call.name in EXACT - ROUNDERS and not adds:
                return OperatorFinding(tuple(_inexact(path, tensor, truth[path]) for path, tensor in unlike.items()))
            return by_dtype(unlike, judge)

    def precision(self, call: OperatorCall, dtype: str) -> str:
        """The arithmetic precision of an operator with results of a dtype."""
        # The sums that attention saves for the backward pass are no more accurate than their terms.
        if fused.fused_attention(call):
            floats = (holding.named(tensor.dtype) for tensor in call.tensors() if tensor.is_floating_point())
            return max(floats, key=lambda precision: UNIT_ROUNDOFF.get(precision, 0.0), default=dtype)
        return self.arithmetic if dtype == self.storage and call.name in CONTRACTIONS else dtype


def _computed(wide: OperatorCall, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute a call's results in FP64, by place."""
    try:
        if fused.only_by_parts(wide):
            return _placed(_parted(wide), results)
        copy = wide.kept()
        with Defined():
            made = copy.results(copy.run())
    except Exception as error:
        raise NoTruthError(f"FP64 on the CPU raised {type(error).__name__}: {error}") from error
    if missing := results.keys() - made.keys():
        raise NoTruthError(f"FP64 on the CPU has no {', '.join(sorted(missing))}")
    return {path: tensor.to(torch.float64) if tensor.is_floating_point() else tensor for path, tensor in made.items()}


def _parted(wide: OperatorCall) -> Any:
    compute = fused.parts(wide)
    assert compute is not None
    return compute()


def _placed(out: Any, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of the parts by place; outputs that no part computes are the operator's own, and so not judged."""
    made = {f"out[{i}]": part for i, part in enumerate(out)} if isinstance(out, (tuple, list)) else {"out": out}
    own = {path: x.to(torch.float64) if x.is_floating_point() else x for path, x in results.items()}
    return own | {path: made[path] for path, x in own.items() if path in made and made[path].shape == x.shape}


def _sample(
    wide: OperatorCall,
    own: Mapping[str, Tensor],
    precision: str,
    dtype: str,
    number: int,
    generator: torch.Generator,
    *,
    strict: bool,
) -> dict[str, Tensor]:
    """Compute with one more correct implementation; `number` chooses its kind."""
    if fused.only_by_parts(wide):
        with Rounding(precision, precision, generator):
            return _placed(_parted(wide), own)
    compute = None if strict and wide.name in fused.ELEMENTWISE else fused.parts(wide)
    constants = dtype if number % 4 == 1 else ACCUMULATOR
    call = wide if number % 2 == 0 else wide.each(lambda value: _constant(value, constants))
    if number == 1 and precision == dtype:
        with Nearest(getattr(torch, dtype)):
            if wide.name not in fused.STORED:
                return _taken(call.kept(), own)
            made = wide.results(compute() if compute else None)
            return {path: made[path] for path in own}
    if compute is not None and number % 2 == 0:
        # A kernel rounds inner values to the accumulator's precision, and its results to theirs.
        inner = dtype if wide.name in fused.STORED else ACCUMULATOR
        with Rounding(inner, inner, generator):
            out = compute()
        made = wide.results(out)
        return {path: made[path].to(tensor.dtype).to(torch.float64) for path, tensor in own.items()}
    with Rounding(precision, dtype, generator):
        return _taken(call.kept(), own)


def _taken(call: OperatorCall, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = call.results(call.run())
    return {path: made[path].to(torch.float64) for path in own}


def _constant(value: Any, dtype: str) -> Any:
    """Round a constant once for all elements: kernels keep it in the storage dtype or the accumulator's."""
    return float(torch.tensor(value, dtype=getattr(torch, dtype))) if isinstance(value, float) else value


def _of_cpu(call: OperatorCall, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Compute the same inputs with the CPU's own operator; nothing where it has none."""
    try:
        host = call.on_host()
        made = host.results(host.run())
    except Exception:  # noqa: BLE001 - torch has no such kernel on the CPU: the samples alone are the budget
        return
    for path, tensor in own.items():
        if path in made and made[path].shape == tensor.shape:
            yield path, made[path]


def _inexact(path: str, result: Tensor, truth: Tensor) -> Fault:
    rounded = truth.to(result.dtype)
    differing = ((result != rounded) & ~(result.isnan() & rounded.isnan())).nonzero()
    where = tuple(differing[0].tolist())
    expected, got = (f"{side[where].item():.9g}" for side in (rounded, result))
    got += f"; {len(differing)} of {result.numel()} elements differ"
    return Fault(FaultKind.VALUE, path, "not rounded once", expected=expected, got=got, place=str(list(where)))


def _metadata(truth: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> Iterator[Fault]:
    for path, result in results.items():
        if result.shape != truth[path].shape:
            expected, got = (str(tuple(side.shape)) for side in (truth[path], result))
            yield Fault(FaultKind.METADATA, path, "shape", expected=expected, got=got)
        elif result.dtype != truth[path].dtype and not (result.is_floating_point() and truth[path].is_floating_point()):
            expected, got = (str(side.dtype).removeprefix("torch.") for side in (truth[path], result))
            yield Fault(FaultKind.METADATA, path, "dtype", expected=expected, got=got)


def _integers(call: OperatorCall, truth: Mapping[str, Tensor], results: Mapping[str, Tensor]) -> Iterator[Fault]:
    for path, result in results.items():
        if result.is_floating_point() or torch.equal(result, truth[path].to(result.dtype)):
            continue
        if call.name in INDICES and _same_choice(call, truth[path], result):
            continue
        yield value_fault(path, result, truth[path])


def _same_choice(call: OperatorCall, expected: Tensor, got: Tensor) -> bool:
    """True if the chosen places hold equal values, so that the choice was free."""
    given = call.named()
    x = (given["self"] if "self" in given else given["input"]).detach().cpu().to(torch.float64)
    dim = given.get("dim")
    if dim is None:
        x, dim = x.reshape(-1), 0
        expected, got = expected.reshape(-1), got.reshape(-1)
    elif expected.dim() < x.dim():
        expected, got = expected.unsqueeze(dim), got.unsqueeze(dim)
    if got.numel() and (int(got.min()) < 0 or int(got.max()) >= x.shape[dim]):
        return False
    expected_values, got_values = x.gather(dim, expected), x.gather(dim, got)
    return torch.equal(expected_values.nan_to_num(nan=math.pi), got_values.nan_to_num(nan=math.pi))
