"""Users' Triton kernels as operators: values and gradients, what a compiler's graph holds, and where they do not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from technique_harness import StubDevice
from torch import nn

from accelcheck.core.capability import Code
from accelcheck.devices.cpu import Cpu
from accelcheck.techniques import base
from accelcheck.techniques.compilation.capture import Capture
from accelcheck.techniques.fused import kernels

BY_NAME: dict[str, Any] = {technique.name: technique for technique in kernels.TECHNIQUES}


@pytest.mark.parametrize("shape", [(5, 48), (3, 1), (1, 128), (2, 3, 130)])
def test_the_kernels_give_the_values_and_gradients_of_swish(shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    along = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted, got = nn.SiLU()(x), BY_NAME["triton-custom-op"].loaded()(None, x)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got, x, along), torch.autograd.grad(wanted, x, along))


def test_the_compiler_takes_a_traced_operators_kernels_into_its_graphs() -> None:
    pytest.importorskip("triton")
    layer, backend = nn.SiLU(), Capture(differentiates=True)
    x = torch.ones(4, 48, requires_grad=True)
    compiled: Any = torch.compile(BY_NAME["triton-op"].loaded(), backend=backend)
    with pytest.raises(Exception, match="driver"):  # a launch needs a GPU; the graph is made before
        compiled(layer, x)
    taken = [str(node.target) for graph in backend.of("forward") for node in graph.nodes]
    assert sum("triton_kernel_wrapper" in name for name in taken) == 1, taken


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, base):
        monkeypatch.setattr(module, "installed", lambda _: False)
    answer = BY_NAME["triton-custom-op"].answer(Cpu())
    assert (answer.code, answer.ok) == (Code.NO_PACKAGE, False)
    assert "accelcheck[triton]" in str(answer)


def test_the_interpreter_runs_no_kernel_inside_of_a_graph() -> None:
    answer = BY_NAME["triton-op"].answer(Cpu())
    assert answer.code is Code.NO_BACKEND
    assert "triton-custom-op" in answer.action


@pytest.mark.parametrize("name", ["triton-op", "triton-custom-op"])
def test_a_device_that_is_neither_host_nor_gpu_has_no_triton(name: str) -> None:
    answer = BY_NAME[name].answer(StubDevice("xla"))
    assert (answer.code, answer.ok) == (Code.NO_BACKEND, False)
    assert "stub" in answer.reason
