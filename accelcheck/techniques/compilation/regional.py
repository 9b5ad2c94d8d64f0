"""Compilation of repeated blocks alone, and compiled code that another process made."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from accelcheck.core import imports
from accelcheck.core.capability import Code, unsupported
from accelcheck.core.case import Evidence, Mode
from accelcheck.core.files import scratch
from accelcheck.core.processes import Child, ChildError, Mailbox, calling
from accelcheck.devices import torch_names
from accelcheck.devices.base import Device
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.compilation.compile import Compiled, compiled, graphs, inductor_graphs, reset_compiler
from accelcheck.techniques.compilation.regions import backend_for, compiler_capability, entered
from accelcheck.techniques.observe import Log, at_least, exactly
from accelcheck.techniques.processes.evidence import program_on
from accelcheck.workloads.base import Program
from accelcheck.workloads.blocks import blocks_of

PATIENCE = 600.0
"""Seconds for the other process to compile; with an empty cache it compiles headers first."""
_RUNS, _ARTIFACT = "calls of blocks, by run", "bytes of the artifact"


def recorded(block: nn.Module, call: Callable[..., Any], runs: list[list[Any]]) -> Callable[..., Any]:
    """Makes a forward that notes what a graph depends on: sizes, and which tensors need gradients."""

    def forward(*inputs: Any, **keywords: Any) -> Any:
        given = (*inputs, *keywords.values(), *block.parameters())
        facts = [(tuple(x.shape), x.stride(), x.requires_grad) for x in given if isinstance(x, Tensor)]
        runs[-1].append((type(block), block.training, torch.is_grad_enabled(), tuple(facts)))
        return call(*inputs, **keywords)

    return forward


class Regional(Compiled):
    """Compiles the forward of each block, and nothing around the blocks.

    Not by ``nn.Module.compile``, which silently compiles nothing for a class of torch's own, such as `nn.Sequential`.
    """

    source = "https://docs.pytorch.org/tutorials/recipes/regional_compilation.html"
    requires = frozenset({"blocks"})
    excludes = frozenset({"branching"})
    workloads = frozenset({"mlp-blocks", "transformer-blocks", "cnn-blocks", "train-transformer"})
    capability = staticmethod(compiler_capability)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        reset_compiler()
        program.extras[_RUNS] = runs = [list[Any]()]
        program.resets.append(lambda: runs.append([]))
        for block in blocks_of(program.module) or ():
            block.forward = recorded(block, torch.compile(block.forward, backend=backend_for(device)), runs)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        runs = program.extras[_RUNS]
        calls, entries = len(runs[-1]), entered(log).total()
        yield from compiled(log, mode, backend_for(device))
        yield Evidence(f"compiled blocks entered = {calls} >= 2", entries, engaged=entries == calls >= 2)
        kinds = {kind for run in runs for kind in run}
        yield exactly(f"graphs compiled for {len(blocks_of(program.module) or ())} blocks", graphs(), len(kinds))


class MegaCache(Compiled):
    """Loads what another process saved of its compilations into an empty cache, and compiles.

    A `foreign` process seems to run on another machine, so that its artifact must not be used: without the host's
    vector instructions, or with another fingerprint of the GPU.
    """

    source = "https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html"
    modes = frozenset({Mode.FORWARD, Mode.BACKWARD})
    excludes = frozenset({"branching"})
    workloads = frozenset({"mlp-blocks"})
    timed = False

    def __init__(self, name: str, promise: str, *, foreign: bool) -> None:
        super().__init__(name, promise, level=3, arguments={})
        self.foreign = foreign

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        artifact, settings = self.made_elsewhere(program, mode, device)
        self.held.enter_context(torch_names.fresh_inductor_cache())
        # Settings are part of the key, and AOTInductor and torchao leave some of their own.
        ours = torch_names.inductor_config.get_config_copy()
        changed = {name: value for name, value in settings.items() if name in ours and ours[name] != value}
        self.held.enter_context(torch_names.inductor_config.patch(changed))
        super().prepare(program, mode, device)
        program.extras[_ARTIFACT] = len(artifact)
        torch.compiler.load_cache_artifacts(artifact)

    def made_elsewhere(self, program: Program, mode: Mode, device: Device) -> tuple[bytes, dict[str, Any]]:
        """Compiles in another process with an empty cache; returns its artifact and inductor's settings there."""
        with tempfile.TemporaryDirectory(prefix="artifact-", dir=scratch()) as folder:
            box, environ = Mailbox(Path(folder)), {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
            dtype = next(program.module.parameters()).dtype
            try:
                box.put("task", (program.problem(), device, dtype, mode, torch.get_num_threads(), self.foreign))
            except TypeError as error:  # a user-owned model
                reason = f"the model cannot be sent to another process: {error}"
                raise Unsupported(unsupported(Code.NO_FEATURE, reason)) from error
            if self.foreign and device.has("host"):
                environ["ATEN_CPU_CAPABILITY"] = "default"
            with Child(calling(f"{__name__}:main", folder, parent=True), environ) as child:
                made = box.wait(["artifact"], PATIENCE, lambda: bool(box.errors()) or not child.running)
                if made is None:
                    raise ChildError(f"the process that was to compile: {box.errors()[-1:]}\n{child.last()}")
                artifact, settings = made[0]
                return artifact, settings

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield from compiled(log, mode, "inductor")
        yield at_least("bytes in the artifact", program.extras[_ARTIFACT])
        taken = int(torch_names.counters["inductor"]["fxgraph_cache_hit"])
        if self.foreign:
            yield exactly("graphs taken from another machine's artifact", taken, 0)
        else:
            yield at_least("graphs taken from the artifact", taken)
            yield exactly("graphs compiled anew", inductor_graphs() - taken, 0)


def main(arguments: Sequence[str]) -> None:
    """Runs the other process; the argument is the folder of the mailbox."""
    box = Mailbox(Path(arguments[0]))
    imports.load()
    try:
        problem, device, dtype, mode, threads, foreign = box.take("task")
        torch.set_num_threads(threads)
        device.open()
        other = foreign and not device.has("host")  # there, its vector instructions are others
        system = {"hash": "another machine"} if other else torch_names.CacheBase.get_system()
        with device.strict_float32(), mock.patch.object(torch_names.CacheBase, "get_system", return_value=system):
            program = program_on(device, problem, dtype, 0)
            program.call = torch.compile(program.module)
            program.run(mode)
        artifact = (torch.compiler.save_cache_artifacts() or [b""])[0]
        box.put("artifact", (artifact, torch_names.inductor_config.get_config_copy()))
    except Exception as error:  # noqa: BLE001 - a workload or backend may raise anything: the parent reports it
        box.raised("compilation", error)


TECHNIQUES: tuple[Technique, ...] = (
    Regional(
        "compile-regional", "Equal blocks share one compiled graph, and compute what eager computes.",
        level=3, early=frozenset({"mlp-blocks"}), arguments={}),
    MegaCache(
        "compile-mega-cache",
        "Compiled code that another process saved is used again, and computes what eager computes.", foreign=False),
    MegaCache(
        "compile-mega-cache-foreign",
        "Compiled code of another machine is left alone, and compiled anew.", foreign=True),
)  # fmt: skip
