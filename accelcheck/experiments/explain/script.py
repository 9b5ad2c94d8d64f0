"""A script of one wrong operator: it needs torch alone, prints measured against allowed, and exits with 1 while the fault is there."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.experiments.explain import tensor_file
from accelcheck.experiments.explain.calls import aside, memory
from accelcheck.experiments.explain.smallest import SEED, elements
from accelcheck.verify.precision import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF
from accelcheck.verify.views import NEGLIGIBLE, OUTLIERS, TAIL, TILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from accelcheck.core.case import Figure
    from accelcheck.experiments.explain.calls import OperatorCall
    from accelcheck.experiments.explain.smallest import Smallest

LINES = 40
"""A script has no more."""
LITERAL = 24
"""Numbers that are written into the script; more go into a file beside it."""

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
        f"tiles = lambda x: [sum(v * v for i, v in enumerate(x) if (i // width // {TILE}, i % width // {TILE}) == p) for p in places]",
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
"""How each view is computed, simplest first: see `accelcheck.verify.views`. In Python, so that no kernel under test measures itself."""
_COUNTS = {
    "values": "measured = sum(a != b and not (a != a and b != b) for a, b in zip(g, nearest))",
    "integers": "measured = sum(a != b for a, b in zip(g, nearest))",
    "pattern": "measured = sum((a != a, abs(a) == math.inf and a) != (b != b, abs(b) == math.inf and b) for a, b in zip(g, nearest))",
    "shape": "measured = int(list(got.shape) != shape)",
}


class OperatorScript:
    """The text of a script, and what goes into a file beside it.

    Args:
        smallest: The operator.
        device: Name of the torch device that it runs on.
        title: First line: what it shows.
        imports: Modules to import: what else makes the device exist.
    """

    def __init__(self, smallest: Smallest, device: str, title: str, imports: Sequence[str] = ()) -> None:
        self.smallest = smallest
        self.device = device
        self.title = title
        self.imports = imports
        self.data: dict[str, Tensor] = {}
        self.path, self.view, self.allowed = _telling(smallest)

    def text(self, file: str) -> str:
        """The script. `file` is the name of the file that `data` is written to, where there is any."""
        call = self.smallest.call
        inputs, truth = [*self._inputs()], self._truth()
        lines = [
            f'"""{self.title}"""',
            *(["import json"] if self.data else []),
            *(["import math"] if self.view == "pattern" else []),
            "import sys",
            "import torch",
            f'device = "{self.device}"',
            *([f"dtype = {self._dtype()}"] if self.view not in {*_VIEWS, "shape"} else []),
            *(tensor_file.reading(file) if self.data else ()),
            *inputs,
            *truth,
            *_listing(self.view),
            *(f"import {name}  # after FP64: what it changes is under test" for name in self.imports),
            *self._moves(),
            *_picked(call, self.path, "t"),
            "g = flat(got.cpu().tolist())",
            *(_NUMERIC if self.view in _VIEWS else ()),
            *self._measure(),
            f"allowed = {self.allowed!r}  # {self._why()}",
            f'print(f"{call.func.name()}: {self._what()} measured {{measured:.3e}}, allowed {{allowed:.3e}}, torch {{torch.__version__}}")',
            "sys.exit(0 if measured <= allowed else 1)",
        ]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the script, and its data beside it."""
        data = path.with_suffix(".safetensors")
        text = self.text(data.name)
        if self.data:
            data.write_bytes(tensor_file.packed(self.data))
        path.write_text(text, encoding="utf-8")

    def _inputs(self) -> Iterator[str]:
        """Lines that make the list `t` of the operator's tensors, in order."""
        call, values = self.smallest.call, self.smallest.values
        few = elements(call) <= LITERAL
        if values == "normal":
            yield f"g = torch.Generator().manual_seed({SEED})"
        yield "t = []"
        for number, one in enumerate(call.tensors()):
            plain = one.is_contiguous() and not one.storage_offset()
            with aside():
                held = (one.reshape(-1) if plain else memory(one)).detach().cpu()
            dtype = str(one.dtype)
            shape = list(one.shape) if plain else [held.numel()]
            if one.is_floating_point() and values == "ones":
                made = f"torch.ones({shape}, dtype={dtype})"
            elif one.is_floating_point() and values == "normal":
                made = f"torch.randn({shape}, generator=g).to({dtype})"
            elif few:
                made = f"torch.tensor({_list(held)}, dtype={dtype}).reshape({shape})"
            else:
                self.data[f"t{number}"] = held.clone()
                made = f'read("t{number}").reshape({shape})'
            if not plain:
                made += f".as_strided({list(one.shape)}, {list(one.stride())}, {one.storage_offset()})"
            yield f"t.append({made})"

    def _moves(self) -> Iterator[str]:
        """Lines that move the tensors to the device, in their strides."""
        for number, one in enumerate(self.smallest.call.tensors()):
            if one.device.type == "cpu":
                continue
            if one.is_contiguous() and not one.storage_offset():
                yield f"t[{number}] = t[{number}].to(device)"
            else:
                view = f"{list(one.shape)}, {list(one.stride())}, {one.storage_offset()}"
                yield f"t[{number}] = t[{number}].as_strided([{memory(one).numel()}], [1], 0).to(device).as_strided({view})"

    def _truth(self) -> list[str]:
        """Lines that make `truth`: by the operator itself in FP64 on the CPU where it has such a kernel, else from the file."""
        with aside():
            wide = self.smallest.call.widened()
            try:
                copy = wide.kept()
                has_kernel = self.path in copy.results(copy.run())
            except Exception:  # noqa: BLE001 - no such kernel: whatever it raises
                has_kernel = False
        if has_kernel:
            lines = _picked(wide, self.path, "w")
            lines[-1] = lines[-1].replace("got =", "truth =")
            return ["w = [one.double() if one.is_floating_point() else one.clone() for one in t]", *lines]
        reference = next(iter(self.smallest.finding.references.values()))
        self.data["truth"] = reference.truth[self.path]
        shape = list(reference.truth[self.path].shape)
        return [f'truth = read("truth").reshape({shape})  # FP64, of its parts: the CPU has no such operator']

    def _measure(self) -> list[str]:
        if self.view not in _VIEWS:
            return [_COUNTS[self.view]]
        dtype = self._precision()
        numbers = {
            "unit": UNIT_ROUNDOFF.get(dtype, 0.0),
            "spacing": SMALLEST_SUBNORMAL.get(dtype, 0.0),
            "part": NEGLIGIBLE,
        }
        if self.view == "tail":
            return [line.format(**numbers) for line in _VIEWS["tail"]]
        return _VIEWS[self.view]

    def _dtype(self) -> torch.dtype:
        """Of the result that is measured."""
        with aside():
            copy = self.smallest.call.kept()
        return copy.results(copy.run())[self.path].dtype

    def _precision(self) -> str:
        return next(iter(self.smallest.finding.judged), "float32")

    def _what(self) -> str:
        return (
            f"{self.path}, {self.view}:" if self.view in _VIEWS else f"{self.path}, elements that differ ({self.view}):"
        )

    def _why(self) -> str:
        if self.view in _VIEWS:
            return f"twice what FP64 with random rounding errors of {self._precision()} shows"
        return "the operator does not round, or a number must not turn into another kind"


