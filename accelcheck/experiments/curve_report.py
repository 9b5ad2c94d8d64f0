"""The compile curve as text, as JSON, and as a picture, which needs matplotlib, an optional dependency. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

from accelcheck.core.capability import Capability
from accelcheck.devices.packages import requires
from accelcheck.measure.curve import COLUMNS, FIXED_ROWS, ROWS, BreakEven, Form, Gap, Point, Shapes, break_even
from accelcheck.report.console import Table

SIZES = {Shapes.FIXED: f"{FIXED_ROWS} x {COLUMNS}", Shapes.VARYING: f"{ROWS[0]} to {ROWS[-1]} x {COLUMNS}"}
_HEAD = ("statements", "form", "eager us", "compiled us", "time / eager's", "graphs", "first pass s", "paid back after")


def text(found: Sequence[Point | Gap], limit: int) -> list[str | Table]:
    """The report of a device as text: a table per kind of shapes, gaps with their reasons, and break-even points.

    `limit` is the most graphs of one function that torch compiles by default.
    """
    lines: list[str | Table] = []
    for shapes in Shapes:
        points = [point for point in found if isinstance(point, Point) and point.shapes is shapes]
        if points:
            lines += ["", f"{shapes} shapes: {SIZES[shapes]}, FP32, inference", _table(points)]
    absent = sorted({f"{gap.form}: {gap.reason}{_places(found, gap)}" for gap in found if isinstance(gap, Gap)})
    lines += ["", "Not measured", *absent] if absent else []
    crossings = [f"{form}, {shapes} shapes: {crossing(at)}" for form, shapes, at in _broken_even(found)]
    return [*lines, "", "Break-even", *crossings, "", *_notes(found, limit)]


def crossing(at: BreakEven) -> str:
    """A break-even point in words."""
    if at.last is None:
        return "not measured"
    if at.faster is None:
        return f"none up to {at.last} statements"
    if at.slower is None:
        return f"faster at every count from {at.faster} on; none was certainly slower"
    about = "" if at.estimate is None else f", about {at.estimate:.1f} by interpolation"
    return f"between {at.slower} statements (slower) and {at.faster} (faster){about}"


def as_json(found: Sequence[Point | Gap], limit: int) -> dict[str, Any]:
    """JSON-ready values: points and gaps in ascending order of counts, and the break-even points by name."""
    ordered = sorted(found, key=lambda point: (point.count, point.shapes, point.form))
    return {
        "columns": COLUMNS,
        "rows": {"fixed": [FIXED_ROWS], "varying": list(ROWS)},
        "recompile_limit": limit,
        "points": [{**asdict(p), "repaid_after_calls": p.repaid} for p in ordered if isinstance(p, Point)],
        "gaps": [asdict(gap) for gap in ordered if isinstance(gap, Gap)],
        "break_even": {f"{form}, {shapes} shapes": asdict(at) for form, shapes, at in _broken_even(found)},
    }


def _table(points: Sequence[Point]) -> Table:
    lazy = any(point.programs is not None for point in points)
    head = (*_HEAD[:6], "XLA programs", *_HEAD[6:]) if lazy else _HEAD
    rows: list[tuple[str, ...]] = []
    for point in sorted(points, key=lambda point: (point.form != Form.STATIC, point.count)):
        cells = [
            str(point.count),
            str(point.form),
            f"{point.eager * 1e6:.2f}",
            f"{point.seconds * 1e6:.2f}",
            f"{point.ratio:.3f} ({point.low:.3f} to {point.high:.3f})",
            str(point.graphs),
            f"{point.first:.3f}",
            "never" if point.repaid is None else f"{point.repaid} calls",
        ]
        rows.append((*cells[:6], str(point.programs), *cells[6:]) if lazy else tuple(cells))
    return Table(head, rows, right=range(len(head)))


def _broken_even(found: Sequence[Point | Gap]) -> Iterator[tuple[Form, Shapes, BreakEven]]:
    for form, shapes in product(Form, Shapes):
        points = [p for p in found if isinstance(p, Point) and p.form is form and p.shapes is shapes]
        yield form, shapes, break_even(points)


def _places(found: Sequence[Point | Gap], gap: Gap) -> str:
    """Counts and shapes that a gap's reason holds for; empty if it holds wherever the form was tried."""
    tried = [point for point in found if point.form is gap.form]
    alike = [other for other in tried if isinstance(other, Gap) and other.reason == gap.reason]
    if len(alike) == len(tried):
        return ""
    return " (" + ", ".join(f"{point.count} statements, {point.shapes} shapes" for point in alike) + ")"


def _notes(found: Sequence[Point | Gap], limit: int) -> Iterator[str]:
    yield (
        "Each call takes the next of several inputs. The first pass is one call with each of them, compilation with "
        "empty caches included; a form is paid back when the time saved by later calls equals the first pass's extra "
        "time."
    )
    graphs = max((point.graphs for point in found if isinstance(point, Point)), default=0)
    if graphs > limit:
        yield (
            f"Static compilation makes a graph for each shape. By default torch stops at {limit} graphs of one "
            "function and runs other shapes eagerly (recompile_limit); this measurement raised the limit."
        )
    if any(isinstance(point, Point) and point.programs == 0 for point in found):
        yield (
            "XLA caches programs by content: a form with 0 programs reused those of the form before it, and its first "
            "pass is shorter by their compilation."
        )


_COLOURS = {Form.STATIC: "#0072b2", Form.DYNAMIC: "#d55e00"}
"""Colours of Okabe and Ito's palette, distinct with colour-blindness."""


def available() -> Capability:
    """Capability of drawing pictures: supported where matplotlib is installed."""
    return requires("matplotlib", 'pip install "accelcheck[plot]"')


def draw(path: Path, found: Sequence[Point | Gap], title: str) -> None:
    """Draw ratios with intervals over the number of statements, a panel per kind of shapes; shades break-even ranges.

    The file is a PNG; it raises an `OSError` where it cannot be written. Gaps are not drawn. The title is the device.
    """
    # Not pyplot, which looks for a screen and keeps every figure.
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(1, len(Shapes), sharey=True)
    for panel, shapes in zip(panels, Shapes, strict=True):
        points = [point for point in found if isinstance(point, Point) and point.shapes is shapes]
        panel.set_title(f"{shapes} shapes: {SIZES[shapes]}", fontsize=10)
        panel.set_xlabel("element-wise statements")
        panel.axhline(1.0, color="black", linewidth=1)
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(import_module("matplotlib.ticker").StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(import_module("matplotlib.ticker").NullFormatter())
        panel.grid(visible=True, which="both", alpha=0.25)
        for form in Form:
            _curve(panel, form, [point for point in points if point.form is form])
        if points:
            panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    panels[0].set_ylabel("time as a part of eager's (below 1: faster)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, format="png", dpi=120)


def _curve(panel: Any, form: Form, points: list[Point]) -> None:
    if not points:
        return
    points.sort(key=lambda point: point.count)
    counts = [point.count for point in points]
    colour = _COLOURS[form]
    at = break_even(points)
    panel.plot(counts, [point.ratio for point in points], "o-", color=colour, label=f"{form}: {crossing(at)}")
    low, high = [point.low for point in points], [point.high for point in points]
    panel.fill_between(counts, low, high, color=colour, alpha=0.25, linewidth=0)
    if at.slower is not None and at.faster is not None:
        panel.axvspan(at.slower, at.faster, color=colour, alpha=0.08, linewidth=0)
