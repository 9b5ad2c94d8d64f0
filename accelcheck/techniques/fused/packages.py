"""Kernels of packages in place of parts of a model: Liger's, which Triton's interpreter runs on a CPU, and a loss.

Sources: P.-L. Hsu et al., arXiv:2410.10989 (Liger); E. Wijmans et al., arXiv:2411.09009 (cut cross-entropy).
"""

import contextlib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.compilation.compile import Compilation, compiled, inductor_capability
from accelcheck.techniques.fused.kernels import FusedKernel, even
from accelcheck.techniques.observe import Log, exactly
from accelcheck.workloads.base import Program
from accelcheck.workloads.decoders import GroupedAttention, Options, SwiGlu
from accelcheck.workloads.large_models import VocabularyLoss


class Announced:
    """Triton kernel each of whose launches calls an operator ``accelcheck::NAME``, which evidence counts.

    It is launched in a context `around`, which gives the function of its arguments.
    """

    def __init__(self, name: str, kernel: Any, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.kernel, self.around = kernel, around
        torch.library.define(f"accelcheck::{name}", "() -> ()")
        torch.library.impl(f"accelcheck::{name}", "CompositeExplicitAutograd", lambda: None)
        self.launched = getattr(torch.ops.accelcheck, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            self.launched()
            with self.around() as taken:
                self.kernel[grid](*map(taken, given), **{name: taken(value) for name, value in options.items()})

        return launch


_ANNOUNCED: dict[str, Announced] = {}


@cache
def kernels_of(name: str) -> Any:
    """Imports a module of kernels and announces their launches; without a GPU, Triton's interpreter runs them."""
    interpreted = not torch.cuda.is_available() and not torch.xpu.is_available()
    around = _interpreting if interpreted else partial(contextlib.nullcontext, lambda value: value)
    with around():
        module: Any = importlib.import_module(name)
    for key, kernel in list(vars(module).items()):
        if key.endswith(("_kernel", "_rope")) and hasattr(kernel, "run") and not isinstance(kernel, Announced):
            if key not in _ANNOUNCED:
                _ANNOUNCED[key] = Announced(key.strip("_"), kernel, around)
            setattr(module, key, _ANNOUNCED[key])
    if interpreted and hasattr(module, "rsqrt"):  # the interpreter has no functions of CUDA's library
        module.rsqrt = lambda x: importlib.import_module("triton.language").rsqrt(x)
    return module


@contextlib.contextmanager
def _interpreting() -> Iterator[Callable[[Any], Any]]:
    """Has Triton interpret kernels for a while; gives what makes a number of Python's float, as compiled kernels get it."""
    triton = _interpreted()
    handle, kind = importlib.import_module("triton.runtime.interpreter").TensorHandle, triton.language.float32

    def number(value: Any) -> Any:
        if not isinstance(value, float):
            return value
        return triton.language.tensor(handle(torch.tensor([value]).numpy(), kind), kind)

    before, triton.knobs.runtime.interpret = triton.knobs.runtime.interpret, True
    try:
        yield number
    finally:
        triton.knobs.runtime.interpret = before


@cache
def _interpreted() -> Any:
    """Imports Triton, with the functions of its own that kernels call for its interpreter."""
    triton, interpreter = (importlib.import_module(name) for name in ("triton", "triton.runtime.interpreter"))
    importlib.import_module("triton.experimental.gluon.language")  # which takes no interpreted function
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        for key, value in list(vars(sys.modules[name]).items()):
            if isinstance(value, triton.runtime.JITFunction):
                setattr(sys.modules[name], key, interpreter.InterpretedFunction(value.fn))
    return triton


def by_liger(layer: VocabularyLoss, hidden: Tensor, target: Tensor) -> Tensor:
    """Computes `VocabularyLoss.loss` in chunks, whose gradients Liger makes in the forward pass."""
    function = kernels_of("liger_kernel.ops.fused_linear_cross_entropy").LigerFusedLinearCrossEntropyFunction
    out: tuple[Tensor, ...] = function.apply(hidden, layer.head.weight, target)
    return out[0]


def of_logits(layer: VocabularyLoss, hidden: Tensor, target: Tensor) -> Tensor:
    """Computes `VocabularyLoss.loss` of logits, in whose place Liger writes their gradients."""
    function = kernels_of("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    out: tuple[Tensor, ...] = function.apply(layer.head(hidden), target, None)
    return out[0]


def normalised(layer: nn.RMSNorm, x: Tensor) -> Tensor:
    """Computes ``RMSNorm.forward``."""
    function = kernels_of("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    out: Tensor = function.apply(x, layer.weight, layer.eps)
    return out


def gated(layer: SwiGlu, x: Tensor) -> Tensor:
    """Computes `SwiGlu.forward`."""
    function = kernels_of("liger_kernel.ops.swiglu").LigerSiLUMulFunction
    out: Tensor = layer.down(function.apply(layer.gate(x), layer.up(x)))
    return out


def rotated(layer: GroupedAttention, x: Tensor, positions: Tensor) -> Tensor:
    """Computes `GroupedAttention.rotated`; Liger's kernel rotates queries and keys at once, in their place."""
    function = kernels_of("liger_kernel.ops.rope").LigerRopeFunction
    cosines, sines = (table[positions].unsqueeze(0) for table in (layer.cosines, layer.sines))
    out: tuple[Tensor, Tensor] = function.apply(x.clone(), x[:, :1].clone(), cosines, sines)
    return out[0]


def cut(layer: VocabularyLoss, hidden: Tensor, target: Tensor) -> Tensor:
    """Computes `VocabularyLoss.loss` by the kernels of cut-cross-entropy, which here leave no gradient out."""
    kernels_of("cut_cross_entropy.cce_lse_forward")
    return _cut(layer, hidden, target, impl="cce", filter_eps=None)


def cut_compiled(layer: VocabularyLoss, hidden: Tensor, target: Tensor) -> Tensor:
    """Computes `VocabularyLoss.loss` by the code that cut-cross-entropy compiles."""
    return _cut(layer, hidden, target, impl="torch_compile")


def _cut(layer: VocabularyLoss, hidden: Tensor, target: Tensor, **options: Any) -> Tensor:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    out: Tensor = function(hidden, layer.head.weight, target, **options)
    return out


class CompiledLoss(FusedKernel, Compilation):
    """Replaces it by a function that ``torch.compile`` compiles, and nothing else of the module."""

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        Compilation.prepare(self, program, mode, device)
        FusedKernel.prepare(self, program, mode, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from compiled(log, mode, "inductor")
        yield exactly(f"calls of {self.never}", log.count(self.never), 0)


def _compiled_by_triton(device: Device, *, interpreted: bool) -> Capability:
    if device.has("inductor-triton") or (interpreted and device.has("host") and not torch.cuda.is_available()):
        return SUPPORTED
    advice = "its kernels run on a CPU by Triton's interpreter, in a process without a GPU" * interpreted
    return unsupported(Code.NO_BACKEND, f"Triton compiles for GPUs, not for {device.name}", advice)


def _alike(function: Any, place: Any, *, part: Any, method: str, shape: tuple[int, ...], **more: Any) -> Tensor:
    """Tries a method of a part; returns where the result is eager's."""
    layer = part().to(place)
    inputs = [x.to(place) for x in (torch.linspace(-1.0, 1.0, math.prod(shape)).reshape(shape), *more.values())]
    return torch.isclose(function(layer, *inputs), getattr(type(layer), method)(layer, *inputs), atol=1e-5)


def _loss(kind: type[FusedKernel] = FusedKernel, **words: Any) -> FusedKernel:
    """Makes a technique that replaces `VocabularyLoss.loss`."""
    return kind(
        part=VocabularyLoss, method="loss", workloads=frozenset({"vocabulary-loss", "train-vocabulary"}), calls=(1, 1),
        never="aten::(nll_loss_forward|_log_softmax)", example=even, **words
    )  # fmt: skip


def _package(name: str, page: str, *, interpreted: bool) -> dict[str, Any]:
    packages = dict.fromkeys(("triton", name), "pip install 'accelcheck[triton]'")
    exists = partial(_compiled_by_triton, interpreted=interpreted)
    return {"packages": packages, "source": f"https://github.com/{page}", "exists": exists}


_LIGER = _package("liger_kernel", "linkedin/Liger-Kernel", interpreted=True)
_APPLE = _package("cut_cross_entropy", "apple/ml-cross-entropy", interpreted=False)
_decoder = partial(FusedKernel, **_LIGER, workloads=frozenset({"decoder"}))

TECHNIQUES: tuple[FusedKernel, ...] = (
    _loss(
        name="liger-linear-cross-entropy", function=by_liger, **_LIGER,
        operator="accelcheck::liger_cross_entropy_kernel",
        promise="Head and loss by Liger's kernel give the loss and gradients of both, without all logits."),
    _loss(
        name="liger-cross-entropy", function=of_logits, **_LIGER, operator="accelcheck::liger_cross_entropy_kernel",
        promise="Liger's cross entropy, which writes gradients in place of logits, gives eager's loss and gradients."),
    _decoder(
        name="liger-rms-norm", function=normalised, part=nn.RMSNorm, method="forward", calls=(5, 10),
        example=partial(_alike, part=partial(nn.RMSNorm, 32, 1e-5), method="forward", shape=(2, 32)),
        operator="accelcheck::(block_)?rms_norm_(forward|backward)_kernel", never="aten::(_fused_)?rms_norm(_backward)?",
        promise="RMSNorm by Liger's kernels gives what eager's gives."),
    _decoder(
        name="liger-swiglu", function=gated, part=SwiGlu, method="forward", calls=(2, 4),
        example=partial(_alike, part=SwiGlu, method="forward", shape=(1, 2, 32)),
        operator="accelcheck::swiglu_(forward|backward)_kernel", never="aten::silu(_backward)?",
        promise="Gated units by Liger's kernels, which compute the gate anew backward, give what eager's operators give."),
    _decoder(
        name="liger-rope", function=rotated, part=GroupedAttention, method="rotated", calls=(4, 8),
        example=partial(
            _alike, part=partial(GroupedAttention, Options(), 0), method="rotated", shape=(1, 2, 3, 8), positions=torch.arange(3)
        ),
        operator="accelcheck::triton_rope", never="aten::neg",
        promise="Rotary embeddings by Liger's kernel, which writes in place, give what eager's operators give."),
    _loss(
        name="cut-cross-entropy", function=cut, **_APPLE, dtypes=("bfloat16",),
        operator="accelcheck::cce_lse_forward_kernel",
        promise="Kernels that keep logits in registers give the loss and gradients of head and cross entropy."),
    _loss(
        CompiledLoss, name="cut-cross-entropy-compiled", function=cut_compiled, operator="torch.compile",
        **_APPLE | {"exists": inductor_capability},
        promise="Head and loss as cut-cross-entropy compiles them give the loss and gradients of both."),
)  # fmt: skip
