"""The truth of a workload, and what may differ from it: computed once, shared by all techniques and processes of a run."""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.case import Mode
from accelcheck.verify.precision import UNIT_ROUNDOFF
from accelcheck.verify.rounding import Rounding
from accelcheck.verify.views import VIEWS, Pair, floor
from accelcheck.workloads.base import Program, Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from accelcheck.case import Case
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.base import Workload

SAMPLES = 6
"""Runs of the oracle with random rounding errors. The largest of 6 is exceeded by a seventh in 1 of 7 cases, by a factor
of 2 practically never: see `SLACK`."""
SLACK = 2.0
"""A candidate may err twice as much as eager or the rounding samples do: the factor of FlashAttention's tests."""
TRUST = 4.0
"""Eager may err this many times more than the rounding samples before the oracle, or eager, is taken to be wrong. Over all
built-in workloads, dtypes and modes on the CPU the largest ratio is 1.5, the median 0.3; a library that sums in another order
may show more, a wrong oracle shows orders of magnitude. `eager_excess` in the journal has it for each case."""


class OracleError(RuntimeError):
    """The oracle cannot be had or cannot be trusted: an `error` of the case, never a pass."""


@dataclass(frozen=True)
class Layout:
    """What metadata eager gives a tensor of the result: torch dtype's name, shape, strides."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Reference:
    """All that a candidate is judged by.

    Attributes:
        truth: The FP64 oracle's result by path.
        layouts: Metadata of FP32 (or storage dtype) eager on the CPU, by path.
        budgets: Allowed error by path and view, in the view's unit.
        unit: Unit roundoff of the arithmetic precision.
        eager_excess: Largest ratio of eager's own error to the rounding samples', over paths, global view: shows that
            the samples explain eager.
    """

    truth: Result
    layouts: Mapping[str, Layout]
    budgets: Mapping[str, Mapping[str, float]]
    unit: float
    eager_excess: float


class Store:
    """References of a run, in a folder that all its processes share; each is computed once, under a lock.

    Args:
        folder: Private to the run and trusted; removed with it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._memory: dict[str, Reference] = {}

    def get(self, case: Case, technique: Technique, workload: Workload) -> Reference:
        """The reference of a case.

        Raises:
            OracleError: The oracle failed, is not finite where it should be, or disagrees with eager.
        """
        precision = technique.precision(case.dtype)
        key = f"{case.workload}/{case.seed}/{case.dtype}/{case.mode}/{precision}/{technique.oracle}"
        if key not in self._memory:
            path = self.folder / f"{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.pt"
            # A slow oracle holds the lock: another worker waits for it rather than computing the same.
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    reference = compute(workload, technique, case.seed, case.dtype, case.mode)
                    partial = path.with_suffix(".partial")
                    torch.save(_plain(reference), partial)
                    partial.replace(path)
                self._memory[key] = _reference(torch.load(path, weights_only=True))
        return self._memory[key]


def compute(workload: Workload, technique: Technique, seed: int, dtype: str, mode: Mode) -> Reference:
    """The oracle, eager, the rounding samples, and the budgets that follow.

    Raises:
        OracleError: As `Store.get`.
    """
    precision = technique.precision(dtype)
    unit = UNIT_ROUNDOFF[precision]
    storage: torch.dtype = getattr(torch, dtype)

    with _blamed(f"{workload.name}: the FP64 oracle"), _pure_math():
        truth = _exactly(workload, technique, seed, storage).run(mode)
    if not truth or not sum(tensor.numel() for tensor in truth.values()):
        raise OracleError(f"{workload.name}: the oracle produced no elements to compare; its outputs: {sorted(truth)}")
    if overflown := [path for path, tensor in truth.items() if bool(tensor.isnan().any())]:
        raise OracleError(f"{workload.name}: the FP64 oracle is NaN at {', '.join(overflown)}")

    with _blamed(f"{workload.name}: the oracle with rounding errors"), _pure_math():
        samples = [_sample(workload, technique, seed, dtype, precision, mode, index) for index in range(SAMPLES)]
    with _blamed(f"{workload.name}: eager {dtype} on the CPU"):
        eager = Program.of(workload.problem(seed), dtype=storage, seed=seed).run(mode)
    for who, result in [(f"eager {dtype} on the CPU", eager), *(("a rounding sample", sample) for sample in samples)]:
        if differing := _unlike(truth, result):
            raise OracleError(f"{workload.name}: the FP64 oracle and {who} disagree: {differing}")
    layouts = {
        path: Layout(str(t.dtype).removeprefix("torch."), tuple(t.shape), t.stride()) for path, t in eager.items()
    }
    peers = samples
    excess = 0.0
    if technique.oracle == "float64":
        peer = eager if precision == dtype else _eager_at(workload, seed, precision, mode)
        if peer is not None and not _unlike(truth, peer):  # eager wholly in half precision may overflow: samples alone
            excess = _excess(truth, peer, samples, unit)
            if not excess <= TRUST:
                raise OracleError(
                    f"{workload.name}: eager {precision} on the CPU errs {excess:.3g} times more than rounding explains "
                    f"(limit {TRUST:g}): the oracle or eager is wrong, so nothing can be judged by them"
                )
            peers = [*samples, peer]
    budgets = {path: _budgets(path, truth[path], peers, unit) for path in truth}
    return Reference(truth, layouts, budgets, unit, excess)


