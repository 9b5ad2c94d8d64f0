"""Public interface: everything that techniques, workloads and devices of other packages import from accelcheck.

Names are resolved at their first use: importing this module, and the names of the first two groups, imports no torch,
which a module that defines a device must not do at its top. Unlisted names may move between releases.
docs/extending.md has a complete example of each kind, and describes the hooks that register them.

Capabilities: answers to the question if something exists on a device, with reasons.
    `Capability`: the answer, with a code, a reason and an action.
    `SUPPORTED`: the answer "yes".
    `unsupported`, `unavailable`: make the "no" of what does not exist there, and of what this machine lacks.
    `Code`: the reason of a "no" as a word that reports count.
    `Unsupported`: the exception for a "no" that only the run can find (imports torch).

Devices: backends under test.
    `Device`: the base class.
    `Fingerprint`: chip, driver and versions, from `Device.fingerprint`.
    `Memory`: bytes that tensors hold, from `Device.memory`.
    `Telemetry`: clock, temperature and energy, from `Device.telemetry`.

Techniques: accelerations under test.
    `Technique`: the base class.
    `Program`: a workload on a device, ready to run; `Technique.prepare` changes it.
    `Mode`: the part of a workload that is run, such as ``forward`` or ``train`` (no torch).
    `Evidence`: one observation that shows whether the technique ran (no torch).
    `Log`: counts of observations, which `Technique.evidence` reads.
    `OperatorLog`: the log of all dispatched operators; the default of `Technique.watch`.
    `ProfilerLog`: the log of torch.profiler, for compiled code.
    `operators`: the log as an `OperatorLog`, to read dtypes and formats of operands.

Workloads: models and functions that techniques are applied to.
    `Workload`: the model's name, traits and maker.
    `Problem`: the module with its inputs, and with loss, target and optimizer for training.
    `Dropout`: a random operation of a workload, for mode ``random``.
    `Recipe`: how a problem is trained for long, for mode ``trajectory``.
    `Task`: a workload with a data set, for modes ``accuracy`` and ``learning``.
    `workload_of`: makes a workload of any model and example inputs.
    `task_of`: makes a workload of a trained model, held-out data and a metric, for mode ``accuracy``.
    `OwnModelError`: a model cannot be checked; the message names the object and says what to do.
    `Probe`: a structured input, such as ``one-hot``; `Technique.admits` is asked about each.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from accelcheck.core.registry import unknown

if TYPE_CHECKING:
    from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
    from accelcheck.core.case import Evidence, Mode
    from accelcheck.devices.base import Device, Fingerprint, Memory
    from accelcheck.devices.telemetry import Telemetry
    from accelcheck.techniques.base import Technique, Unsupported
    from accelcheck.techniques.observe import Log, OperatorLog, ProfilerLog, operators
    from accelcheck.workloads.base import Dropout, Problem, Program, Workload
    from accelcheck.workloads.nested import OwnModelError
    from accelcheck.workloads.own_model import task_of, workload_of
    from accelcheck.workloads.probes import Probe
    from accelcheck.workloads.task import Task
    from accelcheck.workloads.trainer import Recipe

__all__ = [
    "SUPPORTED",
    "Capability",
    "Code",
    "Device",
    "Dropout",
    "Evidence",
    "Fingerprint",
    "Log",
    "Memory",
    "Mode",
    "OperatorLog",
    "OwnModelError",
    "Probe",
    "Problem",
    "ProfilerLog",
    "Program",
    "Recipe",
    "Task",
    "Technique",
    "Telemetry",
    "Unsupported",
    "Workload",
    "operators",
    "task_of",
    "unavailable",
    "unsupported",
    "workload_of",
]

_MODULES = {
    "accelcheck.core.capability": ("SUPPORTED", "Capability", "Code", "unavailable", "unsupported"),
    "accelcheck.core.case": ("Evidence", "Mode"),
    "accelcheck.devices.base": ("Device", "Fingerprint", "Memory"),
    "accelcheck.devices.telemetry": ("Telemetry",),
    "accelcheck.techniques.base": ("Technique", "Unsupported"),
    "accelcheck.techniques.observe": ("Log", "OperatorLog", "ProfilerLog", "operators"),
    "accelcheck.workloads.base": ("Dropout", "Problem", "Program", "Workload"),
    "accelcheck.workloads.nested": ("OwnModelError",),
    "accelcheck.workloads.own_model": ("task_of", "workload_of"),
    "accelcheck.workloads.probes": ("Probe",),
    "accelcheck.workloads.task": ("Task",),
    "accelcheck.workloads.trainer": ("Recipe",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # type checkers would take every misspelt name for one that __getattr__ knows

    def __getattr__(name: str) -> object:
        """Returns a public name from the module that defines it.

        Raises:
            AttributeError: There is no such public name; the message gives the nearest one.
        """
        if name not in _MODULE_OF:
            raise AttributeError(f"accelcheck.api: {unknown('public name', name, __all__)}")
        found = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return found


def __dir__() -> list[str]:
    return __all__
