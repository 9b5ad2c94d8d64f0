"""The compile curve as a picture. Needs matplotlib, an optional dependency. No torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from accelcheck.devices.packages import requires
from accelcheck.experiments.curve_report import SIZES, crossing
from accelcheck.measure.curve import Form, Point, Shapes, break_even

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from accelcheck.core.capability import Capability
    from accelcheck.measure.curve import Gap

_COLOURS = {Form.STATIC: "#0072b2", Form.DYNAMIC: "#d55e00"}
"""Of Okabe and Ito's palette, whose colours can be told apart with colour-blindness."""


def available() -> Capability:
    """Whether pictures can be drawn."""
    return requires("matplotlib", 'pip install "accelcheck[plot]"')


def draw(path: Path, found: Sequence[Point | Gap], title: str) -> None:
    """Draw ratios with intervals over the number of statements, in one panel per kind of shapes, with the break-even range shaded.

    Args:
        path: PNG file, in a folder that exists.
        found: Points and gaps of one device; gaps are not drawn.
        title: Title of the figure: the device.

    Raises:
        OSError: The file cannot be written.
    """
    # Not pyplot, which looks for a screen and keeps every figure.
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(1, len(Shapes), sharey=True)
    for panel, shapes in zip(panels, Shapes, strict=True):
        points = [one for one in found if isinstance(one, Point) and one.shapes is shapes]
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
    panel.fill_between(
        counts, [point.low for point in points], [point.high for point in points], color=colour, alpha=0.25, linewidth=0
    )
    if at.slower is not None and at.faster is not None:
        panel.axvspan(at.slower, at.faster, color=colour, alpha=0.08, linewidth=0)
