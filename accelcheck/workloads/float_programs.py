"""Random programs of floating-point numbers: operators with views, writes in place, branches on sizes and mixed dtypes.

Each operator maps numbers around 1 to such numbers, and decisions depend on inputs and sizes alone, which no rounding
moves. So a correct implementation differs from FP64 by rounding errors, in every order of operators.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.core.case import stable_seed
from accelcheck.workloads import program_steps
from accelcheck.workloads.base import Problem
from accelcheck.workloads.families import LAYOUTS, WRITES
from accelcheck.workloads.program_steps import Function, Shapes

LARGEST = 1e3
SMALLEST = 1e-3
"""Limits of the largest magnitude of each value and gradient; smaller ones are left of a cancellation."""
INDICES = 3
"""Bound of the integers of an input, so that they are legal in most dimensions."""
UNARY: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in "sin cos tanh sigmoid sinc atan relu abs square".split()},
    **{name: getattr(functional, name) for name in "softplus silu logsigmoid hardtanh leaky_relu hardswish".split()},
    "exp(-x * x)": lambda x: torch.exp(-x * x),
    "log1p(x * x)": lambda x: torch.log1p(x * x),
    "sqrt(1 + x * x)": lambda x: torch.sqrt(1 + x * x),
    "rsqrt(1 + x * x)": lambda x: torch.rsqrt(1 + x * x),
    "1 / (1 + x * x)": lambda x: 1 / (1 + x * x),
    "2.5 - x": lambda x: 2.5 - x,
    "x * 0.75 + 1": lambda x: x * 0.75 + 1,
    "x ** 3 of tanh": lambda x: torch.tanh(x) ** 3,
}
"""Functions of an element. Bundles of operators test `erf` and `elu`, which inductor gets wrong alone
(docs/findings.md): in a program a wrong operator hides errors of several."""
BINARY: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in "add sub mul maximum minimum logaddexp".split()},
    "x / (1 + y * y)": lambda x, y: x / (1 + y * y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "x - 2 * y": lambda x, y: torch.sub(x, y, alpha=2),
}
REDUCTIONS: Mapping[str, Function] = {
    **{name: getattr(torch, name) for name in "mean amax amin logsumexp softmax log_softmax cumsum".split()},
    "sum, kept": lambda x, dim: x.sum(dim, keepdim=True) / x.shape[dim],
    "var": lambda x, dim: x.var(dim, correction=0),
    "cumprod of tanh": lambda x, dim: torch.tanh(x).cumprod(dim),
    "norm": lambda x, dim: (x.square().sum(dim) + 1).sqrt(),
    "layer_norm": lambda x, dim: functional.layer_norm(x.movedim(dim, -1), (x.shape[dim],)),
}
SHAPES: Mapping[str, Function] = {
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1, dim),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "first half": lambda x, dim: x.narrow(dim, 0, (x.shape[dim] + 1) // 2),
    "every other": lambda x, dim: x[(slice(None),) * dim + (slice(None, None, 2),)],
    "last": lambda x, dim: x.select(dim, -1),
    "moved to the end": lambda x, dim: x.movedim(dim, -1),
    "exchanged with the first": lambda x, dim: x.transpose(0, dim),
    "twice": lambda x, dim: torch.cat([x, x.neg()], dim),
    "stacked": lambda x, dim: torch.stack([x, x * 0.5], dim),
    "padded": lambda x, dim: functional.pad(x.movedim(dim, -1), (1, 2), value=0.25),
    "windows": lambda x, dim: x.unfold(dim, 2, 1),
    "second chunk": lambda x, dim: x.chunk(2, dim)[1],
    "flattened": lambda x, dim: x.flatten(dim),
    "repeated": lambda x, dim: x.repeat_interleave(2, dim),
    "lower triangle": lambda x, dim: x.tril(dim - 1),
    "pooled": lambda x, dim: functional.avg_pool1d(x.movedim(dim, -1).flatten(0, -2), 2),
}
WRITTEN: Mapping[str, Function] = {**LAYOUTS, "windows": lambda x: x.unfold(-1, 4, 4)}
"""Views to write to. Windows do not overlap, since functionalization refuses writes to overlapping ones."""
STEADY_WRITES = [name for name in WRITES if name != "masked"]
"""Writes without decisions by values, which rounding moves."""
MIXED: Mapping[str, Function] = {
    "x + integers": lambda x, k: x + k,
    "x * integers": lambda x, k: x * k,
    "x where an integer is positive": lambda x, k: torch.where(k > 0, x, 0.5),
    "x or the integers": lambda x, k: torch.where(k > 1, x, k),
    "masked": lambda x, k: x.masked_fill(k == 0, -0.25),
}
INDEXED: Mapping[str, Function] = {
    "index_select": lambda x, k, dim: x.index_select(dim, k),
    "brackets": lambda x, k, dim: x[(slice(None),) * dim + (k,)],
    "index_add": lambda x, k, dim: torch.zeros_like(x).index_add(dim, k, x.index_select(dim, k)),
    "gather": lambda x, k, dim: x.gather(
        dim,
        k[(None,) * dim + (...,) + (None,) * (x.dim() - dim - 1)].expand(*x.shape[:dim], len(k), *x.shape[dim + 1 :]),
    ),
}


def product(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies the rows of two matrices, or stacks of them, and scales the products to the size of the rows."""
    return torch.matmul(x, y.transpose(-1, -2)) / math.sqrt(x.shape[-1])


