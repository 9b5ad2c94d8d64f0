"""A hundred mutated packages get a verdict, as a thousand do in `nox -s fuzz`; with the key each is found."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from process_harness import script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_package.py"


@pytest.fixture
def fuzz() -> ModuleType:
    pytest.importorskip("minisign")
    return script(SCRIPT)


@pytest.mark.slow
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
