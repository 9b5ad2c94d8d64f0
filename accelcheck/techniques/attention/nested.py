"""Attention of nested tensors in the jagged layout: sequences of different lengths without padding."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.attention.jagged import Jagged
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log
from accelcheck.workloads.base import Program
from accelcheck.workloads.packed import Packed

_SEEN = "nested attention"
_REFUSAL = "No viable backend"
"""Part of torch's error message when none of its kernels takes the jagged tensors."""


class NestedAttention(Technique):
    """Replaces ``scaled_dot_product_attention`` of a padded batch with a mask by that of three jagged tensors."""

    name = "sdpa-nested"
    family = "attention"
    promise = "Attention of a jagged batch gives each sequence the result that it has alone, forward and backward."
    source = "https://docs.pytorch.org/docs/stable/nested.html"
    dtypes = ("float32", "bfloat16", "float16")
    requires = frozenset({"packed"})
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})
    differentiates_twice = False

    def capability(self, device: Device) -> Capability:
        fact = " (torch_xla 2.9: 'NestedIntNode' object has no attribute 'expect_size')" * device.has("torch-xla")
        reason = f"jagged tensors need strides, which {device.name} does not declare{fact}"
        return SUPPORTED if device.has("strided") else unsupported(Code.NO_FEATURE, reason)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        causal = isinstance(program.module, Packed) and program.module.causal
        # Flash and memory-efficient attention take jagged tensors on CUDA only; elsewhere the math path is left.
        if causal and not device.has("torch-cuda"):
            reason = f"attention of jagged tensors has no causal mask on {device.name}"
            raise Unsupported(unsupported(Code.NO_FEATURE, reason))

        def call(qkv: Tensor, lengths: Tensor | None = None) -> Tensor:
            jagged = Jagged.of(qkv, lengths)
            # (tokens, H, D) -> (B, H, length, D); kernels need each of the three contiguous.
            q, k, v = (
                torch.nested.nested_tensor_from_jagged(part.contiguous(), jagged.offsets).transpose(1, 2)
                for part in jagged.rows.unbind(1)
            )
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
            program.extras[_SEEN] = (out.layout, out.values().size(0), int(jagged.offsets[-1]))
            return jagged.padded(out.values())

        def answer(*inputs: Tensor) -> Tensor:
            try:
                return call(*inputs)
            except RuntimeError as error:
                if _REFUSAL not in str(error):
                    raise
                reason = f"no kernel on {device.name} takes these jagged tensors: {error}"
                raise Unsupported(unsupported(Code.NO_BACKEND, reason, tried=True)) from error

        program.call = answer
        program.resets.append(lambda: program.extras.pop(_SEEN, None))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        layout, attended, tokens = program.extras.get(_SEEN, (torch.strided, 0, -1))
        yield Evidence("layout of the attention's result is jagged", str(layout), engaged=layout is torch.jagged)
        yield Evidence(f"tokens in the attention's result = {tokens}, without padding", attended, attended == tokens)


TECHNIQUES: tuple[Technique, ...] = (NestedAttention(),)
