"""Features of a compute platform besides techniques: dtypes, modes, collectives, extensions, a profiler.

The items are those of PyTorch's Compute Platform Quality Levels that a machine can answer; `accelcheck.checks.platform`
tries them.
"""

from collections.abc import Iterable

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log
from accelcheck.workloads.base import Program
from accelcheck.workloads.platform import NAME


class Platform(Technique):
    """Technique without acceleration: its cases try one item of the platform each, and change no program."""

    name = NAME
    family = "platform"
    promise = "The platform has the dtypes, modes and tools that PyTorch's Compute Platform Quality Levels ask for."
    source = "https://github.com/pytorch/pytorch/issues/167283"
    modes = frozenset({Mode.PLATFORM, Mode.PLATFORM_SPEED})
    timed = False
    differentiates_twice = False

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del program, mode, device

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        """Returns no evidence: the check of the item gives it."""
        return ()


TECHNIQUES: tuple[Technique, ...] = (Platform(),)
