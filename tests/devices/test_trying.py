"""A device is held to what trials find, though it declares nothing; it denies what it is not to be held to."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, Bed, bench, built_in, case
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.fault import FaultKind
from accelcheck.core.journal import Record
from accelcheck.devices.base import FEATURES, FOUND, TRIED, Device, Status, status_from_json
from accelcheck.devices.generic import Generic
from accelcheck.devices.probe import builtin, probe
from accelcheck.devices.trying import answers
from accelcheck.report.terminal import header
from accelcheck.selftest.faults.base import Planted
from accelcheck.selftest.faults.plant import calling
from accelcheck.selftest.runner import faults
from accelcheck.techniques.base import Technique
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store

REASON = "its vendor says so"
TECHNIQUES = Matrix.load().techniques


class Undeclared(Bed):
    """A device that declares nothing but FP32."""

    dtypes = frozenset({"float32"})

    def __init__(self, **denied: str) -> None:
        super().__init__()
        self.features = frozenset()
        self.denied = denied


class Unsteady(Planted):
    """Eager, whose second judged run has other bits, all within rounding."""

    def __init__(self) -> None:
        calls = itertools.count()

        def call(module: Any, *inputs: Tensor) -> Any:
            out = module(*inputs)
            return out * (1 + 2.0**-23) if next(calls) == 2 else out

        super().__init__(Eager(), calling(call))


def tried(device: Device | None = None) -> Mapping[str, str]:
    *_, last = answers(Undeclared() if device is None else device)
    return last


def judged(
    store: Store, technique: Technique, workload: str, mode: Mode, device: Device, dtype: str = "float32"
) -> Record:
    problem = built_in()[workload]
    device.learn(Status(device.name, SUPPORTED, answers=tried(device)))
    return bench(store, technique, problem, device).run(case(problem, mode, dtype, technique.name))


def test_what_trials_find_is_known_and_no_generator_moves() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert tried() == dict.fromkeys(TRIED, FOUND)
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_is_tried_of_what_is_declared_or_denied() -> None:
    assert list(answers(builtin()["cpu"])) == []
    device = Undeclared(deterministic=REASON, float16=REASON)
    device.features |= {"strided"}
    assert set(tried(device)) == {*TRIED} - {"strided"}
    assert {tried(device)[word] for word in device.denied} == {f"denied: {REASON}"}


@pytest.mark.parametrize("device", [*builtin().values(), Generic("xpu")], ids=lambda device: device.name)
def test_built_in_devices_declare_or_deny_what_would_be_tried(device: Device) -> None:
    left = [word for word in TRIED if not (word in device.dtypes | device.denied.keys() or device.has(word))]
    assert left == ["bfloat16", "float16"][: len(left)]  # the dtypes that a chip of a type may lack
    assert not device.denied.keys() & (device.dtypes | device.features)
    assert set(TRIED) - FEATURES.keys() == {"bfloat16", "float16"}


def raising(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("Could not run 'aten::mm'\nwith arguments")


def test_what_raises_is_not_there_and_the_answer_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "__matmul__", raising)
    assert tried()["float16"] == "not found: NotImplementedError: Could not run 'aten::mm'"


def test_a_device_whose_views_are_copies_has_no_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, plain = itertools.cycle([True, False]), Tensor.t

    def t(tensor: Tensor) -> Tensor:
        return plain(tensor).contiguous() if next(copied) else plain(tensor)

    monkeypatch.setattr(Tensor, "t", t)
    assert tried()["strided"].startswith("not found: transpose: expected a view with the strides (1, 8), got (6, 1)")


@pytest.mark.parametrize("operator", ["cumsum", "index_add", "softmax"])
def test_an_operator_with_other_bits_again_is_not_deterministic(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = itertools.count(), getattr(Tensor, operator)

    def unsteady(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = plain(*args, **kwargs)
        return result * (1 + 2.0**-23) if next(calls) == 2 else result

    monkeypatch.setattr(Tensor, operator, unsteady)
    assert tried()["deterministic"] == f"not found: {operator}: other bits in one of 3 runs"


@pytest.mark.parametrize(("fault", "mode"), [("cotangent-read-as-rows", BACKWARD), ("transposition-ignored", FORWARD)])
def test_a_fault_that_strides_show_fails_where_a_device_declares_nothing(fault: str, mode: Mode, store: Store) -> None:
    plant = faults()[fault]
    cell = next(cell for cell in plant.cells if cell.mode is mode)
    assert isinstance(plant.technique, str)
    technique = Planted(TECHNIQUES[plant.technique], plant.plant(1.0))
    assert judged(store, technique, cell.workload, mode, Undeclared()).verdict is Verdict.FAIL
    assert judged(store, TECHNIQUES[plant.technique], cell.workload, mode, Undeclared()).verdict is Verdict.PASS
    spared = judged(store, technique, cell.workload, mode, Undeclared(strided=REASON))
    assert spared.verdict is not Verdict.FAIL


def test_a_rerun_with_other_bits_fails_on_a_device_that_declares_nothing(store: Store) -> None:
    record = judged(store, Unsteady(), "matmul", FORWARD, Undeclared())
    assert {fault.kind for fault in record.faults} == {FaultKind.RERUN}
    assert judged(store, Unsteady(), "matmul", FORWARD, Undeclared(deterministic=REASON)).verdict is Verdict.PASS


def test_a_dtype_that_was_found_has_its_cases_and_others_say_why(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(store, Eager(), "matmul", FORWARD, Undeclared(), "float16").verdict is Verdict.PASS
    record = judged(store, Eager(), "matmul", FORWARD, Undeclared(float16=REASON), "float16")
    assert (record.verdict, record.code) == (Verdict.UNSUPPORTED, Code.NO_DTYPE)
    assert REASON in record.reason
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "__matmul__", raising)
        device = Undeclared()
        device.learn(Status(device.name, SUPPORTED, answers=tried(device)))
    refused = device.lacks("float16", Code.NO_DTYPE)
    assert "Could not run 'aten::mm'" in refused.reason
    assert refused.tried


BARE = """
import os
import torch
from accelcheck.devices.base import Device, Fingerprint

class Bare(Device):
    name = "bare"
    type = "cpu"
    denied = {"deterministic": "its vendor says so"}
    def fingerprint(self): return Fingerprint(self.name, "chip", 1)
    def torch_device(self): return torch.device("cpu")
    def synchronize(self): pass

class Fragile(Bare):
    name = "fragile"
    def synchronize(self): os.abort()
"""


@pytest.mark.slow
def test_the_probe_tries_and_a_trial_that_dies_takes_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bare_device.py").write_text(BARE)
    module = importlib.import_module("bare_device")
    statuses, _ = probe(["bare", "fragile"], 60.0, [module.Bare(), module.Fragile()])
    bare, fragile = statuses["bare"], statuses["fragile"]
    assert bare.present
    assert bare.found == {*TRIED} - {"deterministic"}
    assert bare.answers["deterministic"] == f"denied: {REASON}"
    assert fragile.present
    assert not fragile.found
    assert all("did not end" in fragile.answers[word] for word in bare.found)
    assert status_from_json(bare.as_json()) == bare
    run: Any = SimpleNamespace(
        statuses={"bare": bare}, failed_imports={}, selection=SimpleNamespace(level=1, shard=None, devices=("bare",))
    )
    assert REASON in "".join(header(run))
