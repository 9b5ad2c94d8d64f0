"""Explains failures of tests with the fixture ``accel``, while their models are there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from accelcheck.core import imports
from accelcheck.explain.apart import Asked, explained
from accelcheck.plugin import options
from accelcheck.plugin.explanations import LEAST, WRONG
from accelcheck.report.console import plain
from accelcheck.report.explained import folder_of, text_of
from accelcheck.report.signatures import signatures

if TYPE_CHECKING:
    from accelcheck.checks.execute import Bench
    from accelcheck.core.journal import Record


@dataclass
class OwnExplanations:
    """Signatures of the explained failures of this process, and the seconds that checks and explanations took."""

    known: set[str] = field(default_factory=set)
    worked: float = 0.0
    spent: float = 0.0

    def explain(self, config: pytest.Config, bench: Bench, records: Sequence[Record]) -> Iterator[str]:
        """Explains the first failure of each cause in the records of a check, for no longer than checks took.

        Yields a line for each. References in the folder of the bench that ran the cases are still there.
        """
        journal = options.resumed(config) or options.folder(config, "journal")
        if journal is None or any(device.in_use() for device in bench.devices.values()):
            return
        for record in records:
            left = max(LEAST, self.worked) - self.spent
            wrong = record.verdict in WRONG
            kinds = {f"{signature.kind}: {signature.title}" for signature in signatures(record)} if wrong else set()
            if left <= 0 or not kinds - self.known:
                continue
            self.known |= kinds
            began = time.monotonic()
            folder = folder_of(journal)
            folder.mkdir(exist_ok=True)
            path = text_of(folder, record.case.id)
            script, limit = path.with_suffix(".py"), options.timeout(config)
            asked = Asked(bench, record.case, script, limit=limit, most=left, imports=imports.announced())
            try:
                told = explained(asked)
                path.write_text("\n".join(plain(told.lines)) + "\n", encoding="utf-8")
                yield f"explained: {path}"
            except Exception as error:  # noqa: BLE001 - an explanation must not change the test's verdict
                yield f"not explained: {type(error).__name__}: {error}"
            self.spent += time.monotonic() - began


OWN = pytest.StashKey[OwnExplanations]()
