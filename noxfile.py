"""One session per backend, and those for accelcheck itself. Start with ``nox -s cpu``; ``nox -l`` lists all sessions.

Nox skips a backend whose hardware is absent before it installs anything, and prints the reason. Arguments after ``--``
go to pytest. Environment variables:

* ``ACCELCHECK_LEVEL``: level of the suite, 1 to 4. The default, 1, answers within minutes.
* ``ACCELCHECK_WORKERS``: number of pytest-xdist workers. The default is one per core for the CPU and for XLA on it, and
  one per chip otherwise.
* ``ACCELCHECK_BASELINE``: what is done with stored baselines: check (default), update, new-only or off.
* ``ACCELCHECK_INDEX``: address of the wheel index that this session's torch is installed from, such as a vendor's. When
  it does not answer within a few seconds, the default index is used.

``nox --no-venv -s rocm`` installs nothing and runs in the environment at hand: for vendors' containers.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import nox

sys.path.insert(0, str(Path(__file__).parent))  # nox runs without accelcheck installed; these modules need no torch

from accelcheck.commands.session import LEVEL, Half, Session, client, joined, report, workers
from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.devices import hardware

if TYPE_CHECKING:
    from collections.abc import Sequence

PINS = {
    "cpu": ("torch==2.13.0",),
    "cuda": ("torch==2.15.0",),
    "rocm": ("torch==2.12.0",),
    "xla": ("torch==2.9.0", "torch_xla==2.9.0"),
    "tpu": ("torch==2.15.0", "torch-tpu==0.2.0"),
    "vulkan": ("torch==2.13.0", "torchvulkan==0.2.1"),
}
"""Packages that each session installs: the one place where torch is pinned."""
EXTRAS = {
    "cpu": "[accuracy,torchao,checkpoints,triton,onnx,openvino,extensions]",
    "cuda": "[accuracy,torchao,extensions,cuda13]",
    "rocm": "[accuracy,torchao,extensions]",
    "xla": "[accuracy,extensions]",
    "tpu": "[accuracy,extensions]",
    "vulkan": "[accuracy,torchao,extensions]",
}
IMPORTS = {"vulkan": ("--accel-import=torchvulkan",)}
"""Options of sessions whose backend no entry point loads."""
CUDA_13_DRIVER = 580
"""First major version of NVIDIA's driver for CUDA 13, as in torch 2.11 and later; 525 and later run CUDA 12.
https://docs.nvidia.com/deploy/cuda-compatibility."""
CUDA_12 = (("torch==2.10.0",), "[accuracy,torchao,extensions,cuda12]")
"""Packages of the session `cuda` for an older driver: the last torch in the default index with CUDA 12."""
WHEELS = {"cuda": (("flash-attn",), ("--pre", "flash-attn-4"))}
"""Packages that a session installs only where a wheel exists: building them takes an hour."""
BENCHMARKS = (
    ("benchmarks/plugin_cost.py",),
    (
        "benchmarks/verdict_speed.py",
        *("--exponents", "10", "16", "20", "--memory", "10", "16", "20", "24", "--blocks", "15"),
    ),
    ("benchmarks/speed_gates.py", "--table", "baselines/cpu/speed_gates.jsonl"),
    ("benchmarks/baseline_checks.py", "--level", "2", "--folder", "baselines/cpu/baseline_checks", "--table"),
)
"""Benchmarks of less than a minute; each exits with 1 where a documented limit is exceeded."""
REPORTS = "reports"
"""Folder of the journals and the report of each session, in a folder of the device's name."""
REPORT = "report.html"
INDEX_TIMEOUT = 5.0
"""Seconds to wait for a wheel index to answer."""
FUZZERS = ("benchmarks/fuzz_package.py", "benchmarks/fuzz_readers.py")
"""Scripts that feed mutated untrusted input to readers; each exits with 1 where one crashes or sees nothing."""

nox.needs_version = ">=2025.2"
nox.options.sessions = ["cpu"]
nox.options.reuse_venv = "yes"  # torch_xla alone is 7 GB
nox.options.error_on_missing_interpreters = True


def _rocm() -> Capability:
    capability = hardware.amd().capability
    if capability.ok and not os.environ.get("ACCELCHECK_INDEX") and not _no_venv():
        return unavailable(
            Code.WRONG_BUILD,
            "the default index has no ROCm build of torch",
            "set ACCELCHECK_INDEX to the ROCm wheel index that pytorch.org names for your driver, "
            "or use --no-venv in an environment that has one",
        )
    return capability


def _no_venv() -> bool:
    return "--no-venv" in sys.argv


