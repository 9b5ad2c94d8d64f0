"""The program `accelcheck`: runs the suite, says what this machine can test, and measures outside of a pytest run."""

import os
import sys
from collections.abc import Sequence

import accelcheck
from accelcheck.commands.common import NOTHING, USAGE, refuse
from accelcheck.commands.parsing import SHELLS, Parser, PrintCompletion, examples
from accelcheck.core import imports
from accelcheck.core.errors import InputError
from accelcheck.core.registry import modules

CLOSED = 128 + 13
"""Exit code for a closed output, as in `accelcheck list | head`: that of a program which SIGPIPE ends."""


def parser() -> Parser:
    """Makes the parser of the whole command line. Imports no torch."""
    root = Parser(prog="accelcheck", description=__doc__)
    root.add_argument("--version", action="version", version=f"accelcheck {accelcheck.__version__}")
    root.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar="SHELL",
        help=f"print the script that completes accelcheck's commands and options in a shell: {', '.join(SHELLS)}",
    )
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for module in modules("accelcheck.commands"):
        if hasattr(module, "add"):
            module.add(commands)
    examples(
        root,
        ("accelcheck doctor", "what this machine can test, and what it lacks"),
        ("accelcheck run", "the suite at level 1 on every device that is present"),
        ("accelcheck list --device=cpu", "every technique, and whether the CPU runs it"),
        ("accelcheck --print-completion bash", "a script to source in ~/.bashrc"),
    )
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # here a closed output can be caught
    except BrokenPipeError:
        # The interpreter flushes standard output again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    known = parser()
    given = known.parse_args(arguments)
    if given.command is None:
        known.print_help(sys.stderr)
        return USAGE
    try:
        if modules := getattr(given, "imports", ()):
            imports.announce(modules)
        return int(given.run(given))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("accelcheck: torch is not installed; accelcheck doctor says how to install it", file=sys.stderr)
        return NOTHING
    except (InputError, imports.ModuleImportError) as error:
        return refuse(error)


if __name__ == "__main__":  # `python -m accelcheck.cli`, if accelcheck is only on the import path
    sys.exit(main())
