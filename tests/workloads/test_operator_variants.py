"""Samples of operators that OpInfo does not have: special values, other sizes and layouts, half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Planted, failed, passed
from torch import Tensor

from accelcheck.core.case import Mode
from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program, Workload
from accelcheck.workloads.operator_calls import SampleCall, Written, WrittenOut
from accelcheck.workloads.operator_samples import HALF, CalledOperator, database, template
from accelcheck.workloads.operator_trials import RESULTS, tried
from accelcheck.workloads.operator_variants import LAYOUTS, MIXED, RESIZED, SCALED, SPECIAL, beside, changed, laid_out
from accelcheck.workloads.torch_operators import PARTS, alone


def workload(name: str, part: str) -> Workload:
    gradients = PARTS[part].gradients
    return alone(name, part, {"dtypes": list(PARTS[part].declared), "gradients": gradients}, "binary")


def right(program: Program) -> None:
    """Eager as it is."""


def after(change: Any) -> Planted:
    def wrong(program: Program) -> None:
        module = program.module
        program.call = lambda *inputs: {
            label: tuple(change(label, out) for out in outs) for label, outs in module(*inputs).items()
        }

    return Planted(wrong)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "part"),
    [
        *((name, part) for name in ("maximum", "sum") for part in ("edges", "resized", "strided")),
        ("add", "resized"),
        ("add", "mixed"),
        ("add", "written"),
        ("sort", "written"),
        ("matmul", "edges"),
    ],
)
def test_eager_passes(name: str, part: str, fresh: Store) -> None:
    tried_workload = workload(name, part)
    for mode in tried_workload.modes:
        passed(fresh, Planted(right), tried_workload, mode)


def test_the_memory_around_what_is_written_is_judged_too() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    spread = Written("spread", Tensor.neg_)(x).reshape(2, 6)
    assert torch.equal(spread[:, ::2], -x)
    assert torch.equal(spread[:, 1::2], x)
    assert torch.equal(WrittenOut("offset", torch.neg)(x), torch.cat([torch.ones(1), -x.reshape(-1)]))
    assert torch.equal(x, torch.arange(6.0).reshape(2, 3))


class _Lost(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Device that loses writes in place, or to `out`, of one operator to tensors that are not dense."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target: Any = (kwargs or {}).get("out", args[0] if args else None)
        if str(func).startswith(self.name) and not target.is_contiguous():
            return target
        return func(*args, **(kwargs or {}))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("name", "labels"), [("aten.add_.Tensor", "in-place"), ("aten.add.out", "out")])
def test_a_write_that_is_lost_fails(name: str, labels: str, fresh: Store) -> None:
    def wrong(program: Program) -> None:
        module = program.module

        def call(*inputs: Tensor) -> Any:
            with _Lost(name):
                return module(*inputs)

        program.call = call

    record = failed(fresh, Planted(wrong), workload("add", "written"), FORWARD)
    wrongs = {fault.path.split()[1] for fault in record.faults}
    assert wrongs == {f"{labels}-transposed", f"{labels}-spread"}


def test_a_nan_that_is_lost_fails(fresh: Store) -> None:
    record = failed(fresh, after(lambda _, out: out.nan_to_num()), workload("maximum", "edges"), FORWARD)
    assert {(fault.view, fault.path.split()[1]) for fault in record.faults} >= {("NaN", "nan"), ("-Inf", "infinite")}


def test_an_element_beyond_a_block_that_is_lost_fails(fresh: Store) -> None:
    def lost(_: str, out: Tensor) -> Tensor:
        return torch.cat([out[..., :-1], torch.zeros_like(out[..., -1:])], -1) if out.shape[-1] > 1024 else out

    record = failed(fresh, after(lost), workload("maximum", "resized"), FORWARD)
    assert {fault.path.split()[1] for fault in record.faults} == {"length-1030", "length-4103"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_operands_of_other_layouts_are_not_contiguous(name: str) -> None:
    x = torch.arange(48.0).reshape(2, 3, 2, 4)
    other, option, further = laid_out([x, 1, x], name)
    expected = x[:1].expand(x.shape) if name == "expanded" else x
    assert torch.equal(other, expected)
    assert option == 1
    assert not other.is_contiguous() or other.storage_offset() == 1
    assert (further.stride() == other.stride()) == (name != "transposed-first")


def test_a_layout_that_changes_no_strides_is_none() -> None:
    assert changed([torch.ones(3)], "transposed") == []
    assert changed([torch.ones(3, 4)], "channels-last") == []
    assert changed([torch.ones(3, 4)], "transposed-first") == []
    assert len(changed([torch.ones(3, 4), torch.ones(3)], "transposed-first")) == 1


def test_tiny_and_huge_numbers_have_squares_beyond_those_of_float32_and_within() -> None:
    x = torch.tensor([1.0, -2.0])
    ((tiny, index),) = changed([x, torch.tensor([1])], "tiny")
    ((huge, _),) = changed([x, torch.tensor([1])], "huge")
    assert tiny.square().tolist() == [0.0, 0.0]
    assert torch.equal(tiny.double().square() * 2.0**160, x.double().square())
    assert torch.isfinite(huge.square()).all()
    assert index.tolist() == [1]


def test_an_operator_that_rounds_to_float16_in_between_has_no_sample_with_it() -> None:
    made = template((CalledOperator("trapz", ("float32",), variants=("float16", "int64")),), 1)
    assert [call.variant for call in made.calls] == ["int64"]
    assert made.left["rounds to float16 in between, which a compiler need not"] > 0


def test_a_sample_whose_result_follows_from_underflow_is_left_out() -> None:
    def called(variant: str, function: Any) -> SampleCall:
        return SampleCall("norm", function, template_leaves(), template_spec(), lambda out: out, variant=variant)

    tiny = [torch.rand(7) * 2.0**-80]
    message = "raises, or differs, in float32"
    assert tried(called("tiny", lambda x: x.square().sum().sqrt()), tiny) == message
    assert isinstance(tried(called("tiny", lambda x: x.abs().amax()), tiny), SampleCall)
    assert isinstance(tried(called("ones", lambda x: x.square().sum().sqrt()), tiny), SampleCall)


def test_a_kernel_that_is_wrong_for_a_layout_keeps_its_sample() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x.sin() * (1 if x.is_contiguous() or x.dtype == torch.float64 else 2)

    leaves, spec = template_leaves(), template_spec()
    call = SampleCall("sin transposed 0", wrong, leaves, spec, lambda out: out, variant="transposed")
    assert isinstance(tried(call, [torch.rand(3, 4)]), SampleCall)


@pytest.mark.parametrize("name", ["transposed", "spread", "offset"])
def test_the_layout_of_a_structured_matrix_reaches_the_operator(name: str) -> None:
    made = template((CalledOperator("linalg.cholesky", ("float32",), variants=(name,)),), 1)
    (call,) = made.calls
    assert call.function is database()["linalg.cholesky"].op


def test_numbers_that_float16_holds_are_no_rounding() -> None:
    made = template((CalledOperator("kron", ("float32",), variants=("float16",)),), 1)
    assert [call.variant for call in made.calls] == ["float16"]


def test_the_strides_of_a_layout_reach_the_operator() -> None:
    made = template((CalledOperator("mm", ("float32",), variants=("transposed",)),), 1)
    (call,) = made.calls
    seen: list[bool] = []
    function = call.function

    def watched(x: Tensor, *rest: Any, **options: Any) -> Any:
        seen.append(x.is_contiguous())
        return function(x, *rest, **options)

    vars(call)["function"] = watched
    call(torch.ones(1), made.inputs)
    assert seen == [False]


def test_longer_inputs_stay_within_the_domain_and_do_not_repeat() -> None:
    x = torch.tensor([[0.1, 0.9, 0.5], [-0.3, 0.2, 0.7]])
    longer, index = changed([x, torch.tensor([2, 0, 1])], "length-67")[0]
    assert longer.shape == (2, 67)
    assert index.shape == (67,)
    assert int(index.max()) == 2
    assert float(longer.max()) <= 0.9
    assert len(set(longer[0].tolist())) == 67
    taller, _ = changed([x, torch.tensor([2, 0, 1])], "length-67")[1]
    assert taller.shape == (67, 3)


def test_a_sample_is_not_resized_to_results_that_are_too_many() -> None:
    made = template((CalledOperator("kron", ("float32",), variants=("length-132", "length-4103")),), 1)
    assert [call.variant for call in made.calls] == ["length-132"]
    assert made.left[f"has more than {RESULTS} results"] > 0


def test_operands_of_other_dtypes_are_promoted() -> None:
    made = template((CalledOperator("add", ("float32",), variants=tuple(MIXED)),), 1)
    assert [call.variant for call in made.calls] == list(MIXED)
    for call in made.calls:
        (out,) = call(torch.ones(1), made.inputs)
        assert out.dtype == torch.float32
    x, y = torch.tensor([0.5]), torch.tensor([2.5])
    first, option, second = beside([x, 1, y], "int8")
    assert (first.dtype, option, second.tolist(), second.dtype) == (torch.float32, 1, [2], torch.int8)


def test_a_variant_that_changes_nothing_is_none() -> None:
    integers = [torch.arange(3)]
    assert changed(integers, "nan") == []
    assert changed([torch.tensor(1.0)], "length-9") == []
    assert changed([], "transposed") == []
    assert changed([], "") == [[]]


def test_half_precision_has_samples_that_both_dtypes_hold() -> None:
    made = template((CalledOperator("exp", ("float32",), cases=HALF),), 3)
    for value in made.inputs:
        for word in HALF:
            assert torch.equal(value.to(getattr(torch, word)).float(), value)


@pytest.mark.parametrize("dtype", HALF)
def test_eager_passes_in_half_precision(dtype: str, fresh: Store) -> None:
    for mode in (FORWARD, BACKWARD):
        passed(fresh, Planted(right), workload("tanh", "half"), mode, dtype=dtype)


def test_a_sample_whose_nan_follows_from_rounding_is_left_out() -> None:
    call = SampleCall(
        "sqrt nan 0", lambda x: (x - 1.0).sqrt(), template_leaves(), template_spec(), lambda out: out, variant="nan"
    )
    assert isinstance(tried(call, [torch.tensor([4.0, torch.nan])]), SampleCall)
    message = tried(call, [torch.tensor([1.0, torch.nan])])
    assert message == "raises, or differs, in float64 of inputs times 0.999755859375"


def template_leaves() -> tuple[Any, ...]:
    return template((CalledOperator("sqrt", ("float32",)),), 1).calls[0].leaves


def template_spec() -> Any:
    return template((CalledOperator("sqrt", ("float32",)),), 1).calls[0].spec


def test_every_variant_has_a_name_of_its_own() -> None:
    names = [*SPECIAL, *SCALED, *RESIZED, *LAYOUTS, *MIXED]
    assert len(names) == len(set(names))
    assert all(part.gradients or Mode.BACKWARD not in workload("add", name).modes for name, part in PARTS.items())


def one(tensor: Tensor, variant: str) -> Tensor:
    """The first input that a variant gives."""
    return changed([tensor], variant)[0][0]


def test_rows_are_alike_or_not_finite() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    assert one(x, "rows-alike").tolist() == [[0.5, 0.5], [0.5, 0.5], [4.0, 5.0]]
    assert one(x, "rows-infinite").isneginf().sum(1).tolist() == [2, 2, 0]


def test_numbers_lie_far_from_zero_and_integers_beyond_float32() -> None:
    assert one(torch.tensor([1.0, -2.0]), "shifted").tolist() == [1025.0, 1022.0]
    assert one(torch.tensor([3, -1]), "wide").tolist() == [3 * (2**26 + 1), -(2**26) - 1]
    assert changed([torch.tensor([1.0])], "wide") == []


def test_inputs_lose_all_elements_along_each_size() -> None:
    inputs = [torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5)]  # the second is the largest
    shapes = [[tuple(tensor.shape) for tensor in changed(inputs, f"hollow-{number}")[0]] for number in (1, 2)]
    assert shapes == [[(2, 0), (0, 5), (2, 5)], [(2, 3), (3, 0), (2, 0)]]


def test_long_inputs_have_special_values() -> None:
    long = one(torch.rand(4, 5), "long-nan")
    assert long.shape == (4, 267)
    assert long.isnan().sum() == 2
