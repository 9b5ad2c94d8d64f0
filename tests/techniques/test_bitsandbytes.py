"""AdamW of bitsandbytes with 8-bit states, as it computes on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from fault_harness import built_in, verdict_of
from torch import Tensor

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.devices.cpu import Cpu
from accelcheck.techniques.optimizers.modern import EightBitBits
from accelcheck.techniques.quantization.emulation import dynamic_map, nearest_of
from accelcheck.verify.oracle import Store

STATES = EightBitBits()


@pytest.mark.parametrize("signed", [True, False])
def test_the_emulated_numbers_of_a_state_are_those_of_bitsandbytes(signed: bool) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(dynamic_map(signed=signed).float(), functional.create_dynamic_map(signed=signed))


def rounded_to_nearest(state: Tensor, code: Tensor, most: Tensor, out: Tensor, block: int) -> None:
    """Does what the package promises: the nearest number of the map, in blocks of whole size."""
    blocks = state.reshape(-1, block)
    most.copy_(blocks.abs().amax(1))
    positions = blocks / most.clamp(min=1e-12).unsqueeze(1)
    held = nearest_of(code.double(), positions.double())
    out.copy_(torch.searchsorted(code.double(), held).to(torch.uint8).reshape(out.shape))


def test_states_that_are_rounded_to_nearest_pass(monkeypatch: pytest.MonkeyPatch, fresh: Store) -> None:
    pytest.importorskip("bitsandbytes")
    kernels = importlib.import_module("bitsandbytes.backends.cpu.ops")
    monkeypatch.setattr(kernels, "_quant_blockwise_fp32_direct", rounded_to_nearest)
    record = verdict_of(fresh, STATES, built_in()["train-vocabulary"], Mode.TRAIN)
    assert record.verdict is Verdict.PASS, record.why


@pytest.mark.slow
def test_a_training_without_a_parameter_of_whole_blocks_has_no_such_states(fresh: Store) -> None:
    pytest.importorskip("bitsandbytes")
    record = verdict_of(fresh, STATES, built_in()["train-transformer"], Mode.TRAIN)
    assert record.verdict is Verdict.UNSUPPORTED, record.why
    assert "whole blocks" in str(record.why)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelcheck.techniques.base.installed", lambda _: False)
    answer = STATES.answer(Cpu())
    assert answer.code is Code.NO_PACKAGE
    assert "accelcheck[checkpoints]" in str(answer)
