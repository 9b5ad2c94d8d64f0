"""The FlashAttention packages: their functions in place of torch's attention, and on packed and jagged tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.packages import release, version
from accelcheck.techniques.attention.intercept import Call, count, intercept, taken
from accelcheck.techniques.attention.jagged import Jagged
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.workloads.packed import Packed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

_KERNELS = r"(?i)(?!.*pytorch_flash)(?=.*(flash|fmha))(?=.*({})).*kernel.*"
"""Device kernels of the packages; those of torch's own flash attention lie in the namespace ``pytorch_flash``."""
_LOWER_RIGHT = (2, 1)
"""Since this flash-attn, causal masks end at the last key; before, they began at the first."""


@dataclass(frozen=True)
class FlashGeneration:
    """What differs between the generations of FlashAttention.

    Attributes:
        module: Where its functions are.
        distribution: What its version is known by.
        install: Command that installs it.
        capability: Lowest compute capability of an NVIDIA GPU that it has kernels for.
        rocm: Whether it has kernels for AMD's GPUs.
        dropout: Whether its functions take ``dropout_p``.
        unbounded: What an end of ``window_size`` is that sees everything.
        packed: Functions that take query, key and value in one tensor: of sequences of one length, and of jagged ones.
        needs: A module that comes along with it, and is absent where only its folder is there.
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
        """What a function of the package gives; of several results the first."""
        out = getattr(import_module(self.module), function)(*tensors, **options)
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


class FlashAttention(Technique):
    """Attention by functions of a package: of each call of torch's, or, where a workload packs its tensors, as a whole.

    Args:
        name: The variant's name.
        package: Which generation.
        promise: As `Technique.promise`.
        jagged: Whether sequences of one length go through the functions for jagged ones too.
        excludes: As `Technique.excludes`.
    """

    family = "attention"
    source = "https://github.com/Dao-AILab/flash-attention"
    dtypes = ("bfloat16", "float16")
    requires = frozenset({"attention"})
    keeps_strides = False
    differentiates_twice = False
    watch = ProfilerLog

    def __init__(
        self,
        name: str,
        package: FlashGeneration,
        promise: str,
        *,
        jagged: bool = False,
        excludes: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.package = package
        self.promise = promise
        self.jagged = jagged
        self.excludes = excludes
        self.packages = MappingProxyType(dict.fromkeys(filter(None, (package.module, package.needs)), package.install))
        self.modes = frozenset(Mode) - (frozenset() if package.dropout else {Mode.RANDOM})

    def capability(self, device: Device) -> Capability:
        package = self.package
        if device.type != "cuda" or (torch.version.hip is not None and not package.rocm):
            makers = "NVIDIA and AMD GPUs" if package.rocm else "NVIDIA GPUs"
            return unsupported(Code.NO_BACKEND, f"{package.distribution} has kernels for {makers} alone")
        if torch.version.hip is None and torch.cuda.get_device_capability() < package.capability:
            wanted, found = (".".join(map(str, c)) for c in (package.capability, torch.cuda.get_device_capability()))
            return unsupported(
                Code.NO_FEATURE, f"{package.distribution} needs compute capability {wanted}, and the GPU has {found}"
            )
        found = version(package.distribution)
        if found and release(found) < _LOWER_RIGHT:
            return unavailable(
                Code.WRONG_VERSION, f"{package.distribution} {found} aligns causal masks otherwise", package.install
            )
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode, device
        if not isinstance(program.module, Packed):
            intercept(program, self.attend)
            return
        causal = program.module.causal

        def call(qkv: Tensor, lengths: Tensor | None = None) -> Tensor:
            count(program)
            if lengths is None and not self.jagged:
                return self.fixed(qkv, causal=causal)
            every = torch.full((qkv.size(0),), qkv.size(1), device=qkv.device)
            jagged = Jagged.of(qkv, every if lengths is None else lengths)
            return jagged.padded(self.variable(jagged, causal=causal))

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from taken(program, log, self.package.module)
        if device.type == "cuda":
            directions = {"forward": "fwd|forward"}
            if mode not in {Mode.FORWARD, Mode.ACCURACY}:
                directions["backward"] = "bwd|backward"
            for direction, names in directions.items():
                kernels = log.count(_KERNELS.format(names))
                yield Evidence(f"{direction} kernels of the package launched >= 1", kernels, engaged=kernels >= 1)

    def fixed(self, qkv: Tensor, *, causal: bool) -> Tensor:
        """Self-attention of ``(B, S, 3, H, D)``, to ``(B, S, H, D)``."""
        if "flash_attn_qkvpacked_func" in self.package.packed:
            return self.package.call("flash_attn_qkvpacked_func", qkv, causal=causal)
        return self.package.call("flash_attn_func", *qkv.unbind(2), causal=causal)

    def variable(self, jagged: Jagged, *, causal: bool) -> Tensor:
        """Self-attention of each sequence of ``(tokens, 3, H, D)``, to ``(tokens, H, D)``."""
        offsets, longest = jagged.offsets.to(torch.int32), jagged.longest
        if "flash_attn_varlen_qkvpacked_func" in self.package.packed:
            return self.package.call(
                "flash_attn_varlen_qkvpacked_func", jagged.rows, cu_seqlens=offsets, max_seqlen=longest, causal=causal
            )
        return self.package.call(
            "flash_attn_varlen_func",
            *jagged.rows.unbind(1),
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
        )

    def attend(self, call: Call) -> Tensor:
        """Attention of a call of torch's: ``(B, H, S, D)`` becomes ``(B, S, H, D)``, and back.

        Raises:
            Unsupported: The call has a mask that is not causal, or dropout that the package lacks.
        """
        options = self._options(call)
        # Top left: keys beyond the last query are seen by none, and without them both alignments are one.
        keys = min(call.sizes[2:]) if call.is_causal else call.key.size(2)
        depth, width = call.query.size(-1), call.value.size(-1)
        # Zeros beyond the depth change no score; kernels want one depth, a multiple of 8.
        wide = -(-max(depth, width) // 8) * 8
        q, k, v = (
            functional.pad(part.transpose(1, 2), (0, wide - part.size(-1)))
            for part in (call.query, call.key[:, :, :keys], call.value[:, :, :keys])
        )
        options["softmax_scale"] = depth**-0.5 if call.scale is None else call.scale
        out = (
            self._jagged(q, k, v, options) if self.jagged else self.package.call("flash_attn_func", q, k, v, **options)
        )
        return out[..., :width].transpose(1, 2)

    def _jagged(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        batch, queries, keys = q.size(0), q.size(1), k.size(1)
        offsets = partial(torch.arange, batch + 1, dtype=torch.int32, device=q.device)
        out = self.package.call(
            "flash_attn_varlen_func",
            *(part.flatten(0, 1) for part in (q, k, v)),
            cu_seqlens_q=offsets() * queries,
            cu_seqlens_k=offsets() * keys,
            max_seqlen_q=queries,
            max_seqlen_k=keys,
            **options,
        )
        return out.view(batch, queries, *out.shape[1:])

    def _options(self, call: Call) -> dict[str, Any]:
        """Mask and dropout in the package's words."""
        options: dict[str, Any] = {}
        queries, keys = call.sizes[2:]
        mask = call.mask()
        if call.dropout_p and not self.package.dropout:
            raise Unsupported(unsupported(Code.NO_FEATURE, f"{self.package.distribution} has no dropout"))
        if call.dropout_p:
            options["dropout_p"] = call.dropout_p
        if call.is_causal and queries > keys:
            # The package counts from the last key: ``j <= i + keys - queries + right`` is ``j <= i``.
            options["window_size"] = (self.package.unbounded, queries - keys)
        elif call.is_causal:
            options["causal"] = True
        elif mask is not None:
            lower_right = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
            if mask.dtype != torch.bool or not torch.equal(mask, lower_right.expand_as(mask)):
                raise Unsupported(
                    unsupported(Code.NO_FEATURE, f"{self.package.distribution} takes no masks but causal ones")
                )
            options["causal"] = True
        return options


