"""Reads the host's shared memory, disk, memory, limits, debuggers and variables, on which runs depend. No torch."""

import ctypes
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accelcheck.core.native_stacks import PROGRAMS
from accelcheck.devices import hardware

CUDA_13_DRIVER = 580
"""First major version of NVIDIA's driver that runs CUDA 13. https://docs.nvidia.com/deploy/cuda-compatibility."""
_PREFIXES = (
    *("ACCELCHECK_", "KMP_", "LIBTPU_", "MKL_", "OMP_", "PJRT_", "PYTORCH_", "TORCH", "XLA_"),
    *("AOT_", "BLIS_", "DNNL_", "NCCL_", "ONEDNN_", "OPENBLAS_", "TRITON_", "XPU_"),
)
_NAMES = (
    *("LD_PRELOAD", "MALLOC_CONF", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_PLUGINS"),
    "PYTHONHASHSEED",
)
_PTRACE_SEIZE = 0x4206  # from <linux/ptrace.h>


@dataclass(frozen=True, slots=True)
class Room:
    """Free and total bytes of a kind of storage; `total` is 0 where it is not known."""

    place: str
    free: int
    total: int


def shared_memory(place: Path = Path("/dev/shm")) -> Room | None:  # noqa: S108 - no temporary file
    """Shared memory of the host or container; None where there is none."""
    return _room(place)


def temporary() -> Room | None:
    """Disk space in the folder of temporary files: compiled code, references, messages; None where there is none."""
    with suppress(FileNotFoundError):
        return _room(Path(tempfile.gettempdir()))
    return None


def memory(root: Path = hardware.ROOT) -> Room:
    """Available memory: that of the host, or that of the control group where it is less."""
    import psutil  # type: ignore[import-untyped]  # it comes without annotations

    host = psutil.virtual_memory()
    least = Room("memory of the host", int(host.available), int(host.total))
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _number(root / limit), _number(root / used)
        if most is not None and now is not None and most < least.total and most - now < least.free:
            least = Room("memory of the control group", max(0, most - now), most)
    return least


def limits() -> dict[str, int]:
    """The finite limits of this process, by the name that `ulimit` has for them."""
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
    """The set variables of a process, by name, that change results, speed or the start of a run, with declared ones."""
    wanted = {*declared, *_NAMES}
    return {name: value for name, value in sorted(environ.items()) if name in wanted or name.startswith(_PREFIXES)}


def tracing() -> str:
    """The reason why a debugger cannot trace a child of this process to show native stacks; empty where it can."""
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
    return [name for name in PROGRAMS if shutil.which(name)]


def compiler(environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Name and first line of ``--version`` of the C++ compiler of inductor; the line is empty without a compiler."""
    name = environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        return name, ""
    with suppress(OSError, subprocess.TimeoutExpired):
        asked = [path, "--version"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=20)  # noqa: S603
        return name, next(iter(answer.stdout.splitlines()), "it says no version")
    return name, ""


def cuda_major(runtime: str, driver: str) -> int:
    """Major version of CUDA for extras: that of torch's build, else the newest that the driver runs, else 0."""
    built = re.match(r"CUDA (\d+)", runtime)
    if built:
        return int(built[1])
    major = driver.partition(".")[0]
    if not major.isdecimal():
        return 0
    return 13 if int(major) >= CUDA_13_DRIVER else 12


def _room(place: Path) -> Room | None:
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return Room(str(place), usage.free, usage.total)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None
