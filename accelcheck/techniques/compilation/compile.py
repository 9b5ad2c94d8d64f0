"""``torch.compile``: inductor in its modes, and the backends aot_eager, cudagraphs and openxla."""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accelcheck.core.capability import SUPPORTED, Capability, Code, unavailable, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Holding, Technique, Unsupported
from accelcheck.techniques.observe import Log, ProfilerLog, at_least, exactly
from accelcheck.workloads.base import Program
from accelcheck.workloads.problem import CONTRACTING

REGION = r"Torch-Compiled Region.*"
"""Pattern of profiler events: entries into code that Dynamo compiled."""
AOT_GRAPH = r"AOTDispatcher Runtime Wrapper Prologue"
"""Pattern of profiler events: calls of a graph that AOTAutograd made, with or without gradients."""
BACKWARD_GRAPH = r"CompiledFunctionBackward"
"""Pattern of profiler events: calls of a backward graph that AOTAutograd made."""
INDUCTOR_GRAPH = r"## Call CompiledFxGraph .*"
"""Pattern of profiler events: calls of code that inductor generated, forward or backward."""
GRAPH_LAUNCH = r"(cuda|hip)GraphLaunch"
"""Pattern of profiler events: replays of a captured CUDA or HIP graph."""

_XLA_RUNS = "cached graph runs"

CAPTURE_WARMUPS = 3
"""Warm-up runs before captured graphs are judged: CUDA graph trees run eagerly, then capture, then replay."""


class Compilation(Holding):
    """Technique under ``torch.compile``: the first run compiles, the second is judged; no compiled code stays."""

    watch = ProfilerLog
    warmups = 1
    differentiates_twice = False  # AOTAutograd raises: "does not currently support double backward"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        """Drops the compiled code of earlier cases; subclasses call it first."""
        reset_compiler()

    def finish(self) -> None:
        super().finish()
        reset_compiler()


@dataclass(eq=False)
class Compiled(Compilation):
    """Module under ``torch.compile``, with graph breaks allowed, as most users call it.

    `arguments` are those of ``torch.compile``. Without ``backend``, its default is used, which a package may have set.
    """

    name: str
    promise: str
    arguments: Mapping[str, Any]
    level: int
    dtypes: tuple[str, ...] = ("float32",)
    early: frozenset[str] = frozenset()
    family = "compile"
    source = "https://docs.pytorch.org/docs/stable/generated/torch.compile.html"

    def __post_init__(self) -> None:
        self.fuses = "backend" not in self.arguments

    def capability(self, device: Device) -> Capability:
        backend = self.arguments.get("backend") or default_backend()
        return inductor_capability(device) if backend == "inductor" else SUPPORTED

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        program.call = torch.compile(program.module, **self.arguments)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = self.arguments.get("backend") or default_backend()
        used = resolved_backend(program.call)
        told = f"{used}, mode {self.arguments['mode']}" if "mode" in self.arguments else used
        yield Evidence(f"backend is {wanted}", told, engaged=used == wanted)
        yield from compiled(log, mode, used)
        # fullgraph=False does not promise a single graph: for information only.
        yield Evidence("graph breaks (any number)", graph_breaks(), engaged=True)


ENTERED = "compiled regions entered"
AGAIN, GRAPHS = "recompilations over", "graphs compiled over"
"""Beginnings of the claims that one graph serves all sizes; a user-owned model that loops over rows breaks them."""


class DynamicCompile(Compiled):
    """Single graph for all sizes: each warm-up run has another size."""

    requires = frozenset({"resizable"})
    # A branch on data may need another graph, which would be a legitimate recompilation.
    excludes = frozenset({"branching"})
    resizing = True
    warmups = 2

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield exactly(f"{AGAIN} {self.warmups + 1} sizes", recompilations(), 0)
        if graph_breaks() == 0:
            yield exactly(f"{GRAPHS} {self.warmups + 1} sizes", graphs(), 1)


