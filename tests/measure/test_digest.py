"""Dependencies of the digest of a timed case."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcheck.measure.digest import digest
from accelcheck.workloads.attention import Attention
from accelcheck.workloads.base import Problem

CASE = "eager/toy/cpu/float32/train-speed"


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.factor
        return out


class Maker:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def make(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.rate)


def typed(dtype: torch.dtype, out: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(out.to(dtype), target.to(dtype))


def made_by(maker: Maker, parameters: Any) -> torch.optim.Optimizer:
    return maker.make(parameters)


def weighed(part: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return part * functional.mse_loss(out, target)

    return loss


def problem(module: nn.Module | None = None, **changes: Any) -> Problem:
    made = Problem(
        Scaled() if module is None else module,
        (torch.randn(3, 4),),
        target=torch.randn(3, 4),
        loss=functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        steps=1,
    )
    return replace(made, **changes)


def test_values_do_not_count() -> None:
    assert digest(CASE, problem()) == digest(CASE, problem())
    assert len(digest(CASE, problem())) == 8


@pytest.mark.parametrize(
    "changed",
    [
        lambda: problem(Scaled(3.0)),
        lambda: problem(nn.Linear(4, 4)),
        lambda: problem(inputs=(torch.randn(5, 4),)),
        lambda: problem(inputs=(torch.randn(3, 4, dtype=torch.bfloat16),)),
        lambda: problem(target=None),
        lambda: problem(loss=functional.l1_loss),
        lambda: problem(loss=lambda out, target: (out - target).sum()),
        lambda: problem(optimizer=partial(torch.optim.SGD, lr=0.2)),
        lambda: problem(optimizer=partial(torch.optim.Adam, lr=0.1)),
        lambda: problem(steps=2),
        lambda: problem(loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
        lambda: problem(loss=nn.CrossEntropyLoss(label_smoothing=0.2)),
        lambda: problem(loss=weighed(0.5)),
        lambda: problem(loss=weighed(0.25)),
        lambda: problem(optimizer=Maker(0.1).make),
        lambda: problem(optimizer=Maker(0.2).make),
    ],
)
def test_what_the_work_depends_on_counts(changed: Callable[[], Problem]) -> None:
    assert digest(CASE, changed()) != digest(CASE, problem())
    assert digest(CASE, changed()) == digest(CASE, changed())


def test_what_is_bound_to_a_loss_or_an_optimizer_counts() -> None:
    for first, other in (
        (
            problem(loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
            problem(loss=nn.CrossEntropyLoss(label_smoothing=0.2)),
        ),
        (problem(loss=weighed(0.5)), problem(loss=weighed(0.25))),
        (problem(loss=partial(typed, torch.float32)), problem(loss=partial(typed, torch.bfloat16))),
        (problem(optimizer=Maker(0.1).make), problem(optimizer=Maker(0.2).make)),
        (problem(optimizer=partial(made_by, Maker(0.1))), problem(optimizer=partial(made_by, Maker(0.2)))),
    ):
        assert digest(CASE, first) != digest(CASE, other)


def test_the_case_counts() -> None:
    assert digest("eager/other/cpu/float32/speed", problem()) != digest(CASE, problem())


def test_a_setting_that_a_module_does_not_print_counts() -> None:
    causal, full = (problem(Attention(causal=causal)) for causal in (True, False))
    assert repr(causal.module) == repr(full.module)
    assert digest(CASE, causal) != digest(CASE, full)


def test_source_counts_and_comments_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(number: int, forward: str) -> str:
        path = tmp_path / f"written{number}.py"
        text = f"from torch import nn\nclass Written(nn.Module):\n    def forward(self, x):\n{forward}"
        path.write_text(text)
        module = ModuleType("written")
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, "written", module)
        exec(compile(text, path, "exec"), vars(module))
        return digest(CASE, problem(module.Written()))

    plain = of(1, "        return x + 1\n")
    assert of(2, "        # one more\n        return (x + 1)\n") == plain
    assert of(3, "        return x + 2\n") != plain


@pytest.mark.slow
def test_every_process_has_the_same(tmp_path: Path) -> None:
    code = """
from accelcheck.core.case import Mode
from accelcheck.measure.digest import digest
from accelcheck.workloads.speed import WORKLOADS
print([digest("a", workload.problem(3)) for workload in WORKLOADS])
"""
    result = {subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True) for _ in range(2)}
    assert len(result) == 1
    assert len(set(eval(result.pop()))) > 3
