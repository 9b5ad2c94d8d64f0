"""FP32 contractions in strict FP32, with which a device's other figures are compared, and in TF32 and bf16.

The effect of a mode on a device is measured: it must make a product of numbers with 12 significant bits inexact. On x86
CPUs, for example, oneDNN treats the modes as a permission, which only its kernels for AMX use.
"""

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from accelcheck.core.capability import BY_TRIAL, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.strict import FLOAT32_LIMIT, strict_matmul
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, at_least
from accelcheck.workloads.base import Program, Workload

_SETTING = "setting in the run"
_TWELVE_BITS = 1024.5
"""Number with a significand of 12 bits; TF32 has 11 and bfloat16 8, including the implicit bit."""


@contextmanager
def matmul_mode(word: str) -> Iterator[None]:
    """Sets ``torch.set_float32_matmul_precision(word)``, with all other modes off; restores all of them."""
    with strict_matmul():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch 2.9 recommends newer settings, which have no equivalent of "medium"
            torch.set_float32_matmul_precision(word)
        yield


@contextmanager
def convolution_mode(precision: str) -> Iterator[None]:
    """Lets cuDNN convolve FP32 in `precision` (``ieee``, ``tf32``), with other modes off; restores all of them."""
    with strict_matmul():
        # torch sets this attribute when it is imported, which mypy does not see.
        torch.backends.cudnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
        yield


def convolution_error(device: torch.device) -> float:
    """Measures the relative error of an FP32 convolution with an identity kernel: 0 in FP32, about 2**-11 in TF32."""
    # 64 channels and a 3x3 kernel: for smaller ones, libraries choose kernels without matrix units.
    weight = torch.nn.init.dirac_(torch.empty(64, 64, 3, 3)).to(device)
    given = torch.full((2, 64, 8, 8), _TWELVE_BITS).to(device)
    with torch.no_grad():
        out = torch.nn.functional.conv2d(given, weight, padding=1)
    return float((out.cpu().double() / _TWELVE_BITS - 1).abs().max())


class ReducedPrecision(Technique):
    """Global mode that lets FP32 contractions round their operands."""

    family = "matmul-precision"
    source = "https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices"
    wanted: str
    """Value of `current` while the mode is on."""
    setting: str
    """Code that turns the mode on, for reasons."""

    @abstractmethod
    def mode(self) -> AbstractContextManager[None]:
        """Makes the context in which the mode is on."""

    @abstractmethod
    def error(self, device: Device) -> float:
        """Measures the relative error, with the present settings, of a contraction that is exact in full FP32 only."""

    @abstractmethod
    def current(self) -> str:
        """Reads the present value of the setting from torch."""

    def measured(self, device: Device) -> Capability:
        """Tells whether the mode changes anything on this device, compared with strict FP32."""
        with device.strict_float32():
            strict = self.error(device)
            with self.mode():
                reduced = self.error(device)
        if reduced > strict:
            return BY_TRIAL
        errors = f"error {reduced:g} with it and {strict:g} in strict FP32"
        fact = f"a product of 12 significant bits has the relative {errors}"
        return unsupported(Code.NO_EFFECT, f"{self.setting} changes nothing on {device.name}: {fact}", tried=True)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if not (effect := self.measured(device)).ok:
            raise Unsupported(effect)
        extras = program.extras

        @contextmanager
        def within() -> Iterator[None]:
            with self.mode():
                extras[_SETTING] = self.current()
                yield

        program.resets.append(lambda: extras.pop(_SETTING, None))
        program.within = within  # not `Program.around`, which does not include the backward pass

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        setting = str(program.extras.get(_SETTING, "never set"))
        yield Evidence(f"setting in the run = {self.wanted}", setting, engaged=setting == self.wanted)
        with self.mode():
            error = self.error(device)
        yield Evidence("relative error of a product of 12 significant bits in this mode > 0", error, engaged=error > 0)


