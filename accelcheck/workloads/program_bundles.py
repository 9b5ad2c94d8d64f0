"""Bundles of small random programs, each a line of Python that the number of its bundle draws from a family's grammar.

A program is its own label: statements, and the expression of its result; one-letter names that it does not assign are
inputs. So a fault names the program, which runs as it stands once its inputs are given. Each family of
``program_texts.toml`` varies one property that compilers and runtimes treat apart, such as writes to inputs, operands
of different dtypes, or the layout of operands. Results are exact, or round once where half precision is computed with.
"""

import functools
import itertools
import linecache
import math
import random
import re
import sys
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode, stable_seed
from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.function_parts import Functions
from accelcheck.workloads.problem import Problem, Workload

Part = tuple[str, Callable[..., Any], tuple[int, ...]]

ATTEMPTS = 40
"""Most draws of a program, some of which torch refuses, such as the difference of bool tensors."""
LEVELS: Mapping[str, int] = {
    "eager": 3,
    "compile-static": 3,
    **dict.fromkeys("compile-aot-eager compile-dynamic export jit-trace aot-inductor compile-openxla".split(), 4),
}
"""Levels of bundles by technique, where a family has no others."""


@dataclass(frozen=True)
class Family:
    """Family of programs.

    Attributes:
        template: Text of a program, with places for entries of tables.
        pool: Name of the function of `POOLS` that makes the inputs.
        programs: Most programs in a bundle; equal ones count once.
        own: Names of the inputs that each program has for itself, so that its writes or gradients show alone.
        backward: True for programs with gradients, which write to no input.
        levels: Levels of techniques beside `LEVELS`.
        only: Techniques that run it; all if empty.
        early: Techniques that run the first bundle at level 2.
    """

    summary: str
    template: str
    pool: str
    bundles: int = 1
    programs: int = 60
    own: str = ""
    backward: bool = False
    levels: Mapping[str, int] = field(default_factory=dict)
    only: Sequence[str] = ()
    traits: Sequence[str] = ()
    early: Sequence[str] = ()


_DOCUMENT: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("program_texts.toml").read_text(encoding="utf-8"))
FAMILIES: Mapping[str, Family] = {word: Family(**fields) for word, fields in _DOCUMENT["family"].items()}
TABLES: Mapping[str, Sequence[str]] = {name: text.split("\n")[:-1] for name, text in _DOCUMENT["table"].items()}
_PLACE = re.compile(r"<([a-z_]+)(\*?)\d*>")


def drawn(template: str, choice: random.Random, turn: int) -> str:
    """Text of a template with entries of tables in its places; `turn` decides those that are taken in turn."""
    chosen: dict[str, str] = {}

    def entry(place: re.Match[str]) -> str:
        nonlocal turn
        if place[0] not in chosen:
            entries = TABLES[place[1]]
            if place[2]:
                turn, number = divmod(turn, len(entries))
                text = entries[number]
            else:
                text = choice.choice(entries)
            chosen[place[0]] = _PLACE.sub(entry, text)
        return chosen[place[0]]

    return _PLACE.sub(entry, template)


@functools.cache
def texts(word: str, number: int) -> tuple[str, ...]:
    """Programs of a bundle: the same for a number everywhere, each other than the rest, and legal."""
    family = FAMILIES[word]
    inputs = POOLS[family.pool](torch.Generator().manual_seed(number), 0)
    legal = dict[str, None]()
    for turn in range((number - 1) * family.programs, number * family.programs):
        choice = random.Random(stable_seed(f"{word}-{turn}"))  # noqa: S311 - no secret
        proposals = (drawn(family.template, choice, turn) for _ in range(ATTEMPTS))
        legal |= dict.fromkeys(itertools.islice((text for text in proposals if _legal(text, inputs)), 1))
    return tuple(legal)


def _legal(text: str, inputs: Mapping[str, Tensor]) -> bool:
    function, names = function_of(text)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            function(*(inputs[name].clone() for name in names))
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
        return False
    return True


