"""How long each case may take: written where the matrix is known, which workers know, and read by the controller. No torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from accelcheck.core.case import seconds_of
from accelcheck.core.files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from accelcheck.core.case import Case
    from accelcheck.techniques.matrix import Matrix

_NAME = "limits.json"


def write(folder: Path, matrix: Matrix, cases: Iterable[Case]) -> None:
    """Leave the limits of these cases in the folder of the run, unless another worker has."""
    path = folder / _NAME
    if path.exists():
        return
    found = {case.id: seconds_of(case.level, matrix.techniques[case.technique].patience) for case in cases}
    with replacing(path, durable=False) as file:
        file.write(json.dumps(found).encode("ascii"))


def read(folder: Path) -> Mapping[str, float]:
    """Seconds that a run of a case may take, by the case's id; nothing as long as nobody has collected."""
    try:
        found: Mapping[str, float] = json.loads((folder / _NAME).read_bytes())
    except FileNotFoundError:
        return {}
    return found
