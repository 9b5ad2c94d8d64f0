"""Parser of the command line, with near misses, examples in the help, and shell completion. No torch."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from accelcheck.commands.common import USAGE
from accelcheck.core.plain import with_floats
from accelcheck.core.registry import unknown

SHELLS = ("bash", "fish", "tcsh", "zsh")
"""Shells with a completion script."""
SCHEMA = 1
"""Version of the output of `--json`; each command adds its own fields."""
_MARGIN = 2
"""Columns that argparse leaves free at the right."""


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that names the nearest command or option, and exits with 4 like pytest.

    Its subparsers are of this class too. `epilog` is printed as it is written; `description` is wrapped.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)

    def format_help(self) -> str:
        """Formats the help with the description wrapped and the epilog as it is."""
        kept = self.description
        if kept is not None:
            self.description = textwrap.fill(kept, shutil.get_terminal_size().columns - _MARGIN)
        try:
            return super().format_help()
        finally:
            self.description = kept

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the message, and exits with 4."""
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses like argparse, but reports an unknown word here, where the options are known."""
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            name = word.partition("=")[0]
            if name.startswith("-") and name != "--":
                legal = sorted(option for option in self._option_string_actions if option.startswith("--"))
                self.error(str(unknown("option", name, legal)))
            self.error(f"unexpected argument {word!r}; {self.prog} --help lists what it takes")
        return parsed, rest

    def commands(self) -> Mapping[str, Parser]:
        """Parsers of its commands, by name."""
        kind = argparse._SubParsersAction  # noqa: SLF001 - argparse has no public name for it
        actions = (action for action in self._actions if isinstance(action, kind))
        return {name: command for action in actions for name, command in action.choices.items()}

    def all_commands(self) -> Iterator[Parser]:
        """Yields this parser and those of all commands below it."""
        yield self
        for command in self.commands().values():
            yield from command.all_commands()

    def complete_paths(self, files: Any, folders: Any) -> None:
        """Makes shells complete paths for arguments whose metavar names a file or a folder."""
        for parser in self.all_commands():
            for action in parser._actions:  # noqa: SLF001 - of our own class
                name = str(action.metavar or "").partition(".")[0]
                if name in _PATHS:
                    setattr(action, "complete", folders if name == "FOLDER" else files)  # noqa: B010 - for shtab

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        legal = [str(choice) for choice in action.choices]
        of_commands = isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - as above
        kind = "command" if of_commands else "value"
        raise argparse.ArgumentError(None if of_commands else action, str(unknown(kind, str(value), legal)))


_PATHS = frozenset({"FILE", "FOLDER", "JOURNAL", "PYTHON"})


class PrintCompletion(argparse.Action):
    """Action of ``--print-completion SHELL``: prints the completion script of this command line, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        import shtab

        if isinstance(parser, Parser):
            parser.complete_paths(shtab.FILE, shtab.DIRECTORY)
        print(shtab.complete(parser, shell=values))
        parser.exit()


def examples(command: argparse.ArgumentParser, *lines: tuple[str, str]) -> None:
    """Sets the examples at the end of a command's help: pairs of command line and purpose."""
    width = max(len(line) for line, _ in lines)
    command.epilog = "\n".join(["examples:", *(f"  {line:<{width}}  # {meaning}" for line, meaning in lines)])


def add_json(command: argparse.ArgumentParser) -> None:
    """Declares ``--json`` for a command that prints: `print_json` then replaces its tables."""
    command.add_argument("--json", action="store_true", help="print JSON, for programs, in place of tables")


def print_json(kind: str, body: Mapping[str, Any]) -> None:
    """Prints one JSON object with its schema and kind, the name of the command.

    Numbers of the body that are not finite, which JSON lacks, become null.
    """
    finite = with_floats(body, lambda number: number if math.isfinite(number) else None)
    print(json.dumps({"schema": SCHEMA, "kind": kind, **finite}, indent=1, allow_nan=False))
