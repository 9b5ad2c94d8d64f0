"""Makes one HTML file for devices, which holds all that it needs, and may load nothing else. No torch."""

import base64
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import accelcheck
from accelcheck.core.plain import text
from accelcheck.core.units import size
from accelcheck.report.advice import by_device
from accelcheck.report.causes import causes, counted, expected
from accelcheck.report.explained import explained
from accelcheck.report.html import figures, payload, tables
from accelcheck.report.html.experiments import ClaimsResult, CurveResult, seconds
from accelcheck.report.results import save
from accelcheck.report.run import BAD_FIRST, DeviceRun, labels

CHART = "vendored/chart-4.6.1.umd.min.js"
"""Chart.js, MIT licence (vendored/chart-LICENSE.md), as npm has it, without the address of its source map.

It draws on a canvas, so names from journals never meet a parser of HTML. It needs no eval and no inline style, so it
works under the policy below. It has logarithmic axes, and is 200 KiB. Vega compiles with eval, Observable Plot and
Plotly add style elements.
"""
SHOWN = 40
"""Most cases that a cause lists in the static part; the script's list has them all."""
SYMBOLS = {
    "device-lost": "⊘", "crash": "⊗", "hang": "∞", "error": "!",
    "fail": "✗", "flaky": "≈", "xpass": "⁈", "xfail": "↓",
    "waived": "∅", "pass": "✓", "unsupported": "\N{EN DASH}", "unavailable": "○",
}  # fmt: skip
"""Signs of the verdicts, beside the words, so that colour is not the only sign."""


def write(
    path: Path, runs: Sequence[DeviceRun], curves: Sequence[CurveResult] = (), claims: Sequence[ClaimsResult] = ()
) -> None:
    """Write the report by `save`, with compile curves and claims tables of these or other devices."""
    save(path, document(runs, curves, claims))


def document(runs: Sequence[DeviceRun], curves: Sequence[CurveResult] = (), claims: Sequence[ClaimsResult] = ()) -> str:
    """Render the report as text."""
    names = labels(runs)
    model = _model(runs, names)
    wrong, known = causes(runs), expected(runs)
    speed, memory = figures.tradeoffs(runs, names), figures.memory(runs, names)
    places = {name: place for place, name in enumerate(names)}
    of_case: dict[tuple[int, str], list[int]] = defaultdict(list)  # a case that shows two causes stands under both
    for number, cause in enumerate(wrong):
        for label, record in cause.cases:
            of_case[places[label], record.case.id].append(number)
    plots = {
        "symbols": SYMBOLS,
        "tradeoffs": [asdict(item) for item in speed],
        "memory": [asdict(item) for item in memory],
        "curves": [_curve(item) for item in curves],
        "causes": [_plain(cause.title) for cause in wrong],
    }
    index, details = payload.blocks(runs, names, of_case, plots)
    style, script, chart = _own("templates/report.css"), _own("templates/report.js"), _own(CHART)
    return _template().render(
        names=names,
        runs=runs,
        model=model,
        standings=[] if model else [tables.standing(run, name) for run, name in zip(runs, names, strict=True)],
        causes=wrong,
        counted=counted,
        explained=explained(runs, wrong),
        known=known,
        matrix=tables.matrix(runs),
        speed=speed,
        memory=memory,
        curves=curves,
        claims=claims,
        index=Markup(index),  # noqa: S704 - base64; and whole, not cut as texts are
        details=[Markup(block) for block in details],  # noqa: S704 - base64
        verdicts=[str(verdict) for verdict in BAD_FIRST],
        symbols=SYMBOLS,
        most=SHOWN,
        version=accelcheck.__version__,
        style=style,
        script=script,
        chart=chart,
        policy=f"default-src 'none'; script-src {_hash(chart)} {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'",
    )


def _model(runs: Sequence[DeviceRun], names: Sequence[str]) -> dict[str, Any] | None:
    """Model and advice for each device, which open the report of one user-owned model; None for other reports."""
    specs = {model.spec for run in runs for model in run.models.values()}
    workloads = [record.case.workload in run.models for run in runs for record in run.records]
    if len(specs) != 1 or not workloads or not all(workloads):
        return None
    models = {name: model for run in runs for name, model in run.models.items()}
    parts = [(label, part) for run, label in zip(runs, names, strict=True) for part in by_device(run.records)]
    return {"name": min(models), "model": models[min(models)], "advice": parts}


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("accelcheck.report.html"),
        autoescape=True,  # each value, whatever the file is named
        undefined=jinja2.StrictUndefined,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "plain": _plain,
        "seconds": seconds,
        "size": lambda count: size(int(count)),
        "number": lambda value: f"{value:,}",
        "figure": lambda value: "" if value is None else f"{value:.3g}",
        "lines": lambda value, most: _cut(str(value), most),
    }
    return environment.get_template("report.html")


def _plain(value: Any) -> Any:
    """Escape unprintable characters: control characters, and those that turn the direction of a text."""
    return text(value, payload.MOST_REASON) if type(value) is str else value


def _cut(value: str, most: int) -> str:
    """Cut a text to its first lines, and count the rest."""
    lines = value.splitlines()
    return "\n".join([*lines[:most], *([f"... {len(lines) - most} more lines"] if len(lines) > most else [])])


def _own(name: str) -> Markup:
    """Read a file of this package as it is."""
    content = (resources.files("accelcheck.report.html") / name).read_text("utf-8")
    return Markup(content)  # noqa: S704 - accelcheck's own files


def _hash(content: str) -> str:
    """Source of a Content-Security-Policy that allows exactly this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode('utf-8')).digest()).decode('ascii')}'"


def _curve(result: CurveResult) -> dict[str, Any]:
    points = sorted(result.points, key=lambda point: (point.form, point.shapes, point.count))
    return {
        "device": _plain(f"{result.fingerprint.device}: {result.fingerprint.chip}"),
        "points": [
            {"count": point.count, "series": _plain(f"{point.form}, {point.shapes} shapes")}
            | {name: getattr(point, name) for name in ("ratio", "low", "high")}
            for point in points
        ],
    }
