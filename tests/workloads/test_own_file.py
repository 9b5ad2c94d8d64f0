"""Models that a file makes: ``FILE:FUNCTION``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelcheck.core.case import Mode
from accelcheck.core.foreign import ForeignCodeError
from accelcheck.workloads.base import Workload
from accelcheck.workloads.own_file import workloads_of

HEAD = """
import random
import numpy as np
import torch
from torch import nn

def net():
    return nn.Linear(4, 3)

X = torch.ones(5, 4)
"""


def made(tmp_path: Path, body: str, spec: str = "net.py", file: str = "net.py") -> tuple[Workload, ...]:
    (tmp_path / file).write_text(HEAD + body)
    return workloads_of(spec, tmp_path)


def test_a_name_that_is_taken_has_the_functions_name_too(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(HEAD + "def make():\n    return net(), (X,)\n")
    names = [[w.name for w in workloads_of("net.py", tmp_path, frozenset(taken))] for taken in ((), ("net", "mlp"))]
    assert names == [["net"], ["net.make"]]


@pytest.mark.parametrize(
    "returned",
    ["net(), (X,)", "net(), (X,), {}", "{'model': net(), 'inputs': (X,)}", "workload_of(net(), (X,), name='net')"],
)
def test_a_function_returns_a_model_in_any_of_the_forms(tmp_path: Path, returned: str) -> None:
    (workload,) = made(tmp_path, f"from accelcheck.api import workload_of\ndef make():\n    return {returned}\n")
    assert workload.name == "net"
    assert workload.modes == {Mode.FORWARD, Mode.BACKWARD, Mode.SPEED}


def test_data_and_a_metric_are_a_workload_of_their_own(tmp_path: Path) -> None:
    body = (
        "def make():\n"
        "    return {'model': net(), 'inputs': (X,), 'data': [(X, None)], 'metric': lambda out, _: out.mean(1)}\n"
    )
    assert [(workload.name, Mode.ACCURACY in workload.modes) for workload in made(tmp_path, body)] == [
        ("net", False),
        ("net.accuracy", True),
    ]


def test_batches_beside_inputs_are_a_training_of_its_own(tmp_path: Path) -> None:
    body = (
        "def make():\n"
        "    return {'model': net(), 'inputs': (X[:2],), 'batches': [(X, X[:, :3])], 'loss': nn.functional.mse_loss,\n"
        "            'optimizer': lambda parameters: torch.optim.SGD(parameters, lr=0.1)}\n"
    )
    forward, training = made(tmp_path, body)
    assert [(workload.name, workload.modes) for workload in (forward, training)] == [
        ("net", frozenset({Mode.FORWARD, Mode.BACKWARD, Mode.SPEED})),
        ("net.training", frozenset({Mode.TRAIN, Mode.TRAIN_SPEED})),
    ]
    assert [tuple(workload.problem(1).inputs[0].shape) for workload in (forward, training)] == [(2, 4), (5, 4)]


def test_the_function_names_the_workload_unless_it_is_make(tmp_path: Path) -> None:
    (workload,) = made(tmp_path, "def Small_net():\n    return net(), (X,)\n", "net.py:Small_net")
    assert workload.name == "net.small-net"
    (workload,) = made(
        tmp_path / "",
        "def other():\n    return {'model': net(), 'inputs': (X,), 'name': 'mine'}\n",
        "./mine.py:other",
        "mine.py",
    )
    assert workload.name == "mine"


def test_random_numbers_are_the_same_in_each_process_and_the_callers_go_on(tmp_path: Path) -> None:
    body = (
        "def make():\n"
        "    return net(), (torch.full((5, 4), random.random()) + torch.from_numpy(np.random.rand(5, 4)).float(),)\n"
    )
    torch.manual_seed(3)
    before = torch.rand(1)
    torch.manual_seed(3)
    (first,) = made(tmp_path, body)
    assert torch.equal(torch.rand(1), before)
    (tmp_path / "more").mkdir()
    torch.rand(7)
    (second,) = made(tmp_path / "more", body)
    a, b = first.problem(first.make.seed), second.problem(second.make.seed)  # type: ignore[attr-defined]  # `Redrawn`
    assert torch.equal(a.inputs[0], b.inputs[0])
    assert all(map(torch.equal, a.module.parameters(), b.module.parameters()))


def test_what_lies_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_the_model.py").write_text("WIDTH = 4\n")
    (workload,) = made(
        tmp_path, "import beside_the_model\ndef make():\n    return net(), (torch.ones(2, beside_the_model.WIDTH),)\n"
    )
    assert workload.name == "net"


@pytest.mark.parametrize(
    ("body", "spec", "words"),
    [
        ("", "nett.py:make", "there is no file .*nett.py: expected FILE:FUNCTION, such as path/to/model.py:make"),
        ("def mak():\n    pass\n", "net.py:make", "net.py:make: unknown function 'make'. Did you mean 'mak'"),
        ("1 / 0\n", "net.py:make", "net.py:make: the file raised ZeroDivisionError: division by zero"),
        ("def make():\n    return {}['x']\n", "net.py", r"net.py: make\(\) raised KeyError: 'x'"),
        ("def make():\n    return net()\n", "net.py",
            r"net.py: expected \(model, inputs\), .* or a dict .*, got Linear"),
        ("def make():\n    return net\n", "net.py", "got function"),
        ("def make():\n    return (net(),)\n", "net.py", "got a tuple of 1"),
        ("def make():\n    return net(), X\n", "net.py",
            r"inputs: expected a tuple of the positional arguments, got Tensor; for one argument give \(x,\)"),
        ("def make():\n    return {'modle': net()}\n", "net.py", "unknown key 'modle'. Did you mean 'model'"),
        ("def make():\n    return {'inputs': (X,)}\n", "net.py", "got a dict without 'model'"),
        ("def make():\n    return {'model': net(), 'inputs': (X,), 'data': []}\n", "net.py",
            "accuracy needs data and a metric: give both"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_named_in_command_words(tmp_path: Path, body: str, spec: str, words: str) -> None:
    with pytest.raises(ForeignCodeError, match=words):
        made(tmp_path, body, spec)
