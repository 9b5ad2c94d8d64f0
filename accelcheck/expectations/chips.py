"""Stored statements of what chips support: a file per chip family, each statement with its source. No torch.

A file of `FOLDER` is named after `Device.architecture`: ``sm_90.toml``, ``gfx942.toml``, ``x86_64.toml``. `held` judges
a refusal by the statement that covers the case; a refusal without one is `unsupported`, listed as found by trying.
"""

import fnmatch
import re
from dataclasses import dataclass, replace
from pathlib import Path

from accelcheck.core import toml
from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.journal import Record

SCHEMA = 1
FOLDER = Path(__file__).parent / "chips"
TRIED = "found by trying"
"""`Record.remark` of a case that is `unsupported` because a trial was refused, without a statement about it."""
RUNS = "runs, although stated as unsupported"
"""Begin of `Record.remark` of a case that ran although stated as unsupported."""
_RELEASE = re.compile(r"(\d{1,4})\.(\d{1,4})", re.ASCII)
_FIELDS = {
    "cases": toml.Field("a list of case ids or globs", toml.is_texts),
    "supported": toml.Field("true or false", lambda value: isinstance(value, bool)),
    "since": toml.Field(
        'the first release of torch that it holds for, such as "2.9"',
        lambda value: isinstance(value, str) and bool(_RELEASE.fullmatch(value)),
    ),
    "fact": toml.Field("a sentence", toml.is_text),
    "source": toml.Field("a URL", lambda value: isinstance(value, str) and value.startswith("https://")),
}


class ChipError(ValueError):
    """A file of statements cannot be read or is malformed; the message names the file, the statement and the field."""


@dataclass(frozen=True, slots=True)
class ChipStatement:
    """One statement about a chip family.

    Attributes:
        chip: Architecture of the family, such as ``sm_90``.
        cases: Case ids or globs, matched against whole ids.
        supported: True if the chip runs these cases.
        since: First release of torch, major and minor, for which it is stated.
        fact: Content of the source, in a sentence.
        source: URL of the maker's or torch's documentation or source, or of docs/findings.md's repository.
    """

    chip: str
    cases: tuple[str, ...]
    supported: bool
    since: tuple[int, int]
    fact: str
    source: str

    def covers(self, case_id: str, torch: str) -> bool:
        """True if the statement is about a case under a version of torch."""
        release = _RELEASE.match(torch)
        known = release is not None and (int(release[1]), int(release[2])) >= self.since
        return known and any(fnmatch.fnmatchcase(case_id, glob) for glob in self.cases)


def load(architecture: str, folder: Path = FOLDER) -> tuple[ChipStatement, ...]:
    """The statements about a chip family; none for one that is not stored, or has no name."""
    path = folder / f"{architecture}.toml"
    if not re.fullmatch(r"\w[\w.-]*", architecture) or not path.is_file():
        return ()
    raws = toml.read(path, "statement", _FIELDS, ChipError, SCHEMA)
    return tuple(
        ChipStatement(
            architecture,
            **{**raw.values, "cases": tuple(raw["cases"]), "since": tuple(map(int, raw["since"].split(".")))},
        )
        for raw in raws
    )


def held(record: Record, statements: tuple[ChipStatement, ...], torch: str) -> Record:
    """Hold a record against the statements about its chip; the first that covers the case decides.

    A refused case that the chip is stated to run is a `fail`. One that it is stated not to run is `unsupported` without
    a remark where it was refused, and gets a remark where it ran. Other records are returned as they are.
    """
    stated = next((statement for statement in statements if statement.covers(record.case.id, torch)), None)
    if stated is None:
        return record
    if record.verdict is Verdict.UNSUPPORTED:
        if not stated.supported:
            return replace(record, remark="")
        expected, got = f"to run on {stated.chip}: {stated.fact} ({stated.source})", " ".join(record.reason.split())
        fault = Fault(FaultKind.RULE, "technique", "refused", expected=expected, got=got)
        return replace(record, verdict=Verdict.FAIL, code="", reason="", faults=(fault,), remark="")
    if record.verdict.executed and not stated.supported:
        return replace(record, remark=f"{RUNS} on {stated.chip}: {stated.fact} ({stated.source})")
    return record
