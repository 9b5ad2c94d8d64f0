"""Which layer is wrong: the case as eager on the device, captured but not compiled, as it is, and on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accelcheck.checks import numerics
from accelcheck.checks.trial import Trial
from accelcheck.core.case import Verdict
from accelcheck.core.matrix import devices
from accelcheck.core.plain import text
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.workloads.probes import PROBES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.checks.execute import Bench
    from accelcheck.core.case import Case, Figure
    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.workloads.probes import Draw

EAGER, CAPTURED = "eager", "compile-aot-eager"
"""Techniques of the first two layers."""
KERNEL, CAPTURE, COMPILER, TECHNIQUE = "device kernel", "capture", "compiler", "technique"
"""What can be at fault."""


@dataclass(frozen=True)
class Layer:
    """The case in one layer.

    Attributes:
        name: What ran, in words.
        blames: What is at fault if this is the first layer that is wrong.
        verdict: ``pass``, ``fail`` or ``error``; empty where it did not run.
        reason: Its first fault, or why it did not run.
        used: Largest part of a budget that an error took; 0 where nothing was compared.
    """

    name: str
    blames: str
    verdict: str
    reason: str = ""
    used: float = 0.0

    @property
    def wrong(self) -> bool:
        """Whether it ran, and is not right."""
        return self.verdict not in {"", Verdict.PASS}


def layers(bench: Bench, case: Case, draws: Sequence[Draw]) -> list[Layer]:
    """The case in every layer, with these draws of its inputs only.

    Args:
        bench: With the case's device, which is present.
        case: Of a mode that `accelcheck.checks.numerics` judges.
        draws: `FIRST` first.
    """
    technique, device = bench.matrix.techniques[case.technique], bench.devices[case.device]
    found = [_layer(bench, case, EAGER, f"eager on {device.name}", KERNEL, draws)]
    if technique.name == EAGER:
        return [*found, *_on_cpu(bench, case, technique, device, draws)]
    compiles = issubclass(technique.watch, ProfilerLog)
    if compiles and technique.name != CAPTURED:
        name = f"captured, not compiled (aot_eager), on {device.name}"
        found.append(_layer(bench, case, CAPTURED, name, CAPTURE, draws))
    blames = COMPILER if compiles else TECHNIQUE
    if technique.name == CAPTURED:
        blames = CAPTURE
    found.append(_layer(bench, case, technique.name, f"{technique.name} on {device.name}", blames, draws))
    return [*found, *_on_cpu(bench, case, technique, device, draws)]


def blamed(found: Sequence[Layer], cpu: str = "cpu") -> str:
    """What is at fault: the first layer on the device that is wrong, but the technique where it is wrong on the CPU too; empty if none is.

    Args:
        found: As `layers` gives them.
        cpu: Name of the CPU.
    """
    first = next((one for one in found if one.wrong), None)
    if first is None:
        return ""
    elsewhere = found[-1]
    if (
        elsewhere is not first
        and elsewhere.wrong
        and elsewhere.name.endswith(f" on the {cpu}")
        and first.blames != KERNEL
    ):
        return TECHNIQUE
    return first.blames


def _on_cpu(bench: Bench, case: Case, technique: Technique, device: Device, draws: Sequence[Draw]) -> list[Layer]:
    name = f"{technique.name} on the cpu"
    if device.type == "cpu":
        return [Layer(name, TECHNIQUE, "", f"{device.name} is the CPU: there is no other device to compare with")]
    host = devices()["cpu"]
    if not (found := technique.answer(host, *sorted(bench.matrix.workloads[case.workload].features))).ok:
        return [Layer(name, TECHNIQUE, "", str(found))]
    there = replace(bench, devices={**bench.devices, "cpu": host})
    return [_layer(there, replace(case, device="cpu"), technique.name, name, TECHNIQUE, draws)]


def _layer(bench: Bench, case: Case, technique: str, name: str, blames: str, draws: Sequence[Draw]) -> Layer:
    chosen, device = bench.matrix.techniques.get(technique), bench.devices[case.device]
    workload = bench.matrix.workloads[case.workload]
    if chosen is None:
        return Layer(name, blames, "", f"the technique {technique} is not there")
    if not (answer := chosen.answer(device, *sorted(workload.features))).ok:
        return Layer(name, blames, "", str(answer))
    if not chosen.covers(case.mode):
        return Layer(name, blames, "", f"{technique} has no {case.mode} mode")
    trial = Trial(replace(case, technique=technique), chosen, workload, device, bench.store)
    admitted = [draw for draw in draws if not draw.probe or chosen.admits(PROBES[draw.probe])]
    try:
        finding = numerics.verify(trial, admitted)
    except Unsupported as answered:
        return Layer(name, blames, "", str(answered.capability))
    except Exception as error:  # noqa: BLE001 - a technique or backend may raise anything: it is what this layer shows
        return Layer(name, blames, Verdict.ERROR, f"{type(error).__name__}: {next(iter(text(error).splitlines()), '')}")
    finally:
        chosen.finish()
        trial.state.restore()
    absent = [f"not engaged: {one.claim}: {one.observed}" for one in finding.evidence if not one.engaged]
    faults = [*absent, *finding.faults]
    used = max((one.used for one in _gating(finding.figures)), default=0.0)
    return Layer(name, blames, Verdict.FAIL if faults else Verdict.PASS, faults[0] if faults else "", used)


def _gating(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if figure.gates]
