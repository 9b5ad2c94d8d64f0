from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, Planted, failed, faults, passed, seeded, verdict_of
from technique_harness import agrees, differences, mlp, named, plain, run, trained
from torch import Tensor, nn

from accelcheck.core.case import Mode
from accelcheck.core.registry import discover
from accelcheck.selftest.faults.base import Planted as PlantedAfter
from accelcheck.selftest.faults.plant import calling
from accelcheck.techniques.autograd.functional import DIFFERENTIABLE, SAMPLEWISE, SMALL, TECHNIQUES, Function, Mapped
from accelcheck.techniques.base import Unsupported
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.custom import GatedFunction

VMAP, GRAD = named(TECHNIQUES, "func-vmap"), named(TECHNIQUES, "func-grad")
COPIES = named(TECHNIQUES, "func-vmap-copies")
JACOBIANS = [named(TECHNIQUES, "func-jacrev"), named(TECHNIQUES, "func-jacfwd")]


def small() -> Problem:
    torch.manual_seed(0)
    return trained(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(5, 3), torch.randn(5, 4))


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_samples_give_the_results_of_the_batch(mode: Mode) -> None:
    ran = agrees(VMAP, mlp, mode)
    assert [entry.observed for entry in ran.evidence] == [1, 1]


def test_samples_that_depend_on_each_other_change_the_result() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    def problem() -> Problem:
        return Problem(Centred(), (torch.arange(6.0).reshape(3, 2),))

    assert differences(run(VMAP, problem()).result, plain(problem())) == ["out"]


def test_a_loop_over_samples_fails_the_evidence() -> None:
    class Looped(Mapped):
        def prepare(self, program: Program, mode: Mode, device: Any) -> None:
            super().prepare(program, mode, device)
            seen, module = program.extras["what the module was given under a transform"], program.module

            def call(x: Tensor) -> Tensor:
                seen["batches"] += 1
                outs = []
                for row in x:
                    seen["calls"] += 1
                    seen["inputs"] += 1
                    outs.append(module(row.unsqueeze(0)))
                return torch.cat(outs)

            program.call = call

    ran = run(Looped("func-loop", ""), mlp())
    assert [entry.engaged for entry in ran.evidence] == [False, False]
    assert not differences(ran.result, plain(mlp()))


def test_inputs_that_are_no_batch_are_not_mapped(fresh: Store) -> None:
    """Gradients of a 0-d operand, and of one with a single row, are summed over the samples."""
    for name in ("elementwise-scalar", "elementwise-broadcast"):
        passed(fresh, VMAP, seeded(name), BACKWARD)


@pytest.mark.parametrize("mode", [Mode.BACKWARD, Mode.TRAIN])
def test_gradients_of_a_function_equal_autograds(mode: Mode) -> None:
    ran = agrees(GRAD, mlp, mode)
    assert ran.evidence[0].observed == (3 if mode is Mode.TRAIN else 1)


@pytest.mark.parametrize("technique", JACOBIANS, ids=lambda technique: technique.name)
def test_the_contracted_jacobian_equals_the_gradient(technique: Any) -> None:
    agrees(technique, small, Mode.BACKWARD)


class TwoPrecisions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.double() ** 2


@pytest.mark.parametrize("technique", JACOBIANS, ids=lambda technique: technique.name)
def test_a_float64_output_leaves_gradients_in_the_dtype_of_their_inputs(technique: Any) -> None:
    def problem() -> Problem:
        return Problem(TwoPrecisions(), (torch.linspace(0.5, 2.0, 5),))

    ran, expected = run(technique, problem(), Mode.BACKWARD), plain(problem(), Mode.BACKWARD)
    assert ran.result["grad:input[0]"].dtype == expected["grad:input[0]"].dtype
    torch.testing.assert_close(ran.result["grad:input[0]"], expected["grad:input[0]"])


@pytest.mark.parametrize("technique", [GRAD, *JACOBIANS], ids=lambda technique: technique.name)
def test_buffers_are_part_of_the_result_as_in_the_plain_run(technique: Any) -> None:
    def buffered() -> Problem:
        problem = small()
        problem.module.register_buffer("scale", torch.ones(2), persistent=False)
        return problem

    result = run(technique, buffered(), Mode.BACKWARD).result
    assert "buffer:scale" in result
    assert not differences(result, plain(buffered(), Mode.BACKWARD))


def test_what_has_no_forward_derivative_is_unsupported() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    with pytest.raises(Unsupported, match="torch has no forward derivative here"):
        run(JACOBIANS[1], Problem(Attention(), (torch.randn(1, 2, 3, 4),)), Mode.BACKWARD)


def test_forward_and_reverse_mode_are_distinguished() -> None:
    forward = named(TECHNIQUES, "func-jacfwd")
    wrong = copy.copy(named(TECHNIQUES, "func-jacrev"))
    wrong.tracks = forward.tracks  # type: ignore[attr-defined]  # replaced on this copy only
    ran = run(wrong, small(), Mode.BACKWARD)
    assert [entry.engaged for entry in ran.evidence] == [True, False, True, True]


@pytest.mark.parametrize("mode", [Mode.BACKWARD, Mode.TRAIN])
def test_autograd_in_place_of_a_transform_fails_the_evidence(mode: Mode) -> None:
    class Taped(type(GRAD)):  # type: ignore[misc]  # a class all the same
        def prepare(self, program: Program, mode: Mode, device: Any) -> None:
            super().prepare(program, mode, device)
            program.elsewhere = program.backpropagate = None

    ran = run(Taped("func-none", ""), mlp(), mode)
    assert [entry.engaged for entry in ran.evidence[:2]] == [False, False]
    if mode is Mode.BACKWARD:
        assert ran.evidence[-1].claim == "gradients that the tape left in parameters = 0"
        assert ran.evidence[-1].observed == 4


