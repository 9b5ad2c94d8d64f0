"""Parses what strangers wrote, ledgers and baselines say, so that it costs little time and memory whatever it holds. No torch.

TOML is looked through before it is parsed, because Python's parser takes time with the square of the parts of a key.
"""

from __future__ import annotations

import functools
import re
import tomllib
from json import loads
from typing import TYPE_CHECKING, Any

from accelcheck.core.plain import text

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_PARTS = 32
"""Parts of a dotted key of TOML, and of the name of a table."""
LONGEST_PATTERN = 1000
"""Characters of a regular expression."""
QUOTED = 200
"""Characters that an error quotes of a value."""
_MANY_PARTS = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}""", re.ASCII
)


class StrangerError(ValueError):
    """A document or an expression is not what is read; the message says what was expected and what came, and not where."""


def toml(content: bytes) -> dict[str, Any]:
    """The table of a document of TOML.

    Raises:
        StrangerError: It is not TOML, nested too deeply, or has a key of too many parts or a number of too many digits.
    """
    return _parsed("TOML", _loaded, content)  # type: ignore[no-any-return]  # a document is a table


def json(content: bytes) -> Any:
    """The value of a document of JSON.

    Raises:
        StrangerError: It is not JSON, nested too deeply, or has a number of too many digits.
    """
    return _parsed("JSON", loads, content)


def _loaded(content: str) -> dict[str, Any]:
    if found := _MANY_PARTS.search(content):
        line = content.count("\n", 0, found.start()) + 1
        raise StrangerError(
            f"line {line}: expected keys of at most {MOST_PARTS} parts, got more: {quoted(found[0], 60)}"
        )
    return tomllib.loads(content)


def _parsed(kind: str, parse: Callable[[str], Any], content: bytes) -> Any:
    try:
        return parse(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise StrangerError(f"not {kind}: expected UTF-8, got another encoding at byte {error.start}") from error
    except RecursionError as error:
        raise StrangerError(f"not {kind}, or nested too deeply") from error
    except ValueError as error:  # not TOML or JSON, or a number of thousands of digits, which Python does not convert
        raise StrangerError(f"not {kind}: {text(error, QUOTED)}") from error


def quoted(value: object, most: int = QUOTED) -> str:
    """A value as an error quotes it: as Python writes it, cut."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r} ({len(value) - most:,} more characters)"
    try:
        found = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python converts
        return f"{type(value).__name__} that is too large to show"
    return found if len(found) <= most else f"{found[:most]}... ({len(found) - most:,} more characters)"


class Pattern:
    """A regular expression of a stranger. The time of a search grows with the length of the text, and never faster.

    Args:
        expression: As RE2 has it: without backreferences, lookahead and lookbehind.

    Raises:
        StrangerError: It is no such expression, or is too long; the message says what is wrong.
    """

    def __init__(self, expression: str) -> None:
        import re2  # type: ignore[import-untyped]  # it comes without annotations; late: only runs with a ledger need it

        if len(expression) > LONGEST_PATTERN:
            raise StrangerError(f"expected at most {LONGEST_PATTERN:,} characters, got {len(expression):,}")
        options = re2.Options()
        options.log_errors = False
        try:
            self._compiled = re2.compile(expression, options)
        except UnicodeEncodeError as error:
            raise StrangerError("a surrogate is no character") from error
        except re2.error as error:
            said = error.args[0] if error.args else "not an expression"
            raise StrangerError(
                text(said.decode(errors="replace") if isinstance(said, bytes) else said, QUOTED)
            ) from error

    def search(self, line: str) -> bool:
        """Whether it matches somewhere in a line."""
        return self._compiled.search(line.encode(errors="replace").decode()) is not None


@functools.lru_cache(maxsize=4096)
def pattern(expression: str) -> Pattern:
    """The `Pattern` of an expression, made once."""
    return Pattern(expression)
