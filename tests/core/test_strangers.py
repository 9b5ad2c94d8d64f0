"""Files of strangers: what is too large, too deep, no file, or an expression without an end is refused, and soon."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from process_harness import completed

from accelcheck.core import toml
from accelcheck.core.bounded import AbsentFileError, read
from accelcheck.core.registry import unknown
from accelcheck.core.strangers import MOST_PARTS, Pattern, StrangerError, json, quoted
from accelcheck.core.strangers import toml as document


class FruitError(ValueError):
    """Error of the files of these tests."""


FIELDS = {"name": toml.Field("a text", toml.is_text), "size": toml.Field("a number from 0 to 1", bool, required=False)}


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "large", "latin"])
def test_only_regular_files_of_text_that_are_not_large_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(100 * toml.LARGEST)
    else:
        path.write_bytes("é".encode("latin-1"))
    expected = {"large": "expected at most 1,048,576 bytes", "latin": "not TOML: expected UTF-8"}
    with pytest.raises(FruitError, match=expected.get(kind, "cannot be read: expected a file, got a")):
        toml.read(path, "fruit", FIELDS, FruitError)


def test_a_file_that_is_not_there_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(AbsentFileError):
        read(tmp_path / "none", 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("size = " + "9" * 5000, "not TOML: "),
        ("size = " + "[" * 100_000, "nested too deeply"),
        ("size = " + "{a=" * 100_000, "nested too deeply"),
        ("\n" + "a." * 100_000 + "a = 1", f"line 2: expected keys of at most {MOST_PARTS} parts, got more: 'a.a."),
        ("[" + "a . " * 100_000 + "a]", f"line 1: expected keys of at most {MOST_PARTS} parts"),
        ("'a'.\"b\"." * 50_000 + "a = 1", f"expected keys of at most {MOST_PARTS} parts"),
        ("a = { " + "b.'.'." * 20_000 + "a = 1 }", f"expected keys of at most {MOST_PARTS} parts"),
    ],
)
def test_toml_that_would_take_long_is_refused(content: str, message: str) -> None:
    with pytest.raises(StrangerError, match=re.escape(message)):
        document(content.encode())


def test_the_check_of_keys_lets_values_be() -> None:
    words = "a sentence. " * 100
    assert document(f"a.b.c = '{words}'\nd = 1.5".encode()) == {"a": {"b": {"c": words}}, "d": 1.5}
    assert len(document(b"x" * 500_000 + b" = 1")) == 1  # one part, looked through once


@pytest.mark.parametrize("content", ["9" * 5000, "[" * 100_000, '{"a":' * 100_000, "{"])
def test_json_that_cannot_be_read_is_refused(content: str) -> None:
    with pytest.raises(StrangerError, match="not JSON"):
        json(content.encode())


def test_an_error_does_not_repeat_a_large_value(tmp_path: Path) -> None:
    path = tmp_path / "fruit.toml"
    for text in (
        f"[[fruit]]\nname = 'fig'\n{'x' * 200_000} = 1",
        f"[[fruit]]\nname = ['{'x' * 200_000}']",
        f"[[fruit]]\nname = '{'fig' * 100_000}'\nsize = ''",
        f"[[fruit]]\nname = 0x{'f' * 200_000}",
        f"fruit = '{'x' * 200_000}'",
        f"fruit = ['{'x' * 200_000}']",
    ):
        path.write_text(text)
        with pytest.raises(FruitError) as raised:
            toml.read(path, "fruit", FIELDS, FruitError)
        assert len(str(raised.value)) < 1000
    assert len(str(unknown("fruit", "x" * 200_000, ["fig"]))) < 1000


def test_an_error_has_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "fruit.toml"
    path.write_text('[[fruit]]\nname = "\\u001b[2J\\u202e"\n"\\u0007" = 1')
    with pytest.raises(FruitError) as raised:
        toml.read(path, "fruit", FIELDS, FruitError)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("x", "'x'"),
        ("x" * 300, f"'{'x' * 200}' (100 more characters)"),
        ([1], "[1]"),
        pytest.param(1 << 200_000, "int that is too large to show", id="huge"),
    ],
)
def test_a_value_is_quoted(value: object, expected: str) -> None:
    assert quoted(value) == expected


@pytest.mark.parametrize("expression", ["(a+)+$", "(a|a)+$", "(.*a){20}$"])
def test_no_expression_stalls_on_a_long_line(expression: str) -> None:
    # Python's `re` takes longer than anyone waits for each of these.
    assert not Pattern(expression).search("a" * 50_000 + "b" if expression != "(.*a){20}$" else "ab" * 50_000)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(", "missing )"),
        (r"(a)\1", "invalid escape sequence"),
        ("(?=a)", "invalid perl operator"),
        ("((a{1000}){1000}){1000}", "invalid repetition size"),
        ("(" * 100_000, "at most 1,000 characters, got 100,000"),
        ("\ud800", "surrogate"),
    ],
)
def test_an_expression_that_is_none_is_refused(expression: str, message: str) -> None:
    with pytest.raises(StrangerError, match=re.escape(message)):
        Pattern(expression)


def test_an_expression_finds_what_pythons_finds() -> None:
    for expression, line, result in (
        (r"^grad:\S+: view (row|column)\b", "grad:fc.weight: view row: expected", True),
        (r"^out: view tail$", "out: view tail\ud800", False),
        (r"\d+x", "é 12x", True),
    ):
        assert Pattern(expression).search(line) is result


def test_the_start_of_every_pytest_does_not_pay_for_it() -> None:
    code = "import sys, accelcheck.plugin.hooks; print({'re2', 'accelcheck.core.strangers'} & set(sys.modules))"
    ran = completed([sys.executable, "-c", code], check=True)
    assert ran.stdout == "set()\n"
