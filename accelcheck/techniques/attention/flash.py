"""FlashAttention packages: their functions replace torch's attention, and run on packed and jagged tensors."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.packages import release, version
from accelcheck.techniques.attention.intercept import Call, count, count_from_zero, intercept, taken
from accelcheck.techniques.attention.jagged import Jagged
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, ProfilerLog, at_least
from accelcheck.workloads.base import Program
from accelcheck.workloads.packed import Packed

_KERNELS = r"(?i)(?!.*pytorch_flash)(?=.*(flash|fmha))(?=.*({})).*kernel.*"
"""Pattern of the packages' device kernels; those of torch's own are in the namespace ``pytorch_flash``."""
_PACKED, _PACKED_VARLEN = "flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"
_LOWER_RIGHT = (2, 1)
"""First flash-attn whose causal masks are aligned to the last key (bottom right); before, to the first (top left)."""


@dataclass(frozen=True)
class FlashGeneration:
    """Differences between the generations of FlashAttention.

    `module` is the import name of its functions, `distribution` the one whose version counts, and `needs` a module that
    is installed with it, if `module` alone does not show that. `capability` is the lowest CUDA compute capability of
    its kernels; `rocm` tells of kernels for AMD GPUs, `dropout` of an argument ``dropout_p``. `unbounded` stands for no
    limit on a side of ``window_size``; `packed` names the functions that take query, key and value in one tensor.
    """

    module: str
    distribution: str
    install: str
    capability: tuple[int, int]
    rocm: bool = False
    dropout: bool = False
    unbounded: int | None = -1
    packed: frozenset[str] = frozenset()
    needs: str | None = None

    def call(self, function: str, *tensors: Tensor, **options: Any) -> Tensor:
        """Calls a function of the package; returns its result, or the first of several."""
        out = getattr(import_module(self.module), function)(*tensors, **options)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


class FlashAttention(Technique):
    """Replaces each call of torch's attention by the package's, or the whole module of a workload with packed tensors.

    With `jagged`, the functions for jagged sequences are used also where all have the same length.
    """

    family = "attention"
    source = "https://github.com/Dao-AILab/flash-attention"
    dtypes = ("bfloat16", "float16")
    requires = frozenset({"attention"})
    keeps_strides = False
    differentiates_twice = False
    watch = ProfilerLog

    def __init__(
        self, name: str, package: FlashGeneration, promise: str, *, jagged: bool = False, excludes: Iterable[str] = ()
    ) -> None:
        self.name, self.package, self.promise, self.jagged = name, package, promise, jagged
        self.excludes = frozenset(excludes)
        self.packages = MappingProxyType(dict.fromkeys(filter(None, (package.module, package.needs)), package.install))
        self.modes = frozenset(Mode) - (frozenset() if package.dropout else {Mode.RANDOM})

    def capability(self, device: Device) -> Capability:
        package = self.package
        if not device.has("torch-cuda") or (torch.version.hip is not None and not package.rocm):
            makers = "NVIDIA and AMD GPUs" if package.rocm else "NVIDIA GPUs"
            return unsupported(Code.NO_BACKEND, f"{package.distribution} has kernels for {makers} only")
        if torch.version.hip is None and torch.cuda.get_device_capability() < package.capability:
            wanted, actual = (".".join(map(str, c)) for c in (package.capability, torch.cuda.get_device_capability()))
            reason = f"{package.distribution} needs compute capability {wanted}, the GPU has {actual}"
            return unsupported(Code.NO_FEATURE, reason)
        present = version(package.distribution)
        if present and release(present) < _LOWER_RIGHT:
            reason = f"{package.distribution} {present} aligns causal masks to the top left"
            return unavailable(Code.WRONG_VERSION, reason, package.install)
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if not isinstance(program.module, Packed):
            intercept(program, self.attend)
            return
        causal = program.module.causal
        count_from_zero(program)

        def call(qkv: Tensor, lengths: Tensor | None = None) -> Tensor:
            count(program)
            if lengths is None and not self.jagged:
                return self.fixed(qkv, causal=causal)
            jagged = Jagged.of(qkv, lengths)
            return jagged.padded(self.variable(jagged, causal=causal))

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from taken(program, log, self.package.module)
        if device.has("torch-cuda"):
            yield at_least("forward kernels of the package launched", log.count(_KERNELS.format("fwd|forward")))
            if mode not in {Mode.FORWARD, Mode.ACCURACY}:
                yield at_least("backward kernels of the package launched", log.count(_KERNELS.format("bwd|backward")))

    def fixed(self, qkv: Tensor, *, causal: bool) -> Tensor:
        """Computes self-attention of ``(B, S, 3, H, D)``, to ``(B, S, H, D)``."""
        if _PACKED in self.package.packed:
            return self.package.call(_PACKED, qkv, causal=causal)
        return self.package.call("flash_attn_func", *qkv.unbind(2), causal=causal)

    def variable(self, jagged: Jagged, *, causal: bool) -> Tensor:
        """Computes self-attention of each sequence of ``(tokens, 3, H, D)``, to ``(tokens, H, D)``."""
        offsets, longest = jagged.offsets.to(torch.int32), jagged.longest
        if _PACKED_VARLEN in self.package.packed:
            places = {"cu_seqlens": offsets, "max_seqlen": longest}
            return self.package.call(_PACKED_VARLEN, jagged.rows, **places, causal=causal)
        return self._varlen(jagged.rows.unbind(1), offsets, offsets, longest, longest, causal=causal)

    def attend(self, call: Call) -> Tensor:
        """Computes attention for a call of torch's function, ``(B, H, S, D)``; the package uses ``(B, S, H, D)``.

        Raises `Unsupported` for a mask that is not causal, or dropout that the package lacks.
        """
        options = self._options(call)
        # Aligned to the top left, no query sees keys beyond the last query; without them, both alignments are the same.
        keys = min(call.sizes[2:]) if call.is_causal else call.key.size(2)
        depth, width = call.query.size(-1), call.value.size(-1)
        # Kernels need the same depth for all three, a multiple of 8. Zeros in added columns change no score.
        wide = -(-max(depth, width) // 8) * 8
        q, k, v = (
            functional.pad(part.transpose(1, 2), (0, wide - part.size(-1)))
            for part in (call.query, call.key[:, :, :keys], call.value[:, :, :keys])
        )
        options["softmax_scale"] = depth**-0.5 if call.scale is None else call.scale
        attend = self._jagged if self.jagged else partial(self.package.call, "flash_attn_func")
        return attend(q, k, v, **options)[..., :width].transpose(1, 2)

    def _jagged(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        batch, queries, keys = q.size(0), q.size(1), k.size(1)
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        parts = [part.flatten(0, 1) for part in (q, k, v)]
        out = self._varlen(parts, offsets * queries, offsets * keys, queries, keys, **options)
        return out.view(batch, queries, *out.shape[1:])

    def _varlen(self, parts: Iterable[Tensor], *limits: Any, **options: Any) -> Tensor:
        """Calls the function for jagged tensors; limits are offsets and longest sequences, of queries and of keys."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return self.package.call("flash_attn_varlen_func", *parts, **dict(zip(names, limits, strict=True)), **options)

    def _options(self, call: Call) -> dict[str, Any]:
        """Makes the package's keyword arguments for the call's mask and dropout."""
        options: dict[str, Any] = {}
        queries, keys = call.sizes[2:]
        mask = call.mask()
        if call.dropout_p and not self.package.dropout:
            raise Unsupported(unsupported(Code.NO_FEATURE, f"{self.package.distribution} has no dropout"))
        if call.dropout_p:
            options["dropout_p"] = call.dropout_p
        if call.is_causal and queries > keys:
            # The package aligns to the last key: with this window, ``j <= i + keys - queries + right`` is ``j <= i``.
            options["window_size"] = (self.package.unbounded, queries - keys)
        elif call.is_causal:
            options["causal"] = True
        elif mask is not None:
            lower_right = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
            if mask.dtype != torch.bool or not torch.equal(mask, lower_right.expand_as(mask)):
                raise Unsupported(unsupported(Code.NO_FEATURE, f"{self.package.distribution} takes only causal masks"))
            options["causal"] = True
        return options


