"""int8: kernels equal the emulation, faults exceed rounding, and the evidence distinguishes int8 from FP32."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from process_harness import completed
from technique_harness import StubDevice, engaged, run
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.devices.packages import installed
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.quantization import emulation, int8, torchao
from accelcheck.techniques.quantization.emulation import (
    DynamicRange,
    EmulatedLinear,
    FixedRange,
    Quantizer,
    eval_copy,
    replaced,
)
from accelcheck.techniques.quantization.int8 import DynamicInt8, Quantized, StaticInt8
from accelcheck.techniques.quantization.torchao import TorchAODynamic, torchao_capability
from accelcheck.workloads.base import Problem, Program

TECHNIQUES = (*int8.TECHNIQUES, *(item for item in torchao.TECHNIQUES if item.name.startswith("int8")))

ROUNDING = 1e-6
"""Largest relative error by FP32 rounding in these small modules."""


class Residual(nn.Module):
    """Uses one layer twice, has one without bias, and returns two outputs of different ranks."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.twice = nn.Linear(size, size)
        self.plain = nn.Linear(size, 2 * size, bias=False)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(x + self.twice(torch.tanh(self.twice(x))))
        return {"hidden": hidden, "wide": self.plain(hidden).mean(-1)}


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(64, 96, 10), (32, 64)),
    "odd": (lambda: mlp(33, 50, 17, 7), (5, 33)),
    "residual": (lambda: Residual(24), (3, 6, 24)),
    "linear": (lambda: nn.Linear(20, 5), (3, 20)),
}


def program(make: Callable[[], nn.Module], shape: tuple[int, ...], seed: int) -> Program:
    torch.manual_seed(seed)
    return Program.of(Problem(make(), (torch.randn(shape),)))


def exactly(original: Program) -> Program:
    """The same program in FP64."""
    inputs = tuple(value.double() for value in original.inputs)
    return Program(module=eval_copy(original.module).double(), inputs=inputs)


