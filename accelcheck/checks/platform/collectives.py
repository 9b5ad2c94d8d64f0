"""The distributed backend: ranks under torchrun reduce and gather tensors by the device's library of collectives."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from accelcheck.checks.platform.tries import MOST_TEXT
from accelcheck.checks.trial import Finding, Trial
from accelcheck.core import imports
from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.core.plain import text
from accelcheck.core.processes import GRACE, ChildError, Mailbox
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Unsupported
from accelcheck.techniques.distributed.data_parallel import library
from accelcheck.techniques.distributed.pool import PATIENCE
from accelcheck.techniques.distributed.pool_rank import joined
from accelcheck.techniques.processes.torchrun import devices_of_ranks, torchrun

RANKS = 2
"""Most ranks; one if only one device is visible."""
NO_BACKEND = "No backend type associated with device type"
"""Text of torch's error for tensors without a backend (torch/csrc/distributed/c10d/ProcessGroup.hpp)."""


def verify(trial: Trial) -> Finding:
    """Starts the ranks, and compares the results of each.

    Raises:
        ChildError: A rank failed, or took too long.
        Unsupported: torch has no collectives for the device.
    """
    device = trial.device
    if not distributed.is_available():
        reason = f"torch {torch.__version__} is built without torch.distributed"
        raise Unsupported(unsupported(Code.WRONG_VERSION, reason))
    answer = library(device)
    if not answer.ok:
        raise Unsupported(answer)
    world = RANKS if device.has("host") else min(RANKS, devices_of_ranks(device))
    own = [value.to(torch.float32) for value in trial.problem(trial.case.seed).inputs][:world]
    try:
        with trial.clock("run"):
            reports = _run(device, own)
    except ChildError as error:
        if NO_BACKEND not in str(error):
            raise
        reason = f"the backend that torch uses for {device.type} does not take its tensors: {text(error, MOST_TEXT)}"
        raise Unsupported(unsupported(Code.NO_BACKEND, reason.partition("\n")[0], tried=True)) from error
    faults, compared = [], 0
    total, rows = torch.stack(own).sum(0), torch.stack(own)
    for rank, report in enumerate(reports):
        for name, expected in (("all-reduce", total), ("all-gather", rows)):
            got: Tensor = report[name]
            compared += expected.numel()
            if got.shape != expected.shape or not torch.equal(got, expected):
                sides = _brief(expected), _brief(got)
                faults.append(Fault(FaultKind.VALUE, f"{name} of rank {rank}", "", "", *sides))
    backends = sorted({str(report["backend"]) for report in reports})
    places = sorted({str(report["device"]) for report in reports})
    return Finding(
        [
            Evidence(f"processes of the group = {world}", len(reports), engaged=len(reports) == world),
            Evidence("backend of the collectives", ", ".join(backends), engaged=len(backends) == 1),
            Evidence(f"results are on {device.type}", ", ".join(places), engaged=places == [device.type]),
        ],
        faults,
        (),
        compared,
    )


def _brief(tensor: Tensor) -> str:
    return ", ".join(f"{value:g}" for value in tensor.flatten()[:4].tolist()) + ", ..."


def _run(device: Device, own: Sequence[Tensor]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="accelcheck-collectives-") as name:
        folder = Path(name)
        box = Mailbox(folder)
        box.put("device", device)
        for rank, value in enumerate(own):
            box.put(f"value-{rank}", value)
        options = ["--standalone", f"--nproc-per-node={len(own)}"]
        child = torchrun(options, "accelcheck.checks.platform.collectives:rank", [folder])
        try:
            names = [f"answer-{rank}" for rank in range(len(own))]
            reports = box.wait(names, PATIENCE, lambda: not child.running or bool(box.errors()))
            if reports is None:
                raised = "; ".join(f"rank {who} raised {brief}" for who, brief, _ in box.errors())
                raise ChildError(raised or f"the ranks did not answer; torchrun's output:\n{child.last()}")
            return reports
        finally:
            child.end(GRACE)


def rank(arguments: Sequence[str]) -> None:
    """Runs one rank, with the folder of the mailbox; torchrun calls it."""
    box, number = Mailbox(Path(arguments[0])), int(os.environ["RANK"])
    try:
        imports.load()
        device = joined(box.take("device"))
        own: Tensor = box.take(f"value-{number}").to(device.torch_device())
        total = own.clone()
        distributed.all_reduce(total)
        parts = [torch.zeros_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, own)
        device.synchronize()
        report = {
            "all-reduce": total.cpu(),
            "all-gather": torch.stack([part.cpu() for part in parts]),
            "backend": distributed.get_backend(),
            "device": total.device.type,
        }
        distributed.barrier()
        box.put(f"answer-{number}", report)
    except BaseException as error:  # noqa: BLE001 - the case reports it
        box.raised(number, error)
        os._exit(1)  # at once: a process group may wait for the others when it is destroyed
