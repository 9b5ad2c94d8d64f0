"""What of the host decides whether a run goes through: shared memory, disk, memory, limits, debuggers, variables. No torch."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelcheck.devices import hardware

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CUDA_13_DRIVER = 580
"""First major version of NVIDIA's driver that runs CUDA 13. https://docs.nvidia.com/deploy/cuda-compatibility."""
_PREFIXES = (
    *("ACCELCHECK_", "KMP_", "LIBTPU_", "MKL_", "OMP_", "PJRT_", "PYTORCH_", "TORCH", "XLA_"),
    *("AOT_", "BLIS_", "DNNL_", "NCCL_", "ONEDNN_", "OPENBLAS_", "TRITON_", "XPU_"),
)
_NAMES = frozenset(
    {
        "LD_PRELOAD",
        "MALLOC_CONF",
        "PYTEST_ADDOPTS",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD",
        "PYTEST_PLUGINS",
        "PYTHONHASHSEED",
    }
)
_DEBUGGERS = ("py-spy", "eu-stack", "gdb")
_PTRACE_SEIZE = 0x4206  # of <linux/ptrace.h>


@dataclass(frozen=True, slots=True)
class Room:
    """How much of something there is, in bytes; `total` is 0 where it is not known."""

    place: str
    free: int
    total: int


def shared_memory(place: Path = Path("/dev/shm")) -> Room | None:  # noqa: S108 - not a temporary file: what is asked about
    """Shared memory of the host or container; None where there is none."""
    return _room(place)


def temporary() -> Room | None:
    """Disk in the folder of temporary files, in which compiled code, references and messages lie; None where none can be written."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None
    return _room(folder)


def memory(root: Path = hardware.ROOT) -> Room:
    """Memory that this process may still use: of the host, or of its control group where that is less."""
    import psutil  # type: ignore[import-untyped]  # it comes without annotations

    host = psutil.virtual_memory()
    found = Room("memory of the host", int(host.available), int(host.total))
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _number(root / limit), _number(root / used)
        if most is not None and now is not None and most < found.total and most - now < found.free:
            found = Room("memory of the control group", max(0, most - now), most)
    return found


def limits() -> dict[str, int]:
    """The limits of this process that are finite, by the name that `ulimit` has for them."""
    known = {
        "open files (ulimit -n)": resource.RLIMIT_NOFILE,
        "processes (ulimit -u)": resource.RLIMIT_NPROC,
        "address space in bytes (ulimit -v)": resource.RLIMIT_AS,
        "size of a file in bytes (ulimit -f)": resource.RLIMIT_FSIZE,
        "CPU time in seconds (ulimit -t)": resource.RLIMIT_CPU,
    }
    soft = {name: resource.getrlimit(number)[0] for name, number in known.items()}
    return {name: value for name, value in soft.items() if value != resource.RLIM_INFINITY}


def variables(declared: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that are set and change results, speed or how a run begins, by name.

    Args:
        declared: Those that devices declare.
        environ: Of the process.
    """
    wanted = {*declared, *_NAMES}
    return {name: value for name, value in sorted(environ.items()) if name in wanted or name.startswith(_PREFIXES)}


def tracing() -> str:
    """Why a child of this process cannot be traced, which a debugger does to show native stacks; empty where it can."""
    if sys.platform != "linux":
        return "only known on Linux"
    # Not `os.fork`: threads of libraries may hold locks.
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
            libc.ptrace.restype = ctypes.c_long
            if libc.ptrace(_PTRACE_SEIZE, child.pid, None, None) == 0:
                return ""
            return os.strerror(ctypes.get_errno())
        finally:
            child.kill()


def debuggers() -> list[str]:
    """The installed programs that show native stacks of a process."""
    return [name for name in _DEBUGGERS if shutil.which(name)]


def compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The C++ compiler that inductor calls for the CPU: its name, and its first line about itself, empty where there is none."""
    name = environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        return name, ""
    with suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=20)  # noqa: S603 - as inductor calls it
        return name, next(iter(said.stdout.splitlines()), "it says no version")
    return name, ""


def cuda_major(runtime: str, driver: str) -> int:
    """The CUDA that extras are chosen for: that of torch's build, or else the newest that the driver runs; 0 without either.

    Args:
        runtime: Of the device's fingerprint, such as ``CUDA 13.0``.
        driver: Version of the driver, such as 580.159.04.
    """
    built = re.match(r"CUDA (\d+)", runtime)
    if built:
        return int(built[1])
    major = driver.partition(".")[0]
    if not major.isdecimal():
        return 0
    return 13 if int(major) >= CUDA_13_DRIVER else 12


def _room(place: Path) -> Room | None:
    try:
        found = shutil.disk_usage(place)
    except OSError:
        return None
    return Room(str(place), found.free, found.total)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None