ABSENT = {
    "cpu": SUPPORTED,
    "cuda": hardware.nvidia().capability,
    "rocm": _rocm(),
    "xla": SUPPORTED,  # PJRT has a CPU client: a real XLA device on any machine
    "tpu": hardware.tpu().capability,
    "vulkan": hardware.vulkan().capability,
}


def _venv(device: str) -> str:
    """The backend of a session's environment: none for a session that will be skipped."""
    return "virtualenv" if ABSENT[device].ok else "none"


def _index(session: nox.Session) -> list[str]:
    """Arguments that make pip use the requested wheel index; none if it does not answer."""
    address = os.environ.get("ACCELCHECK_INDEX")
    if not address:
        return []
    parts = urlsplit(address)
    # Without the credentials that pip may find in it: urllib does not take them, and they do not belong into a log.
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    try:
        with urllib.request.urlopen(bare, timeout=INDEX_TIMEOUT):  # noqa: S310 - the caller's own index
            pass
    except urllib.error.HTTPError:
        pass  # it answers; pip asks for other pages than its root
    except (OSError, ValueError, http.client.HTTPException) as error:
        session.warn(f"ACCELCHECK_INDEX={bare} does not answer ({error}); the default index serves instead")
        return []
    return ["--index-url", address]


def _driver() -> str:
    """Version of NVIDIA's driver, such as 580.159.04; empty where neither /proc nor nvidia-smi tells."""
    card = hardware.nvidia().driver
    if card or shutil.which("nvidia-smi") is None:
        return card
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(  # noqa: S603 - fixed words
            asked, capture_output=True, text=True, check=False, timeout=30
        )
        lines = answer.stdout.splitlines()
        return lines[0].strip() if lines else ""
    return ""


def _needs(session: nox.Session, device: str) -> tuple[tuple[str, ...], str]:
    """Pins and extras of a backend's session; those of CUDA are the newest that the driver runs."""
    major = _driver().partition(".")[0] if device == "cuda" else ""
    if major.isdecimal() and int(major) < CUDA_13_DRIVER:
        pins, extras = CUDA_12
        session.warn(
            f"driver {_driver()} runs CUDA 12: {', '.join(pins)} instead of {', '.join(PINS[device])}, "
            f"which needs {CUDA_13_DRIVER}"
        )
        return pins, extras
    return PINS[device], EXTRAS[device]


def _session(device: str, posargs: Sequence[str], chosen: Sequence[str] = (), command: str = "") -> Session:
    """Makes a session with journals and report in its device's folder, emptied unless the user names a journal.

    Args:
        device: Its name.
        posargs: Arguments that the user gives to pytest.
        chosen: Options for both halves.
        command: Command, see `Session`.
    """
    folder = Path(REPORTS) / device
    session = Session(device, folder / "journal.jsonl", chosen, joined(posargs), command)
    if session.journals[0] == session.journal:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*session.journals, folder / REPORT):
            old.unlink(missing_ok=True)  # what this session does not write is not shown as its own
    return session


def _report(session: nox.Session, journals: Sequence[Path]) -> None:
    """Make the report of what there is, and print its path last. It never changes how the session ends."""
    written = [path for path in journals if path.is_file() and path.stat().st_size]
    if not written:
        session.warn("no report: no journal was written")
        return
    path = written[0].with_name(REPORT)
    words = report(written, path)
    # Any status: whether cases failed is what the suite has said.
    session.run("python", *words, success_codes=list(range(256)), silent=True)
    if path.is_file():
        session.log(f"report: {path.resolve().as_uri()}")
    else:
        session.warn(f"no report: accelcheck {shlex.join(words[2:])} says why")


def _baseline() -> str:
    return (
        os.environ.get("ACCELCHECK_BASELINE") or "check"
    )  # a workflow passes a variable that is not set as an empty one


def _suite(session: nox.Session, device: str) -> None:
    if not ABSENT[device].ok:
        session.skip(f"{device}: {ABSENT[device]}")
    if not isinstance(session.virtualenv, nox.virtualenv.PassthroughEnv):
        pins, extras = _needs(session, device)
        index = _index(session)
        session.install(*pins, *index)
        session.install("-e", f".{extras}")
        for wheel in WHEELS.get(device, ()):
            # With the pins, so that it brings no other torch; exit status 1 where no wheel fits.
            session.run(
                "python",
                "-m",
                "pip",
                "install",
                "-q",
                "--only-binary=:all:",
                *wheel,
                *pins,
                *index,
                success_codes=[0, 1],
            )
    kept = [word for word in session.posargs if not word.startswith("--accel-level=")]
    command = ["nox", *(["--no-venv"] if _no_venv() else []), "-s", device, *(["--", *kept] if kept else [])]
    chosen = (*IMPORTS.get(device, ()), f"--accel-level={os.environ.get(LEVEL) or '1'}")
    halves = _session(device, session.posargs, chosen, shlex.join(command))

    def start(half: Half) -> int:
        # A selection may leave nothing to time.
        codes = [0, 5] if half.timed and session.posargs else [0]
        session.run("pytest", *half.words, env=half.environ, success_codes=codes)
        return 0

    try:
        halves.run(start, lambda: [f"--accel-baseline={_baseline()}"])
    finally:  # also when cases failed: then most of all
        _report(session, halves.journals)


