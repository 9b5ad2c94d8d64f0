"""Makes docs/reference.md, for benchmarks/regenerate.py: every option of pytest and every command, as declared.

It reads `accelcheck.plugin.options.OPTIONS` and `accelcheck.cli.parser`, and imports no torch.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from accelcheck.cli import parser
from accelcheck.plugin.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

TOP = """# Command line: every option and command

Made by `nox -s regenerate` from what the program declares; change it there. `accelcheck COMMAND --help`
prints the same. [Options, verdicts and exit status](options.md) says how options work together.

## Options of pytest

`pytest --pyargs accelcheck.suite OPTIONS`. Each has a setting in pytest's ini file; the command line takes
precedence. An option that is repeatable is a list there.

| option | ini | meaning |
|---|---|---|"""


def page() -> str:
    """The whole page, with a newline at its end."""
    return "\n".join([TOP, *_options(), "", *_commands(parser())]).rstrip() + "\n"


def _options() -> Iterator[str]:
    for option in OPTIONS:
        name = option.argument if option.flag else f"{option.argument}={option.metavar}"
        yield f"| `{name}` | `{option.dest}` | {_cell(option.help)} |"


def _commands(command: argparse.ArgumentParser, depth: int = 2, short: str = "") -> Iterator[str]:
    """The sections of a command and of those below it; `short` is what the list of commands says of it."""
    yield f"{'#' * depth} `{command.prog}`"
    yield ""
    if said := command.description or short:
        yield _text(said)
        yield ""
    rows = list(_rows(command))
    if rows:
        yield "| argument | meaning |"
        yield "|---|---|"
        yield from rows
        yield ""
    if command.epilog:
        yield "```text"
        yield command.epilog.strip()
        yield "```"
        yield ""
    for below, said in subcommands(command):
        yield from _commands(below, depth + 1, f"{said[:1].upper()}{said[1:]}.")


def subcommands(command: argparse.ArgumentParser) -> list[tuple[argparse.ArgumentParser, str]]:
    """The parsers of the commands below one, each with what the list of commands says of it."""
    kind = argparse._SubParsersAction  # noqa: SLF001 - it has no public name
    groups = [action for action in actions(command) if isinstance(action, kind)]
    said = {one.dest: one.help or "" for group in groups for one in group._choices_actions}  # noqa: SLF001 - as above
    return [(below, said.get(name, "")) for group in groups for name, below in group.choices.items()]


def actions(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options and arguments of a command, in the order of its help."""
    return command._actions  # noqa: SLF001 - argparse has no public way to ask


def _rows(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in actions(command):
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):  # noqa: SLF001 - as above
            continue
        if action.help == argparse.SUPPRESS:
            continue
        meaning = (action.help or "") % {**vars(action), "prog": command.prog}
        yield f"| {_name(action)} | {_cell(meaning)} |"


def _name(action: argparse.Action) -> str:
    """An argument as one writes it, with its value or the values that it may have."""
    taken = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    value = " ".join(taken) if isinstance(taken, tuple) else str(taken)
    value = {"*": f"[{value} ...]", "+": f"{value} [{value} ...]", "?": f"[{value}]"}.get(str(action.nargs), value)
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{name}`" if action.nargs == 0 else f"`{name} {value}`" for name in action.option_strings)


def _cell(text: str) -> str:
    """A cell of a table: in Markdown, `|` ends one, and what looks like HTML is left out."""
    return _text(text).replace("|", r"\|")


def _text(text: str) -> str:
    """Words of the program in Markdown: on one line; options, paths and globs as they are typed."""
    words = re.sub(r"\s+", " ", text).strip().replace("``", "`")  # of docstrings
    parts = re.split(r"(`[^`]*`)", words)
    return "".join(part if number % 2 else _marked(part) for number, part in enumerate(parts))


def _marked(words: str) -> str:
    words = re.sub(r"(?<![\w`-])(--[a-z][\w-]*(?:=[\w.]+)?)", r"`\1`", words)
    parts = re.split(r"(`[^`]*`)", words)
    return "".join(
        part if number % 2 else re.sub(r"([*<]|(?<!\w)_|_(?!\w))", r"\\\1", part) for number, part in enumerate(parts)
    )
