"""Runs pytest with accelcheck inside a test, with a stub of the probe and techniques that are right or wrong.

It has no tests of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]  # it comes without annotations
import torch
from process_harness import PATIENT
from torch import Tensor, nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.journal_reading import read
from accelcheck.devices.base import Fingerprint, Status
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.probe import HostFacts, builtin
from accelcheck.measure import timing_processes
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads.base import Problem, Program, Workload

if TYPE_CHECKING:
    import pytest

    from accelcheck.core.journal import Record
    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log

# After a run in this process, pytester removes the modules that the run imported, but torch cannot be imported twice,
# and functions that are sent to other processes must be those of their modules: import them now.
Matrix.load()
importlib.import_module("torch._dynamo")
importlib.import_module("hypothesis")  # its plugin imports it at the end of each run, in half a second
importlib.import_module("accelcheck.plugin.own_models")

FOLDER = Path(__file__).parent
JOURNAL = "journal.jsonl"
CONFTEST = f"""
import sys
sys.path.append({str(FOLDER)!r})

def pytest_accel_techniques():
    import plugin_harness
    return plugin_harness.techniques()

def pytest_accel_workloads():
    import plugin_harness
    return plugin_harness.workloads()
"""
PRESENT = Status("cpu", SUPPORTED, Fingerprint("cpu", "Toy processor", 2, runtime="ATen", versions={"torch": "2"}))
ABSENT = {name: unavailable(Code.NO_HARDWARE, "no chip found") for name in builtin() if name != "cpu"} | {
    "cuda": unavailable(Code.NO_HARDWARE, "no NVIDIA GPU found", "run on a machine with one"),
    "rocm": unavailable(Code.NO_HARDWARE, "no AMD GPU found"),
    "tpu": unavailable(Code.NO_HARDWARE, "no TPU chip found"),
    "xla": unavailable(Code.NO_PACKAGE, "the package torch_xla is not installed"),
}
Act = Callable[[Program], None]


class Toy(Technique):
    """Runs the module and gives evidence of it; `act` changes what it does.

    Args:
        name: Name of the technique.
        act: Called with the program in `prepare`.
        engaged: True where its evidence says that it ran; ``None`` gives no evidence.
    """

    family = "toy"
    promise = "None."
    source = "https://example.org/toy"
    dtypes = ("float32", "bfloat16")
    modes = frozenset({Mode.FORWARD})
    requires = frozenset({"toy"})

    def __init__(self, name: str, act: Act | None = None, *, engaged: bool | None = True) -> None:
        self.name = name
        self._act = act
        self._engaged = engaged

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        if self._act is not None:
            self._act(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        if self._engaged is not None:
            seen = log.count("aten::addmm")
            yield Evidence("aten::addmm dispatched >= 1", seen, engaged=seen >= 1 and self._engaged)


def techniques() -> list[Technique]:
    """``toy`` is right; the others are wrong, each in one way."""
    return [
        Toy("toy"),
        Toy("toy-too"),
        Toy("toy-idle", engaged=False),
        Toy("toy-mute", engaged=None),
        Toy("toy-value", after(lambda out: out * 1.5)),
        Toy("toy-nan", after(lambda out: out.index_fill(0, torch.tensor([2]), float("nan")))),
        Toy("toy-dtype", after(lambda out: out.bfloat16())),
        Toy("toy-strides", after(lambda out: out.t().contiguous().t())),
        Toy("toy-shape", after(lambda out: out[:2])),
        Toy("toy-device", after(lambda out: out.to("meta"))),
        Toy("toy-input", spoil_input),
        Toy("toy-parameter", spoil_parameter),
        Toy("toy-two", after(lambda out: out * 1.5), engaged=False),
        Toy("toy-prepare", raises),
        Toy("toy-run", after(_no_kernel)),
        Toy("toy-refused", refused),
        Toy("toy-abort", aborts),
        Toy("toy-process", aborts_a_timing_process),
        Toy("toy-slow", sleeps),
        Toy("toy-exit", lambda _: os._exit(0)),
        Toy("toy-over", lambda _: os._exit(96)),
        Toy("toy-group", lambda _: os.killpg(0, signal.SIGTERM)),
        Toy("toy-parent", kills_its_parent),
        Toy("toy-interrupt", interrupts),
        Toy("toy-holder", dies_and_leaves_its_pipe_open),
        Toy("toy-worker", kills_the_worker),
        Toy("toy-segv", lambda _: os.kill(os.getpid(), signal.SIGSEGV)),
        Toy("toy-hang", hangs),
        Toy("toy-gil", lambda _: holds_the_gil()),
        Toy("toy-lost", loses_its_device),
        Toy("toy-orphan", leaves_an_orphan),
        Toy("toy-flaky", fails_at_first),
    ]


def workloads() -> list[Workload]:
    """``tiny`` and ``small`` are at level 1, ``later`` at level 2; making ``broken`` raises; ``timed`` is timed."""
    traits, modes, dtypes = frozenset({"toy"}), frozenset({Mode.FORWARD}), frozenset({"float32", "bfloat16"})
    return [
        Workload("tiny", "A linear layer.", linear, 1, modes, traits, dtypes),
        Workload("small", "A linear layer.", linear, 1, modes, traits, dtypes),
        Workload("later", "A linear layer.", linear, 2, modes, traits, dtypes),
        Workload("broken", "Nothing.", broken, 1, modes, traits, dtypes),
        Workload("timed", "A linear layer.", linear, 1, frozenset({Mode.SPEED}), traits, dtypes),
    ]


def linear(generator: torch.Generator, extent: int) -> Problem:
    """5 rows of 4 to 5 rows of 3."""
    return Problem(nn.Linear(4, 3), (torch.randn(5, 4, generator=generator),))


def broken(generator: torch.Generator, extent: int) -> Problem:
    raise LookupError("no such layer")


def raises(program: Program) -> None:
    raise LookupError("no such pass")


def refused(program: Program) -> None:
    raise Unsupported(unsupported(Code.NO_FEATURE, "No available kernel", tried=True))


def aborts(program: Program) -> None:
    os.abort()


def aborts_a_timing_process(program: Program) -> None:
    if timing_processes.ongoing() is not None:
        os.abort()


def sleeps(program: Program) -> None:
    time.sleep(3)


def hangs(program: Program) -> None:
    while True:
        time.sleep(0.01)


def holds_the_gil(program: object = None) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")  # in C, for longer than anyone waits


def loses_its_device(program: Program) -> None:
    """Nothing computes on the device in this process any more."""

    def gone(device: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    setattr(Cpu, "torch_device", gone)  # noqa: B010 - mypy would see another method
    gone(None)


def kills_its_parent(program: Program) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def dies_and_leaves_its_pipe_open(program: Program) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    Path("holder.pid").write_text(str(child), encoding="ascii")
    os.kill(os.getpid(), signal.SIGKILL)


def kills_the_worker(program: Program) -> None:
    """The process that this one is a fork of a fork of."""
    os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
    time.sleep(60)


def interrupts(program: Program) -> None:
    raise KeyboardInterrupt


def leaves_an_orphan(program: Program) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path("orphan.pid").write_text(str(child.pid), encoding="ascii")
    os.abort()


def fails_at_first(program: Program) -> None:
    """Wrong in the first of all processes."""
    try:
        Path("flaky.tried").touch(exist_ok=False)
    except FileExistsError:
        return
    raise LookupError("not this time")


def _no_kernel(out: Tensor) -> Tensor:
    raise NotImplementedError("no such kernel")


def after(change: Callable[[Tensor], Tensor]) -> Act:
    """Change the module's output."""

    def act(program: Program) -> None:
        program.call = lambda value: change(program.module(value))

    return act


