"""Steps of random programs, each an operator on previous values; draws of steps, and the module that runs them."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import Tensor, nn

Function: TypeAlias = Callable[..., Tensor]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]

STEPS = (3, 10)
"""Least and most operators of a program, without those that views and writes need."""
BATCHES = (7, 11, 13)
"""Sizes of the inputs' first dimension, to which the extent is added; no other dimension has them."""
SIZES = (1, 2, 3, 4, 5, 8, 16, 17, 33)
"""Sizes of the other dimensions."""
EXTENTS = (0, 1, 2, 5)
"""Extents at which every operator must be legal."""
ELEMENTS = 2**14
"""Most elements of a value."""
ATTEMPTS = 200
"""Most draws of operators for a program."""
RECENT = 0.7
"""Part of arguments among the last three values."""


@dataclass(frozen=True)
class Step:
    """Operator of a program, on the values at `places` among the inputs and the results of the steps before it.

    If `writes` is True, it writes to its first argument, which is then an input of the program.
    """

    label: str
    function: Function
    places: tuple[int, ...]
    writes: bool = False


class RandomProgram(nn.Module):
    """Runs steps one after the other, and returns the values at `results`."""

    def __init__(self, steps: tuple[Step, ...], results: tuple[int, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.results = results

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = values_of(self.steps, inputs)
        return tuple(values[place] for place in self.results)

    def extra_repr(self) -> str:
        """Steps of the program, one a line."""
        return "\n".join(f"{number}: {step.label} of {step.places}" for number, step in enumerate(self.steps))


def values_of(steps: Sequence[Step], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Inputs, and the results of all steps."""
    values = list(inputs)
    for step in steps:
        values.append(step.function(*(values[place] for place in step.places)))
    return values


def recent(choice: random.Random, places: Sequence[int]) -> int:
    """Draws a place, more often one of the last three: programs are chains rather than stars."""
    return choice.choice(places[-3:] if choice.random() < RECENT else places)


def drawn_step(choice: random.Random, table: Mapping[str, Function], *places: int, **options: int) -> Step:
    """Draws an operator of a table, with its arguments and options."""
    name = choice.choice(list(table))
    label = f"{name} ({', '.join(f'{key} {value}' for key, value in options.items())})" if options else name
    return Step(label, partial(table[name], **options) if options else table[name], places)


def drawn_shapes(choice: random.Random) -> Shapes:
    """Shapes of two inputs, which broadcast or share their first dimension."""
    batch = choice.choice(BATCHES)
    first = (batch, *choice.choices(SIZES, k=choice.randint(1, 2)))
    return first, choice.choice((first, first[-1:], (1, *first[1:]), (batch, *choice.choices(SIZES, k=1))))


def sized(shapes: Shapes, extent: int) -> Shapes:
    """Shapes with their first dimension grown by the extent."""
    return tuple((shape[0] + extent if shape[0] in BATCHES else shape[0], *shape[1:]) for shape in shapes)


def grown(
    choice: random.Random,
    inputs: Callable[[int], tuple[Tensor, ...]],
    proposed: Callable[[Sequence[Tensor]], Step],
    suits: Callable[[Tensor], bool],
    sound: Callable[[Sequence[Step], Sequence[Tensor]], bool],
) -> RandomProgram:
    """Draws a program: proposes operators one after the other, and keeps sound ones that are legal at all extents.

    Its results include the last value, and the last one that is no view of an input: returning a view computes nothing.
    `inputs` makes the inputs at an extent; `proposed` draws an operator on values without memory, possibly an illegal
    one; `suits` admits values to go on with; `sound` runs steps with the inputs, and admits the last one.
    """
    meta = [[value.to("meta") for value in inputs(extent)] for extent in EXTENTS]
    steps, computed = list[Step](), list[int]()
    count = choice.randint(*STEPS)
    for _ in range(ATTEMPTS):
        step = proposed(values_of(steps, meta[0]))
        if _legal([*steps, step], meta, suits) and sound([*steps, step], inputs(0)):
            steps.append(step)
            computed += [len(meta[0]) + len(steps) - 1] * (not _is_view(steps, inputs(0)))
        if len(steps) >= count and computed:
            break
    first, last = len(meta[0]), len(meta[0]) + len(steps) - 1
    others = {choice.randrange(first, last + 1) for _ in range(2)}
    return RandomProgram(tuple(steps), tuple(sorted({*others, *computed[-1:], last})))


def _is_view(steps: Sequence[Step], inputs: Sequence[Tensor]) -> bool:
    """Runs steps; True if the last value lies in the memory of an input."""
    memory = values_of(steps, inputs)[-1].untyped_storage().data_ptr()
    return any(value.untyped_storage().data_ptr() == memory for value in inputs)


def _legal(steps: Sequence[Step], inputs: Sequence[Sequence[Tensor]], suits: Callable[[Tensor], bool]) -> bool:
    """Runs steps on tensors without memory; True if the last value suits, and is small, at all extents."""
    try:
        last = [values_of(steps, tensors)[-1] for tensors in inputs]
    except (RuntimeError, IndexError, ValueError):
        return False
    return all(suits(value) and 0 < value.numel() <= ELEMENTS and value.dim() <= 4 for value in last)
