"""Eager execution without any acceleration: it checks the device's own kernels."""

from collections.abc import Iterable

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, at_least, counted, none_of, operators
from accelcheck.workloads.base import Program


class Eager(Technique):
    """Unchanged program. Like all cases, it runs in strict FP32: reduced-precision modes of contractions are off."""

    name = "eager"
    family = "eager"
    promise = "Plain operators compute results as accurately as the arithmetic of their dtype allows."
    source = "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"
    dtypes = ("float32", "bfloat16", "float16")
    early = frozenset({"reductions"})  # in every dtype: sums in half precision go wrong first

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del program, mode, device

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen = operators(log)
        computed = seen.having(lambda operator: any(at == device.type for _, _, at in operator.outputs))
        return (
            at_least(f"operators computed on {device.type}", computed),
            none_of("operators computed elsewhere", counted(seen.strays())),
        )


TECHNIQUES: tuple[Technique, ...] = (Eager(),)
