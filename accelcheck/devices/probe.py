"""Finds out which devices run here, in child processes: a backend that raises, hangs or crashes takes nothing along.

The parent never imports torch. Each child prints JSON lines after a marker: how far it got, and one status a device.
Run by hand: ``python -m accelcheck.devices.probe NAME...``.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from accelcheck.core import registry
from accelcheck.core.capability import Capability, Code, unavailable
from accelcheck.devices import hardware
from accelcheck.devices.base import Device, Status, status_from_json
from accelcheck.devices.packages import AUTOLOAD, backends, installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TIMEOUT = 60.0
"""Seconds that a child may take."""
_MARK = "@accelcheck-probe@ "
_OTHERS = "*"
"""In a child's list of names: every accelerator that torch has and no file here is for."""
_LOAD = "load:"
"""In a child's list of names, before that of an out-of-tree backend: load it."""
_AT = "@"
"""Between the name of another package's device and its ``module:Class``."""
_TICK = 0.02
# The child sees the parent's import path, whatever put accelcheck and a vendor's device on it.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from accelcheck.devices.probe import main; main(sys.argv[1:])"
)
_SETTINGS = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # ask the driver for GPUs without making a context on one
    "PYTHONFAULTHANDLER": "1",  # a crash says where
}


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What concerns all devices.

    Attributes:
        cpu: The processor's name.
        cores: How many logical processors this process may use.
        backends: Names of the installed out-of-tree backends, by their entry points.
        broken: Of these, the ones that cannot be loaded, with what they raised or did.
        autoload: Whether `import torch` may load them by itself. If not, `TORCH_DEVICE_BACKEND_AUTOLOAD=0` must be
            set before torch is imported, or the import raises or hangs.
    """

    cpu: str
    cores: int
    backends: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    autoload: bool = True

    def as_json(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return asdict(self)


def builtin() -> Mapping[str, Device]:
    """The devices of this package, by name."""
    return registry.index("device", cast("list[Device]", registry.discover("accelcheck.devices", "DEVICES")))


def probe(
    names: Sequence[str] | None, timeout: float = TIMEOUT, extra: Sequence[Device] = ()
) -> tuple[dict[str, Status], HostFacts]:
    """Which devices run here, and what they are.

    Args:
        names: Devices to ask for; a name that is not known is taken for the type of some other accelerator. ``None``
            asks for all, and answers for the other accelerators that are found.
        timeout: Seconds that each child process may take.
        extra: Devices of other packages; their classes must be importable and take no arguments.
    """
    known = dict(registry.index("device", [*builtin().values(), *extra]))
    wanted = list(dict.fromkeys(known if names is None else names))
    detected = {name: _detect(known[name]) for name in wanted if name in known}
    statuses = {name: Status(name, capability) for name, capability in detected.items() if not capability.ok}
    strangers = [name for name in wanted if name not in known]
    jobs = _jobs(
        [name for name, capability in detected.items() if capability.ok],
        others=installed("torch") and (names is None or bool(strangers)),
    )
    specs = {device.name: _spec(device) for device in extra}
    results, broken, autoload = _ask(jobs, specs, timeout)
    found: dict[str, Status] = {}
    for result in results:
        found |= {name: status for name, status in result.statuses.items() if not name.startswith(_LOAD)}
    statuses |= {name: status for name, status in found.items() if names is None or name in wanted}
    for name, error in broken.items():
        if names is None or name in wanted:
            statuses[name] = Status(name, _broken(name, error))
    for name in strangers:
        statuses.setdefault(name, Status(name, _absent(name, broken, results)))
    facts = HostFacts(
        cpu=hardware.cpu().name,
        cores=hardware.usable_cores(),
        backends=tuple(entry.name for entry in backends()),
        broken=broken,
        autoload=autoload,
    )
    return dict(sorted(statuses.items())), facts


# In the parent.


@dataclass(slots=True)
class _Child:
    """One child process: what it was asked for, and what became of it."""

    names: list[str]
    specs: Mapping[str, str]
    environ: Mapping[str, str]
    timeout: float
    started: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    out: IO[bytes] | None = None
    err: IO[bytes] | None = None
    imported: bool = False
    late: bool = False
    failure: Capability | None = None
    """Why it ended before all its names were answered."""
    statuses: dict[str, Status] = field(default_factory=dict)

    def start(self) -> None:
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - closed in `finish`
        words = [self.specs.get(name, name) for name in self.names]
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", _CHILD, json.dumps(sys.path), *words],
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
            env=dict(self.environ) | _SETTINGS,
            start_new_session=True,
        )
        self.started = time.monotonic()

    def ended(self) -> bool:
        """Whether it is over; kills its whole process group when its time is."""
        assert self.process is not None
        if self.process.poll() is not None:
            return True
        if time.monotonic() - self.started < self.timeout:
            return False
        self.late = True
        self.kill()
        return True

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finish(self) -> None:
        """Read what it printed, and put a status to every name that it was asked for."""
        assert self.process is not None
        assert self.out is not None
        assert self.err is not None
        stage = "start"
        with self.out, self.err:
            for record in _records(self.out):
                stage = str(record.get("stage", stage))
                self.imported |= stage != "import torch"
                self._take(record)
            if self.failure is None and stage != "done":
                self.failure = _end(
                    self.process.returncode, stage, self.timeout if self.late else None, _text(self.err)
                )
        if self.failure is None:
            return
        # The last stage may name an accelerator that was found and being opened.
        opened = [stage.removeprefix("open ")] if stage.startswith("open ") else []
        for name in (*self.names, *opened):
            if name != _OTHERS:
                self.statuses.setdefault(name, Status(name, self.failure))

    def _take(self, record: Mapping[str, Any]) -> None:
        if "error" in record:
            self.failure = unavailable(Code.IMPORT_FAILED, f"import torch: {record['error']}")
        if "status" in record:
            try:
                status = status_from_json(record["status"])
            except ValueError as error:
                self.failure = unavailable(Code.PROBE_FAILED, f"the probe's answer cannot be read: {error}")
            else:
                self.statuses[status.device] = status


def _jobs(pending: Sequence[str], *, others: bool) -> list[list[str]]:
    """Which names each child is asked for: the CPU and the unknown accelerators share one, so most machines pay once."""
    jobs = [[name] for name in pending if name != "cpu"]
    shared = [name for name in pending if name == "cpu"] + ([_OTHERS] if others else [])
    return [shared, *jobs] if shared else jobs


def _ask(
    jobs: Sequence[list[str]], specs: Mapping[str, str], timeout: float
) -> tuple[list[_Child], dict[str, str], bool]:
    """Run the children; where a broken backend keeps them from importing torch, once more without it.

    Returns:
        The children, the broken backends with their errors, and whether torch may load backends by itself.
    """

    def run(environ: Mapping[str, str], jobs: Sequence[list[str]]) -> list[_Child]:
        return _run([_Child(list(job), specs, environ, timeout) for job in jobs])

    environ = dict(os.environ)
    first = run(environ, jobs)
    stuck = [child for child in first if not child.imported]
    entries = [entry.name for entry in backends()]
    if not stuck or not entries or environ.get(AUTOLOAD) == "0":
        return first, {}, True
    environ[AUTOLOAD] = "0"
    said = stuck[0].failure.reason if stuck[0].failure is not None else "import torch did not end"
    broken: dict[str, str] = {}
    if len(entries) > 1:
        tries = run(environ, [[f"{_LOAD}{name}"] for name in entries])
        broken = {
            name: status.capability.reason
            for name, child in zip(entries, tries, strict=True)
            for status in child.statuses.values()
        }
    # If each loads alone, it is what they do to each other, and all that is known is what `import torch` said.
    broken = broken or dict.fromkeys(entries, said)
    loads = [f"{_LOAD}{name}" for name in entries if name not in broken]
    again = run(
        environ,
        [[word for name in child.names for word in ([*loads, name] if name == _OTHERS else [name])] for child in stuck],
    )
    if not any(child.imported for child in again):
        return first, {}, True  # torch itself is broken, the backends are not to blame
    return [*(child for child in first if child.imported), *again], broken, False


def _run(children: list[_Child]) -> list[_Child]:
    """Run children side by side, no more than the machine has processors (two at least)."""
    waiting, running = list(children), list[_Child]()
    limit = max(2, hardware.usable_cores())
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                child = waiting.pop(0)
                child.start()
                running.append(child)
            time.sleep(_TICK)
            for child in [child for child in running if child.ended()]:
                running.remove(child)
                child.finish()
    finally:
        for child in running:
            child.kill()
    return children


def _records(out: IO[bytes]) -> list[dict[str, Any]]:
    out.seek(0)
    lines = (line.decode(errors="replace").partition(_MARK) for line in out)
    records: list[dict[str, Any]] = []
    for _, mark, text in lines:
        # A line that another thread wrote into, or that a crash cut short, is no answer.
        with suppress(json.JSONDecodeError):
            if mark:
                records.append(json.loads(text))
    return records


def _text(err: IO[bytes]) -> str:
    err.seek(0)
    return err.read().decode(errors="replace")


def _end(code: int, stage: str, timeout: float | None, err: str) -> Capability:
    """Why a child ended early."""
    if timeout is not None:
        return unavailable(Code.PROBE_TIMEOUT, f"no answer within {timeout:g} s, during: {stage}")
    if code < 0:
        place = re.search(r'^  File "(.+)", line (\d+) in (.+)$', err, re.MULTILINE)
        where = f", in {place.group(3)} at {place.group(1)}:{place.group(2)}" if place else ""
        return unavailable(Code.PROBE_FAILED, f"the probe died of {signal.Signals(-code).name} during: {stage}{where}")
    lines = err.strip().splitlines()
    last = lines[-1] if lines else "nothing on standard error"
    return unavailable(Code.PROBE_FAILED, f"the probe ended with status {code} during: {stage}: {last}")


def _detect(device: Device) -> Capability:
    try:
        return device.detect()
    except Exception as error:  # noqa: BLE001 - a device of another package may raise anything; the others go on
        return unavailable(Code.PROBE_FAILED, f"detect: {_last_line(error)}")


def _broken(name: str, error: str) -> Capability:
    return unavailable(
        Code.IMPORT_FAILED, f"the backend {name} breaks `import torch`: {error}", f"set {AUTOLOAD}=0, or uninstall it"
    )


def _absent(name: str, broken: Mapping[str, str], results: Sequence[_Child]) -> Capability:
    """Why an accelerator that was asked for by its type was not found."""
    for backend, error in broken.items():
        if name in backend:
            return _broken(backend, error)
    failures = [child.failure for child in results if _OTHERS in child.names and child.failure is not None]
    if failures:
        return failures[0]
    return unavailable(
        Code.NO_PACKAGE,
        f"no installed package gives torch a device of type {name}",
        "install the vendor's torch extension, or check the spelling",
    )


def _spec(device: Device) -> str:
    kind = type(device)
    return f"{device.name}{_AT}{kind.__module__}:{kind.__qualname__}"


# In the child.


def main(names: Sequence[str]) -> None:
    """Answer for each name in turn, on standard output, and end the process without tearing backends down."""
    try:
        _answer(names)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # a backend that crashes or hangs at exit has answered all the same


def _answer(names: Sequence[str]) -> None:
    _say(stage="import torch")
    try:
        importlib.import_module("torch")
    except Exception as error:  # noqa: BLE001 - a backend that torch loads may raise anything
        traceback.print_exc()
        _say(error=_last_line(error))
        return
    known = builtin()
    for name in names:
        if name == _OTHERS:
            _answer_others(known)
        elif name.startswith(_LOAD):
            _answer_backend(name)
        else:
            device, _, spec = name.partition(_AT)
            _say(stage=f"open {device}")
            make = partial(_foreign, spec) if spec else partial(known.__getitem__, device)
            _say(status=_status(device, make).as_json())
    _say(stage="done")


def _answer_others(known: Mapping[str, Device]) -> None:
    from accelcheck.devices.generic import Generic, found_types

    taken = {device.type for device in known.values()}
    for kind in found_types():
        if kind not in taken:
            _say(stage=f"open {kind}")
            _say(status=_status(kind, partial(Generic, kind)).as_json())


def _answer_backend(word: str) -> None:
    """Load one backend as `import torch` would have; answers only if that fails."""
    _say(stage=word)
    entry = next(entry for entry in backends() if entry.name == word.removeprefix(_LOAD))
    try:
        entry.load()()
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        traceback.print_exc()
        _say(status=Status(word, unavailable(Code.IMPORT_FAILED, _last_line(error))).as_json())


def _status(name: str, make: Callable[[], Device]) -> Status:
    """Open a device, ask whether it is usable, and take its fingerprint."""
    try:
        device = make()
        device.open()
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        traceback.print_exc()
        return Status(name, unavailable(Code.IMPORT_FAILED, _last_line(error)))
    try:
        capability = device.usable()
        return Status(name, capability, device.fingerprint() if capability.ok else None)
    except Exception as error:  # noqa: BLE001 - as above
        traceback.print_exc()
        return Status(name, unavailable(Code.PROBE_FAILED, _last_line(error)))


def _foreign(spec: str) -> Device:
    """A device of another package, from ``module:Class``."""
    module, _, path = spec.partition(":")
    thing: Any = importlib.import_module(module)
    for part in path.split("."):
        thing = getattr(thing, part)
    return cast("Device", thing())


def _last_line(error: BaseException) -> str:
    """The last line of its traceback, and that of the error that caused it."""
    lines = [traceback.format_exception_only(error)[-1].strip()]
    while error.__cause__ is not None:
        error = error.__cause__
        lines.append(traceback.format_exception_only(error)[-1].strip())
    return "; caused by ".join(line.splitlines()[0] for line in lines)


def _say(**record: Any) -> None:
    print(f"\n{_MARK}{json.dumps(record)}", flush=True)  # a backend may have left a line unfinished


if __name__ == "__main__":
    main(sys.argv[1:])
