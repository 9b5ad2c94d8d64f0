"""Inputs with the same values and other strides: transposed, sliced, padded, offset. Memory around them is poisoned."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelcheck.core.capability import Capability, Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import Log, at_least, operators
from accelcheck.workloads.base import Program
from accelcheck.workloads.probes import Probe

MARGIN = 17
"""Number of poisoned elements before and after a view. Odd, so that its address is no multiple of 16 bytes."""

Strides = tuple[int, ...]
_VIEWS = "views"


@dataclass(frozen=True)
class View:
    """Input, by its index, as a window into a larger, poisoned 1-D tensor (`base`).

    `outside` marks the elements that are not part of the window: bool. The window may nevertheless be contiguous.
    """

    index: int
    base: Tensor
    outside: Tensor
    contiguous: bool

    def intact(self) -> bool:
        """Returns whether all elements around the window still hold the poison."""
        around = self.base[self.outside]
        poison = _poison(self.base.dtype)
        whole = around.isnan() if math.isnan(poison) else around == poison
        return bool(whole.all())


class Viewed(Technique):
    """Replaces every tensor input by a view with the same values."""

    family = "views"
    timed = False
    source = "https://docs.pytorch.org/docs/stable/tensor_view.html"
    keeps_strides = False
    # In trajectory mode, mini-batches are gathered from the inputs, and so are no views.
    modes = frozenset(Mode) - {Mode.TRAJECTORY}
    dtypes = ("float32", "bfloat16", "float16")

    def __init__(self, name: str, promise: str, strides: Callable[[Sequence[int]], Strides], *, dense: bool) -> None:
        """Takes `strides`, a map from a shape to strides without overlap, and `dense`: True if these are contiguous."""
        self.name, self.promise, self.strides, self.dense = name, promise, strides, dense

    def capability(self, device: Device) -> Capability:
        return self.needs(device, "strided")

    def admits(self, probe: Probe) -> bool:
        """Refuses inputs of another shape: they have no window, and would run unchanged."""
        return super().admits(probe) and not probe.reshapes

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        views = program.extras[_VIEWS] = list[View]()
        inputs = list(program.inputs)
        for index, value in enumerate(inputs):
            if isinstance(value, Tensor) and value.numel():
                inputs[index], view = self._window(index, value)
                views.append(view)
        program.inputs = tuple(inputs)
        if not any(view.contiguous is self.dense for view in views):
            reason = f"{self.name} changes the strides of no input: their shapes do not allow it"
            raise Unsupported(unsupported(Code.NO_EFFECT, reason))

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        views: list[View] = program.extras[_VIEWS]
        shared = [view for view in views if _address(program.inputs[view.index]) == _address(view.base)]
        taken = [program.inputs[view.index] for view in shared]
        yield Evidence(f"inputs that are windows into poison = {len(views)}", len(shared), engaged=shared == views)
        if self.dense:
            odd = sum(1 for value in taken if value.data_ptr() % 16)
            yield at_least("inputs at an address that is no multiple of 16 bytes", odd)
        else:
            yield at_least("non-contiguous inputs", sum(1 for value in taken if not value.is_contiguous()))
            used = operators(log).having(lambda operator: any(not dense for _, dense, _ in operator.inputs))
            yield at_least("operators that took a non-contiguous tensor", used)
        hurt = ", ".join(str(view.index) for view in views if not view.intact()) or "none"
        yield Evidence("inputs around which memory was written = none", hurt, engaged=hurt == "none")

    def _window(self, index: int, value: Tensor) -> tuple[Tensor, View]:
        strides = self.strides(value.shape)
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True)) + 1
        base = torch.full((reach + 2 * MARGIN,), _poison(value.dtype), dtype=value.dtype, device=value.device)
        window = base.as_strided(value.shape, strides, MARGIN)
        window.copy_(value.detach())
        outside = torch.ones(base.shape, dtype=torch.bool, device=value.device)
        outside.as_strided(value.shape, strides, MARGIN).fill_(False)  # noqa: FBT003 - torch's signature
        return window, View(index, base, outside, window.is_contiguous())


def _dense(shape: Sequence[int]) -> Strides:
    """Computes row-major strides."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


def _transposed(shape: Sequence[int]) -> Strides:
    """Computes column-major strides: the first dimension is the fastest, as in a transposed copy."""
    return tuple(reversed(_dense(tuple(reversed(shape)))))


def _sliced(shape: Sequence[int]) -> Strides:
    """Computes strides of every second element of a tensor whose last dimension is twice as long."""
    return tuple(2 * stride for stride in _dense(shape))


def _padded(shape: Sequence[int]) -> Strides:
    """Computes strides of the first columns of a tensor with three more: rows are dense, with gaps between them."""
    if len(shape) < 2:
        return _dense(shape)
    return (*(stride for stride in _dense((*shape[:-1], shape[-1] + 3))[:-1]), 1)


def _poison(dtype: torch.dtype) -> float | int:
    """Returns the value that most likely shows when it is read: NaN, the largest integer, or True."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


TECHNIQUES: tuple[Technique, ...] = tuple(
    Viewed(f"view-{name}", f"{inputs} give the same results as {others} ones.", strides, dense=strides is _dense)
    for name, inputs, others, strides in (
        ("transposed", "Column-major inputs", "row-major", _transposed),
        ("sliced", "Inputs with stride 2 in the last dimension", "dense", _sliced),
        ("padded", "Inputs with a row stride longer than the row", "dense", _padded),
        ("offset", "Inputs at a storage offset that is not aligned for vector loads", "aligned", _dense),
    )
)
