"""A user's backend and a user's graph pass: evidence that they ran, and faults of passes that change results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fault_harness import BACKWARD, FORWARD, TRAIN, Bed, bench, built_in, case, faults
from marks import needs_compiler
from technique_harness import StubDevice, mlp, workload
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from accelcheck.core.capability import Code
from accelcheck.core.case import Evidence, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation._folding import FoldConstants
from accelcheck.techniques.compilation.capture import CALL, Capture, Captured, Node
from accelcheck.techniques.compilation.compile import reset_compiler
from accelcheck.techniques.compilation.custom import FxPass, UserBackend
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Program


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    reset_compiler()


def judged(store: Store, technique: Technique, name: str, mode: Mode = FORWARD, dtype: str = "float32") -> Record:
    """The engine's record of a case, on a CPU that inductor generates code for."""
    workload, device = built_in()[name], Bed()
    device.features |= {"inductor"}
    return bench(store, technique, workload, device).run(case(workload, mode, dtype, technique.name))


def observed(record: Record) -> dict[str, Any]:
    return {item.claim: item.observed for item in record.evidence}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "mode"), [("mlp", FORWARD), ("residual-block", BACKWARD), ("train-mlp", TRAIN), ("dynamic-depth", FORWARD)]
)
def test_a_users_backend_runs_the_graphs_that_it_captured(store: Store, name: str, mode: Mode) -> None:
    assert UserBackend().accepts(built_in()[name])
    record = judged(store, UserBackend(), name, mode)
    assert record.verdict is Verdict.PASS, record.why
    seen = observed(record)
    if mode is FORWARD:
        assert seen["calls of captured dynamo graphs >= 1"] >= 1
        assert "forward graphs captured >= 1" not in seen
    else:
        steps = 4 if mode is TRAIN else 1
        assert seen[f"calls of captured backward graphs >= {steps}"] == steps


def evidence(change: Callable[[Program], None], mode: Mode = FORWARD) -> dict[str, Evidence]:
    """Evidence by claim for an MLP with the user's backend, after a change to the prepared program."""
    technique, program = UserBackend(), Program.of(mlp())
    technique.prepare(program, mode, StubDevice())
    change(program)
    with technique.watch("cpu") as log:
        program.run(mode)
    entries = {item.claim: item for item in technique.evidence(program, log, mode, StubDevice())}
    technique.finish()
    return entries


def missing(found: dict[str, Evidence]) -> set[str]:
    return {claim for claim, item in found.items() if not item.engaged}


def test_eager_in_place_of_the_backend_fails_the_evidence() -> None:
    def eager(program: Program) -> None:
        program.call = program.module

    assert {
        "dynamo graphs captured >= 1",
        "calls of captured dynamo graphs >= 1",
        "lines printed >= 1",
        "compiled regions entered >= 1",
    } <= missing(evidence(eager))


def test_a_backend_whose_graphs_do_not_run_fails_the_evidence() -> None:
    class Idle(Capture):
        def running(self, stage: str, graph: fx.GraphModule) -> Any:
            return graph.forward

    def idle(program: Program) -> None:
        program.extras["capture"] = backend = Idle()
        program.call = torch.compile(program.module, backend=backend)

    assert missing(evidence(idle)) == {"calls of captured dynamo graphs >= 1"}


def test_printed_graphs_are_readable_code() -> None:
    collected: list[Program] = []
    assert not missing(evidence(collected.append, BACKWARD))
    backend: Capture = collected[0].extras["capture"]
    assert [graph.stage for graph in backend.graphs] == ["dynamo", "forward", "backward"]
    first, forward, backward = backend.graphs
    assert [node.target for node in first.nodes] == ["linear", "relu", "linear"]
    assert "torch.nn.functional.relu" in first.text
    assert "torch.ops.aten.addmm.default" in forward.text
    assert {node.dtype for node in forward.nodes} == {torch.float32}
    assert "threshold_backward.default" in {node.target for node in backward.nodes}
    assert backend.of("backward") == [backward]


def test_text_without_an_operation_is_not_readable() -> None:
    nodes = (Node("linear", "linear", torch.float32), Node("relu", "relu", torch.float32))
    assert Captured("dynamo", "linear = ...; relu = ...", nodes, fed=True).readable
    assert not Captured("dynamo", "linear = ...", nodes, fed=True).readable
    assert not Captured("dynamo", "", (), fed=True).readable


def test_a_captured_graph_can_be_passed_to_another_backend() -> None:
    backend = Capture(inner="aot_eager")
    assert backend.__name__ == "capture, then aot_eager"
    module = torch.compile(nn.Linear(3, 2), backend=backend)
    with torch.profiler.profile() as profile:
        module(torch.randn(4, 3)).sum().backward()
    assert [graph.stage for graph in backend.graphs] == ["dynamo"]
    names = {event.key for event in profile.key_averages()}
    assert "CompiledFunctionBackward" in names
    assert CALL.format(stage="dynamo") not in names


class Baking(Capture):
    """Fault 27: treats parameters as constants."""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        run = super().__call__(graph, inputs)
        kept = [value.detach().clone() if isinstance(value, nn.Parameter) else None for value in inputs]
        return lambda *args: run(*(a if k is None else k for a, k in zip(args, kept, strict=True)))


