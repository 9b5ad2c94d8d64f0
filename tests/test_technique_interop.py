from __future__ import annotations

import os
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fault_harness import built_in, seeded, verdict_of
from technique_harness import StubDevice, differences, named, plain, run
from torch import Tensor, nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.packages import installed
from accelcheck.techniques.interop import dlpack
from accelcheck.techniques.interop.dlpack import CROSSINGS, TECHNIQUES, Border, JaxBorder, NumpyBorder, dense
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem

NUMPY, JAX, CUPY = (named(TECHNIQUES, name) for name in ("dlpack-numpy", "dlpack-jax", "cupy-zero-copy"))


class Array:
    """What JAX makes of a tensor: shared where it is aligned, else a copy; it refuses what is not dense."""

    def __init__(self, tensor: Tensor) -> None:
        if not dense(tensor):
            raise RuntimeError("UNIMPLEMENTED: Only DLPack tensors with trivial (compact) striding are supported")
        self.tensor = tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()

    def unsafe_buffer_pointer(self) -> int:
        return self.tensor.data_ptr()

    def reshape(self, *sizes: int) -> Tensor:
        return self.tensor.reshape(*sizes)

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(max_version=options.get("max_version"))

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for JAX, as far as a border asks it."""
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    monkeypatch.setitem(sys.modules, "jax.dlpack", SimpleNamespace(from_dlpack=Array))


@pytest.mark.parametrize("name", sorted(dlpack.WORKLOADS))
def test_numpy_shares_every_kind_of_memory(name: str) -> None:
    mode = Mode.TRAIN if "training" in built_in()[name].traits else Mode.BACKWARD
    ran = run(NUMPY, seeded(name).problem(1), mode)
    assert ran.engaged, ran.missing()
    expected = plain(seeded(name).problem(1), mode)
    assert ran.result.keys() == expected.keys()
    assert all(torch.equal(ran.result[path], expected[path]) for path in expected)
    assert all(c.shared for c in ran.program.extras[CROSSINGS] if c.shareable)


@pytest.mark.parametrize("name", ["matmul-sliced", "matmul-transposed", "mlp", "attention-mask"])
def test_jax_shares_what_is_dense_and_aligned(jax: None, name: str) -> None:
    ran = run(JAX, seeded(name).problem(1), Mode.BACKWARD)
    assert ran.engaged, ran.missing()
    assert not differences(ran.result, plain(seeded(name).problem(1), Mode.BACKWARD), 0.0)
    first = ran.program.extras[CROSSINGS][0]
    assert first.shared == (name != "matmul-sliced")


@pytest.mark.skipif(not installed("jax"), reason="JAX is not installed")
@pytest.mark.parametrize("dtype", JAX.dtypes)
def test_jax_itself(dtype: str) -> None:
    stored: torch.dtype = getattr(torch, dtype)
    for name in ("matmul-sliced", "matmul-transposed", "attention-mask"):
        ran = run(JAX, seeded(name).problem(1), Mode.BACKWARD, dtype=stored)
        assert ran.engaged, ran.missing()
        assert not differences(ran.result, plain(seeded(name).problem(1), Mode.BACKWARD, stored), 0.0)


def test_gradients_cross_too() -> None:
    forward = run(NUMPY, seeded("mlp").problem(1)).program.extras[CROSSINGS]
    backward = run(NUMPY, seeded("mlp").problem(1), Mode.BACKWARD).program.extras[CROSSINGS]
    assert (len(forward), len(backward)) == (2, 4)


def test_nested_outputs_cross() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": x + 1, "b": [x * 2, x - 1]}

    ran = run(NUMPY, Problem(Two(), (torch.ones(3),)), Mode.BACKWARD)
    assert sorted(ran.result) == ["grad:input[0]", "out['a']", "out['b'][0]", "out['b'][1]"]
    assert len(ran.program.extras[CROSSINGS]) == 8


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(2, 3), True),
        (torch.ones(2, 3).t(), True),
        (torch.ones(2, 3, 4).permute(1, 2, 0), True),
        (torch.ones(2, 1, 3), True),
        (torch.ones(()), True),
        (torch.ones(0, 3), True),
        (torch.ones(4, 3)[::2], False),
        (torch.ones(4, 3)[:, 1:], False),
        (torch.ones(1, 3).expand(2, 3), False),
    ],
)
def test_what_is_dense(tensor: Tensor, expected: bool) -> None:
    assert dense(tensor) is expected


# Evidence that can be false


class Copying(NumpyBorder):
    def give(self, tensor: Tensor) -> Any:
        return super().give(tensor).copy()


class CopyingBack(NumpyBorder):
    def take(self, array: Any) -> Tensor:
        return super().take(array).clone()


@pytest.mark.parametrize("technique", [Copying(), CopyingBack()])
def test_a_copy_at_the_border_is_evidence_against(technique: Border) -> None:
    missing = run(technique, seeded("mlp").problem(1)).missing()
    assert "shareable tensors that were copied = 0: 2" in missing
    assert any("writes here" in line for line in missing)
    assert any("writes there" in line for line in missing)


def test_a_copy_of_jax_is_evidence_against(jax: None) -> None:
    class CopyingJax(JaxBorder):
        def give(self, tensor: Tensor) -> Any:
            return super().give(tensor.clone())

    missing = run(CopyingJax(), seeded("mlp").problem(1)).missing()
    assert "shareable tensors that were copied = 0: 2" in missing
    assert any("writes here" in line for line in missing)


def test_a_read_only_array_that_is_let_out_is_evidence_against(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(NumpyBorder):
        def module(self) -> Any:
            numpy = SimpleNamespace(from_dlpack=np.from_dlpack)
            numpy.zeros = lambda _: SimpleNamespace(flags=SimpleNamespace(), __dlpack__=lambda: None)
            return numpy

    assert [line.partition(" ")[0] for line in run(Careless(), seeded("mlp").problem(1)).missing()] == ["read-only"]


# Planted


class Shifted(NumpyBorder):
    """Loses the strides: as a library that reads any memory as row-major would."""

    def take(self, array: Any) -> Tensor:
        out = super().take(array)
        return out if out.is_contiguous() else out.as_strided(out.shape, torch.empty(out.shape).stride())


def test_lost_strides_are_caught(tmp_path: Any) -> None:
    store, place = Store(tmp_path), seeded("matmul-transposed")
    assert verdict_of(store, NUMPY, place, Mode.BACKWARD).verdict is Verdict.PASS
    assert verdict_of(store, Shifted(), place, Mode.BACKWARD).verdict is Verdict.FAIL


# Where they exist


def test_numpy_and_cupy_have_memory_of_their_own() -> None:
    assert NUMPY.answer(StubDevice("cpu")).ok
    for kind in ("cuda", "xla", "tpu", "vendor"):
        assert NUMPY.answer(StubDevice(kind)).code is Code.NO_FEATURE
    for kind in ("cpu", "xla", "tpu", "vendor"):
        assert CUPY.answer(StubDevice(kind)).code is Code.NO_FEATURE
    assert CUPY.capability(StubDevice("cuda")).ok


def test_a_numpy_that_imports_read_only_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(tensor: Tensor) -> Any:
        array = tensor.numpy().copy()
        array.flags.writeable = False
        return array

    monkeypatch.setattr(np, "from_dlpack", read_only)
    answer = NUMPY.answer(StubDevice("cpu"))
    assert (answer.verdict, answer.code) == (Verdict.UNAVAILABLE, Code.WRONG_VERSION)
    assert "numpy>=2.2.5" in answer.action


def test_jax_asks_for_its_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JAX.capability(StubDevice("cpu")).ok
    assert JAX.capability(StubDevice("xla")).code is Code.NO_FEATURE
    plugins: list[SimpleNamespace] = []
    monkeypatch.setattr(metadata, "entry_points", lambda **_: plugins)
    assert JAX.capability(StubDevice("cuda")).code is Code.NO_PACKAGE
    plugins.append(SimpleNamespace(name="xla_cuda13"))
    assert JAX.capability(StubDevice("cuda")).ok
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert JAX.capability(StubDevice("cuda")).code is Code.NO_PACKAGE


def test_jax_does_not_take_the_devices_memory(jax: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    sys.modules["jax"].devices = lambda: seen.append(os.environ.get(name))  # type: ignore[attr-defined]  # of the stand-in
    made = run(NUMPY, seeded("mlp").problem(1)).program
    JAX.prepare(made, Mode.FORWARD, StubDevice("cuda"))
    assert seen == ["false"]
    assert name not in os.environ


def test_sixty_four_bits_stay_here(jax: None) -> None:
    ran = run(JAX, seeded("index-select").problem(1))
    assert ran.engaged, ran.missing()
    kinds = [value.dtype for value in ran.program.inputs]
    assert torch.int64 in kinds
    assert len(ran.program.extras[CROSSINGS]) == len(kinds)  # the index stayed, the output came
