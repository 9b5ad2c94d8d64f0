"""Functions with gradients of their own: under autocast, compiled and checkpointed, and caught where they are wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, TRAIN, failed, faults, passed, seeded, verdict_of
from technique_harness import named
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.core.case import Verdict
from accelcheck.devices.base import Device
from accelcheck.selftest.faults.base import Planted
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation import compile as compilation
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.memory import checkpoint
from accelcheck.techniques.precision import amp
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program
from accelcheck.workloads.custom import Gated, GatedFunction, SwishBlock, SwishNetwork, swish_projection
from accelcheck.workloads.draw import normal

AUTOCAST = named(amp.TECHNIQUES, "amp-bf16")
CHECKPOINT = named(checkpoint.TECHNIQUES, "checkpoint-non-reentrant")
CAPTURED = named(compilation.TECHNIQUES, "compile-aot-eager")


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, beta = normal(generator, 3, 5, 6), normal(generator, 4, 6), 1.5 + 0.1 * normal(generator, 6)
    return tuple(value.requires_grad_() for value in (x, weight, beta))  # type: ignore[return-value]  # of three


def test_it_is_a_projected_swish() -> None:
    x, weight, beta = operands()
    out = swish_projection("cpu").apply(x, weight, beta)
    torch.testing.assert_close(out, (x * torch.sigmoid(beta * x)) @ weight.t())
    ones = swish_projection("cpu").apply(x, weight, torch.ones(6))
    torch.testing.assert_close(ones, functional.silu(x) @ weight.t())


def test_under_autocast_it_runs_back_as_it_ran_forward() -> None:
    x, weight, beta = operands()
    with torch.autocast("cpu", torch.bfloat16):
        out = swish_projection("cpu").apply(x.bfloat16(), weight, beta)
    assert out.dtype == torch.bfloat16
    # Without custom_bwd the half-precision gradient meets the saved FP32 weight.
    out.sum().backward()
    assert {value.grad.dtype for value in (x, weight, beta) if value.grad is not None} == {torch.float32}
    assert all(value.grad is not None for value in (x, weight, beta))


def test_a_device_that_nobody_foresaw_has_a_function_too() -> None:
    assert swish_projection("meta") is swish_projection("meta")
    assert swish_projection("meta") is not swish_projection("cpu")


# Fault 38, where finite differences find it: the workload's own function is wrong
class Exchanged(GatedFunction):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, slope = GatedFunction.backward(ctx, *grads)
        return gate, x, slope


class Wrong(Gated):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        out: Tensor = Exchanged.apply(x, gate, self.slope)  # type: ignore[no-untyped-call]  # untyped in torch
        return out


def unequal(generator: torch.Generator, extent: int, *, wrong: bool, equal: bool = False) -> Problem:
    module = Wrong() if wrong else Gated()
    with torch.no_grad():
        module.slope.fill_(1.5)
    x, gate = normal(generator, 4 + extent, 3), normal(generator, 4 + extent, 3)
    return Problem(module, (torch.zeros_like(gate), torch.zeros_like(gate)) if equal else (x, gate))


@pytest.mark.parametrize("wrong", [False, True])
def test_finite_differences_find_gradients_that_are_swapped_in_the_workload_itself(fresh: Store, wrong: bool) -> None:
    workload = replace(seeded("custom-function"), make=partial(unequal, wrong=wrong))
    record = verdict_of(fresh, Eager(), workload, BACKWARD)
    if wrong:
        assert record.verdict is Verdict.ERROR
        assert "GradcheckError" in record.why
    else:
        assert record.verdict is Verdict.PASS, record.why


# Fault 38 and its like, planted under each technique that runs the function
class Before(Planted):
    """The change comes first, so that the technique applies to what was changed."""

    def prepare(self, program: Program, mode: Any, device: Device) -> None:
        self.change(program)
        self.base.prepare(program, mode, device)


class Lost(swish_projection("cpu")):  # type: ignore[misc]  # a class all the same
    """The chain rule's factor of the activation is lost: the gradient of its result passes for that of its operand."""

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]  # untyped in torch
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        x, weight, beta = ctx.saved_tensors
        open_ = torch.sigmoid(beta * x)
        through = grad @ weight
        return through, grad.t() @ (x * open_), (through * x * x * open_ * (1 - open_)).sum(0)


def losing(program: Program) -> None:
    """In the last block."""
    block: Any = program.module.blocks[-1]  # type: ignore[index]  # a ModuleList
    block.forward = lambda x: x + Lost.apply(block.fc(x), block.weight, block.beta)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "workload", "mode"),
    [
        (AUTOCAST, "custom-swish", BACKWARD),
        (CHECKPOINT, "custom-swish", BACKWARD),
        (CHECKPOINT, "train-custom", TRAIN),
        (CAPTURED, "custom-swish", BACKWARD),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_wrong_gradient_fails_under_a_technique(fresh: Store, technique: Technique, workload: str, mode: Any) -> None:
    passed(fresh, technique, seeded(workload), mode)
    record = failed(fresh, Before(technique, losing), seeded(workload), mode)
    path = "parameter:blocks.1.fc.weight" if mode is TRAIN else "grad:blocks.1.fc.weight"
    assert path in faults(record)


def test_the_blocks_hold_a_function_each() -> None:
    module = seeded("custom-swish").problem(0).module
    assert isinstance(module, SwishNetwork)
    with torch.no_grad():
        x = torch.ones(2, 24)
        before = module(x)
        block = module.blocks[0]
        assert isinstance(block, SwishBlock)
        nn.init.zeros_(block.beta)  # half of the identity
        assert not torch.equal(module(x), before)