class MatmulPrecision(ReducedPrecision):
    """FP32 matmul under ``torch.set_float32_matmul_precision``."""

    works_on = frozenset({"matmul", "linear", "attention"})

    def __init__(self, name: str, word: str, precision: str, promise: str) -> None:
        self.name, self.wanted, self.promise, self._precision = name, word, promise, precision
        self.setting = f'torch.set_float32_matmul_precision("{word}")'

    def capability(self, device: Device) -> Capability:
        """Tells whether the device reads torch's setting. Its effect is measured when a case runs: chips differ."""
        reason = "torch_xla has its own setting: torch_xla.backends.set_mat_mul_precision"
        return unsupported(Code.NO_BACKEND, reason) if device.has("torch-xla") else BY_TRIAL

    def precision(self, dtype: str) -> str:
        return self._precision

    def mode(self) -> AbstractContextManager[None]:
        return matmul_mode(self.wanted)

    def current(self) -> str:
        return torch.get_float32_matmul_precision()

    def error(self, device: Device) -> float:
        return device.float32_error()


class ConvolutionPrecision(ReducedPrecision):
    """FP32 convolution in TF32."""

    name = "conv-tf32"
    promise = "FP32 convolutions round operands to TF32 (10 fraction bits) and accumulate in FP32."
    works_on = frozenset({"conv"})
    setting = 'torch.backends.cudnn.conv.fp32_precision = "tf32"'
    wanted = "tf32"

    def capability(self, device: Device) -> Capability:
        reason = f"this is a setting of cuDNN, which {device.name} does not use"
        return BY_TRIAL if device.has("torch-cuda") else unsupported(Code.NO_BACKEND, reason)

    def precision(self, dtype: str) -> str:
        return "tf32"

    def mode(self) -> AbstractContextManager[None]:
        return convolution_mode("tf32")

    def current(self) -> str:
        return str(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]  # as above

    def error(self, device: Device) -> float:
        return convolution_error(device.torch_device())


_ERROR = "error of FP32 products"
_READING = "what it looks like"


class StrictFloat32(Technique):
    """Plain program on a device whose FP32 products are measured first: their error tells whether they are in FP32.

    A device that multiplies FP32 wrongly, or in TF32 or bfloat16 against the settings, fails this case with the pattern
    of its errors and their places. All other cases are judged nevertheless: their oracle is on the CPU.
    """

    name = "strict-float32"
    family = "precision"
    timed = False
    promise = "With every reduced-precision mode off, FP32 products are computed in FP32."
    source = "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"
    modes = frozenset({Mode.FORWARD})
    workloads = frozenset({"matmul"})

    def refusal(self, workload: Workload) -> str:
        return super().refusal(workload) or "is about the device: one matrix product shows it"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        error = device.float32_error()
        program.extras[_ERROR] = error
        program.extras[_READING] = "" if error <= FLOAT32_LIMIT else device.float32_products().reading

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield at_least("matrix products dispatched", log.count(r"aten::(mm|addmm|bmm|matmul)"))
        error: float = program.extras[_ERROR]
        told = f"{error:.3g}"
        if program.extras[_READING]:
            forced = device.environment() or "none of the known ones is set"
            told += f": {program.extras[_READING]}. A variable may force TF32 or bf16: {forced}"
        yield Evidence(f"error of products that FP32 has exactly <= {FLOAT32_LIMIT:.3g}", told, error <= FLOAT32_LIMIT)


TECHNIQUES: tuple[Technique, ...] = (
    MatmulPrecision(
        "matmul-tf32", "high", "tf32",
        "FP32 matmuls round operands to TF32, or to sums of two bf16 numbers, and accumulate in FP32."),
    MatmulPrecision(
        "matmul-bf16", "medium", "bfloat16",
        "FP32 matmuls may round operands to bf16, or else as in matmul-tf32, and accumulate in FP32."),
    ConvolutionPrecision(),
    StrictFloat32(),
)  # fmt: skip
