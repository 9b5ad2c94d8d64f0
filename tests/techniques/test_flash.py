from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fault_harness import failed, passed, seeded, verdict_of
from technique_harness import StubDevice, agrees, differences, engaged, named, plain, run, seen, workload
from torch import Tensor
from torch.nn import functional
from upstream_signatures import PACKAGES, signature

from accelcheck.core.capability import SUPPORTED, Capability, Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.packages import installed as found_module
from accelcheck.techniques.attention import flash
from accelcheck.techniques.attention.flash import FLASH_2, FLASH_3, FLASH_4, TECHNIQUES, FlashAttention, FlashGeneration
from accelcheck.techniques.attention.jagged import Jagged
from accelcheck.techniques.base import Unsupported
from accelcheck.verify.oracle import Store
from accelcheck.workloads.attention import Attention, MaskedAttention
from accelcheck.workloads.base import Problem, Program

if TYPE_CHECKING:
    import inspect

    from accelcheck.devices.base import Device

TWO, VARLEN = named(TECHNIQUES, "flash-attn-2"), named(TECHNIQUES, "flash-attn-2-varlen")
THREE, FOUR = named(TECHNIQUES, "flash-attn-3"), named(TECHNIQUES, "flash-attn-4")
ALL = pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)


def here(technique: Any) -> FlashAttention:
    """The technique, on a device that supports it."""

    def capability(device: Device) -> Capability:
        return SUPPORTED

    copied: FlashAttention = copy.copy(technique)
    copied.capability = capability  # type: ignore[method-assign]  # of this copy alone
    return copied


def visible(queries: int, keys: int, causal: bool, window: tuple[int | None, int | None]) -> Tensor:
    """Attention as the packages document it: causal masks and windows are aligned to the last key."""
    left, right = (None if end is None or end < 0 else end for end in window)
    right = 0 if causal else right
    place = torch.arange(keys) - torch.arange(queries).unsqueeze(-1) - (keys - queries)
    every = torch.ones(queries, keys, dtype=torch.bool)
    return (every if right is None else place <= right) & (every if left is None else place >= -left)


FUNCTIONS = {
    FLASH_2: ("flash-attn", "flash_attn/flash_attn_interface.py"),
    FLASH_3: ("flash-attn", "hopper/flash_attn_interface.py"),
    FLASH_4: ("flash-attn-4", "flash_attn/cute/interface.py"),
}
"""The package and the file that have the functions of each generation: see `upstream_signatures.PACKAGES`."""


class Stub(ModuleType):
    """A stub of one of the packages in plain torch, with its signatures as stored; refuses the same inputs."""

    def __init__(self, package: FlashGeneration, mask: Callable[..., Tensor]) -> None:
        super().__init__(package.module)
        self.package = package
        self.mask = mask
        self.called: list[str] = []
        self.dropout = 0.0
        distribution, path = FUNCTIONS[package]
        for name in PACKAGES[distribution][path]:
            setattr(self, name, partial(self.answer, name, signature(distribution, f"{path}:{name}")))

    def answer(self, name: str, signature: inspect.Signature, *tensors: Any, **options: Any) -> Any:
        bound = signature.bind(*tensors, **options)
        bound.apply_defaults()
        given = bound.arguments
        self.called.append(name)
        self.dropout = given.get("dropout_p", 0.0)
        variable = "varlen" in name
        q, k, v = given["qkv"].unbind(-3) if "qkv" in given else (given["q"], given["k"], given["v"])
        if variable:
            every = "cu_seqlens" in given
            names = ("cu_seqlens",) * 2 if every else ("cu_seqlens_q", "cu_seqlens_k")
            bounds = ("max_seqlen",) * 2 if every else ("max_seqlen_q", "max_seqlen_k")
            ends, longest = [given[word] for word in names], [given[word] for word in bounds]
            out = self.each((q, k, v), ends, longest, given)
        else:
            out = self.one(q, k, v, given)
        return (out, None) if self.package is FLASH_4 else out

    def one(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
        """Attention of ``(B, S, H, D)``, in float32, in which the kernels accumulate."""
        for part in (q, k, v):
            assert part.dim() == 4
            assert part.dtype in {torch.float16, torch.bfloat16}, "FlashAttention only support fp16 and bf16 data type"
            assert part.stride(-1) == 1, "Input tensor must have contiguous last dimension"
            assert part.size(-1) % 8 == 0
        assert q.size(-1) == k.size(-1) == v.size(-1)
        unbounded = None if self.package is FLASH_4 else -1
        assert all(end == unbounded or end >= 0 for end in given["window_size"])
        seen = self.mask(q.size(1), k.size(1), given["causal"], given["window_size"])
        query, key, value = (part.transpose(1, 2).float() for part in (q, k, v))
        scale = given["softmax_scale"]
        scores = (query @ key.mT) * (q.size(-1) ** -0.5 if scale is None else scale)
        weights = functional.dropout(scores.masked_fill(~seen, float("-inf")).softmax(-1), self.dropout)
        return (weights @ value).transpose(1, 2).to(q.dtype)

    def each(
        self, parts: Sequence[Tensor], ends: Sequence[Tensor], longest: Sequence[int], given: dict[str, Any]
    ) -> Tensor:
        """Attention of jagged ``(tokens, H, D)``."""
        for offsets, most in zip(ends, longest, strict=True):
            assert offsets.dtype == torch.int32
            assert int(offsets[0]) == 0
            assert int(offsets.diff().max()) <= most
        assert [int(offsets[-1]) for offsets in ends] == [parts[0].size(0), parts[1].size(0)]
        edges = [[*zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)] for offsets in ends]
        q, k, v = parts
        return torch.cat(
            [
                self.one(q[a:b].unsqueeze(0), k[c:d].unsqueeze(0), v[c:d].unsqueeze(0), given)[0]
                for (a, b), (c, d) in zip(*edges, strict=True)
            ]
        )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stub]:
    """Installs a stub of a technique's package in ``sys.modules``."""

    def install(technique: Any, mask: Callable[..., Tensor] = visible) -> Stub:
        stub = Stub(technique.package, mask)
        top, *_ = technique.package.module.split(".")
        for name in (top, technique.package.module, technique.package.needs):
            if name is not None:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, technique.package.module, stub)
        return stub

    return install


