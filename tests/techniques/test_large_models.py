"""Techniques of large models: formats, training in float8, optimizers, experts, losses, control flow, regions."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from fault_harness import Bed, bench, erred, failed, passed, seeded
from technique_harness import StubDevice, agrees, engaged, mlp, named, plain, run, workload
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.torch_version import TorchVersion

from accelcheck.core.capability import Code
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.core.registry import index
from accelcheck.devices.cpu import DEVICES
from accelcheck.devices.packages import installed
from accelcheck.devices.torch_names import inductor_config
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.compilation import control_flow, regional
from accelcheck.techniques.fused import kernels, packages
from accelcheck.techniques.observe import OperatorLog
from accelcheck.techniques.optimizers import modern
from accelcheck.techniques.quantization import float8_training, microscaling
from accelcheck.techniques.quantization.emulation import eval_copy
from accelcheck.verify.oracle import Store
from accelcheck.workloads import control_flow as controlled
from accelcheck.workloads import decoders, elementwise, large_models
from accelcheck.workloads import mlp as perceptrons
from accelcheck.workloads.base import Problem, Program

OWN = (
    *large_models.WORKLOADS,
    *decoders.WORKLOADS,
    *controlled.WORKLOADS,
    *perceptrons.WORKLOADS,
    *elementwise.WORKLOADS,
)
WORKLOADS = index("workload", OWN)
COMPILED = StubDevice(features=("inductor", "strided"))
needs_torchao = pytest.mark.skipif(not installed("torchao"), reason="needs torchao")


def problem(name: str) -> Problem:
    return WORKLOADS[name].problem(1)


def odd() -> Problem:
    """Sizes that are no multiples of a block, and an input of three dimensions."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(77, 90), nn.Tanh(), nn.Linear(90, 47))
    return Problem(module, (torch.randn(3, 5, 77),))


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm().clamp(min=1e-30))


@needs_torchao
@pytest.mark.parametrize("technique", microscaling.TECHNIQUES, ids=lambda technique: technique.name)
def test_block_scaled_products_equal_the_emulation(technique: Any) -> None:
    ran = engaged(technique, odd())
    exact, inputs = eval_copy(odd().module).double(), (odd().inputs[0].double(),)
    truth = technique.emulate(exact, inputs)(*inputs)
    assert apart(ran.result["out"], truth) < 1e-6
    assert apart(truth, exact(*inputs)) > 1e-2, "the format must show against FP64"
    assert technique.capability(StubDevice()).ok


@needs_torchao
def test_zeros_have_a_block_scale_but_not_in_nvfp4_of_torchao() -> None:
    """A known failure of torchao: the scale of a tensor of zeros is 0, by which NVFP4 divides."""
    for technique in microscaling.TECHNIQUES:
        made = Problem(nn.Linear(32, 4), (torch.zeros(2, 32),))
        bias: Any = made.module.bias
        right = torch.full((2, 4), torch.nan) if technique.name == "nvfp4" else bias.expand(2, 4)
        assert torch.allclose(run(technique, made).result["out"], right, rtol=0, atol=0, equal_nan=True)


@needs_torchao
def test_layers_that_stay_in_float32_fail_the_evidence_of_block_scaled_products() -> None:
    technique: Any = named(microscaling.TECHNIQUES, "mxfp8")
    program = Program.of(odd())
    technique.prepare(program, Mode.FORWARD, StubDevice())
    program.call = eval_copy(program.module)
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    missing = [
        entry.claim for entry in technique.evidence(program, log, Mode.FORWARD, StubDevice()) if not entry.engaged
    ]
    assert "linear layers converted = 2 >= 1" in missing
    assert "linear layers left as they were = 0" in missing


@needs_torchao
@pytest.mark.parametrize("mode", [Mode.BACKWARD, Mode.TRAIN])
@pytest.mark.parametrize("technique", float8_training.TECHNIQUES, ids=lambda technique: technique.name)
def test_float8_training_equals_the_emulation(technique: Any, mode: Mode) -> None:
    ran = engaged(technique, mlp(), mode)
    casts = {entry.claim.rpartition(" ")[2]: str(entry.observed) for entry in ran.evidence[1:]}
    assert casts.keys() == set(casts.values()), "every operand is counted"
    program = Program.of(mlp()).widened()
    program.module = technique.emulate(program.module, program.inputs)
    truth, exact = program.run(mode), Program.of(mlp()).widened().run(mode)
    assert max(apart(ran.result[path], truth[path]) for path in truth) < 1e-6
    assert max(apart(exact[path], truth[path]) for path in truth) > 1e-3, "the format must show against FP64"


