"""The smallest part of a compiled graph that is wrong, and the script that it becomes, run alone in a fresh process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from process_harness import forked
from torch import fx

from accelcheck.explain.parts import GraphPart, PartShrinker, SmallestPart, last
from accelcheck.explain.script import LINES, FaultScript
from accelcheck.explain.source import NotWrittenError
from accelcheck.explain.subjects import PartSubject

aten = torch.ops.aten
BACKEND = """
import torch

@torch._dynamo.register_backend(name="planted")
def planted(graph, inputs):
    class Changed(torch.fx.Interpreter):
        def run_node(self, node):
            out = super().run_node(node)
            return out * 1.01 if {wrong} else out

    return Changed(graph).run
"""


@pytest.fixture(autouse=True)
def compilers() -> Any:
    yield
    torch.compiler.reset()


def backend(wrong: str) -> Mapping[str, Any]:
    """Arguments of a compiler whose results are too large where an expression of ``node`` holds."""
    scope: dict[str, Any] = {}
    exec(
        BACKEND.replace('@torch._dynamo.register_backend(name="planted")', "").format(wrong=wrong), scope
    )  # the text above
    return {"backend": scope["planted"]}


def traced(function: Callable[..., Any], *inputs: Any) -> GraphPart:
    """A part with the operators of a function."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph: fx.GraphModule = make_fx(function)(*inputs)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
        graph.recompile()
    return GraphPart(graph, inputs)


def chain(x: torch.Tensor) -> torch.Tensor:
    return (((x * 2).exp() + 1).sin() * 3).cos()


SIN = "'sin' in str(node.target)"


def shrunk(part: GraphPart, wrong: str) -> SmallestPart | None:
    return PartShrinker(backend(wrong), 300.0).shrink(part, 0)


def names(smallest: SmallestPart | None) -> list[str]:
    assert smallest is not None
    return [str(node.target.name()) for node in smallest.part.operators()]  # type: ignore[union-attr]  # they have one


def test_as_few_operators_are_left_as_show_the_fault() -> None:
    part = traced(lambda x: chain(x)[..., :4].sin(), torch.linspace(-1, 1, 64).reshape(8, 8))
    smallest = shrunk(part, "node.name == 'sin_1'")
    assert names(smallest) == ["aten::sin"]
    assert smallest is not None
    assert smallest.values == "ones"
    assert [list(tensor.shape) for tensor in smallest.part.inputs] == [[1, 1]]


def test_a_fault_of_two_operators_together_keeps_both() -> None:
    smallest = shrunk(
        traced(lambda x: chain(x).add(1).sin(), torch.randn(6, 5)),
        "'sin_1' == node.name and 'add_1' in str(node.args[0])",
    )
    assert names(smallest) == ["aten::add.Tensor", "aten::sin"]


def test_one_of_several_results_is_taken_from_its_operator() -> None:
    part = traced(lambda x: aten.native_layer_norm(x * 2, [8], None, None, 1e-5)[0], torch.randn(4, 8))
    smallest = last(part, 0, 1)
    assert [getattr(node.target, "__name__", "") for node in smallest.operators()][-1] == "getitem"
    assert len(smallest.operators()) == 2


def test_a_part_that_is_right_has_no_smallest() -> None:
    assert shrunk(traced(chain, torch.randn(3, 4)), "False") is None


def ran(smallest: SmallestPart, folder: Path, wrong: str) -> subprocess.CompletedProcess[str]:
    """The script, with a compiler of this fault."""
    (folder / "planted_backend.py").write_text(BACKEND.format(wrong=wrong))
    named = SmallestPart(smallest.part, smallest.finding, smallest.values, 0, {"backend": "planted", "dynamic": False})
    path = folder / f"script-{wrong == 'False'}.py"
    FaultScript(PartSubject(named), "cpu", "A wrong graph.", ("planted_backend",)).write(path)
    assert len(path.read_text().splitlines()) <= LINES
    return forked(path)


def many(x: torch.Tensor) -> torch.Tensor:
    for number in range(12):
        x = x * 1.5 - number
    return x.add(1).sin()


def halves(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).add(1).sin()


@pytest.mark.slow
@pytest.mark.parametrize("function", [many, halves])
def test_the_script_fails_alone_while_the_fault_is_there(tmp_path: Path, function: Callable[..., Any]) -> None:
    part = traced(function, torch.linspace(-1, 1, 60).reshape(6, 10))
    wrong = "node.target in (torch.sin, torch.ops.aten.sin.default)"
    smallest = PartShrinker(backend(wrong), 0.0).shrink(part, 0)  # as it is: all operators must be written down
    assert smallest is not None
    assert len(smallest.part.operators()) == len(part.operators())
    fails, passes = ran(smallest, tmp_path, wrong), ran(smallest, tmp_path, "False")
    assert (fails.returncode, passes.returncode) == (1, 0), fails.stderr + passes.stderr
    assert "measured 0.000e+00" not in passes.stdout  # FP64 does not round within
    assert "aten::sin: out[0], " in fails.stdout
    assert "measured" in fails.stdout


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.bfloat16() @ x.bfloat16().t()).float(),
        lambda x: (x.bfloat16() @ x.bfloat16().t()).float() + 1,
        lambda x: aten.native_layer_norm(x.bfloat16() * 3, [20], None, None, 1e-5)[0].float().sin(),
        lambda x: x.half().sum(0).double().exp().float(),
    ],
)
def test_a_right_graph_with_half_precision_within_is_right(function: Callable[..., Any]) -> None:
    part = traced(function, torch.randn(24, 20, generator=torch.Generator().manual_seed(3)))
    assert part.found({"backend": "eager"}).faults == ()


@pytest.mark.slow
def test_a_compiler_without_a_name_has_no_script() -> None:
    smallest = shrunk(traced(chain, torch.randn(3, 4)), SIN)
    assert smallest is not None
    with pytest.raises(NotWrittenError, match="which has no name"):
        PartSubject(smallest)


def test_what_is_no_operator_has_no_script() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.sin, (graph.placeholder("x"),)),))
    part = GraphPart(fx.GraphModule(torch.nn.Module(), graph), (torch.ones(2),))
    smallest = SmallestPart(part, part.found({"backend": "eager"}), "ones", 0, {})
    with pytest.raises(NotWrittenError, match="is no operator"):
        PartSubject(smallest)
