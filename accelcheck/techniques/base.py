"""Base classes of techniques, and the exception with which one says that it does not exist for some inputs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.core.case import TIMED, Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.packages import installed
from accelcheck.techniques.observe import Log, OperatorLog
from accelcheck.workloads import builtin
from accelcheck.workloads.base import OptimizerMaker, Program, Workload
from accelcheck.workloads.probes import Probe
from accelcheck.workloads.problem import described


class Unsupported(Exception):  # noqa: N818 - an answer about the case, not an error of anyone
    """Raised when only the run itself can tell that the technique does not exist for the inputs.

    Raise it from `Technique.prepare`, `Technique.evidence` or `Program.call`, where `Technique.capability` cannot know
    the answer: when a kernel refuses the inputs, for example. The case gets the verdict of `capability`, no failure.

    Args:
        capability: Result of `accelcheck.core.capability.unsupported` or ``unavailable``, with its code and reason.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__(str(capability))
        self.capability = capability


class Technique:
    """Variant of an acceleration technique: its promise, where it runs, how it is applied, and what shows that it ran.

    A subclass sets `name`, `family`, `promise` and `source`, and overrides `prepare` (apply the technique to a program)
    and `evidence` (show that it was used). All else has defaults; override those that do not fit.

    A module below ``accelcheck.techniques`` lists its instances in ``TECHNIQUES``; other packages register theirs with
    the hook ``pytest_accel_techniques``. One instance serves all cases: `finish` must undo the effects of `prepare`.
    """

    name: str
    """Name on the command line and in case ids, such as ``compile-static``. Unique among techniques; never reused for
    something else, since baselines and ledgers are stored under case ids."""
    family: str
    """Group under which tables and the documentation list the technique, such as ``compile``."""
    promise: str
    """Promise of the technique in one sentence. Shown in the capability table and in ``docs/techniques.md``."""
    source: str
    """URL of the documentation or paper that makes this promise."""
    level: int = 1
    """Cost: 1 cheap, 2 slow, 3 very slow (long compilation). A case runs from level
    ``technique.level + workload.level - 1`` on, one level later if its dtype is not the first of `dtypes`."""
    early: frozenset[str] = frozenset()
    """Names of workloads with which the technique runs one level earlier than its cost says: a few small ones, so that
    low levels include a slow technique."""
    dtypes: Sequence[str] = ("float32",)
    """Storage dtypes of parameters and inputs, in torch's spelling without its prefix. Each gives a case where the
    workload has it too; the first is the cheapest, see `level`."""
    modes: frozenset[Mode] = frozenset(Mode)
    """Modes in which the technique can be applied. The timed modes follow from these, see `timed` and `covers`."""
    timed: bool = True
    """True to measure time and memory too: ``speed`` where `modes` has ``forward``, ``train-speed`` where it has
    ``train``. Set it to False where such figures mean nothing: techniques that start processes, write files, or act
    between runs."""
    accuracy_limit: float = 0.01
    """Largest allowed drop of task accuracy, as a fraction of all samples; limits the drop's upper confidence bound.
    The default corresponds to MLPerf Inference's 99 % of the reference accuracy."""
    requires: frozenset[str] = frozenset()
    """Traits that a workload must have: see `accelcheck.workloads.problem.TRAITS`. Other workloads give no case."""
    works_on: frozenset[str] = frozenset()
    """Traits of which a workload must have one, because the technique changes nothing else; empty if it needs none."""
    excludes: frozenset[str] = frozenset()
    """Traits that a workload must not have, because the technique makes no promise about them."""
    workloads: frozenset[str] = frozenset()
    """Names of the built-in workloads that it is tried with, where a few show everything; empty for all that it does
    not refuse. Workloads of other packages are tried whatever their names."""
    warmups: int = 0
    """Number of runs before the judged one, each with other inputs. Set it where the first runs compile, capture or
    calibrate: the judged run must show the steady state. If it is too small, `evidence` fails."""
    resizing: bool = False
    """True if warm-up runs (see `warmups`) also have other sizes, for workloads with the trait ``resizable``."""
    keeps_strides: bool = True
    """True if outputs must have eager's strides. Not checked on devices without the feature ``strided``."""
    differentiates_twice: bool = True
    """True if gradients can be differentiated again: backward mode then also checks gradients of gradients for
    workloads with the trait ``twice-differentiable``."""
    bakes: bool = False
    """True if `prepare` copies parameters into its result, or calibrates on the inputs: `finish` and `prepare` are then
    called again before a run with other parameters. If False, parameters change in place and the prepared program must
    follow; one that holds copies fails with wrong outputs."""
    packages: Mapping[str, str] = MappingProxyType({})
    """Packages needed besides torch: import name, and the command that installs it, which is the advice of
    ``unavailable`` cases."""
    watch: ClassVar[type[Log]] = OperatorLog
    """Class of the log that `evidence` gets: `OperatorLog` records every dispatched operator, `ProfilerLog` what
    torch.profiler sees. Compiled code needs `ProfilerLog`, since its operators are not dispatched."""
    own_memory: bool = False
    """True if a runtime allocates memory itself, which torch does not see: peak memory is then not measured."""
    patience: float = 1.0
    """Factor of the seconds that each of its cases may take: see `accelcheck.core.case.SECONDS`."""
    fuses: bool = False
    """True if the technique promises fewer kernel launches than eager: a timed case that launches as many fails."""

    def capability(self, device: Device) -> Capability:
        """Tells whether the technique exists on `device`; by default it does everywhere.

        Decide from `device.has`, `device.dtypes` and torch's build: nothing slow. `answer` checks `packages`.

        Args:
            device: Any known device, which may be absent from this machine: the capability table asks for every one.

        Returns:
            `SUPPORTED`, or ``unsupported(code, reason)`` where the technique cannot exist on such a device, or
            ``unavailable(code, reason, action)`` where this machine lacks something that a person can install.
        """
        return SUPPORTED

    def answer(self, device: Device, *features: str) -> Capability:
        """Tells whether a case runs on `device`, for a workload that needs `features`; not meant to be overridden.

        The first reason wins, in this order: a missing feature, `capability`, a package that is not installed. A limit
        of the device is thus reported before what only this machine lacks.
        """
        if not (needed := self.needs(device, *features)).ok:
            return needed
        if not (own := self.capability(device)).ok:
            return own
        for package, command in self.packages.items():
            if not installed(package):
                return unavailable(Code.NO_PACKAGE, f"{package} is not installed", command, tried=own.tried)
        return own

    def accepts(self, workload: Workload) -> bool:
        """Returns whether the technique is tried with `workload`; not meant to be overridden.

        The answer depends on the workload alone, since case ids have to be the same on every machine.
        """
        if self.workloads and workload.name in builtin() and self.name not in workload.techniques:
            return workload.name in self.workloads
        return not self.refusal(workload)

    def refusal(self, workload: Workload) -> str:
        """Returns a short reason why the technique means nothing for `workload`; empty where it can be tried.

        By default: a trait of `requires` that it lacks, one of `excludes` that it has, or none of `works_on`. Override
        it for what traits do not say, and call ``super()`` first.
        """
        for name in sorted(self.requires - workload.traits):
            return f"needs {described(name)}"
        for name in sorted(self.excludes & workload.traits):
            return f"makes no promise for {described(name)}"
        if self.works_on and not self.works_on & workload.traits:
            return f"changes nothing without {' or '.join(map(described, sorted(self.works_on)))}"
        return ""

    def covers(self, mode: Mode) -> bool:
        """Returns whether the technique is tried in `mode`; timed modes need `timed` and the mode that they run."""
        return (self.timed and TIMED[mode] in self.modes) if mode in TIMED else mode in self.modes

    def admits(self, probe: Probe) -> bool:
        """Returns whether a structured input is meaningful with this technique; by default it is.

        Override it where the technique makes no promise, such as for NaN in an integer grid.
        """
        return True

    def precision(self, dtype: str) -> str:
        """Returns the arithmetic precision promised for a storage dtype, from which error budgets are derived.

        Returns:
            A key of `accelcheck.verify.precision.UNIT_ROUNDOFF`. By default `dtype` itself. Override it where operands
            are rounded further (autocast, TF32); otherwise such a technique fails.
        """
        return dtype

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """Returns the module that the FP64 oracle runs. By default `module` itself.

        Override it, together with `oracle`, where a correct result differs from the module's by more than rounding, as
        with quantization: return a module that computes the scheme in FP64.

        Args:
            module: Module of the workload, FP64 on the CPU. Copy it; do not change it.
            inputs: Inputs of the judged run, FP64 on the CPU: static quantization calibrates on them.
        """
        return module

    def emulate_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        """Returns the function that makes the optimizer of the FP64 oracle's training. By default `make` itself.

        If the result has an attribute ``flips``, the oracle sets it to a generator in runs with simulated rounding
        errors, as for emulating modules: see `accelcheck.techniques.quantization.emulation.Quantizer`.
        """
        return make

    @property
    def oracle(self) -> str:
        """Name of the oracle; techniques with the same name share references.

        Override it together with `emulate` or `emulate_optimizer`: otherwise the reference computed first judges all.
        """
        return "float64"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        """Changes `program` in place so that its next runs use the technique: wraps its call or sets a context.

        Args:
            program: Program on the device. `Program.extras` can keep what `evidence` needs later.
            mode: Mode that the program will run: forward, backward, train or trajectory.
            device: Open device.

        Raises:
            Unsupported: The technique does not exist for this program.
        """
        raise NotImplementedError(f"{type(self).__name__}.prepare: apply the technique to the program")

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        """Yields observations of a judged run that show whether the technique was used.

        Called after every judged run of a case: several have other parameters or inputs. A case without evidence is an
        error; one with evidence that does not hold fails. Counts in `Program.extras` include all runs since `prepare`,
        also the warm-ups, unless `Program.resets` clears them.

        Args:
            program: Program after the run.
            log: Log of the run, an instance of `watch`.
            mode: Mode given to `prepare`.
            device: Device given to `prepare`.

        Raises:
            Unsupported: The run shows that the technique has no effect here.
        """
        raise NotImplementedError(f"{type(self).__name__}.evidence: say what shows that the technique ran")

    def finish(self) -> None:
        """Undoes global effects of `prepare`: resets compiler caches, removes temporary files, restores settings.

        Called after every case, also after one that failed, and before `prepare` is called again. Later cases of the
        process see whatever is left behind.
        """

    def needs(self, device: Device, *features: str) -> Capability:
        """Returns `SUPPORTED` if the device has all `features`, else ``unsupported`` with the first that is missing.

        For use in `capability`; the names are those of `accelcheck.devices.base.FEATURES`.
        """
        for feature in features:
            if not device.has(feature):
                return device.lacks(feature, Code.NO_FEATURE)
        return SUPPORTED


class Holding(Technique):
    """Technique whose `prepare` enters contexts, which `finish` leaves."""

    @cached_property
    def held(self) -> ExitStack:
        """Contexts entered since the last `finish`."""
        return ExitStack()

    def finish(self) -> None:
        self.held.close()
