"""The plain records that all packages share: a case, its evidence, its figures, its verdict. No torch."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Self

from accelcheck.core.plain import number, plain, text, truth

LEVELS = (1, 2, 3, 4)
"""smoke, standard, full, soak."""
DTYPES = ("float32", "bfloat16", "float16")
"""Storage dtypes that a case may have."""
EFFORTS = ("auto", "full", "least")
"""Amounts of computation that judge a user-owned model: by its size, the usual amount, or the least possible."""
SECONDS = (300.0, 900.0, 1800.0, 7200.0)
"""Time limits of a case in seconds, by its level."""


def seconds_of(level: int, patience: float) -> float:
    """Time limit of a case in seconds: that of its level, times the `patience` of its technique."""
    return SECONDS[LEVELS.index(level)] * patience


NON_FINITE = ("inf", "-inf", "nan")
"""The names of the numbers that JSON does not have."""


class Mode(StrEnum):
    """The part of a workload that runs, and whose results are checked."""

    FORWARD = "forward"
    """Outputs."""
    BACKWARD = "backward"
    """Outputs in training mode, every gradient, every buffer."""
    TRAIN = "train"
    """Losses, parameters and buffers of a few optimizer steps, each exact but for rounding."""
    TRAJECTORY = "trajectory"
    """Losses, gradient norms and parameters of a long training, held against the spread over seeds; its resumption."""
    RANDOM = "random"
    """The statistics of operations that draw random numbers."""
    ACCURACY = "accuracy"
    """The task accuracy of a trained model on held-out samples."""
    LEARNING = "learning"
    """The task accuracy that training reaches."""
    SPEED = "speed"
    """Time and memory of a forward pass, whose outputs are judged first."""
    TRAIN_SPEED = "train-speed"
    """Time and memory of a training step; a training as in train mode is judged first."""
    PLATFORM = "platform"
    """A feature that a compute platform is to have: a dtype, a distributed backend, a profiler and the like."""
    PLATFORM_SPEED = "platform-speed"
    """A forward pass or a training step, judged, and its time beside that of the host's CPU."""


TIMED: Mapping[Mode, Mode] = MappingProxyType({Mode.SPEED: Mode.FORWARD, Mode.TRAIN_SPEED: Mode.TRAIN})
"""The modes that measure time and memory, and the mode in which each is judged first."""
WEIGHTS: Mapping[Mode, int] = MappingProxyType(
    {
        Mode.TRAIN: 4,
        Mode.TRAJECTORY: 10,
        Mode.LEARNING: 4,
        Mode.SPEED: 20,
        Mode.TRAIN_SPEED: 20,
        Mode.PLATFORM: 5,
        Mode.PLATFORM_SPEED: 30,
    }
)
"""Cost of a case by its mode, in forward cases: rounded means of level 2 on a CPU; 1 for the others."""
ALONE = frozenset({*TIMED, Mode.PLATFORM_SPEED})
"""Modes whose timing other load would disturb: they do not run on xdist's workers."""
HOST_RATIO = "time-beside-host-cpu"
"""Name of the `Measurement` of platform-speed mode: the device's time as a multiple of eager's on the host's CPU."""


class Verdict(StrEnum):
    """The result of a case."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    FAIL = "fail"
    ERROR = "error"
    CRASH = "crash"
    HANG = "hang"
    DEVICE_LOST = "device-lost"
    FLAKY = "flaky"
    UNSUPPORTED = "unsupported"
    UNAVAILABLE = "unavailable"
    XFAIL = "xfail"
    XPASS = "xpass"
    WAIVED = "waived"

    @property
    def executed(self) -> bool:
        """True when the technique was run."""
        return self not in {Verdict.UNSUPPORTED, Verdict.UNAVAILABLE}

    @property
    def green(self) -> bool:
        """True when a run with this verdict can still be successful."""
        return self in {Verdict.PASS, Verdict.XFAIL, Verdict.WAIVED, Verdict.UNSUPPORTED, Verdict.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the matrix: technique x workload x device x dtype x mode.

    Attributes:
        technique: Name of a technique's variant, such as ``compile-static``.
        workload: Name of a workload, such as ``mlp``.
        device: Name of a device, such as ``cpu`` or ``xla``.
        dtype: Storage dtype of parameters and inputs, as torch spells it without its prefix: ``float32``.
        mode: The part of the workload that runs.
        level: The lowest level (1 smoke, 2 standard, 3 full, 4 soak) at which the case runs.
    """

    technique: str
    workload: str
    device: str
    dtype: str
    mode: Mode
    level: int

    @property
    def id(self) -> str:
        """The stable name of the case, the same on every machine."""
        return f"{self.technique}/{self.workload}/{self.device}/{self.dtype}/{self.mode}"

    @property
    def timed(self) -> bool:
        """True when time and memory are measured, and can be held against baselines and limits."""
        return self.mode in TIMED

    @property
    def alone(self) -> bool:
        """True when it runs without workers, in the second half of a nox session."""
        return self.mode in ALONE

    @property
    def seed(self) -> int:
        """Seed of parameters and inputs: a function of the workload alone, so that all techniques share one oracle."""
        return stable_seed(self.workload)


