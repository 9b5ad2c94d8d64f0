"""The oracle: computed once for all processes, trusted only when eager agrees, and never able to pass anything."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import Once, Planted, built_in, case, seeded
from process_harness import PATIENT, started
from technique_harness import Calls
from torch import Tensor, nn

from accelcheck.core.case import Mode, stable_seed
from accelcheck.core.fault import FaultKind
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify import effort, oracle, sample_budgets
from accelcheck.verify import few as of_few_samples
from accelcheck.verify.few import beyond, cap
from accelcheck.verify.judge import judge
from accelcheck.verify.oracle import Store, compute
from accelcheck.verify.oracle_runs import Oracle, Source
from accelcheck.verify.precision import SLACK, UNIT_ROUNDOFF
from accelcheck.verify.reference import OracleError, Reference
from accelcheck.verify.sample_budgets import TRUST
from accelcheck.verify.views import Yardstick
from accelcheck.workloads.base import Problem, Program, Workload
from accelcheck.workloads.probes import Draw

TESTS = Path(__file__).parents[1]
PLAIN = Planted(nothing)


def made(function: Callable[[Tensor], Any]) -> Workload:
    """A workload of a function of one 8x8 tensor."""
    return Workload("made", "Made.", lambda g, _: Problem(Calls(function), (torch.randn(8, 8, generator=g),)))


def computed(function: Callable[[Tensor], Any], dtype: str = "float32") -> Reference:
    return compute(Source(made(function), PLAIN, 1, dtype, Mode.FORWARD))


def exact(x: Tensor) -> bool:
    return x.dtype == torch.float64


WORKER = """
import sys
import weakref
from dataclasses import replace
from pathlib import Path
import torch
from fault_harness import Planted, case, seeded
from accelcheck.selftest.faults.plant import nothing
from accelcheck.verify import oracle

torch.set_num_threads(1)
folder, log = map(Path, sys.argv[1:])
plain = oracle.compute

def counted(*arguments, **more):
    with log.open("a") as file:
        file.write("computed\\n")
    return plain(*arguments, **more)

