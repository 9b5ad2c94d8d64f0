"""The documentation as a site, without MkDocs: navigation, links, generated pages, quoted error messages."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from process_harness import script

from accelcheck.cli import parser
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.plugin.options import OPTIONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "accelcheck"
LEAST = 20
"""Characters of a message that the source must have literally."""


@cache
def tool(name: str) -> ModuleType:
    return script(DOCS / "tools" / f"{name}.py")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def navigation() -> list[str]:
    settings = text("mkdocs.yml")
    matches = re.findall(r"^ +- [^#\n]*?(\S+\.md)$", settings[settings.index("\nnav:") :], re.MULTILINE)
    assert matches
    return matches


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    named = navigation()
    assert sorted(pages - set(named)) == []
    assert sorted(name for name in set(named) if named.count(name) > 1) == []


def test_every_page_of_the_navigation_is_one_that_the_site_has() -> None:
    site = tool("hooks")
    own = [f"docs/{path.relative_to(DOCS).as_posix()}" for path in DOCS.rglob("*.md")]
    made = {site.place(path) for path in (site.HOME, *own, *site.linked((site.HOME, *own)))}
    assert sorted(set(navigation()) - made) == []


def test_links_out_of_docs_become_links_of_the_site() -> None:
    page = "[a](../CONTRIBUTING.md#writing) [b](speed.md#limits) [c](../examples/) [d](https://x.org/a.md) [e](#here)"
    assert tool("hooks").rewritten(page, "docs/extending.md") == (
        "[a](CONTRIBUTING.md#writing) [b](speed.md#limits) [c](examples/index.md) [d](https://x.org/a.md) [e](#here)"
    )
    assert tool("hooks").rewritten("[a](docs/speed.md) [b](LICENSE)", "README.md") == "[a](speed.md) [b](LICENSE)"
    assert tool("hooks").rewritten("[a](../docs/speed.md)", "baselines/README.md") == "[a](../speed.md)"
    assert tool("hooks").rewritten("[a](../README.md)", "docs/speed.md") == "[a](index.md)"


def test_links_in_blocks_of_code_stay_as_they_are() -> None:
    page = "```console\n$ echo '[a](../README.md)'\n```\n[a](../README.md)\n"
    assert tool("hooks").rewritten(page, "docs/speed.md") == page.replace("\n[a](../README.md)", "\n[a](index.md)")


def test_a_link_that_leaves_the_repository_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tool("hooks")
    (tmp_path / "README.md").write_text("[a](../secret.md)")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(site.OutsideError, match=r"README\.md links \.\./secret\.md"):
        site.linked(("README.md",))


def test_a_folder_becomes_a_page_that_lists_its_files() -> None:
    listed = tool("hooks").listing("examples/device")
    assert listed == "# examples/device\n\n- [demo_device.py](demo_device.py)\n"
    assert "examples/device/demo_device.py" in tool("hooks").linked(("docs/extending.md",))


def test_a_page_that_loads_something_from_elsewhere_is_refused() -> None:
    matches = tool("hooks").ELSEWHERE.findall
    assert matches(
        '<script async src="https://cdn.org/a.js"></script><link href="//cdn.org/a.css" rel="stylesheet">'
    ) == ["https://cdn.org/a.js", "//cdn.org/a.css"]
    assert matches('<a href="https://pytorch.org">torch</a><script src="assets/a.js"></script>') == []


def test_every_option_and_command_is_in_the_reference() -> None:
    page = text("docs/reference.md")
    assert [option.argument for option in OPTIONS if f"| `{option.argument}" not in page] == []
    sources = [path.read_text(encoding="utf-8") for path in (PACKAGE / "commands").glob("*.py")]
    commands = {name for source in sources for name in re.findall(r'add_parser\(\s*"([\w-]+)"', source)}
    assert {"list", "selftest", "baseline"} <= commands
    assert (
        sorted(name for name in commands if not re.search(rf"^#+ `accelcheck .*\b{name}`$", page, re.MULTILINE)) == []
    )
    options = {name for source in sources for name in re.findall(r'add_argument\([^)]*?"(--[\w-]+)"', source)}
    assert {"--device", "--json"} <= options
    assert sorted(name for name in options if not re.search(rf"`{name}[ `]", page)) == []


def test_arguments_are_shown_as_they_are_typed() -> None:
    command = argparse.ArgumentParser(prog="accelcheck", description="Takes a|b,\n  as in *x*, and --keep.")
    command.add_argument("files", nargs="+", metavar="FILE", help="of %(prog)s")
    command.add_argument("-o", "--output", metavar="FILE", help="a|b (default: %(default)s)", default="x")
    command.add_argument("--hidden", help=argparse.SUPPRESS)
    command.add_argument("--shell", choices=("bash", "zsh"), help="one_of <them>")
    page = "\n".join(tool("reference")._commands(command))
    assert "Takes a|b, as in \\*x\\*, and `--keep`." in page
    assert "| `FILE [FILE ...]` | of accelcheck |" in page
    assert "| `-o FILE`, `--output FILE` | a\\|b (default: x) |" in page
    assert "| `--shell {bash,zsh}` | one_of \\<them> |" in page
    assert "hidden" not in page


def test_every_command_line_of_a_page_is_one_that_the_program_takes() -> None:
    lines = [
        (page.name, line)
        for page in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
        for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for line in re.findall(r"^\$ accelcheck (.*)$", block.replace("\\\n", ""), re.MULTILINE)
    ]
    assert len(lines) > 10
    refused = []
    for page, line in lines:
        try:
            parser().parse_args(shlex.split(line.partition(" > ")[0], comments=True))
        except SystemExit as error:
            refused += [(page, line)] * (error.code != 0)
    assert refused == []


def test_the_extras_on_the_page_are_those_of_the_project() -> None:
    declared = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", text("docs/install.md"), re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"\w+", row)) == sorted(declared)


FAULTS = (Fault(FaultKind.STATE, "matmul precision", expected="'ieee'", got="'tf32'"),)
"""Faults that a page quotes and no text of the source is as long as."""


@pytest.mark.slow
def test_error_messages_that_a_page_quotes_are_those_of_the_source() -> None:
    quoted = [
        line
        for block in re.findall(r"```text\n(.*?)```", text("docs/questions.md"), re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(quoted) >= 12
    known = [re.compile(rf"(?:.*: )?{pattern}") for pattern in patterns()]
    told = set(map(str, FAULTS))
    assert [s for s in quoted if s not in told and not any(known_as.fullmatch(s) for known_as in known)] == []


@pytest.mark.slow
def test_a_message_that_the_source_does_not_have_is_found() -> None:
    known = [re.compile(rf"(?:.*: )?{pattern}") for pattern in patterns()]
    changed = "no element was looked at: a pass needs at least one"
    assert not any(pattern.fullmatch(changed) for pattern in known)


@cache
def patterns() -> frozenset[str]:
    """A regular expression for each text in the package's source that has `LEAST` literal characters and a space."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                parts = list(_parts(node))
                words = "".join(filter(None, parts))
                if len(words) >= LEAST and " " in words.strip() and "\n" not in words:
                    names.add("".join(".*" if part is None else re.escape(part) for part in parts))
    return frozenset(names)


def _parts(node: ast.expr) -> Iterator[str | None]:
    """The parts of a text; None where a value is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield str(value.value) if isinstance(value, ast.Constant) else None
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _parts(node.left)
        yield from _parts(node.right)
    else:
        yield None