def error(result: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return max(float((result[path].double() - truth[path]).norm() / truth[path].norm()) for path in truth)


def flipped(emulated: Program, seed: int) -> dict[str, Tensor]:
    quantizers = [module for module in emulated.module.modules() if isinstance(module, Quantizer)]
    for quantizer in quantizers:
        quantizer.flips = torch.Generator().manual_seed(seed)
    result = emulated.run(Mode.FORWARD)
    for quantizer in quantizers:
        quantizer.flips = None
    return result


@pytest.fixture(params=TECHNIQUES, ids=lambda technique: technique.name)
def technique(request: pytest.FixtureRequest) -> Iterator[Quantized]:
    result: Quantized = request.param
    capability = result.capability(StubDevice(features=("quantized-engine",)))
    if not capability.ok:
        pytest.skip(str(capability))
    yield result
    result.finish()


@pytest.mark.parametrize("name", MODULES)
def test_candidates_equal_the_emulation(technique: Quantized, name: str) -> None:
    device = StubDevice(features=("quantized-engine",))
    close = 0
    for seed in range(4):
        original = program(*MODULES[name], seed)
        exact = exactly(original)
        plain = exact.run(Mode.FORWARD)
        emulated = Program(module=technique.emulate(exact.module, exact.inputs), inputs=exact.inputs)
        truth = emulated.run(Mode.FORWARD)
        budget = 2 * max(error(flipped(emulated, index), truth) for index in range(6)) + ROUNDING
        technique.prepare(original, Mode.FORWARD, device)
        with technique.watch("cpu") as log:
            result = original.run(Mode.FORWARD)
        evidence = list(technique.evidence(original, log, Mode.FORWARD, device))
        technique.finish()
        assert evidence
        assert all(item.engaged for item in evidence), [item for item in evidence if not item.engaged]
        assert error(result, truth) <= budget
        close += error(result, truth) <= ROUNDING
        assert error(result, plain) > 1e-3, "int8 must show against FP64"
    # In torchao's scheme each row's largest negative value is at a tie; in others, ties are rare.
    assert close >= (0 if isinstance(technique, TorchAODynamic) else 3)


def _off_by_one(x: Tensor, scale: Tensor, zero: int) -> Tensor:
    return (torch.round(x / scale) + zero).clamp(0, 255) - (zero + 1)


def _truncated(x: Tensor, scale: Tensor, zero: int) -> Tensor:
    return (torch.trunc(x / scale) + zero).clamp(0, 255) - zero


def _reduced(x: Tensor, scale: Tensor, zero: int) -> Tensor:
    return 2 * torch.round(x / (2 * scale)).clamp(-zero, 255 - zero)


@pytest.mark.parametrize("fault", [_off_by_one, _truncated, _reduced], ids=lambda fault: fault.__name__[1:])
@pytest.mark.parametrize("kind", [DynamicInt8, StaticInt8])
def test_quantizer_faults_exceed_rounding(
    kind: type[DynamicInt8 | StaticInt8],
    fault: Callable[[Tensor, Tensor, int], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    technique = kind("x86")

    def faulty(self: Quantizer, x: Tensor) -> Tensor:
        scale, zero = self.rule(x.float())
        return fault(x.float(), scale, zero).double() * scale.double()

    def broken(exact: Program) -> nn.Module:
        module = technique.emulate(exact.module, exact.inputs)
        monkeypatch.setattr(Quantizer, "forward", faulty)
        return module

    assert _excess(technique, broken, monkeypatch) > 1000


@pytest.mark.parametrize("kind", [StaticInt8, TorchAODynamic])
def test_a_scale_on_the_wrong_axis_exceeds_rounding(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    technique = kind()
    right = emulation.symmetric_scale

    def broken(exact: Program) -> nn.Module:
        monkeypatch.setattr(emulation, "symmetric_scale", lambda x, dim=-1: right(x, None if dim is None else 0))
        module: nn.Module = technique.emulate(exact.module, exact.inputs)
        monkeypatch.setattr(emulation, "symmetric_scale", right)
        return module

    # One layer, so that flips at ties in the per-token scheme do not reach further layers.
    assert _excess(technique, broken, monkeypatch, sizes=(64, 32)) > (1000 if kind is StaticInt8 else 1)


def _excess(
    technique: Quantized,
    broken: Callable[[Program], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...] = (64, 96, 10),
) -> float:
    """Error of a faulty implementation relative to six flipped runs of the right one; the best of eight seeds."""
    ratios = []
    for seed in range(8):
        exact = exactly(program(lambda: mlp(*sizes), (32, 64), seed))
        emulated = Program(module=technique.emulate(exact.module, exact.inputs), inputs=exact.inputs)
        truth = emulated.run(Mode.FORWARD)
        budget = 2 * max(error(flipped(emulated, index), truth) for index in range(6)) + ROUNDING
        wrong = Program(module=broken(exact), inputs=exact.inputs).run(Mode.FORWARD)
        monkeypatch.undo()
        ratios.append(error(wrong, truth) / budget)
    return max(ratios)


@pytest.mark.parametrize("steps", [127, 255])
@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0, 100.0])
def test_dynamic_range_equals_torchs(steps: int, shift: float) -> None:
    for seed in range(20):
        x = torch.randn(37, generator=torch.Generator().manual_seed(seed)) + shift
        scale, zero = torch._choose_qparams_per_tensor(x, reduce_range=steps == 127)
        ours, ours_zero = DynamicRange(steps)(x)
        assert float(ours) == pytest.approx(scale, rel=2**-23)
        assert ours_zero == zero


@pytest.mark.parametrize("x", [torch.zeros(4), torch.tensor([1e-7, -1e-7]), torch.tensor([0.0, 1e-6])])
def test_dynamic_range_of_tiny_values_equals_torchs(x: Tensor) -> None:
    scale, zero = torch._choose_qparams_per_tensor(x, reduce_range=True)
    ours, ours_zero = DynamicRange(127)(x)
    assert float(ours) == pytest.approx(scale, rel=2**-23)
    assert ours_zero == zero


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_fixed_range_and_symmetric_scale_equal_the_observers() -> None:
    from torch.ao.quantization import default_observer, default_per_channel_weight_observer, default_weight_observer

    for seed in range(20):
        x = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)) + (seed - 10) / 2
        observer = default_observer()
        observer(x)
        scale, zero = observer.calculate_qparams()
        ours, ours_zero = FixedRange(float(x.min()), float(x.max()), 127)(x)
        assert (float(ours), ours_zero) == (float(scale), int(zero))
        for maker, dim in ((default_weight_observer, None), (default_per_channel_weight_observer, -1)):
            observer = maker()
            observer(x)
            assert torch.equal(emulation.symmetric_scale(x, dim).flatten(), observer.calculate_qparams()[0].flatten())


