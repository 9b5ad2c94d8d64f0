"""Google TPUs through torch_tpu: an out-of-tree backend that is a torch device named ``tpu``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.devices import hardware, packages
from accelcheck.devices._late_torch import torch
from accelcheck.devices.base import Device, Fingerprint

_PYTHON = (3, 12)
_TORCH = ((2, 11), (2, 15))  # torch_tpu 0.2.0's own requirement, both ends included


class Tpu(Device):
    """``tpu``. It declares the features that torch_tpu documents, and no others."""

    name = "tpu"
    type = "tpu"
    dtypes = frozenset({"float32", "bfloat16"})
    features = frozenset({"autocast-bfloat16", "exclusive"})
    denied: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(("float16", "strided", "autocast-float16", "deterministic"), "torch_tpu does not document it")
    )
    package: ClassVar[str] = "torch_tpu"
    variables: ClassVar[tuple[str, ...]] = (
        *("LIBTPU_INIT_ARGS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_LIBRARY_PATH", "TPU_PROCESS_BOUNDS"),
        *("TPU_VISIBLE_CHIPS", "XLA_FLAGS"),
    )

    def detect(self) -> Capability:
        present = hardware.tpu().capability
        if not present.ok:
            return present
        if sys.version_info < _PYTHON:
            reason = f"torch_tpu needs Python >= 3.12, this is {sys.version_info.major}.{sys.version_info.minor}"
            return unavailable(Code.NO_PACKAGE, reason, "use a newer Python")
        needed = packages.requires_torch()
        if needed.ok:
            needed = packages.requires(self.package, 'pip install "accelcheck[tpu]"')
        if needed.ok and not _TORCH[0] <= packages.release(packages.version("torch")) <= _TORCH[1]:
            reason = f"torch_tpu needs torch 2.11 to 2.15, and torch {packages.version('torch')} is installed"
            return unavailable(Code.WRONG_BUILD, reason, 'pip install "torch>=2.11,<2.16"')
        return needed

    def open(self) -> None:
        if not hasattr(torch, self.type):  # `import torch` loads it, unless that is turned off
            packages.load_backend(entry for entry in packages.backends() if packages.package_of(entry) == self.package)

    def usable(self) -> Capability:
        if hasattr(torch, self.type):
            return SUPPORTED
        reason = "torch_tpu was loaded and registered no device"
        return unavailable(Code.PROBE_FAILED, reason, "see torch_tpu's messages on standard error")

    def shared(self) -> bool:
        return False

    def fingerprint(self) -> Fingerprint:
        chips = hardware.tpu()
        return Fingerprint(
            device=self.name,
            chip=chips.names[0] if chips.names else "TPU",
            count=chips.count,
            memory=_memory(),
            runtime="TorchTPU",
            versions=packages.versions("torch", "torch-tpu", "libtpu", "numpy"),
            environment=self.environment(),
        )

    def torch_device(self) -> torch.device:
        return torch.device(self.type, 0)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    @contextmanager
    def strict_float32(self) -> Iterator[None]:
        with super().strict_float32(), ExitStack() as restored:
            # torch_tpu replaces this pair of functions; its own keep a separate state.
            restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
            yield


def _memory() -> int:
    module: Any = torch.get_device_module("tpu")
    try:
        return int(module.get_device_properties(0).total_memory)
    except (AttributeError, RuntimeError):  # an unknown chip
        return 0


DEVICES: tuple[Device, ...] = (Tpu(),)
