"""A device whose FP32 products are none is told what they are, and everything else on it is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fault_harness import Bed, bench, seeded, verdict_of
from marks import needs_python_backends
from plugin_harness import Ran, Suite
from torch import Tensor

from accelcheck.core import imports
from accelcheck.core.case import Case, Mode, Verdict
from accelcheck.devices.strict import Products, products
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.precision.matmul import StrictFloat32
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Workload


def tf32(value: Tensor) -> Tensor:
    bits = value.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def changed(change: Callable[[Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        out = a @ b
        change(out)
        return out

    return multiply


def without_last_term(a: Tensor, b: Tensor) -> Tensor:
    return a[:, :-1] @ b[:-1]


def only_left(a: Tensor, b: Tensor) -> Tensor:
    return tf32(a) @ b


NAN = float("nan")


@pytest.mark.parametrize(
    ("multiply", "reading"),
    [
        (torch.matmul, "exact"),
        (lambda a, b: tf32(a) @ tf32(b), "errs up to 0.000488 in every element, as TF32 does (2**-11)"),
        (lambda a, b: (a.half() @ b.half()).float() * 0 + tf32(a) @ tf32(b), "wrong by up to inf"),
        (lambda a, b: a.bfloat16().float() @ b.bfloat16().float(), "in every element, as bfloat16 does (2**-8)"),
        (without_last_term, "wrong by -0.00195 in every element, as if 1 of 512 terms of each sum were left out"),
        (lambda a, b: a @ b * 1.5, "wrong by 0.5 in every element, as if -256 of 512 terms"),
        (
            changed(lambda x: x[:, -1].mul_(1.25)),
            "wrong by up to 0.25 in 512 of 262144 elements: rows all; columns 511, the last",
        ),
        (changed(lambda x: x[-16:].zero_()), "in 8192 of 262144 elements: rows 496 to 511, the last 16; columns all"),
        (changed(lambda x: x[:, 3::16].mul_(1.001)), "rows all; columns 3 to 499 in steps of 16"),
        (
            changed(lambda x: x[7, 9].fill_(NAN)),
            "wrong by up to inf in 1 of 262144 elements, 1 of them NaN: rows 7; columns 9",
        ),
        (
            changed(lambda x: x.diagonal().zero_()),
            "in 512 of 262144 elements: rows 0 to 511, the last 512; columns all",
        ),
        (lambda a, b: (a @ b)[:-1], "the shape is (511, 512), not (512, 512)"),
        (
            only_left,
            "with the 12-bit operand on the left: errs up to 0.000488 in every element, as TF32 does (2**-11); ",
        ),
        (lambda a, b: a @ b * NAN, "262144 of them NaN: rows all; columns all"),
    ],
)
def test_the_probe_says_how_products_err_and_where(multiply: Any, reading: str) -> None:
    number = products("cpu", multiply)
    if reading.startswith("in 512 of"):
        reading = "in 512 of 262144 elements: rows all; columns all (not all of them)"
    assert reading in number.reading
    assert number.exact is (reading == "exact")


def of(multiply: Any) -> Bed:
    class Told(Bed):
        def float32_error(self) -> float:
            return self.float32_products().error

        def float32_products(self) -> Products:
            return products("cpu", multiply)

    return Told()


def verdict(store: Store, multiply: Any) -> Any:
    workload = seeded("matmul")
    technique = StrictFloat32()
    place = of(multiply)
    return bench(store, technique, workload, place).run(
        Case(technique.name, workload.name, "cpu", "float32", Mode.FORWARD, 1)
    )


def test_the_case_passes_where_products_are_exact_and_fails_with_what_they_are(store: Store) -> None:
    assert verdict(store, torch.matmul).verdict is Verdict.PASS
    record = verdict(store, lambda a, b: tf32(a) @ tf32(b))
    assert record.verdict is Verdict.FAIL
    (line,) = record.why.splitlines()
    assert line.startswith(
        "not engaged: error of products that FP32 has exactly <= 2.38e-07: observed 0.000488: errs up to"
    )
    assert "as TF32 does (2**-11)" in line
    assert "A variable may force TF32 or bf16: none of the known ones is set" in line


def test_the_case_is_of_one_product(store: Store) -> None:
    assert StrictFloat32().accepts(seeded("matmul"))
    assert not StrictFloat32().accepts(seeded("mlp"))
    assert verdict_of(store, Eager(), seeded("mlp")).verdict is Verdict.PASS


@pytest.mark.slow
def test_a_timed_case_says_that_what_it_is_held_against_is_no_float32(store: Store) -> None:
    workload = seeded("matmul")
    timed = Workload("timed", "A product.", workload.make, 1, frozenset({Mode.SPEED}))
    case = Case("eager", "timed", "cpu", "float32", Mode.SPEED, 1)
    told = "FP32 eager here is none: errs up to"
    for multiply, wanted in ((torch.matmul, 0), (lambda a, b: tf32(a) @ tf32(b), 1)):
        record = bench(store, Eager(), timed, of(multiply)).run(case)
        assert record.verdict is Verdict.PASS, record.why
        reasons = [m.reason for m in record.measurements if m.name == "fp32-eager-error"]
        assert len(reasons) == wanted
        assert all(reason.startswith(told) for reason in reasons)


# A whole run on a device of another vendor, below which every product is wrong.

VENDOR = """
import torch
import toy_backend