def test_range_without_values_is_the_observers_default() -> None:
    scale, zero = FixedRange(float("inf"), float("-inf"), 127)(torch.zeros(1))
    assert (float(scale), zero) == (1.0, 0)


def test_flips_move_elements_near_ties_by_one_quantum() -> None:
    quantizer = Quantizer(lambda _: (torch.tensor(1.0), 0), -128, 127)
    whole = torch.arange(-100.0, 100.0).double()
    x = torch.stack([whole + 0.5, whole + 0.25, whole])
    plain = quantizer(x)
    quantizer.flips = torch.Generator().manual_seed(0)
    moved = (quantizer(x) - plain).round()
    assert moved[0].abs().max() == 1
    assert 60 < int(moved[0].ne(0).sum()) < 140
    assert moved[1:].eq(0).all()


def test_flips_move_equal_elements_together() -> None:
    quantizer = Quantizer(lambda _: (torch.tensor(1.0), 0), -128, 127)
    quantizer.flips = torch.Generator().manual_seed(0)
    result = quantizer((torch.arange(-100.0, 100.0).double() + 0.5).repeat(3, 1))
    assert torch.equal(result[0], result[1])
    assert torch.equal(result[0], result[2])


def test_flips_move_the_scale_by_rounding_errors() -> None:
    quantizer = Quantizer(FixedRange(-1.0, 2.0, 127), 0, 255)
    x = torch.linspace(-1, 2, 50).double()
    plain = quantizer(x)
    quantizer.flips = torch.Generator().manual_seed(0)
    moved = [float((quantizer(x)[plain != 0] / plain[plain != 0] - 1).abs().max()) for _ in range(20)]
    assert max(moved) <= 2 * emulation.RELATIVE
    assert max(moved) > emulation.RELATIVE / 4


def test_two_runs_move_each_weight_at_a_tie_once_and_scales_to_both_sides() -> None:
    layer = nn.Linear(4, 8, bias=False)
    with torch.no_grad():
        layer.weight[:] = torch.tensor([-1.0, 0.25, 0.5, 0.75])
        layer.weight *= torch.arange(1.0, 9.0).unsqueeze(1)
    emulated = EmulatedLinear(layer.double())
    runs = []
    for seed in (6, 7):
        emulated.flips = torch.Generator().manual_seed(seed)
        runs.append(emulated.taken() / emulated.weight - 1)
    largest = torch.stack(runs)[..., 0].abs()
    assert torch.equal((largest > 2.0**-8).sum(0), torch.ones(8, dtype=torch.long)), "-127.5 becomes -127 or -128"
    for moved, error in zip(runs, (emulation.SCALE_ERROR, -emulation.SCALE_ERROR), strict=True):
        assert torch.allclose(moved[:, 1:], torch.tensor(error).double(), rtol=1e-6)


def test_quantizer_accepts_an_empty_tensor() -> None:
    assert Quantizer(DynamicRange(127), 0, 255)(torch.zeros(0, 4).double()).shape == (0, 4)


def test_replaced_keeps_shared_layers_and_subclasses() -> None:
    class Special(nn.Linear):
        pass

    shared = nn.Linear(3, 3)
    module = nn.Sequential(shared, nn.Sequential(shared, Special(3, 3))).double()
    out = replaced(eval_copy(module), EmulatedLinear)
    assert isinstance(out, nn.Sequential)
    inner = out[1]
    assert isinstance(inner, nn.Sequential)
    assert out[0] is inner[0]
    assert isinstance(out[0], EmulatedLinear)
    assert isinstance(inner[1], Special)
    assert module[0] is shared, "the original is left alone"


def test_weights_are_quantized_by_value_not_by_reference() -> None:
    module = nn.Linear(8, 4).double()
    emulated = DynamicInt8("x86").emulate(module, ())
    with torch.no_grad():
        module.weight.zero_()
    assert float(emulated(torch.ones(1, 8).double()).abs().sum()) > 0


def test_a_plain_program_fails_the_evidence() -> None:
    technique = DynamicInt8()
    device = StubDevice(features=("quantized-engine",))
    original = program(*MODULES["mlp"], 0)
    original.call = original.module
    with technique.watch("cpu") as log:
        original.run(Mode.FORWARD)
    seen = list(technique.evidence(original, log, Mode.FORWARD, device))
    assert {item.claim for item in seen if not item.engaged} >= {
        "linear layers converted = 2 >= 1",
        "linear layers left in floating point = 0",
        "quantized::linear_dynamic events >= 2",
        "dtype of the weights is torch.qint8",
        "bytes of the weights fall from FP32's by half or more",
    }


