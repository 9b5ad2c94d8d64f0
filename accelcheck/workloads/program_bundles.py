"""Bundles of small random programs, each a line of Python drawn from its family's tables by the bundle's number.

A program is its own label: statements, and the expression of its result. Names that it does not assign are inputs. So
a fault names the program, which runs as it stands once its inputs are given. Each family varies one property that
compilers and runtimes treat apart, such as writes to inputs, operands of different dtypes, or the layout of operands.
Results are exact, or rounded once, where a program computes in half precision.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import math
import random
import re
import tomllib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Mode, stable_seed
from accelcheck.workloads.draw import integers, normal
from accelcheck.workloads.families import Functions
from accelcheck.workloads.problem import Problem, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Inputs = Mapping[str, Tensor]

ATTEMPTS = 40
"""Most draws of a program, some of which torch refuses, such as the difference of bool tensors."""
BOTH = frozenset({Mode.FORWARD, Mode.BACKWARD})
LEVELS: Mapping[str, int] = {
    "eager": 3,
    "compile-static": 3,
    **dict.fromkeys("compile-aot-eager compile-dynamic export jit-trace aot-inductor compile-openxla".split(), 4),
}
"""Levels of a family's bundles by technique."""
RUNTIMES: Mapping[str, int] = {**LEVELS, "onnxruntime": 3, "openvino": 3}
"""Levels of families with patterns that runtimes fuse, and with operators that they compute in other dtypes."""


@dataclass(frozen=True)
class Family:
    """Family of programs.

    Attributes:
        summary: Sentence about its programs.
        inputs: Makes inputs by name, from a generator and an extent.
        text: Draws a program; gets the number of the program within all bundles too.
        bundles: Number of bundles.
        programs: Number of programs in a bundle.
        written: Names of the inputs that programs write to; each program then has inputs of its own.
        levels: Levels by technique.
        modes: Modes of its cases.
        traits: Further traits.
        early: Techniques that run the first bundle at level 2.
    """

    summary: str
    inputs: Callable[[torch.Generator, int], Inputs]
    text: Callable[[random.Random, int], str]
    bundles: int = 2
    programs: int = 60
    written: str = ""
    levels: Mapping[str, int] = field(default_factory=lambda: LEVELS)
    modes: frozenset[Mode] = frozenset({Mode.FORWARD})
    traits: frozenset[str] = frozenset()
    early: tuple[str, ...] = ()


@functools.cache
def table(name: str) -> tuple[str, ...]:
    """Entries of a table of ``program_texts.toml``, one a line."""
    document = tomllib.loads(Path(__file__).with_name("program_texts.toml").read_text(encoding="utf-8"))
    return tuple(document[name].strip().split("\n"))


def _turn(choice: random.Random, turn: int, *names: str) -> list[str]:
    """Draws an entry of each table; takes those of the first one in turn."""
    first, *others = map(table, names)
    return [first[turn % len(first)], *map(choice.choice, others)]


# Writes to inputs.


def _squares(generator: torch.Generator, extent: int) -> Inputs:
    x, y = (integers(generator, -9, 10, 6, 6).to(torch.int32) for _ in range(2))
    return {"x": x, "y": y, "k": torch.tensor([4, 0, 2])}


