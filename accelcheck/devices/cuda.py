"""NVIDIA GPUs, and the base class that they share with AMD GPUs: torch gives both the type ``cuda``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.devices import cold, hardware, telemetry
from accelcheck.devices._late_torch import torch
from accelcheck.devices.base import Device, Fingerprint, Memory
from accelcheck.devices.packages import requires_torch, versions
from accelcheck.devices.pinning import chips
from accelcheck.devices.telemetry import Telemetry

_BF16_SINCE = (8, 0)  # compute capability from which bf16 is not emulated


class CudaLike(Device):
    """A GPU behind ``torch.cuda``."""

    type = "cuda"
    dtypes = frozenset({"float32", "float64", "bfloat16", "float16"})
    features = frozenset(
        {"float64", "strided", "inductor", "cuda-graphs", "autocast-bfloat16", "autocast-float16", "memory-statistics"}
    )
    denied: Mapping[str, str] = MappingProxyType(
        {"deterministic": "atomics add in any order in the operators that torch.use_deterministic_algorithms lists"}
    )
    masks: ClassVar[tuple[str, ...]] = ()
    """Environment variables that hide GPUs from a process."""

    def hardware(self) -> hardware.Hardware:
        """The GPUs of this host."""
        raise NotImplementedError(f"{type(self).__name__}.hardware: a subclass must override it")

    def detect(self) -> Capability:
        present = self.hardware().capability
        if not present.ok:
            return present
        for mask in self.masks:
            if mask in os.environ and not chips(os.environ[mask]):
                reason = f"{mask}={os.environ[mask]!r} hides every GPU"
                return unavailable(Code.NO_HARDWARE, reason, f"unset {mask} or name a GPU in it")
        return requires_torch()

    def offered(self) -> Capability:
        """Asks the driver for a GPU, without a context on it where torch asks NVML."""
        if torch.cuda.is_available():
            return SUPPORTED
        reason = f"torch {torch.__version__} is built for it, but torch.cuda.is_available() is False"
        action = "check the driver's version against the build, and that this user may open the device"
        return unavailable(Code.NO_HARDWARE, reason, action)

    def described(self, chip: str, runtime: str, packages: Mapping[str, str]) -> Fingerprint:
        """The fingerprint with the facts that torch and the driver tell of any GPU."""
        return Fingerprint(
            device=self.name,
            chip=chip,
            count=torch.cuda.device_count(),
            memory=torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory,
            driver=self.hardware().driver,
            runtime=runtime,
            versions=packages,
            environment=self.environment(),
        )

    def in_use(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def elapsed(self, call: Callable[[], object], times: int) -> float:
        """Seconds by events of the current stream, with cold caches, without launches; see `cold.elapsed`."""
        return cold.elapsed(call, times)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)

    def memory(self) -> Memory:
        return Memory(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())

    def telemetry(self) -> Telemetry:
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # not all fields are declared
        if torch.version.hip is not None:
            address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
            return telemetry.amd("{:04x}:{:02x}:{:02x}.0".format(*address))
        return telemetry.nvidia(f"GPU-{properties.uuid}")

    def reset_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()


class Cuda(CudaLike):
    """``cuda``: NVIDIA GPUs."""

    name = "cuda"
    masks: ClassVar[tuple[str, ...]] = ("CUDA_VISIBLE_DEVICES",)
    variables: ClassVar[tuple[str, ...]] = (
        *("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER"),
        *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "CUDNN_CONV_WSCAP_DBG"),
        *("NVIDIA_TF32_OVERRIDE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_V8_API_DISABLED"),
    )

    def hardware(self) -> hardware.Hardware:
        return hardware.nvidia()

    def architecture(self) -> str:
        """The compute capability, such as ``sm_90``."""
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"

    def usable(self) -> Capability:
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} is built without CUDA, and this machine has an NVIDIA GPU"
            action = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
            return unavailable(Code.WRONG_BUILD, reason, action)
        return self.offered()

    def open(self) -> None:
        # Older GPUs emulate bf16.
        if torch.cuda.is_available() and torch.cuda.get_device_capability() < _BF16_SINCE:
            self.dtypes -= {"bfloat16"}
            self.features -= {"autocast-bfloat16"}
            emulated = "emulated before compute capability {}.{}".format(*_BF16_SINCE)
            self.denied = {**self.denied, "bfloat16": emulated, "autocast-bfloat16": emulated}

    def fingerprint(self) -> Fingerprint:
        chip = torch.cuda.get_device_properties(torch.cuda.current_device()).name
        cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # not annotated
        packages = versions("torch", "triton", "numpy") | ({"cudnn": str(cudnn)} if cudnn else {})
        return self.described(chip, f"CUDA {torch.version.cuda}", packages)


DEVICES: tuple[Device, ...] = (Cuda(),)
