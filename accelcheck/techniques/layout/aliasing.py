"""Views share memory: nothing is copied, and what is written through one is seen in its base."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import OperatorLog
from accelcheck.workloads.base import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

MARK = 17.0
"""What is written: exact in every dtype, and 17 standard deviations away from what workloads draw."""

_CALLS = "inputs and outputs of the calls"


class CopyLog(OperatorLog):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Counts too, by operator, the calls whose result lies in memory that none of its arguments lies in.

    A device that shows no storage is believed what torch's schemas say of the operator.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        places, origins = _places(out), _places((args, kwargs))
        if places is None or origins is None:
            fresh = any(result.alias_info is None for result in func._schema.returns)  # noqa: SLF001 - torch has no other way to ask
        else:
            fresh = not places <= origins
        self.copies[func.name().partition(".")[0]] += fresh
        return out

    def copied(self, pattern: str = ".*") -> Counter[str]:
        """Of the operators that a regular expression matches as a whole, those that copied, with the number of times."""
        return Counter({name: n for name, n in self.copies.items() if n and re.fullmatch(pattern, name)})


def copy_log(log: Log) -> CopyLog:
    """The log as one of copies.

    Raises:
        TypeError: It is another kind: the technique's `watch` does not fit its `evidence`.
    """
    if not isinstance(log, CopyLog):
        raise TypeError(f"expected a CopyLog, got {type(log).__name__}: set `watch = CopyLog` in the technique")
    return log


def _places(values: Any) -> set[int] | None:
    """Addresses of the storages of nested tensors; None where a device shows none: it raises, or gives 0."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    try:
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    except RuntimeError:
        return None
    return None if 0 in places else places


@torch.no_grad()
def written_through(program: Program) -> list[tuple[int, int]]:
    """Of each output: its elements, and how many elements of the first input change when it is overwritten.

    The call is run on copies of the inputs; works wherever tensors can be compared, whatever they are made of.
    """
    call = program.module if program.call is None else program.call
    inputs = tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in program.inputs)
    with program.around():
        outs = [out for _, out in flatten(call(*inputs))]
    found = []
    for out in outs:
        before = inputs[0].clone()
        out.fill_(MARK)
        found.append((out.numel(), int((inputs[0] != before).sum())))
        inputs[0].copy_(before)
    return found


class SharedViews(Technique):
    """The program as it is: it must copy nothing.

    A device without strides shows no storage (torch's functionalization keeps a view as a recipe); that writes reach the
    base is owed there all the same.
    """

    name = "views-shared"
    family = "views"
    promise = "Views copy nothing: they lie in the memory of their base, and share what is written."
    source = "https://docs.pytorch.org/docs/stable/tensor_view.html"
    requires = frozenset({"views"})
    modes = frozenset({Mode.FORWARD})
    dtypes = ("float32", "bfloat16", "float16")
    watch = CopyLog

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode, device
        call = program.module if program.call is None else program.call
        seen: list[tuple[tuple[Any, ...], Any]] = []
        program.extras[_CALLS] = seen

        def kept(*inputs: Any) -> Any:
            out = call(*inputs)
            seen[:] = [(inputs, out)]
            return out

        program.call = kept

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del mode
        ((inputs, out),) = program.extras[_CALLS]
        outs = [tensor for _, tensor in flatten(out)]
        # Without strides, views are computed like anything else, and put in for their base when that is used.
        if "strided" in device.features:
            shared = sum(_places(tensor) == _places(inputs[0]) for tensor in outs)
            yield Evidence(f"outputs in the input's storage = {len(outs)}", shared, engaged=shared == len(outs) >= 1)
            made = copy_log(log).copied()
            yield Evidence(
                "results in memory of their own = 0",
                ", ".join(f"{name} x{count}" for name, count in sorted(made.items())) or 0,
                engaged=not made,
            )
        written = written_through(program)
        yield Evidence(
            f"elements of the input that change when an output is overwritten = {[size for size, _ in written]}, all of it",
            str([changed for _, changed in written]),
            engaged=bool(written) and all(size == changed for size, changed in written),
        )


TECHNIQUES: tuple[Technique, ...] = (SharedViews(),)
