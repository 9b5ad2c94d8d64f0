"""Draws and probes: what becomes of the inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, built_in
from torch import Tensor, nn

from accelcheck.verify.judge import apart
from accelcheck.workloads.base import Problem, Workload
from accelcheck.workloads.probes import DRAWS, PROBES, SCALES, Draw, Probe, draws

PROBED = [(name, probe) for name, workload in built_in().items() for probe in sorted(workload.probes)]


def every(probe: Probe) -> bool:
    return True


def layout(value: Any) -> Any:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else value


def of(*inputs: Tensor, module: nn.Module | None = None) -> Problem:
    return Problem(nn.Identity() if module is None else module, inputs)


def applied(name: str, *inputs: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(PROBES[name].apply(of(*inputs), dtype).inputs)


def test_every_probe_that_a_workload_names_exists_and_every_probe_is_named() -> None:
    named = {probe for _, probe in PROBED}
    assert named <= PROBES.keys()
    assert all(name == probe.name and probe.summary.endswith(".") for name, probe in PROBES.items())
    assert {"zeros", "ones", "one-hot", "midpoints", "tiny", "huge", "future", "slice", "nan[0]", "inf[0]"} <= named


@pytest.mark.parametrize(("name", "probe"), PROBED)
def test_a_probe_keeps_shapes_dtypes_and_strides_unless_it_reshapes(name: str, probe: str) -> None:
    workload = built_in()[name]
    own, probed = (draw.problem(workload, 7, "float32") for draw in (Draw(), Draw(0, probe)))
    if PROBES[probe].reshapes:
        assert [v.shape[1:] for v in own.inputs] == [v.shape[1:] for v in probed.inputs]
        assert [v.shape[0] - 1 for v in own.inputs] == [v.shape[0] for v in probed.inputs]
    else:
        assert [layout(v) for v in own.inputs] == [layout(v) for v in probed.inputs]


@pytest.mark.parametrize(("name", "probe"), PROBED)
def test_a_probe_changes_something_and_always_the_same(name: str, probe: str) -> None:
    workload = built_in()[name]

    def tensors(draw: Draw) -> dict[str, Tensor]:
        torch.rand(3)
        problem = draw.problem(workload, 7, "float32")
        held = {str(index): v for index, v in enumerate(problem.inputs) if isinstance(v, Tensor)}
        return held | {f"module:{key}": value.clone() for key, value in problem.module.state_dict().items()}

    first, again = tensors(Draw(0, probe)), tensors(Draw(0, probe))
    assert set(apart(first, again).values()) == {0.0}
    assert max(apart(first, tensors(Draw())).values()) > 0.0


@pytest.mark.parametrize("probe", [name for name, probe in PROBES.items() if not probe.reshapes and "[" not in name])
def test_expanded_and_transposed_inputs_stay_so(probe: str) -> None:
    generator = torch.Generator().manual_seed(1)
    expanded = torch.randn(1, 4, 8, generator=generator).expand(3, 4, 8)
    turned = torch.randn(3, 8, 4, generator=generator).transpose(1, 2)
    for value in applied(probe, expanded, expanded, expanded):
        assert value.stride() == (0, 8, 1)
        assert torch.equal(value[0], value[2])
    for value in applied(probe, turned, turned, turned):
        assert value.stride() == (32, 1, 4)


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        ("zeros", [[0.0] * 3, [0.0] * 3]),
        ("ones", [[1.0] * 3, [1.0] * 3]),
        ("one-hot", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        ("powers", [[2.0**-4, 2 * 2.0**-3, 3 * 2.0**-2], [-4 * 2.0**-4, -5 * 2.0**-3, -6 * 2.0**-2]]),
        ("cancel", [[2048.0, 1.0, 1.0], [2048.0, 1.0, 1.0]]),
        ("scaled", [[1024.0, 2048.0, 3072.0], [-4096.0, -5120.0, -6144.0]]),
        # Odd multiples of half a unit: of bfloat16 in the first row, of float16 in the second.
        ("midpoints", [[1 + 2**-8, 1 + 3 * 2**-8, 1 + 5 * 2**-8], [-1 - n * 2**-11 for n in (7, 9, 11)]]),
    ],
)
def test_a_probe_by_hand(probe: str, expected: list[list[float]]) -> None:
    (value,) = applied(probe, torch.tensor([[1.0, 2.0, 3.0], [-4.0, -5.0, -6.0]]))
    assert value.tolist() == expected


def test_midpoints_lie_between_two_numbers_of_half_precision() -> None:
    (value,) = applied("midpoints", torch.randn(2, 100, generator=torch.Generator().manual_seed(1)))
    for row, unit in ((value[0], 2.0**-8), (value[1], 2.0**-11)):
        assert bool(((row.abs() - 1) / unit % 2 == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiny_numbers_are_subnormal_in_their_dtype(dtype: torch.dtype) -> None:
    (value,) = applied("tiny", torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), dtype=dtype)
    stored = value.to(dtype)
    assert bool((stored != 0).all())
    assert float(stored.abs().max()) < torch.finfo(dtype).tiny


def test_huge_numbers_fit_float16_and_their_squares_do_not() -> None:
    (value,) = applied("huge", torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))
    assert bool(value.half().isfinite().all())
    assert bool(value.half().square().isinf().all())


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_a_special_number_stands_once_in_its_operand_alone(word: str) -> None:
    number = float(word)
    result = applied(f"{word}[1]", *(torch.ones(3, 5) for _ in range(3)))
    assert [int((~value.isfinite()).sum()) for value in result] == [0, 1, 0]
    assert str(float(result[1][1, 2])) == str(number)
    assert Draw(0, f"{word}[1]").special
    assert not Draw(0, "zeros").special


def test_a_special_number_of_an_expanded_input_stands_in_every_copy() -> None:
    (value,) = applied("nan[0]", torch.ones(1, 4, 8).expand(3, 4, 8))
    assert value.isnan().sum(dim=(1, 2)).tolist() == [1, 1, 1]


def test_the_future_dwarfs_the_last_key_and_value_alone() -> None:
    q, k, v = applied("future", *(torch.ones(2, 3, 4) for _ in range(3)))
    assert torch.equal(q, torch.ones(2, 3, 4))
    for value in (k, v):
        assert torch.equal(value[:, -1], torch.full((2, 4), 16.0))
        assert torch.equal(value[:, :-1], torch.ones(2, 2, 4))


def test_channels_scale_output_channels_of_parameters_and_no_input() -> None:
    module = nn.Linear(3, 10)
    before, bias = module.weight.detach().clone(), module.bias.detach().clone()
    problem = PROBES["channels"].apply(of(torch.ones(2, 3), module=module), torch.float32)
    assert torch.equal(problem.inputs[0], torch.ones(2, 3))
    assert (module.weight[:, 0] / before[:, 0]).tolist() == [2.0 ** (n % 9 - 4) for n in range(10)]
    assert torch.equal(module.bias, bias)


def test_integers_are_left_alone() -> None:
    index = torch.tensor([1, 2])
    for name in ("zeros", "ones", "scaled", "huge"):
        assert torch.equal(applied(name, torch.ones(2), index)[1], index)


def probed(*names: str) -> Workload:
    return replace(built_in()["matmul"], probes=frozenset(names))


def test_draws_begin_with_random_ones_then_probes_by_name_then_those_of_other_shapes() -> None:
    drawn = draws(probed("zeros", "ones", "slice"), FORWARD, every)
    assert [str(draw) for draw in drawn] == ["draw 0", "draw 1", "draw 2", "draw 3", "ones", "zeros", "slice"]
    assert drawn[0] == Draw()


def test_probes_are_used_in_their_modes_alone() -> None:
    workload = probed("zeros", "tiny", "future")
    assert [draw.probe for draw in draws(workload, BACKWARD, every) if draw.probe] == ["tiny"]
    assert not [draw for draw in draws(workload, TRAIN, every) if draw.probe]


def test_probes_that_are_not_admitted_are_left_out() -> None:
    drawn = draws(probed("zeros", "ones"), FORWARD, lambda probe: probe.name != "ones")
    assert [draw.probe for draw in drawn] == [*[""] * DRAWS, "zeros"]


def test_a_workload_of_constants_is_drawn_once() -> None:
    assert list(map(str, draws(replace(probed("zeros"), draws=1), FORWARD, every))) == ["draw 0", "zeros"]
    derivatives = built_in()["derivatives"]
    first, second = (derivatives.problem(seed) for seed in (0, 1))
    assert derivatives.draws == 1
    assert all(map(torch.equal, first.inputs, second.inputs))


def test_random_draws_have_other_parameters_inputs_and_scales() -> None:
    workload = built_in()["matmul"]
    problems = [Draw(number).problem(workload, 7, "float32") for number in range(DRAWS)]
    weights = [problem.module.get_parameter("weight") for problem in problems]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
    sizes = [float(problem.inputs[0].square().mean().sqrt()) for problem in problems]
    assert [size / sizes[0] for size in sizes] == pytest.approx(SCALES, rel=0.05)
    assert len({Draw(number).seed(7) for number in range(DRAWS)}) == DRAWS


def test_a_probe_has_the_parameters_of_the_cases_own_draw() -> None:
    workload = built_in()["matmul"]
    own, zeros = (draw.problem(workload, 7, "float32").module.state_dict() for draw in (Draw(), Draw(0, "zeros")))
    assert all(torch.equal(own[key], zeros[key]) for key in own)


def test_a_probe_of_an_input_that_is_not_there_is_refused() -> None:
    floats, integers = torch.ones(2), torch.ones(2, dtype=torch.int64)
    for inputs in ((floats,), (floats, floats, integers)):
        with pytest.raises(ValueError, match=r"a probe changes input 2; floating-point inputs of the workload: \[0"):
            applied("nan[2]", *inputs)
