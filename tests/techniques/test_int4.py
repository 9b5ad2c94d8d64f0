"""int4 weights: really four bits, equal to the emulation; faults exceed rounding, and evidence can fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import Bed, passed, seeded, verdict_of
from technique_harness import StubDevice, engaged, named, run
from torch import nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.packages import installed
from accelcheck.selftest.faults.base import Change, Planted
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.quantization import int4, torchao
from accelcheck.techniques.quantization.emulation import eval_copy
from accelcheck.techniques.quantization.int4 import GROUP, TECHNIQUES, KernelLinear, NibbleLinear, quantize
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program

NIBBLES: Any = named(TECHNIQUES, "int4-weight-only")
TORCHAO: Any = named(torchao.TECHNIQUES, "int4-torchao-weight-only")
ALL = (*TECHNIQUES, TORCHAO)

without_torchao = pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")


def layers(inputs: int = 48, *, bias: bool = True) -> Problem:
    """Two layers with sizes that are no multiples of a group or tile, for an input of three dimensions."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(inputs, 80, bias=bias), nn.Tanh(), nn.Linear(80, 23, bias=bias))
    return Problem(module, (torch.randn(3, 5, inputs),))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("technique", ALL, ids=lambda technique: technique.name)
def test_candidates_equal_the_emulation(technique: Any, bias: bool) -> None:
    if not technique.answer(Bed()).ok:
        pytest.skip(str(technique.answer(Bed())))
    ran = engaged(technique, layers(bias=bias))
    original = layers(bias=bias)
    exact, x = eval_copy(original.module).double(), original.inputs[0].double()
    with torch.no_grad():
        truth, plain = technique.emulate(exact, ())(x), exact(x)
    assert float((ran.result["out"].double() - truth).norm() / truth.norm()) < 1e-6
    assert ran.result["out"].is_contiguous()
    assert 0.01 < float((truth - plain).norm() / plain.norm()) < 0.2


def test_a_weight_of_sixteen_levels_is_exact() -> None:
    weight = torch.arange(16.0).repeat(3, 4) * torch.tensor([[0.5], [1.0], [4.0]]) - 3.0
    integers, scale, zero = quantize(weight)
    groups = (integers - int4.MIDDLE).reshape(3, -1, GROUP) * scale.unsqueeze(-1) + zero.unsqueeze(-1)
    torch.testing.assert_close(groups.reshape(weight.shape), weight)
    assert (int(integers.min()), int(integers.max())) == (0, 15)


def test_a_group_has_its_own_scale() -> None:
    weight = torch.randn(4, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    weight[:, :GROUP] *= 1000
    _, scale, _ = quantize(weight)
    assert scale.shape == (4, 2)
    assert float((scale[:, 0] / scale[:, 1]).min()) > 100


def test_a_group_of_equal_weights_has_a_scale() -> None:
    integers, scale, zero = quantize(torch.full((2, GROUP), 0.25))
    assert float(scale.min()) > 0
    torch.testing.assert_close((integers - int4.MIDDLE) * scale + zero, torch.full((2, GROUP), 0.25))


@without_torchao
def test_the_rules_equal_torchaos() -> None:
    primitives: Any = importlib.import_module("torchao.quantization.quant_primitives")
    tools: Any = importlib.import_module("torchao.quantization")
    weight = torch.randn(6, 3 * GROUP, generator=torch.Generator().manual_seed(0))
    kinds = (tools.MappingType.ASYMMETRIC, (1, GROUP), torch.int32, 0, 15, int4.SMALLEST, None, torch.float32)
    scale, zero = primitives._choose_qparams_affine_tinygemm(weight, *kinds)
    theirs = primitives._quantize_affine_tinygemm(weight, (1, GROUP), scale, zero, torch.int32, 0, 15)
    integers, our_scale, our_zero = quantize(weight)
    assert torch.equal(theirs.float(), integers)
    torch.testing.assert_close(our_scale, scale.reshape(our_scale.shape))
    torch.testing.assert_close(our_zero, zero.reshape(our_zero.shape))


def test_four_bits_an_element_in_memory_and_in_a_file() -> None:
    problem = Problem(nn.Linear(64, 32, bias=False), (torch.randn(4, 64),))
    claims = {entry.claim.partition(" fall")[0]: str(entry.observed) for entry in run(NIBBLES, problem).evidence}
    weights, scales = 64 * 32, 2 * 2 * 4 * 32
    assert claims["bytes of the weights"] == f"{4 * weights} -> {weights // 2 + scales}"
    assert claims["bytes of elements in a file"].startswith(f"{4 * weights} -> {weights // 2 + scales} (")


def every_layer(edit: Callable[[Any], None]) -> Change:
    def change(program: Program) -> None:
        assert isinstance(program.call, nn.Module)
        for layer in program.call.modules():
            if isinstance(layer, (KernelLinear, NibbleLinear)):
                edit(layer)

    return change


def swapped(layer: Any) -> None:
    """Swaps the nibbles of each byte."""
    layer.weight = (layer.weight >> 4) + 16 * (layer.weight & 15)


def zero_off(layer: Any) -> None:
    """Reads integers as one more."""
    layer.scale[1] += layer.scale[0]


def next_groups(layer: Any) -> None:
    """Uses the scales of the next channel for every group."""
    layer.scale = layer.scale.roll(1, 1)


def three_bits(layer: Any) -> None:
    layer.weight = layer.weight & 0xEE


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "edit", [swapped, zero_off, next_groups, three_bits, None], ids=lambda edit: edit.__name__ if edit else "healthy"
)
def test_faults_of_packed_weights_fail(edit: Any, store: Store) -> None:
    change = nothing if edit is None else every_layer(edit)
    record = verdict_of(store, Planted(NIBBLES, change), seeded("mlp-blocks"))
    assert record.verdict is (Verdict.PASS if edit is None else Verdict.FAIL), record.why
    assert "not engaged" not in record.why


@pytest.mark.parametrize("number", [1, 2])
def test_kernel_and_nibbles_pass_with_other_seeds(number: int, store: Store) -> None:
    for technique in TECHNIQUES:
        passed(store, technique, seeded("mlp", number))


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_an_unconverted_module_fails_the_evidence(technique: Any) -> None:
    program = Program.of(layers())
    program.call = eval_copy(program.module)
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    seen = list(technique.evidence(program, log, Mode.FORWARD, StubDevice()))
    assert sum(not call.engaged for call in seen) == len(seen)


@without_torchao
def test_layers_without_whole_groups_are_left_alone_and_not_counted() -> None:
    ran = engaged(TORCHAO, layers(50))
    assert ran.evidence[0].claim == "linear layers with a weight of type IntxUnpackedToInt8Tensor = 1 >= 1"


def test_the_kernel_needs_the_cpu() -> None:
    kernel = named(TECHNIQUES, "int4-weight-only-kernel")
    assert kernel.capability(StubDevice()).ok
    assert kernel.capability(StubDevice("cuda")).code is Code.NO_FEATURE
    assert NIBBLES.capability(StubDevice("cuda")).ok
