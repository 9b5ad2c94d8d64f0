"""Other accelerators of torch: in-tree (``xpu``, ``mps``, ``mtia``), or out-of-tree as PrivateUse1 (``npu``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

from accelcheck.core import imports
from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.devices import packages, torch_names
from accelcheck.devices._late_torch import torch
from accelcheck.devices.base import Device, Fingerprint, Memory

_UNNAMED = "privateuseone"  # the name of PrivateUse1 until a backend gives it one
_TRIAL = 1 << 20  # bytes

# From torch's documentation of its in-tree accelerators. For others, only their modules and trials tell.
_FEATURES = {
    "xpu": frozenset({"strided", "inductor", "autocast-bfloat16", "autocast-float16"}),
    "mps": frozenset({"strided", "autocast-bfloat16", "autocast-float16"}),
}
_DTYPES = {"xpu": frozenset({"float32", "bfloat16", "float16"}), "mps": frozenset({"float32", "float16"})}
_UNORDERED = {"deterministic": "torch promises it only with torch.use_deterministic_algorithms, which cases do not set"}
_DENIED = {"xpu": _UNORDERED, "mps": _UNORDERED}
_VARIABLES = {
    "npu": ("ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES", "HCCL_DETERMINISTIC", "TASK_QUEUE_ENABLE"),
    "xpu": ("ONEAPI_DEVICE_SELECTOR", "SYCL_DEVICE_FILTER", "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"),
    "mps": ("PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_FAST_MATH", "PYTORCH_MPS_PREFER_METAL"),
}


class Generic(Device):
    """A device known by its torch type alone: it declares the features that torch documents of the type.

    `open` adds those that its module ``torch.<type>`` states. The probe tries the rest.
    """

    variables: ClassVar[tuple[str, ...]] = ("PYTORCH_ALLOC_CONF",)

    def __init__(self, type_name: str) -> None:
        self.name = type_name
        self.type = type_name
        self.dtypes = _DTYPES.get(type_name, frozenset({"float32"}))
        self.features = _FEATURES.get(type_name, frozenset())
        self.denied = _DENIED.get(type_name, {})
        self._wait: Callable[[], object] = self._read_back
        self._statistics: str | None = "not asked: the device is not open"

    def detect(self) -> Capability:
        return packages.requires_torch()

    def usable(self) -> Capability:
        if self.type not in found_types():
            reason = f"no installed package gives torch a device of type {self.type}"
            action = "install the vendor's torch extension, and see that `import torch` loads it"
            return unavailable(Code.NO_PACKAGE, reason, action)
        module = self._module()
        if hasattr(module, "is_available") and not module.is_available():
            reason = f"torch.{self.type}.is_available() is False"
            return unavailable(Code.NO_HARDWARE, reason, "check the vendor's driver")
        return SUPPORTED

    def open(self) -> None:
        if (
            self.type not in found_types() and os.environ.get(packages.AUTOLOAD) == "0"
        ):  # as where another backend is broken
            provider = self._provider()
            packages.load_backend(packages.backends() if provider is None else [provider])
        module = self._module()
        if _ask(module, "is_bf16_supported"):
            self.dtypes |= {"bfloat16"}
        # Every out-of-tree backend with autocast has to give this function: torch.amp asks it.
        for dtype in getattr(module, "get_amp_supported_dtype", list)():
            if dtype in {torch.bfloat16, torch.float16}:
                self.features |= {f"autocast-{str(dtype).removeprefix('torch.')}"}
        self._wait = self._waiter()
        self._statistics = self._trial()
        if self._statistics is None:
            self.features |= {"memory-statistics"}

    def in_use(self) -> bool:
        return "torch" in sys.modules and self.type in found_types() and bool(_ask(self._module(), "is_initialized"))

    def fingerprint(self) -> Fingerprint:
        module = self._module()
        properties = _ask(module, "get_device_properties", 0)
        provider = self._provider()
        distribution = provider.dist if provider is not None else None
        names = [] if distribution is None else [distribution.name]
        names += [name for module in imports.announced() for name in packages.distributions(module)]
        return Fingerprint(
            device=self.name,
            chip=str(_ask(module, "get_device_name", 0) or getattr(properties, "name", "") or self.type),
            count=int(_ask(module, "device_count") or 1),
            memory=int(getattr(properties, "total_memory", 0)),
            runtime=next((f"{name} {packages.version(name)}" for name in names), f"torch.{self.type}"),
            versions=packages.versions("torch", "numpy", *names),
            environment=self.environment(),
        )

    def torch_device(self) -> torch.device:
        return torch.device(self.type, int(_ask(self._module(), "current_device") or 0))

    def synchronize(self) -> None:
        self._wait()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        module = self._module()
        if hasattr(module, "manual_seed_all"):
            module.manual_seed_all(seed)

    def memory(self) -> Memory:
        if self._statistics is not None:
            return Memory(None, None, self._statistics)
        return Memory(torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated())

    def reset_memory(self) -> None:
        if self._statistics is None:
            torch.accelerator.reset_peak_memory_stats()

    def environment(self) -> dict[str, str]:
        names = (*self.variables, *_VARIABLES.get(self.type, ()))
        return {name: os.environ[name] for name in names if name in os.environ}

    def _module(self) -> Any:
        return torch.get_device_module(self.type)

    def _provider(self) -> EntryPoint | None:
        """The installed backend that provides the type, where names tell."""
        return next(
            (
                entry
                for entry in packages.backends()
                if self.type in {*packages.package_of(entry).split("_"), entry.name}
            ),
            None,
        )

    def _waiter(self) -> Callable[[], object]:
        """A function that waits for the device: torch's, else the module's, else one that reads a value back."""
        candidates = [torch.accelerator.synchronize] if _current() == self.type else []
        module = self._module()
        if hasattr(module, "synchronize"):
            candidates.append(module.synchronize)
        for candidate in candidates:
            try:
                candidate()
            except RuntimeError:  # a backend without streams has nothing to wait for
                continue
            return candidate
        return self._read_back

    def _read_back(self) -> object:
        with torch_names.disable_current_modes():  # a watcher would take the copy for an operator on the CPU
            return torch.zeros(1, device=self.torch_device()).cpu()

    def _trial(self) -> str | None:
        """The reason why torch.accelerator's memory statistics are unreliable; None where they follow an allocation."""
        if _current() != self.type:
            return f"torch.accelerator serves {_current() or 'no device'}, not {self.type}"
        try:
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            held = torch.empty(_TRIAL, dtype=torch.uint8, device=self.torch_device())
            grown = torch.accelerator.memory_allocated() - before
            del held
            grown = min(grown, torch.accelerator.max_memory_allocated() - before)
        except RuntimeError as error:
            return f"{self.type} offers no memory statistics: {str(error).splitlines()[0]}"
        if grown < _TRIAL:
            return f"{self.type}'s memory statistics did not follow an allocation of {_TRIAL} bytes: {grown}"
        return None


def found_types() -> tuple[str, ...]:
    """Types of the accelerators that torch has in this process: the one it was built for, and PrivateUse1 if named."""
    private = torch_names.privateuse1_backend_name()
    named = private if private != _UNNAMED and hasattr(torch, private) else None
    return tuple(dict.fromkeys(kind for kind in (_current(), named) if kind is not None and kind != _UNNAMED))


def _current() -> str | None:
    """Type of the accelerator that `torch.accelerator` serves; a CUDA build says ``cuda`` without a GPU, too."""
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def _ask(module: Any, function: str, *args: Any) -> Any:
    """The result of a function of a device module; None where the module does not have it."""
    return getattr(module, function)(*args) if hasattr(module, function) else None
