"""The ledger: strict about what it reads, anchored in what it covers, and hiding nothing that it does not foresee."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelcheck.core.case import Verdict
from accelcheck.core.fault import Fault, FaultKind
from accelcheck.expectations.ledger import FOLDER, SCHEMA, Entry, Ledger, LedgerError, shipped

TODAY = dt.date(2027, 1, 1)
FIELDS = {
    "cases": '["amp-bf16/cnn/xla/*"]',
    "verdict": '"fail"',
    "kind": '"view"',
    "path": '"out"',
    "view": '["row", "gain*"]',
    "at-most": "2.5",
    "reason": '"The convolution rounds twice."',
    "link": '"https://example.invalid/1"',
    "owner": '"the vendor"',
    "expires": "2027-06-30",
}


OLDER: dict[str, str | None] = {"kind": None, "path": None, "view": None, "match": '"view row"'}
"""Changes that make an entry of schema 2 of it."""
ERROR: dict[str, str | None] = OLDER | {"verdict": '"error"', "match": '"no kernel"', "at-most": '"RuntimeError"'}


def text(changes: dict[str, str | None] | None = None, schema: int = SCHEMA) -> str:
    fields = {name: value for name, value in (FIELDS | (changes or {})).items() if value is not None}
    return "\n".join([f"schema = {schema}", "[[entry]]", *(f"{name} = {value}" for name, value in fields.items())])


def load(folder: Path, content: str | bytes) -> Ledger:
    path = folder / "device.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Ledger.load((path,))


def entry(*cases: str, at_most: float | str = 2.0, **fields: Any) -> Entry:
    return Entry(
        cases, Verdict.FAIL, at_most, "reason", "link", "owner", dt.date(2027, 6, 30), kind=FaultKind.VIEW, **fields
    )


def error(match: str = "no kernel", at_most: str = "LookupError") -> Entry:
    return Entry(("a/*",), Verdict.ERROR, at_most, "reason", "link", "owner", dt.date(2027, 6, 30), match=match)


def view(path: str = "out", name: str = "row", draw: str = "", size: float = 1.5) -> Fault:
    return Fault(FaultKind.VIEW, path, name, draw, measured=size, allowed=1.0)


def raised(kind: str, said: str) -> Fault:
    return Fault(FaultKind.RAISED, "run", kind, got=said)


def test_an_entry_is_read(tmp_path: Path) -> None:
    (read,) = load(tmp_path, text({"owner": '" the vendor "'})).entries
    assert read == Entry(
        ("amp-bf16/cnn/xla/*",),
        Verdict.FAIL,
        2.5,
        "The convolution rounds twice.",
        "https://example.invalid/1",
        "the vendor",
        dt.date(2027, 6, 30),
        kind=FaultKind.VIEW,
        path=("out",),
        view=("row", "gain*"),
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
        ("kind", '"row"'),
        ("kind", '"raised"'),
        ("kind", '["view"]'),
        ("path", "1"),
        ("path", "[]"),
        ("draw", "[1]"),
        ("at-most", "-1"),
        ("at-most", "nan"),
        ("at-most", "inf"),
        ("at-most", "true"),
        ("at-most", '""'),
        ("at-most", '"RuntimeError"'),
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
    bad = text({name: value}).partition("\n")[2]
    with pytest.raises(LedgerError) as raised:
        load(tmp_path, f"{good}\n{bad}")
    assert f"{tmp_path / 'device.toml'}: entry 2: field '{name}'" in str(raised.value)


@pytest.mark.parametrize("value", ['"("', "1", '""', '".*"'])
def test_a_bad_match_is_named_with_its_file_and_entry(value: str, tmp_path: Path) -> None:
    for content in (text(ERROR | {"match": value}), text(OLDER | {"match": value}, schema=2)):
        with pytest.raises(LedgerError, match=r"device.toml: entry 1: field 'match': expected a "):
            load(tmp_path, content)


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"view"}))
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=f"device.toml: entry 1: field '{name}': missing; expected "):
        load(tmp_path, text({name: None}))


@pytest.mark.parametrize(("verdict", "schema"), [('"error"', 3), ('"error"', 2), ('"fail"', 2)])
def test_entries_that_find_texts_need_a_match_and_no_field_of_faults(verdict: str, schema: int, tmp_path: Path) -> None:
    entry = (ERROR if verdict == '"error"' else OLDER) | {"verdict": verdict}
    assert load(tmp_path, text(entry, schema)).entries[0].match
    with pytest.raises(LedgerError, match=r"entry 1: field 'match': missing; expected a regular expression"):
        load(tmp_path, text(entry | {"match": None}, schema))
    for name in ("kind", "path", "view", "draw", "expected", "got"):
        with pytest.raises(LedgerError, match=f"entry 1: field '{name}': expected none for the verdict"):
            load(tmp_path, text(entry | {name: '"view"'}, schema))


def test_a_fail_of_the_newest_schema_has_no_match(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="entry 1: field 'match': expected none for the verdict fail"):
        load(tmp_path, text({"match": '"view row"'}))


def test_a_field_too_many_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"device.toml: entry 1: field 'tolerance': unknown field 'tolerance'"):
        load(tmp_path, text({"tolerance": "1e-3"}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "field 'schema': missing; expected 3 or 2, which this accelcheck reads"),
        ("schema = 1", "(entries of schema 1 had no size: give each an at-most, as docs/ledger.md says), got 1"),
        ("schema = 4", "field 'schema': expected 3 or 2, which this accelcheck reads"),
        ('schema = "3"', "field 'schema': expected 3 or 2, which this accelcheck reads"),
        ("schema = ", "not TOML"),
        (b"schema = 2 # \xff", "not TOML"),
        ("schema = 2\n[[entries]]\n", "unknown field 'entries'. Did you mean 'entry'?"),
        ("schema = 2\n[entry]\n", "field 'entry': expected a list of tables"),
        ('schema = 2\nentry = ["text"]', "field 'entry': expected a table, got 'text'"),
    ],
)
def test_another_file_is_refused_by_name(content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError) as raised:
        load(tmp_path, content)
    assert "device.toml" in str(raised.value)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"none.toml cannot be read: No such file"):
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


@pytest.mark.parametrize(
    ("glob", "value", "fits"),
    [
        ("out", "out", True),
        ("out", "out[1]", False),
        ("out[1]", "out[1]", True),
        ("out[1]", "out1", False),
        ("out[?]", "out[1]", True),
        ("out[?]", "out[12]", False),
        ("out*", "out['a: b']", True),
        ("grad:*.weight", "grad:fc[0].weight", True),
        ("Out", "out", False),
        ("[!a]", "b", False),
        ("", "", True),
        ("", "out", False),
    ],
)
def test_a_glob_of_a_field_is_about_all_of_it_and_brackets_mean_themselves(glob: str, value: str, fits: bool) -> None:
    assert entry("a/*", path=(glob,)).finds(view(value)) is fits
    assert entry("a/*", path=("no", glob)).finds(view(value)) is fits
    assert entry("a/*", draw=(glob,)).finds(view(draw=value)) is fits


def test_an_entry_is_about_faults_that_fit_in_all_fields_that_it_has() -> None:
    known = entry("a/*", path=("out",), view=("row",), draw=("nan*",))
    assert known.finds(view("out", "row", "nan[0]"))
    for other in (view("loss", "row", "nan[0]"), view("out", "gain", "nan[0]"), view("out", "row")):
        assert not known.finds(other)
    assert not known.finds(replace(view("out", "row", "nan[0]"), kind=FaultKind.PATTERN))
    pattern = replace(known, kind=FaultKind.PATTERN, view=("NaN",), expected=("0 of them",), got=("1",))
    lost = Fault(FaultKind.PATTERN, "out", "NaN", "nan[0]", "1 of them", "0", 1.0)
    assert not pattern.finds(lost)
    assert pattern.finds(replace(lost, expected="0 of them", got="1"))


def test_an_entry_expects_faults_of_its_size_at_most() -> None:
    known = entry("a/*", at_most=2.0)
    assert known.explains(view(size=2.0))
    assert not known.explains(view(size=2.01))
    assert known.finds(view(size=2.01))
    assert not entry("a/*", at_most=0.0).explains(view())
    exact = replace(view(), measured=0.5, allowed=0.0)  # where nothing is allowed, as of copies
    assert not known.explains(exact)
    assert entry("a/*", at_most=0.5 * 2**23).explains(exact)
    assert not entry("a/*", at_most=0.4 * 2**23).explains(exact)
    assert not entry("a/*", at_most=1e30).explains(replace(exact, measured=math.nan))
    missing = Fault(FaultKind.METADATA, "grad:w", "missing", expected="a tensor", got="nothing")
    assert replace(entry("a/*", at_most=0.0), kind=FaultKind.METADATA).explains(missing)


def test_an_exception_is_expected_by_its_class_and_text_also_where_one_draw_raised_it() -> None:
    known = error()
    assert known.explains(raised("LookupError", "no kernel"))
    assert known.explains(replace(raised("LookupError", "no kernel"), draw="draw 1"))
    assert known.finds(raised("OSError", "no kernel"))
    assert not known.explains(raised("OSError", "no kernel"))
    assert not known.finds(view(path="no kernel"))
    assert not entry("a/*").finds(raised("LookupError", "view row"))


def test_a_ledger_of_schema_2_finds_faults_by_their_text(tmp_path: Path) -> None:
    (known,) = load(tmp_path, text(OLDER | {"match": "'^out: view row( at .*)?: expected'"}, schema=2)).entries
    assert known.explains(view("out", "row", size=2.5))
    assert not known.explains(view("out", "row", size=2.6))
    assert not known.finds(view("out", "gain"))
    assert not known.finds(view("out", "row", "draw 1"))
    (older,) = load(tmp_path, text(OLDER | {"match": "'^resume: '"}, schema=2)).entries
    assert older.explains(Fault(FaultKind.OTHER, "resume: another tensor"))


@pytest.mark.parametrize(("verdict", "size"), [('"error"', "2.0"), ('"fail"', '"RuntimeError"')])
def test_a_size_that_does_not_fit_the_verdict_is_refused(verdict: str, size: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"entry 1: field 'at-most': expected .* for the verdict (fail|error), got "):
        load(tmp_path, text((ERROR if verdict == '"error"' else {}) | {"at-most": size}))


def test_shipped_ledgers_can_be_read_and_belong_to_a_device() -> None:
    from accelcheck.devices import devices

    known = {
        "all",
        "vulkan",
        *devices(),
    }  # torchvulkan is a PrivateUse1 backend, which needs no file in accelcheck.devices
    paths = sorted(FOLDER.glob("*.toml"))
    assert {path.stem.removesuffix("-seeds") for path in paths} <= known
    Ledger.load(tuple(paths))


def test_a_device_without_a_ledger_ships_none() -> None:
    assert all(path.stem == "all" for path in shipped(("no-such-device",)))


def test_a_pattern_without_an_end_does_not_stall_a_run(tmp_path: Path) -> None:
    (read,) = load(tmp_path, text(ERROR | {"match": '"(a+)+$"'})).entries
    assert not read.finds(raised("RuntimeError", "a" * 9_000 + "b"))
    assert not entry("a/*", path=("*a" * 40 + "c",)).finds(view("a" * 9_000 + "b"))


def test_a_pattern_that_re2_does_not_have_is_refused_by_file_entry_and_field(tmp_path: Path) -> None:
    with pytest.raises(LedgerError) as raised:
        load(tmp_path, text(ERROR | {"match": "'a(?=b)'"}))
    assert str(raised.value) == (
        f"{tmp_path / 'device.toml'}: entry 1: field 'match': expected a regular expression, got 'a(?=b)': "
        "invalid perl operator: (?= (the syntax is RE2's)"
    )


def test_an_entry_with_chips_applies_to_these_alone(tmp_path: Path) -> None:
    known = Ledger((replace(entry("eager/*"), chips=("Intel*", "AMD EPYC", "*, ATen AVX2")), entry("amp-bf16/*")))
    case = "eager/mlp/xla/float32/forward"
    assert len(known.covering(case)) == 1, "where no chip is known"
    for chip, applies in (
        ("Intel(R) Xeon(R)", True),
        ("AMD EPYC", True),
        ("AMD EPYC 9004", False),
        ("", False),
        ("A, ATen AVX2", True),
    ):
        here = replace(known, chips={"xla": chip, "cpu": "Intel"})
        assert bool(here.covering(case)) is applies, chip
        assert bool(here.of_any_size().covering(case)) is applies
        assert here.covering("amp-bf16/mlp/xla/float32/forward")
