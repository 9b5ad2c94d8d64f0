"""Finds the explanations of a run: texts and scripts in a folder beside its journal, by case. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accelcheck.core.files import file_name
from accelcheck.report.causes import Cause
from accelcheck.report.run import DeviceRun

TEXT = ".txt"
MOST = 64 * 1024
"""Most bytes read of a text, which is untrusted input."""


def folder_of(journal: Path) -> Path:
    """Folder of a journal's explanations."""
    return journal.with_name(f"{journal.stem}-explained")


def text_of(folder: Path, case: str) -> Path:
    """File with the explanation of a case; the script has its name, with ``.py``."""
    return folder / f"{file_name(case)}{TEXT}"


@dataclass(frozen=True, slots=True)
class Explained:
    """A case that was explained, and the text."""

    case: str
    text: str


def explained(runs: Sequence[DeviceRun], found: Iterable[Cause]) -> Mapping[str, Explained]:
    """Read the explanations beside the journals, by the id of each cause's example or of another case."""
    folders = [folder_of(Path(source)) for run in runs for source in run.sources]
    names = {path.name: path for folder in reversed(folders) for path in _texts(folder)}
    texts: dict[str, Explained] = {}
    for cause in found if names else ():
        for case in (cause.example.case.id, *(record.case.id for _, record in cause.cases)):
            path = names.get(f"{file_name(case)}{TEXT}")
            if path is None:
                continue
            with suppress(OSError), path.open("rb") as file:
                texts[cause.example.case.id] = Explained(case, file.read(MOST).decode("utf-8", errors="replace"))
                break
    return texts


def _texts(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [*folder.glob(f"*{TEXT}")]
    return []
