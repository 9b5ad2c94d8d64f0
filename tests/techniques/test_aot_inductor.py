"""AOTInductor: a package runs from a shared library, with its own weights or the module's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from marks import needs_compiler
from technique_harness import StubDevice, engaged, named
from torch import nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Mode, Verdict
from accelcheck.techniques.compilation import aot_inductor
from accelcheck.techniques.compilation.aot_inductor import TECHNIQUES, AotInductor, Package, mapped_files
from accelcheck.workloads.base import Problem, Program

BAKED, SUPPLIED = (cast("AotInductor", named(TECHNIQUES, name)) for name in ("aot-inductor", "aot-inductor-constants"))
CPU = StubDevice(features=("inductor", "strided"))


def small(hidden: int = 12) -> Problem:
    torch.manual_seed(0)
    return Problem(nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 9)), (torch.randn(4, 10),))


def scaled(program: Program) -> torch.Tensor:
    """Change the parameters in place; returns the module's new output."""
    with torch.no_grad():
        for parameter in program.module.parameters():
            parameter.mul_(1.5)
        out: torch.Tensor = program.module(*program.inputs)
    return out


@pytest.fixture(scope="module")
def compiled() -> Iterator[Program]:
    """Compiled once, since it takes seconds. The first bias has 8 elements, the second 9."""
    program = Program.of(small(hidden=8))
    SUPPLIED.prepare(program, Mode.FORWARD, CPU)
    yield program
    SUPPLIED.finish()


@pytest.fixture
def supplied(compiled: Program) -> Iterator[Program]:
    """The compiled program; its parameters are restored afterwards."""
    before = {name: tensor.clone() for name, tensor in compiled.module.state_dict().items()}
    compiled.call.entries.clear()  # type: ignore[union-attr]  # what another test called
    yield compiled
    compiled.module.load_state_dict(before)


@needs_compiler
@pytest.mark.slow
def test_a_package_runs_from_its_shared_library_with_the_weights_it_was_compiled_with() -> None:
    program = Program.of(small())
    with torch.no_grad():
        expected = program.module(*program.inputs)
    BAKED.prepare(program, Mode.FORWARD, CPU)
    with BAKED.watch("cpu") as log:
        out = program.run(Mode.FORWARD)["out"]
    evidence = list(BAKED.evidence(program, log, Mode.FORWARD, CPU))
    assert [item.claim for item in evidence if not item.engaged] == []
    torch.testing.assert_close(out, expected)
    package = program.call
    assert isinstance(package, Package)
    assert package.size > 10_000
    # Not the module's later values, which is why `bakes` is True.
    assert BAKED.bakes
    assert not torch.allclose(scaled(program), expected)
    torch.testing.assert_close(program.run(Mode.FORWARD)["out"], expected)
    BAKED.finish()


@pytest.mark.slow
@needs_compiler
def test_a_package_without_weights_follows_the_module(supplied: Program) -> None:
    with torch.no_grad():
        expected = supplied.module(*supplied.inputs)
    torch.testing.assert_close(supplied.run(Mode.FORWARD)["out"], expected)
    weight: Any = supplied.module.get_parameter("2.weight")
    with torch.no_grad():
        weight.mul_(1.5)
        changed = supplied.module(*supplied.inputs)
    assert not torch.allclose(changed, expected)
    torch.testing.assert_close(supplied.run(Mode.FORWARD)["out"], changed)


@needs_compiler
@pytest.mark.slow
def test_small_parameters_are_literals_which_fails_the_evidence(supplied: Program) -> None:
    """Torch inlines vectors of up to 8 elements, and later changes of these are silently lost."""
    with SUPPLIED.watch("cpu") as log:
        supplied.run(Mode.FORWARD)
    evidence = SUPPLIED.evidence(supplied, log, Mode.FORWARD, CPU)
    missing = {item.claim: item.observed for item in evidence if not item.engaged}
    assert missing == {"parameters that the package keeps for itself = 0": "0.bias"}
    before = supplied.run(Mode.FORWARD)["out"]
    with torch.no_grad():
        supplied.module.get_parameter("0.bias").add_(3.0)
    torch.testing.assert_close(supplied.run(Mode.FORWARD)["out"], before)


def test_the_folder_of_a_package_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    class Fake(Package):
        def __init__(self, program: Program, folder: Path, options: Any) -> None:
            folders.append(folder)
            self.libraries, self.mapped, self.size = ["a.so"], ["/a.so"], 1
            super(Package, self).__init__(program.module, lambda x: x)

    technique = AotInductor()
    monkeypatch.setattr(technique, "package", Fake)
    engaged(technique, small(), device=CPU)
    assert not folders[0].exists()


@pytest.mark.parametrize(
    ("attribute", "value", "claim"),
    [
        ("libraries", [], "shared libraries in the package of 1 bytes >= 1"),
        ("mapped", [], "of them mapped into the process >= 1"),
        ("calls", 0, "calls of the package >= 1"),
        ("entries", ["Linear"], "Python forwards entered = 0"),
    ],
)
def test_each_observation_can_fail(attribute: str, value: Any, claim: str) -> None:
    package = object.__new__(Package)
    package.libraries, package.mapped, package.size, package.calls, package.entries = ["a.so"], ["/a.so"], 1, 1, []
    assert all(item.engaged for item in package.evidence())
    setattr(package, attribute, value)
    assert [item.claim for item in package.evidence() if not item.engaged] == [claim]


def test_mapped_files_are_those_of_this_process() -> None:
    assert any("libtorch_cpu" in file for file in mapped_files())
    assert not any(file.startswith("anon_inode") for file in mapped_files() if file.endswith(".so"))


def test_capabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BAKED.capability(CPU).ok or shutil.which("g++") is None
    xla = SUPPLIED.capability(StubDevice("xla", ()))
    assert (xla.code, xla.verdict) == (Code.NO_BACKEND, Verdict.UNSUPPORTED)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    absent = BAKED.capability(CPU)
    assert (absent.code, absent.verdict) == (Code.NO_PACKAGE, Verdict.UNAVAILABLE)


def test_only_packages_without_weights_are_prepared_once() -> None:
    assert (BAKED.bakes, SUPPLIED.bakes) == (True, False)
    assert SUPPLIED.options == {"aot_inductor.package_constants_in_so": False}
    assert aot_inductor.TECHNIQUES == (BAKED, SUPPLIED)
