"""Writes a script of a wrong operator that needs torch alone, and exits with 1 while the fault is there."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from accelcheck.core.case import Figure
from accelcheck.core.fault import FaultKind
from accelcheck.explain.budgets import OperatorFinding
from accelcheck.explain.parts import SmallestPart
from accelcheck.explain.smallest import RUNS, Smallest, SmallestRuns
from accelcheck.explain.source import DATA, NotWrittenError, Tensors, head, written
from accelcheck.explain.subjects import OperatorSubject, PartSubject
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.reference import Reference
from accelcheck.verify.views import NEGLIGIBLE, OUTLIERS, TAIL, TILE

LINES = 40
"""Most lines of a script."""

_VIEWS = {
    "element": ["measured = max(map(abs, e)) / rms"],
    "row": [
        "rows = lambda x: [sum(v * v for v in x[i:i + width]) for i in range(0, len(x), width)]",
        "sizes = rows(o)",
        "measured = max((a / (b + sum(sizes) / len(sizes))) ** 0.5 for a, b in zip(rows(e), sizes))",
    ],
    "column": [
        "columns = lambda x: [sum(v * v for v in x[i::width]) for i in range(width)]",
        "sizes = columns(o)",
        "measured = max((a / (b + sum(sizes) / len(sizes))) ** 0.5 for a, b in zip(columns(e), sizes))",
    ],
    "block": [
        f"places = sorted({{(i // width // {TILE}, i % width // {TILE}) for i in range(len(o))}})",
        (
            "tiles = lambda x: [sum(v * v for i, v in enumerate(x) "
            f"if (i // width // {TILE}, i % width // {TILE}) == p) for p in places]"
        ),
        "sizes = tiles(o)",
        "measured = max((a / (b + sum(sizes) / len(sizes))) ** 0.5 for a, b in zip(tiles(e), sizes))",
    ],
    "gain": ["measured = abs(sum(a * b for a, b in zip(e, o))) / sum(b * b for b in o)"],
    "tail": [
        "ulps = [max(2 * {unit!r} * max(abs(b), {part!r} * rms), {spacing!r}) for b in o]",
        "sizes = sorted(abs(a) / u for a, b, u in zip(e, o, ulps) if b)",
        f"measured = sizes[max(len(sizes) // 2, min(int({TAIL} * len(sizes)), len(sizes) - 1 - {OUTLIERS}))]",
    ],
}
"""Lines that compute each view of `accelcheck.verify.views`, simplest first; in Python, not in kernels under test."""
_COUNTS = {
    "values": "measured = sum(a != b and not (a != a and b != b) for a, b in zip(g, nearest))",
    "integers": "measured = sum(a != b for a, b in zip(g, nearest))",
    "pattern": (
        "measured = sum((a != a, abs(a) == math.inf and a) != (b != b, abs(b) == math.inf and b) "
        "for a, b in zip(g, nearest))"
    ),
    "shape": "measured = int(list(got.shape) != shape)",
    "dtype": "measured = int((got.is_floating_point() or got.dtype) != kind)",
}
_METADATA = {"shape": "shape = list(truth.shape)", "dtype": "kind = truth.is_floating_point() or truth.dtype"}


class Subject(Protocol):
    """The subject of a script: the operator's name, which the script prints, its tensors, and the judgement."""

    name: str
    tensors: Tensors
    finding: OperatorFinding

    def truth(self, path: str) -> list[str]:
        """Lines that compute `truth` from the list ``t``, in FP64 on the CPU; may add to the data of `tensors`."""

    def calls(self, path: str) -> list[str]:
        """Lines that make `got` from the tensors of ``t``, which are on the device."""

    def dtype(self, path: str) -> torch.dtype:
        """Dtype of the result."""


