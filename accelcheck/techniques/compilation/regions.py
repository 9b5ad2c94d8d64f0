"""Which compiler a device has for `torch.compile`, and which of what it compiled ran."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from accelcheck.core.capability import SUPPORTED, Capability
from accelcheck.techniques.compilation.compile import compilations, default_backend, inductor_capability

if TYPE_CHECKING:
    from collections.abc import Callable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log

_REGION = re.compile(r"Torch-Compiled Region: (\S+)")


def backend_for(device: Device) -> str:
    """The backend that generates code for a device; ``aot_eager`` where none is known to.

    Inductor where the device declares it, XLA's for xla, else the default that the device's package has set.
    """
    if device.type == "xla":
        return "openxla"
    default = default_backend()
    if "inductor" in device.features:
        return default
    return "aot_eager" if default == "inductor" else default


def compiler_capability(device: Device) -> Capability:
    """Whether `backend_for` runs here."""
    return inductor_capability(device) if backend_for(device) == "inductor" else SUPPORTED


def entered(log: Log, test: Callable[[Any], bool] = lambda _: True) -> Counter[str]:
    """Entries into compiled code, by compile id: of the compilations that made a graph and that pass a test.

    Args:
        log: A `ProfilerLog`.
        test: Gets a record of `compilations`.
    """
    wanted = {str(record.compile_id) for record in compilations() if record.graph_op_count and test(record)}
    seen: Counter[str] = Counter()
    for name, number in log.names().items():
        match = _REGION.match(name)
        if match is not None and match[1] in wanted:
            seen[match[1]] += number
    return seen
