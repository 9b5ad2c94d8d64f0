"""FP32 contractions in reduced precision: TF32 and bf16 matmul, TF32 convolution.

Whether a mode exists on a device is measured, not looked up: it must make a product of 12 significant bits inexact. On
x86 CPUs, for one, oneDNN takes the modes as a permission, which its kernels use only with AMX.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.strict import strict_matmul
from accelcheck.techniques.base import Technique, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload

_SETTING = "setting in the run"
_TWELVE_BITS = 1024.5
"""Needs a significand of 12 bits; TF32 has 11, bfloat16 8, counting the implicit one."""


@contextmanager
def matmul_mode(word: str) -> Iterator[None]:
    """Within it, ``torch.set_float32_matmul_precision(word)`` holds and every other mode is off; then all is as found."""
    with strict_matmul():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 recommends switches that say nothing of "medium"
            torch.set_float32_matmul_precision(word)
        yield


@contextmanager
def convolution_mode(precision: str) -> Iterator[None]:
    """Within it, cuDNN may convolve FP32 in `precision` (``ieee``, ``tf32``), other modes are off; then all is as found."""
    with strict_matmul():
        # torch sets this attribute when it is imported, which mypy does not see.
        torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
        yield


def convolution_error(device: torch.device) -> float:
    """Relative error of an FP32 convolution that must give its input back: 0 in FP32, 2**-11 or so in TF32."""
    # 64 channels and 3x3 taps: below that, libraries choose kernels without matrix units.
    weight = torch.nn.init.dirac_(torch.empty(64, 64, 3, 3)).to(device)
    given = torch.full((2, 64, 8, 8), _TWELVE_BITS).to(device)
    with torch.no_grad():
        out = torch.nn.functional.conv2d(given, weight, padding=1)
    return float((out.cpu().double() / _TWELVE_BITS - 1).abs().max())


class ReducedPrecision(Technique):
    """A global mode that lets FP32 contractions round their operands."""

    family = "matmul-precision"
    source = "https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices"
    works_on: frozenset[str]
    """Traits, of which a workload needs one."""

    @abstractmethod
    def mode(self) -> AbstractContextManager[None]:
        """The context in which the mode holds."""

    @abstractmethod
    def error(self, device: Device) -> float:
        """Relative error, as things are set now, of a contraction that only full FP32 gives exactly."""

    @abstractmethod
    def current(self) -> str:
        """The setting as torch gives it back now."""

    @property
    @abstractmethod
    def wanted(self) -> str:
        """What `current` is in the mode."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """How the mode is set, for reasons."""

    def accepts(self, workload: Workload) -> bool:
        return super().accepts(workload) and bool(self.works_on & workload.traits)

    def measured(self, device: Device) -> Capability:
        """Whether the mode changes anything here; strict FP32 around it, so that the error is not the device's default."""
        with device.strict_float32():
            strict = self.error(device)
            with self.mode():
                reduced = self.error(device)
        if reduced > strict:
            return SUPPORTED
        return unsupported(
            Code.NO_EFFECT,
            f"{self.setting} changes nothing on {device.name}: a product of 12 significant bits has the relative "
            f"error {reduced:g} with it and {strict:g} in strict FP32",
        )

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode
        found = self.measured(device)
        if not found.ok:
            raise Unsupported(found)
        extras = program.extras

        @contextmanager
        def within() -> Iterator[None]:
            with self.mode():
                extras[_SETTING] = self.current()
                yield

        program.within = within  # the backward pass must run in the mode too, which `Program.around` does not reach

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del log, mode
        setting = str(program.extras.get(_SETTING, "never set"))
        yield Evidence(f"setting in the run = {self.wanted}", setting, engaged=setting == self.wanted)
        with self.mode():
            error = self.error(device)
        yield Evidence("relative error of a product of 12 significant bits, so set, > 0", error, engaged=error > 0)


class MatmulPrecision(ReducedPrecision):
    """FP32 matmul in what ``torch.set_float32_matmul_precision`` allows."""

    works_on = frozenset({"matmul", "linear", "attention"})

    def __init__(self, name: str, word: str, precision: str, promise: str) -> None:
        self.name = name
        self.word = word
        self.promise = promise
        self._precision = precision

    @property
    def setting(self) -> str:
        return f'torch.set_float32_matmul_precision("{self.word}")'

    def capability(self, device: Device) -> Capability:
        """Where torch's setting is read at all; what it does there is measured when a case runs."""
        if device.type == "xla":
            return unsupported(
                Code.NO_BACKEND, "torch_xla reads a setting of its own: torch_xla.backends.set_mat_mul_precision"
            )
        return SUPPORTED

    def precision(self, dtype: str) -> str:
        del dtype
        return self._precision

    def mode(self) -> AbstractContextManager[None]:
        return matmul_mode(self.word)

    @property
    def wanted(self) -> str:
        return self.word

    def current(self) -> str:
        return torch.get_float32_matmul_precision()

    def error(self, device: Device) -> float:
        return device.float32_error()


class ConvolutionPrecision(ReducedPrecision):
    """FP32 convolution in TF32."""

    name = "conv-tf32"
    promise = "FP32 convolutions round operands to TF32 (10 bits of fraction) and accumulate in FP32."
    works_on = frozenset({"conv"})
    setting = 'torch.backends.cudnn.conv.fp32_precision = "tf32"'
    wanted = "tf32"

    def capability(self, device: Device) -> Capability:
        """It is a setting of cuDNN."""
        if device.type != "cuda":
            return unsupported(Code.NO_BACKEND, f"a setting of cuDNN, which {device.name} does not use")
        return SUPPORTED

    def precision(self, dtype: str) -> str:
        del dtype
        return "tf32"

    def mode(self) -> AbstractContextManager[None]:
        return convolution_mode("tf32")

    def current(self) -> str:
        return str(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]  # as above

    def error(self, device: Device) -> float:
        return convolution_error(device.torch_device())


TECHNIQUES: tuple[Technique, ...] = (
    MatmulPrecision(
        "matmul-tf32", "high", "tf32", "FP32 matmuls round operands to TF32, or to two bf16 terms; FP32 accumulation."
    ),
    MatmulPrecision(
        "matmul-bf16", "medium", "bfloat16", "FP32 matmuls may round operands to bf16, where not, as in matmul-tf32."
    ),
    ConvolutionPrecision(),
)