@needs_torchao
def test_a_float8_training_of_plain_layers_fails_the_evidence() -> None:
    technique: Any = named(float8_training.TECHNIQUES, "float8-training-rowwise")
    program = Program.of(mlp())
    technique.prepare(program, Mode.BACKWARD, StubDevice())
    program.module = mlp().module
    with technique.watch("cpu") as log:
        program.run(Mode.BACKWARD)
    assert not any(entry.engaged for entry in technique.evidence(program, log, Mode.BACKWARD, StubDevice()))


def test_muon_moves_singular_values_towards_one_and_equals_torch_in_bfloat16() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 20, dtype=torch.float64)
    group = {"steps": 5, "coefficients": (3.4445, -4.775, 2.0315)}
    values = torch.linalg.svdvals(modern.ExactMuon.orthogonal(x, group))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    sgd = partial(torch.optim.SGD, lr=0.1)
    ran = engaged(modern.TECHNIQUES[0], replace(mlp(), optimizer=sgd), Mode.TRAIN)
    assert [e.claim for e in ran.evidence] == [
        f"bfloat16 products for 2 matrices >= {e.observed}" for e in ran.evidence
    ]

    last: nn.Module = next(reversed(list(mlp().module.children())))

    def moves(result: Any) -> dict[str, Tensor]:
        """Changes of the last layer's parameters; those of the first have small singular values, so larger errors."""
        return {name: result[f"parameter:2.{name}"].double() - x for name, x in last.named_parameters()}

    def exact(flips: torch.Generator | None) -> dict[str, Tensor]:
        program = Program.of(mlp()).widened()
        program.optimizer = modern.WithMuon(sgd, exact=True, flips=flips)
        return moves(program.run(Mode.TRAIN))

    truth, rounded = exact(None), exact(torch.Generator().manual_seed(0))
    for own in (moves(ran.result), rounded):
        assert 1e-4 < apart(own["weight"], truth["weight"]) < 2e-2
        assert apart(own["bias"], truth["bias"]) < 4e-3
    without = moves(plain(replace(mlp(), optimizer=sgd), Mode.TRAIN))
    assert apart(without["weight"], truth["weight"]) > 0.5
    assert apart(without["bias"], truth["bias"]) < 0.1


def test_muon_refuses_a_module_without_matrices() -> None:
    made = mlp()
    made = Problem(nn.LayerNorm(16), made.inputs, made.inputs[0], made.loss, made.optimizer)
    with pytest.raises(Unsupported, match="no parameter is a matrix"):
        run(modern.TECHNIQUES[0], made, Mode.TRAIN)


@needs_torchao
def test_the_map_of_eight_bits_is_that_of_torchao() -> None:
    tools: Any = pytest.importorskip("torchao.optim.subclass_8bit")
    for signed, state in ((True, torch.randn(4, 1024)), (True, torch.rand(4, 1024)), (False, torch.rand(4, 1024))):
        held = tools.OptimState8bit.zeros(state.shape, signed, modern.BLOCK)
        held.copy_(state)
        own = modern.EightBitStates(torch.optim.AdamW).rounded(state.double(), signed=signed)
        assert apart(held.dequantize(), own) < 2.0**-23
        assert float((own - state).abs().max()) > 1e-4


@needs_torchao
def test_eight_bits_take_the_place_of_adamw_alone() -> None:
    with pytest.raises(Unsupported, match="not of SGD"):
        run(modern.TECHNIQUES[1], mlp(), Mode.TRAIN, COMPILED)
    assert modern.TECHNIQUES[1].capability(StubDevice()).code is Code.NO_BACKEND
    given = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(Unsupported, match="maximize"):
        modern.WithEightBits(partial(torch.optim.AdamW, maximize=True))(given)
    made = modern.WithEightBits(partial(torch.optim.AdamW, lr=0.5, amsgrad=True))(given)
    assert (made.defaults["amsgrad"], made.defaults["weight_decay"], made.defaults["eps"]) == (True, 1e-2, 1e-8)