oracle.compute = counted
print("ready", flush=True)
sys.stdin.readline()
workload = seeded("mlp")
reference = oracle.Store(folder).get(case(workload), Planted(nothing), workload)
print(sum(float(tensor.sum()) for tensor in reference.truth.values()).hex(), sorted(reference.budgets["out"].items()))
"""


@pytest.mark.slow
def test_two_processes_compute_a_reference_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", WORKER, str(tmp_path / "store"), str(log)]
    (tmp_path / "store").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    with contextlib.ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        workers = [stack.enter_context(started(command, env=environment, **pipes)) for _ in range(2)]
        for worker in workers:  # both have imported torch before either asks, so that they race
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        answers = [worker.communicate(timeout=PATIENT)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
    assert answers[0] == answers[1] != ""
    assert log.read_text(encoding="utf-8") == "computed\n"


def test_a_store_remembers_what_it_read(tmp_path: Path) -> None:
    store, workload = Store(tmp_path), seeded("mlp")
    assert store.get(case(workload), PLAIN, workload) is store.get(case(workload), PLAIN, workload)


def test_a_stored_reference_is_what_was_computed(tmp_path: Path) -> None:
    workload = seeded("cnn")
    chosen = case(workload, Mode.BACKWARD)
    fresh = compute(Source(workload, PLAIN, chosen.seed, chosen.dtype, chosen.mode))
    stored = Store(tmp_path).get(chosen, PLAIN, workload)
    assert stored.truth.keys() == fresh.truth.keys()
    assert all(torch.equal(stored.truth[path], fresh.truth[path]) for path in fresh.truth)
    assert (stored.layouts, stored.unit, stored.eager_excess) == (fresh.layouts, fresh.unit, fresh.eager_excess)
    assert (stored.budgets, stored.leanings, stored.spacing) == (fresh.budgets, fresh.leanings, fresh.spacing)
    assert (stored.alone, stored.eager) == (fresh.alone, fresh.eager)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.path),))


def test_references_are_read_without_running_what_is_in_them(tmp_path: Path) -> None:
    workload, trace = seeded("mlp"), tmp_path / "ran"
    Store(tmp_path).get(case(workload), PLAIN, workload)
    (path,) = tmp_path.glob("*.pt")
    torch.save(Bomb(trace), path)
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights"):
        Store(tmp_path).get(case(workload), PLAIN, workload)
    assert not trace.exists()


def test_failed_computations_leave_nothing_and_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, workload = Store(tmp_path), seeded("mlp")
    with monkeypatch.context() as patch:
        patch.setattr(oracle, "compute", lambda *_, **__: (_ for _ in ()).throw(OracleError("not now")))
        with pytest.raises(OracleError, match="not now"):
            store.get(case(workload), PLAIN, workload)
    assert not list(tmp_path.glob("*.pt"))
    assert store.get(case(workload), PLAIN, workload).truth


def test_a_careful_reference_has_more_samples_and_budgets_no_tighter(tmp_path: Path) -> None:
    store, workload = Store(tmp_path), seeded("mlp")
    few, more, most = (store.get(case(workload), PLAIN, workload, careful=careful) for careful in range(3))
    numbers = (effort.SAMPLES, *effort.CAREFUL)
    for number, result in zip(numbers, (few, more, most), strict=True):
        assert len(result.leanings["out"]["gain"]) == number + 1  # and the one that rounds to nearest
    for first, other in ((few, more), (more, most)):
        assert all(other.budgets["out"][view] >= budget for view, budget in first.budgets["out"].items())


def test_a_process_keeps_the_references_that_it_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "REMEMBERED", 2)
    store, workload = Store(tmp_path), seeded("mlp")
    first, second = (store.get(case(workload), PLAIN, workload, Draw(number)) for number in (0, 1))
    assert store.get(case(workload), PLAIN, workload, Draw(0)) is first
    store.get(case(workload), PLAIN, workload, Draw(2))
    assert store.get(case(workload), PLAIN, workload, Draw(0)) is first
    again = store.get(case(workload), PLAIN, workload, Draw(1))
    assert again is not second
    assert again.budgets == second.budgets


class Half(Planted):
    def precision(self, dtype: str) -> str:
        return "bfloat16"


@pytest.mark.parametrize(
    ("said", "samples_alone"),
    [
        ("\"erfinv\" not implemented for 'Half'", True),
        ("expected m1 and m2 to have the same dtype", True),
        ("boom", False),
    ],
)
def test_eager_in_the_precision_may_lack_a_kernel_and_nothing_else(said: str, *, samples_alone: bool) -> None:
    def function(x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise RuntimeError(said)
        return x * 2

    if samples_alone:
        assert compute(Source(made(function), Half(nothing), 1, "float32", Mode.FORWARD)).eager_excess == 0.0
    else:
        with pytest.raises(OracleError, match="eager bfloat16 on the CPU raised RuntimeError: boom"):
            compute(Source(made(function), Half(nothing), 1, "float32", Mode.FORWARD))


def fails(x: Tensor) -> Tensor:
    raise ArithmeticError("no such thing")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fails, r"made \(draw 0\): the FP64 oracle raised ArithmeticError: no such thing"),
        (lambda x: x if exact(x) else fails(x), "eager float32 on the CPU raised ArithmeticError"),
        (lambda x: x * float("nan"), r"made \(draw 0\): the FP64 oracle is NaN at out"),
        (lambda x: (x, {"a": x / 0 * 0}), r"NaN at out\[1\]\['a'\]"),
        (lambda x: x[:0], "no elements to compare"),
        (lambda _: (), "no elements to compare"),
        (
            lambda x: x if exact(x) else x * 1.01,
            r"eager float32 on the CPU errs .* times more than rounding explains \(limit 4\), most at out:",
        ),
        (lambda x: x if exact(x) else x[:4], r"disagree: out has the shapes \(8, 8\) and \(4, 8\)"),
        (lambda x: x if exact(x) else (x, x), r"disagree: only one has out, out\[0\], out\[1\]"),
        (lambda x: (x.argmax(-1) if exact(x) else x.argmin(-1), x), r"disagree: out\[0\]: 8 of 8 integers differ"),
        (
            lambda x: (x * 1.1).sin() - (x * 1.1).sin(),
            r"out: the budget of view .* is inf; legal are finite numbers from 0",
        ),
        (lambda _: "text", "expected a tensor"),
    ],
)
def test_an_oracle_that_cannot_be_trusted_is_an_error(function: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(OracleError, match=message):
        computed(function)


def large(function: Callable[[Tensor], Any]) -> Workload:
    """A workload of a function of one 512x512 tensor."""
    return Workload("large", "Large.", lambda g, _: Problem(Calls(function), (torch.randn(512, 512, generator=g),)))


def wrong_by(share: float) -> Workload:
    """Products, one of which is wrong in eager by so many root mean squares."""

    def function(x: Tensor) -> Tensor:
        out = x * 1.25
        if not exact(x):
            out[100, 200] += share * out.float().square().mean().sqrt().item()
        return out

    return large(function)


# Twice the most that a correct rounding of the largest of 2^18 normal numbers may err, 4.9 deviations.
@pytest.mark.parametrize(("dtype", "share", "most"), [("bfloat16", 5.7, 0.04), ("float32", 6e-5, 6e-7)])
def test_an_element_that_eager_has_wrong_widens_no_budget(dtype: str, share: float, most: float) -> None:
    reference = compute(Source(wrong_by(share), PLAIN, 1, dtype, Mode.FORWARD))
    right = compute(Source(large(lambda x: x * 1.25), PLAIN, 1, dtype, Mode.FORWARD))
    assert 1.0 < reference.eager_excess <= TRUST  # over all elements it errs no more than a peer may
    assert abs(reference.eager["out"]["element"]) == pytest.approx(share, rel=0.01)
    assert reference.budgets["out"]["element"] == reference.alone["out"]["element"] < most
    for view in ("row", "column", "block", "element"):
        assert reference.budgets["out"][view] == right.alone["out"][view]


def test_what_the_samples_explain_of_eager_is_in_the_budgets() -> None:
    # Half as wrong again as the worst sample.
    right = compute(Source(large(lambda x: x * 1.25), PLAIN, 1, "bfloat16", Mode.FORWARD))
    share = 0.75 * right.alone["out"]["element"]
    reference = compute(Source(wrong_by(share), PLAIN, 1, "bfloat16", Mode.FORWARD))
    assert (
        reference.budgets["out"]["element"]
        == SLACK * abs(reference.eager["out"]["element"])
        > reference.alone["out"]["element"]
    )
    assert reference.without_eager.budgets["out"]["element"] == right.alone["out"]["element"]
    assert reference.without_eager.sticks is reference.sticks
    assert not reference.without_eager.eager


def test_an_oracle_may_be_infinite_where_eager_is() -> None:
    reference = computed(lambda x: torch.where(x > 0, float("inf"), x * 2))
    assert bool(reference.truth["out"].isinf().any())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_budget_of_a_gate_is_infinite_or_absurd(dtype: str) -> None:
    # A relative error of 1 is what a tensor of zeros has.
    for name in ("matmul", "matmul-empty", "mlp", "attention-65", "layer-norm-narrow"):
        for mode in (Mode.FORWARD, Mode.BACKWARD):
            reference = compute(Source(built_in()[name], PLAIN, 7, dtype, mode))
            for path, budgets in reference.budgets.items():
                assert budgets["row"] < 0.35, (name, path)
                assert budgets["gain"] < 0.1, (name, path)


@pytest.mark.parametrize("technique", ["amp-bf16", "amp-fp16", "eager"])
def test_rounding_does_not_decide_what_convolution_networks_compute(technique: str) -> None:
    # Under amp-fp16 an element of `cnn`'s gradients might err by 1.6 root mean squares, in `residual-block` by 4.8.
    used = Matrix.load().techniques[technique]
    most = {"amp-bf16": 1.4, "amp-fp16": 0.25, "eager": 1e-3}[technique]
    for name in ("cnn", "residual-block", "cnn-frozen-norm"):
        reference = compute(Source(built_in()[name], used, stable_seed(name), "float32", Mode.BACKWARD))
        assert max(budgets["element"] for budgets in reference.budgets.values()) < most, name


class Single(Planted):
    def precision(self, dtype: str) -> str:
        return "float16"


def test_a_budget_that_any_fault_is_within_is_an_error_that_says_what_to_change() -> None:
    # Numbers of about 1 are what rounding leaves of a sum of about 1024, and whether they pass the ReLU is chance.
    def undecided(x: Tensor) -> Tensor:
        return torch.relu((x + 1024) - 1024)

    assert compute(Source(made(undecided), PLAIN, 1, "float32", Mode.FORWARD)).truth
    with pytest.raises(OracleError, match=r"out: the budget of view row is .* unit roundoffs; the cap is .* ReLU"):
        compute(Source(made(undecided), Single(nothing), 1, "float32", Mode.FORWARD))


@pytest.mark.parametrize("precision", ["float32", "tf32", "float16", "bfloat16"])
def test_no_cap_admits_a_row_of_zeros(precision: str) -> None:
    unit = UNIT_ROUNDOFF[precision]
    truth = torch.randn(16, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    zeros = Yardstick(truth, unit).read(torch.zeros_like(truth))
    assert abs(zeros["row"]) > cap("row", unit, (8, 100))
    assert abs(zeros["gain"]) > cap("gain", unit, (8, 100))
    limit = cap("row", unit, (8, 100))
    assert beyond({"row": limit}, unit, (8, 100)) == ""
    assert "the budget of view row" in beyond({"row": 1.01 * limit}, unit, (8, 100))
    assert beyond({"row": 1.0}, unit, (1,)) == ""


def test_a_row_of_few_elements_is_capped_by_its_block() -> None:
    unit = UNIT_ROUNDOFF["bfloat16"]
    assert beyond({"row": 1.0, "block": 0.6}, unit, (16, 8, 3, 3)) == ""
    assert "the budget of view block is 0.7" in beyond({"row": 1.0, "block": 0.7}, unit, (16, 8, 3, 3))


def test_more_samples_lower_a_budget_to_its_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (of_few_samples, sample_budgets):
        monkeypatch.setattr(module, "cap", lambda *_: 1e-9)
    monkeypatch.setattr(sample_budgets, "beyond", lambda *_: "")
    workload = seeded("mlp")
    chosen = case(workload)
    few, more = (compute(Source(workload, PLAIN, chosen.seed, chosen.dtype, chosen.mode), careful=c) for c in (0, 1))
    assert max(few.alone["out"].values()) > 1e-9 >= max(more.alone["out"].values())


def test_integers_that_rounding_decides_cannot_be_judged() -> None:
    # Beyond one half or not, by less than bfloat16's unit: correct implementations give either.
    with pytest.raises(OracleError, match=r"disagree: out: \d+ of 64 integers differ"):
        computed(lambda x: x * 0 + 0.5 + 1e-4 * x.sign() > 0.5, "bfloat16")


def test_a_draw_has_a_reference_of_its_own(tmp_path: Path) -> None:
    store, workload = Store(tmp_path), seeded("mlp")
    chosen = case(workload)
    result = [store.get(chosen, PLAIN, workload, draw) for draw in (Draw(), Draw(1), Draw(0, "zeros"))]
    assert not torch.equal(result[0].truth["out"], result[1].truth["out"])
    assert len(list(tmp_path.glob("*.pt"))) == 3
    # Of a probe half as many samples; one more that rounds to nearest.
    counts = [effort.SAMPLES, effort.SAMPLES, effort.PROBE_SAMPLES]
    assert [len(reference.leanings["out"]["gain"]) for reference in result] == [count + 1 for count in counts]


def test_the_oracle_of_a_draw_is_what_its_parameters_and_inputs_give(tmp_path: Path) -> None:
    workload = seeded("mlp")
    chosen = case(workload)
    problem = Draw(2).problem(workload, chosen.seed, "float32")
    program = Program.of(problem, dtype=torch.float64)
    assert torch.equal(
        program.run(Mode.FORWARD)["out"], Store(tmp_path).get(chosen, PLAIN, workload, Draw(2)).truth["out"]
    )


def test_where_nan_comes_in_eager_is_no_judge_of_the_oracle() -> None:
    # As a kernel that takes NaN for 0 does.
    workload = made(lambda x: 2 * x if exact(x) else 2 * x.nan_to_num())
    reference = compute(Source(workload, PLAIN, 1, "float32", Mode.FORWARD, Draw(0, "nan[0]")))
    assert int(reference.truth["out"].isnan().sum()) == 1
    assert all(math.isfinite(budget) for budget in reference.budgets["out"].values())


def test_second_derivatives_are_in_the_oracle_of_those_that_have_them(tmp_path: Path) -> None:
    store, workload = Store(tmp_path), seeded("custom-function")
    chosen = case(workload, Mode.BACKWARD)
    twice, once = (store.get(chosen, technique, workload).truth.keys() for technique in (PLAIN, Once(nothing)))
    assert {path for path in twice if path.startswith("grad2:")} == twice - once != set()


class Halved(torch.autograd.Function):
    """Squares; its gradient is half of what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x


