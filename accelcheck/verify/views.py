"""Views: measures of an error, each sensitive to faults that the others miss.

With c the candidate, o the oracle, e = c - o in FP64, u the unit roundoff, as matrices whose rows run along the last
dimension, and |.| the Frobenius norm:

======= ==========================================================================================
row     max over rows i of |e_i| / sqrt(|o_i|^2 + mean_i |o_i|^2)
column  the same over columns
block   the same over tiles of 16 x 16
element max |e| / rms(o), for a single wrong element
gain    <e, o> / <o, o>, the distance of a common factor from 1; signed
tail    value of |e| / ulp(o) that 1 % of the elements, and 8 of them, exceed: small elements, which norms do not see
bias    median of e / ulp(o), for errors in one direction; signed
======= ==========================================================================================

The mean under the root keeps a row that is small only by chance from deciding everything: its error comes from operands
as large as the other rows'. ulp(o), the unit in the last place, is 2 u times the larger of |o| and rms(o) / 4096 (what
is smaller is left of a cancellation), and never below the smallest subnormal. The last two look at 4,096 elements of a
larger tensor, drawn as `_drawn` says: no pattern of rows or columns is left out. |e| / |o| over all is measured too; it
gates nothing, since rows and columns see all it sees.

All sums are made in one pass, in chunks that fit a processor's cache. Small tensors go through NumPy, whose calls cost
a third of torch's; the code is the same for both.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelcheck.verify.own import Errors, Sizes
from accelcheck.verify.precision import ACCUMULATOR, INEXACT_ULPS, SLACK, UNIT_ROUNDOFF

TILE = 16
"""Side of a block: the smallest tile of GPUs' and TPUs' matrix units."""
SAMPLE = 4096
"""Elements that the ULP views read of tensors with 8,192 and more: such a quantile is known to 1.6 %."""
SMALL = 2**13
"""Most elements for which NumPy is faster than torch."""
CHUNK = 2**18
"""Elements of a chunk: 2 MiB in FP64, so that an error and its squares stay in shared caches, and threads seldom wait
for each other. Twice or half as many take up to a third longer with two threads."""
WIDEST = 2**16
MOST_ROWS = 2**20
"""Limits of the matrix view of a tensor, which bound the memory of the sums for tensors of any size."""
TAIL = 0.99
OUTLIERS = 8
"""Least elements beyond the tail: with fewer, one element that is close to 0 by chance would decide."""
NEGLIGIBLE = 2.0**-12
"""Part of the root mean square below which elements have no units in the last place of their own."""
VIEWS = ("row", "column", "block", "element", "gain", "tail", "bias")
SIGNED = frozenset({"gain", "bias"})
"""Views with a direction: the same sign in every draw is a fault long before it is large."""
GATES = frozenset(VIEWS) - {"bias"}
"""Views that may fail a case in one draw. `bias` needs the same direction in all draws."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Views of the error of one tensor.

    Attributes:
        values: Errors by view, in the order of `VIEWS`; signed for gain and bias. Infinite against an oracle of 0.
        places: Positions of the worst row, column and block.
        relative: Relative Frobenius error of the whole tensor.
        finite: True where candidate and oracle are finite everywhere; other elements count as right.
        errors: Norms for `accelcheck.verify.own`; None where something is not finite.
    """

    values: tuple[float, ...]
    places: tuple[int, int, int]
    relative: float
    finite: bool
    errors: Errors | None = field(default=None, compare=False, repr=False)

    def __getitem__(self, view: str) -> float:
        return self.values[VIEWS.index(view)]


class Yardstick:
    """Measures candidates against an oracle's FP64 tensor of any shape and at least one element.

    `unit` is the unit roundoff of the arithmetic precision, and `spacing` the distance of its numbers around 0: the
    least unit in the last place.
    """

    def __init__(self, truth: Tensor, unit: float, spacing: float = 0.0) -> None:
        self.shape = tuple(truth.shape)
        self.rows, self.columns = _matrix(self.shape)
        self.leading = self.shape[:-1] if self.columns == (self.shape or (1,))[-1] and len(self.shape) > 2 else ()
        self.device = truth.device
        truth = truth.detach().to(torch.float64).reshape(self.rows, self.columns)
        self.small = truth.numel() <= SMALL and truth.device.type == "cpu"
        finite = torch.isfinite(truth)
        self.finite = bool(finite.all())
        kept = truth if self.finite else torch.where(finite, truth, 0.0)
        self._truth: Any = truth.numpy() if self.small else truth
        self._kept: Any = self._truth if self.finite else (kept.numpy() if self.small else kept)
        squares = _Sums()
        self._chunks = self._cut()
        self._picks = self._sampled()
        picked = []
        for pick, kept in self._pieces(self._kept):
            squares.add(kept)
            picked.append(_at(kept, pick))
        self._row_weights = _weights(squares.rows)
        self._column_weights = _weights(_numpy(squares.columns))
        self._tile_weights = _weights(squares.tiles)
        self._size = squares.total
        self._rms = math.sqrt(self._size / (self.rows * self.columns))
        sampled = _joined(picked)
        own = Errors.of(squares.rows, _numpy(squares.columns), sampled)
        self.sizes = Sizes(own, self._size, (self.columns, self.rows, len(sampled)))
        self._nonzero = None if sampled.all() else sampled.nonzero()[0]
        sizes = np.maximum(np.abs(self._picked(sampled)), NEGLIGIBLE * self._rms)
        self._ulps = 1.0 / np.maximum(2 * unit * sizes, spacing)

    def read(self, candidate: Tensor) -> Reading:
        """Reads all views of a candidate of the truth's shape and device, of any floating-point dtype.

        Temporaries take up to 9 MiB for rows of 1,024 elements (``benchmarks/verdict_speed.py``, up to 2**26 elements)
        and up to 35 MiB for the widest rows, of `WIDEST` - 1 elements, unless non-finite elements are masked.
        """
        wide = candidate.detach()
        if self.small and wide.dtype not in _SUBTRACTED:
            wide = wide.to(torch.float64)
        matrix: Any = (wide.numpy() if self.small else wide).reshape(self.rows, self.columns)
        with np.errstate(all="ignore"):  # NaN and infinities are expected here
            reading = self._read(matrix, self._truth)
        if math.isfinite(reading.relative) or (self.finite and bool(torch.isfinite(wide).all())):
            return reading
        # Masked only where needed: one error that is not finite spoils every sum that it enters.
        double = wide.to(torch.float64).reshape(self.rows, self.columns)
        finite = torch.isfinite(double)
        if not self.finite:
            finite &= torch.isfinite(torch.as_tensor(self._truth))
        masked = torch.where(finite, double, torch.as_tensor(self._kept))
        with np.errstate(all="ignore"):
            again = self._read(masked.numpy() if self.small else masked, self._kept)
        return Reading(again.values, again.places, again.relative, finite=False, errors=again.errors)

    def _read(self, candidate: Any, truth: Any) -> Reading:
        sums = _Sums()
        along, largest = 0.0, 0.0
        samples = []
        for pick, part, oracle, kept in self._pieces(candidate, truth, self._kept):
            error = _difference(part, oracle)
            largest = max(largest, float(sums.add(error)))
            along += float(error.reshape(-1).dot(kept.reshape(-1)))
            samples.append(_at(error, pick))
        sampled, columns = _joined(samples), _numpy(sums.columns)
        row, worst_row = _worst(sums.rows, self._row_weights)
        column, worst_column = _worst(columns, self._column_weights)
        block, worst_block = _worst(sums.tiles, self._tile_weights)
        element, shared = ratio(math.sqrt(largest), self._rms), ratio(along, self._size)
        return Reading(
            (row, column, block, element, shared, *self._ulp_views(sampled)),
            (worst_row, worst_column, worst_block),
            ratio(math.sqrt(sums.total), math.sqrt(self._size)),
            finite=self.finite,
            errors=Errors.of(sums.rows, columns, sampled),
        )

    def _ulp_views(self, sampled: Any) -> tuple[float, float]:
        ulps = self._picked(sampled) * self._ulps
        count = ulps.size
        if count == 0:
            return 0.0, 0.0
        middle = count // 2
        high = max(middle, min(int(TAIL * count), count - 1 - OUTLIERS))
        sizes = abs(ulps)
        sizes.partition(high)
        ulps.partition(middle)
        return float(sizes[high]), float(ulps[middle])

    def where(self, view: str, reading: Reading) -> str:
        """Index of the worst place of a view; empty for a view without a place."""
        row, column, block = reading.places
        if view == "row" and self.rows > 1:
            index = np.unravel_index(row, self.shape[:-1] if self.leading else (self.rows,))
            return f"[{', '.join(map(str, index))}, :]"
        if view == "column":
            return f"[..., {column}]"
        if view == "block":
            across = -(-self.columns // TILE)
            i, j = divmod(block, across)
            return f"rows {TILE * i}.., columns {TILE * j}.."
        return ""

    def _picked(self, sampled: Any) -> Any:
        return sampled if self._nonzero is None else sampled[self._nonzero]

    def _sampled(self) -> list[Any]:
        """Positions that the ULP views read of each chunk; None for all of them."""
        count = self.rows * self.columns
        if count < 2 * SAMPLE:
            return [None] * len(self._chunks)
        drawn = _drawn(count)
        if self.small:
            return [drawn]
        ends = np.searchsorted(drawn, [stop * self.columns for _, stop in self._chunks])
        parts = np.split(drawn, ends[:-1])
        return [
            torch.from_numpy(part - start * self.columns).to(self.device)
            for part, (start, _) in zip(parts, self._chunks, strict=True)
        ]

    def _pieces(self, *matrices: Any) -> Iterable[tuple[Any, ...]]:
        """Yields chunk by chunk the ULP views' positions, and that chunk of each matrix."""
        if len(self._chunks) == 1:
            return ((self._picks[0], *matrices),)
        return (
            (pick, *(matrix[start:stop] for matrix in matrices))
            for pick, (start, stop) in zip(self._picks, self._chunks, strict=True)
        )

    def _cut(self) -> list[tuple[int, int]]:
        height = self.rows if self.small else max(TILE, CHUNK // max(1, self.columns) // TILE * TILE)
        return [(start, min(self.rows, start + height)) for start in range(0, self.rows, height)]


class _Sums:
    """Sums of squares over rows, columns and tiles, gathered chunk by chunk."""

    def __init__(self) -> None:
        self._rows: list[Any] = []
        self._tiles: list[Any] = []
        self.columns: Any = None

    def add(self, chunk: Any) -> Any:
        """Adds a chunk's squares and returns the largest."""
        squares = chunk * chunk
        product = _product(squares)
        height, width = squares.shape
        if width % TILE:
            wide = _zeros(squares, height, -(-width // TILE) * TILE)
            wide[:, :width] = squares
        else:
            wide = squares
        across = wide.shape[1] // TILE
        parts = product(wide.reshape(-1, TILE), _ones(squares, TILE)).reshape(height, across)
        rows = product(parts, _ones(squares, across)) if across > 1 else parts.reshape(height)
        self._rows.append(rows)
        self._tiles.append(_tiles(parts, height, across))
        columns = product(_ones(squares, height), squares) if height > 1 else squares.reshape(width)
        self.columns = columns if self.columns is None else self.columns + columns
        return _largest(squares)

    @functools.cached_property
    def rows(self) -> Any:
        """Sums by row."""
        return _joined(self._rows)

    @property
    def tiles(self) -> Any:
        """Sums by tile, row-major."""
        return _joined(self._tiles)

    @property
    def total(self) -> float:
        """Sum of all squares."""
        return float(self.columns.sum())


def ratio(error: float, size: float) -> float:
    """Error / size; 0 without an error, infinite for an error of a size of 0."""
    if error == 0.0:
        return 0.0
    return error / size if size > 0.0 else math.copysign(math.inf, error)


def floor(view: str, unit: float) -> float:
    """Least budget of a view in one draw, for roundings common to all elements of a correct result.

    gain: one rounded constant (a scale, a learning rate) moves every element by up to u, as may operand and result.
    tail: correct rounding of the result alone errs by up to half a unit.
    Others: none; eager and the rounding samples show all.
    """
    return {"gain": 2 * unit, "tail": 0.5}.get(view, 0.0)


def budget(view: str, peers: Iterable[float], unit: float) -> float:
    """Allowed error of a view: `SLACK` times the largest of correct peers, and at least `floor`."""
    return max(SLACK * max(map(abs, peers)), floor(view, unit))


def common_floor(view: str, unit: float) -> float:
    """Least budget of a signed view over all draws together, for what leans one way in a correct implementation.

    Elementary functions in the accumulator's precision may err by `INEXACT_ULPS` in one direction always. In half
    precision that is nothing; in FP32 no one-sided rounding of FP32 can be told from it.
    """
    leaning = 2 * INEXACT_ULPS * UNIT_ROUNDOFF[ACCUMULATOR]
    return leaning if view == "gain" else leaning / (2 * unit)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    count = math.prod(shape)
    columns = shape[-1] if shape else 1
    if columns <= WIDEST and count // max(1, columns) <= MOST_ROWS:
        return count // max(1, columns), columns
    columns = next(width for width in range(WIDEST, 0, -1) if count % width == 0)
    return count // columns, columns


def _weights(squares: Any) -> Any:
    """Factors of summed squared errors; infinite where the oracle is 0."""
    size = squares + squares.mean()
    with np.errstate(divide="ignore"):
        return 1.0 / size


def _worst(squares: Any, weights: Any) -> tuple[float, int]:
    ratios = squares * weights
    index = int(ratios.argmax())
    if math.isnan(ratios.item(index)):  # 0 times infinity, or an error that is NaN
        ratios = np.where(squares == 0, 0.0, ratios)
        index = int(ratios.argmax())
    return math.sqrt(ratios.item(index)), index


def _tiles(parts: Any, height: int, across: int) -> Any:
    if height % TILE:
        whole = _zeros(parts, -(-height // TILE) * TILE, across)
        whole[:height] = parts
        parts = whole
    return parts.reshape(-1, TILE, across).sum(1).reshape(-1)


@functools.lru_cache(maxsize=64)
def _drawn(count: int) -> Any:
    """Positions that the ULP views read of `count` elements, ascending, int64: one at random in each of `SAMPLE` parts.

    A constant distance would fall into a few columns where it shares a divisor with the width, and into a few rows
    where it is close to a multiple of the width.
    """
    within = torch.rand(SAMPLE, generator=torch.Generator().manual_seed(count)).numpy()
    positions = ((np.arange(SAMPLE) + within) * (count / SAMPLE)).astype(np.int64)
    positions.flags.writeable = False
    return positions


def _at(chunk: Any, pick: Any) -> Any:
    """Copies elements of a chunk at flat positions: shared memory would keep every chunk alive."""
    flat = chunk.reshape(-1)
    if pick is None:
        return flat.clone() if isinstance(flat, torch.Tensor) else flat
    return flat.take(pick)


def _zeros(like: Any, *shape: int) -> Any:
    if isinstance(like, torch.Tensor):
        return like.new_zeros(shape)
    return np.zeros(shape)


@functools.lru_cache(maxsize=256)
def _numpy_ones(count: int) -> Any:
    ones = np.ones(count)
    ones.flags.writeable = False
    return ones


def _ones(like: Any, count: int) -> Any:
    return like.new_ones(count) if isinstance(like, torch.Tensor) else _numpy_ones(count)


def _product(like: Any) -> Callable[[Any, Any], Any]:
    # NumPy's operator @ takes twice as long as `dot` for matrices this small.
    return torch.matmul if isinstance(like, torch.Tensor) else np.dot


_SUBTRACTED = frozenset({torch.float64, torch.float32})
"""Dtypes that NumPy subtracts from FP64 at full speed: it converts float16 in software, and lacks bfloat16."""


def _difference(candidate: Any, truth: Any) -> Any:
    if isinstance(candidate, torch.Tensor) and candidate.dtype != torch.float64:
        # Twice as fast as a subtraction of mixed dtypes.
        return candidate.to(torch.float64).sub_(truth)
    return candidate - truth


def _largest(squares: Any) -> Any:
    # `amax` takes a third of the time of torch's `max`, `argmax` of NumPy's.
    return squares.amax() if isinstance(squares, torch.Tensor) else squares.reshape(-1)[squares.argmax()]


def _joined(parts: list[Any]) -> Any:
    return _numpy(parts[0] if len(parts) == 1 else torch.cat(parts))


def _numpy(array: Any) -> Any:
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array
