"""Checks of new processes that import torch: with the device visible, and with it hidden."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelcheck.checks.trial import Finding, Trial
from accelcheck.core import imports
from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.processes import Child, Mailbox, Message, calling, say
from accelcheck.devices.base import Device
from accelcheck.devices.pinning import mask_variable
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.processes.evidence import shareable

PATIENCE = 120.0
"""Time limit of such a process in seconds."""


def with_hardware(trial: Trial) -> Finding:
    """Imports torch in a new process, reads its version and computes on the device.

    Raises:
        Unsupported: A chip belongs to one process.
    """
    if not (answer := shareable(trial.device)).ok:
        raise Unsupported(answer)
    message = _said(trial.device, "accelcheck.checks.platform.loading:compute", {})
    device = trial.device.type
    where = Evidence(f"device that computes is {device}", str(message["on"]), engaged=message["on"] == device)
    return _finding(message, where)


def without_hardware(trial: Trial) -> Finding:
    """Imports torch with the device hidden by its vendor's variable, counts devices, and computes on the CPU.

    Raises:
        Unsupported: The device is the host's CPU, or no variable that hides it is known.
    """
    device = trial.device
    if device.computes_on_host():
        reason = f"{device.name} computes on the host's CPU, which no machine is without"
        raise Unsupported(unsupported(Code.NO_EFFECT, reason))
    variable = device.mask or mask_variable(device.name, os.environ)
    if not variable:
        reason = f"no environment variable is known that hides {device.name}: accelcheck cannot try it on this machine"
        raise Unsupported(unsupported(Code.NO_FEATURE, reason))
    message = _said(device, "accelcheck.checks.platform.loading:compute_hidden", {variable: ""})
    left = int(message["devices"])
    claim = f"devices of {device.name} that are left with {variable} empty = 0"
    return _finding(message, Evidence(claim, left, engaged=left == 0))


def _finding(message: Message, where: Evidence) -> Finding:
    version = str(message["torch"])
    seen = Evidence("`import torch` ends, and torch says its version", version, engaged=bool(message["torch"]))
    expected, got = [2.0, 2.0], message["sum"]
    fault = Fault(FaultKind.VALUE, "1 + 1 in a new process", expected=str(expected), got=str(got))
    return Finding([seen, where], [] if got == expected else [fault], (), 2)


def _said(device: Device, function: str, environ: Mapping[str, str]) -> Message:
    """Runs a function in a new process and returns its message.

    Raises:
        RuntimeError: The process did not end by itself with status 0; the message has its output.
    """
    with tempfile.TemporaryDirectory(prefix="accelcheck-loading-") as folder:
        Mailbox(Path(folder)).put("device", device)
        with Child(calling(function, folder, parent=True), environ) as child:
            end = child.wait(PATIENCE)
            messages = child.messages()
            if not messages or end is None or end.code != 0:
                raise RuntimeError(f"a new process that imports torch {end}; its output:\n{child.last()}")
            return messages[-1]


def compute(arguments: Sequence[str]) -> None:
    """Imports torch and adds on the device, in the new process."""
    import torch

    imports.load()
    device: Device = Mailbox(Path(arguments[0])).take("device")
    device.open()
    total = torch.ones(2, device=device.torch_device()) + 1
    device.synchronize()
    say(torch=torch.__version__, on=total.device.type, sum=total.cpu().tolist())


def compute_hidden(arguments: Sequence[str]) -> None:
    """Imports torch, counts the hidden devices and adds on the CPU, in the new process."""
    import torch

    imports.load()
    device: Device = Mailbox(Path(arguments[0])).take("device")
    module = getattr(torch, device.type, None)
    count = _of_xla() if device.has("torch-xla") else getattr(module, "device_count", int)()
    say(torch=torch.__version__, devices=count, sum=(torch.ones(2) + 1).tolist())


def _of_xla() -> int:
    """Counts the chips that torch_xla sees; 0 where it raises because it finds none."""
    from importlib import import_module

    try:
        return int(import_module("torch_xla.runtime").addressable_runtime_device_count())
    except RuntimeError:
        return 0
