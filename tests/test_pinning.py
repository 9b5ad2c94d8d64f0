"""Each xdist worker gets one chip out of the caller's mask."""

from __future__ import annotations

import sys

import pytest

from accelcheck.devices import hardware
from accelcheck.devices.pinning import chips, pin

TPU = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
ROCM = "ROCR_VISIBLE_DEVICES" if sys.platform == "linux" else "HIP_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("device", "worker", "environ", "count", "expected"),
    [
        ("cuda", "gw0", {}, 4, {"CUDA_VISIBLE_DEVICES": "0"}),
        ("cuda", "gw3", {}, 4, {"CUDA_VISIBLE_DEVICES": "3"}),
        ("cuda", "gw5", {}, 4, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda", "gw1", {"CUDA_VISIBLE_DEVICES": "6,7"}, 8, {"CUDA_VISIBLE_DEVICES": "7"}),
        ("cuda", "gw2", {"CUDA_VISIBLE_DEVICES": "6,7"}, None, {"CUDA_VISIBLE_DEVICES": "6"}),
        ("cuda", "gw1", {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 2, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        ("cuda", "gw1", {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, {"CUDA_VISIBLE_DEVICES": "MIG-b"}),
        ("cuda", "gw1", {"CUDA_VISIBLE_DEVICES": "2,-1,3"}, 4, {"CUDA_VISIBLE_DEVICES": "2"}),
        ("cuda", "gw1", {"CUDA_VISIBLE_DEVICES": ""}, 4, {}),
        ("cuda", "gw1", {"CUDA_VISIBLE_DEVICES": "-1"}, 4, {}),
        ("cuda", "gw1", {}, None, {}),
        ("cuda", "gw1", {}, 0, {}),
        ("cuda", "master", {}, 4, {}),
        ("rocm", "gw1", {}, 2, {ROCM: "1"}),
        ("rocm", "gw1", {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"}, 2, {"HIP_VISIBLE_DEVICES": "1"}),
        ("rocm", "gw1", {"CUDA_VISIBLE_DEVICES": "2,3"}, 2, {"CUDA_VISIBLE_DEVICES": "3"}),
        ("rocm", "gw1", {"HIP_VISIBLE_DEVICES": ""}, 2, {}),
        ("tpu", "gw2", {}, 4, {"TPU_VISIBLE_CHIPS": "2"} | TPU),
        ("tpu", "gw1", {"TPU_VISIBLE_CHIPS": "2,3"}, 4, {"TPU_VISIBLE_CHIPS": "3"} | TPU),
        ("xla", "gw1", {"PJRT_DEVICE": "TPU"}, 4, {"TPU_VISIBLE_CHIPS": "1"} | TPU),
        ("xla", "gw1", {"PJRT_DEVICE": "CPU"}, 4, {}),
        ("npu", "gw1", {}, 2, {"ASCEND_RT_VISIBLE_DEVICES": "1"}),
        ("xpu", "gw1", {"ZE_AFFINITY_MASK": "0.0,0.1"}, 2, {"ZE_AFFINITY_MASK": "0.1"}),
        ("cpu", "gw1", {}, 2, {}),
        ("hpu", "gw1", {}, 8, {}),
    ],
)
def test_table(device: str, worker: str, environ: dict[str, str], count: int | None, expected: dict[str, str]) -> None:
    before = dict(environ)
    assert pin(device, worker, environ, count) == expected
    assert environ == before | expected


@pytest.mark.parametrize(("count", "expected"), [(0, {}), (2, {"TPU_VISIBLE_CHIPS": "1"} | TPU)])
def test_xla_without_a_client_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: dict[str, str]
) -> None:
    found = hardware.tpu()
    monkeypatch.setattr(hardware, "tpu", lambda: hardware.Hardware(count, (), "", found.capability))
    assert pin("xla", "gw1", {}, 2) == expected


def test_workers_cover_the_callers_chips_and_no_other() -> None:
    seen = [pin("cuda", f"gw{n}", {"CUDA_VISIBLE_DEVICES": "3,5,7"}, 8)["CUDA_VISIBLE_DEVICES"] for n in range(6)]
    assert seen == ["3", "5", "7", "3", "5", "7"]


def test_chips_of_a_mask() -> None:
    assert chips("0, 2 ,GPU-x") == ["0", "2", "GPU-x"]
    assert chips("") == chips("-1") == chips("NoDevFiles,")[1:] == []
