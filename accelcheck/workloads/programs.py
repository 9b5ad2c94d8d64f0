"""Small random programs as workloads, each from its number: even ones of floating-point numbers, odd ones of integers.

Single operators show errors in their translation; programs show errors of fusion, functionalisation and scheduling.
PyTorch fuzzes its compiler so too (``tools/experimental/torchfuzz``, and ``torch._inductor.fuzzer`` for options).
"""

import re
from collections.abc import Iterable, Mapping
from functools import partial

from accelcheck.core.case import Mode
from accelcheck.workloads import float_programs, integer_programs
from accelcheck.workloads.base import Workload
from accelcheck.workloads.program_steps import STEPS

COUNT = 48
"""Number of programs at level 3; users choose the numbers of others."""
PROGRAM_TECHNIQUES: Mapping[str, int] = {
    "eager": 3,
    "compile-static": 3,
    **dict.fromkeys(
        ("compile-aot-eager", "compile-dynamic", "export", "jit-trace", "aot-inductor", "compile-openxla"), 4
    ),
}
"""Levels of techniques that see several operators at once."""


def program(number: int) -> Workload:
    """Workload of a program; a requested one, numbered above `COUNT`, is at every level."""
    levels = PROGRAM_TECHNIQUES if number <= COUNT else dict.fromkeys(PROGRAM_TECHNIQUES, 1)
    made, of = (integer_programs.make, "integers") if number % 2 else (float_programs.make, "mixed dtypes")
    return Workload(
        f"program-{number}",
        f"Random program {number}: up to {STEPS[1]} operators with views, writes and {of}.",
        partial(made, number=number),
        level=min(levels.values()),
        dtypes=frozenset({"float32"}),
        modes=frozenset({Mode.FORWARD} if number % 2 else {Mode.FORWARD, Mode.BACKWARD}),
        traits=frozenset({"domain", "resizable"}),
        techniques=frozenset(PROGRAM_TECHNIQUES),
        levels=levels,
        given=True,
    )


_NAME = re.compile(r"program-([1-9][0-9]{0,8})")


def named(words: Iterable[str]) -> list[Workload]:
    """Programs besides `WORKLOADS` that names of workloads, or ids of cases, request."""
    names = (word.split("/")[1] if word.count("/") == 4 else word for word in words)
    numbers = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
    return [program(number) for number in sorted(numbers) if number > COUNT]


WORKLOADS = tuple(program(number) for number in range(1, COUNT + 1))
