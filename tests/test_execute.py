"""Planted faults must be caught and correct variants must pass, in the suite's own workloads, through the whole engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fault_harness import (
    BACKWARD,
    FORWARD,
    TRAIN,
    Planted,
    accumulator,
    calling,
    editing,
    faults,
    kernels,
    products,
    replacing,
    rounded_to,
    seeded,
    truncated_to,
    verdict_of,
)
from torch.nn import functional

from accelcheck.case import Mode, Verdict
from accelcheck.verify.oracle import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_harness import Change
    from torch import Tensor, nn

    from accelcheck.workloads.base import Program, Result

SEEDS = (0, 1, 2)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("references"))


@dataclass(frozen=True)
class Fault:
    """A planted fault, and the paths of the result that it must be found at."""

    name: str
    change: Change
    workload: str
    paths: frozenset[str]
    mode: Mode = FORWARD
    dtype: str = "float32"
    warmups: int = 0
    keeps_strides: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{self.workload}-{self.dtype}-{self.mode}"


def fault(
    name: str, change: Change, workload: str, *paths: str, mode: Mode = FORWARD, dtype: str = "float32", **more: Any
) -> Fault:
    return Fault(name, change, workload, frozenset(paths or {"out"}), mode, dtype, **more)


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: (tensor.double() * factor).to(tensor.dtype)


def attend(seen: Callable[[int, int], Tensor], factor: float = 1.0) -> Change:
    """Attention of q, k, v with a mask made from the lengths, and a scale that is wrong by a factor."""

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.float() @ k.float().transpose(-1, -2) * (factor / math.sqrt(q.size(-1)))
        scores = scores.masked_fill(~seen(q.size(-2), k.size(-2)), -math.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    return calling(call)


def causal(queries: int, keys: int, diagonal: int = 0) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)


def leaking_tail(queries: int, keys: int) -> Tensor:
    """The one key beyond the tile is seen by the query before it."""
    seen = causal(queries, keys)
    seen[-2, -1] = True
    return seen


def one_less(queries: int, keys: int) -> Tensor:
    """Strictly below the diagonal; the first query sees the first key, for softmax of nothing is NaN."""
    seen = causal(queries, keys, -1)
    seen[0, 0] = True
    return seen


def stale_row(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[..., -1, :] = tensor[..., -2, :]
    return tensor


def unwritten_row(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor[..., -1, :] = math.nan
    return tensor


def without_last_term(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :-1] @ b[..., :-1, :]


def tf32(a: Tensor, b: Tensor) -> Tensor:
    return rounded_to(11, a) @ rounded_to(11, b)


def half_accumulation(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float16)
    for k in range(a.shape[-1]):
        total = (total.float() + a[..., k, None].float() * b[..., k, :].unsqueeze(-2).float()).half()
    return total.float()


def truncating(a: Tensor, b: Tensor) -> Tensor:
    return truncated_to(8, a.float() @ b.float())


def tf32_convolution(func: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    out: Tensor = func(rounded_to(11, x), rounded_to(11, weight), *rest)
    return out


def conv_without_bias(module: nn.Module, x: Tensor) -> Tensor:
    return functional.conv2d(x, module.weight, None, module.stride, module.padding)  # type: ignore[arg-type]


def normal(module: Any, x: Tensor, *, eps: float | None = None, correction: int = 0) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    variance = x.var(-1, correction=correction, keepdim=True)
    out: Tensor = centered / (variance + (module.eps if eps is None else eps)).sqrt() * module.weight + module.bias
    return out


def swapped(one: str, other: str) -> Change:
    def edit(result: Result) -> None:
        result[one], result[other] = result[other], result[one]

    return editing(edit)


def removed(path: str) -> Change:
    def edit(result: Result) -> None:
        del result[path]

    return editing(edit)


def edited(path: str, function: Callable[[Tensor], Tensor]) -> Change:
    def edit(result: Result) -> None:
        result[path] = function(result[path])

    return editing(edit)


def optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Change:
    def change(program: Program) -> None:
        program.optimizer = make

    return change


def cached() -> Change:
    """The first result again, whatever the input."""

    def change(program: Program) -> None:
        kept: list[Any] = []
        module = program.module

        def call(*inputs: Any) -> Any:
            if not kept:
                kept.append(module(*inputs))
            return kept[0]

        program.call = call

    return change


def overwriting(module: nn.Module, x: Tensor, *rest: Any) -> Any:
    out = module(x, *rest)
    with torch.no_grad():
        x.mul_(1.5)
    return out


def drifting(module: nn.Module, *inputs: Any) -> Any:
    out = module(*inputs)
    with torch.no_grad():
        next(module.parameters()).mul_(1.5)
    return out


def still_statistics(program: Program) -> None:
    for module in program.module.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 0.0


GAINED = ("matmul", "mlp", "cnn", "attention-causal", "elementwise-5", "gelu", "transformer-block")
ALL_FAULTS = (
    *(fault("gain-1%", replacing(out=scaled(1.01)), name) for name in GAINED),
    *(fault("gain-0.3%", replacing(out=scaled(1.003)), name) for name in GAINED),
    *(fault("gain-1%", replacing(out=scaled(1.01)), name, dtype="bfloat16") for name in GAINED),
    *(fault("gain-0.3%", replacing(out=scaled(1.003)), name, dtype="float16") for name in GAINED),
    *(
        fault("softmax-scale-1%", attend(causal, 1.01), "attention-causal", dtype=dtype)
        for dtype in ("float32", "float16")
    ),
    fault("softmax-scale-5%", attend(causal, 1.05), "attention-causal", dtype="bfloat16"),
    *(fault("causal-leak", attend(leaking_tail), "attention-65", dtype=dtype) for dtype in ("float32", "float16")),
    fault("causal-leak", attend(leaking_tail), "attention-65", "out", "grad:input[0]", mode=BACKWARD),
    fault("mask-off-by-one", attend(partial(causal, diagonal=1)), "attention-causal", dtype="bfloat16"),
    fault("mask-off-by-one", attend(one_less), "attention-65", dtype="bfloat16"),
    fault("stale-last-row", replacing(out=stale_row), "matmul-129", dtype="bfloat16"),
    fault("unwritten-last-row", replacing(out=unwritten_row), "matmul-127"),
    fault("last-k-dropped", products(without_last_term), "matmul"),
    fault("last-k-dropped", products(without_last_term), "matmul", dtype="bfloat16"),
    fault("tf32-for-float32", products(tf32), "matmul"),
    fault("tf32-for-float32", products(tf32), "mlp", "out", "grad:fc1.weight", mode=BACKWARD),
    fault("tf32-for-float32", products(tf32), "train-mlp", "loss[0]", "parameter:fc3.weight", mode=TRAIN),
    fault("tf32-convolution", kernels(convolution=tf32_convolution), "cnn"),
    fault("float16-accumulation", products(half_accumulation), "matmul"),
    fault("float16-accumulation", products(half_accumulation), "matmul-129", dtype="float16"),
    fault("conv-bias-dropped", calling(conv_without_bias), "conv-strided", dtype="bfloat16"),
    fault("tanh-gelu", calling(lambda m, x: functional.gelu(x, approximate="tanh")), "gelu"),
    fault("layer-norm-of-n-1", calling(partial(normal, correction=1)), "layer-norm-narrow", dtype="bfloat16"),
    fault("layer-norm-eps", calling(partial(normal, eps=1e-6)), "layer-norm-narrow", dtype="bfloat16"),
    fault("gradient-doubled", edited("grad:weight", scaled(2)), "matmul", "grad:weight", mode=BACKWARD),
    fault(
        "gradient-not-summed",
        edited("grad:input[1]", lambda g: g.expand(48, 64)),
        "elementwise-scalar",
        "grad:input[1]",
        mode=BACKWARD,
    ),
    fault(
        "gradients-swapped",
        swapped("grad:input[0]", "grad:input[1]"),
        "attention",
        "grad:input[0]",
        "grad:input[1]",
        mode=BACKWARD,
        dtype="bfloat16",
    ),
    fault("gradient-missing", removed("grad:fc2.bias"), "mlp", "grad:fc2.bias", mode=BACKWARD),
    fault(
        "momentum-ignored",
        optimizer(partial(torch.optim.SGD, lr=0.02)),
        "train-mlp",
        "parameter:fc1.weight",
        "parameter:fc3.weight",
        mode=TRAIN,
    ),
    fault("zeros", replacing(out=torch.zeros_like), "mlp", dtype="bfloat16"),
    fault("constant", replacing(out=lambda out: torch.full_like(out, float(out.float().mean()))), "mlp"),
    fault("input-returned", calling(lambda m, x: x.clone()), "gelu"),
    fault("input-returned", calling(lambda m, x: x.clone()), "matmul"),
    fault("cached-result", cached(), "mlp", warmups=1),
    fault("input-mutated", calling(overwriting), "elementwise-5", "input[0]"),
    fault("parameter-mutated", calling(drifting), "mlp", "parameter:fc1.weight"),
    fault("other-device", replacing(out=lambda out: out.to("meta")), "mlp"),
    fault("other-dtype", replacing(out=lambda out: out.half()), "mlp"),
    fault("other-strides", replacing(out=lambda out: out.t().contiguous().t()), "mlp", keeps_strides=True),
    fault("statistics-kept", still_statistics, "cnn", "buffer:stem.bn.running_mean", mode=BACKWARD),
)


# What no gate catches today, with the share of the nearest gate's budget that the fault uses and a correct one does.
MISSED = (
    pytest.param(
        fault("truncated-outputs", products(truncating), "matmul", dtype="bfloat16"),
        marks=pytest.mark.xfail(strict=False, reason="0.9 against 0.5: one bias of half a unit; `bias` sees it, no gate"),
    ),
    pytest.param(
        fault("softmax-scale-1%", attend(causal, 1.01), "attention-causal", dtype="bfloat16"),
        marks=pytest.mark.xfail(strict=False, reason="0.5 against 0.1: unfused attention may round scores to bfloat16"),
    ),
    pytest.param(
        fault("causal-leak", attend(leaking_tail), "attention-65", dtype="bfloat16"),
        marks=pytest.mark.xfail(strict=False, reason="0.5 against 0.1: the leaked key has a weight of 0.6 % at most"),
    ),
    pytest.param(
        fault("tanh-gelu", calling(lambda m, x: functional.gelu(x, approximate="tanh")), "gelu", dtype="float16"),
        marks=pytest.mark.xfail(strict=False, reason="0.2 against 0.1: smaller than float16's own unit"),
    ),
)


@pytest.mark.parametrize("planted", MISSED, ids=str)
def test_a_fault_that_rounding_hides_is_caught(planted: Fault, store: Store) -> None:
    record = verdict_of(store, Planted(planted.change), seeded(planted.workload), planted.mode, planted.dtype)
    assert record.verdict is Verdict.FAIL


def test_truncation_shows_in_the_bias_view(store: Store) -> None:
    record = verdict_of(store, Planted(products(truncating)), seeded("matmul"), FORWARD, "bfloat16")
    (bias,) = (figure for figure in record.figures if figure.view == "bias")
    assert not bias.within
    assert not bias.gates


@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize("planted", ALL_FAULTS, ids=str)
def test_a_planted_fault_is_caught_at_its_path(planted: Fault, number: int, store: Store) -> None:
    technique = Planted(planted.change, warmups=planted.warmups, keeps_strides=planted.keeps_strides)
    record = verdict_of(store, technique, seeded(planted.workload, number), planted.mode, planted.dtype)
    assert record.verdict is Verdict.FAIL, record.reason or record.figures
    assert planted.paths <= faults(record).keys(), record.reason


def sequential(a: Tensor, b: Tensor, order: Any) -> Tensor:
    wide = accumulator(a)
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=wide)
    for k in order:
        total += a[..., k, None].to(wide) * b[..., k, :].unsqueeze(-2).to(wide)
    return total


def forwards(a: Tensor, b: Tensor) -> Tensor:
    return sequential(a, b, range(a.shape[-1]))


def backwards(a: Tensor, b: Tensor) -> Tensor:
    return sequential(a, b, reversed(range(a.shape[-1])))


def blocked(a: Tensor, b: Tensor, size: int = 16) -> Tensor:
    parts = [
        forwards(a[..., k : k + size], b[..., k : k + size, :]) for k in range(0, a.shape[-1], size)
    ] or [forwards(a, b)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def split_k(a: Tensor, b: Tensor) -> Tensor:
    half = a.shape[-1] // 2
    return forwards(a[..., :half], b[..., :half, :]) + backwards(a[..., half:], b[..., half:, :])


def pairwise(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[-1] <= 1:
        return forwards(a, b)
    half = a.shape[-1] // 2
    return pairwise(a[..., :half], b[..., :half, :]) + pairwise(a[..., half:], b[..., half:, :])


def kahan(a: Tensor, b: Tensor) -> Tensor:
    wide = accumulator(a)
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=wide)
    lost = torch.zeros_like(total)
    for k in range(a.shape[-1]):
        term = a[..., k, None].to(wide) * b[..., k, :].unsqueeze(-2).to(wide) - lost
        after = total + term
        lost = (after - total) - term
        total = after
    return total


def online(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over blocks of keys with a running maximum and sum, as FlashAttention does it."""
    wide, size = accumulator(q), 16
    q, k, v, kept = q.to(wide), k.to(wide), v.to(wide), q.dtype
    seen = causal(q.size(-2), k.size(-2)) if module.causal else torch.ones(q.size(-2), k.size(-2), dtype=torch.bool)
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=wide)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, k.size(-2), size):
        block = slice(start, start + size)
        scores = (q @ k[..., block, :].transpose(-1, -2)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~seen[:, block], -math.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True).detach())
        weights, shrink = torch.exp(scores - higher), torch.exp(top - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v[..., block, :]
        top = higher
    return (out / total).to(kept)


def negative_zeros(tensor: Tensor) -> Tensor:
    return torch.where(tensor == 0, -0.0, tensor)


PRODUCTS = {
    "forwards": forwards,
    "backwards": backwards,
    "blocked": blocked,
    "split-k": split_k,
    "pairwise": pairwise,
    "kahan": kahan,
}


@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("workload", "mode"), [("matmul-129", FORWARD), ("mlp", BACKWARD), ("train-mlp", TRAIN)])
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_correct_order_of_summation_passes(
    product: str, workload: str, mode: Mode, dtype: str, number: int, store: Store
) -> None:
    record = verdict_of(store, Planted(products(PRODUCTS[product])), seeded(workload, number), mode, dtype)
    assert record.verdict is Verdict.PASS, record.reason


@pytest.mark.parametrize("number", SEEDS)
@pytest.mark.parametrize("mode", [FORWARD, BACKWARD])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("workload", ["attention-causal", "attention-65", "attention-cross"])
def test_online_softmax_passes(workload: str, dtype: str, mode: Mode, number: int, store: Store) -> None:
    record = verdict_of(store, Planted(calling(online)), seeded(workload, number), mode, dtype)
    assert record.verdict is Verdict.PASS, record.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_negative_zeros_pass(dtype: str, store: Store) -> None:
    record = verdict_of(store, Planted(replacing(out=negative_zeros)), seeded("matmul"), FORWARD, dtype)
    assert record.verdict is Verdict.PASS, record.reason
