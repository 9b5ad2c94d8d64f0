from __future__ import annotations

import os
import sys
from functools import partial
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fault_harness import built_in, seeded, verdict_of
from technique_harness import StubDevice, agrees, engaged, named, plain, run
from torch import Tensor, nn
from upstream_signatures import unlike_upstream

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.packages import installed
from accelcheck.techniques.interop import dlpack
from accelcheck.techniques.interop.dlpack import EXCHANGES, TECHNIQUES, ArrayExchange, JaxExchange, NumpyExchange, dense
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem

NUMPY, JAX, CUPY = (named(TECHNIQUES, name) for name in ("dlpack-numpy", "dlpack-jax", "cupy-zero-copy"))


class Array:
    """Import of a tensor as in JAX: shared if aligned, otherwise copied; refused if not dense."""

    def __init__(self, external_array: Tensor) -> None:
        if not dense(external_array):
            raise RuntimeError("UNIMPLEMENTED: Only DLPack tensors with trivial (compact) striding are supported")
        self.tensor = external_array if external_array.data_ptr() % 64 == 0 else external_array.clone()

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
    """A stub of JAX with what the technique uses."""
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    monkeypatch.setitem(sys.modules, "jax.dlpack", SimpleNamespace(from_dlpack=Array))


def test_the_stub_has_the_signature_of_the_package() -> None:
    assert unlike_upstream("jax", "jax/_src/dlpack.py:from_dlpack", Array) == []


@pytest.mark.parametrize("name", sorted(dlpack.WORKLOADS))
def test_numpy_shares_every_kind_of_memory(name: str) -> None:
    mode = Mode.TRAIN if "training" in built_in()[name].traits else Mode.BACKWARD
    ran = engaged(NUMPY, seeded(name).problem(1), mode)
    expected = plain(seeded(name).problem(1), mode)
    assert ran.result.keys() == expected.keys()
    assert all(torch.equal(ran.result[path], expected[path]) for path in expected)
    assert all(c.shared for c in ran.program.extras[EXCHANGES] if c.shareable)


@pytest.mark.parametrize("name", ["matmul-sliced", "matmul-transposed", "mlp", "attention-mask"])
def test_jax_shares_dense_and_aligned_memory(jax: None, name: str) -> None:
    ran = agrees(JAX, lambda: seeded(name).problem(1), Mode.BACKWARD, tolerance=0.0)
    first = ran.program.extras[EXCHANGES][0]
    assert first.shared == (name != "matmul-sliced")


@pytest.mark.skipif(not installed("jax"), reason="JAX is not installed")
@pytest.mark.parametrize("dtype", JAX.dtypes)
def test_with_jax_installed_results_equal_eagers(dtype: str) -> None:
    stored: torch.dtype = getattr(torch, dtype)
    for name in ("matmul-sliced", "matmul-transposed", "attention-mask"):
        made = partial(seeded(name).problem, 1)
        agrees(JAX, made, Mode.BACKWARD, dtype=stored, tolerance=0.0)


def test_gradients_are_exchanged_too() -> None:
    forward = run(NUMPY, seeded("mlp").problem(1)).program.extras[EXCHANGES]
    backward = run(NUMPY, seeded("mlp").problem(1), Mode.BACKWARD).program.extras[EXCHANGES]
    assert (len(forward), len(backward)) == (2, 4)


def test_nested_outputs_are_exchanged() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": x + 1, "b": [x * 2, x - 1]}

    ran = run(NUMPY, Problem(Two(), (torch.ones(3),)), Mode.BACKWARD)
    assert sorted(ran.result) == ["grad:input[0]", "out['a']", "out['b'][0]", "out['b'][1]"]
    assert len(ran.program.extras[EXCHANGES]) == 8


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
def test_dense_tensors(tensor: Tensor, expected: bool) -> None:
    assert dense(tensor) is expected


class Copying(NumpyExchange):
    def give(self, tensor: Tensor) -> Any:
        return super().give(tensor).copy()


class CopyingBack(NumpyExchange):
    def take(self, array: Any) -> Tensor:
        return super().take(array).clone()


