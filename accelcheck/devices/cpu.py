"""The processor, through torch's own kernels: always present, and the reference for all other devices."""

from __future__ import annotations

import platform
from typing import ClassVar

from accelcheck.core.capability import Capability
from accelcheck.devices import hardware
from accelcheck.devices._late_torch import torch
from accelcheck.devices.base import Device, Fingerprint
from accelcheck.devices.packages import requires_torch, versions
from accelcheck.devices.telemetry import Telemetry, processor


class Cpu(Device):
    """``cpu``."""

    name = "cpu"
    type = "cpu"
    dtypes = frozenset({"float32", "float64", "bfloat16", "float16"})
    features = frozenset(
        {"float64", "strided", "inductor", "autocast-bfloat16", "autocast-float16", "quantized-engine", "deterministic"}
    )
    variables: ClassVar[tuple[str, ...]] = (
        *("ATEN_CPU_CAPABILITY", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
        *("KMP_BLOCKTIME", "LRU_CACHE_CAPACITY", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC"),
        *("MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_SCHEDULE"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "TORCH_MKLDNN_MATMUL_MIN_DIM"),
    )

    def detect(self) -> Capability:
        return requires_torch()

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            device=self.name,
            chip=hardware.cpu(),
            count=hardware.usable_cores(),
            runtime=f"ATen {torch.backends.cpu.get_cpu_capability()}",
            versions=versions("torch", "numpy"),
            environment=self.environment(),
        )

    def architecture(self) -> str:
        """The family ``x86_64`` or ``aarch64``, whatever the operating system calls it."""
        machine = platform.machine().lower()
        return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def seed(self, seed: int) -> None:
        # torch.manual_seed records a stack trace for each other backend, which takes longer than a small case.
        torch.default_generator.manual_seed(seed)

    def telemetry(self) -> Telemetry:
        return processor()

    def synchronize(self) -> None:
        return  # CPU operators are synchronous


DEVICES: tuple[Device, ...] = (Cpu(),)