def test_bytes_of_the_weights_are_a_quarter() -> None:
    technique = DynamicInt8()
    device = StubDevice(features=("quantized-engine",))
    if not technique.capability(device).ok:
        pytest.skip("no engine")
    original = program(*MODULES["mlp"], 0)
    technique.prepare(original, Mode.FORWARD, device)
    with technique.watch("cpu") as log:
        original.run(Mode.FORWARD)
    [seen] = [e for e in technique.evidence(original, log, Mode.FORWARD, device) if "bytes of the weights" in e.claim]
    technique.finish()
    before = 4 * (64 * 96 + 96 * 10)
    assert seen == Evidence(
        "bytes of the weights fall from FP32's by half or more", f"{before} -> {before // 4}", engaged=True
    )


def test_finish_restores_the_engine() -> None:
    before = torch.backends.quantized.engine
    technique = StaticInt8("onednn" if before != "onednn" else "fbgemm")
    if not technique.capability(StubDevice(features=("quantized-engine",))).ok:
        pytest.skip("no such engine")
    technique.prepare(program(*MODULES["linear"], 0), Mode.FORWARD, StubDevice(features=("quantized-engine",)))
    assert torch.backends.quantized.engine == technique.engine
    technique.finish()
    assert torch.backends.quantized.engine == before


def test_capability_without_the_feature_and_without_the_engine() -> None:
    assert DynamicInt8().capability(StubDevice(features=())).code is Code.NO_FEATURE
    absent = DynamicInt8("nonesuch").capability(StubDevice(features=("quantized-engine",)))
    assert (absent.code, absent.verdict) == (Code.WRONG_BUILD, Verdict.UNAVAILABLE)


def test_torchao_that_is_absent_or_does_not_import_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    torchao_capability.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    absent = TorchAODynamic().capability(StubDevice(features=()))
    assert (absent.code, absent.verdict) == (Code.NO_PACKAGE, Verdict.UNAVAILABLE)
    assert absent.action == "pip install 'accelcheck[torchao]'"

    def failing(name: str) -> None:
        raise ImportError(f"{name}: cannot import name 'ScalingType'")

    torchao_capability.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.18.0")
    monkeypatch.setattr(importlib, "import_module", failing)
    broken = TorchAODynamic().capability(StubDevice(features=()))
    assert (broken.code, broken.verdict) == (Code.WRONG_VERSION, Verdict.UNAVAILABLE)
    assert "ScalingType" in broken.reason
    monkeypatch.undo()
    torchao_capability.cache_clear()


@pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")
def test_a_device_on_which_torchao_widens_int8_products_does_not_have_them() -> None:
    class Widening(TorchAODynamic):
        def quantized(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
            return module  # as if int8 values were widened before the product

    other = StubDevice("fancy")  # computes on the CPU, where torchao multiplies integers
    assert TorchAODynamic().capability(other).tried
    assert not TorchAODynamic().capability(StubDevice()).tried
    linear = Problem(nn.Linear(32, 16), (torch.randn(8, 32),))
    engaged(TorchAODynamic(), linear, device=other)
    with pytest.raises(Unsupported, match=r"multiplies no int8 values on stub: it widens them to ") as told:
        run(Widening(), linear, device=other)
    assert told.value.capability.code is Code.NO_BACKEND
    assert told.value.capability.tried


def test_there_is_one_oracle_per_scheme() -> None:
    assert len({technique.name for technique in TECHNIQUES}) == len(TECHNIQUES)
    assert DynamicInt8("x86").oracle == DynamicInt8("fbgemm").oracle != DynamicInt8("qnnpack").oracle
    assert StaticInt8("x86").oracle != StaticInt8("qnnpack").oracle
    assert "float64" not in {technique.oracle for technique in TECHNIQUES}


@pytest.mark.slow
@pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")
def test_torchao_is_imported_without_remarks_of_pytree_and_of_kernels() -> None:
    code = (
        "from accelcheck.techniques.quantization.torchao import torchao_capability as ask; "
        "print(ask('Int8WeightOnlyConfig'))"
    )
    done = completed([sys.executable, "-c", code], check=True)
    assert done.stdout == "ok\n"
    assert done.stderr == ""