def test_a_backend_that_keeps_weights_fails(store: Store) -> None:
    class Kept(UserBackend):
        def backend(self, mode: Mode) -> Capture:
            return Baking()

    record = judged(store, Kept(), "mlp")
    assert not [item.claim for item in record.evidence if not item.engaged]
    # It compiled with the parameters of draw 0; those of the next draw are written into the same tensors.
    first = record.why.splitlines()[0]
    assert first.startswith("out: view row")
    assert "[draw 1]" in first
    assert record.verdict is Verdict.FAIL


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(graph: fx.GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in graph.graph.nodes if n.op.startswith(("call", "get"))]


def test_expressions_of_constants_are_folded() -> None:
    def waves(x: Tensor) -> Tensor:
        ramp = torch.arange(4, dtype=torch.float32) / 4
        return x * torch.cos(ramp) + torch.ones(4)

    x = torch.randn(3, 4)
    expected = waves(x)
    graph = traced(waves, x)
    folding = FoldConstants()
    before = len(graph.graph.nodes)
    folding(graph.graph)
    graph.recompile()
    assert folding.sizes == [(before, len(graph.graph.nodes))]
    # One constant in place of three nodes; a single constructor stays.
    assert targets(graph) == ["_folded_cos", "mul.Tensor", "ones.default", "add.Tensor"]
    assert torch.equal(graph(x), expected)
    constant = graph.get_buffer("_folded_cos")
    assert torch.equal(constant, torch.cos(torch.arange(4) / 4))


def test_operators_that_draw_or_write_are_not_folded() -> None:
    def drawn(x: Tensor) -> Tensor:
        return x + torch.exp(torch.rand(4))

    def written(x: Tensor) -> Tensor:
        x.copy_(torch.ones(4) * 2)
        return x + 1

    for function in (drawn, written):
        graph = traced(function, torch.randn(4))
        FoldConstants()(graph.graph)
        names = targets(graph)
        assert ("rand.default" in names) == (function is drawn)
        assert ("copy_.default" in names) == (function is written)
        assert ("_folded_mul" in names) == (function is written)


def test_dynamic_sizes_are_not_folded() -> None:
    graph = make_fx(lambda x: x + torch.cos(torch.zeros(x.shape[0])), tracing_mode="symbolic")(torch.randn(5))
    FoldConstants()(graph.graph)
    assert "cos.default" in targets(graph)


def test_a_graph_without_a_module_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a graph with an owning module"):
        FoldConstants()(fx.Graph())


def test_each_pass_has_its_own_cache_key() -> None:
    class Other(FoldConstants):
        pass

    first = FoldConstants()
    assert first.uuid() == first.uuid()
    assert len({first.uuid(), FoldConstants().uuid(), Other().uuid()}) == 3


class DropsEffects(FoldConstants):
    """Fault 39: removes nodes whose result is not used, even if they write to a tensor."""

    def change(self, graph: fx.Graph) -> None:
        super().change(graph)
        for node in reversed(graph.nodes):
            if node.op == "call_function" and not node.users:
                graph.erase_node(node)


class DropsCasts(FoldConstants):
    """Fault 39: removes casts of returned values as redundant."""

    def change(self, graph: fx.Graph) -> None:
        super().change(graph)
        output = graph.output_node()
        for node in output.all_input_nodes:
            if node.target is torch.ops.prims.convert_element_type.default:
                output.replace_input_with(node, node.all_input_nodes[0])


class Planted(FxPass):
    def __init__(self, kind: type[FoldConstants]) -> None:
        self.kind = kind

    def make(self) -> FoldConstants:
        return self.kind()


@pytest.mark.slow
@needs_compiler
def test_a_pass_that_drops_a_write_fails(store: Store) -> None:
    healthy = judged(store, FxPass(), "spectrum", BACKWARD)
    assert healthy.verdict is Verdict.PASS, healthy.reason
    assert observed(healthy)["graphs that met the pass = 2, all of inductor's"] == 2
    caught = faults(judged(store, Planted(DropsEffects), "spectrum", BACKWARD))
    assert set(caught) == {"buffer:mean"}


@pytest.mark.slow
@needs_compiler
def test_a_pass_that_drops_a_cast_fails(store: Store) -> None:
    healthy = judged(store, FxPass(), "spectrum", FORWARD, "bfloat16")
    assert healthy.verdict is Verdict.PASS, healthy.reason
    record = judged(store, Planted(DropsCasts), "spectrum", FORWARD, "bfloat16")
    assert record.verdict is Verdict.FAIL
    assert record.why.splitlines()[0] == "out[1]: dtype: expected bfloat16, got float32"


@needs_compiler
def test_a_pass_that_changes_nothing_fails_the_evidence(store: Store) -> None:
    class Nothing(FoldConstants):
        def change(self, graph: fx.Graph) -> None:
            del graph

    record = judged(store, Planted(Nothing), "spectrum", FORWARD)
    assert record.verdict is Verdict.FAIL
    assert "not engaged: graphs that the pass made smaller >= 1: observed" in record.why


def test_capability_of_the_pass_by_device() -> None:
    answer = FxPass().capability(StubDevice("xla", ()))
    assert (answer.verdict, answer.code) == (Verdict.UNSUPPORTED, Code.NO_BACKEND)
    assert FxPass().accepts(workload("constants"))
    assert not FxPass().accepts(workload("linear"))
    assert UserBackend().capability(StubDevice("xla", ())).ok