class FaultScript:
    """The text of a script, and the data of a file beside it.

    The title is its first line, and `imports` are modules without which the device does not exist. A `NotWrittenError`
    where it needs more than `LINES` lines.
    """

    def __init__(self, subject: Subject, device: str, title: str, imports: Sequence[str] = ()) -> None:
        self.subject, self.device, self.title, self.imports = subject, device, title, imports
        self.data = subject.tensors.data
        self.path, self.view, self.allowed = _telling(subject.finding)

    def text(self, file: str) -> str:
        """Text of the script, which reads `data` from `file`."""
        lines = self._lines(file, packed=False)
        if len(lines) > LINES:
            lines = self._lines(file, packed=True)
        if len(lines) > LINES:
            raise NotWrittenError(f"it would have {len(lines)} lines, more than {LINES}")
        return "\n".join(lines) + "\n"

    def _lines(self, file: str, *, packed: bool) -> list[str]:
        """Lines of the script; `packed` makes and moves all tensors in one line each."""
        subject = self.subject
        inputs, truth = _packed(subject.tensors.made(), packed=packed), subject.truth(self.path)
        what = self.view if self.view in _VIEWS else f"elements that differ ({self.view})"
        modules = [*(["math"] if self.view in {*_VIEWS, "pattern"} else []), "sys", "torch"]
        return [
            *head(self.title, modules, self.device, self.data, file),
            *([f"dtype = {subject.dtype(self.path)}"] if self.view not in {*_VIEWS, *_METADATA} else []),
            *inputs,
            *truth,
            *_listing(self.view),
            *(f"import {name}  # after FP64: what it changes is under test" for name in self.imports),
            *_packed(subject.tensors.moved(), packed=packed),
            *subject.calls(self.path),
            "g = flat(got.cpu().tolist())",
            *(_NUMERIC if self.view in _VIEWS else ()),
            *self._measure(),
            f"allowed = {self.allowed!r}  # {self._why()}",
            (
                f'print(f"{subject.name}: {self.path}, {what}: measured {{measured:.3e}}, allowed {{allowed:.3e}}, '
                'torch {torch.__version__}")'
            ),
            "sys.exit(0 if measured <= allowed else 1)",
        ]

    def write(self, path: Path) -> None:
        """Write the script, and its data beside it."""
        written(path, self.text(path.with_suffix(DATA).name), self.data)

    def _measure(self) -> list[str]:
        if self.view not in _VIEWS:
            return [_COUNTS[self.view]]
        if self.view == "tail":
            reference = self._judged()[1]
            numbers = {"unit": reference.unit, "spacing": reference.spacing, "part": NEGLIGIBLE}
            return [line.format(**numbers) for line in _VIEWS["tail"]]
        return _VIEWS[self.view]

    def _judged(self) -> tuple[str, Reference]:
        """Dtype of the result, and the reference that it was judged by."""
        finding = self.subject.finding
        return next((dtype, known) for dtype, known in finding.references.items() if self.path in known.truth)

    def _why(self) -> str:
        if self.view in _VIEWS:
            return f"twice what FP64 with random rounding errors of {self._judged()[0]} shows"
        return "the operator does not round, or a number must not turn into another kind"