@needs_torchao
@pytest.mark.slow
def test_moments_of_large_parameters_have_eight_bits() -> None:
    ran = engaged(modern.TECHNIQUES[1], problem("train-vocabulary"), Mode.TRAIN, COMPILED)
    truth = Program.of(problem("train-vocabulary")).widened()
    assert truth.optimizer is not None
    truth.optimizer = modern.EightBitStates(truth.optimizer)
    expected = truth.run(Mode.TRAIN)
    assert max(apart(ran.result[path], expected[path]) for path in expected) < 1e-5


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("technique", kernels.TECHNIQUES, ids=lambda technique: technique.name)
def test_fused_kernels_give_what_the_loop_gives(technique: Any, mode: Mode) -> None:
    if not technique.capability(StubDevice()).ok:
        pytest.skip(str(technique.capability(StubDevice())))
    name = min(technique.workloads, key=len)
    agrees(technique, lambda: problem(name), mode)


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("technique", packages.TECHNIQUES, ids=lambda technique: technique.name)
@pytest.mark.slow(after=4)
def test_kernels_of_packages_give_what_eager_gives(technique: Any, mode: Mode, fresh: Store) -> None:
    if not (answer := technique.answer(DEVICES[0])).ok:
        pytest.skip(str(answer))
    workload = WORKLOADS[min(technique.workloads, key=len)]
    case = Case(technique.name, workload.name, "cpu", "float32", mode, 3)
    record = bench(fresh, technique, workload, DEVICES[0]).run(case)
    assert record.verdict is Verdict.PASS, record.why


def test_interpreted_kernels_leave_triton_as_it_was() -> None:
    triton = pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    before = triton.knobs.runtime.interpret
    packages.kernels_of("liger_kernel.ops.swiglu")
    assert triton.knobs.runtime.interpret == before


def test_kernels_of_packages_say_where_they_run() -> None:
    xla, cpu = StubDevice("xla"), StubDevice(features=("host",))
    answers = {technique.name: technique.exists(xla) for technique in packages.TECHNIQUES}
    assert {answer.code for answer in answers.values()} == {Code.NO_BACKEND}
    assert "Triton compiles for GPUs, not for stub" in answers["liger-rope"].reason
    assert "Triton's interpreter" in str(answers["liger-rope"])
    on_cpu = {technique.name for technique in packages.TECHNIQUES if technique.exists(cpu).ok}
    assert on_cpu >= {technique.name for technique in packages.TECHNIQUES if technique.name.startswith("liger")}
    assert "cut-cross-entropy" not in on_cpu


def test_each_launch_of_a_kernel_is_an_operator_and_floats_become_numbers_of_the_kernel() -> None:
    class Kernel:
        extra = 5

        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: launched.append((grid, given, options))

    launched: list[Any] = []
    around = partial(contextlib.nullcontext, lambda value: value + 1 if isinstance(value, float) else value)
    announced = packages.Announced("kernel_of_a_test", Kernel(), around)
    with OperatorLog("cpu") as log:
        announced[(3,)](1.5, 2, eps=0.5, block=4)
    assert launched == [((3,), (2.5, 2), {"eps": 1.5, "block": 4})]
    assert log.count("accelcheck::kernel_of_a_test") == 1
    assert announced.extra == 5


