"""Footprint: bytes of tensors, of wrappers of tensors, and of files."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from accelcheck.devices.packages import installed
from accelcheck.measure.memory import in_memory
from accelcheck.techniques.quantization.int8 import on_disk, smaller_file


def test_a_file_is_larger_than_its_elements() -> None:
    whole, elements = on_disk({"a": torch.zeros(100), "b": torch.zeros(3, dtype=torch.int64)})
    assert elements == 424
    assert whole > elements


def test_elements_that_two_names_share_are_written_once() -> None:
    shared = torch.zeros(64)
    assert on_disk({"a": shared, "b": shared.view(8, 8)})[1] == 256


def test_a_quarter_is_small_enough_and_the_same_is_not() -> None:
    plain, small = nn.Linear(64, 64, bias=False), nn.Module()
    small.register_buffer("weight", torch.zeros(64, 64, dtype=torch.int8))
    seen = smaller_file(plain, small, 4 * 64 * 64)
    assert seen.engaged
    assert str(seen.observed).startswith(f"{4 * 4096} -> 4096 (whole file ")
    assert not smaller_file(plain, plain, 4 * 64 * 64).engaged
    assert not smaller_file(plain, small, 0).engaged
    larger = nn.Linear(64, 48, bias=False)  # a quarter less
    assert not smaller_file(plain, larger, 4 * 64 * 64).engaged


def test_a_half_precision_model_is_counted_as_if_it_were_float32() -> None:
    plain, small = nn.Linear(64, 64, bias=False).bfloat16(), nn.Module()
    small.register_buffer("weight", torch.zeros(64, 64, dtype=torch.int8))
    assert str(smaller_file(plain, small, 4 * 64 * 64).observed).startswith(f"{4 * 4096} -> 4096 (")


def test_where_a_device_cannot_be_saved_from_the_size_of_the_file_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", Mock(side_effect=NotImplementedError("no copy of a storage\nin C++")))
    there = nn.Linear(64, 64, device="meta")
    seen = smaller_file(there, there, 4 * 64 * 64)
    assert not seen.seen
    assert seen.claim.startswith("could not be seen: bytes of elements in a file fall from FP32's by 5461 ")
    assert seen.observed == "torch.save: NotImplementedError: no copy of a storage"
    here = nn.Linear(64, 64)
    with pytest.raises(NotImplementedError):  # every torch can save tensors of the CPU
        smaller_file(here, here, 4 * 64 * 64)


@pytest.mark.skipif(not installed("torchao"), reason="torchao is not installed")
def test_a_wrapper_holds_what_its_tensors_hold() -> None:
    tools: Any = importlib.import_module("torchao.quantization")
    layer = nn.Linear(64, 32, bias=False)
    tools.quantize_(layer, tools.Int8WeightOnlyConfig(set_inductor_config=False))
    held = in_memory(layer.weight.data)
    assert 64 * 32 < held <= 64 * 32 + 3 * 4 * 32
    assert in_memory(torch.zeros(5)) == 20