@pytest.mark.parametrize("technique", [Copying(), CopyingBack()])
def test_a_copy_in_the_exchange_fails_the_evidence(technique: ArrayExchange) -> None:
    missing = run(technique, seeded("mlp").problem(1)).missing()
    assert "shareable tensors that were copied = 0: 2" in missing
    assert any("a write by torch" in line for line in missing)
    assert any("a write by the library" in line for line in missing)


def test_a_copy_by_jax_fails_the_evidence(jax: None) -> None:
    class CopyingJax(JaxExchange):
        def give(self, tensor: Tensor) -> Any:
            return super().give(tensor.clone())

    missing = run(CopyingJax(), seeded("mlp").problem(1)).missing()
    assert "shareable tensors that were copied = 0: 2" in missing
    assert any("a write by torch" in line for line in missing)


def test_an_exported_read_only_array_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(NumpyExchange):
        def module(self) -> Any:
            numpy = SimpleNamespace(from_dlpack=np.from_dlpack)
            numpy.zeros = lambda _: SimpleNamespace(flags=SimpleNamespace(), __dlpack__=lambda: None)
            return numpy

    assert [line.partition(" ")[0] for line in run(Careless(), seeded("mlp").problem(1)).missing()] == ["read-only"]


class Shifted(NumpyExchange):
    """Ignores strides, as a library that reads all memory as row-major."""

    def take(self, array: Any) -> Tensor:
        out = super().take(array)
        return out if out.is_contiguous() else out.as_strided(out.shape, torch.empty(out.shape).stride())


def test_lost_strides_fail(tmp_path: Any) -> None:
    store, place = Store(tmp_path), seeded("matmul-transposed")
    assert verdict_of(store, NUMPY, place, Mode.BACKWARD).verdict is Verdict.PASS
    assert verdict_of(store, Shifted(), place, Mode.BACKWARD).verdict is Verdict.FAIL


def test_numpy_and_cupy_need_tensors_in_their_memory() -> None:
    assert NUMPY.answer(StubDevice("cpu")).ok
    for kind in ("cuda", "xla", "tpu", "vendor"):
        assert NUMPY.answer(StubDevice(kind)).code is Code.NO_FEATURE
    for kind in ("cpu", "xla", "tpu", "vendor"):
        assert CUPY.answer(StubDevice(kind)).code is Code.NO_FEATURE
    assert CUPY.capability(StubDevice("cuda")).ok


def test_a_numpy_that_imports_read_only_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(tensor: Tensor) -> Any:
        array = tensor.numpy().copy()
        array.flags.writeable = False
        return array

    monkeypatch.setattr(np, "from_dlpack", read_only)
    answer = NUMPY.answer(StubDevice("cpu"))
    assert (answer.verdict, answer.code) == (Verdict.UNAVAILABLE, Code.WRONG_VERSION)
    assert "numpy>=2.2.5" in answer.action


def test_jax_needs_its_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JAX.capability(StubDevice("cpu")).ok
    assert JAX.capability(StubDevice("xla")).code is Code.NO_FEATURE
    plugins: list[SimpleNamespace] = []
    monkeypatch.setattr(metadata, "entry_points", lambda **_: plugins)
    assert JAX.capability(StubDevice("cuda")).code is Code.NO_PACKAGE
    plugins.append(SimpleNamespace(name="xla_cuda13"))
    assert JAX.capability(StubDevice("cuda")).ok
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert JAX.capability(StubDevice("cuda")).code is Code.NO_PACKAGE


def test_jax_does_not_reserve_the_devices_memory(jax: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    sys.modules["jax"].devices = lambda: seen.append(os.environ.get(name))  # type: ignore[attr-defined]  # a stand-in
    made = run(NUMPY, seeded("mlp").problem(1)).program
    JAX.prepare(made, Mode.FORWARD, StubDevice("cuda"))
    assert seen == ["false"]
    assert name not in os.environ


def test_types_of_64_bits_are_not_exchanged(jax: None) -> None:
    ran = engaged(JAX, seeded("index-select").problem(1))
    kinds = [value.dtype for value in ran.program.inputs]
    assert torch.int64 in kinds
    assert len(ran.program.extras[EXCHANGES]) == len(kinds)  # the int64 index was not exchanged, the output was