def stable_seed(name: str) -> int:
    """A 31-bit seed that depends on `name` alone, on every machine and Python (``hash`` does not)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1


UNSEEN = "could not be seen: "
"""Beginning of the claim of evidence that a device does not expose."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation that shows whether a technique really ran.

    A claim or an observation of another type is kept as its text, cut where it is long, and a 0-D tensor as its number.
    A `TypeError` where `engaged` is a text, or Python cannot tell whether it is true.

    Attributes:
        claim: The expected observation, such as ``compiled regions entered >= 1``.
        observed: The actual observation: a number or a short text.
        engaged: True when the observation supports the claim.
        draw: A later run that shows it, such as ``draw 1``; empty for the first.
        strays: Operators that ran on the CPU instead of the device, with counts, where the claim is that none did.
    """

    claim: str
    observed: bool | int | float | str
    engaged: bool
    draw: str = ""
    strays: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "claim", text(self.claim))
        observed = plain(self.observed)
        if observed in NON_FINITE:  # JSON has no such numbers, and journals write their names
            observed = float(observed)
        object.__setattr__(self, "observed", observed)
        object.__setattr__(self, "engaged", truth(self.engaged, "Evidence.engaged"))

    @classmethod
    def unseen(cls, claim: str, why: str) -> Self:
        """Evidence that a device does not expose: a verdict needs other evidence, since it says nothing on the claim.

        The claim is worded as for evidence that can be had; `why` says what was tried, and what came.
        """
        return cls(f"{UNSEEN}{claim}", why, engaged=True)

    @classmethod
    def stayed(cls, strays: Mapping[str, int], device: str, where: str = "") -> Self:
        """Evidence that no operator left a device for the CPU, from the number of calls on the CPU by operator.

        `where` names the processes in words; empty for this one.
        """
        counts = tuple(sorted(strays.items()))
        listed = ", ".join(f"{name} x{count}" for name, count in counts)
        claim = f"no operator left {device} for the CPU {where}".rstrip()
        return cls(claim, listed or "none did", not counts, strays=counts)

    @property
    def label(self) -> str:
        """The claim, and the run that shows it where that is a later one."""
        return f"{self.claim} [{self.draw}]" if self.draw else self.claim

    @property
    def seen(self) -> bool:
        """True unless the device does not expose the observation."""
        return not self.claim.startswith(UNSEEN)


FELL_BACK = "operators that the device lacks, and the CPU computed"
"""Claim of evidence about a user-owned model."""
SCHEME = "row against FP32"
"""View of a row's error under a scheme such as quantization, against the FP64 result without the scheme."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The error of one tensor of a candidate in one view.

    Attributes:
        path: Name of the tensor in the result, such as ``out[1]['hidden']`` or ``grad:fc1.weight``.
        view: Name of the view, such as ``row``.
        measured: The candidate's error in this view (dimensionless, unless the view says otherwise).
        allowed: The budget; a gating view fails when ``measured > allowed``.
        where: Index of the worst place, such as ``[3, :]``; empty where the view has none.
        gates: True when this view may fail a case by itself.
    """

    path: str
    view: str
    measured: float
    allowed: float
    where: str
    gates: bool

    def __post_init__(self) -> None:
        # A case makes thousands of figures, so values that are floats already are left alone.
        for name in ("measured", "allowed"):
            if type(getattr(self, name)) is not float:
                object.__setattr__(self, name, float(number(getattr(self, name), f"Figure.{name}")))
        object.__setattr__(self, "gates", truth(self.gates, "Figure.gates"))

    @property
    def within(self) -> bool:
        """True when the figure is inside its budget; NaN never is."""
        return self.measured <= self.allowed

    @property
    def used(self) -> float:
        """The used part of the budget; infinite for NaN, and for any error where the budget is 0."""
        if self.measured == 0.0:
            return 0.0
        known = self.allowed > 0.0 and not math.isnan(self.measured)
        return self.measured / self.allowed if known else math.inf


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured figure of a case: time or memory.

    Attributes:
        name: Name of the quantity, such as ``latency``.
        value: Value in `unit`; None, never 0, where it is not known.
        unit: Unit, such as ``s``, ``B``, ``samples/s``, ``tokens/s``, or ``x`` for a ratio.
        low, high: Confidence interval of the value, where one is known.
        reason: Why there is no value, or a remark on it.
    """

    name: str
    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(number(getattr(self, name), f"Measurement.{name}")))
        object.__setattr__(self, "reason", text(self.reason))
