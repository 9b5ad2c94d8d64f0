"""`accelcheck doctor`: what it finds, how it grades it, what it advises, and that it needs no torch."""

from __future__ import annotations

import ast
import ctypes
import errno
import json
import re
import resource
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from process_harness import completed

from accelcheck import cli
from accelcheck.commands import doctor as command
from accelcheck.commands.common import GREEN, RED, USAGE
from accelcheck.core.capability import SUPPORTED, Code, unavailable
from accelcheck.devices import host, requirements
from accelcheck.devices.base import Fingerprint, Status
from accelcheck.devices.probe import HostFacts
from accelcheck.devices.requirements import Needed
from accelcheck.experiments import doctor
from accelcheck.experiments.doctor import Diagnosis, Examination, Grade

ROOT = Path(__file__).parents[2]
CPU = Status("cpu", SUPPORTED, Fingerprint("cpu", "Toy processor", 2, runtime="ATen", versions={"torch": "2.13"}))
CUDA = Status("cuda", SUPPORTED, Fingerprint("cuda", "Toy GPU", 1, 8 * doctor.GIB, "580.1", "CUDA 13.0"))
NO_CUDA = Status("cuda", unavailable(Code.NO_HARDWARE, "no NVIDIA GPU found", "run on a machine with one"))
PYTEST = {"ini": "", "words": [], "timeout": "", "accelcheck": True, "xdist": True}
TOLD: list[dict[str, Any]] = [{"fork": ""}, {"pytest": PYTEST}, {"device": "cpu", "missing": []}, {"stage": "done"}]