def test_a_custom_function_with_a_wrong_backward_is_no_oracle() -> None:
    # Eager makes the same mistake: only finite differences show it.
    workload = made(Halved.apply)
    assert compute(Source(workload, PLAIN, 1, "float32", Mode.BACKWARD)).truth
    custom = replace(workload, traits=frozenset({"custom-function"}))
    with pytest.raises(OracleError, match=r"made \(draw 0\): the FP64 oracle raised GradcheckError"):
        compute(Source(custom, PLAIN, 1, "float32", Mode.BACKWARD))


class Doubled(torch.autograd.Function):
    """Twice its input; its gradient is taken to be 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 3
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.factor * grads[0]


class SquaredOnce(torch.autograd.Function):
    """Squares with a right gradient, whose own gradient is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * Doubled.apply(x)  # type: ignore[no-untyped-call]  # untyped in torch


def test_a_custom_function_with_a_wrong_second_backward_is_no_oracle() -> None:
    once = replace(made(SquaredOnce.apply), traits=frozenset({"custom-function"}))
    assert compute(Source(once, PLAIN, 1, "float32", Mode.BACKWARD)).truth
    twice = replace(once, traits=once.traits | {"twice-differentiable"})
    with pytest.raises(OracleError, match="GradcheckError"):
        compute(Source(twice, PLAIN, 1, "float32", Mode.BACKWARD))


