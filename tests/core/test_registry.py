"""The registry: entries found without a list, in one order, under one name each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from accelcheck.core.registry import DuplicateNameError, UnknownNameError, discover, index, unknown


@dataclass(frozen=True, eq=False)
class Thing:
    name: str


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "registry_example"
    root = tmp_path / name
    root.mkdir()
    (root / "__init__.py").write_text("")
    for module, content in {
        "zulu": "THINGS = ['z1', 'z2']",
        "alpha": "THINGS = ('a1',)",
        "mike": "OTHER = [1]",
    }.items():
        (root / f"{module}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_members_of_all_modules_are_found_in_order_of_their_modules(package: str) -> None:
    assert discover(package, "THINGS") == ["a1", "z1", "z2"]
    assert discover(package, "NOTHING") == []


def test_a_module_whose_name_begins_with_an_underscore_is_not_imported(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "_machinery.py").write_text("import no_such_module_at_all")
    assert discover(package, "THINGS") == ["a1", "z1", "z2"]


def test_a_module_that_cannot_be_imported_is_not_passed_over(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "broken.py").write_text("import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        discover(package, "THINGS")


def test_things_are_sorted_by_name_and_the_same_one_counts_once() -> None:
    thing = Thing("a")
    assert dict(index("thing", [thing, thing])) == {"a": thing}
    assert list(index("thing", [Thing("b"), Thing("a-2"), Thing("a")])) == ["a", "a-2", "b"]


def test_two_things_of_one_name_are_refused_with_where_they_come_from() -> None:
    with pytest.raises(DuplicateNameError, match=r"two things are named 'a': .*test_registry and .*; rename one"):
        index("thing", [Thing("a"), Thing("b"), Thing("a")])


def test_an_index_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        index("thing", [Thing("a")])["b"] = Thing("b")  # type: ignore[index]  # what is tested


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("amp-bf61", "unknown technique 'amp-bf61'. Did you mean 'amp-bf16'? Legal values: amp-bf16, eager."),
        ("zzzzzz", "unknown technique 'zzzzzz'. Legal values: amp-bf16, eager."),
    ],
)
def test_an_unknown_name_is_answered_with_the_legal_ones_and_the_nearest(word: str, message: str) -> None:
    error = unknown("technique", word, ["amp-bf16", "eager"])
    assert isinstance(error, UnknownNameError)
    assert str(error) == message


def test_thousands_of_legal_names_are_listed_by_their_first_part() -> None:
    names = ["attention", *(f"attention-{number}" for number in range(600)), "mlp", "op-add"]
    assert str(unknown("workload", "mpl", names)).endswith("Legal values: attention, attention-* (600), mlp, op-add.")
