"""A plant: a small, named change between a technique and its result; a fault must be caught, a correct variant must pass."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from accelcheck.core.capability import SUPPORTED, Capability
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch import nn

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import OptimizerMaker, Program, Workload
    from accelcheck.workloads.probes import Probe

Change: TypeAlias = "Callable[[Program], None]"
"""Changes a program in place, after the technique has prepared it."""

Rest = ParamSpec("Rest")
Plant = TypeVar("Plant", "PlantedFault", "Variant")

FLOAT32 = ("float32",)
HALVES = ("bfloat16", "float16")
EVERY = (*FLOAT32, *HALVES)
"""Storage dtypes that plants are tried in, unless a plant does not apply to one of them."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Where something is planted.

    Attributes:
        workload: Name of a built-in workload.
        mode: Mode that is run.
        dtypes: Storage dtypes in which a fault must be caught.
        hidden: Why a fault cannot be told from rounding here, by storage dtype; see `PlantedFault.hidden`.
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


def trained(workload: str) -> Cell:
    """A cell of a training in FP32 alone."""
    return single(workload, Mode.TRAIN)


def everywhere(device: Device) -> Capability:
    """For plants that apply to every device."""
    return SUPPORTED


def untouched(strength: float) -> Change:
    """The change of faults that leave the prepared program as it is: they act while it is prepared or run."""
    return lambda program: None  # noqa: ARG005 - of any program


def nowhere(strength: float) -> AbstractContextManager[Any]:
    """The context of faults that change nothing outside of the prepared program."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class PlantedFault:
    """A defect. Each family's file lists its `FAULTS`.

    A fault is put into what the technique really runs: a prepared program, operator or child process by `plant`, the compiler,
    converter or engine that the technique calls by `around`.

    Attributes:
        name: Its name in the kill table.
        summary: One sentence: what a faulty implementation does wrong.
        cells: Where it is planted.
        plant: ``plant(strength)`` gives the change to the prepared program.
        around: ``around(strength)`` gives a context that is active from before the technique prepares the program until the
            technique is finished: a patched compiler pass, converter or engine. It must not change what eager computes.
        strengths: Relative errors, shares or counts, the strongest first; a single 1 where the fault has no degrees.
        number: Number in the list of faults that a suite must catch, 1 to 43; 0 for cheats and further ones.
        technique: Name of the technique that it is planted under, or the technique itself.
        hidden: Reasons why it cannot be told from rounding, by dtype and strength (``{("bfloat16", 0.003): "..."}``): its
            documented detectability ends there. Such rows are run and shown, but do not decide the exit code.
        absent: Storage dtypes in which there is no such fault, each with the reason. A dtype that the technique and the
            workload have is planted in, hidden or absent: none is left out in silence.
        exists: Whether it applies to a device.
        emulated: Whether it is put into accelcheck's own code, which stands for the real thing: an emulation or an adapter.
        seeds: Most seeds that it is tried with, for techniques that take seconds; 0 for as many as are asked for.
        warm: Whether there is a run before the judged one, in which alone a faulty cache does not show. False for techniques
            whose evidence counts every run.
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
        name, summary, cells, plant, technique, exists: As of a `PlantedFault`; ``plant`` takes nothing.
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
    text = " ".join((documented.__doc__ or "").split())
    return f"{text.partition('. ')[0].removesuffix('.')}."


fault, variant = row(PlantedFault), row(Variant)


class Planted(Technique):
    """A technique with something planted in it. It is judged, and gives evidence, as the technique itself does.

    Args:
        base: The technique.
        change: Made to the program after the technique has prepared it.
        around: Makes the context in which the technique prepares, runs and is finished; None for none.
        warm: As of a `PlantedFault`.
    """

    def __init__(
        self,
        base: Technique,
        change: Change,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        warm: bool = True,
    ) -> None:
        self.base = base
        self.change = change
        self.around = contextlib.nullcontext if around is None else around
        self._held = contextlib.ExitStack()
        self.name, self.family, self.promise, self.source = base.name, base.family, base.promise, base.source
        self.dtypes, self.modes, self.requires, self.excludes = base.dtypes, base.modes, base.requires, base.excludes
        # A faulty cache shows only in a second run, so there are at least two.
        self.warmups, self.resizing = max(int(warm), base.warmups), base.resizing
        self.keeps_strides, self.bakes, self.level = base.keeps_strides, base.bakes, base.level
        self.differentiates_twice, self.accuracy_limit = base.differentiates_twice, base.accuracy_limit
        self.packages = base.packages

    @property
    def watch(self) -> type[Log]:  # type: ignore[override]  # a class attribute of each technique, and so of its base
        """The base's own observation."""
        return self.base.watch

    def capability(self, device: Device) -> Capability:
        return self.base.capability(device)

    def accepts(self, workload: Workload) -> bool:
        return self.base.accepts(workload)

    def admits(self, probe: Probe) -> bool:
        return self.base.admits(probe)

    def precision(self, dtype: str) -> str:
        return self.base.precision(dtype)

    @property
    def emulate(self) -> Callable[[nn.Module, tuple[Any, ...]], nn.Module]:
        """The base's own, which can be sent to another process."""
        return self.base.emulate

    @property
    def emulate_optimizer(self) -> Callable[[OptimizerMaker], OptimizerMaker]:
        """The base's own."""
        return self.base.emulate_optimizer

    @property
    def oracle(self) -> str:
        return self.base.oracle

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self._held.enter_context(self.around())
        self.base.prepare(program, mode, device)
        self.change(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        return self.base.evidence(program, log, mode, device)

    def finish(self) -> None:
        with self._held:  # the technique's own end comes first: it drops what was compiled
            self.base.finish()
