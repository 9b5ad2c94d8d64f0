"""Views that share memory with their base: nothing is copied, and writes through a view change the base."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.devices.torch_names import pytree
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, OperatorLog, counted, none_of
from accelcheck.workloads.base import Program, flatten

MARK = 17.0
"""Value that is written: exact in every dtype, and 17 standard deviations away from the inputs of workloads."""

_CALLS = "inputs and outputs of the calls"


class CopyLog(OperatorLog):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Log that also counts, by operator, the calls whose result is in memory that belongs to no argument.

    For devices that show no storage addresses, torch's schema of the operator decides.
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
            fresh = any(result.alias_info is None for result in func._schema.returns)  # noqa: SLF001 - no public way
        else:
            fresh = not places <= origins
        self.copies[func.name().partition(".")[0]] += fresh
        return out

    def copied(self, pattern: str = ".*") -> Counter[str]:
        """Counts copies by operator, for operators whose whole name matches the regular expression `pattern`."""
        return Counter({name: n for name, n in self.copies.items() if n and re.fullmatch(pattern, name)})


def copy_log(log: Log) -> CopyLog:
    """Returns the log, and raises `TypeError` if it is no `CopyLog`: `watch` does not fit `evidence`."""
    if not isinstance(log, CopyLog):
        raise TypeError(f"expected a CopyLog, got {type(log).__name__}: set `watch = CopyLog` in the technique")
    return log


def _places(values: Any) -> set[int] | None:
    """Returns the storage addresses of nested tensors; None if the device shows none (raises, or returns 0)."""
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]
    try:
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    except RuntimeError:
        return None
    return None if 0 in places else places


@torch.no_grad()
def written_through(program: Program) -> list[tuple[int, int]]:
    """Counts, for each output, its elements, and those of the first input that change when the output is overwritten.

    Calls the program with copies of its inputs. Needs no storage addresses, so it works on every device.
    """
    call = program.module if program.call is None else program.call
    inputs = tuple(value.detach().clone() if isinstance(value, Tensor) else value for value in program.inputs)
    with program.around():
        outs = [out for _, out in flatten(call(*inputs))]
    counts = []
    for out in outs:
        before = inputs[0].clone()
        out.fill_(MARK)
        same = (inputs[0] == before) | (inputs[0].isnan() & before.isnan())
        counts.append((out.numel(), int((~same).sum())))
        inputs[0].copy_(before)
    return counts


class SharedViews(Technique):
    """Runs the program unchanged, which must copy nothing.

    Devices without strides show no storage, since torch's functionalization represents a view by the operations that
    made it: only the effect of writes is checked there.
    """

    name = "views-shared"
    family = "views"
    promise = "Views copy nothing: they share the memory of their base, and writes through either are seen in both."
    source = "https://docs.pytorch.org/docs/stable/tensor_view.html"
    requires = frozenset({"views"})
    modes = frozenset({Mode.FORWARD})
    dtypes = ("float32", "bfloat16", "float16")
    watch = CopyLog

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        call = program.module if program.call is None else program.call
        seen = program.extras[_CALLS] = list[tuple[tuple[Any, ...], Any]]()
        program.resets.append(seen.clear)

        def kept(*inputs: Any) -> Any:
            out = call(*inputs)
            seen[:] = [(inputs, out)]
            return out

        program.call = kept

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        calls: list[tuple[tuple[Any, ...], Any]] = program.extras[_CALLS]
        if not calls:
            yield Evidence("calls of the program >= 1", 0, engaged=False)
            return
        ((inputs, out),) = calls
        outs = [tensor for _, tensor in flatten(out)]
        # Without strides, views are computed as copies, which functionalization writes back when their base is used.
        if device.has("strided"):
            shared = sum(_places(tensor) == _places(inputs[0]) for tensor in outs)
            yield Evidence(f"outputs in the input's storage = {len(outs)}", shared, engaged=shared == len(outs) >= 1)
            yield none_of("results in memory of their own", counted(copy_log(log).copied()))
        written = written_through(program)
        sizes, changed = [size for size, _ in written], [count for _, count in written]
        claim = f"elements of the input that change when an output is overwritten = {sizes}, all of it"
        yield Evidence(claim, str(changed), engaged=bool(written) and sizes == changed)


TECHNIQUES: tuple[Technique, ...] = (SharedViews(),)