def spoil_input(program: Program) -> None:
    def call(value: Tensor) -> Any:
        out = program.module(value)
        value.add_(1)
        return out

    program.call = call


def spoil_parameter(program: Program) -> None:
    def call(value: Tensor) -> Any:
        out = program.module(value)
        next(program.module.parameters()).add_(1)
        return out

    program.call = call


@dataclass(frozen=True)
class Ran:
    """One run: exit status, what it printed, and its journal."""

    ret: int
    out: str
    err: str
    header: dict[str, Any]
    records: list[Record]
    raw: list[dict[str, Any]]
    """The journal's lines."""

    @property
    def verdicts(self) -> dict[str, str]:
        """By case id."""
        return {record.case.id: str(record.verdict) for record in self.records}

    def record(self, technique: str, workload: str = "tiny") -> Record:
        """The one record of a pair."""
        (result,) = (r for r in self.records if (r.case.technique, r.case.workload) == (technique, workload))
        return result

    @property
    def cases(self) -> list[dict[str, Any]]:
        """The journal's lines about cases, sorted by id."""
        return sorted((line for line in self.raw if line["kind"] == "case"), key=lambda line: str(line["case"]["id"]))

    def lines(self, pattern: str) -> list[str]:
        """The printed lines that match a regular expression as a whole."""
        return [line for line in self.out.splitlines() if re.fullmatch(pattern, line)]


