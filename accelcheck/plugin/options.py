"""Declares and reads options and their ini twins. Imports little, since every pytest start imports it.

A function that reads an option raises `UnknownNameError` where its value is not legal; the message has the legal ones.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accelcheck.core.case import DTYPES, EFFORTS, LEVELS
from accelcheck.core.imports import unknown_device
from accelcheck.core.registry import unknown

if TYPE_CHECKING:
    import pytest

    from accelcheck.core.selection import Selection
    from accelcheck.core.shards import Shard
    from accelcheck.devices.base import Status
    from accelcheck.measure.gate import Use

SUITE = "accelcheck.suite"
PROBE_TIMEOUT = 60.0
"""Seconds in which a device must answer."""


class Option(NamedTuple):
    """One option: ``--accel-NAME`` on the command line, ``accel_NAME`` in the ini file."""

    name: str
    help: str
    repeatable: bool = False
    flag: bool = False
    metavar: str = "NAME"

    @property
    def dest(self) -> str:
        """Name in the ini file and on `config.option`."""
        return f"accel_{self.name}"

    @property
    def argument(self) -> str:
        return f"--accel-{self.name.replace('_', '-')}"


OPTIONS = (
    Option(
        "device",
        "device under test (repeatable): a name; `auto`, all that are present (default); or `all`, the absent ones "
        "too, which are reported as unavailable",
        repeatable=True,
    ),
    Option(
        "import",
        "module to import in every process that uses a device (repeatable): a backend of torch that no entry point "
        "loads",
        repeatable=True,
        metavar="MODULE",
    ),
    Option(
        "model",
        "model of your own, as a further workload (repeatable): a file and its function that returns the model and its "
        "inputs, such as path/to/model.py:make",
        repeatable=True,
        metavar="FILE:FUNCTION",
    ),
    Option(
        "fuzz",
        "number of small random programs to run as further workloads: 100, or 100@5001 to begin with another one; each "
        "has its number in its case id, by which `--accel-case` and `accelcheck explain` know it",
        metavar="N[@FIRST]",
    ),
    Option("technique", "technique to run (repeatable, globs allowed); default: all", repeatable=True),
    Option("workload", "workload to run (repeatable, globs allowed); default: all", repeatable=True),
    Option("dtype", f"storage dtype to run (repeatable): {', '.join(DTYPES)}; default: all", repeatable=True),
    Option("case", "exact case id to run, whatever its level (repeatable)", repeatable=True, metavar="ID"),
    Option("level", "1 smoke (default), 2 standard, 3 full, 4 soak", metavar="N"),
    Option(
        "shard",
        "run part I of N parts of what is selected, such as 1/4: each case is in one of them, the same on every "
        "machine",
        metavar="I/N",
    ),
    Option("require", "exit with 4 at once when a selected device is absent", flag=True),
    Option("journal", "write one JSON line per case to this file while the run goes", metavar="FILE"),
    Option(
        "resume",
        "go on with the run of this journal: cases that it holds do not run again, and it gets the records of the "
        "others",
        metavar="JOURNAL",
    ),
    Option(
        "explain",
        "at the end explain the first failure of each cause, as `accelcheck explain` does, into a folder beside the "
        "journal: for no longer than the run itself took",
        flag=True,
    ),
    Option("ledger", "further file of expected failures (repeatable)", repeatable=True, metavar="FILE"),
    Option("baseline", "compare times with stored baselines: check, update, new-only or off (default)", metavar="USE"),
    Option("baselines", "folder of the stored baselines (default: `baselines`, beside the ini file)", metavar="FOLDER"),
    Option("limits", "file of limits on speed, memory and compile time (repeatable)", repeatable=True, metavar="FILE"),
    Option(
        "processes",
        "processes that time each case for a check (default 3, then 10 more for suspected regressions) or an update "
        "(10); without baselines, further processes that time each case that is faster than eager (none)",
        metavar="N",
    ),
    Option("profile", "keep a trace of each timed case in this folder", metavar="FOLDER"),
    Option(
        "timeout",
        "seconds that a case may take; then it is a `hang` (default: 300, 900, 1800 or 7200, by its level, times the "
        "`patience` of its technique; 0: no limit)",
        metavar="SECONDS",
    ),
    Option(
        "in_process",
        "run cases in pytest's own process, for a debugger: a case that crashes or hangs ends the run",
        flag=True,
    ),
    Option(
        "effort",
        "how much is computed to judge your own model: auto, by its size (default); full, all that is usual, whatever "
        "the time; or least",
        metavar="EFFORT",
    ),
    Option("probe_timeout", "seconds to wait for a device to answer (default 60)", metavar="SECONDS"),
)


def add(parser: pytest.Parser) -> None:
    """Declares all options and their ini twins."""
    group = parser.getgroup("accelcheck", "acceleration portability")
    for option in OPTIONS:
        settings: dict[str, Any] = {"action": "store_true"}
        if not option.flag:
            settings = {"action": "append" if option.repeatable else "store", "metavar": option.metavar}
        group.addoption(option.argument, dest=option.dest, default=None, help=option.help, **settings)
        kind: Any = "bool" if option.flag else "args" if option.repeatable else "string"
        parser.addini(option.dest, option.help, type=kind, default=None)


def value(config: pytest.Config, name: str) -> Any:
    """The value of an option from the command line, else from the ini file, else None, as without this plugin."""
    dest = f"accel_{name}"
    if not hasattr(config.option, dest):
        return None
    given = config.getoption(dest)
    return given if given is not None else (config.getini(dest) or None)


def paths(config: pytest.Config, name: str) -> tuple[Path, ...]:
    """The files of an option, relative to the folder where pytest was started, or to that of the ini file."""
    given = value(config, name) or ()
    return tuple(_origin(config, name) / word for word in ([given] if isinstance(given, str) else given))


def _origin(config: pytest.Config, name: str) -> Path:
    """The folder that the paths of an option are relative to."""
    if config.getoption(f"accel_{name}") is not None:
        return config.invocation_params.dir
    return config.inipath.parent if config.inipath is not None else config.rootpath


def resumed(config: pytest.Config) -> Path | None:
    """The journal of the run to go on with, or None; ``--accel-journal`` must not name another file."""
    given, journal = paths(config, "resume"), paths(config, "journal")
    if given and journal and given != journal:
        legal = [str(given[0]), "none: it is the one that is gone on with"]
        raise unknown("journal beside --accel-resume", str(journal[0]), legal)
    return given[0] if given else None


def folder(config: pytest.Config, name: str) -> Path | None:
    """The folder of an option, or None."""
    return next(iter(paths(config, name)), None)


def baselines(config: pytest.Config) -> Path:
    """The folder of the stored baselines; the default one if accelcheck is not a plugin of this pytest."""
    return folder(config, "baselines") or config.rootpath / "baselines"


def requested(config: pytest.Config) -> bool:
    """True when this pytest run uses accelcheck: an option or an ini value is set, or the suite is an argument."""
    return any(value(config, option.name) is not None for option in OPTIONS) or _suite_named(config.args)


def suite(config: pytest.Config) -> list[str]:
    """The command that runs the suite with the command line's options; empty without any, or if it names the suite."""
    path = SUITE.replace(".", "/")
    if _suite_named(config.args) or any(f"/{path}" in str(argument) for argument in config.args):
        return []
    words: list[str] = []
    given = iter(map(str, config.invocation_params.args))
    flags = {option.argument for option in OPTIONS if option.flag}
    for word in given:
        if word.startswith("--accel-"):
            words.append(word)
            if "=" not in word and word not in flags:
                words += [next(given, "")]
    return ["pytest", "--pyargs", SUITE, *words] if words else []


