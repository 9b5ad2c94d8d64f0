"""Techniques that leave global state changed, or change it while they run; other cases must not be affected."""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from accelcheck.devices import torch_names
from accelcheck.devices.torch_names import TorchDispatchMode, set_mkldnn_enabled
from accelcheck.selftest.faults.base import FLOAT32, HALVES, Change, alike, derived, everywhere, passes, where
from accelcheck.selftest.faults.plant import always
from accelcheck.workloads.base import Program

_ATTENTION = functional.scaled_dot_product_attention
_HELD: list[Any] = []
"""Contexts that would end when they are collected."""


class _IdleDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Calls every operator as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _IdleFunction(TorchFunctionMode):
    """Calls every function as it is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _enter(context: Any) -> None:
    context.__enter__()
    _HELD.append(context)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product that is 1 % wrong."""
    out = 1.01 * torch.matmul(x, weight.t())
    return out if bias is None else out + bias


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    """Attention that is 1 % wrong."""
    return 1.01 * _ATTENTION(*args, **kwargs)


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    return _linear(x, self.weight, self.bias)


def _wrong(*args: Any, **kwargs: Any) -> Any:
    """Stands in for a function that no judge calls."""
    raise NotImplementedError


def _register() -> None:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # untyped in torch
    library.impl("pinverse", _wrong, "CPU")  # type: ignore[no-untyped-call]  # as above
    _HELD.append(library)


def _round_up() -> None:
    for upwards in (0x800, 0x400000):  # of x86, and of Arm; each refuses the other's
        ctypes.pythonapi.fesetround(upwards)


LEAKS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        "grad mode": lambda: torch.set_grad_enabled(False),
        "inference mode": lambda: _enter(torch.inference_mode()),
        "default dtype": lambda: torch.set_default_dtype(torch.float64),
        "default device": lambda: torch.set_default_device("meta"),
        "autocast on cpu": lambda: _enter(torch.autocast("cpu", torch.bfloat16)),
        "dispatch modes": lambda: _enter(_IdleDispatch()),  # type: ignore[no-untyped-call]  # untyped in torch
        "function modes": lambda: _enter(_IdleFunction()),
        "deterministic algorithms": lambda: torch.use_deterministic_algorithms(mode=True),
        "flush-denormal": lambda: torch.set_flush_denormal(True),
        "rounding mode": _round_up,
        "mkldnn": lambda: set_mkldnn_enabled(False),
        "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        "threads of autograd": lambda: torch_names.set_autograd_multithreading(False),
        "attention kernels": lambda: torch.backends.cuda.enable_flash_sdp(False),  # noqa: FBT003 - as above
        "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
        "saved-tensor hooks": lambda: _enter(torch.autograd.graph.saved_tensors_hooks(lambda x: 1.01 * x, lambda x: x)),
        "hooks of all modules or optimizers": lambda: nn.modules.module.register_module_forward_hook(
            lambda _, __, out: 1.01 * out
        ),
        "functions": lambda: setattr(functional, "linear", _linear),
        "functions of a class": lambda: setattr(nn.Linear, "forward", _forward),
        "functions that were inherited": lambda: setattr(torch.Tensor, "sum", lambda self, *_: self),
        "functions of a class of optimizers": lambda: setattr(torch.optim.SGD, "step", _wrong),
        "functions of a form of optimizers": lambda: setattr(sys.modules["torch.optim.sgd"], "sgd", _wrong),
        "functions that clip gradients": lambda: setattr(nn.utils, "clip_grad_norm_", _wrong),
        "functions of a scaler": lambda: setattr(torch.amp.GradScaler, "step", _wrong),
        "functions of a context": lambda: setattr(torch.autocast, "__enter__", _wrong),
        "functions of a compiled module": lambda: setattr(torch_names.compiled_functions, "gelu_", _wrong),
        "functions that call operators": lambda: setattr(torch.ops.aten, "pinverse", _wrong),
        "kernels of torch.library": _register,
        "torch._dynamo.config": lambda: setattr(torch_names.dynamo_config, "suppress_errors", True),
        "torch._inductor.config": lambda: setattr(torch_names.inductor_config, "epilogue_fusion", False),
        "environment": lambda: os.environ.update(ACCELCHECK_LEAKED="1"),
        "working folder": lambda: os.chdir(os.sep),
    }
)
"""Changes of one part of the global state; a case reports it under the name up to `` of a `` or `` that ``."""


def _while_it_runs(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[float], Change]:
    """Plant a context that is active within the run alone."""

    def change(program: Program) -> None:
        program.within = context

    return lambda _: change


_leaking = always(lambda leak: lambda _: leak())
_infers = where(
    lambda device: not device.has("torch-xla"),
    "torch_xla raises in inference mode: the case is an error, whatever it leaves",
)
_NO_DTYPE = dict.fromkeys(HALVES, "the state of a process is no matter of the storage dtype")

fault = alike(absent=_NO_DTYPE)

FAULTS = (
    *(
        fault(f"leaves-{name.replace(' ', '-')}-changed", f"Leaves changed, after the case: {name}.")(
            derived("mlp"), _leaking(leak), exists=_infers if name == "inference mode" else everywhere
        )
        for name, leak in LEAKS.items()
    ),
    fault(
        "linear-replaced-while-it-runs",
        "Replaces torch.nn.functional.linear by a kernel that is 1 % wrong, and puts it back after each run.",
    )(passes("mlp", FLOAT32), _while_it_runs(lambda: mock.patch.object(functional, "linear", _linear))),
    fault(
        "attention-replaced-while-it-runs",
        "Replaces scaled_dot_product_attention by a kernel that is 1 % wrong, and puts it back after each run.",
    )(
        passes("attention", FLOAT32),
        _while_it_runs(lambda: mock.patch.object(functional, "scaled_dot_product_attention", _attend)),
    ),
    fault("no-gradients-while-it-runs", "Computes without gradients, and enables them again after each run.")(
        derived("mlp"), _while_it_runs(torch.no_grad)
    ),
)
