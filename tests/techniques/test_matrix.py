"""The matrix: the same ids in the same order on every machine, and exactly what was asked for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_harness import Planted
from process_harness import completed

from accelcheck.core.case import DTYPES, LEVELS, Mode
from accelcheck.core.registry import DuplicateNameError, UnknownNameError, index
from accelcheck.core.selection import Selection
from accelcheck.devices import devices
from accelcheck.selftest.faults.plant import nothing
from accelcheck.techniques.matrix import Matrix, level
from accelcheck.workloads.base import Problem, Workload

if TYPE_CHECKING:
    import torch

    from accelcheck.techniques.base import Technique

ROOT = Path(__file__).parents[2]
EVERYTHING = Selection(("cpu", "xla"), level=max(LEVELS))


def make(generator: torch.Generator, extent: int) -> Problem:
    raise AssertionError("the matrix makes no problem")


def technique(
    name: str,
    *,
    cost: int = 1,
    dtypes: tuple[str, ...] = ("float32",),
    modes: frozenset[Mode] = frozenset(Mode),
    requires: frozenset[str] = frozenset(),
    excludes: frozenset[str] = frozenset(),
    early: frozenset[str] = frozenset(),
) -> Technique:
    made = Planted(nothing)
    made.name, made.level, made.modes = name, cost, modes
    made.dtypes = dtypes  # type: ignore[assignment]  # inferred as a tuple of three from the class
    made.requires, made.excludes, made.early = requires, excludes, early
    return made


def workload(name: str, cost: int = 1, *traits: str, modes: frozenset[Mode] | None = None) -> Workload:
    kinds = frozenset({Mode.FORWARD, Mode.BACKWARD}) if modes is None else modes
    return Workload(name, "A stub.", make, cost, kinds, frozenset(traits))


def of(techniques: list[Technique], workloads: list[Workload]) -> Matrix:
    return Matrix(index("technique", techniques), index("workload", workloads))


SMALL = of(
    [
        technique("zoom", dtypes=DTYPES),
        technique("amp-bf16"),
        technique("amp-fp16", modes=frozenset({Mode.FORWARD})),
        technique("slow", cost=3),
        technique("conv-only", requires=frozenset({"conv"})),
        technique("no-branch", excludes=frozenset({"branching"})),
    ],
    [workload("mlp"), workload("cnn", 2, "conv"), workload("tree", 1, "branching")],
)


def ids(selection: Selection, among: Matrix = SMALL) -> list[str]:
    return [case.id for case in among.cases(selection)]


@pytest.fixture(scope="module")
def whole() -> Matrix:
    return Matrix.load()


def test_every_id_is_unique_and_says_what_it_is(whole: Matrix) -> None:
    cases = whole.cases(EVERYTHING)
    assert len({case.id for case in cases}) == len(cases) > 1000
    for case in cases:
        assert case.id == f"{case.technique}/{case.workload}/{case.device}/{case.dtype}/{case.mode}"
        assert case.id.count("/") == 4
        assert case.dtype in DTYPES
        assert case.level in LEVELS


def test_cases_are_sorted_by_device_as_asked_then_technique_then_workload(whole: Matrix) -> None:
    for order in (("cpu", "xla"), ("xla", "cpu")):
        cases = whole.cases(Selection(order, level=4))
        keys = [(order.index(case.device), case.technique, case.workload) for case in cases]
        assert keys == sorted(keys)


def test_techniques_and_workloads_are_in_order_whatever_order_they_were_registered_in() -> None:
    turned = of(list(SMALL.techniques.values())[::-1], list(SMALL.workloads.values())[::-1])
    assert ids(EVERYTHING, turned) == ids(EVERYTHING)


PRINT = """
import hashlib
from accelcheck.core.selection import Selection
from accelcheck.techniques.matrix import Matrix
cases = Matrix.load().cases(Selection(("cpu", "xla"), level=4))
print(hashlib.sha256("\\n".join(f"{case.id} {case.level} {case.seed}" for case in cases).encode()).hexdigest())
"""


@pytest.mark.slow
def test_ids_order_levels_and_seeds_do_not_depend_on_the_process(whole: Matrix) -> None:
    digests = {
        subprocess.check_output(
            [sys.executable, "-c", PRINT],
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
        ).strip()
        for seed in ("0", "1")
    }
    lines = (f"{case.id} {case.level} {case.seed}" for case in whole.cases(EVERYTHING))
    assert digests == {hashlib.sha256("\n".join(lines).encode()).hexdigest()}


@pytest.mark.slow
def test_the_registry_imports_no_compiler() -> None:
    """They take longer than torch itself, and a run that only collects needs none of them."""
    code = (
        "import sys, torch; before = set(sys.modules); "
        "from accelcheck.techniques.matrix import Matrix; Matrix.load(); "
        "heavy = {'torch._inductor', 'torch._dynamo', 'sympy', 'onnxscript', 'openvino'}; "
        "print(sorted(heavy & set(sys.modules) - before))"
    )
    done = completed([sys.executable, "-c", code], check=True)
    assert done.stdout.strip() == "[]"


def test_each_technique_and_workload_is_asked_about_the_other_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def accepts(self: Technique, workload: Workload) -> bool:
        asked.append((self.name, workload.name))
        return True

    monkeypatch.setattr(Planted, "accepts", accepts)
    SMALL.cases(EVERYTHING)
    assert len(asked) == len(set(asked)) == len(SMALL.techniques) * len(SMALL.workloads)


def test_techniques_of_a_workload_share_its_seed() -> None:
    seeds = {(case.workload, case.seed) for case in SMALL.cases(EVERYTHING)}
    assert len(seeds) == len(SMALL.workloads)


@pytest.mark.parametrize(
    ("technique_level", "workload_level", "dtype", "expected"),
    [
        (1, 1, "float32", 1),
        (1, 2, "float32", 2),
        (2, 1, "float32", 2),
        (2, 2, "float32", 3),
        (1, 1, "bfloat16", 2),
        (2, 2, "float16", 4),
        (3, 3, "float16", 4),
    ],
)
def test_levels_add_up_to_the_last(technique_level: int, workload_level: int, dtype: str, expected: int) -> None:
    assert (
        level(technique("t", cost=technique_level, dtypes=DTYPES), workload("w", workload_level), dtype, Mode.FORWARD)
        == expected
    )


def test_the_first_dtype_of_a_technique_costs_nothing() -> None:
    assert level(technique("t", dtypes=("bfloat16", "float32")), workload("w"), "bfloat16", Mode.FORWARD) == 1


def test_an_early_workload_runs_a_level_before_its_cost_and_never_before_the_first() -> None:
    early = frozenset({"w"})
    assert level(technique("t", cost=2, early=early), workload("w"), "float32", Mode.FORWARD) == 1
    assert level(technique("t", cost=1, early=early), workload("w"), "float32", Mode.FORWARD) == 1
    assert level(technique("t", cost=2, early=early), workload("x"), "float32", Mode.FORWARD) == 2


def test_a_workload_names_the_level_of_a_technique_and_of_one_of_its_modes() -> None:
    named = replace(workload("w"), levels={"t": 2, "t/backward": 4})
    assert [level(technique("t"), named, "float32", mode) for mode in (Mode.FORWARD, Mode.BACKWARD)] == [2, 4]


@pytest.mark.parametrize("number", LEVELS)
def test_a_level_holds_those_below_it(number: int) -> None:
    cases = SMALL.cases(Selection(("cpu",), level=number))
    assert {case.level for case in cases} == set(range(1, number + 1)) & {c.level for c in SMALL.cases(EVERYTHING)}


def test_nothing_asked_for_is_everything() -> None:
    assert {case.technique for case in SMALL.cases(EVERYTHING)} == set(SMALL.techniques)


def test_techniques_are_chosen_by_name_and_glob() -> None:
    chosen = SMALL.cases(Selection(("cpu",), techniques=("amp-*", "slow"), level=4))
    assert {case.technique for case in chosen} == {"amp-bf16", "amp-fp16", "slow"}


def test_a_name_is_no_prefix() -> None:
    assert ids(Selection(("cpu",), techniques=("amp",), level=4)) == []


def test_workloads_are_chosen_by_name_and_glob() -> None:
    chosen = SMALL.cases(Selection(("cpu",), workloads=("c*", "tree"), level=4))
    assert {case.workload for case in chosen} == {"cnn", "tree"}


def test_a_thing_that_several_globs_match_runs_once() -> None:
    once = Selection(("cpu",), techniques=("amp-*",), level=4)
    twice = Selection(("cpu",), techniques=("amp-*", "amp-bf16", "*bf16", "amp-fp16"), level=4)
    assert ids(once) == ids(twice)


def test_dtypes_are_chosen() -> None:
    chosen = SMALL.cases(Selection(("cpu",), dtypes=("bfloat16",), level=4))
    assert {(case.technique, case.dtype) for case in chosen} == {("zoom", "bfloat16")}


def test_modes_are_those_of_the_test_the_technique_and_the_workload() -> None:
    assert {c.mode for c in SMALL.cases(EVERYTHING)} == {Mode.FORWARD, Mode.BACKWARD}
    assert {c.mode for c in SMALL.cases(EVERYTHING) if c.technique == "amp-fp16"} == {Mode.FORWARD}
    assert not SMALL.cases(EVERYTHING, [Mode.TRAIN])
    parts = [len(SMALL.cases(EVERYTHING, [mode])) for mode in Mode]
    assert sum(parts) == len(SMALL.cases(EVERYTHING))


def test_a_technique_runs_only_what_it_accepts() -> None:
    assert {c.workload for c in SMALL.cases(EVERYTHING) if c.technique == "conv-only"} == {"cnn"}
    assert {c.workload for c in SMALL.cases(EVERYTHING) if c.technique == "no-branch"} == {"cnn", "mlp"}


def test_an_exact_case_runs_whatever_its_level() -> None:
    wanted = "slow/cnn/cpu/float32/backward"
    assert wanted not in ids(Selection(("cpu",), level=1))
    assert ids(Selection(("cpu",), cases=(wanted,), level=1)) == [wanted]


@pytest.mark.parametrize(
    "selection",
    [
        Selection(("cpu",), techniques=("amp-*",), level=4),
        Selection(("cpu",), workloads=("mlp",), level=4),
        Selection(("cpu",), cases=("slow/cnn/cpu/float32/backward",)),
        Selection(("cpu",), ("slow",), ("cnn",), cases=("slow/cnn/cpu/float32/backward",)),
    ],
)
def test_a_selection_that_has_cases_is_accepted(selection: Selection) -> None:
    assert ids(selection)
    try:
        SMALL.check(selection)
    except UnknownNameError as error:
        pytest.fail(f"expected the selection to be accepted, got: {error}")


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(("cpu",), techniques=("amp-bf61",)), "unknown technique 'amp-bf61'. Did you mean 'amp-bf16'?"),
        (Selection(("cpu",), techniques=("none-*",)), "unknown technique 'none-*'"),
        (Selection(("cpu",), workloads=("mlq",)), "unknown workload 'mlq'. Did you mean 'mlp'?"),
        (Selection(("cpu",), cases=("zoom/mlp/cpu/float32/forwards",)), "nearest: zoom/mlp/cpu/float32/forward,"),
        (Selection(("cpu",), cases=("zoom/mlp/xla/float32/forward",)), "unknown case 'zoom/mlp/xla/float32/forward'"),
    ],
)
def test_what_does_not_exist_is_answered_with_the_nearest(selection: Selection, message: str) -> None:
    with pytest.raises(UnknownNameError) as raised:
        SMALL.check(selection)
    assert message in str(raised.value)


def test_a_technique_or_workload_of_a_taken_name_is_refused() -> None:
    with pytest.raises(DuplicateNameError, match="two techniques are named 'eager'"):
        Matrix.load().extended([technique("eager")], [])
    with pytest.raises(DuplicateNameError, match="two workloads are named 'mlp'"):
        Matrix.load().extended([], [workload("mlp")])


def test_what_others_register_takes_part() -> None:
    more = Matrix.load().extended([technique("theirs")], [workload("their-own")])
    assert "theirs/their-own/cpu/float32/forward" in ids(EVERYTHING, more)


def test_the_devices_are_known_without_torch() -> None:
    known = devices()
    assert list(known) == sorted(known)
    assert {"cpu", "cuda", "rocm", "xla", "tpu"} <= set(known)
