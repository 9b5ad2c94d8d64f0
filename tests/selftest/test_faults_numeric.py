"""The catalogue's numeric part: what `accelcheck selftest` itself does not show."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, stable_seed
from accelcheck.devices.cpu import Cpu
from accelcheck.selftest.faults import (
    attention,
    autograd,
    compute,
    layers,
    matmul,
    memory,
    operators,
    plant,
    values,
    variants,
)
from accelcheck.selftest.faults.base import Cell, Change, PlantedFault, Variant
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.base import Program, Result

MODULES = (attention, matmul, values)
NUMBERED = (layers, memory, autograd, operators)
"""Their faults without a number are of modes, layouts, transforms and single operators."""
FAULTS: list[PlantedFault] = [
    *(fault for module in MODULES for fault in module.FAULTS),
    *(fault for module in NUMBERED for fault in module.FAULTS if fault.number),
]
NUMBERS = frozenset(range(1, 23)) | {31, 38, 42, 43}
"""Numeric faults of the list that a suite must catch."""
MATRIX = Matrix.load()
# Right in what one run shows.
UNSEEN_IN_ONE_RUN = frozenset(
    {
        "double-backward-wrong",  # gradients of gradients
        "nan-swallowed-by-maximum",
        "nan-swallowed-by-clamp",
        "nan-swallowed-by-relu",  # inputs with NaN
        "subnormals-flushed",
        "subnormals-flushed-backward",  # the smallest inputs
    }
)


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Within it, newly allocated memory holds NaN: not, once in a while, the right result of the run before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(cell: Cell, dtype: str, change: Change = plant.nothing, technique: str = "eager") -> Result:
    """One run of a workload with something planted."""
    workload = MATRIX.workloads[cell.workload]
    seed = stable_seed(workload.name)
    program = Program.of(workload.problem(seed), dtype=getattr(torch, dtype), seed=seed)
    MATRIX.techniques[technique].prepare(program, cell.mode, Cpu())
    change(program)
    with filled():
        return program.run(cell.mode)


def bits(result: Result) -> dict[str, bytes]:
    """Bytes of a result, NaN included."""
    return {path: tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for path, tensor in result.items()}


def test_every_number_of_the_numeric_list_is_there() -> None:
    assert {fault.number for fault in FAULTS} - {0} == NUMBERS


def test_names_are_unique_and_summaries_are_sentences() -> None:
    everything: list[PlantedFault | Variant] = [*FAULTS, *variants.VARIANTS]
    assert not [name for name, count in Counter(entry.name for entry in everything).items() if count > 1]
    assert all(entry.summary.endswith(".") for entry in everything)


def test_cells_are_in_the_matrix() -> None:
    everything: list[PlantedFault | Variant] = [*FAULTS, *variants.VARIANTS]
    for entry in everything:
        for cell in entry.cells:
            workload = MATRIX.workloads[cell.workload]
            assert cell.mode in workload.modes, entry.name
            assert set(cell.dtypes) <= workload.dtypes, entry.name
            assert MATRIX.techniques[str(entry.technique)].accepts(workload), entry.name


def test_the_strongest_degree_comes_first() -> None:
    for fault in FAULTS:
        assert list(fault.strengths) == sorted(fault.strengths, reverse=True), fault.name
        assert all(strength in fault.strengths for _, strength in fault.hidden), fault.name


def test_there_are_fifty_cells_of_correct_variants() -> None:
    assert sum(len(cell.dtypes) for variant in variants.VARIANTS for cell in variant.cells) >= 50


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_the_result_of_each_of_its_cells(fault: PlantedFault) -> None:
    for cell in fault.cells:
        dtype = cell.dtypes[0]
        technique = str(fault.technique)
        changed = run(cell, dtype, fault.plant(fault.strengths[-1]), technique)
        same = bits(changed) == bits(run(cell, dtype, technique=technique))
        if fault.name in {"input-overwritten", "parameter-overwritten"}:
            assert same, "the result is right, the caller's memory is not"
        else:
            assert same == (fault.name in UNSEEN_IN_ONE_RUN)


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.name.endswith("-backward")], ids=lambda fault: fault.name
)
def test_a_fault_of_the_backward_pass_leaves_the_forward_pass_alone(fault: PlantedFault) -> None:
    for cell in fault.cells:
        dtype = cell.dtypes[-1]
        before, after = run(cell, dtype), run(cell, dtype, fault.plant(fault.strengths[0]))
        forward = {path for path in before if path.startswith("out")}
        assert forward
        assert bits({path: after[path] for path in forward}) == bits({path: before[path] for path in forward})


def test_subnormals_are_flushed_forward_and_backward() -> None:
    tiny = torch.full((4,), torch.finfo(torch.float32).tiny)
    with plant.Kernels({"mul": values.flushing}):
        assert (tiny * 0.5).tolist() == [0.0] * 4
        assert torch.equal(tiny * 1.0, tiny)
    assert values.keeps_subnormals(Cpu()).ok


@pytest.mark.parametrize(
    ("name", "kernel", "call"),
    [
        ("maximum", values.maximum, lambda x: torch.maximum(x, torch.zeros(3))),
        ("clamp", values.clamp, lambda x: x.clamp(-1.0, 1.0)),
        ("relu", values.relu, torch.relu),
    ],
)
def test_nan_alone_is_swallowed(name: str, kernel: Callable[..., Tensor], call: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([math.nan, -3.0, 3.0])
    plain = call(x)
    with plant.Kernels({name: kernel}):
        changed = call(x)
    assert bool(plain[0].isnan())
    assert bool(changed[0].isfinite())
    assert torch.equal(changed[1:], plain[1:])


def test_only_the_second_derivative_of_a_detached_function_is_wrong() -> None:
    problem = MATRIX.workloads["custom-function"].problem(3)
    module = problem.module.double()
    leaves = [value[:2, :2].double().requires_grad_() for value in problem.inputs]
    for function, right in ((module, True), (partial(autograd.detached, module), False)):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves, raise_exception=False) is right


def test_far_elements_are_beyond_31_bits() -> None:
    _, rows, columns = MATRIX.workloads["far-elements"].problem(5).inputs
    offsets = rows * 2**16 + columns
    assert int(offsets.min()) >= 2**31
    assert int(offsets.max()) == 2**32 - 1


def test_races_depend_on_no_seed() -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "update-lost")
    seen = {bits(run(fault.cells[0], "float32", fault.plant(1.0)))["out"] for _ in range(8)}
    assert len(seen) > 1


def test_where_there_are_no_strides_none_are_ignored() -> None:
    class Strideless(Cpu):
        features = frozenset[str]()

    assert memory.strided(Cpu()).ok
    assert memory.strided(Strideless()).code is Code.NO_FEATURE


def test_what_a_kernel_does_inside_is_not_seen() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch annotates the mode only in part
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    ones = torch.ones(2)
    with Watch():  # type: ignore[no-untyped-call]  # as above
        plant.scaled(1.5)(ones)
    assert seen == []


def products() -> list[Callable[[Tensor, Tensor], Tensor]]:
    return [
        compute.forwards, compute.reversed_order, compute.blocked, compute.split_k, compute.pairwise, compute.kahan,
        compute.fused, compute.matrix_unit, compute.from_transposed,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("product", products(), ids=lambda product: product.__name__)
@pytest.mark.parametrize("shape", [(5, 37, 7), (3, 1, 2), (0, 4, 3), (2, 0, 3)], ids=str)
def test_a_correct_product_is_right(
    product: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, inner, columns = shape
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    got, truth = product(a, b), a.double() @ b.double()
    assert got.dtype == torch.float32
    # Higham: n u / (1 - n u) times the product of the sizes bounds every order of summation.
    bound = (inner + 1) * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert bool(((got.double() - truth).abs() <= bound).all())


def test_compensation_beats_plain_summation() -> None:
    a, b = torch.rand(4, 3000), torch.rand(3000, 4)
    truth = a.double() @ b.double()
    errors = [float((product(a, b) - truth).abs().max()) for product in (compute.kahan, compute.forwards)]
    assert errors[0] < errors[1] / 10


def test_half_precision_stops_counting() -> None:
    ones = torch.ones(1, 4096)
    assert float(compute.half_accumulation(ones, ones.t())) == 2048.0
    more = torch.ones(1, 8192)
    assert float(matmul.bfloat16_accumulation(more, more.t())) == 4096.0


def test_tf32_loses_a_half_of_1024() -> None:
    a, b = torch.full((1, 1), 2049.0), torch.ones(1, 1)
    assert float(matmul.reduced(11, a, b)) == 2048.0
    assert float(matmul.three_products(a, b)) == 2049.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_truncation_never_leaves_zero(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 24).to(dtype), torch.randn(24, 16).to(dtype)
    truth, got = a.double() @ b.double(), matmul.truncating(a, b)
    # The half types sum in FP32 before the cut: that may err 24 units of FP32 the other way.
    slack = 0.0 if dtype is torch.float32 else 24 * 2.0**-24 * float((a.double().abs() @ b.double().abs()).max())
    assert bool((got.double().abs() <= truth.abs() + slack).all())
    assert float((got.double() - truth).abs().max()) > 0


@pytest.mark.parametrize("queries", [12, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_right(queries: int, causal: bool) -> None:
    q, k, v = (torch.randn(2, length, 8, dtype=torch.float64) for length in (queries, 20, 20))
    seen = compute.causal(queries, 20, q.device) if causal else None
    truth = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    module = type("Module", (), {"causal": causal})
    for got in (
        compute.attention(q, k, v, seen),
        compute.online_attention(q, k, v, seen, size=7),
        variants.base_two(module, q, k, v),
    ):
        torch.testing.assert_close(got, truth, rtol=1e-12, atol=1e-12)


def test_a_query_without_keys_gives_zeros() -> None:
    q, mask = torch.randn(1, 3, 4, dtype=torch.float64), torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    truth = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    torch.testing.assert_close(compute.attention(q, q, q, mask), truth)
    assert not bool(truth[0, 1].any())


@pytest.mark.parametrize("moments", [compute.two_pass, compute.welford, compute.one_pass, compute.shifted_one_pass])
def test_layer_norm_is_right(moments: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    module = nn.LayerNorm(6).double()
    nn.init.normal_(module.weight)
    nn.init.normal_(module.bias)
    x = 3.0 + torch.randn(5, 6, dtype=torch.float64)
    torch.testing.assert_close(compute.layer_norm(module, x, moments=moments), module(x), rtol=1e-10, atol=1e-10)


def test_convolution_by_columns_is_right() -> None:
    module = nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0)).double()
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(compute.by_columns(module, x), module(x))


def test_gelu_by_erfc_is_right_far_below_zero() -> None:
    x = torch.linspace(-12, 4, 100, dtype=torch.float64)
    exact = torch.tensor([0.5 * value * math.erfc(-value / math.sqrt(2)) for value in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(compute.gelu_by_erfc(x), exact, rtol=1e-12, atol=0.0)


def test_another_payload_is_still_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.tensor([math.nan, 1.0, -math.inf]).to(dtype)
        changed = variants._other_payload(x)
        assert changed.isnan().tolist() == [True, False, False]
        assert torch.equal(changed[1:], x[1:])
        raw = torch.int32 if dtype is torch.float32 else torch.int16
        assert int(changed.view(raw)[0]) != int(x.view(raw)[0])


@pytest.mark.parametrize("over", [[0], [1], [0, 2], None], ids=str)
@pytest.mark.parametrize("keep", [False, True])
def test_a_tree_of_sums_is_right(over: list[int] | None, keep: bool) -> None:
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    got = variants.tree_sum(None, x, over, keep)
    truth = x.sum(over, keep) if over is not None else x.sum()
    torch.testing.assert_close(got.reshape(truth.shape), truth)


def test_reordered_sgd_is_sgd() -> None:
    start = torch.randn(5, dtype=torch.float64)
    ends = []
    for make in (torch.optim.SGD, variants.OtherSgd):
        parameter = nn.Parameter(start.clone())
        optimizer = make([parameter], lr=0.1, momentum=0.9)
        for step in range(4):
            parameter.grad = torch.cos(parameter.detach() + step)
            optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(ends[1], ends[0])


def test_the_gradients_of_a_wrong_function_reach_inputs_and_parameters() -> None:
    module = nn.Linear(3, 2)
    program = Program(module, (torch.randn(4, 3),))
    right = program.run(Mode.BACKWARD)
    plant.backwards(lambda module, x: 2.0 * module(x))(program)
    wrong = program.run(Mode.BACKWARD)
    assert torch.equal(wrong["out"], right["out"])
    for path in ("grad:input[0]", "grad:weight", "grad:bias"):
        torch.testing.assert_close(wrong[path], 2.0 * right[path])