plain = toy_backend._call
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}

def tf32(value):
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    bits = value.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)

def call(operator, *args, **kwargs):
    if operator.name().partition(".")[0] not in PRODUCTS:
        return plain(operator, *args, **kwargs)
    return plain(wrong(operator), *args, **kwargs)

def wrong(operator):
    def multiply(*args, **kwargs):
        WRONG
    return multiply

toy_backend._call = call
toy_backend.load()
"""
WRONG = {
    "tf32": "return operator(*args[:-2], *map(tf32, args[-2:]), **kwargs)",
    "last": "out = operator(*args, **kwargs); out[..., -1] *= 1.25; return out",
}
READINGS = {
    "tf32": "errs up to 0.000488 in every element, as TF32 does (2**-11)",
    "last": "wrong by up to 0.25 in 512 of 262144 elements: rows all; columns 511, the last",
}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    monkeypatch.delenv(imports.VARIABLE, raising=False)
    return Suite(pytester, monkeypatch)


@pytest.mark.slow
@needs_python_backends
@pytest.mark.parametrize("kind", ["last", "tf32"])
def test_a_device_without_float32_products_is_judged_to_the_end(kind: str, suite: Suite) -> None:
    (suite.path / "vendor_toy.py").write_text(VENDOR.replace("WRONG", WRONG[kind]))
    workloads = [f"--accel-workload={name}" for name in ("matmul", "elementwise-5", "mlp")]
    techniques = [f"--accel-technique={name}" for name in ("strict-float32", "eager")]
    words = ["--accel-device=toy", "--accel-import=vendor_toy", "--accel-dtype=float32", "--accel-level=2", "-n", "0"]
    ran: Ran = suite.run_apart(*words, *workloads, *techniques, "--deselect", "accelcheck/suite/test_speed.py")
    told = {name: verdict for name, verdict in ran.verdicts.items() if "speed" not in name}
    assert "error" not in told.values(), ran.out
    (probe,) = [record for record in ran.records if record.case.technique == "strict-float32"]
    assert probe.case.id == "strict-float32/matmul/toy/float32/forward"
    assert probe.verdict is Verdict.FAIL
    assert READINGS[kind] in probe.why
    verdicts = {name.split("/", 1)[1]: told[name] for name in told if name.startswith("eager/")}
    assert verdicts["elementwise-5/toy/float32/forward"] == "pass"
    assert verdicts["matmul/toy/float32/forward"] == "fail"
    assert verdicts["mlp/toy/float32/forward"] == "fail"
