"""Workloads are reproducible, have the traits they claim, and are well conditioned in every precision."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from operator_classes import CLASSES
from torch import Tensor, nn

from accelcheck.core.case import Mode, stable_seed
from accelcheck.core.registry import discover, index
from accelcheck.techniques.observe import OperatorLog
from accelcheck.workloads.base import Problem, Program, Result, Workload
from accelcheck.workloads.draw import lengths, orders, separated, signs
from accelcheck.workloads.dynamic import AdaptiveTime, DynamicDepth
from accelcheck.workloads.probes import DRAWS, Draw
from accelcheck.workloads.problem import TRAITS

EXACT = frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.TRAIN})
"""Modes in which values are compared; workloads for other checks are tested with these checks."""
NAMES = index(
    "workload",
    [
        workload
        for workload in cast("list[Workload]", discover("accelcheck.workloads", "WORKLOADS"))
        if workload.modes <= EXACT and "domain" not in workload.traits  # torch's operators: test_torch_operators.py
    ],
)
RUNS = [(name, mode) for name in NAMES for mode in sorted(NAMES[name].modes)]


def having(*traits: str) -> list[str]:
    fitting = [name for name, workload in NAMES.items() if workload.traits >= set(traits)]
    assert fitting, f"no workload has the traits {traits}"
    return fitting


def tensors(problem: Problem) -> dict[str, Tensor]:
    inputs = {f"input[{i}]": value for i, value in enumerate(problem.inputs) if isinstance(value, Tensor)}
    target = {} if problem.target is None else {"target": problem.target}
    return dict(problem.module.state_dict()) | inputs | target


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Returns True where both hold the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype and torch.equal(left[key], right[key]) for key in left
    )


def program(name: str, dtype: torch.dtype = torch.float32) -> Program:
    seed = stable_seed(name)
    return Program.of(NAMES[name].problem(seed), dtype=dtype, seed=seed)


def widened(name: str, dtype: torch.dtype) -> Program:
    """FP64 arithmetic on numbers rounded to `dtype`: the true result for a run in `dtype`."""
    made = program(name, dtype)
    made.module.double()
    made.inputs = tuple(v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in made.inputs)
    return made


def errors(candidate: Result, truth: Result) -> dict[str, float]:
    """Relative Frobenius error of each tensor; infinite where the keys or shapes differ."""
    assert candidate.keys() == truth.keys()
    table = {}
    for key, expected in truth.items():
        got = candidate[key]
        assert got.shape == expected.shape, key
        gap = float((got.double() - expected.double()).norm())
        size = float(expected.double().norm())
        table[key] = gap / size if size else (math.inf if gap else 0.0)
    return table


def modules(name: str, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in NAMES[name].problem(0).module.modules() if isinstance(module, kind)]


def test_level_1_is_small_and_covers_the_families() -> None:
    smoke = {name for name, workload in NAMES.items() if workload.level == 1}
    classes = {workload for workload, _, mode in CLASSES.values() if mode in EXACT}
    assert smoke - classes == {
        *("attention-causal", "cnn", "elementwise-5", "matmul", "mlp", "mlp-blocks", "train-mlp"),
        *("frozen-backbone", "saliency"),
    }
    assert classes <= smoke


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_is_well_formed(name: str) -> None:
    workload = NAMES[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert workload.level in {1, 2, 3}
    assert workload.traits <= TRAITS.keys()
    # The gradient of a view of 2**32 elements would take 16 GiB. elementwise-large and gelu-infinity show nothing more
    # in the backward pass. Views have no computation whose gradient could be compiled. The gradients of a class of
    # operators may be of another class.
    outputs_alone = {"far-elements", "elementwise-large", "gelu-infinity", "shared-views"}
    outputs_alone |= {workload for workload, _, mode in CLASSES.values() if mode is Mode.FORWARD}
    gradients = set() if name in outputs_alone else {Mode.BACKWARD}
    assert workload.modes == ({Mode.TRAIN} if "training" in workload.traits else {Mode.FORWARD} | gradients)
    assert workload.summary.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_depends_on_its_seed_alone(name: str) -> None:
    first = tensors(NAMES[name].problem(7))
    torch.rand(5)
    state = torch.random.get_rng_state()
    assert same(first, tensors(NAMES[name].problem(7)))
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator was moved"


def test_making_a_problem_seeds_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    NAMES["mlp"].problem(3)
    assert seeded == []


@pytest.mark.parametrize("name", NAMES)
def test_another_seed_gives_other_parameters_and_inputs(name: str) -> None:
    first, other = NAMES[name].problem(7), NAMES[name].problem(8)
    # An empty tensor is the same for all seeds.
    floats = [value for value in first.inputs if value.is_floating_point() and value.numel()]
    for mine, others in zip(floats, [v for v in other.inputs if v.is_floating_point() and v.numel()], strict=True):
        assert not torch.equal(mine, others)
    for path, parameter in first.module.named_parameters():
        assert not torch.equal(parameter, other.module.get_parameter(path)), path


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_inputs_share_no_numbers(name: str) -> None:
    # The global generator has the problem's seed: weights drawn from it would be the numbers of the inputs.
    problem = NAMES[name].problem(3)
    held = [p.detach().flatten() for p in problem.module.parameters()]
    held += [v.flatten() for v in problem.inputs if v.is_floating_point() and v.numel()]
    for i, left in enumerate(held):
        for right in held[:i]:
            count = min(len(left), len(right), 64)
            if count >= 24:
                # By rank: one large number in the same place of two kernels is no common origin.
                ranks = [numbers[:count].argsort().argsort().double() for numbers in (left, right)]
                correlation = torch.corrcoef(torch.stack(ranks))[0, 1]
                assert abs(float(correlation)) < 0.999


@pytest.mark.parametrize("extent", [-3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_extent_changes_only_the_sizes_of_inputs(name: str, extent: int) -> None:
    workload = NAMES[name]
    nominal, other = workload.problem(7), workload.problem(7, extent)
    assert same(dict(nominal.module.state_dict()), dict(other.module.state_dict()))
    shapes = [tuple(value.shape) for value in nominal.inputs], [tuple(value.shape) for value in other.inputs]
    if "resizable" in workload.traits:
        assert shapes[0] != shapes[1]
        mode = min(workload.modes)
        result = Program.of(other).run(mode)
        assert all(bool(tensor.isfinite().all()) for tensor in result.values())
    else:
        assert same(tensors(nominal), tensors(other))


def strides(name: str, extent: int) -> tuple[int, ...]:
    (x,) = Program.of(NAMES[name].problem(1, extent), dtype=torch.float64).inputs
    leaf = x.detach().requires_grad_()
    assert leaf.stride() == x.stride()
    return tuple(x.stride())


@pytest.mark.parametrize("extent", [0, 3])
def test_strides_are_kept_on_the_device(extent: int) -> None:
    assert strides("matmul-transposed", extent) == (1, 64 + extent)
    assert strides("matmul-sliced", extent) == (3 * (96 + 8), 1)
    assert strides("matmul-expanded", extent) == (0, 96, 1)
    (x,) = Program.of(NAMES["matmul-sliced"].problem(1), dtype=torch.bfloat16).inputs
    assert x.storage_offset() == 3
    assert torch.equal(x, NAMES["matmul-sliced"].problem(1).inputs[0].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_view_on_the_device_is_one_of_flat_memory_whether_or_not_it_was_copied(dtype: torch.dtype) -> None:
    (x,) = Program.of(NAMES["matmul-expanded"].problem(1), dtype=dtype).inputs
    assert x._base is not None
    assert x._base.shape == (64 * 96,)


def test_edge_sizes_and_strides() -> None:
    assert NAMES["matmul-one"].problem(0).inputs[0].shape == (1, 1)
    assert NAMES["matmul-empty"].problem(0).inputs[0].shape == (0, 96)
    result = program("matmul-empty").run(Mode.BACKWARD)
    assert result["out[0]"].shape == (0, 80)
    assert bool((result["out[1]"] != 0).all())
    assert torch.equal(result["grad:weight"], torch.zeros(96, 80))
    assert {tuple(value.shape[-2:]) for value in NAMES["attention-65"].problem(0).inputs} == {(65, 32)}
    assert program("elementwise-scalar").inputs[1].shape == ()


@pytest.mark.parametrize(("name", "mode"), RUNS)
def test_float32_is_close_to_float64(name: str, mode: Mode) -> None:
    result = program(name).run(mode)
    assert result
    assert sum(tensor.numel() for tensor in result.values()) > 0
    deviations = errors(result, program(name, torch.float64).run(mode))
    # Ten to thirty roundings of 6e-8 each, without cancellation, except in batch norm's backward pass (see draw.py).
    limit = 5e-6 if "batchnorm" in NAMES[name].traits else 1e-6
    assert not {key: error for key, error in deviations.items() if not error <= limit}


ADAMW = frozenset({"train-transformer", "train-vocabulary"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name, mode in RUNS if name not in {"casts", "roots-exponentials", "decoder-greedy"}],
)
def test_half_precision_is_close_to_float64(name: str, mode: Mode, dtype: torch.dtype) -> None:
    result = program(name, dtype).run(mode)
    assert {tensor.dtype for tensor in result.values() if tensor.is_floating_point()} == {dtype}
    deviations = errors(result, widened(name, dtype).run(mode))
    # A flipped ReLU, gate or maximum would change whole rows. After batch norm a few ReLUs do flip, and in FP16 AdamW's
    # squared gradients are subnormal.
    # A token between two experts goes to the other one on some processors.
    turned = name == "decoder-experts" or (name in ADAMW and dtype is torch.float16)
    loose = "batchnorm" in NAMES[name].traits or turned
    limit = 0.25 if loose else 0.06 if dtype is torch.bfloat16 else 0.008
    assert not {key: error for key, error in deviations.items() if not error <= limit}


@pytest.mark.parametrize(
    "name", ["matmul", "mlp", "matmul-129", "matmul-sliced", "matmul-expanded", "matmul-transposed"]
)
def test_no_preactivation_is_near_zero(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    plain = torch.relu

    def spy(x: Tensor) -> Tensor:
        seen.append(x)
        return plain(x)

    made = program(name)
    monkeypatch.setattr(torch, "relu", spy)
    for layer in made.module.modules():
        if isinstance(layer, nn.ReLU):
            layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    made.run(Mode.FORWARD)
    assert seen
    for x in seen:
        # bfloat16 rounds a sum of magnitude |x| by about |x| / 256.
        assert float(x.abs().min()) > float(x.square().mean().sqrt()) / 100
        assert 0.4 < float((x > 0).float().mean()) < 0.6


@pytest.mark.parametrize("name", NAMES)
def test_structural_traits_match_the_module(name: str) -> None:
    traits = NAMES[name].traits
    assert ("linear" in traits) == bool(modules(name, nn.Linear))
    assert ("conv" in traits) == bool(modules(name, nn.Conv2d))
    assert ("batchnorm" in traits) == bool(modules(name, nn.BatchNorm2d))
    assert ("inplace" in traits) == any(hasattr(module, "inplace") for module in modules(name, nn.Module))
    problem = NAMES[name].problem(0)
    assert ("blocks" in traits) == hasattr(problem.module, "blocks")
    assert ("training" in traits) == (None not in (problem.loss, problem.target, problem.optimizer))


@pytest.mark.parametrize("name", NAMES)
def test_traits_match_the_operators(name: str) -> None:
    traits = NAMES[name].traits
    with OperatorLog("cpu") as log:
        program(name).run(min(NAMES[name].modes))
    assert ("attention" in traits) == bool(log.count(r"aten::_?scaled_dot_product_.*"))
    assert ("conv" in traits) == bool(log.count(r"aten::(mkldnn_)?_?convolution.*|aten::.*conv.*"))
    if "matmul" in traits:
        assert log.count(r"aten::(mm|addmm|bmm|baddbmm|linear)") or "attention" in traits


@pytest.mark.parametrize("name", having("inplace"))
def test_in_place_gives_the_same_and_keeps_the_inputs(name: str) -> None:
    mode = Mode.TRAIN if "training" in NAMES[name].traits else Mode.BACKWARD
    expected = program(name).run(mode)
    made = program(name)
    before = [value.clone() for value in made.inputs]
    for module in made.module.modules():
        if hasattr(module, "inplace"):
            assert not module.inplace
            setattr(module, "inplace", True)  # noqa: B010 - nn.Module declares attributes as Tensor | Module
    with OperatorLog("cpu") as log:
        result = made.run(mode)
    assert log.count(r"aten::(sin|mul|add|addcmul|silu|relu|clamp_min)_")
    assert same(result, expected)
    assert all(torch.equal(left, right) for left, right in zip(before, made.inputs, strict=True))


@pytest.mark.parametrize("name", having("blocks"))
def test_blocks_are_applied_in_sequence_on_one_tensor(name: str) -> None:
    made = program(name)
    blocks = made.module.blocks
    assert isinstance(blocks, nn.ModuleList)
    assert len(blocks) >= 2
    calls: list[tuple[int, Any, Any]] = []
    for position, block in enumerate(blocks):
        block.register_forward_hook(lambda _, args, out, position=position: calls.append((position, args, out)))
    made.module.train()
    made.module(*made.inputs)
    for _, args, out in calls:
        assert len(args) == 1
        assert args[0].shape == out.shape
    if "branching" in NAMES[name].traits:  # data decides which blocks are called, and how often
        assert {position for position, _, _ in calls} <= set(range(len(blocks)))
        assert calls
        return
    assert [position for position, _, _ in calls] == list(range(len(blocks)))
    for (_, _, out), (_, args, _) in itertools.pairwise(calls):
        assert args[0] is out


@pytest.mark.parametrize("name", having("blocks"))
def test_blocks_may_have_their_forward_replaced(name: str) -> None:
    mode = max(NAMES[name].modes - {Mode.FORWARD})
    made = program(name)
    entered: list[int] = []
    for block in made.module.blocks:  # type: ignore[union-attr]  # a ModuleList, as tested above

        def counted(x: Tensor, plain: Any = block.forward) -> Tensor:
            entered.append(1)
            out: Tensor = plain(x)
            return out

        block.forward = counted
    result = made.run(mode)
    assert same(result, program(name).run(mode))
    assert entered


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("name", having("scriptable"))
def test_scripts_give_the_same(name: str) -> None:
    for mode in NAMES[name].modes:
        made = program(name, torch.float64)
        made.module.train(mode is not Mode.FORWARD)  # a scripted module keeps the mode in which it was scripted
        made.call = torch.jit.script(made.module)
        deviations = errors(made.run(mode), program(name, torch.float64).run(mode))
        # TorchScript's fuser and autodiff may reorder sums.
        assert max(deviations.values()) <= 1e-12


def test_scriptable_workloads_are_those_that_torchscript_compiles() -> None:
    # torch.jit.script does not compile autograd.Function, ``*inputs`` or torch.promote_types.
    beyond = {*having("custom-function"), *having("stream"), *having("constants"), "straight-through"}
    beyond |= {name for name in NAMES if NAMES[name].techniques}  # none of the techniques that script
    assert having("scriptable") == [name for name in NAMES if name not in beyond]


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, mode in RUNS if "exact" in NAMES[name].traits])
def test_exact_workloads_are_bitwise_equal(name: str, mode: Mode) -> None:
    low, high = program(name).run(mode), program(name, torch.float64).run(mode)
    assert low.keys() == high.keys()
    for key, tensor in low.items():
        assert torch.equal(tensor.double(), high[key]), key


def test_repeated_indices_round_in_the_backward_pass() -> None:
    # Output gradients are multiples of 1/64: their sums are exact in FP32, but not in bfloat16.
    low, high = (made("gather-repeated", torch.bfloat16).run(Mode.BACKWARD) for made in (program, widened))
    assert torch.equal(low["out"].double(), high["out"])
    assert not torch.equal(low["grad:input[0]"].double(), high["grad:input[0]"])


@pytest.mark.parametrize("name", sorted({"dynamic-depth", "gated-depth"} & set(having("branching"))))
def test_branching_workloads_take_several_depths(name: str) -> None:
    def matmuls(seed: int) -> int:
        problem = NAMES[name].problem(seed)
        with OperatorLog("cpu") as log:
            problem.module(*problem.inputs)
        count: int = log.count(r"aten::addmm")
        return count

    depths = {matmuls(seed) for seed in range(12)}
    assert depths == {2, 3, 4, 5} if name == "dynamic-depth" else len(depths) >= 3


def test_chains_are_bounded() -> None:
    for seed in range(5):
        assert float(Program.of(NAMES["elementwise-30"].problem(seed)).run(Mode.FORWARD)["out"].abs().max()) < 5


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("adaptive-time", "gated-depth", "train-adaptive-time", "train-gated-depth")
        for dtype in sorted(NAMES[name].dtypes)
    ],
)
def test_rounding_does_not_change_the_depth_of_a_network(name: str, dtype: str) -> None:
    """In half precision and under autocast, at every scale, before and after training, with several seeds."""
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=dtype == "float32")
    for seed, number in itertools.product((stable_seed(name), 1, 2, 3), range(DRAWS)):

        def made(dtype: torch.dtype, seed: int = seed, number: int = number) -> Program:
            return Program.of(Draw(number).problem(NAMES[name], seed, "float32"), dtype=dtype)

        exact, low = made(torch.float64), made(getattr(torch, dtype))
        assert decisions(low) == decisions(low, autocast) == decisions(exact)
        if "training" in NAMES[name].traits:
            exact.run(Mode.TRAIN)
            low.run(Mode.TRAIN)
            assert decisions(low) == decisions(low, autocast) == decisions(exact)


@pytest.mark.parametrize("name", ["adaptive-time", "train-adaptive-time"])
def test_samples_take_different_numbers_of_steps(name: str) -> None:
    assert len(set(decisions(Program.of(NAMES[name].problem(stable_seed(name)))))) >= 2


def decisions(made: Program, around: Callable[[], Any] = contextlib.nullcontext) -> list[int]:
    """The number of steps of each sample, or the blocks that run for the batch."""
    ran: list[int] = []
    handles = [
        block.register_forward_hook(lambda *_, position=position: ran.append(position))
        for position, block in enumerate(made.module.blocks)  # type: ignore[arg-type]  # a ModuleList
    ]
    with torch.no_grad(), around():
        out = made.module(*made.inputs)
    for handle in handles:
        handle.remove()
    # N + R, with R in (0, 1]: R is not near 0, because the sum of N - 1 probabilities is not near the limit.
    return ran if isinstance(out, Tensor) else [math.ceil(float(spent)) - 1 for spent in out[1]]


def test_adaptive_time_follows_its_definition() -> None:
    made = program("adaptive-time", torch.float64)
    module, (x,) = made.module, made.inputs
    assert isinstance(module, AdaptiveTime)
    result = made.run(Mode.FORWARD)
    for sample in range(len(x)):
        state = module.stem(x[sample])
        chances: list[float] = []
        states: list[Tensor] = []
        while sum(chances) < module.LIMIT:
            for block in module.blocks:
                state = block(state)
            states.append(state)
            chances.append(torch.sigmoid(module.halt(state)).item())
        rest = 1.0 - sum(chances[:-1])
        weights = [*chances[:-1], rest]
        mean = torch.stack([weight * seen for weight, seen in zip(weights, states, strict=True)]).sum(0)
        torch.testing.assert_close(result["out[0]"][sample], module.head(mean))
        assert float(result["out[1]"][sample]) == pytest.approx(len(states) + rest)


def test_a_skipped_block_gets_no_gradient() -> None:
    made = program("gated-depth")
    ran = set(decisions(made))
    blocks = {int(path.split(".")[1]) for path in made.run(Mode.BACKWARD) if path.startswith("grad:blocks.")}
    assert blocks == ran
    assert 0 < len(ran) < 4


def test_the_gates_of_the_dynamic_network_are_far_from_zero() -> None:
    problem = NAMES["dynamic-depth"].problem(4)
    assert isinstance(problem.module, DynamicDepth)
    assert float(problem.inputs[0][:, 0].abs().min()) >= 1.0


def test_no_row_of_a_mask_is_empty_and_no_mask_is_full() -> None:
    for seed in range(5):
        mask = NAMES["attention-mask"].problem(seed).inputs[3]
        assert mask.dtype == torch.bool
        assert bool(mask.any(-1).all())
        assert not bool(mask.all())


@pytest.mark.parametrize(
    ("name", "padded", "dim"),
    [("attention-ragged", 1, 2), ("attention-ragged", 2, 2), ("mean-pool", 0, 1), ("max-pool", 0, 1)],
)
def test_padding_has_no_effect(name: str, padded: int, dim: int) -> None:
    made = program(name)
    expected = made.run(Mode.FORWARD)
    value, held = made.inputs[padded], made.inputs[-1]
    assert int(held[0]) == value.shape[dim], "one sequence is full"
    for sample, length in enumerate(held.tolist()):
        tail = value[sample].narrow(dim - 1, length, value.shape[dim] - length)
        tail.add_(100.0)
    assert errors(made.run(Mode.FORWARD), expected) == pytest.approx({"out": 0.0}, abs=1e-6)
    assert float(program(name).run(Mode.BACKWARD)[f"grad:input[{padded}]"].abs().sum()) > 0


@pytest.mark.parametrize("name", ["mean-pool", "max-pool"])
def test_pooling_equals_that_of_each_sequence_alone(name: str) -> None:
    made = program(name, torch.float64)
    x, held = made.inputs
    linear = made.module.linear
    assert isinstance(linear, nn.Linear)
    alone = [
        linear(steps[:length].amax(0)) if name == "max-pool" else torch.tanh(linear(steps[:length])).mean(0)
        for steps, length in zip(x, held.tolist(), strict=True)
    ]
    torch.testing.assert_close(made.run(Mode.FORWARD)["out"], torch.stack(alone).detach())


@pytest.mark.parametrize("name", ["attention-causal", "attention-65", "attention-cross-causal"])
def test_later_keys_have_no_effect(name: str) -> None:
    made = program(name)
    expected = made.run(Mode.FORWARD)["out"]
    queries = expected.shape[2]
    made.inputs[2][:, :, 7:].add_(100.0)
    changed = made.run(Mode.FORWARD)["out"]
    torch.testing.assert_close(changed[:, :, :7], expected[:, :, :7])
    assert bool(((changed - expected).abs().amax(-1)[:, :, 7:queries] > 1e-3).all())


@pytest.mark.parametrize("name", having("training"))
def test_training_changes_every_parameter_and_lowers_the_loss(name: str) -> None:
    made = program(name)
    before = {path: parameter.detach().clone() for path, parameter in made.module.named_parameters()}
    result = made.run(Mode.TRAIN)
    losses = [float(result[f"loss[{step}]"]) for step in range(made.steps)]
    assert losses[-1] < losses[0]
    idle = {0, 1, 2, 3} - set(decisions(made)) if name == "train-gated-depth" else set()
    for path, old in before.items():
        skipped = any(path.startswith(f"blocks.{position}.") for position in idle)
        assert torch.equal(old, result[f"parameter:{path}"]) == skipped, path


def test_functions_that_draw() -> None:
    generator = torch.Generator().manual_seed(0)
    assert signs(5).tolist() == [1.0, -1.0, 1.0, -1.0, 1.0]
    drawn = lengths(generator, 50, 2, 9)
    assert int(drawn[0]) == 9
    assert int(drawn[-1]) == 2
    assert set(drawn.tolist()) == set(range(2, 10))
    assert bool((orders(generator, 4, 30).sort().values == torch.arange(30)).all())
    images = separated(generator, 4, 3, 5, 5, noise=0.0)
    assert images.shape == (4, 3, 5, 5)
    assert bool((images[1, 0] == -1).all())
