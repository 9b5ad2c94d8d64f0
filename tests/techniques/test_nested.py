from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_harness import seeded, verdict_of
from technique_harness import StubDevice, agrees, named, run, workload
from torch import Tensor
from torch.nn import functional

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.techniques.attention.jagged import Jagged
from accelcheck.techniques.attention.nested import TECHNIQUES
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.observe import OperatorLog
from accelcheck.verify.oracle import Store

NESTED = named(TECHNIQUES, "sdpa-nested")


@pytest.mark.parametrize("mode", [Mode.FORWARD, Mode.BACKWARD])
@pytest.mark.parametrize("dtype", NESTED.dtypes)
def test_each_sequence_equals_masked_attention(mode: Mode, dtype: str) -> None:
    stored: torch.dtype = getattr(torch, dtype)
    made = seeded("attention-varlen")
    tolerance = 1e-5 if stored is torch.float32 else 0.05
    agrees(NESTED, lambda: made.problem(1), mode, dtype=stored, tolerance=tolerance)


def test_a_causal_mask_on_the_cpu_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no causal mask on stub") as caught:
        run(NESTED, seeded("attention-varlen-causal").problem(1))
    assert caught.value.capability.code is Code.NO_FEATURE


def test_a_refusal_of_torch_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")

    monkeypatch.setattr(functional, "scaled_dot_product_attention", refusing)
    with pytest.raises(Unsupported, match="No viable backend"):
        run(NESTED, seeded("attention-varlen").problem(1))


def test_padding_that_is_attended_fails_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = seeded("attention-varlen")
    assert run(NESTED, made.problem(1)).engaged
    ran = run(NESTED, made.problem(1))
    ran.program.extras.clear()
    assert not any(e.engaged for e in NESTED.evidence(ran.program, ran.log, Mode.FORWARD, StubDevice()))


def test_capability_by_device() -> None:
    assert NESTED.capability(StubDevice()).ok
    assert NESTED.capability(StubDevice("cuda")).ok
    absent = NESTED.capability(StubDevice("xla", features=()))
    assert absent.code is Code.NO_FEATURE
    assert "expect_size" in absent.reason
    assert NESTED.accepts(workload("packed"))
    assert not NESTED.accepts(workload("attention"))


def test_meta_tensors_are_no_strays() -> None:
    here, elsewhere = torch.ones(2), torch.ones(2, device="meta")
    with OperatorLog("cpu") as log:
        torch.empty_like(here, device="meta")
    assert not log.strays()
    with OperatorLog("meta") as log:
        torch.empty_like(elsewhere, device="cpu")
    assert log.strays()


def test_a_sequence_that_sees_its_neighbour_fails(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, place = Store(tmp_path), seeded("attention-varlen")
    assert verdict_of(store, NESTED, place, Mode.BACKWARD).verdict is Verdict.PASS
    plainly = Jagged.of.__func__  # type: ignore[attr-defined]  # of a class method

    def shifted(cls: type[Jagged], padded: Tensor, lengths: Tensor) -> Jagged:
        made: Jagged = plainly(cls, padded, lengths)
        made.offsets[1] += 1
        return made

    monkeypatch.setattr(Jagged, "of", classmethod(shifted))
    assert verdict_of(store, NESTED, place, Mode.BACKWARD).verdict is Verdict.FAIL
