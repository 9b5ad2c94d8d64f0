"""A device of your own. The CPU stands in for the chip, so that this file runs anywhere; comments say what a chip has.

Run it in this folder; `-p` loads this module as a plugin:

    $ python -m pytest -p demo_device --pyargs accelcheck.suite --accel-device=demo --accel-technique=eager --accel-workload=mlp

It prints, among other lines:

    technique  demo
    eager      2 pass
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from accelcheck.api import SUPPORTED, Capability, Code, Device, Fingerprint, unavailable

if TYPE_CHECKING:
    import torch  # at run time inside of methods alone: accelcheck reads this module before it imports torch

NODE = Path("/dev/null")  # the driver's, such as /dev/accel0


class Demo(Device):
    """``demo``."""

    name = "demo"
    type = "cpu"  # what torch.device calls it, such as npu
    dtypes = frozenset({"float32", "bfloat16"})
    features = frozenset({"strided", "deterministic"})
    variables: ClassVar[tuple[str, ...]] = ("OMP_NUM_THREADS",)

    def detect(self) -> Capability:
        if not NODE.exists():
            return unavailable(Code.NO_HARDWARE, f"{NODE} does not exist", "load the driver")
        return SUPPORTED

    def open(self) -> None:
        import torch  # noqa: F401 - and the package that registers the chip with it, such as torch_npu

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            device=self.name,
            chip=platform.machine(),
            count=1,
            versions={"torch": metadata.version("torch")},
            environment=self.environment(),
        )

    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.type)

    def synchronize(self) -> None:
        return  # operators of the CPU are done when they return; a chip's are not: torch.accelerator.synchronize()


def pytest_accel_devices() -> list[Device]:
    """Register the device."""
    return [Demo()]
