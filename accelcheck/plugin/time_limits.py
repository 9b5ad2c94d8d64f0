"""Passes time limits of cases from the processes that have the matrix, such as workers, to the controller. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core.case import Case, seconds_of
from accelcheck.core.files import replacing

if TYPE_CHECKING:
    from accelcheck.techniques.matrix import Matrix

_NAME = "limits.json"


def write(folder: Path, matrix: Matrix, cases: Iterable[Case]) -> None:
    """Writes the limits of these cases to the folder of the run, unless another worker has."""
    path = folder / _NAME
    if path.exists():
        return
    limits = {case.id: seconds_of(case.level, matrix.techniques[case.technique].patience) for case in cases}
    with replacing(path, durable=False) as file:
        file.write(json.dumps(limits).encode("ascii"))


def read(folder: Path) -> Mapping[str, float]:
    """Time limits of a run of a case in seconds, by the case's id; empty until a process has collected."""
    try:
        limits: Mapping[str, float] = json.loads((folder / _NAME).read_bytes())
    except FileNotFoundError:
        return {}
    return limits
