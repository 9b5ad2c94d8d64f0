"""Dynamo's recompilations: graphs are counted and results judged call by call, so that stale code fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_harness import Bed, bench, built_in, case, faults
from technique_harness import StubDevice, named, workload
from torch import nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation import dynamo
from accelcheck.techniques.compilation.compile import reset_compiler
from accelcheck.techniques.compilation.dynamo import (
    TECHNIQUES,
    BoundedStream,
    ChangingCalls,
    CountedCalls,
    LimitedStream,
    StaleStream,
    StaticStream,
    Streamed,
)
from accelcheck.verify.oracle import Store
from accelcheck.workloads import stream
from accelcheck.workloads.base import Program

LENGTHS = frozenset({"stream-lengths", "stream-sides"})


OVERLOOKED = pytest.mark.xfail(
    bool(torch._dynamo.config.enable_cpp_symbolic_shape_guards),
    reason="torch 2.9 overlooks guards on sizes that it checks in C++, where a float attribute is one of its symbols",
    strict=False,  # torch_xla, if a test has imported it, makes float attributes constants
)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    reset_compiler()


def judged(store: Store, technique: Technique, name: str, mode: Mode = Mode.FORWARD) -> Record:
    """The engine's record of a case, on a device without a code generator: these tests are about Dynamo."""
    workload = built_in()[name]
    return bench(store, technique, workload, Bed()).run(case(workload, mode, technique=technique.name))


def made(kind: type[Streamed], **arguments: Any) -> Any:
    """A variant with other arguments of torch.compile."""
    extra: dict[str, Any] = {"specialises": False} if issubclass(kind, BoundedStream) else {}
    settings: dict[str, Any] = {"specialize_float": True}  # see OVERLOOKED
    if kind is LimitedStream:
        settings |= {"recompile_limit": dynamo.LIMIT, "fail_on_recompile_limit_hit": False}
    compiled = {"backend": "aot_eager", **arguments}
    return kind("x", "", arguments=compiled, workloads=LENGTHS, early=frozenset(), settings=settings, **extra)


def no_guards(guards: Sequence[Any]) -> list[bool]:
    """No guards: the first compiled code serves every call."""
    return [False] * len(guards)


def unguarded(kind: type[Streamed], **arguments: Any) -> Any:
    return made(kind, options={"guard_filter_fn": no_guards}, **arguments)


