"""Copies between tensors of every dtype and layout, which change no other element of either one's memory."""

from collections.abc import Mapping
from functools import partial
from itertools import product

import torch
from torch import Tensor

from accelcheck.workloads.draw import integers
from accelcheck.workloads.function_parts import Collected, Function, family

DTYPES: Mapping[str, torch.dtype | None] = {
    "float": None,
    **{
        str(dtype).removeprefix("torch."): dtype
        for dtype in (
            *(torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
            torch.bool,
        )
    },
}
"""Dtypes by name; None for the input's own."""
ROWS, COLUMNS = 6, 5
TARGETS: Mapping[str, Function] = {
    "whole": lambda base: base[:ROWS, :COLUMNS].contiguous(),
    "transposed": lambda base: base[:COLUMNS, :ROWS].T,
    "every other column": lambda base: base[:ROWS, 1 : 1 + 2 * COLUMNS : 2],
    "from the middle": lambda base: base[2 : 2 + ROWS, 3 : 3 + COLUMNS],
    "columns": lambda base: base[:ROWS, -COLUMNS:],
}
"""Parts of a matrix, ``(ROWS, COLUMNS)``, that are written to."""
SOURCES: Mapping[str, Function] = {
    **TARGETS,
    "a row": lambda base: base[3, 1 : 1 + COLUMNS],
    "a column": lambda base: base[1 : 1 + ROWS, 2:3],
    "a number": lambda base: base[3, 2],
    "a row, expanded": lambda base: base[2, :COLUMNS].expand(ROWS, -1),
}
"""Parts of a matrix that are copied from."""
PAIRS = tuple(product(TARGETS.values(), SOURCES.values()))
SHARE = 4
"""Number of shares of `PAIRS`: the pairs of dtypes take them in turn."""


def _copied(to: torch.dtype | None, of: torch.dtype | None, turn: int, x: Tensor) -> list[Tensor]:
    """Returns the memory of targets and sources after copies from part to part."""
    written, read = [], []
    for target, source in PAIRS[turn % SHARE :: SHARE]:
        base = x.flip(0).to(to or x.dtype)
        values = x.to(of or x.dtype)
        part = target(base)
        part.copy_(source(values))
        written += [base, part] if part._base is None else [base]  # noqa: SLF001 - torch has no public name for it
        read.append(values)
    return [torch.cat([value.reshape(-1) for value in kept]) for kept in (written, read)]


def _converted(to: torch.dtype | None, of: torch.dtype | None, x: Tensor) -> list[Tensor]:
    """Returns parts in another dtype, written to one by one, so that none may share the memory it is made of."""
    values = x.to(of or x.dtype)
    made = [source(values).to(to or x.dtype, copy=True) for source in SOURCES.values()]
    made += [source(values).clone(memory_format=torch.contiguous_format) for source in SOURCES.values()]
    kept = [value.clone() for value in made]
    for value in made:
        value.zero_()
    return [*kept, values]


def _copies(parts: Collected) -> None:
    x = integers(parts.generator, 0, 99, 8, 12).float()
    for turn, ((to, wide), (of, narrow)) in enumerate(product(DTYPES.items(), DTYPES.items())):
        parts.add(f"{to} of {of}", partial(_copied, wide, narrow, turn), x)
    names = [*DTYPES]
    for to, of in zip(names, [*names[1:], names[0]], strict=True):
        parts.add(f"converted, {to} of {of}", partial(_converted, DTYPES[to], DTYPES[of]), x)


WORKLOADS = (
    family("copies-dtypes", "Copies between parts of tensors, of each dtype and layout.", _copies,
        techniques=frozenset({"eager"})),
)  # fmt: skip