def _mutation(choice: random.Random, turn: int) -> str:
    """Reads and writes two inputs in turn, through views, some of which are read at last."""
    if turn % 4 == 3:
        into, base = _turn(choice, turn // 4, "into", "expanded")
        return f"b = {base}; {into.format('b')} * 2"
    read, write, *others = _turn(choice, turn, "reads", "mutations", "views", "views", "reads", "mutations", "views")
    early, late, again, more, last = others
    one, other = choice.choice((("x", "y"), ("y", "x")))
    second = choice.choice((one, other))
    lines = [
        f"a = {early.format(one)}",
        f"v = {late.format(choice.choice((one, other)))}",
        f"r = {read.format('a')}",
        write.format(one, other),
        f"s = {again.format(choice.choice(('a', last.format(second))))}",
        more.format(second, other if second == one else one),
    ]
    if choice.random() < 0.5:
        lines[4:] = []
        lines += ["s = r"]
    return "; ".join([*lines, "r, s, v * 2"])


# Integers that overflow.


def _whole(generator: torch.Generator, extent: int) -> Inputs:
    made = {}
    for name, dtype in {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16, "i32": torch.int32}.items():
        info = torch.iinfo(dtype)
        made[name] = integers(generator, info.min, info.max + 1, 5, 18).to(dtype)
        made[name][0, :4] = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
    return made


def _overflow(choice: random.Random, turn: int) -> str:
    (sink,) = _turn(choice, turn, "sinks")
    steps = [_turn(choice, choice.randrange(99), "steps")[0] for _ in range(choice.randint(1, 3))]
    return "; ".join([f"v = {choice.choice(('i8', 'u8', 'i16', 'i32'))}", *steps, sink])


# Operands of different dtypes. Each is exact in each dtype, and results are exact, or rounded once.


def _operands(generator: torch.Generator, extent: int) -> Inputs:
    numbers = integers(generator, -64, 65, 3, 16) / 8.0
    # Multiples of the numbers that 1.7 is rounded to: quotients by 1.7 are then whole, or just below.
    numbers[1] = torch.tensor([1.703125, -3.40625] * 8)
    numbers[2, :8] = torch.tensor([1.7001953125, -3.400390625] * 4)
    whole = integers(generator, 1, 8, 3, 16)
    signed = whole * (1 - 2 * integers(generator, 0, 2, 3, 16))
    dtypes = {"i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64}
    made = {name: signed.roll(place, 1).to(dtype) for place, (name, dtype) in enumerate(dtypes.items())}
    zero_dimensional = {"s": torch.tensor(-0.1), "i": torch.tensor(3)}
    return {"f": numbers, "t": whole > 3, "u8": whole.to(torch.uint8), **made, **zero_dimensional}


def _mixture(choice: random.Random, turn: int) -> str:
    operator, first, second, after = _turn(choice, turn, "mixable", "tensors", "operands", "afterwards")
    operands = (second, first) if choice.random() < 0.4 and "{}, {})" in operator else (first, second)
    return f"v = {operator.format(*operands)}; {after.format('v')}"


def _threshold(choice: random.Random, turn: int) -> str:
    """Compares numbers of half precision with numbers that it rounds."""
    (function,) = _turn(choice, turn // 2, "thresholds")
    return f"v = f.{('bfloat16', 'half')[turn % 2]}(); {function}"


def _multiples(generator: torch.Generator, extent: int) -> Inputs:
    return {"f": _operands(generator, extent)["f"][1:].reshape(-1) * torch.tensor([1.0, 0.5] * 16)}


# Constants that are made within the program, tensors without elements, and random ones.


def _plain(generator: torch.Generator, extent: int) -> Inputs:
    return {"x": integers(generator, -5, 6, 3, 4).float() / 2}


def _constant(choice: random.Random, turn: int) -> str:
    if turn % 6 == 5:
        (random_draw,) = _turn(choice, turn // 6, "random")
        of, by = (choice.choice(("x", "x.half()", "x.bfloat16()")) for _ in range(2))
        return f"v = {random_draw.format(of, by + '.abs()')}; torch.zeros_like(v)"
    use, maker, dtype, other, shape = _turn(choice, turn, "uses", "makers", "dtypes", "dtypes", "shapes")
    made = maker.format(s=f"({shape})", d=dtype, n=math.prod(map(int, shape.split(", "))))
    return f"c = {made}; {use.format(e=other)}"


# Layouts of operands.


def _image(generator: torch.Generator, extent: int) -> Inputs:
    return {"x": normal(generator, 2, 4, 3, 3)}


def _arrangement(choice: random.Random, turn: int) -> str:
    operator, first, second = _turn(choice, turn, "arranged", "layouts", "layouts")
    return f"v = {first}; w = {second}; {operator}" if "w" in re.findall(r"\w+", operator) else f"v = {first}; {operator}"


# Windows over images, one after the other, with gradients.

SCALES = (1.4, 1.5, 1.25, 2.0, 0.75, 1.1)
"""Scale factors, some of which leave a small size as it is."""


def _pictures(generator: torch.Generator, extent: int) -> Inputs:
    grid = torch.rand((2, 5, 6, 2), generator=generator) * 1.6 - 0.8
    made = {"x": normal(generator, 2, 3, 6, 8), "k": normal(generator, 3, 3, 3, 3) / 5, "g": grid}
    return {**made, "m": normal(generator, 2, 3, 20, 20) > 0, "p": torch.rand((1, 3, 2, 1), generator=generator)}


def _chain(choice: random.Random, turn: int) -> str:
    links = _turn(choice, turn, *["links"] * choice.randint(3, 5))
    a, b = choice.choice(SCALES), choice.choice(SCALES)
    return "; ".join([f"v = {choice.choice('xxp')}", *(link.format(a=a, b=b) for link in links), "v"])


# Patterns that runtimes replace by one operator, with one property changed.

PATTERNS = ("norms", "gates", "attentions", "softmaxes", "windowed", "quantized")


def _matrices(generator: torch.Generator, extent: int) -> Inputs:
    q, k, v = (normal(generator, 1, 2, 4, 8) for _ in range(3))
    mask = integers(generator, 0, 2, 1, 2, 4, 4) == 1
    mask[..., 1, :], mask[..., 3, :], mask[..., 2, :], mask[..., 2, 0] = False, True, False, True
    blanks = normal(generator, 3, 4, 10)
    blanks[0, 1, 1:3], blanks[1, 2, 4], blanks[2, 0, 5] = torch.nan, torch.inf, -torch.inf
    u = 1.0 - 2.0 * (torch.rand((4, 8, 3, 3), generator=generator) < 0.2)
    made = {"q": q, "k": k, "v": v, "m": mask, "n": blanks, "u": u, "p": 0.3 * normal(generator, 700)}
    x, w, b = normal(generator, 4, 4), normal(generator, 4), normal(generator, 4)
    return {**made, "x": x, "w": w, "b": b, "i": 0.8 + 0.2 * torch.rand((1, 8, 6, 6), generator=generator)}


def _pattern(choice: random.Random, turn: int) -> str:
    pattern, mask = _turn(choice, turn // len(PATTERNS), PATTERNS[turn % len(PATTERNS)], "masks")
    options: dict[str, Sequence[Any]] = {
        "dim": (-1, 0), "eps": (1e-5, 0.1), "root": ("math.sqrt(2)", 1.4, 2.0), "cubic": (0.044715, 0.05),
        "slope": (1.0, 1.702, 0.5), "six": (6, 5.5), "low": (-math.inf, -1e9, -20.0), "scale": (0.35355339, 0.5, 1.0),
    }  # fmt: skip
    drawn = {name: choice.choice(values) for name, values in options.items()}
    text = pattern.format(mask=mask, **drawn).replace("-inf", "-math.inf")
    return text if turn % len(PATTERNS) == 2 else re.sub(r"\bm\b", "m[0, 0]", text)


def grid(x: Tensor, scale: float, least: int, most: int) -> Tensor:
    """Rounds numbers to levels of eight bits, and scales them back."""
    import torch.ao.quantization.fx._decomposed  # noqa: PLC2701 - registers the operators, which have no public name

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


# Python's operators, of tensors and of numbers that sizes give.

OPERATORS = ("%", "//", "+", "-", "*", "/", "%", "//", "**")


def _signed(generator: torch.Generator, extent: int) -> Inputs:
    x = integers(generator, -15, 16, 5, 4) / 2.0 + 0.25
    return {"x": x, "j": integers(generator, -9, 10, 5, 4)}


def _language(choice: random.Random, turn: int) -> str:
    drawn = {
        "op": OPERATORS[turn % len(OPERATORS)],
        "number": choice.choice((2.5, -2.5, 1.5, -0.75)),
        "integer": choice.choice((-7, 7, -2, 3)),
        "whole": choice.choice((-3, 3, 2, -2)),
        "size": choice.choice(("(x.size(0) - 12)", "x.size(0)", "(1 - x.size(1))")),
    }
    name, place = ("compared", turn // 3) if turn % 3 == 2 else ("tensor_operators", turn - turn // 3)
    return _turn(choice, place, name)[0].format(**drawn)


class _Scripted(Functions):
    """Programs whose source ``torch.jit.script`` compiles, called by a `forward` that names them one by one."""

    __jit_unused_properties__ = ("labels",)

    def without(self, labels: frozenset[str]) -> Functions:
        return scripted(tuple(part for part in self.parts if part[0] not in labels))


def scripted(parts: Sequence[tuple[str, Callable[..., Any], tuple[int, ...]]]) -> Functions:
    """Module of programs of `x` and `j`, which TorchScript can compile."""
    calls = [f"{text!r}: p{number}({', '.join('xj'[place] for place in places)})" for number, (text, _, places) in enumerate(parts)]
    functions = {f"p{number}": function for number, (_, function, _) in enumerate(parts)}
    scope = _executed(f"def forward(self, x, j):\n    return {{{', '.join(calls)}}}", **functions)
    made: Functions = type("Scripted", (_Scripted,), {"forward": scope["forward"]})(tuple(parts))
    return made


def _rows(generator: torch.Generator, extent: int) -> Inputs:
    return {"x": normal(generator, 13 + extent, 4)}


# Signs of zeros, infinities and NaN.


def _corners(generator: torch.Generator, extent: int) -> Inputs:
    corners = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, 0.5, -2.5])
    pairs = torch.cartesian_prod(corners, corners)
    return {"a": pairs[:, 0].contiguous(), "b": pairs[:, 1].contiguous()}


def _sign(choice: random.Random, turn: int) -> str:
    (function,) = _turn(choice, turn, "signed")
    return f"v = {function}; torch.stack([torch.signbit(v) & ~v.isnan(), v.isnan(), v.isinf(), v == 0])"


# Transforms of functions within a program.


def _square(generator: torch.Generator, extent: int) -> Inputs:
    return {"x": torch.rand((2, 2), generator=generator) + torch.tensor([[0.5, 1.0], [1.0, 1.5]])}


def _transform(choice: random.Random, turn: int) -> str:
    inner, transform = _turn(choice, turn, "inner", "transforms")
    return f"f = lambda y: {inner}; {transform}"


# Bundles.

_FAST = {**LEVELS, "eager": 3}
FAMILIES: Mapping[str, Family] = {
    "mutation": Family("Writes to inputs between reads.", _squares, _mutation, 3, 40, "xy", early=("eager",)),
    "overflow": Family(
        "Integers that overflow.", _whole, _overflow, levels=RUNTIMES, early=("eager", "compile-static")
    ),
    "mixture": Family("Operands of different dtypes.", _operands, _mixture, 4, 90, levels=RUNTIMES, early=("eager",)),
    "threshold": Family("Numbers that half precision rounds.", _multiples, _threshold, 1, 32, modes=BOTH),
    "constant": Family("Constants made within programs.", _plain, _constant, 3, early=("eager",)),
    "arrangement": Family("Operands of different layouts.", _image, _arrangement, 2, 70, early=("eager",)),
    "chain": Family("Windows over images in a chain.", _pictures, _chain, 4, 12, modes=BOTH),
    "pattern": Family("Patterns that runtimes fuse.", _matrices, _pattern, 3, 72, levels=RUNTIMES, early=("eager",)),
    "language": Family(
        "Python's operators.",
        _signed,
        _language,
        2,
        90,
        levels={**LEVELS, "jit-script": 3, "jit-freeze": 3, "jit-trace": 3},
        traits=frozenset({"scriptable"}),
    ),
    "size": Family(
        "Python's functions of sizes.",
        _rows,
        lambda _, turn: f"n = x.shape[0]; {table('sizes')[turn]}",
        1,
        26,
        levels={**LEVELS, "compile-static": 4, "compile-dynamic": 3},
        traits=frozenset({"resizable"}),
    ),
    "sign": Family("Signs of zeros, infinities and NaN.", _corners, _sign, 1, 60, levels=RUNTIMES),
    "transform": Family("Transforms of functions.", _square, _transform, 2, 24),
}


@functools.cache
def function_of(text: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Function of a program's text, and the names of its inputs in the order of its arguments."""
    *statements, result = text.split("; ")
    own = set(re.findall(r"(?:^|; )(\w+) = |lambda (\w+):", text))
    names = sorted({name for name in re.findall(r"(?<![.\w'])[a-z]\d*(?![\w'])", text)} - {*itertools.chain(*own)})
    lines = [f"def program({', '.join(names)}):", *(f"    {line}" for line in statements), f"    return {result}"]
    return _executed("\n".join(lines))["program"], tuple(names)


def _executed(source: str, **scope: Any) -> dict[str, Any]:
    """Names of a source after its execution; TorchScript and error messages find its lines."""
    name = f"<accelcheck {stable_seed(source)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    scope |= {"torch": torch, "F": functional, "math": math, "grid": grid, "layer": layer}
    exec(compile(source, name, "exec"), scope)  # noqa: S102 - text of this file alone
    return scope


@functools.cache
def texts(word: str, number: int) -> tuple[str, ...]:
    """Programs of a bundle: the same for a number everywhere, and each legal."""
    family = FAMILIES[word]
    inputs = family.inputs(torch.Generator().manual_seed(number), 0)
    drawn: dict[str, None] = {}
    for place in range(family.programs):
        choice = random.Random(stable_seed(f"{word}-{number}-{place}"))  # noqa: S311 - no secret
        proposals = (family.text(choice, (number - 1) * family.programs + place) for _ in range(ATTEMPTS))
        if text := next((text for text in proposals if text not in drawn and _legal(text, inputs)), None):
            drawn[text] = None
    return tuple(drawn)


def _legal(text: str, inputs: Inputs) -> bool:
    function, names = function_of(text)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            function(*(inputs[name].clone() for name in names))
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
        return False
    return True


def make(generator: torch.Generator, extent: int, *, word: str, number: int) -> Problem:
    """Makes a bundle's problem, with values from the generator, and programs from its number alone."""
    family = FAMILIES[word]
    pool = family.inputs(generator, extent)
    parts, inputs, written = [], list(pool.values()), set[int]()
    places = {name: place for place, name in enumerate(pool)}
    for text in texts(word, number):
        function, names = function_of(text)
        own = dict(places)
        for name in filter(family.written.__contains__, names):
            own[name] = len(inputs)
            written.add(len(inputs))
            inputs.append(pool[name].clone())
        parts.append((text, function, tuple(own[name] for name in names)))
    module = scripted(parts) if "scriptable" in family.traits else Functions(tuple(parts))
    return Problem(module, tuple(inputs), writes=frozenset(written))


def bundle(word: str, number: int) -> Workload:
    """Workload of a family's bundle."""
    family = FAMILIES[word]
    early = dict.fromkeys(family.early, 2) if number == 1 else {}
    return Workload(
        f"{word}-{number}",
        f"{family.summary} Bundle {number} of random programs.",
        partial(make, word=word, number=number),
        level=3 - bool(early),
        modes=family.modes,
        dtypes=frozenset({"float32"}),
        traits=frozenset({"domain"}) | family.traits,
        techniques=frozenset(family.levels),
        levels={**family.levels, **early},
        divisible=True,
        given=True,
    )


WORKLOADS = tuple(bundle(word, number + 1) for word, family in FAMILIES.items() for number in range(family.bundles))