def test_undefined_rows_of_grouped_products_reach_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows after the last group, and their gradients, may be anything."""

    class Junk(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, ends: Tensor) -> Tensor:
            ctx.end = int(ends[-1])
            return torch.cat([x[: ctx.end], torch.full_like(x[ctx.end :], torch.nan)])

        backward = staticmethod(lambda ctx, *grads: (Junk.forward(ctx, grads[0], torch.tensor([ctx.end])), None))

    junk: Any = Junk.apply
    whole = kernels.grouped_mm
    monkeypatch.setattr(
        kernels, "grouped_mm", lambda x, w, ends: junk(whole(junk(x, ends), w, ends).contiguous(), ends)
    )
    for technique in kernels.TECHNIQUES[:2]:
        agrees(technique, lambda: problem("grouped-experts"), Mode.BACKWARD)


def test_padded_groups_end_at_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, seen = kernels.grouped_mm, list[int]()

    def watched(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        seen.extend(ends.tolist())
        return whole(rows, weights, ends)

    monkeypatch.setattr(kernels, "grouped_mm", watched)
    engaged(kernels.TECHNIQUES[1], problem("grouped-experts"))
    assert {end % kernels.ALIGN for end in seen} == {0}


def test_a_loss_in_chunks_never_holds_the_logits_of_all_rows() -> None:
    made = problem("vocabulary-loss")
    with torch.profiler.profile(record_shapes=True) as watched:
        kernels.by_chunks(cast("Any", made.module), *made.inputs)
    events = [event for event in watched.events() or () if event.name == "aten::amax"]
    rows = [shape[0] for event in events for shape in event.input_shapes if shape[1:] == [160]]
    assert max(rows) == kernels.ROWS < len(made.inputs[0])


def test_an_expert_over_capacity_drops_tokens_and_one_has_none() -> None:
    made = problem("grouped-experts")
    counts = torch.bincount(made.inputs[1].flatten(), minlength=large_models.EXPERTS)
    assert int(counts.max()) > large_models.CAPACITY
    assert int(counts.min()) == 0


@pytest.mark.parametrize(("place", "name", "others"), [(0, "grouped-experts", True), (2, "vocabulary-loss", False)])
def test_a_module_that_is_left_as_it_was_fails_the_evidence_of_fused_kernels(
    place: int, name: str, others: bool
) -> None:
    technique: Any = kernels.TECHNIQUES[place]
    program = Program.of(problem(name))
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    assert [e.engaged for e in technique.evidence(program, log, Mode.FORWARD, StubDevice())] == [False, others]


def test_what_needs_its_own_modules_refuses_others_with_a_reason() -> None:
    other = workload("linear", "matmul")
    for technique in (*kernels.TECHNIQUES, *control_flow.TECHNIQUES):
        assert technique.refusal(other)
        assert not technique.accepts(other)
        assert all(technique.accepts(WORKLOADS[name]) for name in technique.workloads)
    assert microscaling.TECHNIQUES[0].accepts(other)
    assert regional.TECHNIQUES[0].accepts(workload("blocks"))


def test_an_operator_that_a_device_lacks_is_unsupported_and_one_that_is_wrong_is_an_error() -> None:
    technique: Any = kernels.TECHNIQUES[0]

    def lacking(_: Any, place: torch.device) -> Tensor:
        raise NotImplementedError(f"no kernel for {place}")

    refused = replace(technique, example=lacking).capability(StubDevice())
    assert (refused.code, "no kernel for cpu" in refused.reason) == (Code.NO_FEATURE, True)
    assert technique.capability(StubDevice(features=("torch-xla",))).code is Code.NO_FEATURE
    with pytest.raises(RuntimeError, match="expected ones"):
        replace(technique, example=lambda *_: torch.full((2,), 1.5)).capability(StubDevice())


@needs_torchao
def test_a_device_that_rounds_exact_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    technique: Any = microscaling.TECHNIQUES[0]
    rounded = microscaling.BlockScheme.quantized
    monkeypatch.setattr(microscaling.BlockScheme, "quantized", lambda own, x: rounded(own, x * 1.5))
    with pytest.raises(RuntimeError, match="to mxfp8 and back: expected"):
        technique.capability(StubDevice())


def test_fused_kernels_refuse_a_module_without_such_a_part() -> None:
    with pytest.raises(Unsupported, match=r"the module has no accelcheck\.workloads\.large_models\.GroupedExperts"):
        run(kernels.TECHNIQUES[0], mlp())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("technique", control_flow.TECHNIQUES, ids=lambda technique: technique.name)
def test_control_flow_in_a_graph_equals_python(technique: Any, mode: Mode) -> None:
    (name,) = technique.workloads
    agrees(technique, lambda: problem(name), mode)


def test_a_graph_without_the_operator_fails_the_evidence() -> None:
    ran = run(named(control_flow.TECHNIQUES, "torch-scan"), Problem(controlled.Loop(), (torch.ones(6, 12),)))
    assert ran.missing() == ["scan in the graph >= 1: 0"]


def test_a_graph_that_is_compiled_but_not_entered_fails_the_evidence() -> None:
    technique: Any = named(control_flow.TECHNIQUES, "torch-cond")
    program = Program.of(problem("control-cond"))
    technique.prepare(program, Mode.FORWARD, StubDevice())
    program.run(Mode.FORWARD)
    program.call, vars(program.module)["operator"] = program.module, False
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    evidence = technique.evidence(program, log, Mode.FORWARD, StubDevice())
    assert [e.claim for e in evidence if not e.engaged] == ["compiled regions entered >= 1"]
    technique.finish()


def test_old_versions_of_torch_compile_no_gradient_of_a_while_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    technique = named(control_flow.TECHNIQUES, "torch-while-loop")
    with pytest.raises(Unsupported, match=r"torch 2\.9\.1 compiles no gradient of while_loop"):
        technique.prepare(Program.of(problem("control-while-loop")), Mode.BACKWARD, StubDevice())


def blocks(*parts: nn.Module) -> Problem:
    torch.manual_seed(0)
    module = nn.Module()
    module.blocks = nn.ModuleList(parts)
    module.forward = lambda x: [x := block(x) for block in parts][-1]
    return Problem(module, (torch.randn(4, 8),))


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_equal_blocks_share_a_graph_also_of_a_class_of_torch(mode: Mode) -> None:
    """`nn.Module.compile` compiles no `nn.Sequential`: see docs/findings.md."""
    made = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    ran = engaged(regional.TECHNIQUES[0], blocks(*made), mode)
    assert {entry.claim: entry.observed for entry in ran.evidence}["graphs compiled for 3 blocks = 1"] == 1


def test_blocks_of_two_sizes_have_two_graphs_and_one_block_that_is_not_entered_fails() -> None:
    ran = engaged(regional.TECHNIQUES[0], blocks(nn.Linear(8, 8), nn.Linear(8, 9), nn.Linear(9, 9)))
    assert {entry.claim: entry.observed for entry in ran.evidence}["graphs compiled for 3 blocks = 3"] == 3
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(regional, "recorded", lambda block, *_: block.forward)
        assert not run(regional.TECHNIQUES[0], blocks(nn.Linear(8, 8), nn.Linear(8, 8))).engaged


class Unchanging(CustomGraphPass):
    """A pass over graphs that changes nothing, and has a place in the key of inductor's cache."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        del graph

    def uuid(self) -> str:
        return "unchanging"


