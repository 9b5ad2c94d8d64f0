"""XLA devices through torch_xla: TPUs, and any processor through PJRT's CPU client."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.devices import hardware
from accelcheck.devices._late_torch import torch
from accelcheck.devices.base import Device, Fingerprint, Memory
from accelcheck.devices.packages import installed, release, requires, requires_torch, version, versions

_CLIENT = "PJRT_DEVICE"
_READ = "aten::_local_scalar_dense"  # `Tensor.item()`: the host reads a value, and computes nothing


class Xla(Device):
    """``xla``.

    Without ``PJRT_DEVICE``, a machine with neither TPU nor Neuron runs on PJRT's CPU client, as torch_xla itself
    decides; `open` then sets the variable, so that child processes and the fingerprint have it.
    """

    name = "xla"
    type = "xla"
    dtypes = frozenset({"float32", "float64", "bfloat16", "float16"})
    features = frozenset({"float64", "autocast-bfloat16", "lazy", "deterministic"})
    denied: Mapping[str, str] = MappingProxyType(
        {
            "strided": "XLA chooses the layouts, and gives every tensor the strides of a contiguous one",
            "autocast-float16": "torch_xla documents it for GPUs alone, which its releases for torch 2.9 do not run on",
        }
    )
    modules: ClassVar[tuple[str, ...]] = ("torch_xla",)
    variables: ClassVar[tuple[str, ...]] = (
        *("CPU_NUM_DEVICES", "LIBTPU_INIT_ARGS", "PJRT_DEVICE", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_LIBRARY_PATH"),
        *("TPU_PROCESS_BOUNDS", "TPU_VISIBLE_CHIPS", "XLA_DISABLE_FUNCTIONALIZATION", "XLA_DOWNCAST_BF16"),
        *("XLA_DOWNCAST_FP16", "XLA_FLAGS", "XLA_PERSISTENT_CACHE_PATH", "XLA_USE_BF16", "XLA_USE_EAGER_DEBUG_MODE"),
        *("XLA_USE_FP16", "XLA_USE_SPMD"),
    )

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()

    def detect(self) -> Capability:
        needed = requires_torch()
        if needed.ok:
            needed = requires("torch_xla", 'pip install "accelcheck[xla]" (torch_xla 2.9 pairs with torch 2.9)')
        return self._matched() if needed.ok else needed

    def _matched(self) -> Capability:
        ours, theirs = version("torch-xla"), version("torch")
        # The extension module is bound to the C++ symbols of one torch release.
        if ours and theirs and release(ours) != release(theirs):
            wanted = ".".join(map(str, release(ours)))
            reason = f"torch_xla {ours} is built for torch {wanted}, and torch {theirs} is installed"
            return unavailable(Code.WRONG_BUILD, reason, f'pip install "torch=={wanted}.*"')
        client = os.environ.get(_CLIENT, "")
        chips = hardware.tpu()
        if client == "TPU" and not chips.capability.ok:
            return unavailable(Code.NO_HARDWARE, f"{_CLIENT}=TPU, but {chips.capability.reason}", f"set {_CLIENT}=CPU")
        if not client and chips.count and not (installed("libtpu") or "TPU_LIBRARY_PATH" in os.environ):
            reason = f"this machine has {chips.count} TPU chip(s), but libtpu is not installed"
            return unavailable(Code.NO_PACKAGE, reason, f'pip install "torch_xla[tpu]", or set {_CLIENT}=CPU')
        return SUPPORTED

    def open(self) -> None:
        if _CLIENT not in os.environ and not hardware.tpu().count and not installed("libneuronxla"):
            os.environ[_CLIENT] = "CPU"
        if os.environ.get(_CLIENT) != "CPU":
            self.features |= {"exclusive"}
        import_module("torch_xla")

    def in_use(self) -> bool:
        extension = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
        return bool(getattr(extension, "_xla_runtime_is_initialized", bool)())

    @property
    def client(self) -> str:
        """The PJRT client in use: ``CPU``, ``TPU``, ``NEURON``."""
        return str(import_module("torch_xla.runtime").device_type())

    def shared(self) -> bool:
        return self.client not in {"TPU", "NEURON"}

    def computes_on_host(self) -> bool:
        return self.client == "CPU"

    def fingerprint(self) -> Fingerprint:
        chips = hardware.tpu()
        if self.client == "TPU":
            # From the PCI bus: the runtime would open the chips to count them.
            chip, count = chips.names[0] if chips.names else "TPU", chips.count
        else:
            chip = hardware.cpu() if self.client == "CPU" else self.client
            count = int(import_module("torch_xla.runtime").addressable_runtime_device_count())
        return Fingerprint(
            device=self.name,
            chip=chip,
            count=count,
            runtime=f"PJRT {self.client}",
            versions=versions("torch", "torch-xla", "libtpu", "numpy"),
            environment=self.environment(),
        )

    def architecture(self) -> str:
        """The PJRT client, such as ``pjrt-cpu``."""
        return f"pjrt-{self.client.lower()}"

    def torch_device(self) -> torch.device:
        device: torch.device = import_module("torch_xla").device()
        return device

    def synchronize(self) -> None:
        import_module("torch_xla").sync()
        import_module("torch_xla.core.xla_model").wait_device_ops()

    def elapsed(self, call: Callable[[], object], times: int) -> float:
        """Seconds of the calls, holding each result until it is there: XLA does not compute unreferenced results."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            held = call()
            self.synchronize()
            del held
        return time.perf_counter() - start

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        import_module("torch_xla").manual_seed(seed)  # torch.manual_seed does not reach XLA's generator

    def memory(self) -> Memory:
        try:
            info: Mapping[str, int] = import_module("torch_xla.core.xla_model").get_memory_info(self.torch_device())
            held = int(info["bytes_used"])
        except (RuntimeError, KeyError) as error:
            return Memory(None, None, f"torch_xla has no memory statistics on PJRT {self.client}: {error}")
        return Memory(held, None, "torch_xla cannot reset the peak")

    @contextmanager
    def strict_float32(self) -> Iterator[None]:
        with super().strict_float32(), ExitStack() as restored:
            if self.client != "CPU":  # a CPU multiplies FP32 exactly at every setting
                precision: Any = import_module("torch_xla.backends")
                before = precision.get_mat_mul_precision()
                if before != "highest":
                    precision.set_mat_mul_precision("highest")
                    restored.callback(precision.set_mat_mul_precision, before)
            yield

    def fallbacks(self) -> Mapping[str, int]:
        # torch_xla counts an operator that it hands to the CPU under `aten::`, one that it lowers under `xla::`.
        now = _cpu_counters()
        return {name: count - self._counted[name] for name, count in now.items() if count > self._counted[name]}

    def reset_fallbacks(self) -> None:
        # The counters are not cleared: others read them too.
        self._counted = _cpu_counters()


def _cpu_counters() -> Counter[str]:
    metrics: Any = import_module("torch_xla.debug.metrics")
    names = (name for name in metrics.counter_names() if name.startswith("aten::") and name != _READ)
    return Counter({name: int(metrics.counter_value(name)) for name in names})


DEVICES: tuple[Device, ...] = (Xla(),)
