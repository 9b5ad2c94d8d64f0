"""Matches rows of results whose number rounding decides, such as boxes after non-maximum suppression, by nearest row.

Tensors of one container with the same first sizes in each result, such as boxes, scores and labels of an image, have
their rows matched together. The rows of the oracle that all rounding samples and eager have too are judged; a candidate
may have at most `SLACK` times as many others as any of them.
"""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accelcheck.core.fault import Fault, FaultKind
from accelcheck.verify.precision import SLACK
from accelcheck.workloads.base import Result

Groups = Mapping[str, tuple[Sequence[str], int, int]]
"""Paths of the tensors of each container, and a sample's largest numbers of other rows and of descents."""

MOST = 2048
"""Most rows that are matched: distances of all pairs are computed."""
LEAST = 0.5
"""Least part of the oracle's rows that all samples have; with less, nothing is judged."""


def steady(truth: Result, others: Sequence[Result], unit: float) -> tuple[Result, Groups] | None:
    """Returns the oracle's result with only the rows that all other results have, and groups; None without enough."""
    if any(truth.keys() != other.keys() for other in others):
        return None
    every = (truth, *others)
    varying = {path for path in truth if len({tuple(result[path].shape) for result in every}) > 1}
    kinds = {re.sub(r"\d+", "0", path) for path in varying}  # an image may keep its number by chance
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for path, tensor in truth.items():
        if re.sub(r"\d+", "0", path) in kinds:
            if not all(r[path].dim() and r[path].shape[1:] == tensor.shape[1:] and len(r[path]) <= MOST for r in every):
                return None
            sizes = tuple(len(result[path]) for result in every)
            groups.setdefault((path.rpartition("[")[0], sizes), []).append(path)
    kept: Result = dict(truth)
    chosen: dict[str, tuple[Sequence[str], int, int]] = {}
    for paths in groups.values():
        found = torch.stack([_nearest(truth, other, paths, unit) for other in others])
        rows = (found >= 0).all(0).nonzero()[:, 0]
        if len(rows) < LEAST * len(truth[paths[0]]):
            return None
        kept |= {path: truth[path][rows] for path in paths}
        more = max(len(other[paths[0]]) - len(rows) for other in others)
        chosen[paths[0]] = paths, more, max(map(_descents, found[:, rows]))
    return kept, chosen


def aligned(result: Result, truth: Result, groups: Groups, unit: float) -> tuple[Result, list[Fault]]:
    """Returns a result with the rows that match the oracle's, in its order, and faults of other numbers of rows."""
    faults: list[Fault] = []
    kept = dict(result)
    for first, (paths, *most) in groups.items():
        shapes = [tuple(result[path].shape) if path in result else () for path in paths]
        size = shapes[0][:1]
        if not size or shapes != [(*size, *truth[path].shape[1:]) for path in paths]:
            continue  # a fault of its metadata
        rows = _nearest(truth, result, paths, unit)
        lost, more, descents = int((rows < 0).sum()), len(result[first]) - len(rows), _descents(rows[rows >= 0])
        others, swaps = (math.ceil(SLACK * number) for number in most)
        if lost or more > others or descents > swaps:
            expected = f"the {len(rows)} rows that rounding does not decide, at most {others} more, {swaps} descents"
            got = f"{len(result[first])} rows, without {lost} of these, {descents} descents"
            faults.append(Fault(FaultKind.METADATA, first, "rows", expected=expected, got=got))
        rows = rows.clamp(min=0) if len(result[first]) else rows[:0]
        kept |= {path: result[path][rows.to(result[path].device)] for path in paths}
    return kept, faults


def _descents(rows: Tensor) -> int:
    """Number of matched rows that stand before their predecessor."""
    return int((rows[1:] < rows[:-1]).sum())


def _nearest(truth: Result, other: Result, paths: Sequence[str], unit: float) -> Tensor:
    """Indices of the rows of a result that are nearest to each row of the oracle; -1 where none is near."""
    if not len(other[paths[0]]) or not len(truth[paths[0]]):
        return torch.full((len(truth[paths[0]]),), -1)
    worst = torch.zeros(len(truth[paths[0]]), len(other[paths[0]]), dtype=torch.float64)
    for path in paths:
        mine, others = (x.detach().cpu().double().reshape(len(x), -1) for x in (truth[path], other[path]))
        distances = torch.cdist(mine, others, compute_mode="donot_use_mm_for_euclid_dist")
        exact = not truth[path].is_floating_point()
        scale = 1e-9 if exact else max(float(mine.norm()) / math.sqrt(len(mine)), 1e-300) * math.sqrt(unit)
        worst = torch.maximum(worst, distances / scale)
    rows = worst.argmin(1)
    near = worst.gather(1, rows[:, None])[:, 0] <= 1
    mutual = worst.argmin(0)[rows] == torch.arange(len(rows))  # no row is that of two
    return torch.where(near & mutual, rows, -1)
