"""The child process of `accelcheck doctor`: imports torch, forks, starts pytest, and asks techniques what they lack."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from accelcheck.core.capability import Capability, Code
from accelcheck.core.clean_process import CleanProcessError
from accelcheck.core.processes import end_at_once, say
from accelcheck.core.selection import Selection
from accelcheck.devices.base import Device
from accelcheck.devices.probe import probe
from accelcheck.plugin import registered
from accelcheck.techniques.matrix import Matrix

LEVEL = 2
"""Level of the cases that are counted."""
_INSTALLABLE = frozenset({Code.NO_PACKAGE, Code.WRONG_VERSION, Code.WRONG_BUILD})
"""Codes of refusals that another package would lift."""
_WORD = re.compile(
    r"(?:^|[\s='\"])(--forked|--timeout(?:=|\s)\S+|-p\s*no:(?:accelcheck|xdist|benchmark))(?=$|[\s'\"\]])"
)
"""Options of pytest that change runs; `accelcheck.experiments.doctor` says how."""


def main(names: Sequence[str]) -> None:
    """Send the findings on these devices, which are present, and end the process without tearing backends down."""
    _answer(names)
    end_at_once()


def _answer(names: Sequence[str]) -> None:
    say(stage="import torch")
    import torch

    say(torch=torch.__version__)
    say(stage="fork")
    say(fork=_fork())
    say(stage="start pytest in this folder")
    known, extra = Matrix.load(), []  # type: Matrix, list[Device]
    try:
        config = registered.here()
        say(pytest=_of_pytest(config))
        known, extra = registered.matrix(config), registered.devices(config)
        say(not_loaded=registered.failed(config))
    except Exception as error:  # noqa: BLE001 - plugins of others may raise anything
        say(plugins=f"{type(error).__name__}: {error}")
    present = list(names)
    for status in probe([device.name for device in extra], extra=extra)[0].values() if extra else ():
        say(status=status.as_json())
        present += [status.device] if status.present else []
    for name in present:
        say(stage=f"ask techniques about {name}")
        device = registered.device(name)
        say(device=name, missing=_missing(known, device))
    say(stage="done")


def _fork() -> str:
    """Why cases cannot run in a fork of this process; empty where they can."""
    from accelcheck.verify.cache import clean_process

    try:
        clean = clean_process([])
    except (CleanProcessError, OSError) as error:
        return str(error)
    clean.close()
    return ""


def _of_pytest(config: pytest.Config) -> dict[str, Any]:
    """Plugins and settings of this folder that change how cases run."""
    manager = config.pluginmanager
    text = config.inipath.read_text(encoding="utf-8", errors="replace") if config.inipath is not None else ""
    words = sorted({word.strip() for word in _WORD.findall(f"{text}\n{os.environ.get('PYTEST_ADDOPTS', '')}")})
    return {
        "ini": str(config.inipath or ""),
        "words": words,
        "timeout": str(config.getini("timeout") or "") if manager.hasplugin("timeout") else "",
        "accelcheck": hasattr(config.option, "accel_device"),
        "xdist": manager.hasplugin("xdist"),
    }


def _missing(known: Matrix, device: Device) -> list[dict[str, Any]]:
    """Installable packages that techniques and tasks lack on a device: reason, command, names, number of cases."""
    groups: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
    cases = known.cases(Selection(("any",), level=LEVEL))
    of_technique, of_workload = Counter(case.technique for case in cases), Counter(case.workload for case in cases)
    for name, technique in known.techniques.items():
        answer = _asked(technique.answer, device)
        if answer is not None and answer.code in _INSTALLABLE:
            groups[answer.reason, answer.action].append((name, of_technique[name]))
    for name, task in known.workloads.items():
        present = getattr(task, "present", None)
        answer = None if present is None else _asked(present)
        if answer is not None and not answer.ok:
            groups[answer.reason, answer.action].append((name, of_workload[name]))
    return [
        {"reason": reason, "action": action, "names": sorted(dict(pairs)), "cases": sum(count for _, count in pairs)}
        for (reason, action), pairs in sorted(groups.items())
    ]


def _asked(ask: Callable[..., object], *device: Device) -> Capability | None:
    try:
        answer = ask(*device)
    except Exception:  # noqa: BLE001 - a technique of another package may raise anything: its cases say what
        return None
    return answer if isinstance(answer, Capability) else None
