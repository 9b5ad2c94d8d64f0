"""The number of element-wise statements from which on ``torch.compile`` is faster: eager beside compiled chains.

A published experiment: on a few rows of 16 columns nearly all the time is the overhead of calling operators. A compiled
chain of any length costs one kernel and the overhead of entering it, guards and Python.
"""

import contextlib
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelcheck.devices.base import Device
from accelcheck.measure.clocks import block, settle, undisturbed
from accelcheck.measure.curve import COLUMNS, COUNTS, FIXED_ROWS, ROWS, Form, Gap, Point, Shapes
from accelcheck.measure.paired import LOOKS, compare
from accelcheck.techniques.compilation.compile import graphs, recompilations, reset_compiler
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability
from accelcheck.verify.precision import INEXACT_ULPS, UNIT_ROUNDOFF

Chain = Callable[[Tensor], Tensor]

SETS = 4
"""Number of inputs of the fixed shape; calls take them in turn."""
SCALE = 1.7
LARGEST = 2.2
"""Largest magnitude of every statement's operand and result after the first: ``1.7 sin(x) + 0.5``."""


class WrongError(RuntimeError):
    """The compiled chain is wrong: its result differs, or no graph was compiled."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A chain, eager and compiled, both checked and warmed up; each call takes the next input.

    `facts` are ``first``, ``eager_first``, ``graphs``, ``recompilations`` and ``programs``, as in `Point`; `check`
    raises `WrongError` if the compiled chain has become wrong.
    """

    eager: Callable[[], object]
    compiled: Callable[[], object]
    facts: tuple[float, float, int, int, int | None]
    check: Callable[[], None]


def chain(count: int) -> Chain:
    """A chain of `count` element-wise statements on ``x``, out of place.

    They are written out in one function, since calling modules would cost eager as much as the statements themselves.
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
    """Largest error of a correct FP32 chain: rounding errors of all statements, propagated through those that follow.

    A statement errs by at most `INEXACT_ULPS` units in the last place of `LARGEST`; the product alone amplifies errors.
    """
    each = INEXACT_ULPS * 2 * UNIT_ROUNDOFF["float32"] * LARGEST
    error = 0.0
    for index in range(count):
        error = error * (SCALE if index % 5 == 1 else 1.0) + each
    return error


def measure(device: Device, counts: Sequence[int] = COUNTS) -> Iterator[Point | Gap]:
    """Measure the curve on an open device, count by count, each from 1 to `MOST` statements."""
    refused = {form: refusal(device, form) for form in Form}
    for count, shapes, form in itertools.product(counts, Shapes, Form):
        reason = refused[form]
        yield Gap(count, shapes, form, reason) if reason else point(device, count, shapes, form)


def refusal(device: Device, form: Form) -> str:
    """The reason why a form does not compile on this device; empty if it does. Imports the compiler."""
    capability = compiler_capability(device)
    if not capability.ok:
        return str(capability)
    try:
        with compiled(device, 3, Shapes.FIXED, form):
            return ""
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        return brief(error)


def recompile_limit() -> int:
    """Number of graphs of one function after which torch, by default, runs new shapes eagerly."""
    from accelcheck.devices.torch_names import dynamo_config as config

    return int(config.recompile_limit)


def point(device: Device, count: int, shapes: Shapes, form: Form, looks: Sequence[float] = LOOKS) -> Point | Gap:
    """Compile a chain, check it, and measure it beside eager; `looks` as in `accelcheck.measure.paired.compare`."""
    try:
        with compiled(device, count, shapes, form) as pair, undisturbed():
            first, second = block(device, pair.eager), block(device, pair.compiled)
            settle(first)
            settle(second)
            beside = compare(first, second, looks=looks)
            pair.check()
    except Exception as error:  # noqa: BLE001 - as in `refusal`
        return Gap(count, shapes, form, brief(error))
    eager, seconds = statistics.median(beside.base), statistics.median(beside.candidate)
    return Point(count, shapes, form, eager, seconds, beside.ratio, beside.low, beside.high, beside.pairs, *pair.facts)


@contextlib.contextmanager
def compiled(device: Device, count: int, shapes: Shapes, form: Form) -> Iterator[Pair]:
    """Give a chain and its compiled form, after a first pass over all shapes and a check of the results.

    Caches of inductor are empty, so that compilation takes its full time; Dynamo's guards on sizes need it too. Each
    shape may have a graph: beyond torch's default limit, shapes would run eagerly and be timed as compiled. A
    `WrongError` where the result is wrong, or nothing was compiled; the compiler may raise anything.
    """
    from accelcheck.devices.torch_names import dynamo_config as config
    from accelcheck.devices.torch_names import fresh_cache

    inputs = _inputs(device, shapes)
    eager = chain(count)
    limit = max(len(inputs), recompile_limit())
    reset_compiler()
    try:
        with torch.no_grad(), fresh_cache(), config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
            eager_first = _pass(device, eager, inputs)
            before = _programs(device)
            call: Chain = torch.compile(eager, backend=backend_for(device), dynamic=form is Form.DYNAMIC)
            first = _pass(device, call, inputs)
            made, programs = graphs(), _programs(device)
            again = recompilations()

            def check() -> None:
                if not made:
                    raise WrongError("expected a graph to be compiled, got none")
                if more := graphs() - made:
                    raise WrongError(f"expected no further graphs after the first pass over all shapes, got {more}")
                _check(count, eager, call, inputs)

            check()
            new = None if programs is None or before is None else programs - before
            yield Pair(_turns(eager, inputs), _turns(call, inputs), (first, eager_first, made, again, new), check)
    finally:
        reset_compiler()


def brief(error: BaseException) -> str:
    """The first line of an exception's message, with its type."""
    text = next(iter(str(error).splitlines()), "")
    return text if isinstance(error, WrongError) else f"{type(error).__name__}: {text}"


def _inputs(device: Device, shapes: Shapes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(ROWS))
    rows = ROWS if shapes is Shapes.VARYING else (FIXED_ROWS,) * SETS
    return [torch.randn(count, COLUMNS, generator=generator).to(device.torch_device()) for count in rows]


def _turns(call: Chain, inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
    turns = itertools.cycle(inputs)
    return lambda: call(next(turns))


def _pass(device: Device, call: Chain, inputs: Sequence[Tensor]) -> float:
    """Seconds of one synchronised call with each input."""
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
                f"wrong: expected an error of at most {allowed(count):.2g} for {count} statements on {tuple(x.shape)}, "
                f"got {error:.2g}"
            )


def _programs(device: Device) -> int | None:
    """Number of programs that XLA has compiled in this process and caches by content; None on other devices."""
    if not device.has("torch-xla"):
        return None
    data = importlib.import_module("torch_xla.debug.metrics").metric_data("CompileTime")
    return 0 if data is None else int(data[0])
