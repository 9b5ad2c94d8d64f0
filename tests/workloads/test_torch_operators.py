"""The operators of torch as workloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, built_in, failed, passed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelcheck.devices.torch_names import UnknownTorchError, pytree
from accelcheck.verify.oracle import Store
from accelcheck.workloads import operator_samples, operator_trials
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.operator_calls import CASTS, Calls, Cast, Chooser
from accelcheck.workloads.operator_samples import FEW, CalledOperator, database, structured, template
from accelcheck.workloads.torch_operators import ALONE, COMMON, FILE, PARTS, WORKLOADS


def nothing(program: Program) -> None:
    """Eager as it is."""


def operators_of(workload: Workload) -> tuple[CalledOperator, ...]:
    operators: tuple[CalledOperator, ...] = workload.make.keywords["operators"]  # type: ignore[attr-defined]
    return operators


def test_every_operator_of_torch_is_judged_or_left_out_with_a_reason() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    names = built_in().keys()
    assert len(stored) > 600
    for name, entry in stored.items():
        parts = [part for part in PARTS if part in entry]
        judged = [part for part in parts if (f"op-{name}" if part == "floating" else f"op-{name}-{part}") in names]
        judged += [part for part in parts if part not in ALONE and "left" not in entry[part]]
        assert all(part in judged or entry[part]["left"] for part in parts)


def test_the_stored_file_knows_the_operators_of_this_torch() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    assert len(database().keys() & stored.keys()) > 600


def test_draws_have_the_same_calls_and_other_values() -> None:
    first, other = (built_in()["op-add"].problem(seed) for seed in (1, 2))
    labels = [[call.label for call in made.module.calls] for made in (first, other)]  # type: ignore[union-attr]
    assert labels[0] == labels[1]
    pairs = list(zip(first.inputs, other.inputs, strict=True))
    assert all(a.shape == b.shape and a.stride() == b.stride() for a, b in pairs)
    assert sum(not torch.equal(a, b) for a, b in pairs) > len(pairs) // 2


def test_a_draw_of_a_resized_sample_has_its_shapes_and_own_values_and_counts_no_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operators = (CalledOperator("nn.functional.interpolate.bilinear", ("float32",), variants=("length-67",)),)
    made = template(operators, 1)
    monkeypatch.setattr(operator_trials, "_results", lambda *_: pytest.fail("counted again"))
    values = operator_samples._values(operators, 1, 11)
    assert made.inputs
    assert all(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(values, made.inputs, strict=True))


def test_inputs_unlike_those_of_the_template_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    call = template((CalledOperator("exp", ("float32",)),), 1).calls[0]
    monkeypatch.setattr(operator_samples, "tried", lambda *_, **__: pytest.fail("tried"))
    tested, _ = operator_samples._tested(call, [torch.ones(3)], ("float32",), [torch.ones(4)])
    assert isinstance(tested, str)


@pytest.mark.parametrize(
    "name", ["op-cholesky", "op-acosh", "op-linalg.solve_triangular", "op-nn.functional.embedding_bag"]
)
def test_every_draw_keeps_the_structure_and_the_domain_of_the_inputs(name: str) -> None:
    for seed in (1, 2, 3):
        program = Program.of(built_in()[name].problem(seed), dtype=torch.float64)
        assert all(bool(torch.isfinite(out).all()) for out in program.run(FORWARD).values())


def test_problems_share_no_memory() -> None:
    first, other = (built_in()["op-t"].problem(1) for _ in range(2))
    for value in first.inputs:
        value.zero_()
    assert any(bool(value.any()) for value in other.inputs[1:])


class Sign(nn.Module):
    """The sign of its input, whose gradient torch gives as a zero without memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sgn()


def test_a_gradient_without_memory_is_read_as_zeros() -> None:
    result = Program.of(Problem(Sign(), (torch.tensor([1.5, -2.0]),))).run(BACKWARD)
    assert result["grad:input[0]"].numpy().tolist() == [0.0, 0.0]


def test_operators_of_structured_matrices_depend_on_what_they_read_alone() -> None:
    matrix = torch.tensor([[4.0, 2.0], [1.0, 5.0]])
    triangular = structured(database()["cholesky_solve"])
    derivative = torch.func.jacfwd(lambda factor: triangular(torch.eye(2), factor))(matrix)
    assert derivative[..., 0, 1].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert derivative[..., 1, 0].any()
    hermitian = structured(database()["linalg.cholesky"])
    assert torch.equal(hermitian(matrix), torch.linalg.cholesky(matrix + matrix.mT))
    for name in ("add", "nn.functional.ctc_loss", "triangular_solve"):
        assert structured(database()[name]) is database()[name].op