FLASH_2 = FlashGeneration(
    "flash_attn.flash_attn_interface",
    "flash-attn",
    "pip install flash-attn --no-build-isolation",
    (8, 0),
    rocm=True,
    dropout=True,
    packed=frozenset({"flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"}),
)
FLASH_3 = FlashGeneration(
    "flash_attn_interface",
    "flash-attn-3",
    "pip install 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper' --no-build-isolation",
    (9, 0),
    packed=frozenset({"flash_attn_qkvpacked_func"}),
)
FLASH_4 = FlashGeneration(
    "flash_attn.cute",
    "flash-attn-4",
    "pip install --pre flash-attn-4",
    (9, 0),
    unbounded=None,
    needs="cutlass",  # flash-attn 2 brings the folder along, without what it needs
)

TECHNIQUES: tuple[Technique, ...] = (
    FlashAttention(
        "flash-attn-2",
        FLASH_2,
        "Exact attention in tiles, of separate and of packed tensors, with dropout inside the kernel.",
        excludes=frozenset({"variable-length"}),
    ),
    FlashAttention(
        "flash-attn-2-varlen",
        FLASH_2,
        "Sequences of several lengths in one call, each given what it gets alone.",
        jagged=True,
    ),
    FlashAttention("flash-attn-3", FLASH_3, "Exact attention by Hopper's asynchronous matrix units and copies."),
    FlashAttention("flash-attn-4", FLASH_4, "Exact attention by kernels written in CuTe DSL for Hopper and Blackwell."),
)