def test_budgets_are_deterministic() -> None:
    torch.manual_seed(1)
    reference = compute(Source(built_in()["cnn"], PLAIN, 3, "float32", Mode.BACKWARD))
    torch.manual_seed(2)
    two = compute(Source(built_in()["cnn"], PLAIN, 3, "float32", Mode.BACKWARD))
    assert reference.budgets == two.budgets


def test_truth_is_of_the_stored_numbers() -> None:
    # What a dtype cannot hold is not the candidate's error.
    truth = computed(lambda x: x, "bfloat16").truth["out"]
    assert truth.dtype == torch.float64
    assert torch.equal(truth, truth.bfloat16().double())


class Emulating(Planted):
    """Has an oracle of its own, that a factor shows."""

    def __init__(self, name: str, factor: float) -> None:
        super().__init__(nothing)
        self.factor = factor
        self._oracle = name

    @property
    def oracle(self) -> str:
        return self._oracle

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return Calls(lambda *values: module(*values) * self.factor)


def test_oracles_are_kept_apart_by_name(tmp_path: Path) -> None:
    store, workload = Store(tmp_path), seeded("mlp")
    plain, half, third = (
        store.get(case(workload), technique, workload).truth["out"]
        for technique in (PLAIN, Emulating("halved", 0.5), Emulating("thirds", 1 / 3))
    )
    assert torch.allclose(half, plain * 0.5, rtol=1e-12)
    assert torch.allclose(third, plain / 3, rtol=1e-12)
    assert len(list(tmp_path.glob("*.pt"))) == 3


