"""Compiler that a device has for `torch.compile`, and the number of entries into its compiled regions."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from accelcheck.core.capability import SUPPORTED, Capability
from accelcheck.devices.base import Device
from accelcheck.techniques.compilation.compile import compilations, default_backend, inductor_capability
from accelcheck.techniques.observe import Log

_REGION = re.compile(r"Torch-Compiled Region: (\S+)")


def backend_for(device: Device) -> str:
    """Returns the name of the backend that generates code for a device; ``aot_eager`` where none is known to.

    ``openxla`` for xla; else `torch.compile`'s default, unless this is inductor and the device does not declare it.
    """
    if device.has("torch-xla"):
        return "openxla"
    default = default_backend()
    return default if device.has("inductor") or default != "inductor" else "aot_eager"


def compiler_capability(device: Device) -> Capability:
    """Tells whether the backend that `backend_for` names runs on this machine."""
    return inductor_capability(device) if backend_for(device) == "inductor" else SUPPORTED


def entered(log: Log, test: Callable[[Any], bool] = lambda _: True) -> Counter[str]:
    """Counts entries into compiled code, by compile id, for `compilations` that made a graph and pass a test."""
    wanted = {str(record.compile_id) for record in compilations() if record.graph_op_count and test(record)}
    seen: Counter[str] = Counter()
    for name, number in log.names().items():
        if (match := _REGION.match(name)) and match[1] in wanted:
            seen[match[1]] += number
    return seen
