"""Finds the wrong layer: runs the case as eager on the device, captured but not compiled, as it is, and on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accelcheck.checks import numerics
from accelcheck.core.case import Case, Verdict
from accelcheck.core.plain import text
from accelcheck.devices import devices
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import ProfilerLog
from accelcheck.workloads.probes import PROBES, Draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.checks.execute import Bench
    from accelcheck.checks.trial import Trial
    from accelcheck.devices.base import Device

EAGER, CAPTURED = "eager", "compile-aot-eager"
"""Techniques of the first two layers."""
KERNEL, CAPTURE, COMPILER, TECHNIQUE = "device kernel", "capture", "compiler", "technique"
"""Parts that can be at fault."""


@dataclass(frozen=True)
class Layer:
    """The case in one layer, whose name says what ran.

    Attributes:
        blames: Part at fault if this is the first wrong layer.
        verdict: ``pass``, ``fail``, ``error``, ``crash`` or ``hang``; empty where it did not run.
        reason: First fault, or why it did not run.
        used: Largest share of a budget that an error took; 0 where nothing was compared.
    """

    name: str
    blames: str
    verdict: str
    reason: str = ""
    used: float = 0.0

    @property
    def wrong(self) -> bool:
        """True if it ran, and is not right."""
        return self.verdict not in {"", Verdict.PASS}


@dataclass(frozen=True)
class Planned:
    """A layer that is to run with a technique, on the CPU or on the case's device."""

    name: str
    blames: str
    technique: str
    on_cpu: bool = False


def layers(bench: Bench, case: Case, draws: Sequence[Draw]) -> list[Layer]:
    """Run the case in every layer, with these draws of its inputs (`FIRST` first) only, on a device that is present."""
    technique, device = bench.matrix.techniques[case.technique], bench.devices[case.device]
    return [layer(bench, case, plan, draws) for plan in planned(technique, device)]


def planned(technique: Technique, device: Device) -> list[Planned]:
    """The layers of a technique on a device, in the order in which they are blamed."""
    plans = [Planned(f"eager on {device.name}", KERNEL, EAGER)]
    compiles = issubclass(technique.watch, ProfilerLog)
    if compiles and technique.name != CAPTURED:
        plans.append(Planned(f"captured, not compiled (aot_eager), on {device.name}", CAPTURE, CAPTURED))
    if technique.name != EAGER:
        blames = CAPTURE if technique.name == CAPTURED else COMPILER if compiles else TECHNIQUE
        plans.append(Planned(f"{technique.name} on {device.name}", blames, technique.name))
    return [*plans, Planned(f"{technique.name} on the cpu", TECHNIQUE, technique.name, on_cpu=True)]


def layer(bench: Bench, case: Case, plan: Planned, draws: Sequence[Draw]) -> Layer:
    """Run one layer; its arguments are those of `layers`."""
    device = bench.devices[case.device]
    if plan.on_cpu:
        if device.has("host"):
            why = f"{device.name} is the CPU: there is no other device to compare with"
            return Layer(plan.name, plan.blames, "", why)
        device = devices()["cpu"]
        bench, case = replace(bench, devices={**bench.devices, "cpu": device}), replace(case, device="cpu")
    chosen, workload = bench.matrix.techniques.get(plan.technique), bench.matrix.workloads[case.workload]
    if chosen is None:
        return Layer(plan.name, plan.blames, "", f"the technique {plan.technique} is not there")
    if not (answer := chosen.answer(device, *sorted(workload.features))).ok:
        return Layer(plan.name, plan.blames, "", str(answer))
    if not chosen.covers(case.mode):
        return Layer(plan.name, plan.blames, "", f"{plan.technique} has no {case.mode} mode")
    trial = bench.trial(replace(case, technique=plan.technique))
    return _judged(trial, plan, [draw for draw in draws if not draw.probe or chosen.admits(PROBES[draw.probe])])


def blamed(outcomes: Sequence[Layer], cpu: str = "cpu") -> str:
    """Name the part at fault, by the result of `layers`; empty where no layer is wrong.

    The first wrong layer on the device counts, unless the technique is wrong on the CPU too.
    """
    first = next((layer for layer in outcomes if layer.wrong), None)
    if first is None:
        return ""
    last = outcomes[-1]
    on_cpu = last is not first and last.wrong and last.name.endswith(f" on the {cpu}")
    return TECHNIQUE if on_cpu and first.blames != KERNEL else first.blames


def _judged(trial: Trial, plan: Planned, draws: Sequence[Draw]) -> Layer:
    try:
        finding = numerics.verify(trial, draws)
    except Unsupported as answered:
        return Layer(plan.name, plan.blames, "", str(answered.capability))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a technique or backend may raise anything
        why = f"{type(error).__name__}: {next(iter(text(error).splitlines()), '')}"
        return Layer(plan.name, plan.blames, Verdict.ERROR, why)
    finally:
        trial.technique.finish()
        trial.state.restore()
    used = max((figure.used for figure in finding.figures if figure.gates), default=0.0)
    verdict = Verdict.FAIL if finding.wrong else Verdict.ERROR if finding.undecided else Verdict.PASS
    return Layer(plan.name, plan.blames, verdict, str(next(iter(finding.wrong), finding.undecided)), used)