def _exactly(workload: Workload, technique: Technique, seed: int, storage: torch.dtype) -> Program:
    """The program in FP64, from parameters and inputs as the storage dtype rounds them."""
    program = Program.of(workload.problem(seed), dtype=storage, seed=seed)
    program.module.double()
    program.inputs = tuple(_double(value) for value in program.inputs)
    program.target = _double(program.target)
    program.module = technique.emulate(program.module, program.inputs)
    return program


def _sample(
    workload: Workload, technique: Technique, seed: int, dtype: str, precision: str, mode: Mode, index: int
) -> Result:
    generator = torch.Generator().manual_seed((seed + 1) * SAMPLES + index)
    program = _exactly(workload, technique, seed, getattr(torch, dtype))
    for module in program.module.modules():
        if hasattr(module, "flips"):
            setattr(module, "flips", generator)  # noqa: B010 - nn.Module types its attributes as tensors and modules
    rounding = Rounding(precision, dtype, generator)
    program.update = lambda: rounding.at(dtype)
    with rounding:
        return program.run(mode)


def _eager_at(workload: Workload, seed: int, precision: str, mode: Mode) -> Result | None:
    """Eager wholly in the arithmetic precision, where torch has it as a dtype and the workload runs in it.

    Not for training: parameters kept in half precision lose updates that autocast's FP32 parameters do not.
    """
    dtype = getattr(torch, precision, None)
    if dtype is None or mode is Mode.TRAIN:
        return None
    try:
        return Program.of(workload.problem(seed), dtype=dtype, seed=seed).run(mode)
    except (NotImplementedError, RuntimeError):  # an operator without a CPU kernel in this dtype: samples alone then
        return None


def _budgets(path: str, truth: Tensor, peers: list[Result], unit: float) -> dict[str, float]:
    budgets: dict[str, float] = {}
    pairs = [Pair.of(peer[path], truth, unit) for peer in peers]
    for name, view in VIEWS.items():
        shown = max(view(pair).value for pair in pairs)
        budgets[name] = max(SLACK * shown, floor(name, truth.numel(), unit))
        if not math.isfinite(budgets[name]):
            raise OracleError(
                f"{path}: the budget of view {name} is {budgets[name]}, so anything would pass: the oracle is 0 where "
                "rounding errs. Change the workload so that this tensor is not made of rounding errors alone"
            )
    return budgets


def _excess(truth: Result, eager: Result, samples: list[Result], unit: float) -> float:
    worst = 0.0
    whole = VIEWS["global"]
    for path, tensor in truth.items():
        own = whole(Pair.of(eager[path], tensor, unit)).value
        explained = max(whole(Pair.of(sample[path], tensor, unit)).value for sample in samples)
        # Half a unit of the result's own rounding is explained whatever the samples show.
        worst = max(worst, own / max(explained, unit))
    return worst


def _unlike(truth: Result, other: Result) -> str:
    """The first difference in paths, shapes, or where NaN and infinities stand; empty if there is none."""
    if truth.keys() != other.keys():
        return f"only one has {', '.join(sorted(truth.keys() ^ other.keys()))}"
    for path, tensor in truth.items():
        if tensor.shape != other[path].shape:
            return f"{path} has the shapes {tuple(tensor.shape)} and {tuple(other[path].shape)}"
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            if not torch.equal(kind(tensor), kind(other[path])):
                return f"{path}: {kind.__name__} holds for {int(kind(tensor).sum())} and {int(kind(other[path]).sum())} elements"
    return ""


@contextlib.contextmanager
def _blamed(who: str) -> Iterator[None]:
    """Whatever a workload raises is an answer about the oracle."""
    try:
        yield
    except Exception as error:
        raise OracleError(f"{who} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _pure_math() -> Iterator[None]:
    """Attention as matmul and softmax, so that its inner roundings are seen; nothing fused stands between."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _plain(reference: Reference) -> dict[str, Any]:
    return {
        "truth": reference.truth,
        "layouts": {path: (x.dtype, x.shape, x.stride) for path, x in reference.layouts.items()},
        "budgets": {path: dict(views) for path, views in reference.budgets.items()},
        "unit": reference.unit,
        "eager_excess": reference.eager_excess,
    }


def _reference(plain: dict[str, Any]) -> Reference:
    return Reference(
        truth=plain["truth"],
        layouts={path: Layout(*values) for path, values in plain["layouts"].items()},
        budgets=plain["budgets"],
        unit=plain["unit"],
        eager_excess=plain["eager_excess"],
    )