_BUILD = "pip install flash-attn --no-build-isolation"
_HOPPER = "pip install 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper' --no-build-isolation"
_BOTH = frozenset({_PACKED, _PACKED_VARLEN})
FLASH_2 = FlashGeneration(
    "flash_attn.flash_attn_interface", "flash-attn", _BUILD, (8, 0), rocm=True, dropout=True, packed=_BOTH
)
FLASH_3 = FlashGeneration("flash_attn_interface", "flash-attn-3", _HOPPER, (9, 0), packed=frozenset({_PACKED}))
# flash-attn 2 contains the same folder, but does not install cutlass.
FLASH_4 = FlashGeneration(
    "flash_attn.cute", "flash-attn-4", "pip install --pre flash-attn-4", (9, 0), unbounded=None, needs="cutlass"
)

_TILES = "Exact attention in tiles, for separate and packed tensors, with dropout inside the kernel."
_JAGGED = "Exact attention for sequences of different lengths in one call: each result is that of the sequence alone."

TECHNIQUES: tuple[Technique, ...] = (
    FlashAttention("flash-attn-2", FLASH_2, _TILES, excludes=("variable-length",)),
    FlashAttention("flash-attn-2-varlen", FLASH_2, _JAGGED, jagged=True),
    FlashAttention("flash-attn-3", FLASH_3, "Exact attention with Hopper's asynchronous matrix units and copies."),
    FlashAttention("flash-attn-4", FLASH_4, "Exact attention with kernels in CuTe DSL for Hopper and Blackwell."),
)