@nox.session(venv_backend=_venv("cpu"))
def cpu(session: nox.Session) -> None:
    """The matrix on this machine's CPU."""
    _suite(session, "cpu")


@nox.session(venv_backend=_venv("cuda"))
def cuda(session: nox.Session) -> None:
    """The matrix on NVIDIA GPUs."""
    _suite(session, "cuda")


@nox.session(venv_backend=_venv("rocm"))
def rocm(session: nox.Session) -> None:
    """The matrix on AMD GPUs. Needs ACCELCHECK_INDEX."""
    _suite(session, "rocm")


@nox.session(venv_backend=_venv("xla"))
def xla(session: nox.Session) -> None:
    """The matrix on torch_xla: on a TPU, or on PJRT's CPU client."""
    _suite(session, "xla")


@nox.session(venv_backend=_venv("tpu"))
def tpu(session: nox.Session) -> None:
    """The matrix on torch_tpu."""
    _suite(session, "tpu")


@nox.session(venv_backend=_venv("vulkan"))
def vulkan(session: nox.Session) -> None:
    """The matrix on torchvulkan: on a GPU of any maker, or on Mesa's Vulkan driver for the CPU."""
    _suite(session, "vulkan")


@nox.session
def tests(session: nox.Session) -> None:
    """Accelcheck's own tests."""
    session.install(*PINS["cpu"], *_index(session))
    session.install(
        "-e", ".[accuracy,torchao,plot,sign]", *nox.project.dependency_groups(nox.project.load_toml(), "tests")
    )
    # Many tests wait for processes that they started: one more worker than cores has work, each with one thread.
    more = str(int(workers("cpu")) + 1)
    # Bytecode is kept, whatever the shell says: hundreds of processes would compile accelcheck anew.
    environ = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": None}
    session.run("pytest", "tests", "-n", more, "-q", *session.posargs, env=environ)


@nox.session
def browser(session: nox.Session) -> None:
    """Tests the HTML report in a real browser and makes its pictures. Needs Debian's chromium and chromium-driver."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            session.skip(f"{program} is not installed: apt-get install chromium chromium-driver")
    session.install(*PINS["cpu"], *_index(session))
    groups = nox.project.dependency_groups(nox.project.load_toml(), "tests", "browser")
    session.install("-e", ".", *groups)
    session.run("pytest", "tests/report/test_browser.py", "-q", *session.posargs)
    session.run("python", "benchmarks/report_speed.py")
    session.run("python", "benchmarks/report_pictures.py")


@nox.session
def selftest(session: nox.Session) -> None:
    """Every planted fault caught, no correct variant failed: `accelcheck selftest` on the CPU."""
    session.install(*PINS["cpu"], *_index(session))
    session.install("-e", f".{EXTRAS['cpu']}")
    session.run("accelcheck", "selftest", *session.posargs)


def _models(session: nox.Session, device: str) -> None:
    """The tests of examples/vision and examples/language, with the libraries that their models come from."""
    if isinstance(session.virtualenv, nox.virtualenv.PassthroughEnv):
        session.error("it installs packages: run it without --no-venv")
    # In one command, so that what these libraries need fits the pin.
    groups = nox.project.dependency_groups(nox.project.load_toml(), "models")
    session.install(*PINS[device], "-e", ".", *groups, *_index(session))
    words = (f"--accel-device={device}", "--accel-require", "-q", *session.posargs)
    session.run("pytest", "examples/vision", "examples/language", *words, env=client(device))


@nox.session
def models_cpu(session: nox.Session) -> None:
    """Models of transformers, checked as their owners would, on the CPU."""
    _models(session, "cpu")


@nox.session
def models_xla(session: nox.Session) -> None:
    """The same on XLA."""
    _models(session, "xla")


VENDOR = "examples/vendor-device"


@nox.session
def vendor(session: nox.Session) -> None:
    """The example of a vendor's device: builds it, qualifies it at level 1, assesses, packs and verifies the result."""
    if shutil.which("g++") is None:
        session.skip("vendor: no C++ compiler; on Debian: apt-get install g++")
    session.install(*PINS["cpu"], *_index(session))
    session.install("-e", ".[accuracy,torchao]", "setuptools>=77", "ninja>=1.11")
    session.install("--no-build-isolation", "--no-deps", f"./{VENDOR}")
    judged = _session("acme", (), ("--accel-level=1",)).judged()
    journal = judged.journal
    package = journal.with_name("acme.accelpack")
    try:
        session.run("pytest", *judged.words, *session.posargs, "-n", workers("cpu"))
    finally:
        _report(session, [journal])
    session.run("accelcheck", "assess", str(journal))
    session.run("accelcheck", "pack", str(journal), "-o", str(package))
    session.run("accelcheck", "verify", str(package))