class RunsScript:
    """Script like `FaultScript`, of an operator whose errors point one way in several calls.

    A `NotWrittenError` where the operator has no kernel in FP64 on the CPU.
    """

    def __init__(self, smallest: SmallestRuns, device: str, title: str, imports: Sequence[str] = ()) -> None:
        self.subject = OperatorSubject(Smallest(smallest.call, OperatorFinding(), smallest.values, 0))
        self.smallest, self.device, self.title, self.imports = smallest, device, title, imports
        if not self.subject.has_kernel(smallest.figure.path):
            raise NotWrittenError("the operator has no kernel in FP64 on the CPU")

    def write(self, path: Path) -> None:
        """Write the script, and its data beside it."""
        made = [*self.subject.tensors.made("seed")]
        written(path, "\n".join(self._lines(made, path.with_suffix(DATA).name)) + "\n", self.subject.tensors.data)

    def _lines(self, made: Sequence[str], file: str) -> list[str]:
        subject, figure = self.subject, self.smallest.figure
        view = figure.view.partition(" ")[0]
        why = f"twice the largest mean of FP64 with random rounding errors of {self.smallest.precision}"
        exact, what = subject.truth(figure.path), f"{subject.name}: {figure.path}, {view} in {RUNS} calls"
        return [
            *head(self.title, ("sys", "torch"), self.device, subject.tensors.data, file),
            "def make(seed):",
            *(f"    {line}" for line in (*made, "return t")),
            "def exact(t):",
            *(f"    {line}" for line in (*exact, "return truth")),
            *_listing("gain")[:1],
            f"inputs = [make(seed) for seed in range({RUNS})]",
            "truths = [flat(exact(t).tolist()) for t in inputs]",
            *(f"import {name}  # after FP64: what it changes is under test" for name in self.imports),
            "signed = []",
            "for t, o in zip(inputs, truths):",
            *(f"    {line}" for line in (*subject.tensors.moved(), *subject.calls(figure.path))),
            "    e = [a - b for a, b in zip(flat(got.cpu().tolist()), o)]",
            *(f"    {line}" for line in self._signed(view)),
            "measured = abs(sum(signed)) / len(signed) if min(signed) > 0 or max(signed) < 0 else 0.0",
            f"allowed = {figure.allowed!r}  # {why}",
            f'print(f"{what}: measured {{measured:.3e}}, allowed {{allowed:.3e}}, torch {{torch.__version__}}")',
            "sys.exit(0 if measured <= allowed else 1)",
        ]

    def _signed(self, view: str) -> list[str]:
        if view == "gain":
            return ["signed.append(sum(a * b for a, b in zip(e, o)) / sum(b * b for b in o))"]
        rms, ulps = _NUMERIC[-1], _VIEWS["tail"][0].format(**_numbers(self.smallest.precision))
        return [rms, ulps, "signed.append(sorted(a / u for a, b, u in zip(e, o, ulps) if b)[sum(map(bool, o)) // 2])"]


def script_of(
    smallest: Smallest | SmallestRuns | SmallestPart, device: str, title: str, imports: Sequence[str] = ()
) -> FaultScript | RunsScript:
    """Make the script of an explanation, by arguments of `FaultScript`; a `NotWrittenError` where there can be none."""
    if isinstance(smallest, SmallestRuns):
        return RunsScript(smallest, device, title, imports)
    subject = PartSubject(smallest) if isinstance(smallest, SmallestPart) else OperatorSubject(smallest)
    return FaultScript(subject, device, title, imports)


def _numbers(precision: str) -> dict[str, float]:
    """Numbers of a precision for the views of units in the last place."""
    unit, spacing = UNIT_ROUNDOFF.get(precision, 0.0), SMALLEST_SUBNORMAL.get(precision, 0.0)
    return {"unit": unit, "spacing": spacing, "part": NEGLIGIBLE}


def _telling(finding: OperatorFinding) -> tuple[str, str, float]:
    """Path, view and budget of the fault that the script measures, in the simplest view that shows it."""
    figures: list[Figure] = [
        figure
        for judgement in finding.judged.values()
        for figure in judgement.figures
        if figure.gates and not figure.within and math.isfinite(figure.allowed)
    ]
    order = list(_VIEWS)
    if figures:
        figure = min(figures, key=lambda figure: (order.index(figure.view), -figure.used))
        return figure.path, figure.view, figure.allowed
    fault = finding.faults[0]
    if fault.kind is FaultKind.VALUE:
        return fault.path, "values" if fault.view else "integers", 0.0
    return fault.path, fault.view if fault.kind is FaultKind.METADATA else "pattern", 0.0


def _packed(lines: Iterable[str], *, packed: bool) -> list[str]:
    return ["; ".join(lines)] if packed else [*lines]


_NUMERIC = (
    "pairs = [(a, b) if math.isfinite(a) and math.isfinite(b) else (0.0, 0.0) for a, b in zip(g, o)]",
    "e, o, width = [a - b for a, b in pairs], [b for _, b in pairs], got.shape[-1] if got.dim() else 1",
    "rms = (sum(b * b for b in o) / len(o)) ** 0.5 or 5e-324",
)


def _listing(view: str) -> list[str]:
    """Lines that make a list of the expected numbers."""
    flat = "flat = lambda x: [v for one in x for v in flat(one)] if isinstance(x, list) else [x]"
    if view in _METADATA:
        return [flat, _METADATA[view]]
    return [flat, "o = flat(truth.tolist())" if view in _VIEWS else "nearest = flat(truth.to(dtype).tolist())"]
