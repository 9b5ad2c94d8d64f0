"""Random programs of exact integers of all widths, whose overflows wrap around. They also write to their inputs.

Compilers compute narrow integers in wider ones, fold constants that a program makes itself, and delay writes to inputs:
a program shows a lost order, or width.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from accelcheck.core.case import stable_seed
from accelcheck.workloads import program_steps
from accelcheck.workloads.base import Problem
from accelcheck.workloads.families import INTEGERS, LAYOUTS, WRITES
from accelcheck.workloads.float_programs import SHAPES
from accelcheck.workloads.program_steps import Function, Shapes

UNARY: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in "neg bitwise_not abs square sign relu".split()},
    "3 * x": lambda x: 3 * x,
    "x + 7": lambda x: x + 7,
    "x >> 1": lambda x: x >> 1,
    "x << 2": lambda x: x << 2,
    "x // 3": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "x / 3, truncated": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "x % 5": lambda x: x % 5,
    "clamp": lambda x: x.clamp(3, 90),
    "x > 4": lambda x: (x > 4).to(x.dtype),
    "bytes": lambda x: x.contiguous().view(torch.uint8),
    **{f"to {dtype}".replace("torch.", ""): partial(Tensor.to, dtype=dtype) for dtype in INTEGERS},
}
BINARY: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in "add sub mul bitwise_and bitwise_or bitwise_xor minimum maximum".split()},
    "x - 2 * y": lambda x, y: torch.sub(x, y, alpha=2),
    "the larger": lambda x, y: torch.where(x > y, x, y),
    "x // (1 + y % 7)": lambda x, y: torch.div(x, 1 + y % 7, rounding_mode="floor"),
    "x % (1 + y % 5)": lambda x, y: x % (1 + y % 5),
    "x == y": lambda x, y: (x == y).to(x.dtype),
}
REDUCTIONS: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in "sum amax amin argmax cumsum count_nonzero".split()},
    "sum as int32": lambda x, dim: x.sum(dim, dtype=torch.int32),
    "cumsum as int16": lambda x, dim: x.cumsum(dim, dtype=torch.int16),
    "any": lambda x, dim: (x % 3 == 0).any(dim).to(torch.int8),
    "sort": lambda x, dim: x.sort(dim).values,
}
MADE: Mapping[str, Function] = {
    "ones": torch.ones_like,
    "zeros": torch.zeros_like,
    "bytes of 200": lambda x: torch.full(x.shape, 200, dtype=torch.uint8, device=x.device),
    "positions": lambda x: torch.arange(x.shape[-1], dtype=x.dtype, device=x.device),
    "identity": lambda x: torch.eye(x.shape[-1], dtype=x.dtype, device=x.device),
}
"""Constants made by a program itself, as large as a value."""
MOVES = {name: function for name, function in SHAPES.items() if name not in {"stacked", "padded", "pooled"}}
"""Functions of shape without fractions."""
WINDOWS = {
    name: view for name, view in LAYOUTS.items() if name not in {"expanded", "windows", "as_strided of a product"}
}
"""Views whose elements do not share memory."""


def written(x: Tensor, *, view: Function, write: Function) -> Tensor:
    """Writes to an argument through a view, and returns its content plus one."""
    write(view(x))
    return x + 1


def _inputs(
    shapes: Shapes, dtypes: Sequence[torch.dtype], extent: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Integers from -100 to 100; negative ones become numbers above 155 in a dtype without sign."""
    pairs = zip(program_steps.sized(shapes, extent), dtypes, strict=True)
    return tuple(torch.randint(-100, 101, shape, generator=generator).to(dtype) for shape, dtype in pairs)


def _proposed(choice: random.Random, values: Sequence[Tensor], *, inputs: int) -> program_steps.Step:
    """Draws an operator on values, possibly an illegal one: the first `inputs` of them, and the results so far."""
    places = list(range(len(values)))
    place = program_steps.recent(choice, places)
    dim = choice.randrange(max(1, values[place].dim()))

    def writing() -> program_steps.Step:
        view, write = choice.choice(list(WINDOWS)), choice.choice(list(WRITES))
        function = partial(written, view=WINDOWS[view], write=WRITES[write])
        return program_steps.Step(f"{write} to {view} of the input", function, (choice.randrange(inputs),), writes=True)

    kinds: list[tuple[int, Callable[[], program_steps.Step]]] = [
        (5, lambda: program_steps.drawn_step(choice, UNARY, place)),
        (4, lambda: program_steps.drawn_step(choice, BINARY, place, choice.choice(places))),
        (3, lambda: program_steps.drawn_step(choice, REDUCTIONS, place, dim=dim)),
        (4, lambda: program_steps.drawn_step(choice, MOVES, place, dim=dim)),
        (2, lambda: program_steps.drawn_step(choice, MADE, place)),
        (3, writing),
    ]
    return choice.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()


def _is_integer(value: Tensor) -> bool:
    return value.dtype in INTEGERS


def _sound(steps: Sequence[program_steps.Step], inputs: Sequence[Tensor]) -> bool:
    """Runs steps; True if the last value is a constant by design, or not the same number everywhere."""
    try:
        last = program_steps.values_of(steps, inputs)[-1]
    except (RuntimeError, IndexError):  # shapes that meta tensors let through
        return False
    return steps[-1].label in MADE or bool((last != last.flatten()[0]).any())


@functools.lru_cache(64)
def drawn(number: int) -> tuple[program_steps.RandomProgram, Shapes, tuple[torch.dtype, ...]]:
    """Program of a number, and the shapes and dtypes of its inputs: the same on every machine."""
    seed = stable_seed(f"program-{number}")
    choice = random.Random(seed)  # noqa: S311 - no secret
    shapes = program_steps.drawn_shapes(choice)
    dtypes = tuple(choice.choices(INTEGERS, k=len(shapes)))

    def inputs(extent: int) -> tuple[Tensor, ...]:
        return _inputs(shapes, dtypes, extent, torch.Generator().manual_seed(seed))

    proposed = partial(_proposed, choice, inputs=len(shapes))
    return program_steps.grown(choice, inputs, proposed, _is_integer, _sound), shapes, dtypes


def make(generator: torch.Generator, extent: int, *, number: int) -> Problem:
    """Makes a program's problem, with values from the generator, and steps from its number alone."""
    program, shapes, dtypes = drawn(number)
    writes = frozenset(step.places[0] for step in program.steps if step.writes)
    inputs = _inputs(shapes, dtypes, extent, generator)
    return Problem(program_steps.RandomProgram(program.steps, program.results), inputs, writes=writes)
