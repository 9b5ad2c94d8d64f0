"""Workloads of many functions in one graph, each of whose results stands alone: a failure names the function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import disable_current_modes, pytree
from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.problem import RUNTIMES, TRANSLATORS, Problem, Workload

Function = Callable[..., Any]

TABLES = Path(__file__).with_name("function_tables.txt")
PER_BINADE = 16
"""Numbers drawn in each binade: a row of the input, so that the view of rows judges each binade alone."""
FORWARD = frozenset({Mode.FORWARD})
KERNELS = frozenset({"eager", "compile-static"})
"""Techniques with kernels of their own that have every operator."""
ROUNDINGS = 2.0**-8
"""Largest difference that counts as rounding errors, as part of a result's largest number."""
KNOWN = frozenset({"domain", "known"})
BOTH = frozenset({Mode.FORWARD, Mode.BACKWARD})


class Functions(nn.Module):
    """Evaluates functions of its inputs, as ``{label: result}``; a part has the places of its arguments among these."""

    def __init__(self, parts: tuple[tuple[str, Function, tuple[int, ...]], ...]) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, *inputs: Tensor) -> dict[str, Any]:
        return {label: function(*(inputs[place] for place in places)) for label, function, places in self.parts}

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the parts."""
        return tuple(label for label, *_ in self.parts)

    def without(self, labels: frozenset[str]) -> Functions:
        """Module without the parts of these labels."""
        return Functions(tuple(part for part in self.parts if part[0] not in labels))

    def readers(self, place: int) -> frozenset[str]:
        """Labels of the parts that read the input at a place."""
        return frozenset(label for label, _, places in self.parts if place in places)


class KnownFunction:
    """Function whose results are known otherwise: in FP64, which the oracle computes in, the truth stands for them.

    The function's own rounding errors are added there, since they decide the budget. For workloads with the trait
    ``known``. Of the same tensors, one of them floating-point, `truth` gives results in FP64, or the integers.
    """

    def __init__(self, function: Function, truth: Function) -> None:
        self.function = function
        self.truth = truth
        self._kept: tuple[list[bytes], Any, Any] | None = None  # the last inputs, with the truth and the results

    def __call__(self, *inputs: Tensor) -> Any:
        result = self.function(*inputs)
        if not any(value.dtype == torch.float64 for value in inputs):
            return result
        with disable_current_modes():
            key = [value.contiguous().numpy().tobytes() for value in inputs]
            if self._kept is None or self._kept[0] != key:
                self._kept = key, self.truth(*inputs), self.function(*inputs)
            return pytree.tree_map(_erring, *self._kept[1:], result)


def _erring(truth: Any, exact: Any, erring: Any) -> Any:
    """Truth with the difference of two results, one of them with rounding errors, where that is one of roundings."""
    truth = torch.as_tensor(truth)
    if not truth.is_floating_point() or truth.shape != exact.shape:
        return truth
    errors = erring.double() - exact.double()
    largest = truth.double().nan_to_num(0.0, 0.0, 0.0).abs().amax() if truth.numel() else 0.0
    return truth.double() + torch.where(truth.isfinite() & (errors.abs() <= ROUNDINGS * largest), errors, 0.0)


class Collected:
    """Collects parts and inputs of `Functions`, and draws inputs that are given by shape."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.parts: list[tuple[str, Function, tuple[int, ...]]] = []
        self.inputs: list[Tensor] = []

    def add(self, label: str, function: Function, *tensors: Tensor | tuple[int, ...], **options: Any) -> None:
        places = []
        for entry in tensors:
            tensor = entry if isinstance(entry, Tensor) else normal(self.generator, *entry)
            place = next((place for place, known in enumerate(self.inputs) if known is tensor), len(self.inputs))
            if place == len(self.inputs):
                self.inputs.append(tensor)
            places.append(place)
        self.parts.append((label, partial(function, **options) if options else function, tuple(places)))


def made(
    build: Callable[..., frozenset[int] | None], generator: torch.Generator, extent: int, **options: Any
) -> Problem:
    """Problem of everything that a function adds to `Collected`."""
    parts = Collected(generator)
    written = build(parts, **options) or frozenset()
    return Problem(Functions(tuple(parts.parts)), tuple(parts.inputs), writes=written)


def binades(generator: torch.Generator, lowest: int, highest: int, *, negative: bool = True) -> Tensor:
    """Draws numbers of every binade from 2^lowest to below 2^(highest + 1): ``(binades, PER_BINADE)``."""
    exponents = torch.arange(lowest, highest + 1)
    values = torch.ldexp(1.0 + torch.rand((len(exponents), PER_BINADE), generator=generator), exponents[:, None])
    values[:, 0] = torch.ldexp(torch.ones(len(exponents)), exponents)  # powers of 2 themselves
    return values * (1.0 - 2.0 * integers(generator, 0, 2, *values.shape)) if negative else values


def near(generator: torch.Generator, point: float, nearest: int, *, sides: tuple[int, ...] = (-1, 1)) -> Tensor:
    """Draws numbers at distances of 2^-1 to 2^-nearest from a point, a row for each."""
    distances = binades(generator, -nearest, -2, negative=False)
    return torch.cat([point + side * distances for side in sides])


def family(
    name: str,
    summary: str,
    build: Callable[..., frozenset[int] | None],
    modes: frozenset[Mode] = FORWARD,
    dtypes: tuple[str, ...] = ("float32",),
    techniques: frozenset[str] = frozenset(TRANSLATORS),
    compiled: int = TRANSLATORS["compile-static"],
    backward: int = TRANSLATORS["compile-static"],
    traits: frozenset[str] = frozenset({"domain"}),
    level: int = TRANSLATORS["eager"],
) -> Workload:
    """Workload of everything `build` adds; compile-static has it at level `compiled`, its gradients at `backward`.

    Runtimes run values and options at the levels of `RUNTIMES`, but not sizes, which take them minutes.
    """
    runtimes = RUNTIMES if name.startswith(("options-", "values-")) else {}
    levels = {"eager": level, "compile-static": compiled, "compile-static/backward": backward}
    return Workload(
        name,
        summary,
        partial(made, build),
        level=level,
        modes=modes,
        dtypes=frozenset(dtypes),
        traits=traits,
        techniques=techniques,
        levels={**TRANSLATORS, **runtimes, **levels},
        divisible=True,
        given=True,
    )


def sign_of(x: Tensor) -> Tensor:
    """Signs as 1 and -1, different for 0 and -0, which compare equal."""
    return torch.copysign(torch.ones_like(x), x)


def table(section: str) -> Iterator[tuple[str, Function, str]]:
    """Yields the lines of a section of `TABLES`: the text before a colon, its function, and the text behind."""
    _, _, rest = TABLES.read_text(encoding="utf-8").partition(f"[{section}]\n")
    for line in rest.partition("\n\n")[0].splitlines():
        text, _, more = line.partition(": ")
        name, *options = text.split()
        function = next(
            getattr(space, name) for space in (functional, torch.linalg, torch.special, torch) if hasattr(space, name)
        )
        given = [int(option) for option in options if "=" not in option]
        chosen = {key: _value(word) for key, _, word in (option.partition("=") for option in options) if word}
        yield text, partial(function, *given, **chosen) if options else function, more


def _value(word: str) -> float | str:
    try:
        return int(word) if word.lstrip("-").isdigit() else float(word)
    except ValueError:
        return word
