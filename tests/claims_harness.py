"""Claims, experiments and contests for the tests of claims. No test by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from technique_harness import StubDevice

from accelcheck.experiments.claims import catalogue, run
from accelcheck.experiments.claims.catalogue import Claim, What
from accelcheck.experiments.claims.experiment import Contest, Experiment, Side

if TYPE_CHECKING:
    from accelcheck.devices.base import Device


KIB, MIB = 1 << 10, 1 << 20


@cache
def experiments() -> Mapping[str, Experiment]:
    return run.experiments()


@cache
def claims() -> tuple[Claim, ...]:
    return tuple(catalogue.load(catalogue.PACKAGED, given()))


def given() -> dict[str, frozenset[What]]:
    return {name: experiment.gives for name, experiment in experiments().items()}


def claim(what: What, figure: float, name: str = "a", experiment: str = "one") -> Claim:
    least, most = (None, figure) if what.bounded else (figure, None)
    return Claim(name, experiment, "some work", what, least, most, ("gpu",), "", "An article's.")


class Clocked(StubDevice):
    """Calls take the seconds that they return."""

    def elapsed(self, call: Callable[[], object], times: int) -> float:
        return times * float(call())  # type: ignore[arg-type]  # those of these tests are numbers


def sides(plain: object, fast: object, device: Device | None = None) -> Contest:
    place = Clocked() if device is None else device
    return Contest(Side(lambda: plain, place), Side(lambda: fast, place))


ENTRY = {
    "name": '"mine"',
    "experiment": '"fp16"',
    "workload": '"some work"',
    "what": '"speed-up"',
    "least": "2.0",
    "devices": '["gpu"]',
    "source": '"https://example.org/"',
    "published": '"An article\'s."',
}


def written(path: Path, **changes: str | None) -> Path:
    entry = {**ENTRY, **changes}
    lines = [f"{field} = {value}" for field, value in entry.items() if value is not None]
    path.write_text("[[claim]]\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path
