"""Findings of `accelcheck doctor`: testable devices, missing packages, and remedies. No torch.

Child processes with a time limit import torch and open devices.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from accelcheck.core.capability import Code
from accelcheck.core.processes import Child, Message, calling
from accelcheck.devices import hardware, host, requirements
from accelcheck.devices.base import Status, status_from_json
from accelcheck.devices.packages import AUTOLOAD, installed
from accelcheck.devices.probe import TIMEOUT, HostFacts, builtin, probe
from accelcheck.experiments.doctor_child import LEVEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accelcheck.devices.requirements import Needed

MIB, GIB = 2**20, 2**30
SHARED = 64 * MIB
"""Docker's default for /dev/shm."""
DISK, LEAST_DISK = 2 * GIB, 64 * MIB
"""Free disk below which the folder of temporary files gets a note, and below which nothing runs."""
MEMORY = 2 * GIB
"""Free memory per worker below which there is a note: torch with compiler and oracle, in the suite's largest case."""
FILES = 1024
"""Open files below which there is a note: POSIX systems offer as many by default."""
ASKED = 180.0
"""Time limit in seconds of the child process that asks techniques."""


class Grade(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report.

    Attributes:
        topic: Section of the report: torch, devices, packages, variables, machine, pytest.
        grade: ``ok``, ``note`` (cases are left out, or results may differ) or ``problem`` (something is wrong).
        action: Remedy of the fact; empty where none is needed.
        stops: True if nothing can be tested because of it.
    """

    topic: str
    grade: Grade
    fact: str
    action: str = ""
    stops: bool = False

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "grade": str(self.grade)}


def ok(topic: str, fact: str) -> Diagnosis:
    return Diagnosis(topic, Grade.OK, fact)


def note(topic: str, fact: str, action: str = "") -> Diagnosis:
    return Diagnosis(topic, Grade.NOTE, fact, action)


def problem(topic: str, fact: str, action: str = "", *, stops: bool = False) -> Diagnosis:
    return Diagnosis(topic, Grade.PROBLEM, fact, action, stops)


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, in the order in which they are shown, and the status of each device."""

    findings: tuple[Diagnosis, ...]
    statuses: Mapping[str, Status] = field(default_factory=dict)

    @property
    def present(self) -> list[str]:
        """Names of the devices that can be tested."""
        stopped = any(finding.stops for finding in self.findings)
        return [] if stopped else [name for name, status in self.statuses.items() if status.present]

    def as_json(self) -> dict[str, Any]:
        return {
            "testable": self.present,
            "findings": [finding.as_json() for finding in self.findings],
            "devices": {name: status.as_json() for name, status in self.statuses.items()},
        }


def examine(timeout: float = TIMEOUT) -> Examination:
    """Examine torch, devices (`timeout` seconds each), packages, variables, the machine, and pytest in this folder."""
    needs = requirements.needed()
    findings = [*_core(needs)]
    facts: HostFacts | None = None
    told: list[Message] = []
    if installed("torch"):
        statuses, facts = probe(None, timeout)
        present = [name for name, status in statuses.items() if status.present]
        told, ended = _asked(present, autoload=facts.autoload)
        foreign = [status_from_json(message["status"]) for message in told if "status" in message]
        statuses |= {status.device: status for status in foreign}  # those that plugins of this folder register
        findings += _after(told, ended)
    else:
        statuses = {name: Status(name, device.detect()) for name, device in builtin().items()}
    findings += [
        *_devices(statuses, facts),
        *_packages(needs, statuses, told),
        *_variables(),
        *_machine(),
        *_pytest(told),
    ]
    return Examination(tuple(findings), statuses)


def _core(needs: Sequence[Needed]) -> Iterator[Diagnosis]:
    """Report the installed PyTorch and the packages that accelcheck itself requires."""
    pip = requirements.pip()
    yield ok("torch", f"Python {platform.python_version()} on {platform.platform()}")
    if not needs:
        fact = "accelcheck is on the import path but not installed, so pytest does not load its plugin"
        yield problem("torch", fact, f"{pip} install -e FOLDER, with the folder of its pyproject.toml", stops=True)
    for need in needs:
        if need.name == "torch" and need.met:
            yield ok("torch", f"torch {need.installed}; supported: {need.wanted}")
    for need in needs:
        if need.extra or need.met:
            continue
        fact = f"{need.name} is not installed; accelcheck requires {need.words}"
        if need.installed:
            fact = f"{need.name} {need.installed} is outside of what accelcheck supports: {need.wanted}"
        build = " (a build for your device: https://pytorch.org/get-started/locally)" if need.name == "torch" else ""
        yield problem("torch", fact, f"{pip} install '{need.words}'{build}", stops=not need.installed)
    for module, names in requirements.rivals().items():
        bare = [name.partition(" ")[0] for name in names]
        fact = f"several packages install the module {module}, and overwrite each other's files: {', '.join(names)}"
        action = f"{pip} uninstall -y {' '.join(bare)}, then install the one for your device, such as {bare[0]}"
        yield problem("torch", fact, action)


def _asked(names: Sequence[str], *, autoload: bool) -> tuple[list[Message], str]:
    """The child's messages about techniques, forks and pytest, and why it ended early; empty if it did not."""
    words = calling("accelcheck.experiments.doctor_child:main", *names, parent=True)
    environ = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **({} if autoload else {AUTOLOAD: "0"})}
    with Child(words, environ) as child:
        end = child.wait(ASKED, since=child.started)
        told = child.messages()
        stage = next((str(message["stage"]) for message in reversed(told) if "stage" in message), "start")
        why = "" if stage == "done" else f"the process {end} during: {stage}: {child.last(1) or 'it printed nothing'}"
    return told, why


