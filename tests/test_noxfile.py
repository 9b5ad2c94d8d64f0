"""noxfile.py: its sessions, its pins, its wheel index, and that absent hardware costs nothing."""

from __future__ import annotations

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from process_harness import completed, script

from accelcheck.core.capability import SUPPORTED, Code
from accelcheck.devices import hardware

nox = pytest.importorskip("nox", reason="nox is not installed: pip install --group tests")

ROOT = Path(__file__).parents[1]
BACKENDS = ["cpu", "cuda", "rocm", "xla", "tpu", "vulkan"]
PIP, INDEX = "--index-url", "ACCELCHECK_INDEX"


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The module, in an environment without any of its variables, and in a folder where sessions may write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for name in [name for name in os.environ if name.startswith(("ACCELCHECK_", "PJRT_DEVICE"))]:
        monkeypatch.delenv(name)
    return load()


@cache
def load() -> Any:
    """The module, executed once: nox warns of sessions that are registered twice."""
    return script(ROOT / "noxfile.py")


class SkippedError(Exception):
    """Exception of a session that skips itself."""


class CaseFailedError(Exception):
    pass


class Session:
    """A nox session that writes down what it is told to do."""

    posargs: tuple[str, ...] = ("--exitfirst",)

    def __init__(self, environment: Any = None) -> None:
        self.virtualenv = environment
        self.installed: list[str] = []
        self.runs: list[list[str]] = []
        self.env: dict[str, str] = {}
        self.warned: list[str] = []
        self.missing_allowed = 0
        self.reported: list[list[str]] = []
        self.logged: list[str] = []
        self.failing = False

    def log(self, text: str) -> None:
        self.logged.append(text)

    def install(self, *words: str) -> None:
        self.installed += words

    @property
    def ran(self) -> list[str]:
        return self.runs[0]

    def run(
        self, *words: str, env: dict[str, str] | None = None, success_codes: Sequence[int] = (0,), silent: bool = False
    ) -> None:
        assert 0 in success_codes
        assert silent == ("report" in words)  # the session itself says where it is
        if "report" in words:
            self.reported.append(list(words))
            Path(words[-1].removeprefix("--html=")).touch()
            return
        for option, _, path in (word.partition("=") for word in words):
            if option == "--accel-journal":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text("{}\n", encoding="ascii")
        self.missing_allowed += success_codes == [0, 1]
        self.runs.append(list(words))
        self.env |= env or {}
        if self.failing:
            raise CaseFailedError

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def skip(self, reason: str) -> None:
        raise SkippedError(reason)


def run_nox(*words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELCHECK_", "NOX"))}
    return completed(
        [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), *words],
        timeout=60,
        env=environ | {"NO_COLOR": "1"},
    )


def test_every_session_is_listed_with_what_it_does() -> None:
    done = run_nox("--list")
    assert done.returncode == 0, done.stderr
    sessions = re.findall(r"^([*-]) (\w+) -> \S.*$", done.stdout, re.MULTILINE)
    assert sorted(name for _, name in sessions) == sorted(
        [
            *BACKENDS,
            *(
                "tests",
                "selftest",
                "browser",
                "benchmarks",
                "fuzz",
                "docs",
                "lint",
                "typecheck",
                "templates",
                "slurm",
                "vendor",
                "models_cpu",
                "models_xla",
                "regenerate",
            ),
        ]
    )
    assert [name for selected, name in sessions if selected == "*"] == ["cpu"]


