"""The base class of techniques, and the exception with which one says that it does not exist for some inputs."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable
from accelcheck.core.case import TIMED, Evidence, Mode
from accelcheck.devices.packages import installed
from accelcheck.techniques.observe import OperatorLog
from accelcheck.workloads import builtin
from accelcheck.workloads.problem import described

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import OptimizerMaker, Program, Workload
    from accelcheck.workloads.probes import Probe


class Unsupported(Exception):  # noqa: N818 - an answer about the case, not an error of anyone
    """Raised when only the run itself can tell that the technique does not exist for the inputs.

    Raise it from `Technique.prepare`, `Technique.evidence` or `Program.call`, where `Technique.capability` cannot know the
    answer: when a kernel refuses the inputs, for example. The case then has the verdict of `capability`, and does not count
    as a failure.

    Args:
        capability: The answer: `accelcheck.core.capability.unsupported` or ``unavailable``, with its code and reason.
    """

    def __init__(self, capability: Capability) -> None:
        super().__init__(str(capability))
        self.capability = capability


class Technique:
    """One variant of an acceleration technique: what it promises, where it runs, how it is applied, what shows that it ran.

    A subclass sets `name`, `family`, `promise` and `source`, and overrides `prepare` (apply the technique to a program) and
    `evidence` (show that it was used). All other attributes and methods have defaults; override those that do not fit.

    A module below ``accelcheck.techniques`` lists its instances in ``TECHNIQUES``; other packages register theirs with the
    hook ``pytest_accel_techniques``. One instance serves all cases: what `prepare` opens or changes, `finish` must close or
    undo.
    """

    name: str
    """Name on the command line and in case ids, such as ``compile-static``. Unique among techniques; never reused for
    something else, since baselines and ledgers are stored under case ids."""
    family: str
    """Group under which tables and the documentation list the technique, such as ``compile``."""
    promise: str
    """One sentence: what the technique promises. Shown in the capability table and in ``docs/techniques.md``."""
    source: str
    """URL of the documentation or paper that makes this promise."""
    level: int = 1
    """Cost: 1 cheap, 2 slow, 3 very slow (long compilation). A case runs from level
    ``technique.level + workload.level - 1`` on, one level later if its dtype is not the first of `dtypes`."""
    early: frozenset[str] = frozenset()
    """Names of workloads with which the technique runs one level earlier than its cost says. Choose a few small ones, so
    that runs of low levels include a slow technique at all."""
    dtypes: Sequence[str] = ("float32",)
    """Storage dtypes of parameters and inputs, in torch's spelling without its prefix. Each gives a case of its own where
    the workload has it too; the first is the cheapest, see `level`."""
    modes: frozenset[Mode] = frozenset(Mode)
    """Modes in which the technique can be applied. The timed modes follow from these, see `timed` and `covers`."""
    timed: bool = True
    """Whether time and memory are measured too: ``speed`` where `modes` has ``forward``, ``train-speed`` where it has
    ``train``. Set it to False where such figures mean nothing: techniques that start processes, write files, or concern
    what happens between runs."""
    accuracy_limit: float = 0.01
    """Largest drop of task accuracy that is allowed, as a fraction of all samples. The upper confidence bound of the drop
    must not exceed it. The default corresponds to MLPerf Inference's 99 % of the reference accuracy."""
    requires: frozenset[str] = frozenset()
    """Traits that a workload must have: see `accelcheck.workloads.problem.TRAITS`. Other workloads give no case."""
    works_on: frozenset[str] = frozenset()
    """Traits of which a workload must have at least one, because the technique changes nothing else; empty if it needs none."""
    excludes: frozenset[str] = frozenset()
    """Traits that a workload must not have, because the technique makes no promise about them."""
    workloads: frozenset[str] = frozenset()
    """Names of the built-in workloads that it is tried with, where a few show everything; empty for all that it does not refuse.
    A workload of another package is tried whatever its name is."""
    warmups: int = 0
    """Number of runs before the judged one, each with other inputs. Set it where the first runs compile, capture or
    calibrate, so that the judged run shows the steady state; if it is too small, `evidence` fails."""
    resizing: bool = False
    """Whether the warm-up runs also have other sizes, for workloads with the trait ``resizable``. Has no effect without
    `warmups`."""
    keeps_strides: bool = True
    """Whether outputs must have the strides that eager gives them. Not checked on devices without the feature
    ``strided``."""
    differentiates_twice: bool = True
    """Whether gradients can be differentiated again. If True, backward mode also checks gradients of gradients for
    workloads with the trait ``twice-differentiable``."""
    bakes: bool = False
    """Whether `prepare` copies parameters into what it makes, or calibrates on the inputs. If True, `finish` and `prepare`
    are called again before a run with other parameters. If False, parameters change in place and the prepared program must
    follow; one that holds copies then fails with wrong outputs."""
    packages: Mapping[str, str] = MappingProxyType({})
    """Packages needed besides torch: import name, and the command that installs it. Cases are ``unavailable`` with this
    command as the advice where one is not installed."""
    watch: ClassVar[type[Log]] = OperatorLog
    """Class of the log that `evidence` gets: `OperatorLog` records every dispatched operator, `ProfilerLog` what
    torch.profiler sees. Compiled code needs `ProfilerLog`, since its operators are not dispatched."""

    own_memory: bool = False
    """Allocation of memory by a runtime itself, which torch does not see: peak memory is then not measured."""
    patience: float = 1.0
    """Factor of the seconds that each of its cases may take: see `accelcheck.core.case.SECONDS`."""
    fuses: bool = False
    """Whether the technique promises fewer kernel launches than eager. If True, a timed case fails that launches as many."""

    def capability(self, device: Device) -> Capability:
        """Whether the technique exists on `device`; by default it does everywhere.

        Decide from `device.has`, `device.dtypes` and torch's build: nothing slow. `packages` need no
        check here, see `answer`.

        Args:
            device: Not necessarily present on this machine: the capability table asks for every known device.

        Returns:
            `SUPPORTED`, or ``unsupported(code, reason)`` where the technique cannot exist on such a device, or
            ``unavailable(code, reason, action)`` where this machine lacks something that a person can install.
        """
        return SUPPORTED

    def answer(self, device: Device, *features: str) -> Capability:
        """Whether a case runs on `device`, for a workload that needs these `features`; not meant to be overridden.

        The first reason wins, in this order: a missing feature, `capability`, a package that is not installed. What does not
        exist on the device is thus reported before what is only absent on this machine.
        """
        if not (needed := self.needs(device, *features)).ok:
            return needed
        if not (found := self.capability(device)).ok:
            return found
        for package, command in self.packages.items():
            if not installed(package):
                return unavailable(Code.NO_PACKAGE, f"{package} is not installed", command, tried=found.tried)
        return found

    def accepts(self, workload: Workload) -> bool:
        """Whether the technique is tried with `workload`; not meant to be overridden.

        The answer depends on the workload alone, since case ids have to be the same on every machine.
        """
        if self.workloads and workload.name in builtin() and self.name not in workload.techniques:
            return workload.name in self.workloads
        return not self.refusal(workload)

    def refusal(self, workload: Workload) -> str:
        """Why the technique means nothing for `workload`, in a few words; empty where it can be tried.

        By default: a trait of `requires` that it lacks, one of `excludes` that it has, or none of `works_on`. Override it for
        what traits do not say, and call ``super()`` first.
        """
        for name in sorted(self.requires - workload.traits):
            return f"needs {described(name)}"
        for name in sorted(self.excludes & workload.traits):
            return f"makes no promise for {described(name)}"
        if self.works_on and not self.works_on & workload.traits:
            return f"changes nothing without {' or '.join(map(described, sorted(self.works_on)))}"
        return ""

    def covers(self, mode: Mode) -> bool:
        """Whether the technique is tried in `mode`: for timed modes, whether it is `timed` and covers what they run."""
        return (self.timed and TIMED[mode] in self.modes) if mode in TIMED else mode in self.modes

    def admits(self, probe: Probe) -> bool:
        """Whether a structured input is meaningful with this technique. By default: every one that the workload names.

        Override it where the technique makes no promise, such as for NaN in an integer grid.
        """
        return True

    def precision(self, dtype: str) -> str:
        """Arithmetic precision that the technique promises for a storage dtype, from which error budgets are derived.

        Returns:
            A key of `accelcheck.verify.precision.UNIT_ROUNDOFF`. By default `dtype` itself. Override it where operands are
            rounded further (autocast, TF32); otherwise such a technique fails.
        """
        return dtype

    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        """The module that the FP64 oracle runs. By default `module` itself.

        Override it, together with `oracle`, where a correct result differs from the module's by more than rounding, as with
        quantization: return a module that computes the scheme in FP64.

        Args:
            module: The workload's module, FP64 on the CPU. Copy it; do not change it.
            inputs: The judged run's inputs, FP64 on the CPU: static quantization calibrates on them.
        """
        return module

    def emulate_optimizer(self, make: OptimizerMaker) -> OptimizerMaker:
        """The function that makes the optimizer of the FP64 oracle's training. By default `make` itself.

        If the result has an attribute ``flips``, the oracle sets it to a generator in runs with simulated rounding errors,
        as it does for emulating modules: see `accelcheck.techniques.quantization.emulation.Quantizer`.
        """
        return make

    @property
    def oracle(self) -> str:
        """Name of the oracle; techniques with the same name share references.

        Override it together with `emulate` or `emulate_optimizer`: otherwise cases are judged by whichever reference was
        computed first.
        """
        return "float64"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        """Change `program` in place so that its next runs use the technique: wrap its call, set a context, recast inputs.

        Args:
            program: On the device. `Program.extras` can keep what `evidence` needs later.
            mode: What the program will run: forward, backward, train or trajectory.
            device: Open.

        Raises:
            Unsupported: The technique does not exist for this program.
        """
        raise NotImplementedError(f"{type(self).__name__}.prepare: apply the technique to the program")

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        """Observations of a judged run that show whether the technique was used.

        Called after every judged run of a case: several have other parameters or inputs. At least one observation is needed, and
        each must hold: a case without evidence is an error, one with evidence that does not hold fails. What is counted in
        `Program.extras` is of all runs since `prepare`, the warm-ups included, unless `Program.resets` clears it.

        Args:
            program: After the run.
            log: Of the run; an instance of `watch`.
            mode: As given to `prepare`.
            device: As given to `prepare`.

        Raises:
            Unsupported: The run shows that the technique has no effect here.
        """
        raise NotImplementedError(f"{type(self).__name__}.evidence: say what shows that the technique ran")

    def finish(self) -> None:
        """Undo global effects of `prepare`: reset compiler caches, remove temporary files, restore settings.

        Called after every case, also after one that failed, and before `prepare` is called again. Later cases of the same
        process see whatever is left behind.
        """
        return

    def needs(self, device: Device, *features: str) -> Capability:
        """`SUPPORTED` if the device has all `features`, else ``unsupported`` with the first that is missing.

        For use in `capability`; the names are those of `accelcheck.devices.base.FEATURES`.
        """
        for feature in features:
            if not device.has(feature):
                return device.lacks(feature, Code.NO_FEATURE)
        return SUPPORTED
