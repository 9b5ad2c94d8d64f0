"""Items of a compute platform: right ones pass, wrong ones fail, absent ones are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import needs_python_backends
from process_harness import python
from technique_harness import StubDevice
from torch.utils._python_dispatch import TorchDispatchMode

from accelcheck.checks.platform import collectives, dtypes, extension, items, loading, modes, profiling
from accelcheck.checks.trial import Trial
from accelcheck.core.case import HOST_RATIO, TIMED, Case, Mode, Verdict
from accelcheck.core.selection import Selection
from accelcheck.devices import devices
from accelcheck.devices.base import Device
from accelcheck.measure.paired import Comparison, SpeedVerdict
from accelcheck.report.assessment import assess
from accelcheck.report.quality import tables
from accelcheck.report.run import load
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.platform import TECHNIQUES
from accelcheck.verify.oracle import Store
from accelcheck.workloads.platform import WORKLOADS

BY_NAME = {workload.name: workload for workload in WORKLOADS}
DTYPES = [name for name in BY_NAME if name.startswith(dtypes.PREFIX)]


def trial(name: str, device: Device | None = None, store: Store | None = None) -> Trial:
    place = StubDevice() if device is None else device
    case = Case("platform", name, place.name, "float32", Mode.PLATFORM, 1)
    made: Any = store
    return Trial(case, TECHNIQUES[0], BY_NAME[name], place, made)


class Planted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Changes results of one operator in one dtype, in place."""

    def __init__(self, name: str, dtype: torch.dtype, change: Callable[[torch.Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.name, self.dtype, self.change = name, dtype, change
        self.hits = 0

    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().startswith(f"aten::{self.name}") and isinstance(out, torch.Tensor) and out.dtype is self.dtype:
            self.hits += 1
            self.change(out)
        return out


def one_more(out: torch.Tensor) -> None:
    """One element is the next number."""
    out.view(-1)[-1:].add_(1)


def saturated(out: torch.Tensor) -> None:
    """Saturates a result: the largest number replaces the smallest, to which it wrapped around."""
    out[out == torch.iinfo(out.dtype).min] = torch.iinfo(out.dtype).max


def truncated(out: torch.Tensor) -> None:
    """The last bit of the significand is cut off."""
    out.view(torch.int16).bitwise_and_(-2)


def one_bit(out: torch.Tensor) -> None:
    """The lowest bit of each element is another."""
    out.view(torch.uint8).bitwise_xor_(1)


def test_every_dtype_of_the_cpu_is_right_in_all_that_torch_has() -> None:
    for name in DTYPES:
        finding = dtypes.verify(trial(name))
        assert finding.faults == [], name
        assert finding.compared > 1000
        assert all(entry.engaged for entry in finding.evidence)


@pytest.mark.parametrize(
    ("name", "where", "dtype", "change", "said"),
    [
        ("int8", "add", torch.int8, saturated, "int8 added"),
        ("int8", "_to_copy", torch.int8, saturated, "int8 cast from int64"),
        ("int16", "mul", torch.int16, one_more, "int16 multiplied"),
        ("int32", "sum", torch.int64, one_more, "int32 summed"),
        ("int64", "mm", torch.int64, one_more, "int64 matrix product"),
        ("int64", "max", torch.int64, one_more, "int64 largest"),
        ("float16", "mul", torch.float16, truncated, "float16 multiplied"),
        ("bfloat16", "add", torch.bfloat16, truncated, "bfloat16 added"),
        ("bfloat16", "clone", torch.bfloat16, truncated, "bfloat16 copied on the device"),
        ("float8", "_to_copy", torch.float8_e4m3fn, one_bit, "float8_e4m3fn cast from float32"),
        ("float8", "_to_copy", torch.float8_e5m2, one_bit, "float8_e5m2 cast from float32"),
        ("float4", "floor", torch.float32, one_more, "float4 unpacked"),
        ("int4", "mm", torch.float32, one_more, "int4 matrix product"),
    ],
)
def test_an_operation_that_is_wrong_is_named(
    name: str, where: str, dtype: torch.dtype, change: Callable[[torch.Tensor], object], said: str
) -> None:
    with Planted(where, dtype, change) as planted:
        finding = dtypes.verify(trial(f"dtype-{name}"))
    assert planted.hits
    assert any(f"{fault.path}{fault.place}".startswith(said) for fault in finding.faults), finding.faults


class Without(StubDevice):
    """A device whose tensors of some dtypes cannot be made: `why` is raised."""

    def __init__(self, dtype: torch.dtype, why: Exception) -> None:
        super().__init__()
        self.dtype, self.why = dtype, why

    def refusing(self) -> TorchDispatchMode:
        device = self

        class Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if (kwargs or {}).get("dtype") is device.dtype and func.name().startswith("aten::zeros"):
                    raise device.why
                return func(*args, **(kwargs or {}))

        return Refusing()  # type: ignore[no-untyped-call]  # untyped in torch


@pytest.mark.parametrize(
    "why",
    [
        NotImplementedError('"fill" not implemented for it'),
        TypeError("Cannot convert a toy tensor to it"),
        RuntimeError("toy doesn't support it"),
        RuntimeError("Unsupported XLA type 20"),
    ],
)
def test_a_dtype_that_the_device_refuses_is_unsupported_and_found_by_trying(why: Exception) -> None:
    device = Without(torch.bfloat16, why)
    with device.refusing(), pytest.raises(Unsupported, match="stub has no bfloat16: made") as caught:
        dtypes.verify(trial("dtype-bfloat16", device))
    assert caught.value.capability.tried
    with device.refusing():
        assert dtypes.verify(trial("dtype-float16", device)).faults == []


def test_an_exception_that_is_no_refusal_is_raised() -> None:
    device = Without(torch.bfloat16, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with device.refusing(), pytest.raises(RuntimeError, match="illegal memory access"):
        dtypes.verify(trial("dtype-bfloat16", device))


class Falling(StubDevice):
    """Sums run on the CPU."""

    def fallbacks(self) -> dict[str, int]:
        return {"aten::sum": 1}


def test_an_operation_that_runs_on_the_cpu_is_not_there() -> None:
    with pytest.raises(Unsupported, match="ran on the CPU: aten::sum"):
        dtypes.verify(trial("dtype-int8", Falling("toy")))


def test_a_result_on_another_device_is_a_fault() -> None:
    finding = dtypes.verify(trial("dtype-int8", StubDevice("toy")))
    assert "int8 made: device: expected toy, got cpu" in map(str, finding.faults)


def test_eager_mode_of_the_cpu_is_right_and_is_the_host_itself(tmp_path: Path) -> None:
    finding = modes.verify(trial("eager-inference", devices()["cpu"], Store(tmp_path)))
    assert (finding.faults, finding.compared) == ([], 1280)
    (figure,) = finding.measurements
    assert (figure.name, figure.value, figure.reason) == (HOST_RATIO, 1.0, "the device is the host's CPU")


def test_another_device_is_timed_beside_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def compare(base: Callable[[], float], candidate: Callable[[], float]) -> Comparison:
        seen.extend((base() > 0, candidate() > 0))
        return Comparison(SpeedVerdict.SLOWER, 2.0, 1.9, 2.1, 9, 1.0, (1.0,), (2.0,))

    monkeypatch.setattr(modes, "compare", compare)
    monkeypatch.setattr(modes, "settle", lambda timed: timed())
    own = modes._as(trial("eager-training", StubDevice(), Store(tmp_path)), Eager(), Mode.TRAIN)
    host = modes._as(trial("eager-training", devices()["cpu"], Store(tmp_path)), Eager(), Mode.TRAIN)
    assert modes._timed(host, own).ratio == 2.0
    assert seen == [True, True]
    monkeypatch.setattr(modes, "_timed", lambda *_: compare(lambda: 1.0, lambda: 2.0))
    (figure,) = modes._beside_host(replace(own, device=StubDevice("toy")))
    assert (figure.value, figure.low, figure.high) == (2.0, 1.9, 2.1)
    assert figure.reason == "slower, 9 pairs, beside FP32 eager on the host's CPU"


def test_a_device_without_a_compiler_has_no_graph_mode(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="inductor has no code generator registered for device type 'toy'"):
        modes.verify(trial("graph-inference", StubDevice("toy", ()), Store(tmp_path)))


@pytest.mark.parametrize(("added", "faults"), [(0.0, []), (1.0, ["C++ operator multiply_add[0]"])])
def test_extensions_operators_must_be_right(added: float, faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in Python here, since the suite itself compiles it."""
    name = f"accelcheck_platform_{int(added)}"

    def load(library: str, source: str, **options: Any) -> None:
        assert "TORCH_LIBRARY" in source
        make: Any = torch.library.Library
        made = make(library, "FRAGMENT")
        made.define("multiply_add(Tensor one, Tensor two) -> Tensor")
        made.impl("multiply_add", lambda a, b: torch.add(torch.mul(a, b), a) + added, "CompositeImplicitAutograd")
        kept.append(made)

    kept: list[Any] = []
    monkeypatch.setattr(extension, "LIBRARY", name)
    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load)
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")
    finding = extension.verify(trial("cpp-extension"))
    assert ([f"{fault.path}{fault.place}" for fault in finding.faults], finding.compared) == (faults, 64)
    assert all(entry.engaged for entry in finding.evidence)


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match="needs no-such-compiler") as caught:
        extension.verify(trial("cpp-extension"))
    assert caught.value.capability.verdict is Verdict.UNAVAILABLE


@pytest.mark.slow
def test_ranks_add_up_what_each_has() -> None:
    finding = collectives.verify(trial("distributed-backend", devices()["cpu"]))
    assert (finding.faults, finding.compared) == ([], 2 * (64 + 128))
    assert [entry.observed for entry in finding.evidence] == [2, "gloo", "cpu"]


def test_an_all_reduce_that_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(device: Device, own: list[torch.Tensor]) -> list[dict[str, Any]]:
        rows = torch.stack(own)
        return [{"all-reduce": own[0], "all-gather": rows, "backend": "toy", "device": "cpu"}] * 2

    monkeypatch.setattr(collectives, "_run", run)
    finding = collectives.verify(trial("distributed-backend", devices()["cpu"]))
    assert [fault.path for fault in finding.faults] == ["all-reduce of rank 0", "all-reduce of rank 1"]


def test_the_profiler_names_operators_and_their_times() -> None:
    finding = profiling.verify(trial("profiler"))
    assert finding.faults == []
    assert all(entry.engaged for entry in finding.evidence)
    assert finding.compared == 320


def test_a_profiler_that_sees_nothing_of_the_device_does_not_count() -> None:
    with pytest.raises(Unsupported, match="shows operators, and nothing of what stub does"):
        profiling.verify(trial("profiler", StubDevice("toy")))


@pytest.mark.slow
def test_what_is_hidden_is_gone_and_torch_is_imported_all_the_same() -> None:
    finding = loading.without_hardware(trial("import-without-hardware", devices()["cuda"]))
    assert finding.faults == []
    assert "CUDA_VISIBLE_DEVICES empty = 0" in finding.evidence[1].claim


@pytest.mark.slow
def test_a_device_of_another_package_is_hidden_by_the_mask_that_it_names() -> None:
    device = StubDevice("toy")
    with pytest.raises(Unsupported, match="no environment variable is known that hides stub"):
        loading.without_hardware(trial("import-without-hardware", device))
    device.mask = "TOY_VISIBLE_DEVICES"  # type: ignore[misc]  # of its class, for this one
    finding = loading.without_hardware(trial("import-without-hardware", device))
    assert "TOY_VISIBLE_DEVICES empty = 0" in finding.evidence[1].claim
    assert finding.faults == []


def test_a_cpu_cannot_be_hidden() -> None:
    with pytest.raises(Unsupported, match="which no machine is without"):
        loading.without_hardware(trial("import-without-hardware", devices()["cpu"]))


def test_every_workload_of_the_platform_has_a_check_and_is_at_level_1() -> None:
    cases = Matrix.load().cases(Selection(("cpu",), techniques=("platform",)))
    assert sorted(case.workload for case in cases) == sorted(BY_NAME)
    assert {case.workload for case in cases if case.alone} == {
        f"{m}-{w}" for m in ("eager", "graph") for w in modes.WORK
    }
    assert not any(case.timed for case in cases)
    known = {*items.ITEMS, *DTYPES, *(name for name in BY_NAME if name.partition("-")[0] in {"eager", "graph"})}
    assert set(BY_NAME) == known
    assert not TIMED.keys() & {case.mode for case in cases}


def test_an_unknown_item_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a dtype's workload or one of distributed-backend"):
        items.verify(replace(trial("profiler"), case=Case("platform", "mlp", "cpu", "float32", Mode.PLATFORM, 1)))


LAME = """
import torch
import toy_backend
from torch.utils import _pytree as pytree

plain, empty = toy_backend._call, toy_backend._empty


def lame(operator, *args, **kwargs):
    given = pytree.tree_leaves((args, kwargs))
    dtypes = {getattr(value, "dtype", value) for value in given if isinstance(value, (torch.Tensor, torch.dtype))}
    if torch.bfloat16 in dtypes:
        raise NotImplementedError(f"{operator} is not implemented for bfloat16 on toy")
    out = plain(operator, *args, **kwargs)
    if operator.name().startswith("aten::add") and isinstance(out, torch.Tensor) and out.dtype is torch.int8:
        left, right = (toy_backend._inside(value).short() for value in args[:2])
        toy_backend._inside(out).copy_((left + right).clamp(-128, 127))
    return out


def without(size, *args, dtype=None, **kwargs):
    if dtype is torch.bfloat16:
        raise NotImplementedError("empty is not implemented for bfloat16 on toy")
    return empty(size, *args, dtype=dtype, **kwargs)


toy_backend._call, toy_backend._empty = lame, without
toy_backend.load()
"""


@pytest.mark.slow
@needs_python_backends
def test_a_device_without_bfloat16_and_with_a_wrong_int8_loses_exactly_these_points(tmp_path: Path) -> None:
    (tmp_path / "vendor_lame.py").write_text(LAME)
    journal = tmp_path / "lame.jsonl"
    words = ["--pyargs", "accelcheck.suite.test_platform", "--accel-device=toy", "--accel-import=vendor_lame"]
    words += ["--accel-workload=dtype-*", "--accel-workload=import-*", f"--accel-journal={journal}", "-q", "-n", "0"]
    ran = python(tmp_path, "-m", "pytest", *words)
    (run,) = load([journal])
    verdicts = {record.case.workload: record.verdict for record in run.records}
    assert verdicts["import-with-hardware"] is Verdict.PASS, ran.stdout
    assessment = assess(run, tables())
    points = {r.item.name: r for t in assessment.tables for r in t.results if r.item.name in DTYPES}
    assert len(points) == len(DTYPES) == assessment.evidenced + 2
    lost = {name: result.lacking for name, result in points.items() if not result.evidenced}
    assert lost.keys() == {"dtype-bfloat16", "dtype-int8"}
    assert "unsupported: [no-dtype] toy has no bfloat16" in lost["dtype-bfloat16"]
    assert "fail: int8 added" in lost["dtype-int8"]
