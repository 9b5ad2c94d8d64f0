"""Each xdist worker gets one chip out of the caller's mask."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from accelcheck.devices import hardware
from accelcheck.devices.cuda import Cuda
from accelcheck.devices.pinning import CALLERS, callers, callers_count, chips, pin, workers
from accelcheck.techniques.processes import torchrun as started

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
        ("xla", "gw1", {"PJRT_DEVICE": "CPU"}, 4, {"CPU_NUM_DEVICES": "1"}),
        ("xla", "gw1", {"PJRT_DEVICE": "CPU"}, 1, {}),
        ("xla", "gw1", {"PJRT_DEVICE": "NEURON"}, 4, {}),
        ("npu", "gw1", {}, 2, {"ASCEND_RT_VISIBLE_DEVICES": "1"}),
        ("xpu", "gw1", {"ZE_AFFINITY_MASK": "0.0,0.1"}, 2, {"ZE_AFFINITY_MASK": "0.1"}),
        ("cpu", "gw1", {}, 2, {}),
        ("hpu", "gw1", {}, 8, {}),
    ],
)
def test_table(device: str, worker: str, environ: dict[str, str], count: int | None, expected: dict[str, str]) -> None:
    before = dict(environ)
    assert pin(device, worker, environ, count) == expected
    environ.pop(CALLERS, None)
    assert environ == before | expected


@pytest.mark.parametrize(("count", "expected"), [(0, {"CPU_NUM_DEVICES": "1"}), (2, {"TPU_VISIBLE_CHIPS": "1"} | TPU)])
def test_xla_without_a_client_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch, count: int, expected: dict[str, str]
) -> None:
    card = hardware.tpu()
    monkeypatch.setattr(hardware, "tpu", lambda: hardware.Hardware(count, (), "", card.capability))
    assert pin("xla", "gw1", {}, 2) == expected


def test_workers_cover_the_callers_chips_and_no_other() -> None:
    seen = [pin("cuda", f"gw{n}", {"CUDA_VISIBLE_DEVICES": "3,5,7"}, 8)["CUDA_VISIBLE_DEVICES"] for n in range(6)]
    assert seen == ["3", "5", "7", "3", "5", "7"]


def test_a_worker_keeps_the_masks_of_its_caller_for_processes_that_need_several_devices() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3,5,7", "PJRT_DEVICE": "CPU"}
    pin("cuda", "gw1", environ, 8)
    pin("xla", "gw1", environ, 4)
    assert environ["CUDA_VISIBLE_DEVICES"] == "5"
    assert environ["CPU_NUM_DEVICES"] == "1"
    assert callers(environ) == {"CUDA_VISIBLE_DEVICES": "3,5,7", "CPU_NUM_DEVICES": "4"}
    assert (callers_count("cuda", environ), callers_count("xla", environ), callers_count("npu", environ)) == (3, 4, 0)
    unmasked: dict[str, str] = {}
    pin("cuda", "gw0", unmasked, 2)
    assert callers(unmasked) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    alone: dict[str, str] = {}
    pin("cuda", "gw0", alone, 1)
    assert callers(alone) == {}
    assert callers_count("cuda", alone) == 0


@pytest.mark.parametrize(
    ("devices", "environ", "expected"),
    [
        (["cuda"], {"CUDA_VISIBLE_DEVICES": "4,6,7"}, 3),
        (["cuda"], {"CUDA_VISIBLE_DEVICES": ""}, None),
        (["xla"], {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}, 4),
        (["xla"], {"PJRT_DEVICE": "CPU"}, None),
        (["cuda", "npu"], {"CUDA_VISIBLE_DEVICES": "4,6", "ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, 3),
        (["cuda", "cpu"], {"CUDA_VISIBLE_DEVICES": "4,6"}, None),
        (["auto"], {"CUDA_VISIBLE_DEVICES": "4,6"}, None),
        ([], {}, None),
    ],
)
def test_a_worker_for_each_visible_device(devices: list[str], environ: dict[str, str], expected: int | None) -> None:
    assert workers(devices, environ) == expected


def test_auto_asks_for_a_worker_for_each_device(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")

    def asked(*words: str) -> int:
        config = pytester.parseconfig(*words)
        return int(config.hook.pytest_xdist_auto_num_workers(config=config))

    assert asked("--accel-device=cuda") == 3
    assert asked() == asked("--accel-device=cpu")  # xdist's own answer


def test_ranks_see_the_devices_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []
    monkeypatch.setattr(started, "Child", lambda _, environ: given.append(environ))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv(CALLERS, "")  # so that what `pin` writes goes again
    pin("cuda", "gw1", os.environ, 8)
    started.torchrun(["--standalone"], "module:main")
    assert given[0]["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: 1))
    assert started.devices_of_ranks(Cuda()) == 2


def test_chips_of_a_mask() -> None:
    assert chips("0, 2 ,GPU-x") == ["0", "2", "GPU-x"]
    assert chips("") == chips("-1") == chips("NoDevFiles,")[1:] == []