def _after(told: Sequence[Message], ended: str) -> Iterator[Diagnosis]:
    """Report the child's early end, and whether forks compute."""
    if ended:
        yield problem("torch", f"torch and the techniques could not be asked: {ended}")
    for message in told:
        why = message.get("fork")
        if why == "":
            fact = "a fork of a process with torch computes: a case that crashes or hangs ends nothing else"
            yield ok("machine", fact)
        elif why is not None:
            fact = "a fork of a process with torch does not compute, so a case that crashes or hangs ends the run"
            yield note("machine", f"{fact}: {why}", "run with -n 1 or more: then it ends one worker")


def _devices(statuses: Mapping[str, Status], facts: HostFacts | None) -> Iterator[Diagnosis]:
    for name, status in statuses.items():
        capability, fingerprint = status.capability, status.fingerprint
        if fingerprint is not None and status.present:
            memory = f", {fingerprint.memory / GIB:.0f} GiB each" if fingerprint.memory else ""
            driver = f", driver {fingerprint.driver}" if fingerprint.driver else ""
            versions = ", ".join(f"{package} {number}" for package, number in sorted(fingerprint.versions.items()))
            chips = f"{fingerprint.chip} x {fingerprint.count}{memory}{driver}"
            yield ok("devices", f"{name}: {chips}, {fingerprint.runtime}, {versions}")
            if told := status.told():
                yield ok("devices", f"{name}: {told}")
            continue
        absent = capability.code in {Code.NO_HARDWARE, Code.NO_PACKAGE} and not (facts and name in facts.broken)
        fact = f"{name}: cannot be tested [{capability.code}]: {capability.reason}"
        yield (note if absent else problem)("devices", fact, requirements.here(capability.action))
    if facts is not None:
        for module, failure in facts.failed_imports.items():
            yield problem("devices", f"--import={module}: {failure.reason}", failure.action)
        if not facts.autoload:
            fact = f"runs set {AUTOLOAD}=0, because a backend breaks `import torch`: {', '.join(facts.broken)}"
            yield note("devices", fact, "uninstall it, or ask its vendor for a build for this torch")
    if not any(status.present for status in statuses.values()):
        yield problem("devices", "no device can be tested, not even the CPU", "see above", stops=True)