def test_techniques_of_one_oracle_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, workload, count = Store(tmp_path), seeded("mlp"), list[int]()
    plain = oracle.compute

    def counted(*given: Any, **more: Any) -> Any:
        count.append(1)
        return plain(*given, **more)

    monkeypatch.setattr(oracle, "compute", counted)
    for technique in (Planted(nothing), Planted(nothing, warmups=1)):
        store.get(case(workload), technique, workload)
    assert len(count) == 1


@pytest.mark.parametrize(
    ("mode", "dtype"), [(Mode.BACKWARD, "float32"), (Mode.FORWARD, "bfloat16"), (Mode.FORWARD, "float16")]
)
def test_another_mode_or_dtype_has_another_reference(mode: Mode, dtype: str, tmp_path: Path) -> None:
    store, workload = Store(tmp_path), seeded("mlp")
    assert store.get(case(workload), PLAIN, workload) is not store.get(case(workload, mode, dtype), PLAIN, workload)
    assert len(list(tmp_path.glob("*.pt"))) == 2


def test_no_rounding_sample_outlives_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    sample = Oracle.sample

    def watched(self: Oracle, *arguments: Any) -> Any:
        assert not [reference for reference in alive if reference() is not None]
        result = sample(self, *arguments)
        alive.extend(weakref.ref(tensor) for path, tensor in result.items() if path.startswith("grad"))
        return result

    monkeypatch.setattr(Oracle, "sample", watched)
    compute(Source(seeded("mlp"), PLAIN, 1, "float32", Mode.BACKWARD))
    assert len(alive) >= effort.SAMPLES


