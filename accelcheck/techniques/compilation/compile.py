"""``torch.compile``: inductor in its modes, the AOT and CUDA-graph backends, and XLA's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.observe import ProfilerLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload

REGION = r"Torch-Compiled Region.*"
"""Entries into code that dynamo compiled."""
AOT_GRAPH = r"AOTDispatcher Runtime Wrapper Prologue"
"""Calls of a graph that went through AOTAutograd, with or without gradients."""
BACKWARD_GRAPH = r"CompiledFunctionBackward"
"""Calls of a backward graph that AOTAutograd made."""
INDUCTOR_GRAPH = r"## Call CompiledFxGraph .*"
"""Calls of a kernel sequence that inductor generated, forward or backward."""
GRAPH_LAUNCH = r"(cuda|hip)GraphLaunch"
"""Replays of a captured CUDA or HIP graph."""

_XLA_RUNS = "cached graph runs"

CAPTURE_WARMUPS = 3
"""CUDA graph trees run once eagerly, once to capture; the third run and later ones replay."""


class Compiled(Technique):
    """The module under ``torch.compile``, graph breaks allowed, as most users call it.

    Args:
        name: The variant's name.
        promise: As `Technique.promise`.
        level: As `Technique.level`.
        arguments: Of ``torch.compile``. Without a backend, the default is taken, which an installed package may have set.
        dtypes: As `Technique.dtypes`.
        early: As `Technique.early`.
    """

    family = "compile"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"
    watch = ProfilerLog
    warmups = 1
    differentiates_twice = False  # AOTAutograd raises: "does not currently support double backward"

    def __init__(
        self,
        name: str,
        promise: str,
        *,
        level: int,
        arguments: Mapping[str, Any],
        dtypes: tuple[str, ...] = ("float32",),
        early: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.promise = promise
        self.level = level
        self.dtypes = dtypes
        self.early = early
        self.arguments = MappingProxyType(dict(arguments))
        self.fuses = "backend" not in arguments

    def capability(self, device: Device) -> Capability:
        backend = self.arguments.get("backend") or default_backend()
        return inductor_capability(device) if backend == "inductor" else SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        del mode, device
        forget()
        program.call = torch.compile(program.module, **self.arguments)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        del device
        wanted = self.arguments.get("backend") or default_backend()
        used = resolved_backend(program.call)
        yield Evidence(f"backend is {wanted}", self._described(used), engaged=used == wanted)
        yield from compiled(log, mode, used)
        # fullgraph=False promises no single graph: a number to read, not to judge.
        yield Evidence("graph breaks (any number)", graph_breaks(), engaged=True)

    def finish(self) -> None:
        forget()

    def _described(self, used: str) -> str:
        mode = self.arguments.get("mode")
        return used if mode is None else f"{used}, mode {mode}"


class DynamicCompile(Compiled):
    """One graph for all sizes: the runs before the judged one have other sizes each."""

    requires = frozenset({"resizable"})
    # A branch on data or size may need a graph of its own: that is no recompilation to object to.
    excludes = frozenset({"branching"})
    resizing = True
    warmups = 2

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        again = recompilations()
        yield Evidence(f"recompilations over {self.warmups + 1} sizes = 0", again, engaged=again == 0)
        if graph_breaks() == 0:
            yield Evidence(f"graphs compiled over {self.warmups + 1} sizes = 1", graphs(), engaged=graphs() == 1)


class CudaGraphs(Compiled):
    """A variant that replays captured graphs."""

    warmups = CAPTURE_WARMUPS

    def capability(self, device: Device) -> Capability:
        if "cuda-graphs" not in device.features:
            return unsupported(
                Code.NO_FEATURE,
                f"{device.name} does not declare cuda-graphs: the compiler skips capture there and runs the plain graph",
            )
        return super().capability(device)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        program.around = mark_step(program.around)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield at_least(log, "captured graphs replayed", GRAPH_LAUNCH, 1)


class MaxAutotune(Compiled):
    """Inductor times its own templates against the library's for contractions, and takes the fastest.

    What it tunes depends on the device. On a CPU that is little: its C++ templates need constant weights (freezing), so
    of plain modules only batched products are tuned, or, in torch 2.9, library calls against each other. Where nothing
    was timed the answer is `no-effect`, never a pass. Timings kept from an earlier compilation would look like none, so
    inductor's caches are empty at the start of each case. On a GPU the mode captures graphs too.
    """

    warmups = CAPTURE_WARMUPS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held = ExitStack()

    def accepts(self, workload: Workload) -> bool:
        """Contractions alone are tuned."""
        return super().accepts(workload) and bool({"matmul", "linear", "conv", "attention"} & workload.traits)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        from torch._inductor.utils import fresh_inductor_cache

        self._held.enter_context(fresh_inductor_cache())
        super().prepare(program, mode, device)
        if "cuda-graphs" in device.features:
            program.around = mark_step(program.around)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        tuned = _counters()["inductor"]["select_algorithm_autotune"]
        if tuned == 0:
            raise Unsupported(
                unsupported(
                    Code.NO_EFFECT,
                    f"inductor had no choice of kernels to time for this workload on {device.name}: max-autotune gives "
                    f"what compile-static gives",
                )
            )
        yield from super().evidence(program, log, mode, device)
        yield Evidence("contractions whose kernels were timed >= 1", tuned, engaged=tuned >= 1)
        own = _counters()["inductor"]["cpp_templated_kernel_counter"]
        yield Evidence("of them won by a C++ template (any number)", own, engaged=True)

    def finish(self) -> None:
        super().finish()
        self._held.close()


class OpenXla(Compiled):
    """torch_xla's backend: the graph is lowered once, later calls run what was compiled."""

    source = "https://docs.pytorch.org/xla/master/perf/dynamo.html"

    def capability(self, device: Device) -> Capability:
        if device.type != "xla":
            return unsupported(Code.NO_BACKEND, f"backend openxla compiles for xla, not for {device.name}")
        return SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        count_xla_runs(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield xla_ran(program, self.warmups + 1)


def compiled(log: Log, mode: Mode, backend: str) -> Iterable[Evidence]:
    """What shows that a backend's graphs were made by way of AOTAutograd, and ran."""
    yield at_least(log, "compiled regions entered", REGION, 1)
    yield at_least(log, "AOTAutograd graphs called", AOT_GRAPH, 1)
    backward = mode is not Mode.FORWARD
    if backward:
        yield at_least(log, "compiled backward graphs called", BACKWARD_GRAPH, 1)
    if backend == "inductor":
        # A backward pass that only hands gradients on (of an addition) has no kernels: inductor makes no graph of it.
        least = 2 if backward and inductor_graphs() >= 2 else 1
        yield at_least(log, "inductor graphs called", INDUCTOR_GRAPH, least)
    yield Evidence("graphs compiled >= 1", graphs(), engaged=graphs() >= 1)


def default_backend() -> str:
    """What ``torch.compile`` takes where no backend is given; inductor, in versions where it cannot be set."""
    getter = getattr(torch.compiler, "get_default_backend", None)
    backend = "inductor" if getter is None else getter()
    return backend if isinstance(backend, str) else str(getattr(backend, "__name__", backend))


def resolved_backend(call: Any) -> str:
    """Name of the backend that a compiled module really has; ``unknown`` where torch hides it.

    Dynamo wraps the backend in callbacks that each name the next one; the innermost carries its `compiler_name`.
    """
    backend = getattr(getattr(call, "dynamo_ctx", None), "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return str(getattr(backend, "compiler_name", getattr(backend, "__name__", "unknown")))


def inductor_capability(device: Device) -> Capability:
    """Whether inductor generates code for the device, and what it needs for that is installed."""
    if "inductor" not in device.features:
        fact = " (torch 2.9 with torch_xla 2.9 raises InductorError: KeyError: 'xla')" if device.type == "xla" else ""
        return unsupported(
            Code.NO_BACKEND, f"inductor has no code generator registered for device type {device.type!r}{fact}"
        )
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return unavailable(
                Code.NO_PACKAGE,
                f"inductor needs a C++ compiler for the CPU and found no {compiler!r}",
                "install one, or name it in CXX",
            )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return unavailable(
            Code.NO_PACKAGE, "inductor needs triton for the GPU", "install the triton of this torch build"
        )
    return SUPPORTED


def forget() -> None:
    """Drop all compiled code and every count of it."""
    torch.compiler.reset()
    _counters().clear()
    from torch._dynamo.utils import clear_compilation_metrics

    clear_compilation_metrics()


def graphs() -> int:
    """Graphs compiled since `forget`, recompilations included."""
    return int(_counters()["stats"]["unique_graphs"])


def inductor_graphs() -> int:
    """Kernel sequences that inductor generated or took from its cache since `forget`."""
    kinds = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    return sum(int(_counters()["inductor"][kind]) for kind in kinds)


def graph_breaks() -> int:
    """Graph breaks met since `forget`: pieces of code compiled to go on after one, or the counter of those with a reason.

    Neither is complete: a branch on data resumes without a reason counted, and what follows may hold no tensor code.
    """
    resumed = sum(1 for metric in compilations() if str(metric.co_name).startswith("torch_dynamo_resume_in"))
    return max(resumed, int(sum(_counters()["graph_break"].values())))


def recompilations() -> int:
    """Compilations of code that had been compiled before, since `forget`.

    A compilation's id is frame/attempt, as in the profiler's region names: the first attempt is 0.
    """
    ids = {str(metric.compile_id) for metric in compilations() if metric.compile_id is not None}
    return sum(1 for name in ids if name.rpartition("/")[2].partition("_")[0] != "0")


def count_xla_runs(program: Program) -> None:
    """Begin to count runs of graphs that ``openxla`` compiled, warm-ups included."""
    program.extras[_XLA_RUNS] = _cached_graph_runs()


def xla_ran(program: Program, runs: int, graphs: int = 1) -> Evidence:
    """That XLA ran `graphs` of its graphs, or more, in each of so many runs since `count_xla_runs`."""
    seen, least = _cached_graph_runs() - int(program.extras[_XLA_RUNS]), runs * graphs
    return Evidence(f"runs of a cached XLA graph over {runs} runs >= {least}", seen, engaged=seen >= least)


def mark_step(around: Any) -> Any:
    """Tell CUDA graph trees at each forward pass that a new iteration begins, so that old outputs may be overwritten."""

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # not annotated
        return around()

    return marked


def _counters() -> Any:
    from torch._dynamo.utils import counters

    return counters


def compilations() -> list[Any]:
    """Dynamo's record of each compilation since `forget`, those that failed included."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def _cached_graph_runs() -> int:
    metrics = importlib.import_module("torch_xla.debug.metrics")
    data = metrics.metric_data("RunCachedGraphInputData")
    return 0 if data is None else int(data[0])


def at_least(log: Log, what: str, pattern: str, least: int) -> Evidence:
    """That events of a pattern were seen so many times or more."""
    seen = log.count(pattern)
    return Evidence(f"{what} >= {least}", seen, engaged=seen >= least)


_ONE_OF_EACH_KIND = frozenset(
    [
        "elementwise-5",
        "mlp",
        "train-mlp",
        "residual-block",
        "train-cnn",
        "attention-mask",
        "transformer-block",
        "train-transformer",
        "index-select",
        "mean-pool",
        "dynamic-depth",
    ]
)
"""Inductor takes 5 to 15 s a case on a CPU: three small workloads at level 1, one more of each kind at level 2."""

TECHNIQUES: tuple[Technique, ...] = (
    Compiled(
        "compile-static",
        "Code generated for these very shapes computes what eager computes.",
        level=2,
        arguments={"dynamic": False},
        dtypes=("float32", "bfloat16", "float16"),
        early=_ONE_OF_EACH_KIND,
    ),
    DynamicCompile(
        "compile-dynamic",
        "One compilation serves all sizes, and computes what eager computes.",
        level=2,
        arguments={"dynamic": True},
    ),
    CudaGraphs(
        "compile-reduce-overhead",
        "Generated kernels are captured in a graph and replayed, without launch overhead.",
        level=2,
        arguments={"mode": "reduce-overhead", "dynamic": False},
    ),
    MaxAutotune(
        "compile-max-autotune",
        "The fastest of several kernels for each contraction, and the same result.",
        level=3,
        arguments={"mode": "max-autotune", "dynamic": False},
    ),
    Compiled(
        "compile-aot-eager",
        "Captured and functionalised forward and backward graphs, run by eager kernels, keep eager's results.",
        level=1,
        arguments={"backend": "aot_eager"},
    ),
    CudaGraphs(
        "compile-cudagraphs",
        "Eager kernels captured in a graph and replayed give what they give one by one.",
        level=2,
        arguments={"backend": "cudagraphs"},
    ),
    OpenXla(
        "compile-openxla",
        "The captured graph is compiled by XLA once, and gives what lazy execution gives.",
        level=1,
        arguments={"backend": "openxla"},
    ),
)
