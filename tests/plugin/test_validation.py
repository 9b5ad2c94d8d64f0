"""Techniques and workloads that could only mean fewer cases, or an unused oracle, are refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from accelcheck.core.foreign import ForeignCodeError
from accelcheck.devices.cpu import Cpu
from accelcheck.plugin.validation import devices, techniques, workloads
from accelcheck.techniques.eager import Eager
from accelcheck.techniques.matrix import Matrix
from accelcheck.workloads import builtin
from accelcheck.workloads.base import Problem, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

OWN = Matrix.load()
HOOK = "pytest_accel_workloads of conftest.py (conftest.pytest_accel_workloads)"


class Theirs(Eager):
    name = "theirs"


def make(generator: torch.Generator, extent: int) -> Problem:
    raise NotImplementedError


PLAIN = Workload("plain", "One.", make)


def checked(*found: Any) -> list[Workload]:
    return workloads([(HOOK, workload) for workload in found], OWN.workloads, OWN.techniques.values())


def test_what_is_built_in_is_what_the_checks_ask_for() -> None:
    assert techniques([("accelcheck", technique) for technique in OWN.techniques.values()], {}) == [
        *OWN.techniques.values()
    ]
    assert checked(*(replace(workload, name=f"{name}-2") for name, workload in builtin().items()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traits": frozenset({"liner"})}, "traits: unknown word 'liner'. Did you mean 'linear'?"),
        ({"modes": frozenset({"trian"})}, "modes: unknown word 'trian'. Did you mean 'train'?"),
        ({"dtypes": frozenset({"float23"})}, "dtypes: unknown word 'float23'. Did you mean 'float32'?"),
        ({"probes": frozenset({"one-hots"})}, "probes: unknown word 'one-hots'. Did you mean 'one-hot'?"),
        ({"features": frozenset({"stridde"})}, "features: unknown word 'stridde'. Did you mean 'strided'?"),
        ({"techniques": frozenset({"eagre"})}, "techniques: unknown word 'eagre'. Did you mean 'eager'?"),
        ({"traits": "linear"}, "traits: expected a set of texts, got the text 'linear'"),
        ({"modes": frozenset({1})}, "modes: expected texts, got 1"),
        ({"make": "make"}, "`make`: expected make(generator, extent), got 'make'"),
    ],
)
def test_a_workload_with_a_word_that_nobody_knows_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ForeignCodeError) as raised:
        checked(replace(PLAIN, **change))
    assert str(raised.value).startswith(f"{HOOK}: workload 'plain': {message}")


def test_a_device_with_a_feature_that_nobody_knows_is_refused() -> None:
    device = Cpu()
    device.features |= {"hots"}
    with pytest.raises(ForeignCodeError, match="features: unknown word 'hots'"):
        devices([("accelcheck", device)], {})


def test_a_trait_that_another_technique_asks_for_is_legal() -> None:
    class Asking(Eager):
        name = "asking"
        requires = frozenset({"of-their-own"})

    workload = replace(PLAIN, traits=frozenset({"of-their-own"}))
    assert workloads([(HOOK, workload)], {}, [*OWN.techniques.values(), Asking()]) == [workload]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([replace(PLAIN, name="mlp")], "accelcheck itself registers a workload named 'mlp' too: rename one"),
        ([PLAIN, replace(PLAIN)], f"{HOOK} registers a workload named 'plain' too: rename one"),
        ([Theirs()], "workload 'theirs': expected a Workload, got "),
    ],
)
def test_a_taken_name_or_another_thing_names_the_hook(found: list[Any], message: str) -> None:
    with pytest.raises(ForeignCodeError) as raised:
        checked(*found)
    assert str(raised.value).startswith(f"{HOOK}: {message}")


def test_one_thing_may_be_registered_twice() -> None:
    assert checked(PLAIN, PLAIN) == [PLAIN, PLAIN]


class Emulating(Theirs):
    def emulate(self, module: nn.Module, inputs: tuple[Any, ...]) -> nn.Module:
        return module


class Nameless(Theirs):
    promise = None  # type: ignore[assignment]  # that is the case


class Misspelt(Theirs):
    modes = frozenset({"forwards"})  # type: ignore[arg-type]  # that is the case


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            Emulating(),
            "technique 'theirs': it overrides `emulate`, which is called only where `oracle` is not 'float64'",
        ),
        (Nameless(), "technique 'theirs': set `promise`, a text"),
        (Misspelt(), "technique 'theirs': modes: unknown word 'forwards'. Did you mean 'forward'?"),
        (Eager(), "accelcheck itself registers a technique named 'eager' too: rename one"),
        (PLAIN, "technique 'plain': expected an instance of a subclass of Technique, got "),
    ],
)
def test_a_technique_that_cannot_do_what_it_says_is_refused(found: Any, message: str) -> None:
    with pytest.raises(ForeignCodeError) as raised:
        techniques([(HOOK, found)], OWN.techniques)
    assert str(raised.value).startswith(f"{HOOK}: {message}")


def test_an_emulation_with_a_name_is_accepted() -> None:
    class Named(Emulating):
        oracle = "theirs"

    assert techniques([(HOOK, Named())], OWN.techniques)
