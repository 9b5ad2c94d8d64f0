"""The interface of a device, and its records. Imports no torch: nox and the probe's parent use it."""

from __future__ import annotations

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.devices._late_torch import torch
from accelcheck.devices.telemetry import Telemetry

if TYPE_CHECKING:
    from accelcheck.devices.strict import Products

T = TypeVar("T")

FEATURES: Mapping[str, str] = {
    "float64": "computes in FP64",
    "strided": "tensors have strides",
    "lazy": "operators are queued until `synchronize`",
    "deterministic": "the same run gives the same bits; a rerun is then compared bit by bit",
    "exclusive": "one process at a time can hold it",
    "memory-statistics": "allocated bytes and their peak are known",
    "pinned-memory": "copies from page-locked host memory; without it, accelcheck tries",
    "autocast-bfloat16": "torch.autocast to bfloat16",
    "autocast-float16": "torch.autocast to float16",
    "inductor": "torch.compile's inductor generates code for it",
    "inductor-cpp": "inductor generates C++, and needs a compiler for it",
    "inductor-triton": "inductor generates Triton kernels, and needs the package triton",
    "cuda-graphs": "torch.compile captures kernels in graphs and replays them",
    "flex-attention": "torch's flex_attention takes its tensors",
    "quantized-engine": "int8 kernels of torch.ao",
    "integer-products": "torch and torchao multiply int8 by int8; without it, accelcheck tries",
    "float8-products": "torchao's dynamic float8",
    "host": "the host's processor: tensors are in host memory, and any number of processes share it",
    "torch-cuda": "an NVIDIA or AMD GPU of torch.cuda, whose tensors CuPy, JAX and libraries of GPU kernels take",
    "xla": "XLA compiles what it runs",
    "hip": "a GPU of torch.cuda that is AMD's: cuDNN and TensorRT do not exist there",
    "torch-xla": "a device of torch_xla, whose compiler, checkpoints and loaders take its tensors",
}
"""Features that a device may declare, with their meaning."""
OF_TYPE: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"host", "inductor-cpp", "flex-attention", "integer-products"}),
    "cuda": frozenset(
        {"torch-cuda", "inductor-triton", "pinned-memory", "flex-attention", "integer-products", "float8-products"}
    ),
    "xla": frozenset({"torch-xla", "xla"}),
    "tpu": frozenset({"xla"}),
    "xpu": frozenset({"flex-attention", "integer-products", "float8-products"}),
    "mps": frozenset({"flex-attention"}),
    "hpu": frozenset({"flex-attention"}),
}
"""Features that torch or one of its libraries gives to every device of a `torch.device` type."""
TRIED = ("bfloat16", "float16", "strided", "autocast-bfloat16", "autocast-float16", "deterministic")
"""Dtypes and features that `accelcheck.devices.trying` tries where a device neither declares nor denies them."""
FOUND = "found by trying"
"""The answer of a trial that found something."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of a device for baselines and reports, in plain texts and numbers, so that it travels as JSON.

    Attributes:
        chip: The processor's name, such as ``NVIDIA H200`` or a CPU's model name.
        count: Number of chips that this process may use.
        memory: Bytes of device memory of one chip; 0 where it is not known.
        driver: Driver version; empty where there is none.
        runtime: Runtime and its version, such as ``CUDA 13.0``, ``HIP 7.2``, ``PJRT CPU``.
        versions: Version by package name: torch and the libraries that change results.
        environment: The variables that are set and change results or speed, by name.
    """

    device: str
    chip: str
    count: int
    memory: int = 0
    driver: str = ""
    runtime: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Status:
    """The probe's result for one device.

    Attributes:
        capability: ``ok``, or why the device cannot be used.
        fingerprint: Identity of the device; None where it cannot be used.
        answers: Results of the trials, by dtype or feature: `FOUND`, or why not. No part of the fingerprint, so that
            baselines stay valid when a trial finds more.
    """

    device: str
    capability: Capability
    fingerprint: Fingerprint | None = None
    answers: Mapping[str, str] = field(default_factory=dict)

    @property
    def present(self) -> bool:
        """True when cases can run on it."""
        return self.capability.ok

    @property
    def found(self) -> frozenset[str]:
        """Dtypes and features that were found by trying."""
        return frozenset(word for word, answer in self.answers.items() if answer == FOUND)

    def told(self) -> str:
        """The answers for people; empty where there are none."""
        lacks = (f"{word} {answer}" for word, answer in self.answers.items() if answer != FOUND)
        listed = ", ".join(word for word in self.answers if word in self.found)
        return "; ".join([*([f"{FOUND}: {listed}"] if listed else []), *lacks])

    def as_json(self) -> dict[str, Any]:
        """The record as JSON-ready values; `status_from_json` reads it back."""
        return asdict(self)


def status_from_json(data: Any) -> Status:
    """A status from parsed JSON, read by schema; a ValueError names a field that is missing or not legal."""
    return _converted(data, Status)


def fingerprint_from_json(data: Any) -> Fingerprint:
    """A fingerprint from parsed JSON, read by schema; a ValueError names a field that is missing or not legal."""
    return _converted(data, Fingerprint)


def _converted(data: Any, kind: type[T]) -> T:
    import msgspec  # late: nox reads devices without packages

    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"status: {error}") from error


@dataclass(frozen=True, slots=True)
class Memory:
    """Device memory in bytes; None, with the reason, where it is not known."""

    allocated: int | None
    peak: int | None
    reason: str = ""


