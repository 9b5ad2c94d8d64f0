"""Plants: named changes between a technique and its result; faults must be caught, correct variants must pass."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.workloads.base import Program

Change: TypeAlias = "Callable[[Program], None]"
"""Function that changes a program in place, after the technique has prepared it."""

Rest = ParamSpec("Rest")
Plant = TypeVar("Plant", "PlantedFault", "Variant")

FLOAT32 = ("float32",)
HALVES = ("bfloat16", "float16")
EVERY = (*FLOAT32, *HALVES)
"""Storage dtypes that plants are tried in, where they apply."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload, mode and dtypes that something is planted in.

    Attributes:
        workload: Name of a built-in workload.
        dtypes: Storage dtypes in which a fault must be caught.
        hidden: Reasons why a fault cannot be told from rounding, by storage dtype; see `PlantedFault.hidden`.
    """

    workload: str
    mode: Mode = Mode.FORWARD
    dtypes: tuple[str, ...] = EVERY
    hidden: Mapping[str, str] = field(default_factory=dict)


def single(workload: str, mode: Mode = Mode.FORWARD) -> Cell:
    """A cell in FP32 alone."""
    return Cell(workload, mode, FLOAT32)


def passes(workload: str, dtypes: tuple[str, ...] = EVERY) -> tuple[Cell, Cell]:
    """Cells of a workload forward and backward."""
    return Cell(workload, dtypes=dtypes), Cell(workload, Mode.BACKWARD, dtypes)


def backward(workload: str, dtypes: tuple[str, ...] = EVERY) -> Cell:
    """A cell of a workload's backward pass."""
    return Cell(workload, Mode.BACKWARD, dtypes)


def derived(workload: str) -> Cell:
    """A cell of a workload's backward pass in FP32 alone."""
    return backward(workload, FLOAT32)


def trained(workload: str) -> Cell:
    """A cell of a training in FP32 alone."""
    return single(workload, Mode.TRAIN)


def everywhere(device: Device) -> Capability:
    """Capability of every device."""
    return SUPPORTED


def where(here: Callable[[Device], bool], why: str, code: Code = Code.NO_FEATURE) -> Callable[[Device], Capability]:
    """Capability of the devices for which `here` is true; `why` says why the others lack it, with ``{}`` for a name."""
    return lambda device: SUPPORTED if here(device) else unsupported(code, why.format(device.name))


def untouched(strength: float) -> Change:
    """The change of faults that act while the program is prepared or run, and leave the prepared one as it is."""
    return lambda program: None  # noqa: ARG005 - of any program


