"""One process of a duet: judges or measures cases in its own environment, and says so line by line on standard output.

Each line is JSON after a marker: what the environment is, which cases it has, each case as it begins, and what came of it.
Run by `accelcheck.experiments.duet` as ``python -m accelcheck.experiments.duet_process JOB``.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcheck import __version__
from accelcheck.core.case import TIMED, Verdict
from accelcheck.core.processes import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accelcheck.core.case import Case
    from accelcheck.core.matrix import Matrix
    from accelcheck.devices.base import Device

MARK = "@accelcheck-duet@ "
PROTOCOL = 2
"""Version of what parent and child say to each other."""
SECONDS = 0.5
"""Of measuring a case in a process, half of them its own: longer ones would gain little, processes differing as they do."""
TURN = 0.05
"""Seconds after which the other process has the turn: long beside a change, short beside what else happens on a machine."""


def main(words: Sequence[str]) -> None:
    """Do one job and end the process without tearing backends down."""
    end_with_parent()
    with tempfile.TemporaryDirectory(prefix="accelcheck-") as folder:
        _work(json.loads(words[0]), Path(folder))
    say(end=True)
    sys.stderr.flush()
    os._exit(0)  # a backend that crashes or hangs at exit has answered all the same


def _work(job: Mapping[str, Any], folder: Path) -> None:
    """Do the ``task`` of a job, ``judge`` or ``measure``, with the cases of its ``selection``."""
    import torch

    from accelcheck.core import matrix
    from accelcheck.core.registry import DuplicateNameError, UnknownNameError, unknown
    from accelcheck.devices.generic import Generic, found_types
    from accelcheck.plugin import registered
    from accelcheck.plugin.registered import PluginLoadError

    words = job["selection"]
    selection = matrix.Selection(
        devices=tuple(words["devices"]),
        techniques=tuple(words["techniques"]),
        workloads=tuple(words["workloads"]),
        cases=tuple(words["cases"]),
        level=int(words["level"]),
    )
    (name,) = selection.devices
    try:
        known = registered.matrix(registered.here())
        known.check(selection)
        places = matrix.devices(registered.devices(registered.here()))
        if name not in places and name not in found_types():
            raise unknown("device", name, sorted(places))
        device = places[name] if name in places else Generic(name)
    except (PluginLoadError, DuplicateNameError, UnknownNameError) as error:
        return say(refused=str(error), absent=False)
    for answer in (device.detect, device.usable):
        there = answer()
        if not there.ok:
            return say(refused=f"{name}: {there}", absent=True)
    device.open()
    facts = device.fingerprint()
    say(
        hello={
            "protocol": PROTOCOL,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "accelcheck": __version__,
            "runtime": " ".join(word for word in (facts.driver, facts.runtime) if word),
            "exclusive": "exclusive" in device.features,
        }
    )
    cases = known.cases(selection, TIMED)
    if asked := list(selection.cases):  # in that order: it is the other process's too
        cases = sorted(cases, key=lambda case: asked.index(case.id))
    say(cases=[case.id for case in cases])
    worker = _Worker(known, device, folder)
    turns = Turns()
    for case in cases:
        say(begin=case.id)
        if job["task"] == "judge":
            say(done=case.id, **worker.judged(case))
        else:
            say(done=case.id, **worker.measured(case, turns))
            turns.hand_over()
    return None


class Turns:
    """The turns of this process, and a clock that stands still while another process has its own."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._lost = 0.0

    def now(self) -> float:
        """Seconds of its own turns; a turn that is over is handed over first."""
        if time.perf_counter() - self._since >= TURN:
            self.hand_over()
        return time.perf_counter() - self._lost

    def hand_over(self) -> None:
        """Say so, and wait for the next turn."""
        start = time.perf_counter()
        say(turn=True)
        if not sys.stdin.readline():
            os._exit(1)  # nobody is there to give one
        self._since = time.perf_counter()
        self._lost += self._since - start


@dataclass(frozen=True)
class _Worker:
    known: Matrix
    device: Device
    folder: Path

    def judged(self, case: Case) -> dict[str, Any]:
        """Whether a case is right, as in the mode that it runs: what is wrong is not timed."""
        from accelcheck.checks.execute import Bench
        from accelcheck.core.capability import SUPPORTED
        from accelcheck.devices.base import Status
        from accelcheck.expectations.ledger import Ledger, shipped
        from accelcheck.verify.oracle import Store

        name = self.device.name
        bench = Bench(
            matrix=self.known,
            devices={name: self.device},
            statuses={name: Status(name, SUPPORTED)},
            store=Store(self.folder),
            ledger=Ledger.load(shipped((name,))),
        )
        record = bench.run(replace(case, mode=TIMED[case.mode]))
        if record.verdict is Verdict.PASS:
            return {}
        reason = record.reason.partition("\n")[0]
        why = f"{record.verdict}: {reason}" if record.verdict.executed else reason  # a refusal says its verdict itself
        return {"wrong": why, "broken": not record.verdict.green}

    def measured(self, case: Case, turns: Turns) -> dict[str, Any]:
        """Its latency in s, and that as a part of FP32 eager's, measured in turns with another process."""
        from accelcheck.checks import speed
        from accelcheck.checks.trial import Trial
        from accelcheck.measure import duet
        from accelcheck.verify.oracle import Store

        technique, workload = self.known.techniques[case.technique], self.known.workloads[case.workload]
        try:
            found = speed.ratio(
                Trial(case, technique, workload, self.device, Store(self.folder)), (SECONDS,), turns.now
            )
        except Exception as error:  # noqa: BLE001 - a workload, technique or backend may raise anything: it is this case's error
            return {"wrong": f"error: {type(error).__name__}: {error}".partition("\n")[0], "broken": True}
        finally:
            technique.finish()
        return {"seconds": duet.latency(found.candidate), "to_eager": found.ratio}


def say(**record: Any) -> None:
    """Tell the parent."""
    print(f"\n{MARK}{json.dumps(record)}", flush=True)  # a backend may have left a line unfinished


if __name__ == "__main__":
    main(sys.argv[1:])