@torch._dynamo.register_backend
def baking(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that treats parameters as constants."""
    kept = [value.detach().clone() if isinstance(value, nn.Parameter) else None for value in inputs]

    def run(*args: Any) -> Any:
        return graph.forward(*(arg if constant is None else constant for arg, constant in zip(args, kept, strict=True)))

    return run


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("dynamo-guards", "stream-tokens"),
        ("dynamo-stream-static", "stream-lengths"),
        ("dynamo-stream-automatic", "stream-lengths"),
        ("dynamo-stream-automatic", "stream-sides"),
        ("dynamo-stream-dynamic", "stream-lengths"),
        pytest.param("dynamo-stream-dynamic", "stream-sides", marks=OVERLOOKED),
        ("dynamo-stream-limit", "stream-lengths"),
        ("dynamo-branch", "stream-signs"),
        ("dynamo-branch", "dynamic-depth"),
        ("dynamo-stale", "stream-lengths"),
        pytest.param("dynamo-stale", "stream-sides", marks=OVERLOOKED),
    ],
)
def test_each_technique_passes(store: Store, name: str, stream: str) -> None:
    technique = named(TECHNIQUES, name)
    assert technique.accepts(built_in()[stream])
    record = judged(store, technique, stream)
    assert record.verdict is Verdict.PASS, record.why


def test_gradients_for_every_size_are_judged(store: Store) -> None:
    record = judged(store, named(TECHNIQUES, "dynamo-guards"), "stream-tokens", Mode.BACKWARD)
    assert record.verdict is Verdict.PASS, record.why


def test_a_dtype_a_rank_and_a_shape_are_counted_one_by_one(store: Store) -> None:
    record = judged(store, named(TECHNIQUES, "dynamo-guards"), "stream-tokens")
    seen = {item.claim: item.observed for item in record.evidence}
    told = "first 1, dtype 1, rank 1, shape 1, known 0, known 0"
    assert seen["graphs compiled by each call = 1, 1, 1, 1, 0, 0"] == told
    assert seen["graphs compiled when the same kinds came again = 0"] == 0


def test_news_of_inputs() -> None:
    inputs = (torch.ones(2), torch.ones(2), torch.ones(2).int(), torch.ones(3), torch.ones(1, 2), torch.ones(3))
    assert dynamo.news(inputs) == ["first", "known", "dtype", "shape", "rank", "known"]


def test_a_graph_for_each_size_fails_as_dynamic(store: Store) -> None:
    record = judged(store, made(BoundedStream, dynamic=False), "stream-lengths")
    assert record.verdict is Verdict.FAIL
    assert record.why.startswith("not engaged: graphs compiled over 4 sizes from 1 to 1: observed 4: ")
    assert record.why.count("size mismatch at index 0. expected 12") == 3


def test_one_graph_for_all_sizes_fails_as_static(store: Store) -> None:
    record = judged(store, made(StaticStream, dynamic=True), "stream-lengths")
    assert record.why == (
        "not engaged: graphs compiled by each call = 1, 1, 0, 1, 0, 1, 0, 0, 0: "
        "observed first 1, shape 0, known 0, shape 0, known 0, shape 0, known 0, known 0, known 0"
    )


def test_beyond_the_limit_calls_run_eagerly(store: Store) -> None:
    record = judged(store, named(TECHNIQUES, "dynamo-stream-limit"), "stream-lengths")
    seen = {item.claim: item.observed for item in record.evidence}
    # Of the lengths 12, 17, 12, 24, 12, 9, 17, 24 and 12, only the first two are compiled.
    assert seen["compiled regions entered in 9 calls = 6"] == 6
    assert seen["functions at the limit of recompilation = 1"] == 1


def test_a_limit_that_is_not_reached_fails_the_evidence(store: Store) -> None:
    record = judged(store, made(LimitedStream, dynamic=True), "stream-lengths")
    assert "not engaged: graphs compiled = 2, the limit: observed 1" in record.why
    assert "not engaged: functions at the limit of recompilation = 1: observed 0" in record.why


def test_no_technique_falls_back_to_eager_silently() -> None:
    technique = made(StaticStream, dynamic=False)
    program = Program.of(built_in()["stream-lengths"].problem(0))
    technique.prepare(program, Mode.FORWARD, StubDevice())
    try:
        with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(Exception, match="recompile_limit"):
            program.run(Mode.FORWARD)
    finally:
        technique.finish()


def test_eager_in_place_of_compiled_fails_the_evidence() -> None:
    technique = named(TECHNIQUES, "dynamo-stream-static")
    program = Program.of(built_in()["stream-lengths"].problem(0))
    technique.prepare(program, Mode.FORWARD, StubDevice())
    program.extras["feed"].network = dynamo.network_of(program)
    with technique.watch("cpu") as log:
        program.run(Mode.FORWARD)
    missing = [item.claim for item in technique.evidence(program, log, Mode.FORWARD, StubDevice()) if not item.engaged]
    technique.finish()
    assert missing[:2] == ["backend is aot_eager", "compiled regions entered in 9 calls = 9"]
    assert missing[2].startswith("graphs compiled by each call")


def test_both_sides_of_a_branch_run_compiled(store: Store) -> None:
    record = judged(store, named(TECHNIQUES, "dynamo-branch"), "stream-signs")
    seen = {item.claim: item.observed for item in record.evidence}
    assert seen["graph breaks >= 1"] == 2
    assert seen["compiled regions entered in 4 calls = 8"] == 8
    assert seen["continuations entered = 2"] == 2


def test_a_branch_without_data_fails_the_evidence(store: Store) -> None:
    record = judged(store, made(dynamo.BranchStream), "stream-lengths")
    assert "not engaged: graph breaks >= 1: observed 0" in record.why


# Fault 26: code that is kept for another size.
def test_a_kernel_for_another_size_fails(store: Store) -> None:
    assert judged(store, made(StaticStream, dynamic=False), "stream-lengths").verdict is Verdict.PASS
    caught = faults(judged(store, unguarded(StaticStream, dynamic=False), "stream-lengths"))
    # The first size keeps its own code and is right; all others divide by the first size.
    wrong = {path for path, views in caught.items() if path.startswith("out") and any("view" in v for v in views)}
    assert wrong == {"out[1]", "out[3]", "out[5]", "out[6]", "out[7]"}


@pytest.mark.slow
def test_a_stale_branch_on_the_size_fails(store: Store) -> None:
    assert judged(store, made(BoundedStream, dynamic=True), "stream-sides").verdict is Verdict.PASS
    caught = faults(judged(store, unguarded(BoundedStream, dynamic=True), "stream-sides"))
    # One graph serves all sizes, and takes the branch of the first, short one.
    wrong = {path for path in caught if path.startswith("out")}
    assert wrong == {"out[1]", "out[3]", "out[6]", "out[7]"}


# Values that are kept when they change: attributes, globals, and parameters (fault 27).
@pytest.mark.slow
@pytest.mark.parametrize("word", ["scale", "GAIN"])
def test_a_stale_attribute_or_global_fails(store: Store, word: str) -> None:
    def all_but_one(guards: Sequence[Any]) -> list[bool]:
        return [word not in guard.name for guard in guards]

    planted = made(StaleStream, dynamic=False, options={"guard_filter_fn": all_but_one})
    planted.settings = {"recompile_limit": dynamo.RECOMPILATIONS, "specialize_float": True}
    caught = faults(judged(store, planted, "stream-lengths"))
    wrong = {path for path, views in caught.items() if path.startswith("out") and any("view" in v for v in views)}
    # Sizes that first came with a change keep it; they are wrong without the change.
    assert wrong
    assert "out[0]" not in wrong


@pytest.mark.slow
def test_a_stale_parameter_fails(store: Store) -> None:
    caught = faults(judged(store, made(StaleStream, backend="baking"), "stream-lengths"))
    assert {path for path in caught if path.startswith("out")}
    # Without changes between calls, the parameters of further draws still show it.
    record = judged(store, made(StaticStream, backend="baking", dynamic=False), "stream-lengths")
    assert "[draw 1]" in record.why
    assert record.verdict is Verdict.FAIL


def test_every_change_doubles_the_output_and_is_undone() -> None:
    problem = built_in()["stream-sides"].problem(0)
    net = problem.module.net
    assert isinstance(net, stream.Centred)
    before, kept = {name: p.clone() for name, p in net.named_parameters()}, list(net.parameters())
    with torch.no_grad():
        plain = net(problem.inputs[1])
        changes = ChangingCalls(net, net).changes
        for change in changes:
            with change(net):
                assert torch.equal(net(problem.inputs[1]), 2 * plain), change.__name__
            assert torch.equal(net(problem.inputs[1]), plain), change.__name__
        for change in changes:
            with pytest.raises(ZeroDivisionError), change(net):
                raise ZeroDivisionError
    assert torch.equal(net(problem.inputs[1]), plain)
    assert stream.GAIN == 1.0
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert [id(p) for p in net.parameters()] == [id(p) for p in kept]


def test_sizes_come_with_other_changes_in_each_run() -> None:
    problem = built_in()["stream-lengths"].problem(0)
    net = problem.module.net
    assert isinstance(net, stream.Centred)
    seen: list[tuple[float, float]] = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append((net.scale, stream.GAIN))
        return x

    feed = ChangingCalls(spy, net)
    feed(*problem.inputs)
    first, seen = seen, []
    feed(*problem.inputs)
    assert first != seen
    assert first[0] == seen[0] == (1.0, 1.0)


def test_changes_need_the_network_of_stream_lengths() -> None:
    with pytest.raises(TypeError, match="expected the network of stream-lengths, got Linear"):
        ChangingCalls(nn.Identity(), nn.Linear(1, 1))


def test_finish_restores_settings() -> None:
    config = torch._dynamo.config
    before = config.recompile_limit
    technique = named(TECHNIQUES, "dynamo-stream-limit")
    program = Program.of(built_in()["stream-lengths"].problem(0))
    technique.prepare(program, Mode.FORWARD, StubDevice())
    assert config.recompile_limit == dynamo.LIMIT
    technique.finish()
    assert config.recompile_limit == before
    assert not config.fail_on_recompile_limit_hit


@pytest.mark.slow
def test_a_graph_that_another_program_cached_brings_no_guards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled: dict[str, int] = {}
    for name in ("stream-sides", "stream-lengths"):  # where rows are few, both have the same graph
        technique = made(BoundedStream, backend="inductor", dynamic=True)
        program = Program.of(built_in()[name].problem(0))
        technique.prepare(program, Mode.FORWARD, StubDevice())
        try:
            program.run(Mode.FORWARD)
        finally:
            technique.finish()
        compiled[name] = sum(program.extras[dynamo.FEED].runs[0])
    assert compiled == {"stream-sides": 2, "stream-lengths": 1}


def test_counted_calls_count_graphs_by_run() -> None:
    feed = CountedCalls(lambda x: x)
    feed(torch.ones(1), torch.ones(2))
    feed(torch.ones(3))
    assert feed.runs == [[0, 0], [0]]


def test_capabilities() -> None:
    xla = StubDevice("xla", ())
    answer = named(TECHNIQUES, "dynamo-stream-automatic").capability(xla)
    assert (answer.verdict, answer.code) == (Verdict.UNSUPPORTED, Code.NO_FEATURE)
    assert "automatic_dynamic_shapes" in answer.reason
    for technique in TECHNIQUES:
        if technique.name != "dynamo-stream-automatic":
            assert technique.capability(xla).ok
        assert technique.capability(StubDevice("npu", ())).ok


def test_each_technique_accepts_its_own_streams() -> None:
    for technique in TECHNIQUES:
        assert not technique.accepts(workload("resizable"))
        # A stream of another package is tried, but for changes of a network that only accelcheck's own has.
        assert technique.accepts(workload("stream")) is (technique.name != "dynamo-stale")
        assert not technique.accepts(built_in()["mlp"])