def problem(queries: int = 9, keys: int = 9, mask: Tensor | None = None, causal: bool = False) -> Problem:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    return (
        Problem(MaskedAttention(), (q, k, v, mask))
        if mask is not None
        else Problem(Attention(causal=causal), (q, k, v))
    )


@ALL
@pytest.mark.parametrize("sizes", [(9, 9), (5, 12), (12, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_of_torchs_attention(technique: Any, installed: Any, sizes: tuple[int, int], causal: bool) -> None:
    stub = installed(technique)
    agrees(technique, lambda: problem(*sizes, causal=causal), Mode.BACKWARD, dtype=torch.float16, tolerance=4e-3)
    assert stub.called == ["flash_attn_varlen_func" if technique is VARLEN else "flash_attn_func"]


@ALL
def test_a_mask_that_is_causal_from_the_bottom_right(technique: Any, installed: Any) -> None:
    installed(technique)
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
    ran = run(technique, problem(5, 12, mask), dtype=torch.bfloat16)
    assert not differences(ran.result, plain(problem(5, 12, mask), dtype=torch.bfloat16), 2e-2)


@ALL
def test_other_masks_are_unsupported(technique: Any, installed: Any) -> None:
    installed(technique)
    for mask in (torch.ones(5, 12, dtype=torch.bool).tril(6), torch.zeros(5, 12)):
        with pytest.raises(Unsupported, match="only causal masks") as caught:
            run(technique, problem(5, 12, mask), dtype=torch.float16)
        assert caught.value.capability.code is Code.NO_FEATURE


@ALL
@pytest.mark.parametrize("name", ["attention-packed", "attention-varlen", "attention-varlen-causal"])
def test_packed_tensors(technique: Any, installed: Any, name: str) -> None:
    place = seeded(name)
    if not technique.accepts(place):
        assert technique is TWO
        assert name != "attention-packed"
        return
    stub = installed(technique)
    ran = engaged(technique, place.problem(1), Mode.BACKWARD, dtype=torch.float16)
    packed = {TWO: "flash_attn_qkvpacked_func", VARLEN: "flash_attn_varlen_qkvpacked_func", FOUR: "flash_attn_func"}
    expected = packed.get(technique, "flash_attn_qkvpacked_func")
    if name != "attention-packed" and technique in {THREE, FOUR}:
        expected = "flash_attn_varlen_func"
    assert stub.called == [expected]
    assert not differences(ran.result, plain(place.problem(1), Mode.BACKWARD, torch.float16), 4e-3)


def test_dropout_is_passed_on_and_depths_are_padded(installed: Any) -> None:
    stub = installed(TWO)
    place = seeded("attention-dropout")
    assert Mode.RANDOM in TWO.modes
    assert Mode.RANDOM not in THREE.modes | FOUR.modes
    made = Program.of(place.problem(1), dtype=torch.float16)
    TWO.prepare(made, Mode.FORWARD, StubDevice())
    out = made.run(Mode.FORWARD)["out[0]"]
    assert stub.dropout == 0.0
    assert not differences({"out": out}, {"out": plain(place.problem(1), dtype=torch.float16)["out[0]"]}, 4e-3)
    made.run(Mode.BACKWARD)
    assert stub.dropout == 0.25
    with pytest.raises(Unsupported, match="no dropout"):
        run(THREE, place.problem(1), Mode.BACKWARD, dtype=torch.float16)


@pytest.mark.slow
def test_the_statistics_of_dropout_are_judged(tmp_path: Any, installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(TWO)
    store, place = Store(tmp_path), seeded("attention-dropout")
    passed(store, here(TWO), place, Mode.RANDOM, "float16")
    plainly = functional.dropout
    monkeypatch.setattr(functional, "dropout", lambda weights, rate: plainly(weights, 0.9 * rate))
    assert verdict_of(store, here(TWO), place, Mode.RANDOM, "float16").verdict is Verdict.FAIL


def test_a_run_without_calls_of_the_package_fails_the_evidence(installed: Any) -> None:
    installed(TWO)
    assert run(TWO, Problem(torch.nn.ReLU(), (torch.randn(3),))).missing() == [
        "calls of flash_attn.flash_attn_interface >= 1: 0"
    ]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>",
            "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<T>>",
            "void cutlass::device_kernel<flash::FlashAttnBwdSm90<T>>"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object",
            "kernel_cutlass_kernel_FlashAttentionBackwardSm90_object"),
        ("void ck_tile::kentry<2, ck_tile::FmhaFwdKernel<T>>",
            "void ck_tile::kentry<2, ck_tile::FmhaBwdDQDKDVKernel<T>>"),
    ],
)  # fmt: skip
def test_kernels_on_a_gpu_are_evidence(forward: str, backward: str) -> None:
    program = Program.of(problem())
    program.extras["attention calls"] = 1

    def engaged(mode: Mode, *names: str) -> bool:
        return all(e.engaged for e in TWO.evidence(program, seen("cuda", *names), mode, StubDevice("cuda")))

    assert engaged(Mode.FORWARD, forward)
    assert engaged(Mode.BACKWARD, forward, backward)
    assert not engaged(Mode.BACKWARD, forward)
    assert not engaged(Mode.FORWARD, backward)
    assert not engaged(Mode.FORWARD, forward, "aten::_scaled_dot_product_flash_attention")
    assert not engaged(Mode.FORWARD, "void pytorch_flash::flash_fwd_kernel<T>", "flash_attn::_flash_attn_forward")


def test_capability_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for technique in TECHNIQUES:
        for kind in ("cpu", "xla", "tpu", "vendor"):
            assert technique.answer(StubDevice(kind)).code is Code.NO_BACKEND
    device = StubDevice("cuda")
    monkeypatch.setattr(flash, "version", lambda _: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert [t.capability(device).code for t in (TWO, VARLEN, THREE, FOUR)] == [Code.OK] * 2 + [Code.NO_FEATURE] * 2
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for technique in TECHNIQUES:
        absent = technique.answer(device)
        assert (absent.verdict, absent.code) == (Verdict.UNAVAILABLE, Code.NO_PACKAGE)
        assert "pip install" in absent.action
    monkeypatch.setattr(flash, "version", lambda _: "2.0.9")
    assert TWO.capability(device).code is Code.WRONG_VERSION
    monkeypatch.setattr(flash, "version", lambda _: "2.8.3.post2")
    assert TWO.capability(device).ok
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert [t.capability(device).code for t in (TWO, THREE)] == [Code.OK, Code.NO_BACKEND]


def test_a_module_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / "inner").mkdir(parents=True)  # like flash_attn, if only flash-attn-4 is installed
    (tmp_path / "shared" / "inner" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "__init__.py").write_text("raise AssertionError")
    (tmp_path / "plain" / "inner.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    assert found_module("shared.inner")
    assert found_module("plain.inner")
    assert not found_module("plain.inner.deeper")
    assert not found_module("shared.other")
    assert not found_module("absent.inner")
    assert not {"plain", "shared"} & sys.modules.keys()


def test_workloads_and_modes() -> None:
    assert not TWO.accepts(workload("linear"))
    assert not TWO.accepts(workload("attention", "variable-length"))
    assert VARLEN.accepts(workload("attention", "variable-length"))
    assert {dtype for technique in TECHNIQUES for dtype in technique.dtypes} == {"bfloat16", "float16"}


def test_jagged_rows_return_to_their_positions() -> None:
    padded = torch.arange(24.0).reshape(2, 4, 3)
    jagged = Jagged.of(padded, torch.tensor([4, 1]))
    assert jagged.rows.shape == (5, 3)
    assert jagged.offsets.tolist() == [0, 4, 5]
    assert jagged.longest == 4
    back = jagged.padded(jagged.rows)
    assert torch.equal(back[0], padded[0])
    assert torch.equal(back[1, 0], padded[1, 0])
    assert not back[1, 1:].any()


# Planted: fault 3, masks of the other alignment
def top_left(queries: int, keys: int, causal: bool, window: Any) -> Tensor:
    every = torch.ones(queries, keys, dtype=torch.bool)
    return every.tril() if causal else visible(queries, keys, causal, window)


@pytest.mark.parametrize("name", ["attention-cross-causal", "attention-cross-right"])
def test_the_right_alignment_passes(tmp_path: Any, installed: Any, name: str) -> None:
    installed(TWO)
    passed(Store(tmp_path), here(TWO), seeded(name), dtype="bfloat16")


@pytest.mark.parametrize("ignores", [False, True], ids=["package", "adapter"])
def test_another_alignment_fails(tmp_path: Any, installed: Any, monkeypatch: pytest.MonkeyPatch, ignores: bool) -> None:
    installed(TWO, visible if ignores else top_left)
    if ignores:
        monkeypatch.setattr(flash, "min", lambda sizes: sizes[1], raising=False)
    place = seeded("attention-cross-causal" if ignores else "attention-cross-right")
    assert "out: view" in failed(Store(tmp_path), here(TWO), place, dtype="bfloat16").why