def test_arguments_that_an_operator_writes_to_are_copied() -> None:
    program = Program.of(built_in()["op-nn.functional.embedding"].problem(1))
    assert any(call.writes for call in program.module.calls)  # type: ignore[union-attr]
    before = [value.clone() for value in program.inputs]
    program.run(FORWARD)
    assert all(torch.equal(first, other) for first, other in zip(before, program.inputs, strict=True))


def test_complex_results_are_pairs_of_real_numbers() -> None:
    result = Program.of(built_in()["op-fft.fft"].problem(1)).run(FORWARD)
    assert all(out.dtype == torch.float32 and out.shape[-1] == 2 for out in result.values())


@pytest.mark.parametrize("part", PARTS)
def test_every_judged_operator_is_in_one_bundle_of_its_family(part: str) -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    others = PARTS.keys() - {"floating"}
    bundled = [
        operator.name
        for workload in WORKLOADS
        if workload.name.startswith("ops-")
        and not workload.name.startswith(("ops-common", "ops-apart"))
        and (
            f"-{part}-" in workload.name
            if part in others
            else not any(f"-{other}-" in workload.name for other in others)
        )
        for operator in operators_of(workload)
    ]
    judged = [name for name, entry in stored.items() if part in entry and not entry[part].keys() & {"left", "apart"}]
    assert sorted(bundled) == sorted(judged)


def test_operators_that_no_graph_has_are_in_bundles_of_eager() -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    for part in ("floating", "further"):
        bundle = next(workload for workload in WORKLOADS if workload.name == f"ops-apart-{part}")
        apart = [name for name, entry in stored.items() if "apart" in entry.get(part, {}) and "left" not in entry[part]]
        assert [operator.name for operator in operators_of(bundle)] == apart
        assert {"nonzero", "masked_select", "unique"} <= {*apart}
        assert bundle.techniques == {"eager"}


@pytest.mark.parametrize("name", ["signal.windows.hann", "signal.windows.kaiser", "arange", "exp"])
def test_results_are_on_the_device_of_the_inputs(name: str) -> None:
    made = template((CalledOperator(name, ("float32",)),), 2)
    anchor, tensors = torch.ones(1, device="meta"), [value.to("meta") for value in made.inputs]
    assert made.calls
    assert {out.device.type for call in made.calls for out in call(anchor, tensors)} == {"meta"}


@pytest.mark.slow
def test_level_1_has_one_sample_of_sixty_common_operators() -> None:
    workload = built_in()["ops-common"]
    labels = [call.label for call in workload.problem(1).module.calls]  # type: ignore[union-attr]  # a module of calls
    assert [label.split()[0] for label in labels] == list(COMMON)
    assert len(set(COMMON)) == 60
    assert dict(workload.levels) == {"eager": 1, "compile-static": 2}


@pytest.mark.slow
def test_a_bundle_takes_a_few_samples_of_each_operator() -> None:
    for name in ("ops-unary-1", "ops-binary-1", "ops-reduction-further-1"):
        workload = built_in()[name]
        labels = [call.label.rsplit(" ", 1)[0] for call in workload.problem(1).module.calls]  # type: ignore[union-attr]
        kinds = {f"{operator.name} {dtype}" for operator in operators_of(workload) for dtype in operator.dtypes}
        assert set(labels) == kinds
        assert max(map(labels.count, kinds)) <= FEW


def test_samples_have_at_most_one_empty_result() -> None:
    made = template((CalledOperator("repeat", ("float32",)),), 10)
    assert sum(call.empty for call in made.calls) == 1


def test_attention_has_the_same_samples_under_every_kernel() -> None:
    operator = CalledOperator("nn.functional.scaled_dot_product_attention", ("float32",))
    first = template((operator,), 3)
    template.cache_clear()
    with sdpa_kernel(SDPBackend.MATH):
        other = template((operator,), 3)
    assert first.origins == other.origins


X = torch.tensor([[3, 1, 3, 2], [5, 5, 5, 4]])
CHOICES: list[tuple[str, tuple[Any, ...], dict[str, Any], list[list[int]], list[list[int]]]] = [
    ("topk", (2,), {}, [[0, 2], [0, 1]], [[2, 0], [2, 1]]),
    ("topk", (2, 0), {}, [[1, 1, 1, 1], [0, 0, 0, 0]], [[1, 1, 1, 1], [0, 0, 0, 0]]),
    ("sort", (), {"descending": True}, [[0, 2, 3, 1], [0, 1, 2, 3]], [[2, 0, 3, 1], [2, 0, 1, 3]]),
    ("argsort", (1,), {}, [[1, 3, 0, 2], [3, 0, 1, 2]], [[1, 3, 2, 0], [3, 2, 0, 1]]),
    ("kthvalue", (3,), {"keepdim": True}, [[0], [0]], [[2], [1]]),
    ("median", (), {"dim": 1, "keepdim": True}, [[3], [0]], [[3], [2]]),
    ("mode", (), {"keepdim": True}, [[0], [0]], [[2], [2]]),
    ("cummax", (1,), {}, [[0, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 2, 2], [0, 1, 2, 2]]),
]
"""Operators with further arguments, and two choices among indices of equal elements."""


