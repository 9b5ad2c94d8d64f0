"""Makes what cases of a run are run with: for the suite once a process, and for each check of somebody's own model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from accelcheck.checks.execute import Bench
from accelcheck.checks.supervisor import Supervisor
from accelcheck.core.clean_process import CleanProcessError
from accelcheck.expectations.ledger import Ledger, shipped
from accelcheck.measure import timing_processes
from accelcheck.plugin import options
from accelcheck.report.console import escaped_lines
from accelcheck.verify.cache import clean_process
from accelcheck.verify.oracle import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from accelcheck.core.case import Case
    from accelcheck.core.journal import Record
    from accelcheck.devices.base import Device
    from accelcheck.measure.gate import Gate
    from accelcheck.plugin.configuration import RunConfiguration
    from accelcheck.techniques.matrix import Matrix


def bench(
    config: pytest.Config,
    run: RunConfiguration,
    matrix: Matrix,
    folder: Path,
    close: Callable[[Callable[[], None]], object],
    gate: Gate | None = None,
) -> Bench:
    """A bench whose cases run in a process of their own, unless ``--accel-in-process`` or a device that is in use forbids it.

    Args:
        config: Of pytest.
        run: The devices, and further ledgers.
        matrix: Techniques and workloads.
        folder: Of the references; private.
        close: Takes functions that end the processes.
        gate: Holds measurements against baselines and limits.
    """
    devices = run.devices(config)
    chips = {name: status.fingerprint.chip for name, status in run.statuses.items() if status.fingerprint is not None}
    ledger = replace(Ledger.load((*shipped(run.selection.devices), *run.ledgers)), chips=chips)
    traces = options.folder(config, "profile")
    plain = Bench(matrix, devices, run.statuses, Store(folder, effort=options.effort(config)), ledger, traces=traces)
    chosen = [devices[name] for name in run.selection.devices]
    supervisor = _supervisor(config, chosen, lambda: judging(plain, close).found)
    if supervisor is None:
        return replace(judging(plain, close), gate=gate)
    close(supervisor.close)
    return replace(plain, gate=gate, elsewhere=supervisor)


def judging(plain: Bench, close: Callable[[Callable[[], None]], object]) -> Bench:
    """The bench with a process that computes references, for the process in which cases run; `close` takes what ends that."""
    clean = clean_process(plain.matrix.parts())
    close(clean.close)
    return replace(plain, store=Store(plain.store.cache.folder, clean, plain.store.word))


def _supervisor(
    config: pytest.Config, devices: Sequence[Device], make: Callable[[], Callable[[Case], Record]]
) -> Supervisor | None:
    """What runs the cases of this process in another one; None where they run in this one."""
    if options.value(config, "in_process") or timing_processes.ongoing() is not None:
        return None
    used = ", ".join(device.name for device in devices if device.in_use())
    why = f"{used}: in use in this process before the first case" if used else ""
    if not why:
        try:
            return Supervisor(make, options.timeout(config))
        except CleanProcessError as error:
            why = str(error)
    words = escaped_lines(f"accelcheck: cases run in pytest's own process, which a crash or hang ends: {why}")
    config.issue_config_time_warning(pytest.PytestWarning(words), stacklevel=2)  # workers hand it on
    return None