WORKFLOWS = ("examples/ci/relay.yml", "examples/ci/self-hosted.yml")
SLURM = ("munged", "slurmctld", "slurmd", "sbatch")
"""Programs of Debian's packages slurm-wlm and munge."""
SLURM_SELECTION = ("--accel-device=cpu", "--accel-technique=eager", "--accel-workload=mlp", "--accel-workload=matmul")
"""Four cases: what is tried is the way of their journals."""


def _without_slurm() -> list[str]:
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # daemons are not on every user's PATH
    return [name for name in SLURM if shutil.which(name, path=path) is None]


def _cases(journal: Path) -> list[str]:
    """Ids of the cases of a journal; none where there is no such file."""
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else []
    return [document["case"]["id"] for line in lines if (document := json.loads(line)).get("kind") == "case"]


@nox.session(venv_backend="none" if _without_slurm() else "virtualenv")
def slurm(session: nox.Session) -> None:
    """examples/ci/slurm-array.sh for real: a Slurm of this one machine, two tasks, their journals merged."""
    if absent := _without_slurm():
        session.skip(f"slurm: {', '.join(absent)} not installed; on Debian: apt-get install slurm-wlm munge")
    if not isinstance(session.virtualenv, nox.virtualenv.PassthroughEnv):
        session.install(*PINS["cpu"], *_index(session))
        session.install("-e", ".")
    words = ("examples/ci/slurm_one_node.py", "--limit", "300", "bash", "examples/ci/slurm-array.sh", *SLURM_SELECTION)
    with tempfile.TemporaryDirectory(prefix="accelcheck-slurm-") as name:
        folder = Path(name)
        session.run("python", *words, *session.posargs, env={"ACCELCHECK_FOLDER": name, "ACCELCHECK_SHARDS": "2"})
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}", log.read_text(encoding="utf-8", errors="replace"), sep="\n")
        parts = [_cases(folder / f"shard-{number}.jsonl") for number in (1, 2)]
        merged = _cases(folder / "journal.jsonl")
    if not all(parts) or sorted([*parts[0], *parts[1]]) != sorted(merged):
        session.error(f"expected the cases of both tasks, {parts}, in the merged journal, got {merged}")
    print(f"{len(parts[0])} and {len(parts[1])} cases of two array tasks are {len(merged)} in the merged journal")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Checks what the documentation promises about speed, with the short scripts of benchmarks/."""
    session.install(*PINS["cpu"], *_index(session))
    session.install("-e", ".", *nox.project.dependency_groups(nox.project.load_toml(), "tests"))
    for words in BENCHMARKS:
        session.run("python", *words)


@nox.session
def regenerate(session: nox.Session) -> None:
    """Writes every derived file: tables of the documentation, stored cases, must-pass lists, ceilings."""
    session.install(*PINS["cpu"], *_index(session))
    session.install("-e", ".[accuracy,torchao]", *nox.project.dependency_groups(nox.project.load_toml(), "tests"))
    session.run("python", "benchmarks/regenerate.py", *session.posargs)


@nox.session
def templates(session: nox.Session) -> None:
    """Lints examples/ci: schemas of GitHub's workflows and of Kubernetes, zizmor, shellcheck. None needs a network."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml(), "templates"))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    session.run("zizmor", "--offline", "--no-progress", *WORKFLOWS)
    session.run("kubernetes-validate", "--strict", "examples/ci/kubernetes-job.yaml")
    session.run("shellcheck", "examples/ci/slurm-array.sh")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Readers of what strangers wrote, on mutated input: journals, packages, ledgers, baselines, limits."""
    session.install(*PINS["cpu"], *_index(session))
    session.install("-e", ".[sign]", *nox.project.dependency_groups(nox.project.load_toml(), "tests"))
    for script in FUZZERS:
        session.run("python", script, *session.posargs)
    session.run("pytest", "tests/core/test_fuzz_journal.py", "-q")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site in the folder site; warnings are errors."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml(), "docs"))
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml(), "lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Mypy, strict."""
    session.install(*PINS["cpu"], *_index(session))
    session.install("-e", ".", *nox.project.dependency_groups(nox.project.load_toml(), "typecheck"))
    session.run("mypy", *session.posargs)
    for example in sorted(Path("examples").rglob("*.py")):  # one by one: two are named conftest.py
        session.run("mypy", str(example))