class Machine:
    """A machine on which everything is in order; each test changes one thing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.told = [*TOLD]
        self.ended = ""
        self.statuses = {"cpu": CPU, "cuda": NO_CUDA}
        self.facts = HostFacts("toy", 2)
        self.needs = [Needed("torch", ">=2.9,<2.16", "2.13.0+cpu"), Needed("torchao", ">=0.14", "0.18.0", "torchao")]
        monkeypatch.setattr(doctor, "probe", lambda *_: (dict(self.statuses), self.facts))
        monkeypatch.setattr(doctor, "_asked", lambda *_, **__: (self.told, self.ended))
        monkeypatch.setattr(requirements, "needed", lambda: self.needs)
        monkeypatch.setattr(requirements, "rivals", dict)
        monkeypatch.setattr(requirements, "pip", lambda: "pip")
        monkeypatch.setattr(requirements, "checkout", lambda: False)
        for name, value in (
            ("shared_memory", host.Room("/dev/shm", doctor.GIB, doctor.GIB)),
            ("temporary", host.Room("/tmp", 9 * doctor.GIB, 9 * doctor.GIB)),
            ("memory", host.Room("memory of the host", 64 * doctor.GIB, 64 * doctor.GIB)),
            ("limits", {}),
            ("variables", {}),
            ("tracing", ""),
            ("debuggers", ["gdb"]),
            ("compiler", ("g++", "g++ 12")),
        ):
            self.host(name, value)

    def host(self, name: str, value: Any) -> None:
        self.patch.setattr(host, name, lambda *_: value)

    def worst(self) -> list[Diagnosis]:
        """All findings that are not in order, but for the GPU that the machine has not."""
        return [
            finding
            for finding in doctor.examine().findings
            if finding.grade is not Grade.OK and "no NVIDIA GPU" not in finding.fact
        ]

    def one(self) -> Diagnosis:
        """The only one of them."""
        (finding,) = self.worst()
        return finding


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_machine_in_order_has_no_problem(machine: Machine) -> None:
    result = doctor.examine()
    assert machine.worst() == []
    assert result.present == ["cpu"]
    assert "cpu: Toy processor x 2, ATen, torch 2.13" in [finding.fact for finding in result.findings]


def test_an_absent_gpu_is_a_note_and_a_broken_one_a_problem(machine: Machine) -> None:
    (absent,) = [item for item in doctor.examine().findings if "no NVIDIA GPU" in item.fact]
    assert (absent.grade, absent.action) == (Grade.NOTE, "run on a machine with one")
    machine.statuses["cuda"] = Status(
        "cuda", unavailable(Code.WRONG_BUILD, "torch is built without CUDA", "install one")
    )
    finding = machine.one()
    assert (finding.grade, finding.stops) == (Grade.PROBLEM, False)
    assert finding.fact == "cuda: cannot be tested [wrong-build]: torch is built without CUDA"


def test_a_backend_that_breaks_torch_is_named(machine: Machine) -> None:
    machine.facts = HostFacts("toy", 2, broken={"vendor": "ImportError: libvendor.so"}, autoload=False)
    machine.statuses["vendor"] = Status(
        "vendor", unavailable(Code.IMPORT_FAILED, "breaks `import torch`", "uninstall it")
    )
    grades = {item.grade: item.fact for item in machine.worst()}
    assert "vendor: cannot be tested [import-failed]" in grades[Grade.PROBLEM]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0, because a backend breaks `import torch`: vendor" in grades[Grade.NOTE]


def test_without_a_device_nothing_can_be_tested(machine: Machine) -> None:
    machine.statuses = {"cuda": NO_CUDA}
    assert machine.one().stops
    assert doctor.examine().present == []


@pytest.mark.parametrize(("installed", "stops"), [("2.8.0", False), ("2.16.0", False), ("", True)])
def test_a_torch_outside_of_the_range_is_a_problem(machine: Machine, installed: str, stops: bool) -> None:
    machine.needs[0] = Needed("torch", ">=2.9,<2.16", installed)
    finding = machine.one()
    assert (finding.grade, finding.stops) == (Grade.PROBLEM, stops)
    assert finding.action.startswith("pip install 'torch>=2.9,<2.16'")


def test_a_missing_requirement_of_accelcheck_itself_stops(machine: Machine) -> None:
    machine.needs.append(Needed("msgspec", ">=0.19", ""))
    assert machine.one() == Diagnosis(
        "torch",
        Grade.PROBLEM,
        "msgspec is not installed; accelcheck requires msgspec>=0.19",
        "pip install 'msgspec>=0.19'",
        stops=True,
    )


def test_a_package_of_another_version_is_a_problem_with_its_extra(machine: Machine) -> None:
    machine.needs[1] = Needed("torchao", ">=0.14", "0.9", "torchao")
    finding = machine.one()
    assert (finding.grade, finding.fact) == (Grade.PROBLEM, "[torchao] torchao 0.9, expected >=0.14")
    assert finding.action == "pip install 'accelcheck[torchao]'"


def test_what_a_missing_package_costs_is_counted_on_each_device(machine: Machine) -> None:
    lacking = {
        "reason": "torchao is not installed",
        "action": "pip install 'accelcheck[torchao]'",
        "names": ["a", "b", "c", "d", "e"],
        "cases": 45,
    }
    machine.told = [{"device": "cpu", "missing": [lacking]}, {"device": "xla", "missing": [{**lacking, "cases": 44}]}]
    finding = machine.one()
    assert finding.fact == (
        "torchao is not installed: cpu: 45 cases up to level 2 are left out; xla: 44 cases up to level 2 are left out "
        "(a, b, c, d and 1 more)"
    )
    assert finding.action == "pip install 'accelcheck[torchao]'"


@pytest.mark.parametrize(
    ("runtime", "driver", "extra"), [("CUDA 13.0", "", "cuda13"), ("CUDA 12.8", "580.1", "cuda12")]
)
def test_a_gpu_gets_the_extra_of_its_cuda(machine: Machine, runtime: str, driver: str, extra: str) -> None:
    machine.statuses["cuda"] = Status("cuda", SUPPORTED, Fingerprint("cuda", "Toy GPU", 1, 0, driver, runtime))
    lacking = {
        "reason": "onnx is not installed",
        "action": "pip install 'accelcheck[onnx]'",
        "names": ["a"],
        "cases": 3,
    }
    machine.told = [{"device": "cuda", "missing": [lacking]}]
    assert machine.one().action == f"pip install 'accelcheck[{extra}]'"


@pytest.mark.parametrize(
    ("runtime", "driver", "major"),
    [
        ("CUDA 12.8", "", 12),
        ("CUDA 13.0", "1.0", 13),
        ("", "580.159.04", 13),
        ("", "575.1", 12),
        ("", "", 0),
        ("HIP 7", "x", 0),
    ],
)
def test_the_cuda_of_torch_decides_and_then_the_driver(runtime: str, driver: str, major: int) -> None:
    assert host.cuda_major(runtime, driver) == major


def test_the_limit_of_cuda_13_is_that_of_the_noxfile() -> None:
    assert f"CUDA_13_DRIVER = {host.CUDA_13_DRIVER}\n" in (ROOT / "noxfile.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "value", "grade", "words"),
    [
        ("shared_memory", host.Room("/dev/shm", 1, doctor.SHARED), Grade.NOTE, "--shm-size"),
        ("shared_memory", None, Grade.NOTE, ""),
        ("temporary", host.Room("/tmp", doctor.GIB, doctor.GIB), Grade.NOTE, "TMPDIR"),
        ("temporary", host.Room("/tmp", doctor.MIB, doctor.GIB), Grade.PROBLEM, "TMPDIR"),
        ("temporary", None, Grade.PROBLEM, "TMPDIR"),
        ("memory", host.Room("memory of the control group", doctor.GIB, doctor.GIB), Grade.NOTE, "-n 1"),
        ("limits", {"open files (ulimit -n)": 256}, Grade.NOTE, "ulimit"),
        ("limits", {"address space in bytes (ulimit -v)": 2**40}, Grade.NOTE, "ulimit"),
        ("limits", {"open files (ulimit -n)": 20000, "processes (ulimit -u)": 90000}, None, ""),
        ("variables", {"OMP_NUM_THREADS": "1"}, Grade.NOTE, "unset OMP_NUM_THREADS"),
        ("variables", {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, Grade.PROBLEM, "unset"),
        ("tracing", "Operation not permitted", Grade.NOTE, "SYS_PTRACE"),
        ("debuggers", [], Grade.NOTE, "py-spy"),
        ("compiler", ("c++", ""), Grade.NOTE, "CXX"),
    ],
)
def test_each_shortage_of_the_host_is_graded_with_what_to_do(
    machine: Machine, name: str, value: Any, grade: Grade | None, words: str
) -> None:
    machine.host(name, value)
    if grade is None:
        assert machine.worst() == []
        return
    finding = machine.one()
    assert finding.grade is grade
    assert words in finding.action
    assert finding.stops == (grade is Grade.PROBLEM)


@pytest.mark.parametrize(
    ("change", "said", "stops"),
    [
        ({"words": ["--forked"]}, "every case is a `crash`", True),
        ({"words": ["--timeout=3"]}, "a case that hangs is an `error`", False),
        ({"timeout": "60"}, "timeout = 60", False),
        ({"words": ["-p no:xdist"]}, "accelcheck needs that plugin", True),
        ({"accelcheck": False}, "pytest does not load accelcheck's plugin", True),
    ],
)
def test_settings_that_interfere_are_problems(machine: Machine, change: dict[str, Any], said: str, stops: bool) -> None:
    machine.told = [{"pytest": {**PYTEST, **change}}]
    finding = machine.one()
    assert said in finding.fact
    assert (finding.grade, finding.stops) == (Grade.PROBLEM, stops)


@pytest.mark.parametrize(
    ("message", "grade"), [({"fork": "does not begin"}, Grade.NOTE), ({"plugins": "UsageError: no"}, Grade.PROBLEM)]
)
def test_what_the_child_could_not_do_is_said(machine: Machine, message: dict[str, str], grade: Grade) -> None:
    machine.told = [message]
    assert machine.one().grade is grade


def test_a_child_that_dies_is_a_problem(machine: Machine) -> None:
    machine.ended = "the process died of SIGSEGV during: import torch"
    assert "SIGSEGV" in machine.one().fact


def test_several_builds_of_a_module_are_a_conflict(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "rivals", lambda: {"onnxruntime": ["onnxruntime 1.23", "onnxruntime-gpu 1.31"]})
    finding = machine.one()
    assert "several packages install the module onnxruntime" in finding.fact
    assert finding.action.startswith("pip uninstall -y onnxruntime onnxruntime-gpu")


def test_rivals_are_found_among_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime": "1.23", "onnxruntime-gpu": "1.31", "cupy-cuda13x": "13.6"}
    monkeypatch.setattr(requirements, "version", lambda name: versions.get(name, ""))
    assert requirements.rivals() == {"onnxruntime": ["onnxruntime 1.23", "onnxruntime-gpu 1.31"]}


def test_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    result = requirements.needed()
    assert sum(not item.extra for item in result) == len(project["dependencies"])
    assert {item.extra for item in result} - {""} <= set(project["optional-dependencies"])
    (torch,) = [item for item in result if item.name == "torch"]
    assert torch.met


def test_advice_is_for_where_accelcheck_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "pip", lambda: "pip")
    monkeypatch.setattr(requirements, "checkout", lambda: True)
    monkeypatch.chdir(ROOT)
    assert requirements.here('pip install "accelcheck[xla]" (pairs)') == "pip install -e '.[xla]' (pairs)"
    monkeypatch.chdir(ROOT.parent)
    assert requirements.here("pip install 'accelcheck[onnx]'") == f"pip install -e '{ROOT}[onnx]'"
    monkeypatch.setattr(requirements, "checkout", lambda: False)
    assert requirements.here("pip install 'accelcheck[onnx]'") == "pip install 'accelcheck[onnx]'"
    assert requirements.here("pip install jax") == "pip install jax"


def test_every_extra_that_a_technique_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "accelcheck").rglob("*.py")]
    named = {extra for text in texts for extra in re.findall(r"pip install ['\"]accelcheck\[([\w,-]+)\]", text)}
    assert len(named) > 4
    assert named <= set(project["optional-dependencies"])


def test_memory_is_that_of_the_control_group_where_it_is_less(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{doctor.MIB}\n")
    (folder / "memory.current").write_text("1000\n")
    assert host.memory(tmp_path) == host.Room("memory of the control group", doctor.MIB - 1000, doctor.MIB)
    (folder / "memory.max").write_text("max\n")
    assert host.memory(tmp_path).place == "memory of the host"


def test_variables_are_those_that_devices_declare_and_of_known_prefixes() -> None:
    environ = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_LOGS": "all", "XLA_FLAGS": "x", "HOME": "/", "CUDA_HOME": "/usr"}
    assert list(host.variables(["NVIDIA_TF32_OVERRIDE"], environ)) == [
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_LOGS",
        "XLA_FLAGS",
    ]


def test_limits_are_the_finite_ones_of_this_process() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert host.limits().get("open files (ulimit -n)", resource.RLIM_INFINITY) == soft


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace is Linux's")
def test_tracing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.tracing() in {"", "Operation not permitted"}

    class Refusing:
        @staticmethod
        def ptrace(*_: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing)
    assert host.tracing() == "Operation not permitted"


def test_a_compiler_that_is_absent_has_no_version(tmp_path: Path) -> None:
    assert host.compiler({"CXX": str(tmp_path / "none")}) == (str(tmp_path / "none"), "")
    if shutil.which("g++"):
        assert host.compiler({})[1]


def shown(
    found: Examination, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "examine", lambda *_: found)
    return cli.main(["doctor", *words]), capsys.readouterr().out


PROBLEM = Diagnosis("machine", Grade.PROBLEM, "bad \x1b[31m thing", "repair it", stops=True)


@pytest.mark.parametrize(("findings", "code"), [((), GREEN), ((PROBLEM,), RED)])
def test_it_exits_with_1_where_nothing_can_be_tested(
    findings: Sequence[Diagnosis], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, out = shown(Examination(tuple(findings), {"cpu": CPU}), capsys, monkeypatch)
    assert ended == code
    assert ("can be tested: cpu" in out) == (code == GREEN)
    assert "\x1b" not in out
    assert ("-> repair it" in out) == (code == RED)


def test_json_has_every_finding_and_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = shown(Examination((PROBLEM,), {"cpu": CPU, "cuda": CUDA}), capsys, monkeypatch, "--json")
    document = json.loads(out)
    assert document["testable"] == []
    assert document["findings"][0] == PROBLEM.as_json()
    assert document["devices"]["cuda"]["fingerprint"]["runtime"] == "CUDA 13.0"


@pytest.mark.parametrize("seconds", ["0", "inf", "many"])
def test_a_senseless_timeout_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", f"--probe-timeout={seconds}"])
    assert ended.value.code == USAGE
    assert "--probe-timeout" in capsys.readouterr().err


def test_every_topic_has_its_place() -> None:
    source = ast.parse(Path(doctor.__file__).read_text(encoding="utf-8"))
    topics = {
        node.args[0].value
        for node in ast.walk(source)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in {"ok", "note", "problem"}
        and isinstance(node.args[0], ast.Constant)
    }
    assert topics == set(command._TOPICS)


@pytest.mark.slow
def test_this_machine_is_examined_without_torch_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --timeout=3\n")
    code = (
        "import sys; from accelcheck import cli; code = cli.main(['doctor', '--json']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    ended = completed([sys.executable, "-c", code], cwd=tmp_path, timeout=240)
    assert ended.returncode == GREEN, ended.stdout + ended.stderr
    document = json.loads(ended.stdout)
    assert "cpu" in document["testable"]
    facts = [item["fact"] for item in document["findings"]]
    assert any(fact.startswith("a fork of a process with torch computes") for fact in facts)
    assert any(fact.startswith("--timeout=3 (in ") for fact in facts)


def test_without_torch_it_says_how_to_install_it() -> None:
    code = """
import importlib.abc, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Without())
from accelcheck.devices import packages, requirements
from accelcheck.experiments import doctor
requirements.version = lambda name: "" if name == "torch" else packages.version(name)
doctor.installed = packages.installed = lambda name: name != "torch"
from accelcheck import cli
sys.exit(cli.main(["doctor"]))
"""
    ended = completed([sys.executable, "-c", code], timeout=120)
    assert ended.returncode == RED, ended.stderr
    assert "torch is not installed; accelcheck requires torch" in ended.stdout
    assert re.search(r"-> .*pip install 'torch", ended.stdout)
