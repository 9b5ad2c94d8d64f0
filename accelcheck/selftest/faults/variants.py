"""Correct implementations with another order, rounding or algorithm than eager's. None may fail."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.selftest.faults import base, compute
from accelcheck.selftest.faults.base import FLOAT32, HALVES, Cell, Change, backward, derived, passes, trained, variant
from accelcheck.selftest.faults.plant import accumulator, always, aside, calling, changing, kernel, output, products
from accelcheck.workloads.base import Program


def _seen(module: Any, q: Tensor, k: Tensor) -> Tensor | None:
    return compute.causal(q.size(-2), k.size(-2), q.device) if module.causal else None


def unfused(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, softmax and product one after the other, in FP32."""
    return compute.attention(q, k, v, _seen(module, q, k))


def base_two(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax by powers of two."""

    def weigh(scores: Tensor) -> Tensor:
        log2e = 1.4426950408889634
        grown = torch.pow(2.0, (scores - scores.amax(-1, keepdim=True).detach()) * log2e)
        return grown / grown.sum(-1, keepdim=True)

    return compute.attention(q, k, v, _seen(module, q, k), weigh=weigh)


def flash(size: int, module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of keys with an online softmax."""
    return compute.online_attention(q, k, v, _seen(module, q, k), size=size)


def gelu(module: Any, x: Tensor) -> Tensor:
    """GELU by erfc."""
    return compute.gelu_by_erfc(x)


def fused_epilogue(module: Any, x: Tensor) -> Tensor:
    """Bias and ReLU in the accumulator of a matrix product, rounded once."""
    wide = accumulator(x)
    return torch.relu(x.to(wide) @ module.weight.to(wide) + module.bias.to(wide)).to(x.dtype)


def fused_chain(module: Any, x: Tensor, y: Tensor) -> Tensor:
    """Thirty element-wise statements in FP32, rounded once."""
    out: Tensor = module(x.to(accumulator(x)), y.to(accumulator(y)))
    return out.to(x.dtype)


@aside
def _other_payload(tensor: Tensor) -> Tensor:
    """Another sign and payload of NaN."""
    kinds = {
        torch.float32: (torch.int32, -0x3FFFFF),
        torch.bfloat16: (torch.int16, -0x3F),
        torch.float16: (torch.int16, -0x1FF),
    }
    integer, bits = kinds[tensor.dtype]
    changed = torch.where(tensor.isnan(), torch.full_like(tensor, bits, dtype=integer), tensor.view(integer))
    return changed.view(tensor.dtype)


def negative_zeros(tensor: Tensor) -> Tensor:
    """-0 for 0."""
    return torch.where(tensor == 0, -torch.zeros_like(tensor), tensor)


def tree_sum(func: Any, x: Tensor, over: Any = None, keep: Any = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Every sum over dimensions as a tree."""
    return _tree(x, list(range(x.dim()) if over is None else over), keep).to(x.dtype if dtype is None else dtype)


@aside
def _tree(x: Tensor, over: list[int], keep: Any) -> Tensor:
    dims = sorted(d % x.dim() for d in over)
    kept = [d for d in range(x.dim()) if d not in dims]
    terms = x.to(accumulator(x)).permute(*kept, *dims).reshape(*(x.shape[d] for d in kept), -1)
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.nn.functional.pad(terms, (0, 1))
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms.sum(-1).reshape([1 if d in dims else n for d, n in enumerate(x.shape)] if keep else terms.shape[:-1])


class OtherSgd(torch.optim.Optimizer):
    """SGD with momentum in another order: the step adds the old momentum and the gradient one after the other."""

    def __init__(self, parameters: Iterable[Any], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            for parameter in group["params"]:
                held = self.state[parameter].get("held")
                change = parameter.grad * group["lr"]
                if held is not None:
                    change = change + held * group["momentum"]
                # The state is the velocity times the rate: v' lr = m (v lr) + g lr.
                self.state[parameter]["held"] = change
                parameter.sub_(change)


def rebuilt(**changed: Any) -> Callable[[], Change]:
    """Rebuilds the program's optimizer with other arguments."""

    def change(program: Program) -> None:
        if program.optimizer is None:
            raise ValueError("a program without an optimizer has none to be rebuilt")
        program.optimizer = partial(program.optimizer, **changed)

    return lambda: change


@always(changing)
def reordered(program: Program) -> None:
    """SGD with momentum in another order."""
    made: Any = program.optimizer
    program.optimizer = partial(OtherSgd, **made.keywords)


_fused_steps = base.where(
    lambda device: device.has("host") or device.has("torch-cuda"), "torch has no fused optimizer for {}"
)
_called, _products, _output = always(calling), always(products), always(output)

_MATMUL, _MLP, _TRAINING = Cell("matmul"), backward("mlp"), Cell("train-mlp", Mode.TRAIN)
_NORMS = passes("layer-norm-narrow")

VARIANTS = (
    variant("sum-forwards")((_MATMUL, _MLP), _products(compute.forwards)),
    variant("sum-backwards")((_MATMUL, _MLP), _products(compute.reversed_order)),
    variant("sum-pairwise")((_MATMUL, _MLP), _products(compute.pairwise)),
    variant("sum-blocked")((_MATMUL, _MLP), _products(compute.blocked)),
    variant("sum-split-k")((_MATMUL, _MLP), _products(compute.split_k)),
    variant("sum-kahan")((_MATMUL, derived("mlp")), _products(compute.kahan)),
    variant("sum-fma")((_MATMUL, _MLP), _products(compute.fused)),
    variant("sum-matrix-unit")((_MATMUL, _MLP, _TRAINING), _products(compute.matrix_unit)),
    variant("product-transposed")((_MATMUL, _MLP), _products(compute.from_transposed)),
    variant("sum-tree")(
        (base.single("matmul-total"), backward("mlp"), backward("elementwise-scalar")), always(kernel("sum"))(tree_sum)
    ),
    variant("epilogue-fused")(passes("matmul"), _called(fused_epilogue)),
    variant("chain-fused")(Cell("elementwise-30", dtypes=HALVES), _called(fused_chain)),
    variant("nan-payload")((Cell("elementwise-bound"), Cell("elementwise-product")), _output(_other_payload)),
    variant("negative-zero")((Cell("matmul"), Cell("elementwise-bound")), _output(negative_zeros)),
    variant("attention-unfused")(passes("attention-causal"), _called(unfused)),
    variant("attention-base-two")((Cell("attention-causal"), backward("attention-cross")), _called(base_two)),
    variant("attention-online-16", "Online softmax over blocks of 16 keys.")(
        (Cell("attention-causal"), Cell("attention-65"), Cell("attention-cross"), backward("attention-causal")),
        lambda: calling(partial(flash, 16)),
    ),
    variant("attention-online-64", "Online softmax over blocks of 64 keys: a last block of one.")(
        passes("attention-65"), lambda: calling(partial(flash, 64))
    ),
    variant("attention-online-7", "Online softmax over blocks of 7 keys.")(
        passes("attention-cross"), lambda: calling(partial(flash, 7))
    ),
    *(
        variant(name, summary)(_NORMS, _called(partial(compute.layer_norm, moments=moments)))
        for name, summary, moments in (
            ("norm-two-pass", "The mean, then the variance.", compute.two_pass),
            ("norm-welford", "Mean and variance in one pass.", compute.welford),
            (
                "norm-shifted",
                "Sums of squares in one pass, of what differs from the first element.",
                compute.shifted_one_pass,
            ),
        )
    ),
    variant("convolution-im2col", "A convolution as one product of matrices.")(
        passes("conv-strided"), _called(compute.by_columns)
    ),
    variant("gelu-by-erfc")(passes("gelu"), _called(gelu)),
    variant("optimizer-loop", "One parameter after the other.")(_TRAINING, rebuilt(foreach=False)),
    variant("optimizer-foreach", "All parameters at once.")(_TRAINING, rebuilt(foreach=True)),
    # In half precision torch 2.13's fused SGD itself is wrong: see docs/findings.md.
    variant("optimizer-fused", "The whole step in one kernel.")(
        trained("train-mlp"), rebuilt(fused=True), exists=_fused_steps
    ),
    variant("optimizer-reordered")(trained("train-mlp"), reordered),
    variant("autocast-matrix-unit", "Autocast with products of a matrix unit.")(
        passes("mlp", FLOAT32), _products(compute.matrix_unit), technique="amp-bf16"
    ),
)
