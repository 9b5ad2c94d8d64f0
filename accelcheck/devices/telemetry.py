"""Reads a chip's clock, temperature, energy and throttling. No torch.

Sources: NVML (the package nvidia-ml-py) for NVIDIA, amdsmi for AMD, sysfs for the processor.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SYS = Path("/sys")
_SLOWED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that mean a slowed chip; 1 (idle) and 2 (clocks set by the user) do not."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """One reading; None where a figure is not known.

    Clock in MHz, temperature in degrees Celsius, energy in joules since an unspecified moment, and the known reasons of
    a slowed chip, or empty; for a processor, the number of throttle events.
    """

    clock: float | None = None
    temperature: float | None = None
    energy: float | None = None
    throttled: str = ""


def processor(root: Path = _SYS) -> Telemetry:
    """Reads the first core's clock, the first package's temperature, all packages' energy, all cores' throttling."""
    clock = _number(root / "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    heat = _number(root / "class/thermal/thermal_zone0/temp")
    packages = [_number(path) for path in sorted(root.glob("class/powercap/intel-rapl:?/energy_uj"))]
    known = [joules for joules in packages if joules is not None]
    counts = [_number(path) for path in root.glob("devices/system/cpu/cpu*/thermal_throttle/core_throttle_count")]
    throttles = sum(count for count in counts if count is not None)
    return Telemetry(
        None if clock is None else clock / 1e3,
        None if heat is None else heat / 1e3,
        sum(known) / 1e6 if known else None,
        f"{throttles:.0f} times since the machine started" if throttles else "",
    )


def nvidia(uuid: str) -> Telemetry:
    """Reads the GPU with this UUID, such as ``GPU-1b2c...``: with a mask an index would mean another GPU."""
    with suppress(Exception), _opened("pynvml", "nvmlInit", "nvmlShutdown") as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        slowed = _asked(lambda: _reasons(nvml, handle)) or 0
        millijoules = _asked(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        return Telemetry(
            _asked(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            _asked(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            None if millijoules is None else millijoules / 1e3,
            ", ".join(word for bit, word in _SLOWED.items() if int(slowed) & bit),
        )
    return Telemetry()


def amd(bus: str) -> Telemetry:
    """Reads the GPU at this PCI address, such as ``0000:c1:00.0``."""
    with suppress(Exception), _opened("amdsmi", "amdsmi_init", "amdsmi_shut_down") as smi:
        handle = smi.amdsmi_get_processor_handle_from_bdf(bus)
        energy = _whole(lambda: smi.amdsmi_get_energy_count(handle))
        metrics = _whole(lambda: smi.amdsmi_get_gpu_metrics_info(handle))
        status = metrics.get("throttle_status")
        joules = energy.get("energy_accumulator", 0) * energy.get("counter_resolution", 0) / 1e6
        return Telemetry(
            _float(metrics.get("current_gfxclk")),
            _float(metrics.get("temperature_hotspot")),
            joules or None,
            f"throttle status {status:#x}" if isinstance(status, int) and status else "",
        )
    return Telemetry()


@contextmanager
def _opened(library: str, start: str, end: str) -> Iterator[Any]:
    """A library of a vendor; raises anything where there is no package, no driver or no permission."""
    module = importlib.import_module(library)
    getattr(module, start)()
    try:
        yield module
    finally:
        with suppress(Exception):
            getattr(module, end)()


def _reasons(nvml: Any, handle: Any) -> int:
    # NVML renamed it in 2023; some packages no longer have the old name.
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return int((ask or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle))


def _asked(ask: Callable[[], Any]) -> float | None:
    try:
        return float(ask())
    except Exception:  # noqa: BLE001 - some chips do not support some queries
        return None


def _whole(ask: Callable[[], Any]) -> dict[str, Any]:
    try:
        return dict(ask())
    except Exception:  # noqa: BLE001 - as above
        return {}


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
