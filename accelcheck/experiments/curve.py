"""From how many cheap statements on ``torch.compile`` pays: eager beside static and dynamic compilation of a growing chain.

After a published experiment: element-wise statements on a few rows of 16 columns, where nearly all the time is what it costs to
start an operator. Compiled, a chain is one kernel, whatever its length, and the price of entering it: guards, and Python.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.measure.clocks import block, settle, undisturbed
from accelcheck.measure.curve import COLUMNS, COUNTS, FIXED_ROWS, ROWS, Form, Gap, Point, Shapes
from accelcheck.measure.paired import LOOKS, compare
from accelcheck.techniques.compilation.compile import forget, graphs, recompilations
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability
from accelcheck.verify.precision import INEXACT_ULPS, UNIT_ROUNDOFF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.measure.paired import Comparison

    Chain = Callable[[Tensor], Tensor]

SETS = 4
"""Sets of inputs of the fixed shape, which calls go through."""
SCALE = 1.7
LARGEST = 2.2
"""No statement but the first sees, or gives, anything larger: ``1.7 sin(x) + 0.5``."""


class WrongError(RuntimeError):
    """What was compiled is not what was asked for: another result, or no graph at all."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A chain and what was compiled of it, both right and warm; each call takes the next input.

    Attributes:
        eager, compiled: One call.
        first, eager_first, graphs, recompilations, programs: As of `Point`.
        check: Raises `WrongError` if what is compiled is wrong by now.
    """

    eager: Callable[[], object]
    compiled: Callable[[], object]
    first: float
    eager_first: float
    graphs: int
    recompilations: int
    programs: int | None
    check: Callable[[], None]


def chain(count: int) -> Chain:
    """So many statements in a row on ``x``, element-wise and out of place.

    A plain function, and its statements written out: modules, or a list of functions, would cost eager as much as the statements.
    """
    whole, rest = divmod(count, 5)

    def run(x: Tensor) -> Tensor:
        for _ in range(whole):
            x = torch.sin(x)
            x = x * SCALE
            x = x + 0.5
            x = torch.relu(x)
            x = x - 1.1
        if rest > 0:
            x = torch.sin(x)
        if rest > 1:
            x = x * SCALE
        if rest > 2:
            x = x + 0.5
        if rest > 3:
            x = torch.relu(x)
        return x

    return run


def allowed(count: int) -> float:
    """Most that a correct FP32 chain differs from the exact one: each statement's rounding, carried through those after it.

    No statement errs by more than `INEXACT_ULPS` units in the last place of `LARGEST`, and only the product enlarges what
    came before.
    """
    each = INEXACT_ULPS * 2 * UNIT_ROUNDOFF["float32"] * LARGEST
    error = 0.0
    for index in range(count):
        error = error * (SCALE if index % 5 == 1 else 1.0) + each
    return error


def measure(device: Device, counts: Sequence[int] = COUNTS) -> Iterator[Point | Gap]:
    """The whole curve, count by count.

    Args:
        device: Open.
        counts: Numbers of statements, from 1 to `MOST`.
    """
    refused = {form: refusal(device, form) for form in Form}
    for count, shapes, form in itertools.product(counts, Shapes, Form):
        reason = refused[form]
        yield Gap(count, shapes, form, reason) if reason else point(device, count, shapes, form)


def refusal(device: Device, form: Form) -> str:
    """Why nothing compiles in a form here; empty if it does. What a process pays once, for importing the compiler, is paid then."""
    found = compiler_capability(device)
    if not found.ok:
        return str(found)
    try:
        with compiled(device, 3, Shapes.FIXED, form):
            return ""
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is its answer here
        return brief(error)


def recompile_limit() -> int:
    """Graphs of one function after which torch runs what is new eagerly, unless it is told otherwise."""
    from torch._dynamo import config

    return int(config.recompile_limit)


def point(device: Device, count: int, shapes: Shapes, form: Form, looks: Sequence[float] = LOOKS) -> Point | Gap:
    """Compile, see that it is right, and measure it beside eager; `looks` as of `accelcheck.measure.paired.compare`."""
    try:
        with compiled(device, count, shapes, form) as pair, undisturbed():
            found = _beside(device, pair, looks)
            pair.check()
    except Exception as error:  # noqa: BLE001 - as in `refusal`
        return Gap(count, shapes, form, brief(error))
    return Point(
        count,
        shapes,
        form,
        statistics.median(found.base),
        statistics.median(found.candidate),
        found.ratio,
        found.low,
        found.high,
        found.pairs,
        pair.first,
        pair.eager_first,
        pair.graphs,
        pair.recompilations,
        pair.programs,
    )


@contextlib.contextmanager
def compiled(device: Device, count: int, shapes: Shapes, form: Form) -> Iterator[Pair]:
    """A chain and its compiled form, after the first pass over all shapes and a look at the results.

    Raises:
        WrongError: The result is wrong, or nothing was compiled.
        Exception: As the compiler raises it.
    """
    inputs = _inputs(device, shapes)
    eager = chain(count)
    forget()
    try:
        with torch.no_grad(), _fresh_caches(), _recompiling(len(inputs)):
            eager_first = _pass(device, eager, inputs)
            before = _programs(device)
            call: Chain = torch.compile(eager, backend=backend_for(device), dynamic=form is Form.DYNAMIC)
            first = _pass(device, call, inputs)
            made, programs = graphs(), _programs(device)
            again = recompilations()

            def check() -> None:
                if not made:
                    raise WrongError("expected a graph to be compiled, got none")
                if graphs() != made:
                    raise WrongError(f"expected no further graphs once all shapes were seen, got {graphs() - made}")
                _check(count, eager, call, inputs)

            check()
            yield Pair(
                _turns(eager, inputs),
                _turns(call, inputs),
                first,
                eager_first,
                made,
                again,
                None if programs is None or before is None else programs - before,
                check,
            )
    finally:
        forget()


def brief(error: BaseException) -> str:
    """The first line of what an exception says, with its type."""
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, WrongError) else f"{type(error).__name__}: {text}"


def _beside(device: Device, pair: Pair, looks: Sequence[float]) -> Comparison:
    first, second = block(device, pair.eager), block(device, pair.compiled)
    settle(first)
    settle(second)
    return compare(first, second, looks=looks)


def _inputs(device: Device, shapes: Shapes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(ROWS))
    rows = ROWS if shapes is Shapes.VARYING else (FIXED_ROWS,) * SETS
    return [torch.randn(count, COLUMNS, generator=generator).to(device.torch_device()) for count in rows]


def _turns(call: Chain, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    turns = itertools.cycle(inputs)
    return lambda: call(next(turns))


def _pass(device: Device, call: Chain, inputs: Sequence[Tensor]) -> float:
    """Seconds of one call with each input, each waited for."""
    device.synchronize()
    start = time.perf_counter()
    for x in inputs:
        held = call(x)
        device.synchronize()
        del held
    return time.perf_counter() - start


def _check(count: int, eager: Chain, call: Chain, inputs: Sequence[Tensor]) -> None:
    for x in inputs:
        truth = eager(x.cpu().double())
        error = float((call(x).cpu().double() - truth).abs().max())
        if not error <= allowed(count):
            raise WrongError(
                f"wrong: expected {count} statements on {tuple(x.shape)} to err by {allowed(count):.2g} at most, "
                f"the compiled ones err by {error:.2g}"
            )


@contextlib.contextmanager
def _recompiling(shapes: int) -> Iterator[None]:
    """Room for a graph of each shape: at torch's own limit, what is left would run eagerly, and be timed as compiled."""
    from torch._dynamo import config

    with config.patch(recompile_limit=max(shapes, recompile_limit()), fail_on_recompile_limit_hit=True):
        yield


def _fresh_caches() -> contextlib.AbstractContextManager[Any]:
    """Inductor's cache in a folder of its own, and empty: compilation takes what it takes for the first time.

    Not for inductor alone: Dynamo compiles its guards on sizes with it.
    """
    from torch._inductor import utils

    fresh: contextlib.AbstractContextManager[Any] = utils.fresh_cache()
    return fresh


def _programs(device: Device) -> int | None:
    """Programs that XLA has compiled in this process, which keeps each by its content."""
    if device.type != "xla":
        return None
    data = importlib.import_module("torch_xla.debug.metrics").metric_data("CompileTime")
    return 0 if data is None else int(data[0])
