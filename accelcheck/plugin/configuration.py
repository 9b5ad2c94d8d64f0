"""The configuration of a run, selection and devices: found once on the controller, and sent to workers. No torch."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import pytest

import accelcheck
from accelcheck.core import imports
from accelcheck.core.capability import Capability
from accelcheck.core.errors import InputError
from accelcheck.core.files import private
from accelcheck.core.journal import SCHEMA, JournalError, Record
from accelcheck.core.journal_reading import read
from accelcheck.core.registry import UnknownNameError
from accelcheck.core.selection import Selection
from accelcheck.devices import devices
from accelcheck.devices.base import Status
from accelcheck.expectations import must_pass
from accelcheck.plugin import installed, options, registered
from accelcheck.report.console import escaped_lines

if TYPE_CHECKING:
    from accelcheck.checks.supervisor import Supervisor
    from accelcheck.devices.base import Device
    from accelcheck.measure.gate import Gate
    from accelcheck.techniques.matrix import Matrix


class AbsentDeviceError(InputError):
    """A selected device is absent, and ``--accel-require`` was given."""


@dataclass(frozen=True)
class RunConfiguration:
    """The configuration of one run.

    Attributes:
        selection: Selected part of the matrix.
        statuses: Probed status of each known device, in order of their names.
        autoload: True when device backends may load themselves with torch; False when one of them breaks the import.
        folder: Folder private to the run; it holds the references.
        ledgers: Further ledgers, besides the shipped ones.
        imports: Modules that every process imports before it uses a device.
        masks: `Device.mask` of devices of other packages that have one, by device.
        failed_imports: Modules that cannot be imported, with the reasons. Known to the controller alone.
        finished: Ids of the cases that an earlier part of this run has finished.
        earlier: Records of these cases. Known to the controller alone.
    """

    selection: Selection
    statuses: Mapping[str, Status]
    autoload: bool
    folder: Path
    ledgers: tuple[Path, ...]
    imports: tuple[str, ...] = ()
    masks: Mapping[str, str] = field(default_factory=dict)
    failed_imports: Mapping[str, Capability] = field(default_factory=dict)
    finished: frozenset[str] = frozenset()
    earlier: Sequence[Record] = ()

    @classmethod
    def find(cls, config: pytest.Config) -> Self:
        """The configuration by the options and by a probe of the devices, each in a child process.

        Raises:
            UnknownNameError, AbsentDeviceError: A value of an option is not legal, or a required device is absent.
            LedgerError, MustPassError: A ledger, or the list that a package ships with its device, cannot be read.
            JournalError, ResumeError: The journal of ``--accel-resume`` cannot be read, or is of another run.
        """
        from accelcheck.devices.probe import probe
        from accelcheck.expectations.ledger import Ledger, shipped

        ledgers = options.paths(config, "ledger")
        Ledger.load(ledgers)
        options.selection(config, ())  # wrong values are reported before devices are probed
        options.timeout(config)
        options.effort(config)
        options.programs(config)
        if options.imports(config):
            imports.announce(options.imports(config))
        others = registered.devices(config)
        statuses, host = probe(None, options.seconds(config), others)
        words = options.value(config, "device") or ("auto",)
        failed = host.failed_imports
        try:
            chosen = options.chosen_devices(words, statuses, statuses)
        except UnknownNameError as error:
            reasons = " ".join([str(error), *_lines(failed)])
            raise UnknownNameError(reasons + installed.lines(registered.failed(config).values())) from error
        selection = options.selection(config, chosen)
        Ledger.load(shipped(chosen))
        absent = [f"{name}: {statuses[name].capability}" for name in chosen if not statuses[name].present]
        absent += _lines(failed)
        absent += registered.failed(config).values()
        if options.value(config, "require") and absent:
            raise AbsentDeviceError("--accel-require: a selected device is absent. " + "; ".join(absent))
        folder = private("run-")
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        # A module that fails in the probe would fail in this process too, and with it all other devices.
        loaded = tuple(name for name in imports.announced() if name not in failed)
        masks = {device.name: device.mask for device in others if device.mask}
        run = cls(selection, statuses, host.autoload, folder, ledgers, loaded, masks, failed)
        resumed = options.resumed(config)
        if options.value(config, "explain") and resumed is None and options.folder(config, "journal") is None:
            raise UnknownNameError(
                "--accel-explain writes beside the journal of the run: give --accel-journal=FILE too"
            )
        if resumed is None:
            return run
        earlier = finished(resumed, run.facts())
        return replace(run, earlier=earlier, finished=frozenset(record.case.id for record in earlier))

    def facts(self) -> dict[str, Any]:
        """The header of the run's journal: versions, selection, devices; lists for tuples, as JSON reads them back."""
        facts = {
            "accelcheck": accelcheck.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "level": self.selection.level,
            "selection": asdict(self.selection),
            "devices": {
                name: {
                    "capability": str(status.capability),
                    "fingerprint": status.fingerprint.as_json() if status.fingerprint else None,
                    "answers": dict(status.answers),
                }
                for name, status in self.statuses.items()
                if name in self.selection.devices
            },
            "must_pass": {name: must_pass.of(name).facts() for name in self.selection.devices},
        }
        plain: dict[str, Any] = json.loads(json.dumps(facts))
        return plain

    def inputs(self) -> dict[str, Any]:
        """The fields ``packages``, versions by name, and ``ledgers``, file names and SHA-256 of contents.

        Names alone: paths are of no use on another machine, and would tell where somebody works.
        """
        from accelcheck.expectations.ledger import shipped

        contents = [(path.name, path.read_bytes()) for path in (*shipped(self.selection.devices), *self.ledgers)]
        ledgers = [{"name": name, "sha256": hashlib.sha256(content).hexdigest()} for name, content in contents]
        return {"packages": packages(), "ledgers": ledgers}

    def as_json(self) -> dict[str, Any]:
        """The configuration as JSON-ready values for a worker."""
        plain: dict[str, Any] = msgspec.to_builtins(replace(self, failed_imports={}, earlier=()), enc_hook=os.fspath)
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The configuration from the values of `as_json`."""
        return msgspec.convert(data, cls, dec_hook=lambda kind, value: kind(value))

    def devices(self, config: pytest.Config) -> Mapping[str, Device]:
        """All known devices by name: built-in ones, those of other plugins, and accelerators that the probe found."""
        from accelcheck.devices.generic import Generic

        hooked = registered.devices(config)
        known = devices(hooked)
        usable = devices([*hooked, *(Generic(name) for name in self.statuses if name not in known)])
        for name, status in self.statuses.items():
            usable[name].learn(status)
        return usable

    def apply(self, environ: MutableMapping[str, str], worker: str, workers: int) -> None:
        """Sets the environment variables that torch reads at import; values that the user has set stay.

        `worker` is xdist's name of this process, such as ``gw1``; empty without workers.
        """
        from accelcheck.devices import hardware
        from accelcheck.devices.pinning import pin

        imports.announce(self.imports, environ)
        if not self.autoload:
            environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        if not worker:
            return
        # Workers share the cores: more threads than cores only slow each other down.
        environ.setdefault("OMP_NUM_THREADS", str(max(1, hardware.usable_cores() // workers)))
        environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        for name in self.selection.devices:
            fingerprint = self.statuses[name].fingerprint
            if fingerprint is not None:
                pin(name, worker, environ, fingerprint.count, self.masks.get(name))


def _lines(failed: Mapping[str, Capability]) -> list[str]:
    return [f"{imports.OPTION}={name}: {capability}" for name, capability in failed.items()]


def gate(config: pytest.Config, run: RunConfiguration) -> Gate:
    """The gate that holds the times of this run against baselines and limits.

    It raises `BaselineError` or `LimitError` where a stored baseline, or a file of limits, is malformed.
    """
    from accelcheck.expectations import limits
    from accelcheck.measure.baselines import Baselines, Place, settings
    from accelcheck.measure.gate import STORING, Gate, Use

    statuses = {name: run.statuses[name] for name in run.selection.devices}
    prints = {name: status.fingerprint for name, status in statuses.items() if status.fingerprint is not None}
    places = {name: Place.of(fingerprint) for name, fingerprint in prints.items()}
    environments = {name: settings(fingerprint) for name, fingerprint in prints.items()}
    store = Baselines(options.baselines(config))
    use = options.use(config)
    processes, _ = options.processes(config)
    stored = {} if use is Use.OFF else {name: store.cases(place) for name, place in places.items()}
    if use in STORING:
        for place in places.values():
            store.writable(place)
    files = options.paths(config, "limits")
    words = [f"--accel-limits={file}" for file in files]
    if use is not Use.OFF:
        words += [f"--accel-baseline={use}", f"--accel-baselines={store.root}"]
    further = 0
    if options.value(config, "processes") is not None:
        words.append(f"--accel-processes={processes}")
        # Cases in this process keep the device until it ends.
        further = processes if use is Use.OFF and not options.value(config, "in_process") else 0
    return Gate(use, store, places, environments, limits.load(files), tuple(words), stored, further=further)


_NAME, _VERSION = (re.compile(rf"^{field}: *(\S.*?) *$", re.MULTILINE | re.IGNORECASE) for field in ("Name", "Version"))


def packages() -> dict[str, str]:
    """The versions of the installed distributions by name; of two with the same name the one that is imported.

    It reads two lines of each: parsing all metadata takes 2 ms a package, and environments have hundreds.
    """
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        head = (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").partition("\n\n")[0]
        name, version = _NAME.search(head), _VERSION.search(head)
        if name and version:
            versions.setdefault(name[1], version[1])
    return dict(sorted(versions.items()))


def chips(statuses: Mapping[str, Status]) -> dict[str, str]:
    """The chip and the runtime of each device that has a fingerprint, in the form of ledgers."""
    places = {name: status.fingerprint for name, status in statuses.items() if status.fingerprint is not None}
    return {name: ", ".join(filter(None, (place.chip, place.runtime))) for name, place in places.items()}


def supervisor(
    config: pytest.Config,
    run: RunConfiguration,
    matrix: Matrix,
    folder: Path,
    close: Callable[[Callable[[], None]], object],
    gate: Gate | None = None,
) -> Supervisor:
    """The parent of the cases, which run in another process unless ``--accel-in-process`` or a used device forbids it.

    The private `folder` holds references; `close` registers functions that end the processes.
    """
    from accelcheck.checks.execute import Bench
    from accelcheck.checks.supervisor import Supervisor
    from accelcheck.core.clean_process import CleanProcessError
    from accelcheck.expectations.ledger import Ledger, shipped
    from accelcheck.verify.oracle import Store

    devices, chosen = run.devices(config), run.selection.devices
    ledger = replace(Ledger.load((*shipped(chosen), *run.ledgers)), chips=chips(run.statuses))
    store = Store(folder, effort=options.effort(config))
    bench = Bench(matrix, devices, run.statuses, store, options.folder(config, "profile"))
    here = _here(config, [devices[name] for name in chosen])
    try:
        made = Supervisor(bench, ledger, gate, options.timeout(config), here=here)
    except CleanProcessError as error:
        _warn(config, str(error))
        made = Supervisor(bench, ledger, gate, here=True)
    close(made.close)
    return made


def _here(config: pytest.Config, devices: Sequence[Device]) -> bool:
    """True when cases must run in pytest's own process."""
    from accelcheck.measure import timing_processes

    if options.value(config, "in_process") or timing_processes.ongoing() is not None:
        return True
    used = ", ".join(device.name for device in devices if device.in_use())
    if used:
        _warn(config, f"{used}: in use in this process before the first case")
    return bool(used)