@pytest.mark.parametrize(("name", "args", "kwargs", "one", "other"), CHOICES)
def test_any_index_of_equal_elements_is_right_and_no_other_index(
    name: str, args: Any, kwargs: Any, one: Any, other: Any
) -> None:
    values = getattr(torch, name)(X, *args, **kwargs)
    head = () if name == "argsort" else (values[0],)

    def giving(indices: Any) -> list[list[Any]]:
        given = torch.tensor(indices)
        out = Chooser(name, lambda *_, **__: (*head, given) if head else given)(X, *args, **kwargs)
        return [value.tolist() for value in out]

    assert (
        giving(one)
        == giving(other)
        == [value.tolist() for value in Chooser(name, getattr(torch, name))(X, *args, **kwargs)]
    )
    assert giving([[1 for _ in row] for row in one]) != giving(one)


@pytest.mark.parametrize("name", ["median", "sort"])
def test_what_names_no_dimension_or_promises_an_order_is_unchanged(name: str) -> None:
    kwargs = {"stable": True} if name == "sort" else {}
    function = getattr(torch, name)
    out, expected = Chooser(name, function)(X, **kwargs), function(X, **kwargs)
    assert torch.equal(out, expected) if name == "median" else torch.equal(out[1], expected[1])


def test_the_index_of_a_number_is_judged() -> None:
    assert Chooser("sort", torch.sort)(torch.tensor(3.0))[1].tolist() == 0


def test_indices_without_the_dimension_stay_without_it() -> None:
    assert [tuple(value.shape) for value in Chooser("kthvalue", torch.kthvalue)(X, 2)] == [(2,), (2,)]


@pytest.mark.parametrize("name", CASTS)
def test_casts_get_numbers_that_their_integers_have(name: str) -> None:
    cast = Cast(name, getattr(Tensor, name))
    x = torch.tensor([-1e30, -5.5, float("nan"), 3.5, 1e30, float("-inf")])
    exact = x.double().nan_to_num(0.0).clamp(*CASTS[name]).trunc()
    assert cast(x).tolist() == exact.tolist()
    assert torch.equal(cast(torch.tensor([3, 4])), getattr(torch.tensor([3, 4]), name)())


@pytest.mark.parametrize(("name", "wrapper"), [("topk", Chooser), ("byte", Cast)])
def test_samples_of_selections_and_casts_are_judged_by_what_torch_promises(name: str, wrapper: type) -> None:
    calls = template((CalledOperator(name, ("float32", "int64"), gradients=False),), FEW).calls
    assert calls
    assert all(isinstance(call.function, wrapper) for call in calls)


def test_gradients_that_the_oracle_divides_by_another_count_are_left_out() -> None:
    calls = template((CalledOperator("nn.functional.embedding_bag", ("float32",)),), FEW).calls
    counted = [bool(pytree.tree_unflatten(call.leaves, call.spec)[2].get("scale_grad_by_freq")) for call in calls]
    assert {call.smooth for call, by_count in zip(calls, counted, strict=True) if by_count} == {False}
    assert any(call.smooth for call in calls)


def test_a_torch_without_an_operator_says_so() -> None:
    with pytest.raises(UnknownTorchError, match="describes no operator of-a-later-torch"):
        template((CalledOperator("of-a-later-torch", ("float32",)),), 3)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "name",
    ["op-add", "op-fft.rfft", "op-matmul-further", "op-linalg.inv", "op-polygamma.polygamma_n_1", "op-searchsorted"],
)
def test_eager_passes(name: str, fresh: Store) -> None:
    workload = built_in()[name]
    for mode in (FORWARD, BACKWARD):
        if mode in workload.modes:
            passed(fresh, Planted(nothing), workload, mode)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["op-add", "op-fft.rfft", "op-matmul-further", "op-linalg.inv", "op-maximum"])
def test_one_wrong_sample_is_named(name: str, fresh: Store) -> None:
    problem = built_in()[name].problem(0)
    assert isinstance(problem.module, Calls)
    results = problem.module.eval()(*problem.inputs)
    label = next(label for label, outs in results.items() if outs[0].numel() > 3 and bool(outs[0].any()))

    def spoil(program: Program) -> None:
        assert isinstance(program.module, Calls)
        program.module.calls = tuple(
            replace(call, process=_scaled(call.process)) if call.label == label else call
            for call in program.module.calls
        )

    record = failed(fresh, Planted(spoil), built_in()[name], FORWARD)
    assert {fault.path.partition("]")[0] for fault in record.faults} == {f"out[{label!r}"}


def _scaled(process: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def scaled(out: Any) -> Any:
        out = process(out)
        return out * 2 if isinstance(out, Tensor) else out

    return scaled
