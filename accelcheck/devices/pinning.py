"""Gives each pytest-xdist worker one of the visible chips, by the vendor's mask, and counts the workers. No torch.

The mask must be set before the runtime starts, so this is called before torch is imported.
Sources: CUDA programming guide (CUDA_VISIBLE_DEVICES), ROCm "GPU isolation techniques", torch_xla's
``_internal/tpu.py``, Ascend CANN and Level Zero documentation.
"""

import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping

from accelcheck.devices import hardware

_TPU_MASK = "TPU_VISIBLE_CHIPS"
_ONE_TPU = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
_CPU_DEVICES = "CPU_NUM_DEVICES"
"""Number of devices that PJRT's CPU client makes in a process, 1 by default: each process has devices of its own."""
CALLERS = "ACCELCHECK_CALLERS_DEVICES"
"""Environment variable of a pinned worker with its caller's masks, ``VARIABLE=VALUE`` separated by ``;``."""
_OTHERS = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def pin(
    device_name: str, worker: str, environ: MutableMapping[str, str], count: int | None, mask_name: str | None = None
) -> dict[str, str]:
    """Hides all chips but one from a worker, by variables that it returns; more workers than chips share in turn.

    Args:
        device_name: The device's name.
        worker: The worker's name, ``gw0`` and up; any other (``master``) is left alone.
        environ: Environment to change. The worker gets one chip of a mask that is set; an empty one (or ``-1``) stays.
        count: Number of chips, used where no mask is set; with None or 0 nothing is pinned then.
        mask_name: Mask that the device of another package names; None for devices that are known here.
    """
    number = re.fullmatch(r"gw(\d+)", worker)
    if number is None:
        return {}
    if _on_pjrt_cpu(device_name, environ):
        return _narrowed(environ, _CPU_DEVICES, str(count), {_CPU_DEVICES: "1"}) if (count or 0) > 1 else {}
    variable = mask_name or mask_variable(device_name, environ)
    if variable is None:
        return {}
    mask = environ.get(variable)
    visible = [str(index) for index in range(count or 0)] if mask is None else chips(mask)
    if not visible:
        return {}
    chosen = {variable: visible[int(number.group(1)) % len(visible)]}
    if variable == _TPU_MASK:
        environ.update(chosen | _ONE_TPU)
        return chosen | _ONE_TPU  # PJRT gives a chip to one process: no other can have them all
    return _narrowed(environ, variable, ",".join(visible), chosen)


def _narrowed(environ: MutableMapping[str, str], variable: str, whole: str, chosen: dict[str, str]) -> dict[str, str]:
    if chosen[variable] != whole:
        environ[CALLERS] = ";".join(f"{name}={value}" for name, value in (callers(environ) | {variable: whole}).items())
    environ.update(chosen)
    return chosen


def callers(environ: Mapping[str, str]) -> dict[str, str]:
    """Masks of the caller of a pinned worker, by variable, for processes that need several devices."""
    pairs = (word.partition("=") for word in environ.get(CALLERS, "").split(";") if word)
    return {variable: value for variable, _, value in pairs}


def callers_count(device: str, environ: Mapping[str, str]) -> int:
    """Number of devices that the caller of a pinned worker sees; 0 where this process is not pinned."""
    masks = callers(environ)
    if _on_pjrt_cpu(device, environ):
        return int(masks.get(_CPU_DEVICES, "0"))
    return len(chips(masks.get(mask_variable(device, environ) or "", "")))


def workers(devices: Iterable[str], environ: Mapping[str, str]) -> int | None:
    """Number of workers by which each chip gets one; None where counting would open a device, and for the processor."""
    counts = [_count(name, environ) for name in devices]
    return max(counts) if counts and all(counts) else None


def _count(device: str, environ: Mapping[str, str]) -> int:
    if _on_pjrt_cpu(device, environ):
        value = environ.get(_CPU_DEVICES, "")
        return int(value) if value.isdecimal() else 0
    variable = mask_variable(device, environ)
    if variable is not None and variable in environ:
        return len(chips(environ[variable]))
    return hardware.chips(device)


def chips(mask: str) -> list[str]:
    """The ids in a mask: numbers, UUIDs or MIG names. An invalid id ends the list, as in CUDA."""
    visible: list[str] = []
    for word in (word.strip() for word in mask.split(",")):
        if not word or word.startswith("-"):
            break
        visible.append(word)
    return visible


def mask_variable(device: str, environ: Mapping[str, str]) -> str | None:
    """The environment variable with the ids of the chips that a process sees; None where none is known."""
    if device == "rocm":
        # HIP's mask counts within ROCR's, so the innermost mask that the caller has set is narrowed.
        # HIP reads CUDA_VISIBLE_DEVICES as its own when HIP_VISIBLE_DEVICES is not set.
        inner = (name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in environ)
        return next(inner, "ROCR_VISIBLE_DEVICES" if sys.platform == "linux" else "HIP_VISIBLE_DEVICES")
    if device == "tpu" or (device == "xla" and _on_tpu(environ)):
        return _TPU_MASK
    return _OTHERS.get(device)


def _on_pjrt_cpu(device: str, environ: Mapping[str, str]) -> bool:
    return device == "xla" and environ.get("PJRT_DEVICE", "CPU") == "CPU" and not _on_tpu(environ)


def _on_tpu(environ: Mapping[str, str]) -> bool:
    client = environ.get("PJRT_DEVICE")
    return client == "TPU" if client else hardware.tpu().count > 0
