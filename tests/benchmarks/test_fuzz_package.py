"""A hundred mutated packages get a verdict, as a thousand do in `nox -s fuzz`; with the key each is found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_package.py"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("minisign")
    spec = importlib.util.spec_from_file_location("fuzz_package_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_mutated_package_gets_a_verdict(fuzz: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    status = fuzz.main(["--count", "51", "--seed", "1"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert (
        "102 mutated packages: 102 got a verdict, 96 were found altered, 6 cannot be told without a signature"
        in printed
    )


def test_a_verification_that_sees_nothing_is_told(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Blind:
        intact = True

    monkeypatch.setattr(fuzz, "verify", lambda *_: Blind())
    assert fuzz.main(["--count", "17"]) == 1
    assert capsys.readouterr().out.count("not found") == 17 + 15