class CudaGraphs(Compiled):
    """Variant that captures kernels in CUDA graphs and replays them."""

    warmups = CAPTURE_WARMUPS

    def capability(self, device: Device) -> Capability:
        fact = "does not declare cuda-graphs: the compiler would skip the capture and run the plain graph"
        reason = f"{device.name} {fact}"
        return super().capability(device) if device.has("cuda-graphs") else unsupported(Code.NO_FEATURE, reason)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        mark_step(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield at_least("captured graphs replayed", log.count(GRAPH_LAUNCH))
        yield declined_captures()


class MaxAutotune(Compiled):
    """Inductor times its own templates and the library's kernels for contractions, and uses the fastest.

    On a CPU it tunes little: C++ templates need constant weights (freezing), so that in plain modules only batched
    products are tuned, or, in torch 2.9, library calls among themselves. If nothing was timed, the case is
    ``unsupported`` with the code ``no-effect``. Each case starts with empty inductor caches, because kernels whose
    timings are cached are not timed again. On a GPU the mode also captures CUDA graphs.
    """

    works_on = CONTRACTING  # nothing else is tuned
    warmups = CAPTURE_WARMUPS

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        self.held.enter_context(torch_names.fresh_inductor_cache())
        super().prepare(program, mode, device)
        if device.has("cuda-graphs"):
            mark_step(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        tuned = torch_names.counters["inductor"]["select_algorithm_autotune"]
        if tuned == 0:
            reason = f"inductor had no choice of kernels to time for this workload on {device.name}"
            raise Unsupported(unsupported(Code.NO_EFFECT, f"{reason}: max-autotune does the same as compile-static"))
        yield from super().evidence(program, log, mode, device)
        yield at_least("contractions whose kernels were timed", tuned)
        own = torch_names.counters["inductor"]["cpp_templated_kernel_counter"]
        yield Evidence("of them won by a C++ template (any number)", own, engaged=True)
        if device.has("cuda-graphs"):  # not what the mode promises: for information only
            yield Evidence("graphs that were not captured (any number)", declined_captures().observed, engaged=True)


class OpenXla(Compiled):
    """Backend of torch_xla: the graph is compiled once, and later calls run the cached executable."""

    source = "https://docs.pytorch.org/xla/master/perf/dynamo.html"

    def capability(self, device: Device) -> Capability:
        reason = f"the backend openxla compiles for xla, not for {device.name}"
        return SUPPORTED if device.has("torch-xla") else unsupported(Code.NO_BACKEND, reason)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        super().prepare(program, mode, device)
        count_xla_runs(program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from super().evidence(program, log, mode, device)
        yield xla_ran(program)


def compiled(log: Log, mode: Mode, backend: str) -> Iterable[Evidence]:
    """Yields evidence that a backend compiled graphs through AOTAutograd, and that they ran."""
    yield at_least(ENTERED, log.count(REGION))
    yield at_least("AOTAutograd graphs called", log.count(AOT_GRAPH))
    backward = mode is not Mode.FORWARD
    if backward:
        yield at_least("compiled backward graphs called", log.count(BACKWARD_GRAPH))
    if backend == "inductor":
        # A backward pass without kernels (that of an addition only passes gradients on) gives no inductor graph.
        least = 2 if backward and inductor_graphs() >= 2 else 1
        yield at_least("inductor graphs called", log.count(INDUCTOR_GRAPH), least)
    yield at_least("graphs compiled", graphs())


def default_backend() -> str:
    """Returns the name of ``torch.compile``'s default backend; inductor, in versions where it cannot be set."""
    backend = getattr(torch.compiler, "get_default_backend", lambda: "inductor")()
    return backend if isinstance(backend, str) else str(getattr(backend, "__name__", backend))


def resolved_backend(call: Any) -> str:
    """Returns the name of the backend that a compiled module really uses; ``unknown`` where torch does not show it.

    Dynamo wraps the backend in callbacks, each with a reference to the next; the innermost has the `compiler_name`.
    """
    backend = getattr(getattr(call, "dynamo_ctx", None), "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return str(getattr(backend, "compiler_name", getattr(backend, "__name__", "unknown")))


def inductor_capability(device: Device) -> Capability:
    """Tells whether inductor generates code for the device, and the compiler that it needs is installed."""
    if not device.has("inductor"):
        fact = " (torch 2.9 with torch_xla 2.9 raises InductorError: KeyError: 'xla')" * device.has("torch-xla")
        reason = f"inductor has no code generator registered for device type {device.type!r}{fact}"
        return unsupported(Code.NO_BACKEND, reason)
    compiler = os.environ.get("CXX", "g++")
    if device.has("inductor-cpp") and shutil.which(compiler) is None:
        reason = f"inductor needs a C++ compiler for the CPU and found no {compiler!r}"
        return unavailable(Code.NO_PACKAGE, reason, "install one, or set CXX to its name")
    if device.has("inductor-triton") and importlib.util.find_spec("triton") is None:
        advice = "install the triton of this torch build"
        return unavailable(Code.NO_PACKAGE, "inductor needs triton for the GPU", advice)
    return SUPPORTED


def reset_compiler() -> None:
    """Drops all compiled code, and resets Dynamo's counters and records."""
    torch.compiler.reset()
    torch_names.counters.clear()
    torch_names.clear_compilation_metrics()


def graphs() -> int:
    """Counts the graphs compiled since `reset_compiler`, including recompilations."""
    return int(torch_names.counters["stats"]["unique_graphs"])


def inductor_graphs() -> int:
    """Counts the graphs that inductor compiled or took from its cache since `reset_compiler`."""
    return sum(int(torch_names.counters["inductor"][f"fxgraph_cache_{how}"]) for how in ("hit", "miss", "bypass"))


def graph_breaks() -> int:
    """Counts the graph breaks since `reset_compiler`: the larger of two counts, neither of which is complete.

    Compiled continuations miss breaks that no tensor code follows; Dynamo's counter of breaks with a reason misses
    branches on data.
    """
    resumed = sum(1 for metric in compilations() if str(metric.co_name).startswith("torch_dynamo_resume_in"))
    return max(resumed, int(sum(torch_names.counters["graph_break"].values())))


def recompilations() -> int:
    """Counts the compilations since `reset_compiler` of code that had been compiled before.

    The id of a compilation is frame/attempt, as in the profiler's region names; the first attempt has the number 0.
    """
    ids = {str(metric.compile_id) for metric in compilations() if metric.compile_id is not None}
    return sum(1 for name in ids if name.rpartition("/")[2].partition("_")[0] != "0")


def declined_captures() -> Evidence:
    """Makes evidence that every graph compiled since `reset_compiler` was captured.

    For others torch counts, warns and launches kernels one by one: ``log_cudagraph_skip_and_bump_counter`` in
    torch/_inductor/cudagraph_utils.py.
    """
    skips = int(torch_names.counters["inductor"]["cudagraph_skips"])
    reasons = [str(metric.cudagraph_skip_reason) for metric in compilations() if metric.cudagraph_skip_reason]
    why = "; ".join(dict.fromkeys(reasons)) or "no reason recorded; TORCH_LOGS=cudagraphs shows it"
    return Evidence("graphs that were not captured = 0", f"{skips}: {why}" if skips else 0, engaged=skips == 0)


def count_xla_runs(program: Program) -> None:
    """Counts, in each judged run, the runs of graphs that ``openxla`` compiled; `xla_ran` reads the count."""

    def start() -> None:
        program.extras[_XLA_RUNS] = _cached_graph_runs()

    start()
    program.resets.append(start)


def xla_ran(program: Program, graphs: int = 1) -> Evidence:
    """Makes evidence that XLA executed at least `graphs` cached graphs in the judged run; see `count_xla_runs`."""
    return at_least("runs of cached XLA graphs", _cached_graph_runs() - int(program.extras[_XLA_RUNS]), graphs)


def mark_step(program: Program) -> None:
    """Tells CUDA graph trees before each forward pass that a new iteration begins and may overwrite old outputs."""
    around = program.around

    def marked() -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # not annotated
        return around()

    program.around = marked
    reason = "outputs of a captured graph are overwritten once the next iteration begins (docs of torch.compiler)"
    program.overwrites = reason


def compilations() -> list[Any]:
    """Returns Dynamo's records of all compilations since `reset_compiler`, including failed ones."""
    return list(torch_names.get_compilation_metrics())


def _cached_graph_runs() -> int:
    metrics = importlib.import_module("torch_xla.debug.metrics")
    data = metrics.metric_data("RunCachedGraphInputData")
    return 0 if data is None else int(data[0])


_ONE_OF_EACH_KIND = frozenset(
    """elementwise-5 mlp train-mlp residual-block train-cnn attention-mask transformer-block train-transformer
    index-select mean-pool dynamic-depth""".split()
)
"""Workloads that compile-static runs one level earlier: three small ones at level 1, one more of each kind at level 2.
Inductor takes 5 to 15 s per case on a CPU."""

TECHNIQUES: tuple[Technique, ...] = (
    Compiled(
        "compile-static", "Code generated for static shapes computes what eager computes.",
        level=2, arguments={"dynamic": False}, dtypes=("float32", "bfloat16", "float16"), early=_ONE_OF_EACH_KIND),
    DynamicCompile(
        "compile-dynamic", "One compilation serves all sizes and computes what eager computes.",
        level=2, arguments={"dynamic": True}),
    CudaGraphs(
        "compile-reduce-overhead",
        "Generated kernels, captured in a graph and replayed with less launch overhead, compute what eager computes.",
        level=2, arguments={"mode": "reduce-overhead", "dynamic": False}),
    MaxAutotune(
        "compile-max-autotune", "The fastest of several kernels for each contraction computes what eager computes.",
        level=3, arguments={"mode": "max-autotune", "dynamic": False}),
    Compiled(
        "compile-aot-eager",
        "Captured, functionalised forward and backward graphs, run with eager kernels, compute what eager computes.",
        level=1, arguments={"backend": "aot_eager"}),
    CudaGraphs(
        "compile-cudagraphs",
        "Eager kernels, captured in a graph and replayed, compute what they compute when launched one by one.",
        level=2, arguments={"backend": "cudagraphs"}),
    OpenXla(
        "compile-openxla", "The captured graph, compiled once by XLA, computes what lazy execution computes.",
        level=1, arguments={"backend": "openxla"}),
)  # fmt: skip
