"""docs/quantizer.md builds a technique in steps: each agrees with the page, and they add up to the example."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from page_steps import contents, steps
from plugin_harness import Suite

import accelcheck

ROOT = Path(accelcheck.__file__).parents[1]
PAGE, EXAMPLE = ROOT / "docs" / "quantizer.md", ROOT / "examples" / "quantizer" / "conftest.py"
STEPS = steps(PAGE)
COMMAND = re.compile(r"^\$ (pytest --pyargs accelcheck.suite .+)$", re.MULTILINE)
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?")


def comparable(text: str) -> str:
    """Without numbers, which another processor may round otherwise."""
    return NUMBER.sub("#", text).strip()


def lines_of(text: str) -> list[str]:
    return [comparable(line) for line in text.splitlines() if line.strip() not in {"", "..."}]


QUOTED = [(place, text) for place, step in enumerate(STEPS) for language, text in step.shown if language == "text"]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("place", "text"), QUOTED, ids=[f"step {place + 1}" for place, _ in QUOTED])
def test_each_step_says_what_the_page_quotes(
    place: int, text: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = Suite(pytester, monkeypatch)
    pytester.makeconftest(STEPS[place].source)
    command = COMMAND.search(PAGE.read_text("utf-8"))
    assert command is not None
    other = re.search(r"int8-weights/([\w-]+)/", text)  # another workload than the command's
    more = [f"--accel-workload={other[1]}", "--accel-level=2"] if other and other[1] != "mlp" else []
    ran = suite.run(*command[1].split()[3:], *more)
    out = ran.out + ran.err
    lines = lines_of(text)
    assert lines
    assert [line for line in lines if line not in comparable(out)] == [], out


def test_every_step_is_quoted() -> None:
    assert {place for place, _ in QUOTED} == set(range(len(STEPS)))


def test_the_steps_add_up_to_the_example() -> None:
    example = ast.parse(EXAMPLE.read_text("utf-8"))
    example.body = example.body[1:]  # its docstring says how to run it
    assert set(contents(STEPS[-1].tree.body)) == set(contents(example.body))


def test_a_step_replaces_what_it_names_and_keeps_the_rest(tmp_path: Path) -> None:
    blocks = [
        "from a import b\nclass C(B):\n    x = 1\n    def f(self): return 1\n    def g(self): return 2",
        "import c\nclass C(B):\n    def f(self): return 3\n    y = 2\nz = 1",
    ]
    page = tmp_path / "page.md"
    page.write_text("".join(f"```python\n{block}\n```\n\n```text\nsaid\n```\n" for block in blocks))
    first, second = steps(page)
    assert first.shown == second.shown == [("text", "said\n")]
    assert second.source == (
        "from a import b\nimport c\n\nclass C(B):\n    x = 1\n\n    def f(self):\n        return 3\n\n"
        "    def g(self):\n        return 2\n    y = 2\nz = 1"
    )
