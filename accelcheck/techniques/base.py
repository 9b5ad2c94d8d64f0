"""A technique: one acceleration variant, what it promises, where it runs, how it is applied, what shows that it ran."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import TIMED, Evidence, Mode
from accelcheck.devices.packages import installed
from accelcheck.techniques.observe import OperatorLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import OptimizerMaker, Program, Workload
    from accelcheck.workloads.probes import Probe


class Unsupported(Exception):  # noqa: N818 - an answer about the case, not an error of anyone
    """Only the run itself could tell that the technique does not exist for these inputs; carries the answer."""

    def __init__(self, capability: Capability) -> None:
        super().__init__(str(capability))
        self.capability = capability


class Technique:
    """One acceleration variant. One file a family; each lists its `TECHNIQUES`.

    A subclass overrides `prepare` (change the program: wrap the call, set a context, recast inputs), `evidence`
    (what shows that it engaged) and, where the defaults do not fit, the rest. One instance serves all cases and keeps
    no state between them.
    """

    name: str
    """Its word on the command line and in case ids."""
    family: str
    """The family that tables group it under."""
    promise: str
    """One sentence: what it promises."""
    source: str
    """Where that promise is made: an address."""
    level: int = 1
    """1 cheap, 2 slow, 3 very slow (long compilation): added to the workload's level, less one."""
    early: frozenset[str] = frozenset()
    """Workloads that a slow technique runs one level before its cost says: a few, so that smoke runs see it too."""
    dtypes: Sequence[str] = ("float32",)
    """Storage dtypes of parameters and inputs that it is tried with."""
    modes: frozenset[Mode] = frozenset(Mode)
    timed: bool = True
    """Whether time and memory mean something: forward passes and trainings are then measured too. Not of what starts processes,
    writes files, or is about what happens between runs."""
    accuracy_limit: float = 0.01
    """Most task accuracy that it may cost, as a part of all samples: the upper confidence bound of the drop stays within.
    MLPerf's 99 % of the reference, unless it promises something else."""
    requires: frozenset[str] = frozenset()
    """Traits that a workload must have for the pair to mean anything."""
    excludes: frozenset[str] = frozenset()
    """Traits that a workload must not have, where the technique does not promise to handle them."""
    warmups: int = 0
    """Runs before the judged one, each with other inputs, so that what is judged is the steady state and no cache of
    results can serve it. With `resizing` each has other sizes too."""
    resizing: bool = False
    keeps_strides: bool = True
    """Whether outputs have the strides that eager gives them."""
    differentiates_twice: bool = True
    """Whether gradients of gradients exist under it."""
    bakes: bool = False
    """Whether `prepare` copies parameters or calibrates: other parameters then need another preparation. Without it, what is
    prepared must follow when parameters change in place."""
    packages: Mapping[str, str] = MappingProxyType({})
    """Packages that it needs besides torch, by import name: the command that installs each."""
    watch: ClassVar[type[Log]] = OperatorLog
    """How the judged run is observed: `OperatorLog` (every dispatched operator) or `ProfilerLog` (for compiled code)."""

    fuses: bool = False
    """Whether it promises to launch fewer kernels than eager does: where it does not, a timed case fails."""

    def capability(self, device: Device) -> Capability:
        """Whether it exists on `device`: from declared features, without running anything slow. Packages are asked after."""
        del device
        return SUPPORTED

    def answer(self, device: Device, *features: str) -> Capability:
        """Whether it runs on `device` for a workload that needs `features` of it: the one question that all ask.

        What does not exist there at all is said first, what is only absent here after it.
        """
        for found in (self.needs(device, *features), self.capability(device)):
            if not found.ok:
                return found
        for package, command in self.packages.items():
            if not installed(package):
                return unavailable(Code.NO_PACKAGE, f"{package} is not installed", command)
        return SUPPORTED

    def accepts(self, workload: Workload) -> bool:
        """Whether the pair means anything. By default: modes overlap, required traits there, excluded ones not."""
        return self.requires <= workload.traits and not self.excludes & workload.traits

    def covers(self, mode: Mode) -> bool:
        """Whether it is tried in a mode: of those that measure, in what `modes` has of what they run."""
        return (self.timed and TIMED[mode] in self.modes) if mode in TIMED else mode in self.modes

    def admits(self, probe: Probe) -> bool:
        """Whether a structured input of the workload means something under it. By default: all do."""
        del probe
        return True

    def precision(self, dtype: str) -> str:
        """Arithmetic precision it promises for a storage dtype: a key of `accelcheck.verify.precision.UNIT_ROUNDOFF`."""
        return dtype

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """The module that the FP64 oracle runs: itself, or (quantization) one that emulates the scheme.

        Args:
            module: The workload's module, FP64 on the CPU. To be copied, not changed.
            inputs: The judged run's inputs, FP64 on the CPU: static quantization calibrates on them.
        """
        del inputs
        return module

    def emulate_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        """What makes the optimizer of the FP64 oracle's training: itself, or one that emulates what the technique does.

        An attribute ``flips`` of it is set in runs with rounding errors, as those of emulating modules are.
        """
        return make

    @property
    def oracle(self) -> str:
        """Name of the oracle: techniques with the same name share it. Override together with `emulate` and the like."""
        return "float64"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        """Change the program in place so that its next run uses the technique."""
        raise NotImplementedError(f"{type(self).__name__}.prepare: apply the technique to the program")

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        """What was seen of the judged run that shows whether the technique engaged; at least one observation."""
        raise NotImplementedError(f"{type(self).__name__}.evidence: say what shows that the technique ran")

    def finish(self) -> None:
        """Undo global effects after a case, also after a failed one: reset compiler caches and the like."""
        return

    def needs(self, device: Device, *features: str) -> Capability:
        """`SUPPORTED` if the device declares all `features`, else unsupported with the first that is missing."""
        for feature in features:
            if feature not in device.features:
                return unsupported(Code.NO_FEATURE, f"{device.name} does not declare {feature}")
        return SUPPORTED