class Device(ABC):
    """A backend under test. Each has a file in `accelcheck.devices`, which lists it in `DEVICES`.

    `detect` reads the host alone and imports nothing. `fingerprint` runs in the probe's child process. All other
    methods run in the process that executes cases, where torch is imported.
    """

    name: str
    """Name on the command line."""
    type: str
    """Its `torch.device` type; a ROCm build's is ``cuda``."""
    dtypes: frozenset[str] = frozenset({"float32"})
    """Storage dtypes that it declares to support; a failure in one of them is a failure of the device."""
    features: frozenset[str] = frozenset()
    """Declared features, of `FEATURES`, besides those of its type in `OF_TYPE`. Ask with `has`."""
    denied: Mapping[str, str] = MappingProxyType({})
    """Dtypes and features that it must not be judged by, each with the reason, which reports show. The probe tries
    those of `TRIED` that are neither declared nor denied."""
    answers: Mapping[str, str] = MappingProxyType({})
    """Answers of the probe's trials in this run; set by `learn`."""
    variables: ClassVar[tuple[str, ...]] = ()
    """Environment variables that change its results or speed; the ones that are set are part of the fingerprint."""
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that a script must import for the device to exist, where `import torch` does not load its backend."""
    mask: ClassVar[str] = ""
    """Environment variable, of a device of another package, with the comma-separated ids of the chips that a process
    sees. Each pytest-xdist worker gets one id; an empty value hides all chips. Without a mask workers share them."""

    def has(self, feature: str) -> bool:
        """True for a feature of `FEATURES` by its own declaration, by its type's, or by trial."""
        return feature not in self.denied and (feature in self.features or feature in OF_TYPE.get(self.type, ()))

    def learn(self, status: Status) -> None:
        """Adds dtypes and features that the probe found by trying: failures in them then count as in declared ones."""
        self.answers = status.answers
        self.features |= status.found & FEATURES.keys()
        self.dtypes |= status.found - FEATURES.keys()

    def lacks(self, word: str, code: Code) -> Capability:
        """The answer ``unsupported``, with the reason why it lacks a dtype or feature."""
        if word in self.denied:
            return unsupported(code, f"{self.name} denies {word}: {self.denied[word]}")
        answer = f": {self.answers[word]}" if word in self.answers else ""
        return unsupported(code, f"{self.name} does not declare {word}{answer}", tried=word in TRIED)

    def detect(self) -> Capability:
        """Looks for the hardware and the packages on this machine, without imports and without opening anything."""
        return SUPPORTED

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """Its fingerprint. Called in a child process; raises whatever the backend raises when it cannot be used."""

    def usable(self) -> Capability:
        """Asks this torch build, in the child process after `open`, if it can use the device."""
        return SUPPORTED

    def open(self) -> None:
        """Imports the modules that the device needs, once, before its first case in a process."""
        return

    def in_use(self) -> bool:
        """True when this process uses it, so that a fork of this process cannot."""
        return False

    def shared(self) -> bool:
        """True when another process can open it while this one holds it. Called when the device is open."""
        return True

    def computes_on_host(self) -> bool:
        """True when the host's processor computes for it. Called when the device is open."""
        return self.has("host")

    def architecture(self) -> str:
        """The chip's family: a name in `accelcheck.expectations.chips`, or empty. Called when the device is open."""
        return ""

    @abstractmethod
    def torch_device(self) -> torch.device:
        """The device to put tensors on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all its work; on a lazy device, submits the work first."""

    def elapsed(self, call: Callable[[], object], times: int) -> float:
        """Seconds that `times` calls take one after the other, by the best clock of the device.

        An asynchronous device overrides this where it has clocks of its own, such as events.
        """
        self.synchronize()
        start = time.perf_counter()
        for _ in itertools.repeat(None, times):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def seed(self, seed: int) -> None:
        """Seeds every generator that a case may draw from."""
        torch.manual_seed(seed)

    def memory(self) -> Memory:
        """Memory that tensors hold now, and the peak since `reset_memory`."""
        return Memory(None, None, f"{self.name} offers no memory statistics")

    def telemetry(self) -> Telemetry:
        """The chip's clock, temperature and energy now."""
        return Telemetry()

    def reset_memory(self) -> None:
        """Resets the peak."""
        return

    @contextmanager
    def strict_float32(self) -> Iterator[None]:
        """A context without TF32, bf16 and reduced-precision reductions in FP32 operators."""
        from accelcheck.devices.strict import strict_matmul

        with strict_matmul():
            yield

    def float32_error(self) -> float:
        """Relative error of FP32 products that TF32 (2**-11) and bf16 (2**-8.2) cannot do exactly; 0 for true FP32."""
        return self.float32_products().error

    def float32_products(self) -> Products:
        """The errors of FP32 products that TF32 and bf16 cannot do exactly; see `accelcheck.devices.strict`."""
        from accelcheck.devices.strict import products

        return products(self.torch_device())

    def fallbacks(self) -> Mapping[str, int]:
        """Number of operators that the backend silently ran on the CPU since `reset_fallbacks`, by name."""
        return {}

    def reset_fallbacks(self) -> None:
        """Resets the count."""
        return

    def environment(self) -> dict[str, str]:
        """The variables of `variables` that are set, with their values."""
        return {name: os.environ[name] for name in self.variables if name in os.environ}
