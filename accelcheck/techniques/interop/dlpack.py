"""Zero-copy exchange of tensors with another array library and back: NumPy, JAX and CuPy through DLPack."""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module, metadata
from types import MappingProxyType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.packages import version
from accelcheck.devices.torch_names import pytree
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.workloads.base import Program

EXCHANGES = "exchanges"
"""Key in `Program.extras` of the list of `ExchangeRecord`."""
WORKLOADS = frozenset(
    """attention-mask elementwise-5 index-select matmul matmul-empty matmul-expanded matmul-long matmul-sliced
    matmul-transposed mlp train-mlp""".split()
)
"""One workload for each kind of tensor memory (bool, int64, ...): an exchange does not depend on the computation."""


class _Exchange(torch.autograd.Function):
    """Exchanges a tensor, and its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, through_library: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.through_library = through_library
        return through_library(value.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,) = grads
        return exchange(grad, ctx.through_library), None


def exchange(value: Tensor, through_library: Callable[[Tensor], Tensor]) -> Tensor:
    """Exchanges a tensor there and back, differentiably; `through_library` gets tensors that require no gradient."""
    out: Tensor = _Exchange.apply(value, through_library)  # type: ignore[no-untyped-call]  # not annotated in torch
    return out


def exchange_all(program: Program, through_library: Callable[[Tensor], Tensor]) -> None:
    """Exchanges every input and output of the program."""
    module = program.module

    def each(values: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda value: exchange(value, through_library), values)

    program.call = lambda *inputs: each(module(*each(inputs)))


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """Record of an exchange of a tensor: addresses of its first element in torch, in the library, and back in torch.

    They must be equal if the library promises to share this tensor's memory (`shareable`).
    """

    here: int
    there: int
    back: int
    shareable: bool

    @property
    def shared(self) -> bool:
        """True if all three addresses are equal: nothing was copied."""
        return self.here == self.there == self.back


class ArrayExchange(Technique):
    """Passes every input and output of a workload, and their gradients, through another library."""

    family = "interop"
    workloads = WORKLOADS
    library: ClassVar[str]
    """Import name of the library."""
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
    limits = "they are empty"
    """Reasons for which the library cannot share some tensors, for evidence."""

    def give(self, tensor: Tensor) -> Any:
        """Makes the library's array over a tensor's memory."""
        return self.module().from_dlpack(tensor)

    def take(self, array: Any) -> Tensor:
        """Makes the tensor over an array's memory."""
        return from_dlpack(array)

    def address(self, array: Any) -> int:
        """Returns the address of an array's first element."""
        raise NotImplementedError(f"{type(self).__name__}.address: return the address of an array's first element")

    def fill(self, array: Any, value: Any) -> None:
        """Writes a value to all elements of an array. Not called for libraries with immutable arrays."""
        array[...] = value

    def first(self, array: Any) -> float:
        """Reads the first element of an array."""
        return float(array.reshape(-1)[0])

    def exchangeable(self, tensor: Tensor) -> bool:
        """Returns whether the library has the tensor's dtype."""
        return True

    def shareable(self, tensor: Tensor) -> bool:
        """Returns whether the library promises to share the tensor's memory."""
        return tensor.numel() > 0  # each library has its own address for empty arrays

    def module(self) -> Any:
        """Imports the library."""
        return import_module(self.library)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        exchanges = program.extras[EXCHANGES] = list[ExchangeRecord]()
        program.resets.append(exchanges.clear)

        def through_library(tensor: Tensor) -> Tensor:
            if not self.exchangeable(tensor):
                return tensor
            array = self.give(tensor)
            back = self.take(array)
            places = tensor.data_ptr(), self.address(array), back.data_ptr()
            exchanges.append(ExchangeRecord(*places, self.shareable(tensor)))
            return back

        exchange_all(program, through_library)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        exchanges: list[ExchangeRecord] = program.extras[EXCHANGES]
        yield at_least(f"tensors through {self.library}", len(exchanges), 2)
        copied = [record for record in exchanges if not record.shared]
        wrongly = sum(record.shareable for record in copied)
        yield exactly("shareable tensors that were copied", wrongly, 0)
        # For information: where a library documents that it cannot share, it may copy.
        yield Evidence(f"others that were copied: {self.limits} (any number)", len(copied) - wrongly, engaged=True)
        yield from self.writes(program)

    def writes(self, program: Program) -> Iterable[Evidence]:
        """Yields evidence that each side sees the writes of the other one."""
        here = torch.zeros(16, device=program.inputs[0].device)
        there = self.give(here)
        back = self.take(there)
        here.fill_(1.0)
        yield exactly("views that see a write by torch", [self.first(there), float(back[0])].count(1.0), 2)
        self.fill(there, 2.0)
        yield exactly("views that see a write by the library", [float(here[0]), float(back[0])].count(2.0), 2)