def _warn(config: pytest.Config, why: str) -> None:
    words = escaped_lines(f"accelcheck: cases run in pytest's own process, which a crash or hang ends: {why}")
    config.issue_config_time_warning(pytest.PytestWarning(words), stacklevel=3)  # workers hand it on


SAME = ("accelcheck", "python", "platform", "selection", "devices", "must_pass")
"""Fields of the header that two parts of a run have in common."""
MOST = 5
"""Largest number of differences that an error names."""


class ResumeError(JournalError):
    """A run cannot go on with the journal of another run; the message names the differences."""


def finished(path: Path, facts: Mapping[str, Any]) -> Sequence[Record]:
    """The records in the journal of a run that was cut off.

    It raises `JournalError` where it cannot be read, and `ResumeError` where it is that of a run on another device,
    with other versions or another selection than `facts`, the header of the run that is beginning.
    """
    header, records = read(path)
    if header and (schema := header["schema"]) != SCHEMA:
        older = (
            f"an older accelcheck has written: its records are of schema {schema}, and those of this one of {SCHEMA}"
        )
        raise ResumeError(f"cannot go on with {path}, which {older}; begin anew with --accel-journal")
    differing = [line for name in SAME for line in _differing(name, header.get(name), facts[name])]
    if differing:
        more = [f"and {len(differing) - MOST} more"] if len(differing) > MOST else []
        raise ResumeError(
            f"cannot go on with {path}, which is of another run: {'; '.join([*differing[:MOST], *more])}; "
            "run with the same options on the same machine, or begin anew with --accel-journal"
        )
    return records


def _differing(name: str, was: Any, now: Any) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*was, *now]):
            yield from _differing(f"{name}.{key}", was.get(key), now.get(key))
    elif was != now:
        yield f"{name} was {was!r}, and is {now!r}"
