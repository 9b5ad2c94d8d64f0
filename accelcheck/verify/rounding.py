"""Samples of a correct implementation's results in a precision: the FP64 oracle with random rounding errors.

Monte Carlo arithmetic (D. S. Parker, UCLA CSD-970002, 1997): every operator's result is multiplied by 1 + e with e
drawn uniformly from the rounding error that the precision allows. Any correct implementation may show the spread of the
final results, which includes the conditioning of this workload with these inputs, forward and backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelcheck.devices.layouts import entries, sparse
from accelcheck.devices.torch_names import TorchDispatchMode, decomposition_table
from accelcheck.verify import noise, operators, sequential, terms
from accelcheck.verify.noise import Sums
from accelcheck.verify.operators import CORRECTLY_ROUNDED, SCATTERS
from accelcheck.verify.precision import ACCUMULATOR, INEXACT_ULPS, SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.resampling import RESAMPLED, defined, resampled
from accelcheck.verify.unrounded import Unrounded
from accelcheck.workloads.base import is_inexact
from accelcheck.workloads.draw import factor_of, fractions, of_mantissas

SMALL = 2**15
"""Most elements for which NumPy is faster than torch: calls take the time."""
_COMPOSED_OF_COMPLEX = frozenset({"div", "div_", "reciprocal", "reciprocal_", "sqrt", "sqrt_", "ldexp", "addcdiv_"})
"""Operators that round once, unlike their complex form."""


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Makes FP64 operators return results that an implementation in `precision` might return.

    Args:
        precision: Precision of results, a key of `UNIT_ROUNDOFF`.
        storage: Precision of stored tensors, a key of `UNIT_ROUNDOFF`. Where it is finer than `precision` (autocast,
            TF32), the operands of contractions are rounded too, and of results only those that come from them or from
            operators that autocast may run in the lower precision.
        generator: CPU generator, the source of randomness.
        constants: CPU generator of the errors of constants, which a correct implementation has in all draws alike.
    """

    def __init__(
        self, precision: str, storage: str, generator: torch.Generator, constants: torch.Generator | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.precision = precision
        self.storage = storage
        self.generator = generator
        self.constants = constants or generator
        self.unrounded = Unrounded()
        self.unclassified: set[str] = set()
        """Names of operators that rounded without being classified."""

    @contextlib.contextmanager
    def at(self, precision: str) -> Iterator[None]:
        """Sets another precision for a while: under autocast too, an optimizer steps in the storage dtype."""
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.precision = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self.unrounded.called(func, args, kwargs or {}, self._rounding)

    def _rounding(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator, whose results then err."""
        if not operators.may_round(func, args, kwargs):
            return func(*args, **kwargs)
        name, _, written, plainly = operators.facts(func)
        if plainly is not None:
            names = (argument.name for argument in func._schema.arguments)  # noqa: SLF001 - no public schema
            with self:  # by name: polygamma_ has the tensor first, polygamma the order
                return args[0].copy_(plainly(**dict(zip(names, args, strict=False)), **kwargs))
        if name in operators.DECOMPOSED and written is None and func in decomposition_table:
            return self._decomposed(func, args, kwargs)
        args = self._operands(name, args)
        hits = terms.hits(func, name, args)
        squares = terms.squares(func, name, args, kwargs)
        plain = self.precision != "float64" and not operators.has_complex(args)
        errors = sequential.errors(name, args) if plain else {}
        most = operators.integers_in(args) if plain and name in operators.COUNTING else math.inf
        out = func(*args, **kwargs)
        if name in RESAMPLED and self.precision != "float64":
            out.copy_(resampled(name, args, UNIT_ROUNDOFF[ACCUMULATOR], self.constants))
        results = operators.results(func, out, args, kwargs)
        lengths = terms.lengths(name, args, results) if hits is None else (hits,)
        unit = self._unit(name, complex_too=operators.has_complex(args))
        if not _counted(most, unit, lengths, results):
            self._spoil_(name, args, results, lengths, unit, squares, errors)
        return out

    def _spoil_(
        self,
        name: str,
        args: tuple[Any, ...],
        results: Sequence[Tensor | None],
        lengths: Sequence[int | Tensor],
        unit: float,
        squares: Sequence[Tensor | None],
        errors: Mapping[int, Tensor],
    ) -> None:
        """Adds errors to an operator's results."""
        if not operators.classified(name) and any(tensor is not None for tensor in results):
            self.unclassified.add(name)
        for position, tensor in enumerate(results):
            if tensor is None:
                continue
            length = lengths[min(position, len(lengths) - 1)]
            self._perturb_(tensor, unit, length, squares[position] if position < len(squares) else None)
            if position in errors:
                tensor.add_(errors[position].reshape(tensor.shape))
            if position == 0 and name in operators.NORMALISED and tensor.numel():
                self._share_(tensor, args[1], logarithm="log" in name)
            if name in operators.TRANSFORMS and tensor.numel():
                self._image_(tensor, args[1])

    def _image_(self, spectrum: Tensor, dims: Sequence[int]) -> None:
        """Adds a spectrum to itself, in its place and in another one, each up to `INEXACT_ULPS` u as large.

        Rounded twiddle factors err periodically, and the same for each row. Such a factor of the input moves the
        spectrum: each peak has images, of 1 to 4 u of it where MKL transforms constants and waves, which are no larger
        than other errors where the spectrum has no peaks. The mean of the factors is a gain, of up to 1.7 u there.
        """
        unit = INEXACT_ULPS * UNIT_ROUNDOFF["float32" if self.precision == "tf32" else self.precision]
        places = [int(torch.randint(spectrum.shape[dim], (), generator=self.generator)) for dim in dims]
        gain, size = (unit * torch.rand(2, generator=self.generator, dtype=torch.float64).mul(2).sub(1)).tolist()
        image = spectrum.roll(places, list(dims)).mul_(size).add_(spectrum, alpha=gain)
        spectrum.add_(torch.where(torch.isfinite(image), image, 0.0))

    def _share_(self, shares: Tensor, dim: int, *, logarithm: bool) -> None:
        """Perturbs quotients by a row's sum of positive terms: the row shares the sum's error, a logarithm adds it."""
        length = shares.shape[dim] if shares.dim() else 1
        if length < 2:
            return
        terms_of_sum = shares.exp() if logarithm else shares
        squares = torch.nan_to_num(terms_of_sum).square().sum(dim, keepdim=True)
        sums = Sums(self._accumulated() ** 2 / 12, length, squares)
        chance = torch.rand((2, *squares.shape), generator=self.generator, dtype=torch.float64).mul_(2.0).sub_(1.0)
        error = sums.deviation(torch.ones_like(squares)) * chance.sum(0)
        shares.add_(error if logarithm else shares * error)

    def _accumulated(self) -> float:
        """Unit roundoff of sums."""
        return UNIT_ROUNDOFF["float64" if self.precision == "float64" else ACCUMULATOR]

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = UNIT_ROUNDOFF["float32" if self.precision == "tf32" else self.precision]
        with self.at("float64" if self.precision == "float64" else ACCUMULATOR), self:
            out = decomposition_table[func](*args, **kwargs)
        self._perturb_(out, unit, 1)
        return out

    def _operands(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with the errors of an operator's operands."""
        unit = UNIT_ROUNDOFF[self.precision]
        if name in operators.CONTRACTIONS and unit > UNIT_ROUNDOFF[self.storage]:
            return tuple(
                self._rounded(a, unit) if operators.is_float(a) and operators.integers_in([a]) * unit > 1 else a
                for a in args
            )
        if name in operators.COMPOSED and self.precision != "float64":
            # Their first intermediate errs in the accumulator's precision, and the rest magnifies it: the subtracted
            # mean by mean / deviation, the exponential in a tail by its argument.
            first = next((place for place, value in enumerate(args) if operators.is_float(value)), len(args))
            unit = INEXACT_ULPS * UNIT_ROUNDOFF[ACCUMULATOR]
            moved = (self._rounded(value, unit) for value in args[first : first + 1])
            return (*args[:first], *moved, *args[first + 1 :])
        return args if self.precision == "float64" or name in CORRECTLY_ROUNDED | SCATTERS else self._nearby(name, args)

    def _nearby(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments whose result in exact arithmetic is the operator's result."""
        if name in operators.FACTORISED:
            unit = UNIT_ROUNDOFF[self.precision]
            return tuple(self._moved(a, unit) if is_inexact(a) and a.numel() else a for a in args)
        if operators.has_complex(args):
            # A complex function is composed of real ones, such as a power of an exponential and a logarithm.
            return tuple(self._turned(a) if isinstance(a, Tensor) and a.is_complex() else a for a in args)
        if name.startswith("grid_sampler"):
            image, grid = (1, 2) if name.endswith("_backward") else (0, 1)
            unit = 2 * INEXACT_ULPS * UNIT_ROUNDOFF[ACCUMULATOR]  # a coordinate is moved by 1, scaled and reflected
            chance = (
                torch.rand(args[grid].shape, generator=self.generator, dtype=torch.float64).mul_(2 * unit).sub_(unit)
            )
            moved = args[grid] + (args[grid].abs() + 1) * chance
            weights = unit * (1 + (args[grid + 1] == 2))  # cubic ones are sums of terms that cancel
            return (*args[:image], self._rounded(args[image], weights), moved, *args[grid + 1 :])
        return args

    def _turned(self, value: Tensor) -> Tensor:
        """Copy of a complex tensor with parts that err by its modulus."""
        copy = value.resolve_conj().clone()
        self._perturb_complex_(copy, INEXACT_ULPS * UNIT_ROUNDOFF[ACCUMULATOR], 1)
        return copy

    def _moved(self, matrix: Tensor, unit: float) -> Tensor:
        """Matrix with elements moved by up to twice the root of N times u times the norm of their column."""
        size = matrix.abs().square().sum(-2 if matrix.dim() > 1 else -1, keepdim=True).sqrt()
        chance = torch.rand((*matrix.shape, 2), generator=self.generator, dtype=torch.float64).mul_(2.0).sub_(1.0)
        noise_of = torch.view_as_complex(chance) if matrix.is_complex() else chance[..., 0]
        return matrix + size * (2 * unit * math.sqrt(matrix.shape[-1])) * noise_of

    def _unit(self, name: str, *, complex_too: bool = False) -> float:
        """Rounding error of an operator's results; complex products and quotients take several roundings."""
        # Only products see TF32: everything else, accumulation and results included, is FP32.
        unit = UNIT_ROUNDOFF["float32" if self.precision == "tf32" else self.precision]
        once = name in CORRECTLY_ROUNDED | SCATTERS and not (complex_too and name in _COMPOSED_OF_COMPLEX)
        return unit if once else 2 * INEXACT_ULPS * unit

    def _perturb_(self, tensor: Tensor, unit: float, length: int | Tensor, squares: Tensor | None = None) -> None:
        if sparse(tensor):
            tensor, squares = entries(tensor), squares if squares is None else entries(squares)
        if tensor.numel() == 0:
            return
        if tensor.is_complex():
            self._perturb_complex_(tensor, unit, length)
            return
        if _by_numpy(tensor):
            self._perturb_array_(tensor, unit, length, squares)
            return
        # Near 0 the spacing stays constant, and rounding never passes 0: a size below half of it becomes 0, or is kept
        # in a wider register. So 0 stays 0, and squares do not turn negative.
        half = SMALLEST_SUBNORMAL[self.precision] / 2
        sums = self._sums(tensor, length, squares) if isinstance(length, Tensor) or length > 1 else None
        factors = [factor_of(self.generator) for _ in range(1 if sums is None else 3)]
        if noise.perturb_(tensor, factors, unit, half, sums):
            return
        sizes, chance = tensor.abs(), _uniform(tensor, factors[0])
        flushed = torch.where(chance > 0, tensor.neg(), 0.0)
        change = torch.where(sizes < half, flushed, (sizes * unit).clamp_(min=half).mul_(chance))
        change = torch.where(sizes == 0, tensor, change)  # a zero keeps its sign
        if sums is not None:
            size = sums.deviation(tensor)
            for factor in factors[1:]:
                change += _uniform(tensor, factor) * size
        if not math.isfinite(float(change.sum())):
            change = torch.where(torch.isfinite(change), change, 0.0)  # of NaN and infinities
        tensor.add_(change)

    def _perturb_array_(self, tensor: Tensor, unit: float, length: int | Tensor, squares: Tensor | None) -> None:
        """Perturbs small tensors to the same bits as `_perturb_`: NumPy's calls cost a fifth of torch's."""
        array = tensor.detach().reshape(-1).numpy()
        half = SMALLEST_SUBNORMAL[self.precision] / 2
        with np.errstate(all="ignore"):  # NaN and infinities are legal
            sizes = np.abs(array)
            least, finite = sizes.min(), bool(sizes.max() < math.inf)  # a NaN is the largest
            mantissas = _mantissas(sizes, normal=finite and least >= noise.TINY)
            chance = self._uniform_of(mantissas, finite=finite)
            change = sizes * unit
            np.maximum(change, half, out=change)
            change *= chance
            if least < half or not finite:
                np.copyto(change, np.where(chance > 0, -array, 0.0), where=sizes < half)
                np.copyto(change, array, where=sizes == 0)  # a zero keeps its sign
            if isinstance(length, Tensor) or length > 1:
                size = self._sums(tensor, length, squares).deviation(tensor).reshape(-1).numpy()
                change += self._uniform_of(mantissas, finite=finite) * size
                change += self._uniform_of(mantissas, finite=finite) * size
            if not (finite and math.isfinite(change.sum())):
                change[~np.isfinite(change)] = 0.0
            array += change

    def _perturb_complex_(self, tensor: Tensor, unit: float, length: int | Tensor) -> None:
        """Perturbs both parts by the modulus: the parts of a product cancel."""
        tensor = tensor.detach()
        parts, sizes = _parts(tensor), tensor.abs().unsqueeze(-1)
        change = sizes * unit * _uniform(parts, factor_of(self.generator))
        if isinstance(length, Tensor) or length > 1:
            lengths = length.unsqueeze(-1) if isinstance(length, Tensor) else length
            size = self._sums(sizes, lengths, None).deviation(sizes)
            for _ in range(2):
                change = change + _uniform(parts, factor_of(self.generator)) * size
        parts.add_(torch.where(torch.isfinite(change), change, 0.0))

    def _sums(self, sums: Tensor, length: int | Tensor, squares: Tensor | None) -> Sums:
        scale = self._accumulated() ** 2 / 12  # the variance of either uniform number is 1 / 3
        if squares is not None:
            return Sums(scale, length, squares)
        squares = sums.square().mean()
        if not math.isfinite(float(squares)):
            squares = torch.where(torch.isfinite(sums), sums, 0.0).square().mean()
        return Sums(scale, length, squares, squares.sqrt())

    def _rounded(self, tensor: Tensor, unit: float) -> Tensor:
        if sparse(tensor):
            copy = tensor.clone()
            entries(copy).copy_(self._rounded(entries(tensor), unit))
            return copy
        factor = factor_of(self.generator)
        result = None if _by_numpy(tensor) else noise.rounded(tensor, factor, unit)
        return tensor * (1 + unit * _uniform(tensor, factor)) if result is None else result

    def _uniform_of(self, mantissas: Any, *, finite: bool) -> Any:
        """Uniform numbers of an array from the mantissas of its magnitudes, as `_uniform` gives them."""
        chance = of_mantissas(self.generator, mantissas, finite=finite)
        chance *= 2
        chance -= 1
        return chance


class Nearest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Rounds every FP64 operator's result to the nearest number of a dtype: correct rounding, step by step.

    Uniform errors do not show roundings on a grid: adding a constant may move all elements by the same part of a unit,
    and an update below half a unit is lost each time. An implementation that rounds correctly leans so.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = defined(func, args, kwargs)
        if operators.may_round(func, args, kwargs):
            for tensor in operators.results(func, out, args, kwargs):
                if tensor is not None:
                    own = entries(tensor)
                    parts = _parts(own) if own.is_complex() else own
                    parts.copy_(parts.to(self.dtype))
        return out


def _counted(most: float, unit: float, lengths: Sequence[int | Tensor], results: Sequence[Tensor | None]) -> bool:
    """True for integers whose sums are in range: a mask, a count or a position is exact in any order."""
    if most == math.inf or not any(tensor is not None and tensor.numel() for tensor in results):
        return False
    longest = max(float(torch.as_tensor(length).max()) for length in lengths)
    return 2 * most * longest * unit <= 1 and operators.integers_in(results) < math.inf


def _parts(tensor: Tensor) -> Tensor:
    """Real and imaginary parts of a complex tensor, in its own memory; of its conjugate if that is a mere mark."""
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def _uniform(tensor: Tensor, factor: float) -> Tensor:
    return fractions(tensor, factor).mul_(2).sub_(1)


def _mantissas(sizes: Any, *, normal: bool) -> Any:
    """Mantissas of ``np.frexp``, which takes longer than setting the exponents of normal numbers."""
    if normal:
        return ((sizes.view(np.int64) & noise.FRACTION) | noise.HALF).view(np.float64)
    return np.frexp(sizes)[0]


def _by_numpy(tensor: Tensor) -> bool:
    return tensor.numel() <= SMALL and tensor.dtype == torch.float64 and tensor.is_contiguous()