def _suite_named(arguments: Iterable[str]) -> bool:
    return any(str(argument).startswith((SUITE, SUITE.replace(".", "/"))) for argument in arguments)


def requested_early(config: pytest.Config, arguments: Iterable[str]) -> float | None:
    """Seconds in which a device must answer, if a run that is not yet configured uses accelcheck; else None."""
    given = config.known_args_namespace

    def early(option: Option) -> Any:
        word = getattr(given, option.dest, None)
        return word if word is not None else (config.getini(option.dest) or None)

    words = {option.name: early(option) for option in OPTIONS}
    if given.help or not (_suite_named(arguments) or any(word is not None for word in words.values())):
        return None
    seconds = _number(words["probe_timeout"] or PROBE_TIMEOUT)
    return seconds if 0 < seconds < threading.TIMEOUT_MAX else PROBE_TIMEOUT  # `seconds` refuses others later


def models(config: pytest.Config) -> tuple[tuple[str, Path], ...]:
    """The user-owned models, ``FILE:FUNCTION``, each with the folder that its path is relative to."""
    return tuple((word, _origin(config, "model")) for word in value(config, "model") or ())


FUZZED = 1001
"""Default number of the first program of ``--accel-fuzz``."""


def programs(config: pytest.Config) -> tuple[str, ...]:
    """Names of workloads, and ids of cases, that may be of random programs."""
    words = [*(value(config, "workload") or ()), *(value(config, "case") or ())]
    given = value(config, "fuzz")
    if given is not None:
        match = re.fullmatch(r"([1-9][0-9]{0,5})(?:@([1-9][0-9]{0,7}))?", str(given))
        if match is None:
            raise unknown("number of random programs", str(given), ["N or N@FIRST, two whole numbers from 1"])
        first = int(match[2] or FUZZED)
        words += [f"program-{number}" for number in range(first, first + int(match[1]))]
    return tuple(words)