def _telling(smallest: Smallest) -> tuple[str, str, float]:
    """Path, view and budget of the fault that the script measures: of the simplest view that shows it."""
    figures: list[Figure] = [
        figure
        for judgement in smallest.finding.judged.values()
        for figure in judgement.figures
        if figure.gates and not figure.within and math.isfinite(figure.allowed)
    ]
    order = list(_VIEWS)
    if figures:
        figure = min(figures, key=lambda one: (order.index(one.view), -one.used))
        return figure.path, figure.view, figure.allowed
    fault = smallest.finding.faults[0]
    path = re.sub(r"(?<=[\w\]])\[[\d, ]*\]$", "", fault.path) if fault.what == "value" else fault.path
    if "pattern" in fault.what:
        return path, "pattern", 0.0
    if fault.what in {"value", "shape"}:
        return path, {"value": "integers"}.get(fault.what, fault.what), 0.0
    return path, "values", 0.0


def _expression(call: OperatorCall, name: str) -> str:
    """The call as source: its tensors are those of the list `name`, in order."""
    counted = itertools.count()

    def said(one: Any) -> str:
        if isinstance(one, Tensor):
            return f"{name}[{next(counted)}]"
        if isinstance(one, (list, tuple)):
            return f"[{', '.join(map(said, one))}]"
        if isinstance(one, torch.device):
            return '"cpu"' if one.type == "cpu" else "device"
        if isinstance(one, float) and not math.isfinite(one):
            return f'float("{one}")'
        return repr(one)

    words = [said(one) for one in call.args] + [f"{key}={said(one)}" for key, one in call.kwargs.items()]
    namespace, _, rest = call.func.name().partition("::")
    operator, _, overload = rest.partition(".")
    return f"torch.ops.{namespace}.{operator}.{overload or 'default'}({', '.join(words)})"


def _picked(call: OperatorCall, path: str, name: str) -> list[str]:
    """Lines that run the call and take one of its results as `got`: what it returned, or the argument that it wrote to."""
    written = dict(call.written())
    if path not in written:
        return [f"got = {_expression(call, name)}{path.removeprefix('out')}"]
    number = next(place for place, one in enumerate(call.tensors()) if one is written[path])
    return [_expression(call, name), f"got = {name}[{number}]"]


_NUMERIC = (
    "e, width = [a - b for a, b in zip(g, o)], got.shape[-1] if got.dim() else 1",
    "rms = (sum(b * b for b in o) / len(o)) ** 0.5 or 5e-324",
)


def _listing(view: str) -> list[str]:
    """Lines that make a list of what is expected."""
    flat = "flat = lambda x: [v for one in x for v in flat(one)] if isinstance(x, list) else [x]"
    if view == "shape":
        return [flat, "shape = list(truth.shape)"]
    return [flat, "o = flat(truth.tolist())" if view in _VIEWS else "nearest = flat(truth.to(dtype).tolist())"]


def _list(held: Tensor) -> str:
    numbers = held.tolist()
    said = [f'float("{one}")' if isinstance(one, float) and not math.isfinite(one) else repr(one) for one in numbers]
    return f"[{', '.join(said)}]"
