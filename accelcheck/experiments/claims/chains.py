"""Claims of the compile curve: the gain of compilation for 30 statements, and its loss for few."""

import contextlib
from collections.abc import Iterator

from accelcheck.core.capability import Capability
from accelcheck.core.units import duration
from accelcheck.devices.base import Device
from accelcheck.experiments import curve
from accelcheck.experiments.claims.catalogue import Measured, What
from accelcheck.experiments.claims.experiment import Contest, Experiment, Side
from accelcheck.experiments.curve import WrongError
from accelcheck.measure.curve import Form, Point, Shapes
from accelcheck.techniques.compilation.regions import compiler_capability

MANY = 30
FEW = (1, 2, 3, 4)


class _Chain(Experiment):
    """Statements compiled in one form, for one kind of shapes."""

    length: str
    """Number of statements, as the name has it."""

    def __init__(self, form: Form, shapes: Shapes) -> None:
        self.name = f"compile-{form}-{self.length}"
        self._form, self._shapes = form, shapes

    def answer(self, device: Device) -> Capability:
        return compiler_capability(device)


class Many(_Chain):
    """A long chain."""

    gives = frozenset({What.SPEED_UP})
    length = str(MANY)

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        with curve.compiled(device, MANY, self._shapes, self._form) as pair:
            yield Contest(Side(pair.eager, device), Side(pair.compiled, device))
            pair.check()


class Few(_Chain):
    """Short chains, each compiled: the smallest slowdown among them."""

    gives = frozenset({What.EXTRA_TIME})
    length = "few"

    @contextlib.contextmanager
    def contest(self, device: Device) -> Iterator[Contest]:
        nothing = Side(lambda: None, device)
        yield Contest(nothing, nothing, {What.EXTRA_TIME: lambda: self._least(device)})

    def _least(self, device: Device) -> Measured:
        points = []
        for count in FEW:
            point = curve.point(device, count, self._shapes, self._form)
            if not isinstance(point, Point):
                raise WrongError(f"{count} statements: {point.reason}")
            points.append(point)
        # All are slower by at least the smallest ratio, and the smallest ends of the intervals bound it.
        least = min(points, key=lambda point: point.ratio)
        how = f"at {least.count} statements, {duration(least.seconds)} against {duration(least.eager)}"
        low, high = min(point.low for point in points), min(point.high for point in points)
        return Measured(least.ratio - 1, low - 1, high - 1, how)


EXPERIMENTS: tuple[Experiment, ...] = (
    Many(Form.STATIC, Shapes.FIXED),
    Many(Form.DYNAMIC, Shapes.VARYING),
    Few(Form.STATIC, Shapes.FIXED),
    Few(Form.DYNAMIC, Shapes.VARYING),
)