@pytest.mark.slow
def test_what_another_process_compiled_is_used_and_not_compiled_again() -> None:
    # As earlier cases of AOTInductor and torchao leave it.
    left = {"aot_inductor.metadata": {"AOTI_DEVICE_KEY": "cpu"}, "pre_grad_custom_pass": Unchanging()}
    with inductor_config.patch(left):
        agrees(named(regional.TECHNIQUES, "compile-mega-cache"), lambda: problem("mlp-blocks"), device=DEVICES[0])


@pytest.mark.slow
def test_torch_uses_what_another_machine_compiled() -> None:
    """A known failure on the CPU: the key of inductor's cache lacks the vector instructions."""
    ran = run(named(regional.TECHNIQUES, "compile-mega-cache-foreign"), problem("mlp-blocks"), device=DEVICES[0])
    assert ran.missing() == ["graphs taken from another machine's artifact = 0: 1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "workload", "mode"),
    [(kernels.TECHNIQUES[0], "grouped-experts", Mode.BACKWARD), (microscaling.TECHNIQUES[0], "mlp", Mode.FORWARD)],
)
def test_a_right_result_passes_a_wrong_one_fails_and_one_without_evidence_is_an_error(
    technique: Any, workload: str, mode: Mode, store: Store
) -> None:
    passed(store, Planted(technique, nothing), seeded(workload), mode)

    def grown(program: Program) -> None:
        call = program.call or program.module
        program.call = lambda *inputs: call(*inputs) * 1.01

    silent = Planted(technique, nothing)
    silent.evidence = lambda *_: ()  # type: ignore[method-assign]
    failed(store, Planted(technique, grown), seeded(workload), mode)
    erred(store, silent, seeded(workload), mode)
    assert Bed().name == "cpu"
