"""The memory that in-place activations save: peak memory compared with the plain module's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelcheck.core.case import Evidence, Mode
from accelcheck.measure.memory import Peak, measurable
from accelcheck.techniques.memory.inplace import Inplace
from accelcheck.techniques.memory.peaks import peak_of_run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.core.capability import Capability
    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

_PLAIN = "peak of the plain run"


class InplaceMemory(Inplace):
    """In-place activations without gradients; with gradients, most activations store what they overwrite."""

    name = "inplace-memory"
    promise = "Activations that overwrite their input lower peak memory."
    modes = frozenset({Mode.FORWARD})
    requires = frozenset({"inplace", "activations"})
    # In half precision the peak may be the workspace of a matmul, which activations do not affect.
    dtypes = ("float32",)  # type: ignore[assignment]  # inferred as a tuple of three from the class

    def capability(self, device: Device) -> Capability:
        return measurable(device)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        program.extras[_PLAIN] = peak_of_run(program, mode, device)
        super().prepare(program, mode, device)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        plain: Peak = program.extras[_PLAIN]
        found = peak_of_run(program, mode, device)
        if plain.bytes is None or found.bytes is None:
            raise ValueError(
                f"expected two measured peaks on a device that `capability` accepted, got {plain} and {found}"
            )
        saved = plain.bytes - found.bytes
        yield Evidence(f"bytes saved of the plain run's peak of {plain.bytes} >= 1", saved, engaged=saved >= 1)


TECHNIQUES: tuple[Technique, ...] = (InplaceMemory(),)
