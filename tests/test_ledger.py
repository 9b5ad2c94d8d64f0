"""The ledger: strict about what it reads, anchored in what it covers, and hiding nothing that it does not foresee."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from accelcheck.core.case import Verdict
from accelcheck.expectations.ledger import FOLDER, Entry, Ledger, LedgerError, foreseen, shipped

if TYPE_CHECKING:
    from pathlib import Path

TODAY = dt.date(2027, 1, 1)
FIELDS = {
    "cases": '["amp-bf16/cnn/xla/*"]',
    "verdict": '"fail"',
    "match": '"view row"',
    "reason": '"The convolution rounds twice."',
    "link": '"https://example.invalid/1"',
    "owner": '"the vendor"',
    "expires": "2027-06-30",
}


def text(**changes: str | None) -> str:
    fields = {name: value for name, value in (FIELDS | changes).items() if value is not None}
    return "\n".join(["schema = 1", "[[entry]]", *(f"{name} = {value}" for name, value in fields.items())])


def load(folder: Path, content: str | bytes) -> Ledger:
    path = folder / "device.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Ledger.load((path,))


def entry(*cases: str, match: str = "view row", verdict: Verdict = Verdict.FAIL) -> Entry:
    return Entry(cases, verdict, match, "reason", "link", "owner", dt.date(2027, 6, 30))


def test_an_entry_is_read(tmp_path: Path) -> None:
    (read,) = load(tmp_path, text(owner='" the vendor "')).entries
    assert read == Entry(
        ("amp-bf16/cnn/xla/*",),
        Verdict.FAIL,
        "view row",
        "The convolution rounds twice.",
        "https://example.invalid/1",
        "the vendor",
        dt.date(2027, 6, 30),
    )


def test_ledgers_add_up(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(text())
    assert len(Ledger.load((tmp_path / "one", tmp_path / "two")).entries) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cases", '"amp/*"'),
        ("cases", "[]"),
        ("cases", "[1]"),
        ("cases", '[""]'),
        ("verdict", '"crash"'),
        ("verdict", '"pass"'),
        ("verdict", '["fail"]'),
        ("match", '"("'),
        ("match", "1"),
        ("match", '""'),
        ("match", '".*"'),
        ("reason", '""'),
        ("reason", '"  "'),
        ("link", "1"),
        ("owner", '""'),
        ("expires", '"2027-06-30"'),
        ("expires", "2027-06-30T00:00:00"),
        ("expires", "20270630"),
    ],
)
def test_a_bad_field_is_named_with_its_file_and_entry(name: str, value: str, tmp_path: Path) -> None:
    good = text()
    bad = text(**{name: value}).partition("\n")[2]
    with pytest.raises(LedgerError) as raised:
        load(tmp_path, f"{good}\n{bad}")
    assert f"{tmp_path / 'device.toml'}: entry 2: field '{name}'" in str(raised.value)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=f"device.toml: entry 1: field '{name}': missing; expected "):
        load(tmp_path, text(**{name: None}))


def test_a_field_too_many_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"device.toml: entry 1: field 'tolerance': unknown field 'tolerance'"):
        load(tmp_path, text(tolerance="1e-3"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "field 'schema': missing; expected 1, which this accelcheck reads"),
        ("schema = 2", "field 'schema': expected 1, which this accelcheck reads, got 2"),
        ('schema = "1"', "field 'schema': expected 1, which this accelcheck reads, got '1'"),
        ("schema = ", "not TOML"),
        (b"schema = 1 # \xff", "not TOML"),
        ("schema = 1\n[[entries]]\n", "unknown field 'entries'. Did you mean 'entry'?"),
        ("schema = 1\n[entry]\n", "field 'entry': expected a list of tables"),
        ('schema = 1\nentry = ["text"]', "field 'entry': expected a table, got 'text'"),
    ],
)
def test_another_file_is_refused_by_name(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError) as raised:
        load(tmp_path, content)
    assert "device.toml" in str(raised.value)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"none.toml: cannot be read: No such file"):
        Ledger.load((tmp_path / "none.toml",))


@pytest.mark.parametrize(
    ("glob", "case_id", "covered"),
    [
        ("amp-bf16/cnn/xla/float32/forward", "amp-bf16/cnn/xla/float32/forward", True),
        ("amp-bf16/cnn/xla/float32/forward", "amp-bf16/cnn/xla/float32/forward2", False),
        ("cnn", "amp-bf16/cnn/xla/float32/forward", False),
        ("*/cnn/*", "amp-bf16/cnn/xla/float32/forward", True),
        ("*/cnn/*", "amp-bf16/cnn-blocks/xla/float32/forward", False),
        ("amp-bf16/*", "grad/amp-bf16/x", False),
        ("AMP-bf16/*", "amp-bf16/cnn/xla/float32/forward", False),
        ("eager/mlp?/*", "eager/mlp/cpu/float32/forward", False),
    ],
)
def test_globs_match_whole_ids(glob: str, case_id: str, covered: bool) -> None:
    assert entry(glob).covers(case_id, TODAY) is covered


@pytest.mark.parametrize(("day", "covered"), [(29, True), (30, False)])
def test_an_entry_ends_on_the_day_it_expires(day: int, covered: bool) -> None:
    today = dt.date(2027, 6, day)
    ledger = Ledger((entry("a/*"),))
    assert bool(ledger.covering("a/b", today)) is covered


def test_only_entries_that_cover_are_given() -> None:
    ledger = Ledger((entry("a/*"), entry("b/*"), entry("*")))
    assert ledger.covering("a/b", TODAY) == (ledger.entries[0], ledger.entries[2])


ROW = entry("a/*")
COLUMN = entry("a/*", match="view column")


def test_lines_that_are_all_explained_are_foreseen() -> None:
    lines = ["out: view row at [1, :]: expected", "out: view column: expected", "grad:x: view row: expected"]
    assert foreseen((ROW, COLUMN), Verdict.FAIL, lines) == (ROW, COLUMN)


def test_only_entries_that_explain_a_line_are_causes() -> None:
    assert foreseen((ROW, COLUMN), Verdict.FAIL, ["out: view row"]) == (ROW,)


def test_one_line_that_is_not_explained_spoils_all() -> None:
    assert foreseen((ROW,), Verdict.FAIL, ["out: view row", "out: view gain"]) == ()


def test_another_verdict_is_not_foreseen() -> None:
    assert foreseen((ROW,), Verdict.ERROR, ["out: view row"]) == ()


def test_nothing_said_is_not_foreseen() -> None:
    assert foreseen((ROW,), Verdict.FAIL, []) == ()
    assert foreseen((), Verdict.FAIL, ["out: view row"]) == ()


def test_shipped_ledgers_can_be_read_and_belong_to_a_device() -> None:
    from accelcheck.core.matrix import devices

    known = {"all", *devices()}
    paths = sorted(FOLDER.glob("*.toml"))
    assert {path.stem.removesuffix("-seeds") for path in paths} <= known
    Ledger.load(tuple(paths))


def test_a_device_without_a_ledger_ships_none() -> None:
    assert all(path.stem == "all" for path in shipped(("no-such-device",)))
