"""Check of torch.profiler: it names the operators of a run and, on an accelerator, shows timed device events."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

from accelcheck.checks.trial import Finding, Trial
from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.devices.torch_names import DeviceType
from accelcheck.techniques.base import Unsupported

LAYERS = 3
"""Number of the workload's linear layers, each a call of ``aten::addmm`` or ``aten::linear``."""


def verify(trial: Trial) -> Finding:
    """Profiles a forward pass.

    Raises:
        Unsupported: The profiler shows nothing of the device.
    """
    device, program = trial.device, trial.program(trial.case.seed)
    program.module.eval()
    plain = program.run(Mode.FORWARD)["out"].cpu()  # also sets up whatever a first call does
    activities = sorted(supported_activities(), key=str)  # type: ignore[no-untyped-call]  # untyped in torch
    with profile(activities=activities) as profiled, torch.no_grad():
        out = program.module(*program.inputs)
        device.synchronize()
    same = torch.equal(out.cpu(), plain)
    expected = "under the profiler what the run gives without it"
    faults = [] if same else [Fault(FaultKind.VALUE, "out", expected=expected, got="another")]
    results: Any = profiled.profiler and profiled.profiler.kineto_results
    events = list(results.events() if results else ())
    named = [event for event in events if event.name() in {"aten::linear", "aten::addmm"}]
    most = max((sum(event.name() == name for event in named) for name in ("aten::linear", "aten::addmm")), default=0)
    seen = Evidence(f"linear layers that it names >= {LAYERS}", most, engaged=most >= LAYERS)
    listed = ", ".join(str(activity).rpartition(".")[2] for activity in activities)
    claim, timed = "operators with a duration >= 1", named
    if not device.has("host"):
        claim = f"events on {device.name} with a duration >= 1"
        timed = [event for event in events if event.device_type() != DeviceType.CPU]
    if not timed and not device.has("host"):
        extra = "" if set(activities) - {ProfilerActivity.CPU} else "; torch has no activity besides CPU here"
        reason = f"torch.profiler shows operators, and nothing of what {device.name} does{extra}"
        raise Unsupported(unsupported(Code.NO_FEATURE, reason, tried=True))
    lasting = sum(event.duration_ns() > 0 for event in timed)
    spent = Evidence(claim, lasting, engaged=lasting >= 1)
    return Finding([seen, spent, Evidence("activities", listed, engaged=True)], faults, (), plain.numel())