class NumpyExchange(ArrayExchange):
    """``numpy.from_dlpack`` and ``torch.from_dlpack``."""

    name = "dlpack-numpy"
    library = "numpy"
    promise = "NumPy and torch share memory through DLPack: both see the same strides, dtypes and writes."
    source = "https://numpy.org/doc/stable/reference/generated/numpy.from_dlpack.html"
    dtypes = ("float32", "float16")

    def capability(self, device: Device) -> Capability:
        if not device.has("host"):
            return unsupported(Code.NO_FEATURE, f"NumPy's arrays are in host memory, {device.name}'s tensors are not")
        if not self.give(torch.zeros(1)).flags.writeable:
            reason = f"numpy {version('numpy')} makes all imported arrays read-only"
            return unavailable(Code.WRONG_VERSION, reason, "pip install 'numpy>=2.2.5'")
        return SUPPORTED

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        array = self.module().zeros(1)
        array.flags.writeable = False
        let_out = 0
        with contextlib.suppress(BufferError):
            array.__dlpack__()
            let_out = 1
        yield exactly("read-only arrays given to consumers that cannot know it (DLPack before 1.0)", let_out, 0)


class JaxExchange(ArrayExchange):
    """``jax.dlpack.from_dlpack`` and ``torch.from_dlpack``.

    JAX shares tensors that are dense in some order of their dimensions and aligned to 64 bytes. It copies unaligned
    tensors, and refuses those that are not dense, which are made contiguous first. 64-bit types are left out, since JAX
    narrows them unless its 64-bit mode is on.
    """

    name = "dlpack-jax"
    library = "jax"
    promise = "JAX and torch share dense and aligned memory through DLPack."
    source = "https://docs.jax.dev/en/latest/jax.dlpack.html"
    dtypes = ("float32", "bfloat16", "float16")
    packages = MappingProxyType({"jax": 'pip install "accelcheck[jax]"'})
    limits = "they are empty, not dense, or not aligned to 64 bytes"
    alignment = 64
    """Alignment in bytes that XLA's compiled code for the CPU assumes of its operands."""

    def capability(self, device: Device) -> Capability:
        if device.has("host"):
            return SUPPORTED
        if not device.has("torch-cuda"):
            fact = " (torch_xla exports only from CUDA)" * device.has("torch-xla")
            return unsupported(Code.NO_FEATURE, f"DLPack does not pass {device.name}'s tensors to JAX{fact}")
        cuda, rocm = "pip install 'jax[cuda13]'", "https://docs.jax.dev/en/latest/installation.html"
        kind, command = ("cuda", cuda) if torch.version.hip is None else ("rocm", rocm)
        if not any(kind in entry.name for entry in metadata.entry_points(group="jax_plugins")):
            return unavailable(Code.NO_PACKAGE, f"no JAX plugin for {kind} is installed", command)
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if device.has("torch-cuda"):
            # By default, JAX reserves three quarters of the device's memory at its first use.
            with mock.patch.dict(os.environ, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}):
                self.module().devices()
        super().prepare(program, mode, device)

    def give(self, tensor: Tensor) -> Any:
        return import_module("jax.dlpack").from_dlpack(tensor if dense(tensor) else tensor.contiguous())

    def address(self, array: Any) -> int:
        return int(array.unsafe_buffer_pointer())

    def exchangeable(self, tensor: Tensor) -> bool:
        return tensor.element_size() < 8

    def shareable(self, tensor: Tensor) -> bool:
        return super().shareable(tensor) and dense(tensor) and tensor.data_ptr() % self.alignment == 0

    def writes(self, program: Program) -> Iterable[Evidence]:
        return itertools.islice(super().writes(program), 1)  # JAX's arrays are immutable: only torch writes


class CupyExchange(ArrayExchange):
    """``cupy.from_dlpack`` and ``torch.from_dlpack``, all on one stream."""

    name = "cupy-zero-copy"
    library = "cupy"
    promise = "CuPy and torch share device memory through DLPack, without a copy or a synchronisation."
    source = "https://docs.cupy.dev/en/stable/user_guide/interoperability.html"
    dtypes = ("float32", "float16")
    packages = MappingProxyType({"cupy": "pip install cupy-cuda13x (or the one for your CUDA or ROCm)"})

    def capability(self, device: Device) -> Capability:
        reason = f"CuPy's arrays are in a GPU's memory, {device.name}'s tensors are not"
        return SUPPORTED if device.has("torch-cuda") else unsupported(Code.NO_FEATURE, reason)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)


def dense(tensor: Tensor) -> bool:
    """Returns whether the elements fill their memory without gaps or overlaps, in some order of the dimensions."""
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.size(i)))
    sizes = [tensor.size(i) for i in order if tensor.size(i) != 1]
    strides = [tensor.stride(i) for i in order if tensor.size(i) != 1]
    return tensor.numel() == 0 or strides == [math.prod(sizes[:i]) for i in range(len(sizes))]


TECHNIQUES: tuple[Technique, ...] = (NumpyExchange(), JaxExchange(), CupyExchange())