def _packages(needs: Sequence[Needed], statuses: Mapping[str, Status], told: Sequence[Message]) -> Iterator[Diagnosis]:
    """Report missing packages of techniques by the command that installs them, then extras and the compiler."""
    cuda = statuses["cuda"].fingerprint if "cuda" in statuses else None
    major = host.cuda_major(cuda.runtime if cuda else "", hardware.nvidia().driver)
    present = [str(message["device"]) for message in told if "missing" in message]
    for (reason, action), (counts, names) in _lacking(told, major).items():
        where = "; ".join(f"{name}: {count} cases up to level {LEVEL} are left out" for name, count in counts.items())
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        yield note("packages", f"{reason}: {where} ({shown})", requirements.here(action))
    asked = {"plot"} | ({f"cuda{major}"} if "cuda" in present else set())
    for extra in dict.fromkeys(need.extra for need in needs if need.extra):
        yield from _extra(extra, [need for need in needs if need.extra == extra], asked=extra in asked)
    yield _compiler()


def _extra(extra: str, parts: Sequence[Needed], *, asked: bool) -> Iterator[Diagnosis]:
    """Versions of an extra's packages; where they are absent, a note if it is `asked` for."""
    lacking = [part for part in parts if not part.met]
    wrong = [part for part in lacking if part.installed]
    if not lacking:
        versions = ", ".join(f"{part.name} {part.installed}" for part in parts)
        yield ok("packages", f"[{extra}] {versions}")
    elif wrong:
        facts = ", ".join(f"{part.name} {part.installed}, expected {part.wanted}" for part in wrong)
        yield problem("packages", f"[{extra}] {facts}", requirements.install(extra))
    elif asked:
        absent = ", ".join(part.name for part in lacking)
        gpus = "clocks, temperature and energy of GPUs; CuPy; ONNX Runtime"
        use = "`accelcheck curve --plot`" if extra == "plot" else gpus
        yield note("packages", f"[{extra}] not installed: {absent} ({use})", requirements.install(extra))


def _lacking(told: Sequence[Message], major: int) -> dict[tuple[str, str], tuple[dict[str, int], list[str]]]:
    """Missing packages by reason and command: cases by device, and the techniques and workloads that need them."""
    lacking: dict[tuple[str, str], tuple[dict[str, int], list[str]]] = {}
    for message in told:
        for entry in message.get("missing", ()):
            action = str(entry["action"])
            if message["device"] == "cuda" and major and ("accelcheck[onnx]" in action or "cupy" in action):
                action = requirements.install(f"cuda{major}")
            counts, names = lacking.setdefault((str(entry["reason"]), action), ({}, []))
            counts[str(message["device"])] = int(entry["cases"])
            names += [str(name) for name in entry["names"] if name not in names]
    return lacking


def _compiler() -> Diagnosis:
    name, version = host.compiler()
    if version:
        return ok("packages", f"C++ compiler: {version}")
    fact = f"no C++ compiler {name!r}, which torch.compile needs for the CPU"
    return note("packages", fact, "apt-get install g++, or set CXX to the name of one")


def _variables() -> Iterator[Diagnosis]:
    """Report variables that are set and change results, speed or the start of a run."""
    devices = builtin().values()
    declared = [name for device in devices for name in device.variables]
    values = host.variables(declared)
    for name, value in values.items():
        if name == "PYTEST_DISABLE_PLUGIN_AUTOLOAD" and value:
            fact = f"{name}={value}: pytest loads neither accelcheck nor its workers"
            yield problem("variables", fact, f"unset {name}, or add -p accelcheck.plugin.hooks", stops=True)
            continue
        known = "changes results or speed; baselines are kept apart by it"
        effect = known if name in declared else "may change results, speed or how a run begins"
        yield note("variables", f"{name}={value}: {effect}", f"unset {name} unless it is meant")
    if not values:
        yield ok("variables", "none is set that is known to change results or speed")


