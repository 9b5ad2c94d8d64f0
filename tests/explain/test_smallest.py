"""The smallest case: what shrinks, and the script that it becomes, run alone in a fresh process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from process_harness import forked
from torch import Tensor

from accelcheck.explain import smallest as smallest_module
from accelcheck.explain.budgets import OperatorBudgets
from accelcheck.explain.calls import OperatorCall
from accelcheck.explain.script import LINES, script_of
from accelcheck.explain.smallest import RUNS, Shrinker, Smallest, SmallestRuns, smallest_runs
from accelcheck.explain.source import NotWrittenError, literal, written
from accelcheck.selftest.faults.plant import Kernels

aten = torch.ops.aten
PLANT = """
import torch
from accelcheck.explain.source import NotWrittenError, literal, written
from accelcheck.selftest.faults.plant import Kernels

def wrong(func, *args, **kwargs):
    {body}

Kernels(dict.fromkeys({names!r}, wrong)).__enter__()
"""


def shrunk(
    call: OperatorCall, wrong: Callable[..., Any], dtype: str = "float32", seconds: float = 60.0
) -> Smallest | None:
    """Shrinks a call whose kernel is wrong; with 0 seconds it stays as it is."""
    mode = Kernels({call.name: wrong})

    def run(other: OperatorCall) -> Any:
        with mode:
            return other.run()

    return Shrinker(OperatorBudgets(dtype, dtype), run, seconds=seconds).shrink(call)


def alone(
    smallest: Smallest | SmallestRuns, folder: Path, body: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str], str]:
    """The script run with the plant imported, and without it."""
    name = smallest.call.name
    (folder / "planted_kernel.py").write_text(PLANT.format(body=body, names=(name,)))
    ends = []
    for file, imports in (("wrong.py", ("planted_kernel",)), ("right.py", ())):
        script_of(smallest, "cpu", "A wrong operator.", imports).write(folder / file)
        ends.append(forked(folder / file))
    return ends[0], ends[1], (folder / "right.py").read_text()


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def short(func: Any, a: Tensor, b: Tensor) -> Any:
    return func(a[..., :-1], b[..., :-1, :])


CASES = {
    "a product": (
        lambda: OperatorCall(aten.mm.default, (noise(33, 48), noise(48, 20)), {}),
        "return func(args[0][:, :-1], args[1][:-1])",
    ),
    "in half precision": (
        lambda: OperatorCall(
            aten.mm.default, (noise(16, 48, dtype=torch.bfloat16), noise(48, 8, dtype=torch.bfloat16)), {}
        ),
        "return func(*args) * 1.02",
    ),
    "in place": (
        lambda: OperatorCall(aten.mul_.Tensor, (noise(12, 12), noise(12, 12)), {}),
        "return func(*args).mul_(1.01)",
    ),
    "several results": (
        lambda: OperatorCall(aten.native_layer_norm.default, (noise(6, 24), [24], noise(24), noise(24), 1e-5), {}),
        "out, mean, deviation = func(*args); return out, mean, deviation * 1.001",
    ),
    "a cast": (
        lambda: OperatorCall(aten._to_copy.default, (noise(6, 24),), {"dtype": torch.bfloat16}),
        "return func(args[0] * 1.01, **kwargs)",
    ),
    "strides that matter": (
        lambda: OperatorCall(aten.mm.default, (noise(40, 30)[:, :20], noise(20, 8)), {}),
        "return func(args[0].as_strided(args[0].shape, (args[0].shape[1], 1), args[0].storage_offset()), args[1])",
    ),
    "a NaN": (
        lambda: OperatorCall(aten.exp.default, (noise(12, 12),), {}),
        "out = func(*args); out[..., -1] = float('nan'); return out",
    ),
    "dtypes": (lambda: OperatorCall(aten.cumsum.default, (noise(12, 12) > 0, 1), {}), "return func(*args).bool()"),
    "integers": (lambda: OperatorCall(aten.argmax.default, (noise(12, 12), 1), {}), "return (func(*args) + 1) % 12"),
    "attention": (
        lambda: OperatorCall(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (noise(1, 2, 24, 16), noise(1, 2, 24, 16) + 1, noise(1, 2, 24, 16) - 1),
            {},
        ),
        "return func(args[0], args[1][:, :, :-1], args[2][:, :, :-1])",
    ),
}


QUICK = {"attention", "a product"}
"""Names of `CASES` tried by default: each script is a process that imports torch."""


@pytest.mark.parametrize("what", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_a_script_fails_alone_while_the_fault_is_there(what: str, tmp_path: Path) -> None:
    make, body = CASES[what]
    call: OperatorCall = make()  # type: ignore[no-untyped-call]  # of a lambda
    scope: dict[str, Any] = {}
    exec(f"def wrong(func, *args, **kwargs):\n    {body}", scope)
    smallest = shrunk(call, scope["wrong"], "bfloat16" if "half" in what else "float32")
    assert smallest is not None
    assert sum(tensor.numel() for tensor in smallest.call.tensors()) <= sum(tensor.numel() for tensor in call.tensors())
    wrong, right, text = alone(smallest, tmp_path, body)
    assert wrong.returncode == 1, wrong.stderr + wrong.stdout
    assert right.returncode == 0, right.stderr + right.stdout
    assert "measured" in wrong.stdout
    assert "allowed" in wrong.stdout
    assert len(text.splitlines()) <= LINES
    assert not list(tmp_path.glob("*.pt"))
    imported = {line.split()[1] for line in text.splitlines() if line.startswith("import ")}
    assert imported <= {"json", "math", "sys", "torch"}


def test_sizes_and_values_shrink_to_the_least_that_fails() -> None:
    call = OperatorCall(aten.mm.default, (noise(33, 48), noise(48, 20)), {})
    smallest = shrunk(call, short)
    assert smallest is not None
    assert [list(tensor.shape) for tensor in smallest.call.tensors()] == [[1, 1], [1, 1]]
    assert smallest.values == "ones"


@pytest.mark.parametrize(
    ("call", "body"),
    [
        # The right result is infinite in this dtype.
        (lambda: OperatorCall(aten.mul.Tensor, (big(torch.float16), 2.0), {}), "return func(*args) * 1.1"),
        (lambda: OperatorCall(aten.add.Tensor, (infinite(), noise(6, 8)), {}), "return func(*args) * 1.01"),
        (lambda: OperatorCall(aten._foreach_sqrt.default, ([noise(6, 8) ** 2],), {}), "return [func(*args)[0] * 1.01]"),
    ],
)
def test_a_right_operator_passes_its_script_and_a_wrong_one_does_not(
    tmp_path: Path, call: Callable[[], OperatorCall], body: str
) -> None:
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def wrong(func, *args, **kwargs):\n    {body}", scope)
    dtype = str(call().tensors()[0].dtype).removeprefix("torch.")
    smallest = shrunk(call(), scope["wrong"], dtype, 0.0)  # with the numbers of the call
    assert smallest is not None
    given = Shrinker(OperatorBudgets(), lambda other: other.run())
    assert given.failing(call()) is None
    wrong, right, text = alone(smallest, tmp_path, body)
    assert (wrong.returncode, right.returncode) == (1, 0), wrong.stdout + right.stdout + right.stderr
    assert len(text.splitlines()) <= LINES


def big(dtype: torch.dtype) -> Tensor:
    x = noise(6, 8).abs() + 1
    x[0, 0] = 60000
    return x.to(dtype)


def infinite() -> Tensor:
    x = noise(6, 8)
    x[0, 0] = -torch.inf
    return x


def test_what_has_no_source_has_no_script() -> None:
    with pytest.raises(NotWrittenError, match="an argument is a Generator"):
        literal(torch.Generator())
    with pytest.raises(NotWrittenError, match=r"has no torch\.complex128"):
        written(Path("nowhere"), "", {"t0": torch.zeros(2, dtype=torch.complex128)})


DOWN = (
    "wide = func(*(one.float() for one in args)); half = args[0].dtype == torch.bfloat16; "
    "return (wide.view(torch.int32) & -65536).view(torch.float32).bfloat16() if half else func(*args)"
)
"""Rounds towards zero instead of to the nearest: errors below one rounding error, all in one direction."""


def test_errors_that_point_one_way_have_a_script_of_several_calls(tmp_path: Path) -> None:
    x, y = noise(40, 30, dtype=torch.bfloat16), noise(40, 30, dtype=torch.bfloat16) + 3
    call = OperatorCall(aten.mul.Tensor, (x, y), {})
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def wrong(func, *args, **kwargs):\n    {DOWN}", scope)
    mode = Kernels({"mul": scope["wrong"]})

    def run(other: OperatorCall) -> Any:
        with mode:
            return other.run()

    holder = OperatorBudgets("bfloat16", "bfloat16", 1)
    assert smallest_runs(holder, OperatorCall.run, call) is None
    smallest = smallest_runs(holder, run, call)
    assert smallest is not None
    wrong, right, text = alone(smallest, tmp_path, DOWN)
    assert wrong.returncode == 1, wrong.stderr + wrong.stdout
    assert right.returncode == 0, right.stderr + right.stdout
    assert f"in {RUNS} calls: measured" in wrong.stdout
    assert len(text.splitlines()) <= LINES


def test_what_is_never_written_shows_though_the_last_call_has_left_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned: list[tuple[int, ...]] = []
    monkeypatch.setattr(smallest_module, "_poison", lambda r: poisoned.extend(tuple(result.shape) for result in r))

    def unwritten(func: Any, a: Tensor, b: Tensor) -> Any:
        out = func(a, b)
        if tuple(out.shape) in poisoned:
            out[-1] = torch.nan
        return out

    smallest = shrunk(OperatorCall(aten.mm.default, (noise(33, 48), noise(48, 20)), {}), unwritten)
    assert smallest is not None
    assert "NaN pattern" in smallest.finding.faults[0].what


def test_a_size_is_cut_no_further_than_it_fails() -> None:
    def tail(func: Any, a: Tensor, b: Tensor) -> Any:
        out = func(a, b)
        if a.shape[0] > 17:
            out[17:] = 0
        return out

    call = OperatorCall(aten.mm.default, (noise(33, 48), noise(48, 20)), {})
    smallest = shrunk(call, tail)
    assert smallest is not None
    assert [list(tensor.shape) for tensor in smallest.call.tensors()] == [[18, 1], [1, 1]]


def test_the_last_element_is_found_as_the_first_is() -> None:
    def last(func: Any, x: Tensor) -> Any:
        out = func(x)
        out[x == 9.0] = 0.0
        return out

    x = torch.zeros(17, 33)
    x[-1, -1] = 9.0
    smallest = shrunk(OperatorCall(aten.exp.default, (x,), {}), last)
    assert smallest is not None
    assert [tensor.tolist() for tensor in smallest.call.tensors()] == [[[9.0]]]
    assert smallest.values == "given"


def test_an_operator_that_is_right_when_run_again_has_no_smallest_case() -> None:
    runs: list[int] = []

    def once(func: Any, *args: Any) -> Any:
        runs.append(1)
        return func(*args) * (1.01 if len(runs) > 99 else 1.0)

    assert shrunk(OperatorCall(aten.mm.default, (noise(4, 4), noise(4, 4)), {}), once) is None
