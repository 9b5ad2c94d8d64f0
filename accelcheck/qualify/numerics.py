"""The check of values: outputs, gradients and short trainings against the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.case import Mode
from accelcheck.qualify.trial import Finding, State, on_device, snapshot, unchanged, warm_up
from accelcheck.verify.judge import Contract, check_metadata, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelcheck.case import Figure
    from accelcheck.devices.base import Device
    from accelcheck.qualify.trial import Trial
    from accelcheck.verify.oracle import Reference
    from accelcheck.workloads.base import Program, Result


def verify(trial: Trial) -> Finding:
    """Judge one run by the oracle of its inputs.

    Raises:
        OracleError: The oracle cannot be had or trusted.
    """
    case, technique, device, clock = trial.case, trial.technique, trial.device, trial.clock
    with clock("oracle"):
        reference = trial.store.get(case, technique, trial.workload)
    with device.strict_float32():
        with clock("prepare"):
            program = trial.program(case.seed)
            state = State(program)
            technique.prepare(program, case.mode, device)
            warm_up(trial, program)
            state.restore()
            device.synchronize()
            inputs = [snapshot(value) for value in program.inputs]
        with clock("run"):
            _poison(reference, device)
            device.seed(case.seed)
            device.reset_fallbacks()
            with technique.watch(device.type) as log:
                result = program.run(case.mode)
            fallbacks = device.fallbacks()
        with clock("judge"):
            evidence = (
                *technique.evidence(program, log, case.mode, device),
                on_device(log, fallbacks, device),
            )
            dtypes = frozenset({technique.precision(case.dtype)} - {case.dtype})
            contract = Contract(device.type, technique.keeps_strides and "strided" in device.features, dtypes)
            faults, figures, compared = _faults(result, reference, contract)
            faults += _mutations(program, inputs)
            if case.mode is not Mode.TRAIN:
                faults += state.mutations()
    return Finding(evidence, faults, figures, compared, reference.eager_excess)


def _mutations(program: Program, before: Sequence[Any]) -> list[str]:
    return [
        f"input[{index}]: mutated: expected it bitwise unchanged"
        for index, (value, was) in enumerate(zip(program.inputs, before, strict=True))
        if isinstance(value, Tensor) and not unchanged(value.detach().cpu(), was)
    ]


def _poison(reference: Reference, device: Device) -> None:
    """Fill memory of the sizes that the outputs will take with NaN and free it, so that stale or unwritten rows show."""
    poisoned = [
        torch.full(layout.shape, float("nan"), dtype=getattr(torch, layout.dtype), device=device.torch_device())
        for layout in reference.layouts.values()
        if getattr(torch, layout.dtype).is_floating_point
    ]
    device.synchronize()
    del poisoned


def _faults(result: Result, reference: Reference, contract: Contract) -> tuple[list[str], tuple[Figure, ...], int]:
    wrong = [str(fault) for fault in check_metadata(result, reference, contract)]
    if wrong:
        return wrong, (), 0
    judgement = judge({path: tensor.cpu() for path, tensor in result.items()}, reference)
    return [str(fault) for fault in judgement.faults], judgement.figures, judgement.compared
