"""Ceilings of budgets: the largest budgets of the built-in cases when they were stored. No torch.

Each run measures its budgets anew, and names at its end those above their ceilings: rounding samples or a workload have
become larger.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

SCHEMA = 1
FILE = "ceilings.json"
PREFIX = "budget of "
"""Prefix of figures that compare a budget with its ceiling."""
HEADROOM = 2.0
"""Allowed ratio of a budget to its ceiling. Rounding samples follow the last bits of FP64 results, which differ between
processors; twice the largest of 6 samples is practically never exceeded."""


class CeilingError(ValueError):
    """The file of ceilings is malformed; the message names the entry."""


def key(workload: str, dtype: str, mode: str, precision: str, oracle: str) -> str:
    """The name that ceilings are stored under, common to all techniques with the same reference."""
    return f"{workload}/{dtype}/{mode}/{precision}/{oracle}"


def parsed(text: str) -> dict[str, dict[str, float]]:
    """Read ceilings, by key and view; raises `CeilingError` where they are not of the schema."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CeilingError(f"{FILE}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("ceilings"), dict):
        raise CeilingError(f"{FILE}: expected an object with 'schema': {SCHEMA} and a table 'ceilings'")
    for name, views in data["ceilings"].items():
        if name.count("/") != 4 or not isinstance(views, dict):
            raise CeilingError(f"{FILE}: {name!r}: expected workload/dtype/mode/precision/oracle and a table of views")
        for view, limit in views.items():
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
                raise CeilingError(f"{FILE}: {name!r}: {view!r} is {limit!r}; expected a finite number from 0")
    return {name: {view: float(limit) for view, limit in views.items()} for name, views in data["ceilings"].items()}


@functools.cache
def stored() -> Mapping[str, Mapping[str, float]]:
    """The ceilings of the package."""
    return parsed(resources.files("accelcheck.expectations").joinpath(FILE).read_text(encoding="utf-8"))


def written(ceilings: Mapping[str, Mapping[str, float]]) -> str:
    """The text of the file: a line for each key."""
    lines = [f"  {json.dumps(name)}: {json.dumps(dict(sorted(ceilings[name].items())))}" for name in sorted(ceilings)]
    return f'{{"schema": {SCHEMA}, "ceilings": {{\n' + ",\n".join(lines) + "\n}}\n"


def largest(budgets: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, str]]:
    """The largest budget of each view over all paths, and its path."""
    most: dict[str, tuple[float, str]] = {}
    for path, views in budgets.items():
        for view, budget in views.items():
            if view not in most or budget > most[view][0]:
                most[view] = (budget, path)
    return most


def above(
    name: str, budgets: Mapping[str, Mapping[str, float]], ceilings: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, str, float, float]]:
    """Path, view, budget and ceiling of each budget above its ceiling; none for a `key`, the name, without ceilings."""
    limits = ceilings.get(name, {})
    for view, (budget, path) in largest(budgets).items():
        if view in limits and budget > HEADROOM * limits[view]:
            yield path, view, budget, limits[view]