class Suite:
    """Runs the suite or other tests in an empty folder, with a journal of every run."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester = pytester
        self._monkeypatch = monkeypatch
        self.probed = 0
        pytester.makeconftest(CONFTEST)
        # Remove the settings of the caller and of the run that this test is part of.
        for name in ("PJRT_DEVICE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTEST_XDIST_WORKER", "PYTEST_PLUGINS"):
            monkeypatch.delenv(name, raising=False)
        self.answer()

    def answer(self, **found: Capability) -> None:
        """Set the probe's answers of runs in this process: the CPU is present, `found` gives those of other devices."""

        def probe(
            names: Iterable[str] | None, timeout: float = 0, extra: Iterable[Device] = ()
        ) -> tuple[dict[str, Status], HostFacts]:
            self.probed += 1
            self.timeout = timeout
            capabilities = ABSENT | {device.name: SUPPORTED for device in extra} | found
            others = (Status(name, capability) for name, capability in capabilities.items())
            return {s.device: s for s in sorted((PRESENT, *others), key=lambda s: s.device)}, HostFacts("toy", 2)

        self._monkeypatch.setattr("accelcheck.devices.probe.probe", probe)

    @property
    def path(self) -> Path:
        """The folder of the runs."""
        return self.pytester.path

    def ini(self, **values: str) -> None:
        """Write an ini file."""
        lines = (f"{name} = {value}" for name, value in values.items())
        self.pytester.makeini("\n".join(["[pytest]", *lines]))

    def ledger(self, name: str = "ledger.toml", **fields: Any) -> Path:
        """Write a ledger of one entry that expects ``toy-value`` to fail, with other `fields` (_ for hyphens)."""
        entry = {
            "cases": ["toy-value/tiny/*"],
            "verdict": "fail",
            "match": "^out: view ",
            "at-most": 1e9,
            "reason": "its factor is 1.5",
            "link": "https://example.org/1",
            "owner": "toys",
            "expires": "2999-01-01",
        } | {key.replace("_", "-"): value for key, value in fields.items()}
        texts = (f"{key} = {value if key == 'expires' else json.dumps(value)}" for key, value in entry.items())
        path = self.path / name
        path.write_text("\n".join(["schema = 2", "[[entry]]", *texts]))
        return path

    def run(self, *arguments: str) -> Ran:
        """Run the suite in this process, which is fast, with the stub of the probe."""
        return self._ran(self.inside(*self._words(arguments)))

    def inside(self, *words: str) -> pytest.RunResult:
        """Run pytest in this process."""
        return self.pytester.runpytest_inprocess(*words)

    def run_apart(self, *arguments: str) -> Ran:
        """Run the suite in a child process, with the real probe."""
        # Hypothesis is imported by its own plugin at the end of each run, in a second.
        words = ("-p", "no:hypothesispytest", *self._words(arguments))
        return self._ran(self.pytester.runpytest_subprocess(*words, timeout=PATIENT))

    def reproduce(self, ran: Ran) -> Ran:
        """Run the command that a failure prints, in a child process."""
        (command,) = {line.split("reproduce: ")[1] for line in ran.out.splitlines() if "reproduce: " in line}
        program, *arguments = shlex.split(command)
        assert program == "pytest"
        words = (*arguments, f"--accel-journal={JOURNAL}")
        return self._ran(self.pytester.runpytest_subprocess(*words, timeout=PATIENT))

    def _words(self, arguments: tuple[str, ...]) -> list[str]:
        (self.path / JOURNAL).unlink(missing_ok=True)
        # A test may give another journal: the last option counts.
        return ["--pyargs", "accelcheck.suite", f"--accel-journal={JOURNAL}", *arguments]

    def _ran(self, result: pytest.RunResult) -> Ran:
        path = self.path / JOURNAL
        header, records = read(path) if path.is_file() else ({}, [])
        raw = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return Ran(int(result.ret), result.stdout.str(), result.stderr.str(), header, records, raw)


def reaches(stat: Path, *states: str) -> bool:
    """Returns True once the process of this file in /proc is in one of these states, within 30 s."""
    for _ in range(600):
        try:
            state = stat.read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except OSError:
            state = "gone"
        if state in states:
            return True
        time.sleep(0.05)
    return False


def only(*names: str, workload: str = "tiny", device: str = "cpu") -> list[str]:
    """Arguments that select these techniques on one workload."""
    words = (f"--accel-technique={name}" for name in names)
    return [f"--accel-device={device}", *words, f"--accel-workload={workload}"]
