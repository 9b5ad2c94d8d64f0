"""Memory formats: channels-last convolutions, and tensors made contiguous before each module."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, at_least, exactly, memory_format, operators
from accelcheck.workloads.base import Program

_CONVOLUTION = re.compile(r"aten::(convolution|convolution_overrideable|\w*_convolution\w*)(?<!_backward)")
_COPIES = "tensors made contiguous"


class ChannelsLast(Technique):
    """Converts 4-D parameters and 4-D inputs to ``torch.channels_last``."""

    name = "channels-last"
    family = "layout"
    promise = (
        "Channels-last (NHWC) strides change the speed of convolutions, not their values, and propagate to outputs."
    )
    source = "https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html"
    requires = frozenset({"conv"})
    keeps_strides = False
    dtypes = ("float32", "bfloat16", "float16")

    def capability(self, device: Device) -> Capability:
        return self.needs(device, "strided")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        # torch annotates `Module.to` without its memory_format-only form.
        program.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        program.inputs = tuple(_to_channels_last(value) for value in program.inputs)
        tensors = (value for value in (*program.module.parameters(), *program.inputs) if isinstance(value, Tensor))
        if all(memory_format(value) != "channels_last" for value in tensors):
            reason = "no input has four dimensions, and kernels of one element have both formats"
            raise Unsupported(unsupported(Code.NO_EFFECT, reason))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        convolutions = [operator for operator in operators(log).operators if _CONVOLUTION.fullmatch(operator.name)]
        given = [operator for operator in convolutions if "channels_last" in operator.formats_in]
        # A kernel of one element leaves a contiguous input's format as it is.
        held = [operator for operator in convolutions if operator in given or "both" not in operator.formats_in]
        lost = sum(not {*operator.formats_out} <= {"channels_last", "both", ""} for operator in held)
        yield at_least("convolutions that took a channels-last input or weight", len(given))
        yield exactly(f"of {len(held)} convolutions, outputs not channels-last", lost, 0)


class Contiguous(Technique):
    """Calls every module with contiguous tensors, as vendors' porting guides recommend for kernels that need them."""

    name = "contiguous"
    family = "layout"
    promise = "Calls of `.contiguous()` between modules change strides, not values or gradients."
    source = "https://docs.pytorch.org/docs/stable/generated/torch.Tensor.contiguous.html"
    keeps_strides = False

    def capability(self, device: Device) -> Capability:
        return self.needs(device, "strided")

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        extras = program.extras
        extras[_COPIES] = 0
        program.resets.append(lambda: extras.update({_COPIES: 0}))

        def dense(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.is_contiguous():
                return value
            extras[_COPIES] += 1
            return value.contiguous()

        def make_contiguous(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return tuple(map(dense, args)), {name: dense(value) for name, value in kwargs.items()}

        for module in program.module.modules():
            module.register_forward_pre_hook(make_contiguous, with_kwargs=True)
        call = program.module if program.call is None else program.call

        def answer(*inputs: Any) -> Any:
            out = call(*inputs)
            if not extras[_COPIES]:
                # Strides between modules are known only after a run.
                raise Unsupported(unsupported(Code.NO_EFFECT, "every tensor given to a module is contiguous already"))
            return out

        program.call = answer

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield at_least("non-contiguous tensors given to modules, made contiguous", program.extras[_COPIES])
        yield at_least("copies dispatched", log.count("aten::clone|aten::contiguous|aten::_to_copy"))


def _to_channels_last(value: Any) -> Any:
    images = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if images else value


TECHNIQUES: tuple[Technique, ...] = (ChannelsLast(), Contiguous())
