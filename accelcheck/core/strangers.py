"""Parses untrusted TOML, JSON and regular expressions in bounded time and memory. No torch.

TOML is searched for long keys first, because Python's parser takes time with the square of the parts of a key.
"""

import functools
import re
import tomllib
from collections.abc import Callable
from json import loads
from typing import Any

from accelcheck.core.plain import text

MOST_PARTS = 32
"""Most parts of a dotted key of TOML, and of the name of a table."""
LONGEST_PATTERN = 1000
"""Longest regular expression, in characters."""
QUOTED = 200
"""Longest quotation of a value in an error, in characters."""
_MANY_PARTS = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MOST_PARTS}}}""", re.ASCII
)


class StrangerError(ValueError):
    """A document or an expression is malformed; the message says what was expected and what came, and not where."""


def toml(content: bytes) -> dict[str, Any]:
    """The table of a document of TOML; no key may have too many parts."""
    return _parsed("TOML", _loaded, content)  # type: ignore[no-any-return]  # a document is a table


def json(content: bytes) -> Any:
    """The value of a document of JSON."""
    return _parsed("JSON", loads, content)


def _loaded(content: str) -> dict[str, Any]:
    if match := _MANY_PARTS.search(content):
        line, key = content.count("\n", 0, match.start()) + 1, quoted(match[0], 60)
        raise StrangerError(f"line {line}: expected keys of at most {MOST_PARTS} parts, got more: {key}")
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
    """The `repr` of a value, cut, for an error."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r} ({len(value) - most:,} more characters)"
    try:
        whole = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python converts
        return f"{type(value).__name__} that is too large to show"
    return whole if len(whole) <= most else f"{whole[:most]}... ({len(whole) - most:,} more characters)"


class Pattern:
    """An untrusted regular expression, whose search takes time linear in the length of the text.

    It is one of RE2, without backreferences, lookahead and lookbehind; any other raises `StrangerError`.
    """

    def __init__(self, expression: str) -> None:
        # Late: only runs with a ledger need it.
        import re2  # type: ignore[import-untyped]  # it comes without annotations

        if len(expression) > LONGEST_PATTERN:
            raise StrangerError(f"expected at most {LONGEST_PATTERN:,} characters, got {len(expression):,}")
        options = re2.Options()
        options.log_errors = False
        try:
            self._compiled = re2.compile(expression, options)
        except UnicodeEncodeError as error:
            raise StrangerError("a surrogate is no character") from error
        except re2.error as error:
            message = error.args[0] if error.args else "not an expression"
            message = message.decode(errors="replace") if isinstance(message, bytes) else message
            raise StrangerError(text(message, QUOTED)) from error

    def search(self, line: str) -> bool:
        """True when the expression matches somewhere in a line."""
        return self._compiled.search(line.encode(errors="replace").decode()) is not None


@functools.lru_cache(maxsize=4096)
def pattern(expression: str) -> Pattern:
    """The cached `Pattern` of an expression."""
    return Pattern(expression)
