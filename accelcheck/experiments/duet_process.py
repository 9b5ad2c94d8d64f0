"""One process of a duet: judges or measures cases in its own environment, and reports to the parent.

Its messages are the environment, the ids of its cases, and the begin and the result of each case.
`accelcheck.experiments.duet` runs ``python -m accelcheck.experiments.duet_process JOB``, without the launcher of
`accelcheck.core.processes`, so that an accelcheck of another version can say which protocol it speaks.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from accelcheck import __version__
from accelcheck.core.case import TIMED, Case, Verdict
from accelcheck.core.files import scratch
from accelcheck.core.processes import end_at_once, end_with_parent, say, stop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.techniques.matrix import Matrix

PROTOCOL = 3
"""Version of the messages between parent and child."""
SECONDS = 0.5
"""Seconds in which a process measures a case, half of them with eager; longer ones gain less than processes differ."""
TURN = 0.05
"""Length of a turn in seconds: long beside a change of turns, short beside disturbances."""


def main(words: Sequence[str]) -> None:
    """Do one job and end the process without tearing backends down."""
    end_with_parent()
    with tempfile.TemporaryDirectory(prefix="files-", dir=scratch()) as folder:
        _work(json.loads(words[0]), Path(folder))
    say(end=True)
    end_at_once()


def _work(job: Mapping[str, Any], folder: Path) -> None:
    """Do the ``task`` of a job, ``judge`` or ``measure``, with the cases of its ``selection``."""
    import torch

    from accelcheck.core import imports
    from accelcheck.core.registry import DuplicateNameError, UnknownNameError
    from accelcheck.core.selection import Selection
    from accelcheck.devices import devices
    from accelcheck.devices.generic import Generic, found_types
    from accelcheck.plugin import registered
    from accelcheck.plugin.registered import PluginLoadError

    selection = msgspec.convert(job["selection"], Selection)
    (name,) = selection.devices
    try:
        known = registered.matrix(registered.here())
        imports.load()
        known.check(selection)
        places = devices(registered.devices(registered.here()))
        if name not in places and name not in found_types():
            raise imports.unknown_device(name, sorted(places), "--import")
        device = places[name] if name in places else Generic(name)
    except (PluginLoadError, DuplicateNameError, UnknownNameError, imports.ModuleImportError) as error:
        return say(refused=str(error), absent=False)
    for answer in (device.detect, device.usable):
        capability = answer()
        if not capability.ok:
            return say(refused=f"{name}: {capability}", absent=True)
    device.open()
    facts = device.fingerprint()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "accelcheck": __version__}
    runtime = " ".join(word for word in (facts.driver, facts.runtime) if word)
    say(hello={"protocol": PROTOCOL, **versions, "runtime": runtime, "exclusive": device.has("exclusive")})
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
    """The turns of this process, and a clock that does not run during the turns of the other process."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._lost = 0.0

    def now(self) -> float:
        """Seconds of its own turns so far; gives the turn to the other process first, if its own is over."""
        if time.perf_counter() - self._since >= TURN:
            self.hand_over()
        return time.perf_counter() - self._lost

    def hand_over(self) -> None:
        """Give the turn to the other process, and wait for the next one."""
        start = time.perf_counter()
        stop()
        self._since = time.perf_counter()
        self._lost += self._since - start


@dataclass(frozen=True)
class _Worker:
    known: Matrix
    device: Device
    folder: Path

    def judged(self, case: Case) -> dict[str, Any]:
        """Judge a case in the mode that is timed; wrong cases are not measured."""
        from accelcheck.checks.execute import Bench
        from accelcheck.core.capability import SUPPORTED
        from accelcheck.devices.base import Status
        from accelcheck.expectations.ledger import Ledger, hold, shipped
        from accelcheck.verify.oracle import Store

        name = self.device.name
        bench = Bench(self.known, {name: self.device}, {name: Status(name, SUPPORTED)}, Store(self.folder))
        record = hold(bench.run(replace(case, mode=TIMED[case.mode])), Ledger.load(shipped((name,))))
        if record.verdict is Verdict.PASS:
            return {}
        # A refusal says its verdict itself.
        why = f"{record.verdict}: {record.headline}" if record.verdict.executed else record.headline
        return {"wrong": why, "broken": not record.verdict.green}

    def measured(self, case: Case, turns: Turns) -> dict[str, Any]:
        """Its latency in s, and its ratio to FP32 eager's, measured in turns with another process."""
        from accelcheck.checks import speed
        from accelcheck.checks.trial import Trial
        from accelcheck.measure import duet
        from accelcheck.verify.oracle import Store

        technique, workload = self.known.techniques[case.technique], self.known.workloads[case.workload]
        trial = Trial(case, technique, workload, self.device, Store(self.folder))
        try:
            comparison = speed.ratio(trial, (SECONDS,), turns.now)
        except Exception as error:  # noqa: BLE001 - workloads, techniques and backends may raise anything
            return {"wrong": f"error: {type(error).__name__}: {error}".partition("\n")[0], "broken": True}
        finally:
            technique.finish()
        return {"seconds": duet.latency(comparison.candidate), "to_eager": comparison.ratio}


if __name__ == "__main__":
    main(sys.argv[1:])
