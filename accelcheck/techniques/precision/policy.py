"""Precision policy by module: the model computes in half precision; norms, embeddings and softmax stay in float32."""

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from accelcheck.core.capability import SUPPORTED, Capability, Code
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, at_least, exactly, operators
from accelcheck.techniques.precision.amp import INITIAL_SCALE, contractions, math_attention, stored_in_float32
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Probe

KEPT = (
    nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.Embedding, nn.Softmax, nn.LogSoftmax,
)  # fmt: skip
"""Modules that stay in float32: sums over many elements, exponentials, and tables with small updates."""

SENSITIVE = (
    r"aten::(native_layer_norm|_fused_rms_norm|native_group_norm|\w*batch_norm\w*|embedding|_(safe_|log_)?softmax)"
)
"""Pattern of the forward operators that the policy keeps in float32."""

_WORKLOADS = frozenset(
    """mlp-blocks cnn embedding-norm-gelu multi-head-attention transformer-block transformer-blocks train-mlp
    train-transformer trajectory-mlp digits-mlp digits-cnn digits-vit digits-mlp-training""".split()
)
"""Workloads that together have every kind of module in `KEPT`, and one training of each kind."""


class Policy(Technique):
    """Stores parameters in float32 and casts them for each forward pass, so that their changes take effect.

    Inputs of the model are cast to half precision and its outputs to float32; inputs of a module in `KEPT` are cast to
    float32 and its outputs to half precision. There are no other casts.
    """

    family = "precision"
    workloads = _WORKLOADS
    source = "https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html"
    level = 2
    early = frozenset({"mlp-blocks", "embedding-norm-gelu", "multi-head-attention", "transformer-block"})
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN, Mode.TRAJECTORY, Mode.ACCURACY, Mode.LEARNING})

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype
        self.half = str(dtype).removeprefix("torch.")
        self.promise = f"All modules compute in {self.half}; norms, embeddings, softmax and parameters stay float32."

    def capability(self, device: Device) -> Capability:
        return SUPPORTED if self.half in device.dtypes else device.lacks(self.half, Code.NO_DTYPE)

    def admits(self, probe: Probe) -> bool:
        """Refuses huge inputs in float16, which the first cast would overflow."""
        return self.dtype != torch.float16 or probe.name != "huge"

    def precision(self, dtype: str) -> str:
        return self.half

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        for part in _kept(program.module):
            part.register_forward_pre_hook(lambda _, inputs: cast(inputs, torch.float32))
            part.register_forward_hook(lambda _, __, out: cast(out, self.dtype))
        program.call = functools.partial(call, program.module, self.dtype)
        if self.dtype == torch.float16 and mode not in {Mode.FORWARD, Mode.BACKWARD}:
            program.scaler = torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen = operators(log)
        sensitive = [op for op in seen.operators if re.fullmatch(SENSITIVE, op.name)]
        kept, lost = (sum(op.takes(dtype) for op in sensitive) for dtype in (torch.float32, self.dtype))
        full, excused = contractions(seen, torch.float32), math_attention(seen, mode)
        if any(isinstance(part, nn.Linear) for part in program.module.modules()):
            yield at_least(f"contractions that took {self.half}", contractions(seen, self.dtype))
        else:
            yield at_least(f"operators that took {self.half}", seen.having(lambda op: op.takes(self.dtype)))
        yield Evidence(f"contractions that took float32 <= {excused}", full, engaged=full <= excused)
        yield at_least("norms, embeddings, softmax that took float32", kept, len(_kept(program.module)))
        yield exactly(f"norms, embeddings, softmax that took {self.half}", lost, 0)
        yield stored_in_float32(program)


def call(module: nn.Module, dtype: torch.dtype, *inputs: Any) -> Any:
    """Calls ``module`` with all parameters but those of `KEPT` modules in `dtype`; gradients reach the originals."""
    # By name: a table that is also a head, as in language models, is float32 as the table and half as the head.
    held = {name for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, KEPT)}
    halves = {
        name: cast(parameter, dtype)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name.rpartition(".")[0] not in held
    }
    return cast(functional_call(module, halves, cast(inputs, dtype), tie_weights=False), torch.float32)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point tensors in `value` to `dtype`, also those in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(cast(item, dtype) for item in value)
    return value


def _kept(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, KEPT)]


TECHNIQUES: tuple[Technique, ...] = (Policy("policy-bf16", torch.bfloat16), Policy("policy-fp16", torch.float16))
