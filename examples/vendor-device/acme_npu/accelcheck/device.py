"""The Acme NPU as a device of accelcheck: declares more than torch itself tells of it."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar

from accelcheck.api import SUPPORTED, Capability, Code, Device, Fingerprint, Memory, unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

COUNT_FALLBACKS = "ACME_COUNT_FALLBACKS"
"""Set to 1, makes operators without a kernel failures, as on a device that does not compute on the host."""
TYPE = "acme"


class Acme(Device):
    """``acme``. Declared and failing is a failure: nothing that the chip cannot do is in `dtypes` and `features`."""

    name = "acme"
    type = TYPE
    dtypes = frozenset({"float32", "float64", "bfloat16", "float16"})
    features = frozenset(
        {"float64", "strided", "autocast-bfloat16", "autocast-float16", "memory-statistics", "deterministic"}
    )
    variables: ClassVar[tuple[str, ...]] = ("ACME_FAULT", COUNT_FALLBACKS, "OMP_NUM_THREADS")
    mask = "ACME_VISIBLE_DEVICES"

    def detect(self) -> Capability:
        with suppress(metadata.PackageNotFoundError):
            metadata.version("torch")
            return SUPPORTED
        return unavailable(Code.NO_PACKAGE, "torch is not installed", "pip install torch")

    def open(self) -> None:
        import torch

        if not hasattr(torch, TYPE):  # `import torch` registers it, unless that is turned off
            from acme_npu import autoload

            autoload()

    def usable(self) -> Capability:
        if self._module().is_available():
            return SUPPORTED
        return unavailable(Code.NO_HARDWARE, "torch.acme.is_available() is False", "load the driver")

    def in_use(self) -> bool:
        import sys

        return "torch" in sys.modules and hasattr(sys.modules["torch"], TYPE) and self._module().is_initialized()

    def fingerprint(self) -> Fingerprint:
        module = self._module()
        return Fingerprint(
            device=self.name,
            chip=module.get_device_name(),
            count=module.device_count(),
            runtime=f"acme-npu {metadata.version('acme-npu')}, computes on the host",
            versions={name: metadata.version(name) for name in ("torch", "numpy", "acme-npu")},
            environment=self.environment(),
        )

    def torch_device(self) -> torch.device:
        import torch

        return torch.device(TYPE, 0)

    def synchronize(self) -> None:
        self._module().synchronize()

    def memory(self) -> Memory:
        import torch

        return Memory(torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated())

    def reset_memory(self) -> None:
        import torch

        torch.accelerator.reset_peak_memory_stats()

    def fallbacks(self) -> Mapping[str, int]:
        """Operators that torch's fallback ran on the CPU.

        The chip *is* the CPU, so that a fallback leaves nothing: accelcheck would report each of them as a failure,
        which on a real chip it is. The fingerprint says that it computes on the host. With `COUNT_FALLBACKS` this
        device is held to what a real one has to show.
        """
        count = self._module().fallbacks()
        return {"operators without a kernel": count} if count and os.environ.get(COUNT_FALLBACKS) == "1" else {}

    def reset_fallbacks(self) -> None:
        self._module().fallbacks(reset=True)

    def _module(self) -> Any:
        import torch

        return torch.get_device_module(TYPE)