def _machine() -> Iterator[Diagnosis]:
    yield _shared()
    yield _disk()
    workers = hardware.usable_cores()
    free = host.memory()
    fact = f"{_size(free.free)} of {_size(free.total)} free ({free.place}), {workers} usable cores"
    if free.free < MEMORY * workers:
        fewer = max(1, free.free // MEMORY)
        yield note("machine", fact, f"run with -n {fewer}: a worker may take {_size(MEMORY)}")
    else:
        yield ok("machine", fact)
    enough = {"open files": FILES, "processes": 64 * workers}
    low = {
        name: value
        for name, value in host.limits().items()
        if value < next((least for start, least in enough.items() if name.startswith(start)), math.inf)
    }
    for name, value in low.items():
        yield note("machine", f"limit: {name} is {value}", "raise it, or remove it (ulimit), for the run")
    if not low:
        yield ok("machine", "limits (ulimit) leave room")
    yield _tracing()


def _shared() -> Diagnosis:
    space = host.shared_memory()
    if space is None:
        return note("machine", "there is no /dev/shm, which DataLoader workers and collectives use")
    fact = f"{space.place}: {_size(space.free)} of {_size(space.total)} free"
    if space.free > SHARED:
        return ok("machine", fact)
    action = "docker run --shm-size=2g: DataLoader workers and collectives end with SIGBUS where it is full"
    return note("machine", fact, action)


def _disk() -> Diagnosis:
    space = host.temporary()
    if space is None:
        action = "set TMPDIR to a folder that can be written"
        return problem("machine", "no folder for temporary files can be written", action, stops=True)
    fact = f"temporary files in {space.place}: {_size(space.free)} of {_size(space.total)} free"
    if space.free >= DISK:
        return ok("machine", fact)
    action = "set TMPDIR to a folder with more room: compiled code and references lie there"
    little = space.free < LEAST_DISK
    return problem("machine", fact, action, stops=True) if little else note("machine", fact, action)


def _tracing() -> Diagnosis:
    why, tools = host.tracing(), host.debuggers()
    if why:
        action = "docker run --cap-add=SYS_PTRACE, or set kernel.yama.ptrace_scope to 0 or 1"
        return note("machine", f"processes cannot be traced, so a hang shows Python stacks alone: {why}", action)
    if not tools:
        fact = "no debugger is installed, so a hang shows Python stacks alone"
        return note("machine", fact, f"{requirements.pip()} install py-spy, or apt-get install gdb")
    return ok("machine", f"processes can be traced; for native stacks: {', '.join(tools)}")


def _pytest(told: Sequence[Message]) -> Iterator[Diagnosis]:
    """Report whether pytest starts in this folder, and settings of the folder that change runs."""
    for message in told:
        if "plugins" in message:
            fact = f"pytest does not start here, or a plugin raises: {message['plugins']}"
            yield problem("pytest", fact, "repair it, or run in another folder", stops=True)
        for reason in message.get("not_loaded", {}).values():
            yield problem("pytest", f"not loaded: {reason}", "repair or uninstall its package")
        if "pytest" not in message:
            continue
        settings: dict[str, Any] = message["pytest"]
        words = [str(word) for word in settings["words"]]
        words += [f"timeout = {settings['timeout']}"] if settings["timeout"] else []
        words += [f"PYTEST_TIMEOUT={os.environ['PYTEST_TIMEOUT']}"] if os.environ.get("PYTEST_TIMEOUT") else []
        for word in words:
            yield _interfering(f"{word} (in {settings['ini']} or PYTEST_ADDOPTS)", word)
        if not settings["accelcheck"]:
            action = f"{requirements.pip()} install {requirements.source()}"
            yield problem("pytest", "pytest does not load accelcheck's plugin", action, stops=True)
        elif not words:
            yield ok("pytest", "pytest starts in this folder, with accelcheck" + " and workers" * settings["xdist"])


def _interfering(what: str, word: str) -> Diagnosis:
    """The effect on cases of a plugin's option."""
    if word == "--forked":
        fact = f"{what}: with pytest-forked every case is a `crash`, because its child may not start others"
        return problem("pytest", fact, "remove it: cases run in processes of their own already", stops=True)
    if "timeout" in word.lower():
        fact = "with pytest-timeout a case that hangs is an `error`, and with its thread method ends the run"
        return problem("pytest", f"{what}: {fact}", "use --accel-timeout=SECONDS, and give -p no:timeout")
    return problem("pytest", f"{what}: accelcheck needs that plugin", "remove it", stops=True)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
