"""TOML files that people write: what an error of a file names."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelcheck.core import toml

FIELDS = {
    "name": toml.Field("a text", toml.is_text),
    "parts": toml.Field("a list of texts", toml.is_texts, required=False),
    "size": toml.Field("a number from 0 to 1", lambda value: toml.is_number(value, 0, 1), required=False),
}


class FruitError(ValueError):
    """Error of the files of these tests."""


def test_entries_are_read_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "fruit.toml"
    path.write_text('schema = 3\n[[fruit]]\nname = "pear"\nsize = 1\n[[fruit]]\nname = "fig"\nparts = ["a"]\n')
    first, second = toml.read(path, "fruit", FIELDS, FruitError, 3)
    assert (first["name"], first["size"], second["parts"]) == ("pear", 1, ["a"])
    assert "parts" not in first.values


def test_a_text_may_begin_with_any_word(tmp_path: Path) -> None:
    path = tmp_path / "fruit.toml"
    path.write_text('[[fruit]]\nname = "TODO lists"\n')
    (entry,) = toml.read(path, "fruit", FIELDS, FruitError)
    assert entry["name"] == "TODO lists"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[fruit]]", "fruit 1: field 'name': missing; expected a text"),
        ('[[fruit]]\nname = " "', "fruit 1 ( ): field 'name': expected a text, got ' '"),
        (
            '[[fruit]]\nname = "fig"\npart = 1',
            "fruit 1 (fig): field 'part': unknown field 'part'. Did you mean 'parts'?",
        ),
        ('[[fruit]]\nname = "fig"\nparts = []', "fruit 1 (fig): field 'parts': expected a list of texts, got []"),
        (
            '[[fruit]]\nname = "fig"\nsize = true',
            "fruit 1 (fig): field 'size': expected a number from 0 to 1, got True",
        ),
        ('[[fruit]]\nname = "fig"\nsize = nan', "fruit 1 (fig): field 'size': expected a number from 0 to 1, got nan"),
        ("[[fruits]]", ": field 'fruits': unknown field 'fruits'. Did you mean 'fruit'?"),
        ("fruit = 1", ": field 'fruit': expected a list of tables, [[fruit]], got 1"),
        ("fruit = [1]", "fruit 1: field 'fruit': expected a table, got 1"),
        ("fruit", ": not TOML: "),
    ],
)
def test_an_error_names_file_entry_field_and_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fruit.toml"
    path.write_text(text)
    with pytest.raises(FruitError) as raised:
        toml.read(path, "fruit", FIELDS, FruitError)
    assert str(raised.value).startswith(f"{path}: {message.removeprefix(': ')}")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fruit.toml"
    for text, problem in (
        ("", "missing; expected 3"),
        ("schema = 2", "expected 3, which this accelcheck reads, got 2"),
    ):
        path.write_text(text)
        with pytest.raises(FruitError, match=f"field 'schema': {problem}"):
            toml.read(path, "fruit", FIELDS, FruitError, 3)
