from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from upstream_signatures import signature, unlike_upstream

from accelcheck.devices import telemetry
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.telemetry import Telemetry

if TYPE_CHECKING:
    import pytest


def written(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_processor_says_what_sysfs_holds(tmp_path: Path) -> None:
    written(
        tmp_path,
        **{
            "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2100000\n",
            "class/thermal/thermal_zone0/temp": "61500\n",
            "class/powercap/intel-rapl:0/energy_uj": "3000000\n",
            "class/powercap/intel-rapl:1/energy_uj": "4000000\n",
            "class/powercap/intel-rapl:0:0/energy_uj": "1000000\n",  # a part of the first
            "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "2\n",
            "devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "1\n",
        },
    )
    assert telemetry.processor(tmp_path) == Telemetry(2100.0, 61.5, 7.0, "3 times since the machine started")


def test_what_sysfs_lacks_is_absent(tmp_path: Path) -> None:
    assert telemetry.processor(tmp_path) == Telemetry()
    written(tmp_path, **{"class/thermal/thermal_zone0/temp": "hot"})
    assert telemetry.processor(tmp_path) == Telemetry()


def test_the_cpu_answers_here() -> None:
    assert isinstance(Cpu().telemetry(), Telemetry)


class Nvml(SimpleNamespace):
    """NVML's functions, of one GPU."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, **other: Any) -> None:
        super().__init__(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1": "handle"}[uuid],
            nvmlDeviceGetClockInfo=lambda _, type: 1980 if type == self.NVML_CLOCK_SM else 0,  # noqa: A006 - NVML's
            nvmlDeviceGetTemperature=lambda _, __: 55,
            nvmlDeviceGetTotalEnergyConsumption=lambda _: 12_500,
            nvmlDeviceGetCurrentClocksEventReasons=lambda _: 0x1 | 0x4 | 0x40,
        )
        self.__dict__.update(other)


def test_stubs_have_the_signatures_of_the_packages() -> None:
    for stub, package, path in ((Nvml(), "nvidia-ml-py", "pynvml.py"), (smi(), "amdsmi", "amdsmi/amdsmi_interface.py")):
        names = [name for name, value in vars(stub).items() if callable(value)]
        assert not [line for name in names for line in unlike_upstream(package, f"{path}:{name}", getattr(stub, name))]
    for name in ("NVML_CLOCK_SM", "NVML_TEMPERATURE_GPU"):
        assert getattr(Nvml, name) == signature("nvidia-ml-py", f"pynvml.py:{name}").parameters["value"].default


def smi() -> SimpleNamespace:
    """AMD SMI's functions, of one GPU."""
    return SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handle_from_bdf=lambda bdf: {"0000:c1:00.0": "handle"}[bdf],
        amdsmi_get_energy_count=lambda _: {"energy_accumulator": 2_000_000, "counter_resolution": 16.0},
        amdsmi_get_gpu_metrics_info=lambda _: {
            "current_gfxclk": 2100,
            "temperature_hotspot": 70,
            "throttle_status": 0x10,
        },
    )


def refused(*_: object) -> Any:
    raise RuntimeError("not supported")


def test_an_nvidia_gpu_is_asked_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    result = telemetry.nvidia("GPU-1")
    assert result == Telemetry(1980.0, 55.0, 12.5, "power cap, thermal slowdown by hardware")
    assert telemetry.nvidia("GPU-2") == Telemetry()


def test_each_question_may_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(nvmlDeviceGetTotalEnergyConsumption=refused))
    assert telemetry.nvidia("GPU-1") == Telemetry(1980.0, 55.0, None, "power cap, thermal slowdown by hardware")
    older = Nvml(nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x4)
    del older.nvmlDeviceGetCurrentClocksEventReasons
    monkeypatch.setitem(sys.modules, "pynvml", older)
    assert telemetry.nvidia("GPU-1").throttled == "power cap"


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(nvmlInit=refused))
    assert telemetry.nvidia("GPU-1") == Telemetry()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert telemetry.nvidia("GPU-1") == telemetry.amd("0000:c1:00.0") == Telemetry()


def test_an_amd_gpu_is_asked_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = smi()
    monkeypatch.setitem(sys.modules, "amdsmi", stub)
    assert telemetry.amd("0000:c1:00.0") == Telemetry(2100.0, 70.0, 32.0, "throttle status 0x10")
    stub.amdsmi_get_gpu_metrics_info = lambda _: {"current_gfxclk": "N/A"}
    assert telemetry.amd("0000:c1:00.0").clock is None
    assert telemetry.amd("0000:01:00.0") == Telemetry()