def test_a_large_reference_is_mapped_and_has_the_numbers_of_a_small_one(tmp_path: Path) -> None:
    large = Workload("large", "Large.", lambda g, _: Problem(Calls(torch.relu), (torch.randn(400, 400, generator=g),)))
    computed_here = compute(Source(large, PLAIN, case(large).seed, "float32", Mode.FORWARD))
    reference = Store(tmp_path).get(case(large), PLAIN, large)
    assert torch.equal(reference.truth["out"], computed_here.truth["out"])
    assert reference.budgets == computed_here.budgets
    assert str(tmp_path) in Path("/proc/self/maps").read_text()


def test_large_references_are_forgotten_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, workload = Store(tmp_path), seeded("mlp")
    monkeypatch.setattr(oracle, "REMEMBERED_BYTES", 1)
    first = store.get(case(workload), PLAIN, workload)
    assert store.get(case(workload), PLAIN, workload) is first  # the last one always stays
    store.get(case(workload), PLAIN, workload, Draw(1))
    assert store.get(case(workload), PLAIN, workload) is not first


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
def test_a_nan_beside_numbers_is_a_result_to_be_had_too(mode: Mode) -> None:
    workload = made(torch.sqrt)
    reference = compute(Source(workload, PLAIN, 1, "float32", mode))
    assert 0 < int(reference.truth["out"].isnan().sum()) < reference.truth["out"].numel()
    path = "out" if mode is Mode.FORWARD else "grad:input[0]"
    assert not judge({**reference.truth}, reference).faults
    (fault,) = judge({**reference.truth, path: reference.truth[path].nan_to_num()}, reference).faults
    assert (fault.kind, fault.view) == (FaultKind.PATTERN, "NaN")


def test_a_tensor_of_nan_alone_is_a_result_where_an_input_has_one() -> None:
    def maker(_: torch.Generator, __: int) -> Problem:
        return Problem(Calls(lambda x: x.amax()), (torch.tensor([1.0, torch.nan]),))

    reference = compute(Source(Workload("made", "Made.", maker), PLAIN, 1, "float32", Mode.FORWARD))
    assert [fault.view for fault in judge({"out": torch.tensor(1.0)}, reference).faults] == ["NaN"]
    assert not judge({"out": torch.tensor(torch.nan)}, reference).faults


def test_eager_that_has_a_nan_of_its_own_is_wrong() -> None:
    reference = computed(lambda x: x if exact(x) else torch.where(x > 1.0, torch.nan, x))
    assert reference.eager_unlike.startswith("out: isnan holds for 0 and ")
    assert not judge({**reference.truth}, reference).faults


def test_eager_that_overflows_as_its_operators_must_is_an_error() -> None:
    with pytest.raises(OracleError, match="disagree: out: isposinf holds"):
        computed(lambda x: (x.abs() + 1.0) * 1e30 * 1e30 / 1e30)
