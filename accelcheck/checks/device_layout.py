"""The strides that eager gives its outputs on the device: libraries may choose others than the CPU's, and techniques keep eager's."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from accelcheck.core.case import Mode
from accelcheck.verify.oracle import FIRST

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelcheck.checks.trial import Trial
    from accelcheck.verify.oracle import Store
    from accelcheck.workloads.probes import Draw

_SEEN: WeakKeyDictionary[Store, dict[str, Mapping[str, tuple[int, ...]]]] = WeakKeyDictionary()
"""Strides by path, for each run's store and each case without its technique."""


def eager_strides(trial: Trial, draw: Draw = FIRST) -> Mapping[str, tuple[int, ...]]:
    """The strides of eager's outputs on a case's device, by path: measured once a process for all techniques.

    A convolution's output may be in channels-last there, or a reduction's dense where the CPU keeps its input's order; neither is
    wrong, and a technique must keep what eager has.

    Args:
        trial: Call this before its technique is prepared.
        draw: Of the inputs.

    Returns:
        Empty where those of the CPU hold: on the CPU, on devices without strides, in modes without outputs, and where eager does
        not run on the device, which the case of `eager` reports.
    """
    case, device = trial.case, trial.device
    if device.has("host") or not device.has("strided") or case.mode not in {Mode.FORWARD, Mode.BACKWARD}:
        return {}
    seen = _SEEN.setdefault(trial.store, {})
    key = f"{device.name}/{case.workload}/{case.seed}/{case.dtype}/{case.mode}/{draw}"
    if key not in seen:
        try:
            program = trial.place(draw.problem(trial.workload, case.seed, case.dtype), draw.seed(case.seed))
            result = program.run(case.mode)
            seen[key] = {path: tensor.stride() for path, tensor in result.items() if path.startswith("out")}
        except Exception:  # noqa: BLE001 - a workload or backend may raise anything: it is the fault of eager's own case
            seen[key] = {}
    return seen[key]
