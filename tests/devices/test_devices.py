"""Facts of each device and host; FP32 is FP32."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from marks import needs_python_backends
from process_harness import completed
from torch import Tensor

from accelcheck.core.capability import SUPPORTED, Code, unavailable
from accelcheck.core.case import Verdict
from accelcheck.devices import devices, hardware, strict
from accelcheck.devices import generic as generic_device
from accelcheck.devices.base import FEATURES, OF_TYPE, Device, Fingerprint, Status, status_from_json
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.cuda import Cuda
from accelcheck.devices.generic import Generic
from accelcheck.devices.probe import builtin
from accelcheck.devices.rocm import Rocm
from accelcheck.devices.tpu import Tpu
from accelcheck.devices.xla import Xla

ROOT = Path(__file__).parents[2]


def python(code: str, *, environ: dict[str, str] | None = None, timeout: float = 60) -> str:
    """Run code in a fresh interpreter and give what it printed."""
    done = completed(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=timeout,
        env=dict(os.environ) | (environ or {}),
        cwd=ROOT,  # `python -c` finds accelcheck there
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def board(slot: str, vendor: str, device: str, kind: str) -> dict[str, str]:
    where = f"sys/bus/pci/devices/0000:00:{slot}.0"
    return {f"{where}/vendor": f"{vendor}\n", f"{where}/device": f"{device}\n", f"{where}/class": f"{kind}\n"}


@pytest.mark.slow
def test_no_device_module_imports_torch() -> None:
    code = """
    import sys
    from accelcheck.core import registry
    from accelcheck.devices import strict
    names = {device.name for device in registry.discover("accelcheck.devices", "DEVICES")}
    print({"cpu", "cuda", "rocm", "tpu", "xla"} <= names, "torch" in sys.modules, "numpy" in sys.modules)
    """
    assert python(code).strip() == "True False False"


def test_hardware_needs_only_the_standard_library() -> None:
    # -S leaves site-packages out, as for nox in an environment of its own.
    code = "from accelcheck.devices import hardware as h; print(h.usable_cores(), h.cpu(), h.nvidia().capability.code)"
    done = completed([sys.executable, "-S", "-c", code], check=True, cwd=ROOT)
    assert done.stdout.split()[0].isdigit()


@pytest.mark.parametrize("device", builtin().values(), ids=lambda device: device.name)
def test_declarations_are_legal(device: Device) -> None:
    assert device.features <= set(FEATURES)
    assert "float32" in device.dtypes
    assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in device.dtypes)
    assert list(device.variables) == sorted(set(device.variables))
    assert {"CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"} <= set(Cuda.variables)
    assert "HSA_OVERRIDE_GFX_VERSION" in Rocm.variables


def test_a_device_has_the_features_of_its_type_whoever_declares_it() -> None:
    assert set().union(*OF_TYPE.values()) <= set(FEATURES)
    own = Generic("xpu")
    assert own.has("inductor")
    assert own.has("flex-attention")
    assert not own.has("host")
    assert not Generic("stranger").has("flex-attention")


def test_amd_s_gpus_have_no_library_of_nvidia_s_alone() -> None:
    assert Rocm().has("torch-cuda")
    assert Rocm().has("hip")
    assert not Cuda().has("hip")


def test_the_pages_explain_every_feature() -> None:
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    assert [name for name, meaning in FEATURES.items() if f"| `{name}` | {meaning} |" not in page] == []


def test_cpu() -> None:
    cpu = Cpu()
    cpu.open()
    cpu.synchronize()
    assert cpu.detect().ok
    assert cpu.usable().ok
    assert cpu.memory().allocated is None
    assert "no memory statistics" in cpu.memory().reason
    fingerprint = cpu.fingerprint()
    assert fingerprint.count >= 1
    assert fingerprint.versions["torch"]
    assert fingerprint.runtime.startswith("ATen")
    cpu.seed(7)
    first = torch.rand(3)
    cpu.seed(7)
    assert torch.equal(first, torch.rand(3))


def test_environment_is_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Cpu.variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert Cpu().environment() == {"ATEN_CPU_CAPABILITY": "avx2"}


# Hardware, over roots of our own.
def test_an_empty_machine_has_nothing(tmp_path: Path) -> None:
    for find in (hardware.nvidia, hardware.amd, hardware.tpu):
        host = find(tmp_path)
        assert host.count == 0
        assert host.capability.code is Code.NO_HARDWARE
        assert host.capability.verdict is Verdict.UNAVAILABLE
        assert host.capability.reason
        assert host.capability.action


def test_nvidia_by_driver(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 1\n",
            "proc/driver/nvidia/gpus/0000:02:00.0/information": "Model: \t\t NVIDIA H200\nIRQ: 2\n",
        },
    )
    assert hardware.nvidia(root) == hardware.Hardware(2, ("NVIDIA H200",) * 2, "580.65.06", SUPPORTED)
    # A container that was given one of the two.
    put(root, {"dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""})
    assert hardware.nvidia(root).count == 1
    assert hardware.nvidia(root).names == ()


def test_nvidia_on_wsl(tmp_path: Path) -> None:
    root = put(tmp_path, {"dev/dxg": ""})
    assert not hardware.nvidia(root).capability.ok
    put(root, {"usr/lib/wsl/lib/libcuda.so.1": ""})
    assert hardware.nvidia(root).capability.ok


def test_nvidia_without_its_driver(tmp_path: Path) -> None:
    root = put(tmp_path, board("01", "0x10de", "0x2335", "0x030200") | board("02", "0x10de", "0x22a3", "0x068000"))
    card = hardware.nvidia(root)
    assert card.count == 1
    assert card.capability.code is Code.NO_HARDWARE
    assert "driver" in card.capability.action
    link = root / "sys/bus/pci/devices/0000:00:01.0/driver"
    link.symlink_to("../../../bus/pci/drivers/vfio-pci")  # handed to a virtual machine
    assert hardware.nvidia(root).count == 0


LAVAPIPE = {"usr/share/vulkan/icd.d/lvp_icd.x86_64.json": '{"ICD": {"library_path": "/usr/lib/libvulkan_lvp.so"}}'}
INTEL = {"usr/share/vulkan/icd.d/intel_icd.x86_64.json": '{"ICD": {"library_path": "libvulkan_intel.so"}}'}


def test_a_vulkan_driver_for_the_cpu_needs_no_gpu_and_one_for_gpus_does(tmp_path: Path) -> None:
    root = put(tmp_path, INTEL)
    card = hardware.vulkan(root, {})
    assert card.capability.code is Code.NO_HARDWARE
    assert "no GPU has a device node" in card.capability.reason
    assert "libvulkan_intel.so" in card.capability.reason
    put(root, LAVAPIPE)
    assert hardware.vulkan(root, {}) == hardware.Hardware(1, ("libvulkan_lvp.so",), "", SUPPORTED)
    put(root, {"dev/dri/renderD128": ""})
    assert hardware.vulkan(root, {}).names == ("libvulkan_intel.so", "libvulkan_lvp.so")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ICD": 1}', '{"ICD": {"library_path": 3}}', "[" * 100_000])
def test_a_malformed_vulkan_manifest_is_no_driver(tmp_path: Path, text: str) -> None:
    card = hardware.vulkan(put(tmp_path, {"etc/vulkan/icd.d/bad.json": text}), {})
    assert card.capability.reason == "no Vulkan driver is installed"


def test_vulkan_drivers_are_those_that_the_loader_is_told(tmp_path: Path) -> None:
    root = put(tmp_path, LAVAPIPE | {"opt/here.json": '{"ICD": {"library_path": "libvk_swiftshader.so"}}'})
    swift = ("libvk_swiftshader.so",)
    assert hardware.vulkan(root, {"VK_DRIVER_FILES": "/opt/here.json", "VK_ICD_FILENAMES": "/none"}).names == swift
    assert hardware.vulkan(root, {"VK_ICD_FILENAMES": "/opt"}).names == swift
    assert hardware.vulkan(root, {"VK_ADD_DRIVER_FILES": "/opt/here.json"}).names == (*swift, "libvulkan_lvp.so")
    assert not hardware.vulkan(root, {"VK_DRIVER_FILES": "/opt/gone.json"}).capability.ok
    assert not hardware.vulkan(root, {"XDG_DATA_DIRS": "/opt"}).capability.ok


def test_amd_by_topology(tmp_path: Path) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    root = put(
        tmp_path,
        {
            "dev/kfd": "",
            "sys/module/amdgpu/version": "6.12.12\n",
            f"{nodes}/0/properties": "cpu_cores_count 96\nsimd_count 0\n",
            f"{nodes}/1/properties": "cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\n",
            f"{nodes}/2/properties": "simd_count 440\ngfx_target_version 90010\n",
            f"{nodes}/3/properties": "",
        },
    )
    assert hardware.amd(root) == hardware.Hardware(2, ("gfx942", "gfx90a"), "6.12.12", SUPPORTED)


def test_amd_without_compute_driver(tmp_path: Path) -> None:
    card = hardware.amd(put(tmp_path, board("01", "0x1002", "0x74a1", "0x120000")))
    assert card.count == 1
    assert "/dev/kfd" in card.capability.reason


def test_tpu_is_told_from_googles_other_boards(tmp_path: Path) -> None:
    root = put(
        tmp_path,
        board("01", "0x1ae0", "0x0042", "0x020000") | board("02", "0x1ae0", "0x001f", "0x010802") | {"dev/vfio/0": ""},
    )
    assert hardware.tpu(root).count == 0
    put(root, board("04", "0x1ae0", "0x006f", "0x120000") | board("05", "0x1ae0", "0x0099", "0x120000"))
    assert hardware.tpu(root) == hardware.Hardware(2, ("TPU v6e", "TPU 0x0099"), "", SUPPORTED)


def test_tpu_by_its_nodes(tmp_path: Path) -> None:
    assert hardware.tpu(put(tmp_path, {"dev/accel0": "", "dev/accel1": "", "dev/accel/accel0": ""})).count == 2


def test_cpu_name(tmp_path: Path) -> None:
    text = "processor\t: 0\nmodel name\t: AMD EPYC 9654\n\nprocessor\t: 1\nmodel name\t: AMD EPYC 9654\n"
    assert hardware.cpu(put(tmp_path, {"proc/cpuinfo": text})) == "AMD EPYC 9654"
    assert hardware.cpu(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n",
            "AMD EPYC (family 25, model 17)",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "(implementer 0x41, part 0xd40)"),
    ],
    ids=["x86", "arm"],
)
def test_a_cpus_name_has_its_generation_as_hypervisors_give_many_the_same(tmp_path: Path, text: str, name: str) -> None:
    assert hardware.cpu(put(tmp_path, {"proc/cpuinfo": text})).endswith(name)


def found(count: int) -> Callable[[], hardware.Hardware]:
    return lambda: hardware.Hardware(count, (), "", SUPPORTED if count else unavailable(Code.NO_HARDWARE, "none"))


def test_a_cpu_build_on_a_gpu_machine_is_the_wrong_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    for device in (Cuda(), Rocm()):
        assert device.usable().code is Code.WRONG_BUILD
        assert "install" in device.usable().action


def test_a_mask_that_hides_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "nvidia", found(2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Cuda().detect().ok
    for mask in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert "hides every GPU" in Cuda().detect().reason


def test_an_old_gpu_does_not_declare_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    old = Cuda()
    old.open()
    assert "bfloat16" not in old.dtypes
    assert "autocast-bfloat16" not in old.features
    assert "bfloat16" in Cuda().dtypes


def test_xla_asks_for_its_package_and_the_torch_that_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.setattr("accelcheck.devices.packages.installed", lambda package: package == "torch")
    assert Xla().detect().code is Code.NO_PACKAGE
    monkeypatch.setattr("accelcheck.devices.packages.installed", lambda _: True)
    versions = {"torch-xla": "2.9.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr("accelcheck.devices.xla.version", versions.get)
    assert Xla().detect().code is Code.WRONG_BUILD
    versions["torch"] = "2.9.0+cu128"
    monkeypatch.setattr(hardware, "tpu", found(0))
    assert Xla().detect().ok
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert Xla().detect().code is Code.NO_HARDWARE


def test_tpu_asks_for_hardware_then_python_then_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "tpu", found(0))
    assert Tpu().detect().code is Code.NO_HARDWARE
    monkeypatch.setattr(hardware, "tpu", found(4))
    monkeypatch.setattr("accelcheck.devices.tpu._PYTHON", (3, 99))
    assert "needs Python" in Tpu().detect().reason
    monkeypatch.setattr("accelcheck.devices.tpu._PYTHON", (3, 11))
    monkeypatch.setattr("accelcheck.devices.packages.installed", lambda package: package == "torch")
    assert Tpu().detect().code is Code.NO_PACKAGE
    monkeypatch.setattr("accelcheck.devices.packages.installed", lambda _: True)
    monkeypatch.setattr("accelcheck.devices.packages.version", lambda _: "2.9.0")
    assert Tpu().detect().code is Code.WRONG_BUILD


def test_the_cpu_seeds_its_own_generator_and_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    device = Cpu()
    device.seed(11)
    first = torch.rand(3)
    device.seed(11)
    assert torch.equal(torch.rand(3), first)
    assert seeded == []


@pytest.mark.parametrize(("client", "exclusive"), [("CPU", False), ("TPU", True)])
def test_an_xla_device_that_is_no_processor_is_held_by_one_process(
    client: str, exclusive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", client)
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    device = Xla()
    device.open()
    assert ("exclusive" in device.features) is exclusive
    assert "exclusive" not in Xla().features


# A status as JSON.

STATUS = Status(
    "cuda", SUPPORTED, Fingerprint("cuda", "NVIDIA H200", 2, 1 << 37, "580", "CUDA 13.0", {"torch": "2.15"})
)


@pytest.mark.parametrize("status", [STATUS, Status("tpu", unavailable(Code.NO_HARDWARE, "none", "buy one"))])
def test_a_status_survives_json(status: Status) -> None:
    back = status_from_json(json.loads(json.dumps(status.as_json())))
    assert back == status
    assert back.capability.verdict is status.capability.verdict
    assert back.present == status.present


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": 3}, "device"),
        ({"capability": None}, "capability"),
        ({"capability": {"code": "odd", "reason": "", "action": "", "verdict": None}}, "odd"),
        ({"fingerprint": {"device": "cuda"}}, "chip"),
        ({"fingerprint": STATUS.as_json()["fingerprint"] | {"versions": {"torch": 2}}}, "versions"),
    ],
)
def test_a_strange_status_is_refused_by_field(change: dict[str, object], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        status_from_json(STATUS.as_json() | change)
    with pytest.raises(ValueError, match="object"):
        status_from_json([])


def row(backend: str, op: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, op, precision)


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def mixed_matmul() -> None:
    torch.set_float32_matmul_precision("high")
    row("cuda", "matmul", "ieee")


def generic() -> None:
    row("generic", "all", "bf16")


def parents() -> None:
    row("mkldnn", "all", "tf32")
    row("cuda", "all", "tf32")
    row("cuda", "matmul", "none")


def mixed_cudnn() -> None:
    row("cuda", "conv", "none")


def cudnn_off() -> None:
    torch._C._set_cudnn_allow_tf32(False)
    row("cuda", "rnn", "tf32")


def fp16() -> None:
    torch._C._set_cublas_allow_fp16_accumulation(True)


def attention() -> None:
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(True)


def nothing() -> None:
    return


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "disturb", [nothing, medium, mixed_matmul, generic, parents, mixed_cudnn, cudnn_off, fp16, attention]
)
def test_strictness_is_set_and_given_back_bitwise(disturb: Callable[[], None]) -> None:
    original = strict.read_state()
    try:
        disturb()
        before = strict.read_state()
        assert strict.read_state() == before
        with contextlib.suppress(ZeroDivisionError), strict.strict_matmul():
            assert strict.read_state() == before.strict()
            # Consistent, so that the legacy getters that inductor reads do not raise.
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
            assert not torch.backends.cuda.matmul.allow_fp16_accumulation
            assert torch._C._get_fp32_precision_getter("cuda", "conv") == "ieee"
            raise ZeroDivisionError
        assert strict.read_state() == before
    finally:
        strict.write_state(original)
    assert strict.read_state() == original


def test_cpu_is_strict() -> None:
    cpu = Cpu()
    with cpu.strict_float32():
        assert cpu.float32_error() == 0.0


def tf32(value: Tensor) -> Tensor:
    bits = value.view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def test_the_error_of_products_tells_tf32_and_bf16() -> None:
    error = strict.products("cpu", lambda a, b: tf32(a) @ tf32(b)).error
    assert math.log2(error) == pytest.approx(-11, abs=0.01)
    error = strict.products("cpu", lambda a, b: a.bfloat16().float() @ b.bfloat16().float()).error
    assert math.log2(error) == pytest.approx(-8.2, abs=0.05)
    assert strict.products("cpu", lambda a, b: a @ b * float("nan")).error == math.inf


# Any other accelerator: a real PrivateUse1 device, written in Python.
def test_a_device_says_what_a_script_must_import_for_it_to_exist() -> None:
    assert {name: device.modules for name, device in devices().items() if device.modules} == {"xla": ("torch_xla",)}


@pytest.mark.slow
@needs_python_backends
def test_generic_takes_a_python_written_backend() -> None:
    out = python(
        """
        import json, torch, toy_backend
        from accelcheck.devices.generic import Generic, found_types
        toy_backend.load()
        toy = Generic("toy")
        before = sorted(toy.dtypes), sorted(toy.features)
        toy.open()
        toy.seed(5)
        toy.synchronize()
        with toy.strict_float32():
            error = toy.float32_error()
        print(json.dumps([
            before, sorted(toy.dtypes), sorted(toy.features), str(toy.torch_device()), toy.usable().ok, error,
            toy.memory().allocated, toy.memory().reason, toy_backend.Module.seeds[-1], toy.fingerprint().chip,
            found_types(), Generic("npu").usable().code,
        ]))
        """,
        environ={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    before, dtypes, features, device, usable, error, allocated, reason, seed, chip, types, absent = json.loads(out)
    assert before == [["float32"], []]
    assert dtypes == ["bfloat16", "float32"]
    assert features == ["autocast-bfloat16"]
    assert (device, usable, error, allocated) == ("toy:0", True, 0.0, None)
    assert "no memory statistics" in reason
    assert (seed, chip, absent) == (5, "Toy 0", "no-package")
    assert types[-1] == "toy"


@pytest.mark.slow
@needs_python_backends
def test_the_fingerprint_of_a_backend_that_is_imported_has_its_version() -> None:
    out = python(
        """
        import json, os, toy_backend
        from accelcheck.core import imports
        from accelcheck.devices.generic import Generic
        toy_backend.load()
        before = Generic("toy").fingerprint()
        imports.announce(["filelock"])
        after = Generic("toy").fingerprint()
        print(json.dumps([before.runtime, sorted(before.versions), after.runtime, sorted(after.versions)]))
        """,
        environ={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    runtime, packages, named, more = json.loads(out)
    assert (runtime, packages) == ("torch.toy", ["numpy", "torch"])
    assert (named, more) == (f"filelock {version('filelock')}", ["filelock", "numpy", "torch"])


@pytest.mark.parametrize(("follows", "believed"), [("both", True), ("the current one", False), ("neither", False)])
def test_generic_believes_memory_statistics_whose_peak_follows_too(
    follows: str, believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnCpu(Generic):
        def torch_device(self) -> torch.device:
            return torch.device("cpu")

    grown = {"both": (1, 1), "the current one": (1, 0), "neither": (0, 0)}[follows]
    allocated = iter([100, 100 + grown[0] * generic_device._TRIAL])
    monkeypatch.setattr(generic_device, "_current", lambda: "toy")
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: grown[1] * (100 + generic_device._TRIAL))
    assert (OnCpu("toy")._trial() is None) is believed


def test_generic_declares_what_is_known_of_its_type() -> None:
    assert Generic("xpu").features > {"inductor"}
    assert Generic("stranger").features == frozenset()
    assert Generic("stranger").usable().code is Code.NO_PACKAGE


@pytest.mark.skipif(not Xla().detect().ok, reason="needs torch_xla")
def test_xla_for_real() -> None:
    out = python(
        """
        import json, os, torch
        from accelcheck.devices.xla import Xla
        xla = Xla()
        xla.open()
        device = xla.torch_device()
        left, right = torch.randn(64, 64), torch.randn(64, 64)
        product = left.to(device) @ right.to(device)
        xla.synchronize()
        close = torch.allclose(product.cpu(), left @ right, rtol=1e-4, atol=1e-4)
        with xla.strict_float32():
            error = xla.float32_error()
        xla.reset_fallbacks()
        clean = dict(xla.fallbacks())
        torch.linalg.eigvals(product)
        product.sum().item()
        dirty = dict(xla.fallbacks())
        xla.reset_fallbacks()
        xla.seed(3); first = torch.rand(4, device=device).cpu()
        xla.seed(3); second = torch.rand(4, device=device).cpu()
        print(json.dumps([close, error, clean, dirty, dict(xla.fallbacks()), torch.equal(first, second),
                          xla.memory().reason, xla.fingerprint().as_json()]))
        """,
        environ={"PJRT_DEVICE": "CPU"},
    )
    close, error, clean, dirty, after, same, reason, fingerprint = json.loads(out)
    assert close
    assert error == 0.0
    assert clean == after == {}
    assert dirty == {"aten::linalg_eig": 1}
    assert same
    assert "PJRT CPU" in reason
    assert fingerprint["runtime"] == "PJRT CPU"
    assert fingerprint["environment"]["PJRT_DEVICE"] == "CPU"