def nowhere(strength: float) -> AbstractContextManager[Any]:
    """The context of faults that change the prepared program alone."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class PlantedFault:
    """A defect. Each family's file lists its `FAULTS`.

    It is in the program, operator or child process that the technique runs, by `plant`, or in the compiler, converter
    or engine that the technique calls, by `around`.

    Attributes:
        name: Name in the kill table.
        summary: Mistake of a faulty implementation, in one sentence.
        cells: Cells that it is planted in.
        plant: ``plant(strength)`` gives the change to the prepared program.
        around: ``around(strength)`` gives a context, such as a patched compiler pass, that is active from before the
            technique prepares the program until it is finished. It must not change eager's results.
        strengths: Relative errors, shares or counts, the strongest first; a single 1 where the fault has no degrees.
        number: Number in the list of faults that a suite must catch, 1 to 43; 0 for cheats and further ones.
        technique: Technique that it is planted under, or its name.
        hidden: Reasons why it cannot be told from rounding, by dtype and strength (``{("bfloat16", 0.003): "..."}``).
            Such rows are run and shown, but do not decide the exit code.
        absent: Storage dtypes without such a fault, each with the reason. Each dtype of the technique and the workload
            is planted in, hidden or absent.
        exists: Capability of a device to have it.
        emulated: True if it is put into accelcheck's own code, an emulation or an adapter.
        seeds: Largest number of seeds, for techniques that take seconds; 0 for as many as are asked for.
        warm: True for a run before the judged one, so that a faulty cache shows; False for techniques whose evidence
            counts every run.
    """

    name: str
    summary: str
    cells: tuple[Cell, ...]
    plant: Callable[[float], Change] = untouched
    strengths: tuple[float, ...] = (1.0,)
    number: int = 0
    technique: str | Technique = "eager"
    hidden: Mapping[tuple[str, float], str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    exists: Callable[[Device], Capability] = everywhere
    around: Callable[[float], AbstractContextManager[Any]] = nowhere
    emulated: bool = False
    seeds: int = 0
    warm: bool = True


@dataclass(frozen=True)
class Variant:
    """A correct implementation that differs from eager's. Each family's file lists its `VARIANTS`.

    Attributes:
        name, summary, cells, plant, technique, exists: The same as of `PlantedFault`; ``plant`` takes nothing.
    """

    name: str
    summary: str
    cells: tuple[Cell, ...]
    plant: Callable[[], Change]
    technique: str | Technique = "eager"
    exists: Callable[[Device], Capability] = everywhere


def row(
    make: Callable[Concatenate[str, str, tuple[Cell, ...], Rest], Plant], **shared: Any
) -> Callable[..., Callable[Concatenate[Cell | tuple[Cell, ...], Rest], Plant]]:
    """Begin the rows of a table: ``row(PlantedFault)("name", "Summary.")(cells, plant)``.

    The summary may be a function or class whose docstring begins with it; without one, the docstring of the plant does.

    Args:
        make: `PlantedFault` or `Variant`.
        shared: Arguments of all rows, unless a row has its own.
    """

    def begin(
        name: str, summary: str | Callable[..., Any] = ""
    ) -> Callable[Concatenate[Cell | tuple[Cell, ...], Rest], Plant]:
        def end(cells: Cell | tuple[Cell, ...], /, *args: Rest.args, **own: Rest.kwargs) -> Plant:
            source: Any = summary or own.get("around") or args[0]
            sentence = source if isinstance(source, str) else _first_sentence(source)
            where = (cells,) if isinstance(cells, Cell) else cells
            return partial(make, name, sentence, where, **shared)(*args, **own)

        return end

    return begin


def _first_sentence(documented: Any) -> str:
    # Under `python -OO` there are no docstrings.
    text = " ".join((documented.__doc__ or documented.__name__.replace("_", " ")).split())
    return f"{text.partition('. ')[0].removesuffix('.')}."


alike = partial(row, PlantedFault)
"""Begin the rows of faults that share arguments: ``slow = alike(seeds=5)``."""
fault, variant = alike(), row(Variant)


SHARED = (
    *("name", "family", "promise", "source", "level", "dtypes", "modes", "requires", "excludes", "resizing"),
    *("keeps_strides", "bakes", "differentiates_twice", "accuracy_limit", "packages", "watch", "capability"),
    *("accepts", "admits", "precision", "emulate", "emulate_optimizer", "evidence"),
)
"""Attributes and methods that a technique with a plant has from the technique itself."""


class Planted(Technique):
    """A technique with a plant, which is judged and gives evidence like the technique itself.

    Args:
        base: Technique that is planted in.
        change: Change to the program after the technique has prepared it.
        around: Maker of the context in which the technique prepares, runs and is finished; None for none.
        warm: Value of `PlantedFault.warm`.
    """

    def __init__(
        self,
        base: Technique,
        change: Change,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        warm: bool = True,
    ) -> None:
        self.base, self.change = base, change
        self.around = contextlib.nullcontext if around is None else around
        self._held = contextlib.ExitStack()
        # What the base says of itself; a bound method of it can be sent to another process.
        vars(self).update({name: getattr(base, name) for name in SHARED})
        # A faulty cache shows only in a second run, so there are at least two.
        self.warmups = max(int(warm), base.warmups)

    @property
    def oracle(self) -> str:
        return self.base.oracle

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self._held.enter_context(self.around())
        self.base.prepare(program, mode, device)
        self.change(program)

    def finish(self) -> None:
        with self._held:  # the technique's own end comes first: it drops what was compiled
            self.base.finish()
