"""Makes what runs the cases of pytest's process: for the suite once a process, and for each check of somebody's own model."""

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
from accelcheck.verify.oracle import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from accelcheck.devices.base import Device
    from accelcheck.measure.gate import Gate
    from accelcheck.plugin.configuration import RunConfiguration
    from accelcheck.techniques.matrix import Matrix


def supervisor(
    config: pytest.Config,
    run: RunConfiguration,
    matrix: Matrix,
    folder: Path,
    close: Callable[[Callable[[], None]], object],
    gate: Gate | None = None,
) -> Supervisor:
    """Cases run in a process of their own, unless ``--accel-in-process`` or a device that is in use forbids it.

    Args:
        config: Of pytest.
        run: The devices, and further ledgers.
        matrix: Techniques and workloads.
        folder: Of the references; private.
        close: Takes functions that end the processes.
        gate: Holds measurements against baselines and limits.
    """
    devices, chosen = run.devices(config), run.selection.devices
    chips = {name: status.fingerprint.chip for name, status in run.statuses.items() if status.fingerprint is not None}
    ledger = replace(Ledger.load((*shipped(chosen), *run.ledgers)), chips=chips)
    store = Store(folder, effort=options.effort(config))
    bench = Bench(matrix, devices, run.statuses, store, options.folder(config, "profile"))
    try:
        made = Supervisor(
            bench, ledger, gate, options.timeout(config), here=_here(config, [devices[n] for n in chosen])
        )
    except CleanProcessError as error:
        _warn(config, str(error))
        made = Supervisor(bench, ledger, gate, here=True)
    close(made.close)
    return made


def _here(config: pytest.Config, devices: Sequence[Device]) -> bool:
    """Whether cases run in pytest's own process."""
    if options.value(config, "in_process") or timing_processes.ongoing() is not None:
        return True
    used = ", ".join(device.name for device in devices if device.in_use())
    if used:
        _warn(config, f"{used}: in use in this process before the first case")
    return bool(used)


def _warn(config: pytest.Config, why: str) -> None:
    words = escaped_lines(f"accelcheck: cases run in pytest's own process, which a crash or hang ends: {why}")
    config.issue_config_time_warning(pytest.PytestWarning(words), stacklevel=3)  # workers hand it on