def imports(config: pytest.Config) -> tuple[str, ...]:
    """The modules to import in every process that uses a device."""
    return tuple(value(config, "import") or ())


def chosen_devices(words: Iterable[str], known: Iterable[str], statuses: Mapping[str, Status]) -> tuple[str, ...]:
    """The devices of some words, in their order, each once, with `auto` and `all` resolved."""
    names = list(known)
    chosen: list[str] = []
    for word in words:
        if word == "all":
            chosen += names
        elif word == "auto":
            chosen += [name for name in names if statuses[name].present]
        elif word in names:
            chosen.append(word)
        else:
            raise unknown_device(word, ["auto", "all", *names])
    return tuple(dict.fromkeys(chosen))


def level(config: pytest.Config) -> int:
    """The selected level, one of `LEVELS`."""
    return int(_word(config, "level", "level", map(str, LEVELS), "1"))


def shard(config: pytest.Config) -> Shard | None:
    """The selected shard, or None."""
    from accelcheck.core.shards import LEGAL, Shard

    given = value(config, "shard")
    if given is None:
        return None
    part = Shard.parse(str(given))
    if part is None:
        raise unknown("shard", str(given), [LEGAL])
    return part


def use(config: pytest.Config) -> Use:
    """The use of baselines."""
    from accelcheck.measure.gate import Use

    return Use(_word(config, "baseline", "use of baselines", Use, Use.OFF))


def processes(config: pytest.Config) -> tuple[int, int]:
    """Number of processes that time each case, 2 or more, and of further ones for cases suspected of a regression."""
    from accelcheck.measure.regression import CHECKED, STORED

    given = value(config, "processes")
    if given is None:
        return CHECKED if use(config) == "check" else STORED, STORED
    if not str(given).isascii() or not str(given).isdigit() or int(given) < 2:
        raise unknown("number of processes", str(given), ["a whole number of at least 2"])
    return int(given), int(given)


def dtypes(config: pytest.Config) -> tuple[str, ...]:
    """The selected storage dtypes."""
    given = tuple(value(config, "dtype") or ())
    for word in given:
        if word not in DTYPES:
            raise unknown("dtype", word, DTYPES)
    return given


def effort(config: pytest.Config) -> str:
    """Amount of computation that judges a user-owned model: one of `EFFORTS`."""
    return _word(config, "effort", "effort", EFFORTS, EFFORTS[0])


def _word(config: pytest.Config, name: str, kind: str, legal: Iterable[str], default: str) -> str:
    """The value of an option that is one of some words."""
    given, words = value(config, name), list(map(str, legal))
    word = default if given is None else str(given)
    if word not in words:
        raise unknown(kind, word, words)
    return word


def seconds(config: pytest.Config) -> float:
    """The probe's timeout in seconds, a positive number."""
    given = value(config, "probe_timeout")
    number = PROBE_TIMEOUT if given is None else _number(given)
    if not 0 < number < math.inf:
        raise unknown("probe timeout", str(given), ["a positive number of seconds"])
    return number


def timeout(config: pytest.Config) -> float | None:
    """Time limit of a case in seconds; None where it depends on the case, 0 for no limit."""
    given = value(config, "timeout")
    if given is None:
        return None
    number = _number(given)
    if not 0 <= number < math.inf:
        raise unknown("timeout", str(given), ["a number of seconds, 0 for no limit"])
    return number


def _number(word: Any) -> float:
    """The number in a word; NaN for any other word."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def selection(config: pytest.Config, devices: tuple[str, ...]) -> Selection:
    """All options that select cases."""
    from accelcheck.core.selection import Selection

    return Selection(
        devices=devices,
        techniques=tuple(value(config, "technique") or ()),
        workloads=tuple(value(config, "workload") or ()),
        dtypes=dtypes(config),
        cases=tuple(value(config, "case") or ()),
        level=level(config),
        shard=shard(config),
        fuzz=str(value(config, "fuzz") or ""),
    )
