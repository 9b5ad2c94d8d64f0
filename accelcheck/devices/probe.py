"""Probes devices in child processes, so that a backend that raises, hangs or crashes affects no other.

The parent never imports torch. Each child reports its stages, and one status a device.
A child by hand, which prints its messages: ``python -m accelcheck.devices.probe NAME...``.
"""

import importlib
import os
import pkgutil
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

from accelcheck.core import imports, registry
from accelcheck.core.capability import Capability, Code, unavailable
from accelcheck.core.foreign import ForeignCodeError
from accelcheck.core.foreign import calling as calling_foreign
from accelcheck.core.processes import Child, End, Message, calling, end_at_once, say
from accelcheck.core.strangers import quoted
from accelcheck.devices import hardware, trying
from accelcheck.devices.base import Device, Status, status_from_json
from accelcheck.devices.packages import AUTOLOAD, backends, installed

TIMEOUT = 60.0
"""Time limit of a child in seconds."""
_OTHERS = "*"
"""Word in a child's list of names for every accelerator of torch that is not a known device."""
_LOAD = "load:"
"""Prefix, in a child's list of names, of an out-of-tree backend to load."""
_IMPORT = f"{imports.OPTION}="
"""Prefix, in stages and statuses of a child, of the name of a module to import."""
_AT = "@"
"""Separator of the name of another package's device and its ``module:Class``."""
_WITHOUT = {AUTOLOAD: "0"}
"""Environment of a child in which torch loads no backends by itself."""
_SETTINGS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # torch then asks the driver for GPUs, without a context on one


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of the host that concern all devices.

    Attributes:
        cores: Number of logical processors that this process may use.
        backends: Names of the installed out-of-tree backends, by their entry points.
        broken: The backends that cannot be loaded, with their errors.
        failed_imports: Modules of ``--accel-import`` that a child could not import, with their errors.
        autoload: True when `import torch` may load backends. Otherwise `TORCH_DEVICE_BACKEND_AUTOLOAD=0` must be set
            before torch is imported, or the import raises or hangs.
    """

    cpu: str
    cores: int
    backends: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    autoload: bool = True
    failed_imports: Mapping[str, Capability] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return asdict(self)


def builtin() -> Mapping[str, Device]:
    """The devices of this package, by name."""
    return registry.index("device", cast("list[Device]", registry.discover("accelcheck.devices", "DEVICES")))


def probe(
    names: Sequence[str] | None, timeout: float = TIMEOUT, extra: Sequence[Device] = ()
) -> tuple[dict[str, Status], HostFacts]:
    """The statuses of devices on this machine, by name, and the facts of the host.

    An unknown name is taken as the torch type of some other accelerator; None means all known devices and the other
    accelerators that are found. `timeout` limits each child process, in seconds. `extra` are devices of other packages;
    their classes must be importable and take no arguments.
    """
    known = dict(registry.index("device", [*builtin().values(), *extra]))
    wanted = list(dict.fromkeys(known if names is None else names))
    detected = {name: _detect(known[name], timeout) for name in wanted if name in known}
    statuses = {name: Status(name, capability) for name, capability in detected.items() if not capability.ok}
    unknown = [name for name in wanted if name not in known]
    ready = [name for name, capability in detected.items() if capability.ok]
    jobs = _jobs(ready, others=installed("torch") and (names is None or bool(unknown)))
    kinds = {device.name: type(device) for device in extra}
    specs = {name: f"{name}{_AT}{kind.__module__}:{kind.__qualname__}" for name, kind in kinds.items()}
    results, broken, autoload = _ask(jobs, specs, timeout)
    statuses |= {
        name: status
        for result in results
        for name, status in result.statuses.items()
        if not name.startswith((_LOAD, _IMPORT)) and (names is None or name in wanted)
    }
    for name, error in broken.items():
        if names is None or name in wanted:
            statuses[name] = Status(name, _broken(name, error))
    for name in unknown:
        statuses.setdefault(name, Status(name, _absent(name, broken, results)))
    PROBED.update(statuses)
    facts = HostFacts(
        cpu=hardware.cpu(),
        cores=hardware.usable_cores(),
        backends=tuple(entry.name for entry in backends()),
        broken=broken,
        autoload=autoload,
        failed_imports=_failed_imports(results),
    )
    return dict(sorted(statuses.items())), facts


def broken_backends(timeout: float) -> dict[str, str]:
    """The installed out-of-tree backends that keep `import torch` from ending, with errors; `probe` remembers them."""
    _, broken, _ = _ask([[]], {}, timeout)
    _BROKEN.update(broken)
    return broken


# In the parent.


PROBED: dict[str, Status] = {}
"""Results of `probe` in this process, by device."""
_BROKEN: dict[str, str] = {}
"""Results of `broken_backends` in this process."""


@dataclass(slots=True)
class _Answers:
    """The names that one child process must answer, and its answers."""

    names: list[str]
    imported: bool = False
    failure: Capability | None = None
    """Reason why it ended before all its names were answered."""
    statuses: dict[str, Status] = field(default_factory=dict)

    def finish(self, child: Child, timeout: float) -> None:
        """Waits for the child, reads its messages, and sets a status for each of its names."""
        end = child.wait(timeout, since=child.started)
        stage = "start"
        for message in child.messages():
            stage = str(message.get("stage", stage))
            self.imported |= stage != "import torch"
            self._take(message)
        if self.failure is None and stage != "done":
            self.failure = _early(end, stage, child.output())
        child.end()
        if self.failure is None:
            return
        # The last stage may name a module that was being imported, or an accelerator that was being opened.
        opened = [stage.removeprefix("open ")] if stage.startswith(("open ", _IMPORT)) else []
        for name in (*self.names, *opened):
            if name != _OTHERS:
                self.statuses.setdefault(name, Status(name, self.failure))

    def _take(self, message: Message) -> None:
        if "error" in message:
            self.failure = unavailable(Code.IMPORT_FAILED, f"import torch: {message['error']}")
        if "status" in message:
            try:
                status = status_from_json(message["status"])
            except ValueError as error:
                self.failure = unavailable(Code.PROBE_FAILED, f"the probe's answer cannot be read: {error}")
            else:
                self.statuses[status.device] = status


def _jobs(pending: Sequence[str], *, others: bool) -> list[list[str]]:
    """The names for each child. The CPU and unknown accelerators share one, so that most machines start only one."""
    jobs = [[name] for name in pending if name != "cpu"]
    shared = [name for name in pending if name == "cpu"] + ([_OTHERS] if others else [])
    return [shared, *jobs] if shared else jobs


def _ask(
    jobs: Sequence[list[str]], specs: Mapping[str, str], timeout: float
) -> tuple[list[_Answers], dict[str, str], bool]:
    """Runs the children; where a broken backend keeps them from importing torch, once more without it.

    The answers, the broken backends with their errors, and True when torch may load backends by itself.
    """
    entries = [entry.name for entry in backends()]
    known = {name: _BROKEN[name] for name in entries if name in _BROKEN}
    if known:
        loads = [f"{_LOAD}{name}" for name in entries if name not in known]
        return _run(_loading(jobs, loads), specs, timeout, _WITHOUT), known, False
    first = _run(jobs, specs, timeout, {})
    stuck = [answers for answers in first if not answers.imported]
    if not stuck or not entries or os.environ.get(AUTOLOAD) == "0":
        return first, {}, True
    reason = stuck[0].failure.reason if stuck[0].failure is not None else "import torch did not end"
    # Where each loads alone, they break each other, and only the error of `import torch` is known.
    broken = _break_alone(entries, specs, timeout) or dict.fromkeys(entries, reason)
    loads = [f"{_LOAD}{name}" for name in entries if name not in broken]
    again = _run(_loading([answers.names for answers in stuck], loads), specs, timeout, _WITHOUT)
    if not any(answers.imported for answers in again):
        return first, {}, True  # torch itself is broken, the backends are not to blame
    return [*(answers for answers in first if answers.imported), *again], broken, False


def _break_alone(entries: Sequence[str], specs: Mapping[str, str], timeout: float) -> dict[str, str]:
    """The backends, of several, that fail to load alone, with their errors; empty for a single one."""
    if len(entries) == 1:
        return {}
    tries = _run([[f"{_LOAD}{name}"] for name in entries], specs, timeout, _WITHOUT)
    return {
        name: status.capability.reason
        for name, answers in zip(entries, tries, strict=True)
        for status in answers.statuses.values()
    }


def _loading(jobs: Sequence[list[str]], loads: list[str]) -> list[list[str]]:
    """The jobs, with backends to load before the search for unknown accelerators."""
    return [[word for name in names for word in ([*loads, name] if name == _OTHERS else [name])] for names in jobs]


def _run(
    jobs: Sequence[list[str]], specs: Mapping[str, str], timeout: float, environ: Mapping[str, str]
) -> list[_Answers]:
    """Runs a child for each list of names, at most as many at once as there are processors (two at least)."""
    limit = max(2, hardware.usable_cores())
    done, running = list[_Answers](), deque[tuple[_Answers, Child]]()
    with ExitStack() as stack:

        def finish() -> None:
            answers, child = running.popleft()  # the oldest, whose time is over first
            answers.finish(child, timeout)
            done.append(answers)

        for names in jobs:
            if len(running) == limit:
                finish()
            child = stack.enter_context(_started([specs.get(name, name) for name in names], environ))
            running.append((_Answers(list(names)), child))
        while running:
            finish()
    return done


def _started(words: Sequence[str], environ: Mapping[str, str]) -> Child:
    return Child(calling(f"{__name__}:main", *words, parent=True), {**_SETTINGS, **environ})


def _early(end: End | None, stage: str, output: str) -> Capability:
    """The reason why a child ended early."""
    if end is not None and end.limit is not None:
        return unavailable(Code.PROBE_TIMEOUT, f"no answer within {end.limit:g} s, during: {stage}")
    place = re.search(r'^  File "(.+)", line (\d+) in (.+)$', output, re.MULTILINE)  # from faulthandler
    if end is not None and end.code < 0:
        where = f", in {place.group(3)} at {place.group(1)}:{place.group(2)}" if place else ""
        return unavailable(Code.PROBE_FAILED, f"the probe {end} during: {stage}{where}")
    last = next(reversed(output.strip().splitlines()), "it printed nothing")
    return unavailable(Code.PROBE_FAILED, f"the probe {end} during: {stage}: {last}")


def _detect(device: Device, timeout: float) -> Capability:
    kind = type(device)
    what = f"{kind.__module__}.{kind.__qualname__}.detect"
    try:
        with calling_foreign(what, timeout):
            capability: Any = device.detect()
    except ForeignCodeError as error:
        return unavailable(Code.PROBE_TIMEOUT if error.late else Code.PROBE_FAILED, str(error).partition("\n")[0])
    if not isinstance(capability, Capability):
        return unavailable(Code.PROBE_FAILED, f"{what}: expected a Capability, got {quoted(capability)}")
    return capability


def _broken(name: str, error: str) -> Capability:
    reason = f"the backend {name} breaks `import torch`: {error}"
    return unavailable(Code.IMPORT_FAILED, reason, f"set {AUTOLOAD}=0, or uninstall it")


def _absent(name: str, broken: Mapping[str, str], results: Sequence[_Answers]) -> Capability:
    """The reason why an accelerator that was asked for by its type was not found."""
    for backend, error in broken.items():
        if name in backend:
            return _broken(backend, error)
    failures = [child.failure for child in results if _OTHERS in child.names and child.failure is not None]
    failures += _failed_imports(results).values()
    if failures:
        return failures[0]
    reason = f"no installed package gives torch a device of type {name}"
    action = f"install the vendor's torch extension, check the spelling, or give {_IMPORT}MODULE"
    return unavailable(Code.NO_PACKAGE, reason, action)


def _failed_imports(results: Sequence[_Answers]) -> dict[str, Capability]:
    """Reasons why modules of ``--accel-import`` cannot be imported, by name."""
    return {
        name.removeprefix(_IMPORT): status.capability
        for child in results
        for name, status in child.statuses.items()
        if name.startswith(_IMPORT)
    }


# In the child.


def main(names: Sequence[str]) -> None:
    """Answers for each name in turn, and ends the process without tearing backends down."""
    _answer(names)
    end_at_once()


def _answer(names: Sequence[str]) -> None:
    say(stage="import torch")
    try:
        importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 - a backend that torch loads may raise anything
        traceback.print_exc()
        say(error=_last_line(error))
        return
    known = builtin()
    for name in names:
        if name == _OTHERS or _AT in name:
            _import_announced()
        if name == _OTHERS:
            _answer_others(known)
        elif name.startswith(_LOAD):
            _answer_backend(name)
        else:
            device, _, spec = name.partition(_AT)
            say(stage=f"open {device}")
            make = partial(_foreign, spec) if spec else partial(known.__getitem__, device)
            _tell(device, make)
    say(stage="done")


def _answer_others(known: Mapping[str, Device]) -> None:
    from accelcheck.devices.generic import Generic, found_types

    taken = {device.type for device in known.values()}
    for kind in found_types():
        if kind not in taken:
            say(stage=f"open {kind}")
            _tell(kind, partial(Generic, kind))


def _import_announced() -> None:
    """Imports the modules of ``--accel-import``; answers for those that raise."""
    for name in imports.announced():
        say(stage=f"{_IMPORT}{name}")
        try:
            imports.load_one(name)
        except imports.ModuleImportError as error:
            traceback.print_exc()
            failure = unavailable(Code.IMPORT_FAILED, _last_line(error.__cause__ or error), imports.ADVICE)
            say(status=Status(f"{_IMPORT}{name}", failure).as_json())


def _answer_backend(word: str) -> None:
    """Loads one backend as `import torch` would; reports only a failure."""
    say(stage=word)
    entry = next(entry for entry in backends() if entry.name == word.removeprefix(_LOAD))
    try:
        entry.load()()
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        traceback.print_exc()
        say(status=Status(word, unavailable(Code.IMPORT_FAILED, _last_line(error))).as_json())


def _tell(name: str, make: Callable[[], Device]) -> None:
    """Reports a device's status, and again after each trial: one that ends this process loses nothing reported."""
    failure = Code.IMPORT_FAILED
    try:
        device = make()
        device.open()
        failure = Code.PROBE_FAILED
        capability = device.usable()
        status = Status(name, capability, device.fingerprint() if capability.ok else None)
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        traceback.print_exc()
        return say(status=Status(name, unavailable(failure, _last_line(error))).as_json())
    say(status=status.as_json())
    if status.present:
        for answers in trying.answers(device):
            say(stage=f"try what {name} does not declare", status=replace(status, answers=answers).as_json())
    return None


def _foreign(spec: str) -> Device:
    """A device of another package, from ``module:Class``."""
    return cast("Device", pkgutil.resolve_name(spec)())


def _last_line(error: BaseException) -> str:
    """The last line of its traceback, and those of the errors that caused it."""
    lines = [traceback.format_exception_only(error)[-1].strip()]
    while error.__cause__ is not None:
        error = error.__cause__
        lines.append(traceback.format_exception_only(error)[-1].strip())
    return "; caused by ".join(line.splitlines()[0] for line in lines)


if __name__ == "__main__":
    main(sys.argv[1:])