def test_integer_outputs_are_passed_on() -> None:
    class Ranked(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.sin(), x.argmax(1)

    def problem() -> Problem:
        return Problem(Ranked(), (torch.arange(6.0).reshape(3, 2),))

    for technique in (GRAD, *JACOBIANS):
        result = run(technique, problem(), Mode.BACKWARD).result
        assert not differences(result, plain(problem(), Mode.BACKWARD))
        assert result["out[1]"].dtype == torch.int64


def test_a_parameter_that_a_call_left_replaced_is_put_back_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small()
    own = dict(problem.module.named_parameters())
    functional_call = torch.func.functional_call

    def careless(module: Any, parameters: Any, inputs: Any) -> Any:
        out = functional_call(module, parameters, inputs)
        problem.module[0].weight = nn.Parameter(torch.zeros(4, 3))  # type: ignore[index]  # it is a Sequential
        return out

    monkeypatch.setattr(torch.func, "functional_call", careless)
    ran = run(GRAD, problem, Mode.BACKWARD)
    assert ran.missing() == ["parameters left replaced by a call = 0: 1"]
    assert all(parameter is own[name] for name, parameter in ran.program.module.named_parameters())


def test_functions_need_the_loss_that_training_needs() -> None:
    problem = Problem(nn.Linear(2, 2), (torch.ones(1, 2),))
    function = Function(Program.of(problem), lambda _: True)
    with pytest.raises(ValueError, match="needs a loss and a target"):
        function.backpropagate(0)


def test_every_named_workload_exists_and_is_accepted() -> None:
    every = discover("accelcheck.workloads", "WORKLOADS")
    known = {workload.name: workload for workload in every if not workload.techniques}
    named_by = zip([VMAP, GRAD, *JACOBIANS], (SAMPLEWISE, DIFFERENTIABLE, SMALL, SMALL), strict=True)
    for technique, names in named_by:
        assert {name for name, workload in known.items() if technique.accepts(workload)} == names
        levels = {known[name].level for name in names}
        assert min(levels) <= 2 <= max(levels)


def test_output_gradients_equal_those_of_the_plain_run() -> None:
    program = Program.of(mlp(), seed=3)
    out = torch.zeros(8, 4)
    assert torch.equal(program.cotangent("out", out), Program.of(mlp(), seed=3).cotangent("out", out))
    assert not torch.equal(program.cotangent("out", out), program.cotangent("out[1]", out))


# Fault 38: a custom function's gradients swapped
class Swapped(GatedFunction):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, slope = GatedFunction.backward(ctx, *grads)
        return gate, x, slope


def swapped(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    out: Tensor = Swapped.apply(x, gate, module.slope)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def mapped(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    out: Tensor = torch.func.vmap(lambda *row: swapped(module, *row))(x, gate)
    return out


def test_swapped_gradients_fail_under_a_transform(fresh: Store) -> None:
    workload = seeded("custom-function")
    passed(fresh, GRAD, workload, BACKWARD)
    record = failed(fresh, PlantedAfter(GRAD, calling(swapped)), workload, BACKWARD)
    assert all(evidence.engaged for evidence in record.evidence)
    assert faults(record).keys() == {"grad:input[0]", "grad:input[1]"}


def test_swapped_gradients_fail_mapped_or_not(fresh: Store) -> None:
    for function in (swapped, mapped):
        record = verdict_of(fresh, Planted(calling(function)), seeded("custom-function"), BACKWARD)
        assert {"grad:input[0]", "grad:input[1]"} <= faults(record).keys()


class Doubled(torch.autograd.Function):
    """Doubles; its batching rule triples the second of two copies."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return torch.stack([2 * x[0], 3 * x[1]]), 0


class Ruled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return out


def test_a_wrong_batching_rule_fails_under_copies(fresh: Store) -> None:
    workload = Workload("ruled", "A rule.", lambda g, _: Problem(Ruled(), (torch.randn(4, generator=g),)))
    record = failed(fresh, COPIES, workload)
    assert {fault.path for fault in record.faults} == {"out"}


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_copies_give_the_results_of_one(mode: Mode, fresh: Store) -> None:
    passed(fresh, COPIES, seeded("mlp"), mode)


class Incremented(nn.Module):
    """Writes to its second input."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y.add_(1.0)


def test_what_a_mapped_module_writes_is_in_the_inputs() -> None:
    def problem() -> Problem:
        return Problem(Incremented(), (torch.arange(3.0), torch.ones(3)), writes=frozenset({1}))

    ran = run(COPIES, problem())
    assert "input[1]" in ran.result
    assert not differences(ran.result, plain(problem()))


class Beside(nn.Module):
    """Nothing depends on its second input."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.sin()


@pytest.mark.parametrize("technique", JACOBIANS, ids=lambda technique: technique.name)
def test_an_input_that_nothing_depends_on_gets_no_gradient_from_a_jacobian(technique: Any, fresh: Store) -> None:
    def make(generator: torch.Generator, extent: int) -> Problem:
        return Problem(Beside(), tuple(torch.randn(3, generator=generator) for _ in range(2)))

    workload = Workload("beside", "Two inputs.", make, idle=frozenset({"input[1]"}))
    passed(fresh, technique, workload, Mode.BACKWARD)
