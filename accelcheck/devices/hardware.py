"""Finds the host's accelerators without opening them. Standard library only: nox runs this without packages.

Every function takes the root of the file system, so that tests can supply their own ``/proc``, ``/sys`` and ``/dev``.
"""

import ctypes
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable

ROOT = Path("/")
_NVIDIA, _AMD, _GOOGLE = "0x10de", "0x1002", "0x1ae0"
_DISPLAY, _ACCELERATOR = "0x03", "0x12"  # PCI base classes; AMD Instinct boards are processing accelerators

_GENERATION = {"cpu family": "family", "model": "model", "CPU implementer": "implementer", "CPU part": "part"}
"""Fields of ``/proc/cpuinfo``, of x86 and of Arm, and the words for them in a chip's name."""

# Google's vendor id is also that of its network and disk adapters: only these device ids are TPUs.
# Source: torch_xla/_internal/tpu.py and torch_tpu/_internal/utils/hardware.py.
_TPU_CHIPS = {
    "0x0027": "TPU v2/v3",
    "0x0056": "TPU",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7",
}


# Drivers that compute on the CPU: Mesa's (lvp; swrast in distributions of its old name) and Google's.
_SOFTWARE_VULKAN = re.compile(r"libvulkan_(lvp|lavapipe|swrast)|libvk_swiftshader")
_VULKAN_LOADER = "libvulkan.so.1"
_VULKAN_PACKAGES = (
    "install the GPU's driver, or Mesa's for the CPU (Debian: apt-get install mesa-vulkan-drivers libvulkan1)"
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Accelerators of one vendor on this host; names and driver are empty where they are not known.

    The capability is ``ok`` where a driver offers them to this process, else the reason why not.
    """

    count: int
    names: tuple[str, ...]
    driver: str
    capability: Capability


def nvidia(root: Path = ROOT) -> Hardware:
    """NVIDIA GPUs, from the driver's ``/proc`` entries, its device nodes, WSL's adapter, or the PCI bus."""
    files = [path / "information" for path in _children(root / "proc/driver/nvidia/gpus")]
    names = tuple(_match(r"(?m)^Model:\s*(.+)$", _read(file)) or "NVIDIA GPU" for file in files)
    nodes = _nodes(root / "dev", r"nvidia\d+")
    boards = [board for board in _pci(root, _NVIDIA) if board.is_class(_DISPLAY) and board.driver != "vfio-pci"]
    driver = _match(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _read(root / "proc/driver/nvidia/version"))
    # In a container only its own GPUs have nodes, while /proc and PCI show the whole host.
    count = len(nodes) or len(names)
    if not count and (root / "dev/dxg").exists() and any((root / "usr/lib/wsl/lib").glob("libcuda.so*")):
        count = 1
    if count:
        return Hardware(count, names if len(names) == count else (), driver, SUPPORTED)
    reason, action = "no NVIDIA GPU found", "run on a machine with an NVIDIA GPU"
    if boards:
        reason = f"PCI shows {len(boards)} NVIDIA GPU(s), but neither /dev/nvidia0 nor /proc/driver/nvidia exists"
        action = "load the NVIDIA driver, or pass the GPUs into the container (--gpus all)"
    return Hardware(len(boards), (), driver, unavailable(Code.NO_HARDWARE, reason, action))


def amd(root: Path = ROOT) -> Hardware:
    """AMD GPUs, from ROCm's compute driver (``/dev/kfd`` and its topology), else the PCI bus."""
    names = tuple(_amd_names(root))
    driver = _read(root / "sys/module/amdgpu/version").strip()
    if (root / "dev/kfd").exists() and names:
        return Hardware(len(names), names, driver, SUPPORTED)
    if (root / "dev/dxg").exists() and (root / "opt/rocm").exists():
        return Hardware(1, (), driver, SUPPORTED)
    boards = [board for board in _pci(root, _AMD) if board.is_class(_DISPLAY, _ACCELERATOR)]
    reason, action = "no AMD GPU found", "run on a machine with an AMD GPU"
    if boards:
        reason = f"PCI shows {len(boards)} AMD GPU(s), but /dev/kfd offers none for compute"
        action = "load amdgpu, or pass the GPUs into the container (--device=/dev/kfd --device=/dev/dri)"
    return Hardware(len(boards), (), driver, unavailable(Code.NO_HARDWARE, reason, action))


def tpu(root: Path = ROOT) -> Hardware:
    """Google TPU chips, from their PCI ids, else from ``/dev/accel*``. ``/dev/vfio`` alone proves nothing."""
    names = tuple(
        _TPU_CHIPS.get(board.device, f"TPU {board.device}")
        for board in _pci(root, _GOOGLE)
        if board.device in _TPU_CHIPS or board.is_class(_ACCELERATOR)
    )
    if names:
        return Hardware(len(names), names, "", SUPPORTED)
    nodes = _nodes(root / "dev", r"accel\d+")
    if nodes:
        return Hardware(len(nodes), (), "", SUPPORTED)
    missing = unavailable(Code.NO_HARDWARE, "no TPU chip on the PCI bus (vendor 0x1ae0)", "run on a Cloud TPU VM")
    return Hardware(0, (), "", missing)


def vulkan(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Hardware:
    """Usable Vulkan drivers: those for the CPU, and those for GPUs where a GPU has a device node.

    Manifests are read where the Vulkan loader reads them: in ``VK_DRIVER_FILES``, else in ``vulkan/icd.d`` of the XDG
    folders (https://github.com/KhronosGroup/Vulkan-Loader, docs/LoaderDriverInterface.md). On macOS torchvulkan ships
    a driver.
    """
    if sys.platform == "darwin":
        return Hardware(1, (), "", SUPPORTED)
    libraries = dict.fromkeys(library for file in _vulkan_files(root, environ) if (library := _vulkan_library(file)))
    gpu = _nodes(root / "dev/dri", r"renderD\d+") or _nodes(root / "dev", r"nvidia\d+") or (root / "dev/dxg").exists()
    names = tuple(name for name in libraries if gpu or _SOFTWARE_VULKAN.search(name))
    if libraries and not names:
        reason = f"no GPU has a device node, and no Vulkan driver for the CPU is installed: {', '.join(libraries)}"
    elif not names:
        reason = "no Vulkan driver is installed"
    elif root == ROOT and not _loads(_VULKAN_LOADER):
        reason = f"the Vulkan loader {_VULKAN_LOADER} cannot be loaded"
    else:
        return Hardware(len(names), names, "", SUPPORTED)
    return Hardware(0, (), "", unavailable(Code.NO_HARDWARE, reason, _VULKAN_PACKAGES))


def cpu(root: Path = ROOT) -> str:
    """The processor's model name, from ``/proc/cpuinfo`` where it has one.

    The name includes family and model numbers: hypervisors call several generations ``AMD EPYC``, and Arm processors
    have no name.
    """
    text = _read(root / "proc/cpuinfo")
    name = _match(r"(?m)^(?:model name|cpu model|Processor|cpu)\s*:\s*(.+)$", text)
    numbers = {field: _match(rf"(?m)^{field}\s*:\s*(\w+)\s*$", text) for field in _GENERATION}
    generation = ", ".join(f"{_GENERATION[field]} {number}" for field, number in numbers.items() if number)
    return (name or platform.processor() or platform.machine() or "unknown CPU") + f" ({generation})" * bool(generation)


def chips(device: str) -> int:
    """Number of chips on this host of a device by name; 0 where they cannot be counted without opening it."""
    found = {"cuda": nvidia, "rocm": amd, "tpu": tpu, "xla": tpu}
    return found[device]().count if device in found else 0


def usable_cores() -> int:
    """Number of logical processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Board:
    device: str
    kind: str
    driver: str

    def is_class(self, *bases: str) -> bool:
        return self.kind.startswith(bases)


def _pci(root: Path, vendor: str) -> Iterator[_Board]:
    for path in _children(root / "sys/bus/pci/devices"):
        if _read(path / "vendor").strip() == vendor:
            link = path / "driver"
            driver = link.readlink().name if link.is_symlink() else ""
            yield _Board(_read(path / "device").strip(), _read(path / "class").strip(), driver)


def _vulkan_files(root: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """The manifests of drivers that the Vulkan loader reads; those of `root` have absolute paths within it."""

    def paths(variable: str, default: str = "") -> list[str]:
        return [word for word in (environ.get(variable) or default).split(os.pathsep) if word]

    files = paths("VK_DRIVER_FILES") or paths("VK_ICD_FILENAMES")  # the second is the old name of the first
    home = environ.get("HOME", "")
    folders = [
        *paths("XDG_CONFIG_HOME", f"{home}/.config"),
        *paths("XDG_CONFIG_DIRS", "/etc/xdg"),
        "/etc",
        *paths("XDG_DATA_HOME", f"{home}/.local/share"),
        *paths("XDG_DATA_DIRS", "/usr/local/share:/usr/share"),
    ]
    for word in files or [*paths("VK_ADD_DRIVER_FILES"), *(f"{folder}/vulkan/icd.d" for folder in folders)]:
        path = root / word.lstrip("/")
        yield from [path] if path.suffix == ".json" else [file for file in _children(path) if file.suffix == ".json"]


def _vulkan_library(manifest: Path) -> str:
    """The name of a driver's library; empty where the manifest does not tell."""
    try:
        library = json.loads(_read(manifest))["ICD"]["library_path"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return Path(library).name if isinstance(library, str) else ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _amd_names(root: Path) -> Iterator[str]:
    for path in _children(root / "sys/class/kfd/kfd/topology/nodes"):
        # The properties of a GPU that the container may not use cannot be read.
        properties = dict(line.split(maxsplit=1) for line in _read(path / "properties").splitlines() if " " in line)
        if int(properties.get("simd_count", "0")) > 0:
            version = int(properties.get("gfx_target_version", "0"))
            # 90402 is gfx942, 90010 is gfx90a, 110001 is gfx1101.
            yield f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else "AMD GPU"


def _children(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _nodes(folder: Path, pattern: str) -> list[Path]:
    return [path for path in _children(folder) if re.fullmatch(pattern, path.name)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1).strip() if match else ""
