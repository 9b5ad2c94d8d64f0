"""Places of the pages that ledgers refer to: in a checkout, and in a package installed from a wheel."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from plugin_harness import Suite, only

import accelcheck
from accelcheck.report import terminal

ROOT = Path(accelcheck.__file__).parents[1]


def test_a_page_is_found_in_a_checkout() -> None:
    assert terminal.place(terminal.FINDINGS) == ROOT / "docs" / "findings.md"
    assert terminal.place("docs/nothing.md") is None


def test_a_page_is_found_where_the_wheel_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    path = tmp_path / shipped[terminal.FINDINGS]
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(accelcheck, "__file__", str(tmp_path / "accelcheck" / "__init__.py"))
    assert terminal.place(terminal.FINDINGS) == path


@pytest.mark.slow
def test_a_run_says_where_a_ledgers_page_is(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = Suite(pytester, monkeypatch)
    ran = suite.run(*only("toy-value"), f"--accel-ledger={suite.ledger(link=terminal.FINDINGS)}")
    assert ran.record("toy-value").verdict == "xfail"
    assert ran.lines(r"  cpu: 1 x its factor is 1.5 \(docs/findings.md\)")
    assert ran.lines(f"  docs/findings.md: {ROOT / 'docs' / 'findings.md'}")
