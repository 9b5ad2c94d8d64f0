# mypy: implicit-reexport
# ruff: noqa: F401
"""The private names of torch that accelcheck uses, in one place, each looked up at its use.

Torch may rename or remove them in any release. A name that is gone raises `UnknownTorchError`: cases that need it are
``unavailable``, and ``accelcheck list`` names it. Importing this module imports no torch.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import _GLOBAL_DEVICE_CONTEXT as GLOBAL_DEVICE_CONTEXT
    from torch import _make_per_channel_quantized_tensor as per_channel_quantized
    from torch import _make_per_tensor_quantized_tensor as per_tensor_quantized
    from torch import _scaled_mm as scaled_mm
    from torch._C import DispatchKey, DispatchKeySet, TensorType
    from torch._C import _current_autograd_node as current_autograd_node
    from torch._C import _dispatch_tls_local_exclude_set as excluded_keys
    from torch._C import _dispatch_tls_local_include_set as included_keys
    from torch._C import _ForceDispatchKeyGuard as ForceDispatchKeyGuard
    from torch._C import _functorch as functorch
    from torch._C import _get_function_stack_at as function_mode_at
    from torch._C import _get_mkldnn_enabled as mkldnn_enabled
    from torch._C import _get_privateuse1_backend_name as privateuse1_backend_name
    from torch._C import _InferenceMode as InferenceMode
    from torch._C import _is_multithreading_enabled as autograd_multithreading
    from torch._C import _jit_pass_inline as jit_inline
    from torch._C import _len_torch_function_stack as function_modes
    from torch._C import _nn as compiled_functions
    from torch._C import _pop_torch_function_stack as pop_function_mode
    from torch._C import _push_on_torch_function_stack as push_function_mode
    from torch._C import _set_grad_enabled as set_grad_mode
    from torch._C import _set_mkldnn_enabled as set_mkldnn_enabled
    from torch._C import _set_multithreading_enabled as set_autograd_multithreading
    from torch._C._autograd import DeviceType
    from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensor_hooks
    from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensor_hooks
    from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensor_hooks
    from torch._C._profiler import _EventType as EventType
    from torch._decomp import decomposition_table
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import lookup_backend
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.trace_rules import get_torch_obj_rule_map as dynamo_functions
    from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
    from torch._higher_order_ops import scan, while_loop
    from torch._inductor import aoti_compile_and_package, aoti_load_package, lowering
    from torch._inductor import config as inductor_config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CacheBase
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.package import AOTICompiledModel  # type: ignore[attr-defined]  # not exported
    from torch._inductor.utils import fresh_cache, fresh_inductor_cache
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.autograd import _get_sequence_nr as autograd_sequence  # type: ignore[attr-defined]  # not exported
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
    from torch.jit import _recursive as recursive
    from torch.library import _impls as python_kernels
    from torch.nn.modules.dropout import _DropoutNd as dropout_base
    from torch.optim.optimizer import _get_capturable_supported_devices as capturable_devices
    from torch.optim.optimizer import _global_optimizer_post_hooks as optimizer_post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_pre_hooks
    from torch.utils import _python_dispatch as python_dispatch
    from torch.utils import _pytree as pytree
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices as fused_kernel_devices
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as get_current_dispatch_mode_stack
    from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
    from torch.utils.data._utils import fetch as data_fetch

SUPPORTED_TORCH = "2.9 to 2.15"
"""The tested releases, as in pyproject.toml."""


def _annotated() -> Iterator[tuple[str, tuple[str, str]]]:
    """Names here, each with its module and attribute in torch: those of the imports above, by which mypy checks uses."""
    for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            yield from ((alias.asname or alias.name, (str(node.module), alias.name)) for alias in node.names)


NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(dict(sorted(_annotated())))
"""Module and attribute in torch, by the name here."""


class UnknownTorchError(RuntimeError):
    """A private name of torch is gone; the message says which, and which releases are supported."""


def __getattr__(name: str) -> Any:
    """The attribute of torch behind a name of `NAMES`; an `UnknownTorchError` where this torch does not have it."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found(*NAMES[name])


def found(module: str, attribute: str) -> Any:
    """An attribute of one of torch's modules; an `UnknownTorchError` where this torch does not have it."""
    try:
        path, *parts = f"{module}.{attribute}".split(".")
        place: Any = importlib.import_module(path)
        for part in parts:
            path = f"{path}.{part}"
            # A submodule that nothing has imported yet is no attribute.
            place = getattr(place, part) if hasattr(place, part) else importlib.import_module(path)
    except (ImportError, AttributeError) as error:
        raise UnknownTorchError(
            f"accelcheck does not know this torch ({metadata.version('torch')}): {module}.{attribute} is gone; "
            f"accelcheck supports torch {SUPPORTED_TORCH}"
        ) from error
    return place


def gone() -> list[str]:
    """The reason for each name that this torch lacks. Imports all of torch's compilers, which takes seconds."""
    reasons: list[str] = []
    for place in NAMES.values():
        try:
            found(*place)
        except UnknownTorchError as error:
            reasons.append(str(error))
    return reasons
