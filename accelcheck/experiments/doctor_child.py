"""The child process of `accelcheck doctor`: imports torch, forks, starts pytest, and asks techniques what they lack."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from accelcheck.core.capability import Capability, Code
from accelcheck.core.clean_process import CleanProcessError
from accelcheck.core.processes import end_at_once, say
from accelcheck.core.selection import Selection
from accelcheck.devices.probe import probe
from accelcheck.plugin import registered
from accelcheck.techniques.matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from accelcheck.devices.base import Device

LEVEL = 2
"""Level of the cases that are counted."""
_INSTALLABLE = frozenset({Code.NO_PACKAGE, Code.WRONG_VERSION, Code.WRONG_BUILD})
"""Codes of refusals that another package would lift."""
_WORD = re.compile(
    r"(?:^|[\s='\"])(--forked|--timeout(?:=|\s)\S+|-p\s*no:(?:accelcheck|xdist|benchmark))(?=$|[\s'\"\]])"
)
"""Options of pytest that change runs; `accelcheck.experiments.doctor` says how."""


def main(names: Sequence[str]) -> None:
    """Send the findings, message by message, and end the process without tearing backends down.

    Args:
        names: Names of devices that are present.
    """
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
    if extra:
        statuses, _ = probe([device.name for device in extra], extra=extra)
        for status in statuses.values():
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
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    levels = _cases(known)
    for technique in known.techniques.values():
        answer = _asked(technique.answer, device)
        if answer is not None and answer.code in _INSTALLABLE:
            key = (answer.reason, answer.action)
            groups[key].append(technique.name)
            counts[key] += sum(number for (name, _), number in levels.items() if name == technique.name)
    for name, task in known.workloads.items():
        present = getattr(task, "present", None)
        answer = None if present is None else _asked(present)
        if answer is not None and not answer.ok:
            key = (answer.reason, answer.action)
            groups[key].append(name)
            counts[key] += sum(number for (_, workload), number in levels.items() if workload == name)
    return [
        {"reason": reason, "action": action, "names": sorted(names), "cases": counts[reason, action]}
        for (reason, action), names in sorted(groups.items())
    ]


def _cases(known: Matrix) -> Counter[tuple[str, str]]:
    """Number of cases up to `LEVEL` on one device, by technique and workload."""
    return Counter((case.technique, case.workload) for case in known.cases(Selection(("any",), level=LEVEL)))


def _asked(ask: Callable[..., object], *device: Device) -> Capability | None:
    try:
        answer = ask(*device)
    except Exception:  # noqa: BLE001 - a technique of another package may raise anything: its cases say what
        return None
    return answer if isinstance(answer, Capability) else None
