"""Where the explanations of a run are: texts and scripts in a folder beside its journal, by case. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.core.files import file_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.report.causes import Cause
    from accelcheck.report.run import DeviceRun

MOST = 64 * 1024
"""Bytes of a text that are read: the folder may be a stranger's."""


def folder_of(journal: Path) -> Path:
    """The folder of a journal's explanations."""
    return journal.with_name(f"{journal.stem}-explained")


def text_of(folder: Path, case: str) -> Path:
    """The file with the explanation of a case; the script has its name, with ``.py``."""
    return folder / f"{file_name(case)}.txt"


def explained(runs: Sequence[DeviceRun], found: Iterable[Cause]) -> Mapping[str, str]:
    """The explanations that lie beside the journals, by the id of the case that stands for its cause."""
    folders = [folder_of(Path(source)) for run in runs for source in run.sources]
    texts: dict[str, str] = {}
    for cause in found:
        for folder in folders:
            path = text_of(folder, cause.example.case.id)
            try:
                with path.open("rb") as file:
                    texts[cause.example.case.id] = file.read(MOST).decode("utf-8", errors="replace")
            except OSError:
                continue
    return texts
