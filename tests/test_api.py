"""The public interface: what it costs, what it has, and that examples and documents use it alone, and run."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from process_harness import completed

import accelcheck
from accelcheck import api
from accelcheck.core.journal_reading import read

ROOT = Path(accelcheck.__file__).parents[1]
KINDS = ("device", "model", "quantizer", "technique", "workload")
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*/*.py") if path.parent.name in KINDS)
SHOWN = [path for path in EXAMPLES if path.parent.name != "quantizer"]
"""Examples that docs/extending.md shows; tests/docs/test_quantizer_page.py has the other."""
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTENDING = ROOT / "docs" / "extending.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEADER = re.compile(
    r"^    \$ (?P<command>.+)\n\nIt prints, among other lines:\n\n(?P<output>(?:    .+\n)+)", re.MULTILINE
)
STRANGERS = {"torch", "pytest", *sys.stdlib_module_names}
"""Modules that an example may import besides the public interface."""


def imports(source: str) -> list[str]:
    """Everything that a program imports, also inside of functions, as ``module`` or ``module.name``."""
    imported: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return imported


def internal(source: str) -> list[str]:
    """Imports of a program from accelcheck besides the public interface."""
    ours = [name for name in imports(source) if name.partition(".")[0] == "accelcheck"]
    return [name for name in ours if name.split(".")[:2] != ["accelcheck", "api"]]


def foreign(source: str) -> list[str]:
    """Imports of a program besides the public interface, torch, pytest and the standard library."""
    others = [name for name in imports(source) if name.partition(".")[0] not in {"accelcheck", *STRANGERS}]
    return [*internal(source), *others]


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of a document in a language."""
    return [text for kind, text in FENCED.findall(document.read_text("utf-8")) if kind == language]


def header(example: Path) -> tuple[str, str]:
    """The command that an example's docstring gives, and the lines that it promises."""
    match = HEADER.search(f"{ast.get_docstring(ast.parse(example.read_text('utf-8')))}\n")
    assert match is not None, f"{example}: expected a command after `$` and the lines that it prints"
    return match["command"], "".join(line.removeprefix("    ") for line in match["output"].splitlines(keepends=True))


def python(code: str) -> str:
    done = completed([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    return done.stdout.strip()


def test_the_interface_imports_no_torch() -> None:
    assert python("import sys, accelcheck.api; dir(accelcheck.api); print('torch' in sys.modules)") == "False"


def test_what_a_device_needs_imports_no_torch() -> None:
    names = (
        "SUPPORTED, Capability, Code, Device, Evidence, Fingerprint, Memory, Mode, Telemetry, unavailable, unsupported"
    )
    assert python(f"import sys; from accelcheck.api import {names}; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_a_technique_can_be_imported_first() -> None:
    code = (
        "from accelcheck.api import Technique; from accelcheck.techniques.base import Technique as T; "
        "print(T is Technique)"
    )
    assert python(code) == "True"


@pytest.mark.parametrize("name", api.__all__)
def test_every_public_name_resolves_and_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(api, name))
    assert f"`{name}`" in (api.__doc__ or "")
    assert name in dir(api)


def test_type_checkers_see_the_names_that_are_resolved() -> None:
    tree = ast.parse(inspect.getsource(api))
    (typed,) = (
        node for node in tree.body if isinstance(node, ast.If) and any(isinstance(n, ast.ImportFrom) for n in node.body)
    )
    seen = {(n.module, alias.name) for n in typed.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert seen == {(module, name) for module, names in api._MODULES.items() for name in names}
    assert sorted(api.__all__) == sorted(name for _, name in seen)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        AttributeError, match=r"accelcheck\.api: unknown public name 'Techniqe'\. Did you mean 'Technique'\?"
    ):
        getattr(api, "Techniqe")  # noqa: B009 - type checkers know the legal names


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.parent.name)
def test_examples_import_the_interface_alone(example: Path) -> None:
    assert foreign(example.read_text("utf-8")) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_import_the_interface_alone(document: Path) -> None:
    assert [name for block in blocks(document, "python") for name in internal(block)] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from accelcheck.techniques.base import Technique", ["accelcheck.techniques.base.Technique"]),
        ("import accelcheck.core.case", ["accelcheck.core.case"]),
        ("def late():\n    from accelcheck import plugin", ["accelcheck.plugin"]),
        ("import numpy", ["numpy"]),
        ("from . import helper", ["..helper"]),
        ("from accelcheck.api import Technique\nimport torch, pytest, os.path", []),
        ("from accelcheck import api", []),
    ],
)
def test_an_example_that_imports_anything_else_is_found(line: str, found: list[str]) -> None:
    assert foreign(f"{EXAMPLES[0].read_text('utf-8')}\n{line}\n") == found


def test_there_is_an_example_of_each_kind() -> None:
    assert [path.parent.name for path in EXAMPLES] == ["device", "model", "quantizer", "technique", "workload"]


def test_the_page_shows_the_examples_as_they_are() -> None:
    assert sorted(blocks(EXTENDING, "python")) == sorted(path.read_text("utf-8") for path in SHOWN)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_page_gives_the_command_and_the_output_of_each_example(example: Path) -> None:
    command, output = header(example)
    page = EXTENDING if example in SHOWN else ROOT / "docs" / "quantizer.md"
    assert f"$ cd examples/{example.parent.name}\n$ {command}\n{output}" in blocks(page, "console")


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.parent.name)
def test_examples_run_and_pass(example: Path, tmp_path: Path) -> None:
    (tmp_path / example.name).write_bytes(example.read_bytes())
    command, output = header(example)
    words = shlex.split(command)
    # Without `python -m` the folder is not on the path: -P keeps that.
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-P", "-m", "pytest"]
    done = completed(
        [*program, *words[1:], "--accel-journal=journal.jsonl"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert output in done.stdout
    _, records = read(tmp_path / "journal.jsonl")
    assert {str(record.verdict) for record in records} == {"pass"}


@pytest.mark.parametrize("package", ["core", "devices", "techniques", "workloads"])
def test_the_interface_is_for_others(package: str) -> None:
    sources = (path.read_text("utf-8") for path in (ROOT / "accelcheck" / package).rglob("*.py"))
    assert not [name for source in sources for name in imports(source) if name.startswith("accelcheck.api")]
