"""FP32 products with every reduced-precision mode off: what all other figures of a device are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.strict import FLOAT32_LIMIT
from accelcheck.techniques.base import Technique

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload

_ERROR = "error of FP32 products"
_READING = "what it looks like"


class StrictFloat32(Technique):
    """The plain program on a device whose FP32 products are measured first: their error says whether they are in FP32.

    A device that multiplies FP32 in TF32 or bfloat16 although it was told not to, or wrongly, fails this case with what its errors
    look like and where they are. All other cases are judged nevertheless: their oracle is on the CPU.
    """

    name = "strict-float32"
    family = "precision"
    timed = False
    promise = "With every reduced-precision mode off, FP32 products are computed in FP32."
    source = "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"
    modes = frozenset({Mode.FORWARD})
    workloads = frozenset({"matmul"})

    def refusal(self, workload: Workload) -> str:
        return super().refusal(workload) or "is about the device: one matrix product shows it"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        error = device.float32_error()
        program.extras[_ERROR] = error
        program.extras[_READING] = "" if error <= FLOAT32_LIMIT else device.float32_products().reading

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        computed = log.count(r"aten::(mm|addmm|bmm|matmul)")
        yield Evidence("matrix products dispatched >= 1", computed, engaged=computed >= 1)
        error: float = program.extras[_ERROR]
        told = f"{error:.3g}"
        if program.extras[_READING]:
            forced = device.environment() or "none of the known ones is set"
            told += f": {program.extras[_READING]}. A variable may force TF32 or bf16: {forced}"
        yield Evidence(
            f"error of products that FP32 has exactly <= {FLOAT32_LIMIT:.3g}", told, engaged=error <= FLOAT32_LIMIT
        )


TECHNIQUES: tuple[Technique, ...] = (StrictFloat32(),)