@functools.cache
def function_of(text: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Function of a program's text, and the names of its inputs in the order of its arguments."""
    *statements, result = text.split("; ")
    assigned = itertools.chain(*re.findall(r"(?:^|; )(\w+) = |lambda (\w+):", text))
    names = sorted({*re.findall(r"(?<![.\w'])[a-z]\d*(?![\w'])", text)} - {*assigned})
    lines = [f"def program({', '.join(names)}):", *(f"    {line}" for line in statements), f"    return {result}"]
    return _executed("\n".join(lines))["program"], tuple(names)


def _executed(source: str, **scope: Any) -> dict[str, Any]:
    """Names of a source after its execution as a module, which compilers import, with lines that TorchScript reads."""
    module = types.ModuleType(f"accelcheck_program_{stable_seed(source)}")
    sys.modules[module.__name__] = module
    linecache.cache[module.__name__] = len(source), None, source.splitlines(keepends=True), module.__name__
    vars(module).update(scope, torch=torch, F=functional, math=math, grid=grid, layer=layer)
    exec(compile(source, module.__name__, "exec"), vars(module))  # noqa: S102 - texts of this package alone
    return vars(module)


def grid(x: Tensor, scale: float, least: int, most: int) -> Tensor:
    """Rounds numbers to levels of eight bits, and scales them back."""
    import torch.ao.quantization.fx._decomposed  # registers the operators, which have no public name

    levels: Any = torch.ops.quantized_decomposed
    options = scale, 0, least, most, torch.uint8 if least == 0 else torch.int8
    scaled: Tensor = levels.dequantize_per_tensor(levels.quantize_per_tensor(x.float(), *options), *options)
    return scaled.to(x.dtype)


@functools.cache
def _layers() -> Mapping[str, nn.Module]:
    """Layers with a fast path in evaluation mode."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return {"encoder": encoder.eval(), "attention": nn.MultiheadAttention(8, 2, batch_first=True).eval()}


def layer(name: str, weights: Tensor, *inputs: Tensor, **options: Tensor) -> Tensor:
    """Calls a layer of `_layers` with parameters cut from a vector."""
    module = _layers()[name]
    sizes = {name: parameter.shape for name, parameter in module.named_parameters()}
    ends = list(itertools.accumulate(math.prod(shape) for shape in sizes.values()))
    parts = weights[: ends[-1]].tensor_split(ends[:-1])
    given = {name: part.view(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)}
    out = torch.func.functional_call(module, given, inputs, options)
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


class _Scripted(Functions):
    """Programs whose source ``torch.jit.script`` compiles, called by a `forward` that names them one by one."""

    __jit_unused_properties__ = ("labels",)

    def without(self, labels: frozenset[str]) -> Functions:
        return scripted([part for part in self.parts if part[0] not in labels])


def scripted(parts: Sequence[Part]) -> Functions:
    """Module of programs of `x` and `j`, which TorchScript can compile."""
    calls = ", ".join(
        f"{part[0]!r}: p{at}({', '.join('xj'[place] for place in part[2])})" for at, part in enumerate(parts)
    )
    functions = {f"p{number}": function for number, (_, function, _) in enumerate(parts)}
    scope = _executed(f"def forward(self, x, j):\n    return {{{calls}}}", **functions)
    made: Functions = type("Scripted", (_Scripted,), {"forward": scope["forward"]})(tuple(parts))
    return made


def _whole(generator: torch.Generator, _: int) -> dict[str, Tensor]:
    made = {}
    for name, dtype in {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32}.items():
        info = torch.iinfo(dtype)
        made[name] = integers(generator, info.min, info.max + 1, 5, 18).to(dtype)
        made[name][0, :4] = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    return made


def _operands(generator: torch.Generator, _: int) -> dict[str, Tensor]:
    f, g = (integers(generator, -64, 65, 3, 16) / 8.0 for _ in range(2))
    # Numbers that bfloat16 and float16 round 1.7 and 0.1 to: quotients are whole, or just below, and sums cancel.
    f[1:] = torch.tensor([1.703125, -3.40625, 0.10009765625, -0.10009765625]).repeat(2, 4)
    g[1:] = torch.tensor([1.7001953125, -3.400390625, 0.0999755859375, -0.0999755859375]).repeat(2, 4)
    whole = integers(generator, 1, 8, 3, 16)
    signed = whole * (1 - 2 * integers(generator, 0, 2, 3, 16))
    dtypes = {"i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
    made = {name: signed.roll(place, 1).to(dtype) for place, (name, dtype) in enumerate(dtypes.items())}
    zero_dimensional = {"s": torch.tensor(-0.1), "z": torch.tensor(-0.375), "i": torch.tensor(3)}
    return {"f": f, "g": g, "t": whole > 3, "u8": whole.to(torch.uint8), **made, **zero_dimensional}


def _pictures(generator: torch.Generator, _: int) -> dict[str, Tensor]:
    points = torch.rand((2, 5, 6, 2), generator=generator) * 1.6 - 0.8
    made = {"x": normal(generator, 2, 3, 6, 8), "k": normal(generator, 3, 3, 3, 3) / 5, "g": points}
    return {**made, "m": normal(generator, 2, 3, 20, 20) > 0, "p": torch.rand((1, 3, 2, 1), generator=generator)}


def _matrices(generator: torch.Generator, _: int) -> dict[str, Tensor]:
    made = {name: normal(generator, 1, 2, 4, 8) for name in "qkv"}
    mask = integers(generator, 0, 2, 1, 2, 4, 4) == 1
    mask[..., 1, :], mask[..., 3, :], mask[..., 2, :], mask[..., 2, 0] = False, True, False, True
    blanks = normal(generator, 3, 4, 10)
    blanks[0, 1, 1:3], blanks[1, 2, 4], blanks[2, 0, 5] = torch.nan, torch.inf, -torch.inf
    made |= {"x": normal(generator, 4, 4), "w": normal(generator, 4), "b": normal(generator, 4), "m": mask, "n": blanks}
    # Weights at the ends of eight bits, and inputs near the upper one: sums of 16 bits overflow.
    made["u"] = 1.0 - 2.0 * (torch.rand((4, 8, 3, 3), generator=generator) < 0.2)
    made["i"] = 0.8 + 0.2 * torch.rand((1, 8, 6, 6), generator=generator)
    return {**made, "p": 0.3 * normal(generator, 700)}


def _squares(generator: torch.Generator, _: int) -> dict[str, Tensor]:
    x, y = (integers(generator, -9, 10, 6, 6).to(torch.int32) for _ in range(2))
    return {"x": x, "y": y, "k": torch.tensor([4, 0, 2])}


def _signed(generator: torch.Generator, _: int) -> dict[str, Tensor]:
    return {"x": integers(generator, -15, 16, 5, 4) / 2.0 + 0.25, "j": integers(generator, -9, 10, 5, 4)}


def _corners(generator: torch.Generator, _: int) -> dict[str, Tensor]:
    corners = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 0.5, -2.5])
    pairs = torch.cartesian_prod(corners, corners)
    # Zeros of both signs also stand in the rest behind whole vectors of each width.
    a, b = torch.cat([pairs, pairs[:15], torch.tensor([[0.0, -0.0], [-0.0, 0.0], [0.0, -0.0]])]).t()
    return {"a": a.contiguous(), "b": b.contiguous()}


POOLS: Mapping[str, Callable[[torch.Generator, int], dict[str, Tensor]]] = {
    "squares": _squares,
    "whole": _whole,
    "operands": _operands,
    "plain": lambda generator, _: {"x": integers(generator, -5, 6, 3, 4) / 2.0},
    "image": lambda generator, _: {"x": normal(generator, 2, 4, 3, 3)},
    "pictures": _pictures,
    "matrices": _matrices,
    "signed": _signed,
    "rows": lambda generator, extent: {"x": normal(generator, 13 + extent, 4)},
    "corners": _corners,
    "square": lambda generator, _: {"x": torch.rand((2, 2), generator=generator) + torch.tensor([[0.5, 1], [1, 1.5]])},
}
"""Inputs of the families by name, from a generator and an extent."""


def make(generator: torch.Generator, extent: int, *, word: str, number: int) -> Problem:
    """Makes a bundle's problem, with values from the generator, and programs from its number alone."""
    family = FAMILIES[word]
    pool = POOLS[family.pool](generator, extent)
    parts: list[Part] = []
    inputs = list(pool.values())
    for text in texts(word, number):
        function, names = function_of(text)
        places = {name: place for place, name in enumerate(pool)}
        for name in filter(family.own.__contains__, names):
            places[name] = len(inputs)
            inputs.append(pool[name].clone())
        parts.append((text, function, tuple(places[name] for name in names)))
    module = scripted(parts) if "scriptable" in family.traits else Functions(tuple(parts))
    written = range(len(pool), len(pool) if family.backward else len(inputs))
    return Problem(module, tuple(inputs), writes=frozenset(written))


def bundle(word: str, number: int) -> Workload:
    """Workload of a family's bundle."""
    family = FAMILIES[word]
    levels = {**LEVELS, **family.levels, **dict.fromkeys(family.early if number == 1 else (), 2)}
    if family.only:
        levels = {name: levels[name] for name in family.only}
    return Workload(
        f"{word}-{number}",
        f"Random programs, bundle {number}: {family.summary}",
        partial(make, word=word, number=number),
        level=min(levels.values()),
        modes=frozenset({Mode.FORWARD, Mode.BACKWARD} if family.backward else {Mode.FORWARD}),
        dtypes=frozenset({"float32"}),
        traits=frozenset({"domain", *family.traits}),
        techniques=frozenset(levels),
        levels=levels,
        divisible=True,
        given=True,
    )


WORKLOADS = tuple(bundle(word, number + 1) for word, family in FAMILIES.items() for number in range(family.bundles))