def branch(x: Tensor, *, dim: int, size: int, functions: tuple[Function, Function]) -> Tensor:
    """Applies one of two functions, chosen by a size."""
    return functions[x.shape[dim] > size](x)


def written(x: Tensor, *, view: Function, writes: Sequence[Function], late: Function) -> Tensor:
    """Writes to a copy through a view, and reads it through both afterwards."""
    copy = x.clone()
    window = view(copy)
    for write in writes:
        write(window)
    return copy * 0.5 + late(view(copy)).mean() + window.sum() / copy.numel()


def _inputs(shapes: Shapes, extent: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Floating-point tensors, with a first dimension that grows by the extent, and integers below `INDICES`."""
    numbers = [torch.randn(shape, generator=generator) for shape in program_steps.sized(shapes, extent)]
    integers = torch.randint(0, INDICES, (shapes[0][-1],), generator=generator)
    integers[0] = INDICES - 1  # so that operators legal for one draw are legal for all
    return (*numbers, integers)


def _proposed(choice: random.Random, values: Sequence[Tensor], *, integers: int) -> program_steps.Step:
    """Draws an operator on inputs and results so far, maybe an illegal one; `integers` is the integer input's place."""
    places = [place for place in range(len(values)) if place != integers]
    place = program_steps.recent(choice, places)
    dim = choice.randrange(max(1, values[place].dim()))

    def writing() -> program_steps.Step:
        view, late = choice.choice(list(WRITTEN)), choice.choice(list(UNARY))
        writes = choice.sample(STEADY_WRITES, choice.randint(1, 2))
        function = partial(written, view=WRITTEN[view], writes=[WRITES[name] for name in writes], late=UNARY[late])
        return program_steps.Step(f"{', '.join(writes)} to {view}, then {late}", function, (place,))

    def branching() -> program_steps.Step:
        size = values[place].shape[dim] if values[place].dim() else 0
        names = choice.choice(list(UNARY)), choice.choice(list(UNARY))
        functions = UNARY[names[0]], UNARY[names[1]]
        limit = choice.choice((size - 1, size, size + 1))
        label = f"{names[1]} where dimension {dim} is larger than {limit}, else {names[0]}"
        return program_steps.Step(label, partial(branch, dim=dim, size=limit, functions=functions), (place,))

    kinds: list[tuple[int, Callable[[], program_steps.Step]]] = [
        (4, lambda: program_steps.drawn_step(choice, UNARY, place)),
        (4, lambda: program_steps.drawn_step(choice, BINARY, place, choice.choice(places))),
        (3, lambda: program_steps.drawn_step(choice, REDUCTIONS, place, dim=dim)),
        (4, lambda: program_steps.drawn_step(choice, SHAPES, place, dim=dim)),
        (2, lambda: program_steps.drawn_step(choice, MIXED, place, integers)),
        (2, lambda: program_steps.drawn_step(choice, INDEXED, place, integers, dim=dim)),
        (2, lambda: program_steps.Step("product", product, (place, choice.choice(places)))),
        (3, writing),
        (1, branching),
    ]
    return choice.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()


def _sound(steps: Sequence[program_steps.Step], inputs: Sequence[Tensor]) -> bool:
    """Runs steps in FP64; True if the last value and its gradients are finite and of moderate size."""
    wide = [value.double().requires_grad_() if value.is_floating_point() else value for value in inputs]
    try:
        last = program_steps.values_of(steps, wide)[-1]
        if not last.requires_grad:
            return False
        asked = [value for value in wide if value.requires_grad]
        weights = torch.arange(1.0, last.numel() + 1, dtype=torch.float64).cos().reshape(last.shape)
        gradients = torch.autograd.grad(last, asked, weights, allow_unused=True)
    except (RuntimeError, IndexError):  # a write to an operand of a gradient, an index that is too large
        return False
    largest = [float(value.detach().abs().max()) for value in (last, *gradients) if value is not None]
    return all(SMALLEST < size < LARGEST for size in largest)


@functools.lru_cache(64)
def drawn(number: int) -> tuple[program_steps.RandomProgram, Shapes]:
    """Program of a number and the shapes of its floating-point inputs: the same on every machine."""
    seed = stable_seed(f"program-{number}")
    choice = random.Random(seed)  # noqa: S311 - no secret
    shapes = program_steps.drawn_shapes(choice)

    def inputs(extent: int) -> tuple[Tensor, ...]:
        return _inputs(shapes, extent, torch.Generator().manual_seed(seed))

    proposed = partial(_proposed, choice, integers=len(shapes))
    return program_steps.grown(choice, inputs, proposed, Tensor.is_floating_point, _sound), shapes


def make(generator: torch.Generator, extent: int, *, number: int) -> Problem:
    """Makes a program's problem, with values from the generator, and steps from its number alone."""
    program, shapes = drawn(number)
    return Problem(program_steps.RandomProgram(program.steps, program.results), _inputs(shapes, extent, generator))