def test_torch_is_pinned_for_each_backend_and_nowhere_else(noxfile: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    supported = next(r for r in map(Requirement, project["project"]["dependencies"]) if r.name == "torch").specifier
    assert sorted(noxfile.PINS) == sorted(noxfile.EXTRAS) == sorted(BACKENDS)
    for requirements in (*noxfile.PINS.values(), noxfile.CUDA_12[0]):
        torch, *others = map(Requirement, requirements)
        assert torch.name == "torch"
        for pin in (torch, *others):
            (exact,) = pin.specifier
            assert exact.operator == "=="
        (exact,) = torch.specifier
        assert supported.contains(exact.version)
    # torch_xla is bound to the C++ symbols of one torch release.
    torch, xla = map(Requirement, noxfile.PINS["xla"])
    assert str(torch.specifier) == str(xla.specifier)
    pins = [
        r
        for requirements in (*noxfile.PINS.values(), noxfile.CUDA_12[0])
        for r in requirements
        if r.startswith("torch==")
    ]
    assert len(re.findall(r"torch==", (ROOT / "noxfile.py").read_text())) == len(pins)
    assert "torch==" not in (ROOT / "pyproject.toml").read_text()


@contextmanager
def silent() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/simple/"


@contextmanager
def refusing() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # held, so that nobody else can listen there
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/simple/"


@contextmanager
def rude() -> Iterator[str]:
    """An address that answers in another language than HTTP."""

    def serve() -> None:
        peer, _ = listening.accept()
        with peer:
            peer.recv(1024)
            peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/simple/"
        thread.join()


@contextmanager
def nonsense() -> Iterator[str]:
    yield "not an address"


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
            del format, args

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/simple/"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would answer for the addresses of these tests."""
    monkeypatch.setenv("no_proxy", "*")


def test_the_default_index_serves_unless_another_is_named(noxfile: Any) -> None:
    session = Session()
    assert noxfile._index(session) == []
    assert not session.warned


@pytest.mark.parametrize("place", [refusing, silent, rude, nonsense])
def test_an_index_without_answer_is_left_in_seconds(noxfile: Any, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    assert noxfile.INDEX_TIMEOUT <= 10
    monkeypatch.setattr(noxfile, "INDEX_TIMEOUT", 1.0)
    session = Session()
    with place() as address:
        monkeypatch.setenv(INDEX, address)
        begun = time.monotonic()
        assert noxfile._index(session) == []
    assert time.monotonic() - begun < 5
    (warning,) = session.warned
    assert address in warning
    assert "the default index serves instead" in warning


@pytest.mark.parametrize("status", [200, 403, 404])
def test_an_index_that_answers_is_used(noxfile: Any, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    session = Session()
    with answering(status) as address:
        monkeypatch.setenv(INDEX, address)
        assert noxfile._index(session) == [PIP, address]
    assert not session.warned


def test_credentials_in_the_address_reach_pip_and_no_log(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    with answering(401) as address:
        secret = address.replace("http://", "http://me:hush@")
        monkeypatch.setenv(INDEX, secret)
        assert noxfile._index(session) == [PIP, secret]
    with refusing() as address:
        monkeypatch.setenv(INDEX, address.replace("http://", "http://me:hush@"))
        assert noxfile._index(session) == []
    assert "hush" not in session.warned[0]


@pytest.mark.skipif(
    hardware.nvidia().capability.ok or hardware.amd().capability.ok or hardware.tpu().capability.ok,
    reason="this machine has an accelerator",
)
def test_absent_hardware_skips_before_anything_is_installed() -> None:
    begun = time.monotonic()
    done = run_nox("-s", "cuda", "rocm", "tpu")
    assert time.monotonic() - begun < 10
    assert done.returncode == 0
    for name, reason in (("cuda", "no NVIDIA GPU found"), ("rocm", "no AMD GPU found"), ("tpu", "no TPU chip")):
        (line,) = re.findall(rf"\* {name}: skipped \((.*)\)", done.stderr)
        assert line.startswith(f"{name}: unavailable [no-hardware] {reason}")
    for word in ("install", "Creating virtual environment"):
        assert word not in done.stderr


def test_rocm_without_an_index_says_what_to_set(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "amd", lambda: hardware.Hardware(2, (), "", SUPPORTED))
    result = noxfile._rocm()
    assert result.code is Code.WRONG_BUILD
    assert INDEX in result.action
    monkeypatch.setenv(INDEX, "https://example.org/rocm")
    assert noxfile._rocm().ok
    monkeypatch.delenv(INDEX)
    monkeypatch.setattr(sys, "argv", ["nox", "--no-venv", "-s", "rocm"])
    assert noxfile._rocm().ok


def test_a_session_installs_its_pin_and_runs_the_suite_on_its_device(noxfile: Any) -> None:
    session = Session()
    noxfile._suite(session, "cpu")
    assert session.installed == [
        *noxfile.PINS["cpu"],
        "-e",
        ".[accuracy,torchao,checkpoints,triton,onnx,openvino,extensions]",
    ]
    judged, timed = session.runs
    assert judged[:3] == ["pytest", "--pyargs", "accelcheck.suite"]
    assert timed[:3] == ["pytest", "--pyargs", "accelcheck.suite.test_speed"]
    for ran in session.runs:
        assert {"--accel-device=cpu", "--accel-level=1", "--accel-require", "--exitfirst"} <= set(ran)
    assert judged[judged.index("-n") + 1] != "0"
    assert timed[timed.index("-n") + 1] == "0"
    assert "--accel-baseline=check" in timed
    assert session.env == {"ACCELCHECK_SESSION": "nox -s cpu -- --exitfirst"}


def on_driver(noxfile: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> Session:
    """Installs of the session `cuda` on a machine with this driver."""
    monkeypatch.setitem(noxfile.ABSENT, "cuda", SUPPORTED)
    monkeypatch.setattr(noxfile.hardware, "nvidia", lambda: hardware.Hardware(1, (), version, SUPPORTED))
    monkeypatch.setattr(noxfile.shutil, "which", lambda _: None)
    session = Session()
    noxfile._suite(session, "cuda")
    return session


@pytest.mark.parametrize("version", ["580.159.04", "", "590.10"])
def test_a_gpu_gets_the_newest_torch_and_a_clock(noxfile: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    session = on_driver(noxfile, monkeypatch, version)
    assert session.installed == [*noxfile.PINS["cuda"], "-e", ".[accuracy,torchao,extensions,cuda13]"]
    assert not session.warned


def test_an_older_driver_gets_a_torch_that_it_runs(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = on_driver(noxfile, monkeypatch, "550.54.15")
    assert session.installed == ["torch==2.10.0", "-e", ".[accuracy,torchao,extensions,cuda12]"]
    (warning,) = session.warned
    assert "driver 550.54.15 runs CUDA 12: torch==2.10.0 instead of torch==2.15.0, which needs 580" in warning


def test_nvidia_smi_tells_the_driver_where_proc_does_not(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noxfile.hardware, "nvidia", lambda: hardware.Hardware(1, (), "", SUPPORTED))
    monkeypatch.setattr(noxfile.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    printed = subprocess.CompletedProcess([], 0, "550.54.15\n550.54.15\n", "")
    monkeypatch.setattr(noxfile.subprocess, "run", lambda *_, **__: printed)
    assert noxfile._driver() == "550.54.15"


def test_flash_attention_comes_from_wheels_alone_or_is_missing(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = on_driver(noxfile, monkeypatch, "580.1")
    installs = [words for words in session.runs if words[:4] == ["python", "-m", "pip", "install"]]
    assert [words[-2] for words in installs] == ["flash-attn", "flash-attn-4"]
    for words in installs:
        assert "--only-binary=:all:" in words
        assert words[-1:] == [*noxfile.PINS["cuda"]]  # it may bring no other torch
    assert session.missing_allowed == len(installs)


def test_what_a_gpu_needs_is_in_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, cupy in (("cuda12", "cupy-cuda12x"), ("cuda13", "cupy-cuda13x")):
        names = {Requirement(text).name for text in extras[name]}
        assert names == {"nvidia-ml-py", cupy, "onnx", "onnxscript", "onnxruntime-gpu"}


def test_the_session_of_benchmarks_runs_each_of_them(noxfile: Any) -> None:
    session = Session()
    noxfile.benchmarks.func(session)
    assert set(noxfile.PINS["cpu"]) <= set(session.installed)
    assert session.runs == [["python", *words] for words in noxfile.BENCHMARKS]


def test_the_recommended_command_keeps_all_but_the_level(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nox", "--no-venv", "-s", "cpu"])
    session = Session()
    session.posargs = ("-k", "a b", "--accel-level=2")
    noxfile._suite(session, "cpu")
    assert session.env["ACCELCHECK_SESSION"] == "nox --no-venv -s cpu -- -k 'a b'"


def test_the_timing_half_writes_files_of_its_own(noxfile: Any) -> None:
    session = Session()
    session.posargs = ("--accel-journal=out/j.jsonl", "--junit-xml=junit.xml", "-x")
    noxfile._suite(session, "cpu")
    judged, timed = session.runs
    assert {"--accel-journal=out/j.jsonl", "--junit-xml=junit.xml", "-x"} <= set(judged)
    assert {"--accel-journal=out/j-speed.jsonl", "--junit-xml=junit-speed.xml", "-x"} <= set(timed)


def test_a_session_ends_with_the_path_of_its_report(noxfile: Any) -> None:
    session = Session()
    noxfile._suite(session, "cpu")
    paths = ["reports/cpu/journal.jsonl", "reports/cpu/journal-speed.jsonl"]
    assert [f"--accel-journal={path}" in ran for path, ran in zip(paths, session.runs, strict=True)] == [True, True]
    made = ["python", "-m", "accelcheck.cli", "report", *paths, "--html=reports/cpu/report.html"]
    assert session.reported == [made]
    assert session.logged[-1] == f"report: {Path('reports/cpu/report.html').resolve().as_uri()}"


def test_a_session_whose_cases_fail_makes_its_report_and_still_fails(noxfile: Any) -> None:
    session = Session()
    session.failing = True
    Path("reports/cpu").mkdir(parents=True)
    Path("reports/cpu/journal-speed.jsonl").write_text("of an earlier session", encoding="ascii")
    with pytest.raises(CaseFailedError):
        noxfile._suite(session, "cpu")
    assert session.reported[0][4:] == ["reports/cpu/journal.jsonl", "--html=reports/cpu/report.html"]
    assert len(session.logged) == 1


@pytest.mark.parametrize(
    "given", [("--accel-journal=out/j.jsonl",), ("--accel-journal", "out/j.jsonl"), ("--accel-resume=out/j.jsonl",)]
)
def test_a_journal_that_the_user_names_is_the_one_reported(noxfile: Any, given: tuple[str, ...]) -> None:
    session = Session()
    session.posargs = given
    Path("out").mkdir()
    Path("out/j.jsonl").write_text("{}\n", encoding="ascii")
    noxfile._suite(session, "cpu")
    assert all("reports" not in word for ran in session.runs for word in ran)
    assert session.reported[0][4] == "out/j.jsonl"
    assert session.reported[0][-1] == "--html=out/report.html"


def test_the_environment_at_hand_is_left_as_it_is(noxfile: Any) -> None:
    session = Session(nox.virtualenv.PassthroughEnv())
    noxfile._suite(session, "cpu")
    assert session.installed == []
    assert session.ran


def test_level_and_workers_come_from_the_environment(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELCHECK_LEVEL", "3")
    monkeypatch.setenv("ACCELCHECK_WORKERS", "7")
    session = Session()
    noxfile._suite(session, "cpu")
    assert "--accel-level=3" in session.ran
    judged, _ = session.runs
    assert judged[judged.index("-n") + 1] == "7"


def test_what_is_given_to_pytest_wins(noxfile: Any) -> None:
    session = Session()
    session.posargs = ("-n", "3", "--accel-level=2", "--accel-baseline=off")
    noxfile._suite(session, "cpu")
    for ran in session.runs:
        assert max(map(ran.index, ("--accel-level=1", "--accel-require"))) < ran.index("--accel-level=2")
    judged, timed = session.runs
    assert judged[-4:] == list(session.posargs)
    assert timed.index("--accel-baseline=check") < timed.index("--accel-baseline=off")
    assert timed[-2:] == ["-n", "0"]


@pytest.mark.parametrize(("given", "use"), [("off", "off"), ("", "check")])
def test_what_is_done_with_baselines_comes_from_the_environment(
    noxfile: Any, monkeypatch: pytest.MonkeyPatch, given: str, use: str
) -> None:
    monkeypatch.setenv("ACCELCHECK_BASELINE", given)
    session = Session()
    noxfile._suite(session, "cpu")
    _, timed = session.runs
    assert f"--accel-baseline={use}" in timed


def test_xla_uses_the_processor_where_there_is_no_tpu(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def chips(count: int) -> None:
        monkeypatch.setattr(hardware, "tpu", lambda: hardware.Hardware(count, (), "", SUPPORTED))

    chips(0)
    session = Session()
    noxfile._suite(session, "xla")
    assert session.env == {"ACCELCHECK_SESSION": "nox -s xla -- --exitfirst", "PJRT_DEVICE": "CPU"}
    chips(4)
    session = Session()
    noxfile._suite(session, "xla")
    assert session.env == {"ACCELCHECK_SESSION": "nox -s xla -- --exitfirst"}


def test_backends_without_entry_point_are_imported_twice(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(noxfile.ABSENT, "vulkan", SUPPORTED)
    session = Session()
    noxfile._suite(session, "vulkan")
    assert session.installed == [*noxfile.PINS["vulkan"], "-e", ".[accuracy,torchao,extensions]"]
    for ran in session.runs:
        assert {"--accel-device=vulkan", "--accel-import=torchvulkan", "--accel-level=1", "--accel-require"} <= set(ran)


def test_without_a_vulkan_driver_it_is_named(noxfile: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(noxfile.ABSENT, "vulkan", hardware.vulkan(tmp_path).capability)
    with pytest.raises(
        SkippedError, match=r"no Vulkan driver is installed.*apt-get install mesa-vulkan-drivers libvulkan1"
    ):
        noxfile._suite(Session(), "vulkan")


def test_a_session_without_its_hardware_installs_nothing(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = hardware.nvidia(Path("/nonexistent")).capability
    monkeypatch.setitem(noxfile.ABSENT, "cuda", absent)
    session = Session()
    with pytest.raises(SkippedError, match=r"cuda: unavailable \[no-hardware\] no NVIDIA GPU found"):
        noxfile._suite(session, "cuda")
    assert not session.installed
    assert noxfile._venv("cuda") == "none"


def test_without_slurm_its_session_is_skipped_with_the_reason(noxfile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noxfile.shutil, "which", lambda name, **_: "/usr/bin/sbatch" if name == "sbatch" else None)
    with pytest.raises(
        SkippedError, match=r"slurm: munged, slurmctld, slurmd not installed; .*apt-get install slurm-wlm munge"
    ):
        noxfile.slurm(Session())
