"""Scaled dot-product attention restricted to one of its backends, without a fallback to another."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, at_least, counted, none_of
from accelcheck.workloads.base import Program
from accelcheck.workloads.dispatch import layer_by_layer

_REFUSALS = re.compile(r"No available kernel|No viable backend for scaled_dot_product_attention")
"""Pattern of torch's error when the backend does not take the inputs, or does not exist on their device."""
_WRONG_DTYPE = "to all be of dtype"
"""Part of torch's warning that a backend does not compute in the dtype of the inputs."""
_OWN = "aten::_scaled_dot_product_"
_MATH = r"aten::(_scaled_dot_product_attention_math|_safe_softmax)"
"""Pattern of the math backend, which is decomposed before it is dispatched, and alone uses ``_safe_softmax``."""
_FUSED = rf"{_OWN}\w*attention\w*(?<!_backward)"
"""Pattern of the backends that are one fused operator."""


class ForcedAttention(Technique):
    """Runs every forward pass under ``sdpa_kernel`` with a single backend.

    Only the call shows whether the backend takes the inputs: CUDA's flash attention takes no explicit mask, for
    example. If it does not, the case is `Unsupported`, with torch's own reasons.
    """

    family = "attention"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html"
    dtypes = ("float32", "bfloat16", "float16")
    requires = frozenset({"attention"})

    def __init__(self, name: str, backend: SDPBackend, operators: Mapping[str, str], promise: str) -> None:
        """Takes in `operators` the pattern of the backend's operator for each device feature; ``*`` is any device."""
        self.name, self.backend, self.operators, self.promise = name, backend, operators, promise

    def capability(self, device: Device) -> Capability:
        """Tells whether this build of torch has a kernel of the backend for the device type.

        Device types without a choice of backends, such as xla, ignore `sdpa_kernel` and always run the math backend.
        """
        if self._operator(device) is None:
            return unsupported(Code.NO_BACKEND, f"torch has no {self.backend.name} kernel for {device.type} tensors")
        if self.backend is SDPBackend.CUDNN_ATTENTION and device.has("hip"):
            return unsupported(Code.NO_BACKEND, "ROCm has no cuDNN")
        flash = device.has("torch-cuda") and self.backend is SDPBackend.FLASH_ATTENTION
        if flash and not torch.backends.cuda.is_flash_attention_available():
            return unavailable(Code.WRONG_BUILD, "this torch was built without flash attention")
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        call = program.module if program.call is None else program.call

        def answer(*inputs: Any) -> Any:
            try:
                return call(*inputs)
            except RuntimeError as error:
                if not _REFUSALS.search(str(error)):
                    raise
                raise Unsupported(self._refusal(error, call, inputs, device)) from error

        program.call = answer
        program.around = self._chosen

    @contextlib.contextmanager
    def _chosen(self) -> Iterator[None]:
        with sdpa_kernel(self.backend), layer_by_layer():  # the fast path of encoder layers has an attention of its own
            yield

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        own = self._operator(device) or self.backend.name
        other = f"(?!({own})$)({_FUSED}|{_MATH})"
        others = {name: count for name, count in log.names().items() if re.fullmatch(other, name)}
        yield at_least(f"{own} dispatched", log.count(own))
        yield none_of("other attention backends dispatched", counted(others))

    def _operator(self, device: Device) -> str | None:
        return next((own for feature, own in self.operators.items() if feature == "*" or device.has(feature)), None)

    def _refusal(
        self, error: RuntimeError, call: Callable[..., Any], inputs: tuple[Any, ...], device: Device
    ) -> Capability:
        # torch gives its reasons as warnings, each only once: call again, with all warnings on.
        messages: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call(*inputs)
            except RuntimeError:
                messages = [str(warning.message).partition(" (Triggered")[0].strip() for warning in caught]
        # "... kernel not used because:" precedes the reasons of each backend; disabled ones have "runtime disabled".
        reasons = [text for text in messages if not text.endswith("because:") and "runtime disabled" not in text]
        code = Code.NO_DTYPE if any(_WRONG_DTYPE in text for text in reasons) else Code.NO_BACKEND
        because = "; ".join(dict.fromkeys(reasons)) or str(error).partition("\n")[0].strip()
        return unsupported(code, f"{self.backend.name} on {device.name} refuses these inputs: {because}", tried=True)


_FLASH = {"host": f"{_OWN}flash_attention_for_cpu", "torch-cuda": f"{_OWN}flash_attention"}
_CUDNN = "cuDNN's fused attention computes exact attention."
_PLAIN = "Attention as matmul, softmax, matmul: the reference for the other backends."
_TILES = "FlashAttention computes exact attention in tiles, without storing the score matrix."
_LEAN = (
    "Memory-efficient attention computes exact attention without storing the score matrix, also with masks and in FP32."
)

TECHNIQUES: tuple[Technique, ...] = tuple(
    ForcedAttention(f"sdpa-{name}", backend, operators, promise)
    for name, backend, operators, promise in (
        ("math", SDPBackend.MATH, {"*": _MATH}, _PLAIN),
        ("flash", SDPBackend.FLASH_ATTENTION, _FLASH, _TILES),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION, {"torch-cuda": f"{_OWN}efficient_attention"}, _LEAN),
        ("cudnn", SDPBackend.CUDNN_ATTENTION, {"torch-cuda": f"{_OWN}cudnn_attention"}, _CUDNN),
    )
)
