"""The ledger: strict about what it reads, anchored in what it covers, and hiding nothing that it does not foresee."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from accelcheck.core.case import Verdict
from accelcheck.expectations.ledger import FOLDER, Entry, Ledger, LedgerError, foreseen, outgrown, shipped, size

if TYPE_CHECKING:
    from pathlib import Path

TODAY = dt.date(2027, 1, 1)
FIELDS = {
    "cases": '["amp-bf16/cnn/xla/*"]',
    "verdict": '"fail"',
    "match": '"view row"',
    "at-most": "2.5",
    "reason": '"The convolution rounds twice."',
    "link": '"https://example.invalid/1"',
    "owner": '"the vendor"',
    "expires": "2027-06-30",
}


def text(**changes: str | None) -> str:
    fields = {name: value for name, value in (FIELDS | changes).items() if value is not None}
    return "\n".join(["schema = 2", "[[entry]]", *(f"{name} = {value}" for name, value in fields.items())])


def load(folder: Path, content: str | bytes) -> Ledger:
    path = folder / "device.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Ledger.load((path,))


def entry(*cases: str, match: str = "view row", at_most: float | str = 2.0, verdict: Verdict = Verdict.FAIL) -> Entry:
    return Entry(cases, verdict, match, at_most, "reason", "link", "owner", dt.date(2027, 6, 30))


def test_an_entry_is_read(tmp_path: Path) -> None:
    (read,) = load(tmp_path, text(owner='" the vendor "')).entries
    assert read == Entry(
        ("amp-bf16/cnn/xla/*",),
        Verdict.FAIL,
        "view row",
        2.5,
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
        ("", "field 'schema': missing; expected 2, which this accelcheck reads"),
        ("schema = 1", "(entries of schema 1 had no size: give each an at-most, as docs/ledger.md says), got 1"),
        ("schema = 3", "field 'schema': expected 2, which this accelcheck reads"),
        ('schema = "2"', "field 'schema': expected 2, which this accelcheck reads"),
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("out: view row at [3, :]: expected at most 2.000e-06, got 9.000e-06", 4.5),
        ("out: view row at [3, :] [draw 2]: expected at most 2.000e+01, got 9.000e+01", 4.5),
        ("out: view bias in all draws: expected at most 0.000e+00, got 1.000e-30", math.inf),
        ("out: view gain: expected at most 2.000e-06, got nan", math.inf),
        ("out: view gain: expected at most 2.000e-06, got inf", math.inf),
        ("loss[3]: loss of the training: expected at most 1.000e-01, got 3.000e-01", 3.0),
        (
            "accuracy: view drop: expected a drop of at most 1.000% at 97.5% confidence, got 2.000%, at most 4.000%: from",
            4,
        ),
        ("regression: expected at most 1.25 times the baseline's time beside FP32 eager, got 2.5 (3 pairs)", 2.0),
        ("regression: expected a peak of at most 1000 bytes, got 3000", 3.0),
        ("limit: expected memory at most 0.5, got 1 (because)", 2.0),
        ("limit: expected speed up at least 3, got 1.5 (because)", 2.0),
        ("out: NaN pattern, 12 elements differ, first at [0] [nan[0]]: expected 0 of them, got 12", 12.0),
        ("out[1]: +Inf pattern, 1 element differ, first at [0]: expected 0 of them, got 1", 1.0),
        ("out[2, 1]: value [draw 1]: expected 5, got -7", 12.0),
        ("out[2, 1]: value: expected True, got False", 1.0),
        ("out[2, 1]: value: expected (1+2j), got (1-2j)", 4.0),
        ("out: rerun: expected the same bits, got 0.25 relative difference", 0.25),
        ("loss[1]: not finite: expected numbers, got 3 that are none", 3.0),
        ("grad:w: missing: expected a tensor, got nothing", None),
        ("not engaged: graphs compiled >= 1: observed 0", None),
        ("input[0]: mutated: expected it bitwise unchanged", None),
        ("scaler: scale after step 5, 3 clean steps: expected 131072, got 65536", None),
        ("run: raised [draw 1]: expected a result, got LookupError: at most 3", None),
    ],
)
def test_a_line_says_its_size(line: str, expected: float | None) -> None:
    assert size(line) == (None if expected is None else pytest.approx(expected))


def test_a_fault_beyond_its_size_is_not_foreseen_and_says_so() -> None:
    lines = ["out: view row at [1, :]: expected at most 1.0e-03, got 4.0e-02"]
    known = entry("a/*", at_most=12.5)
    assert foreseen((known,), Verdict.FAIL, lines) == ()
    assert outgrown((known,), Verdict.FAIL, lines) == [
        f"ledger: expected at most 12.5 times the budget, got 40 (reason): {lines[0]}"
    ]
    assert foreseen((known, entry("a/*", at_most=41.0)), Verdict.FAIL, lines)
    assert outgrown((known, entry("a/*", at_most=41.0)), Verdict.FAIL, lines) == []


def test_an_entry_without_a_size_covers_no_fault_with_one() -> None:
    wide = entry("a/*", match="out: ", at_most=0.0)
    assert foreseen((wide,), Verdict.FAIL, ["out: missing: expected a tensor, got nothing"]) == (wide,)
    (said,) = outgrown((wide,), Verdict.FAIL, ["out: view row: expected at most 1.0, got 1.1"])
    assert said.startswith("ledger: the entry has at-most = 0, which covers faults without a size only (reason): ")


def test_an_error_is_foreseen_by_its_class_also_where_one_draw_raised_it() -> None:
    known = entry("a/*", match="no kernel", at_most="LookupError", verdict=Verdict.ERROR)
    raised = "run: raised [draw 1]: expected a result, got "
    assert foreseen((known,), Verdict.ERROR, ["LookupError: no kernel"]) == (known,)
    assert foreseen((known,), Verdict.FAIL, [f"{raised}LookupError: no kernel"]) == (known,)
    assert foreseen((known,), Verdict.ERROR, ["OSError: no kernel"]) == ()
    assert foreseen((known,), Verdict.FAIL, [f"{raised}OSError: no kernel"]) == ()
    assert foreseen((known,), Verdict.FAIL, ["out: view row: no kernel"]) == ()


@pytest.mark.parametrize(("verdict", "size"), [('"error"', "2.0"), ('"fail"', '"RuntimeError"')])
def test_a_size_that_does_not_fit_the_verdict_is_refused(verdict: str, size: str, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"entry 1: field 'at-most': expected .* for the verdict (fail|error), got "):
        load(tmp_path, text(verdict=verdict, **{"at-most": size}))


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


@pytest.mark.parametrize(
    "line",
    [
        "not engaged: bits: value: expected foo, got bar",
        "not engaged: bits: expected at most 1.2.3, got 4.5.6",
    ],
)
def test_a_line_of_somebody_else_that_looks_like_a_fault_has_no_size(line: str) -> None:
    assert size(line) is None


def test_a_pattern_without_an_end_does_not_stall_a_run(tmp_path: Path) -> None:
    (read,) = load(tmp_path, text(match='"(a+)+$"')).entries
    assert not read.finds("a" * 10_000 + "b", Verdict.FAIL)


def test_a_pattern_that_re2_does_not_have_is_refused_by_file_entry_and_field(tmp_path: Path) -> None:
    with pytest.raises(LedgerError) as raised:
        load(tmp_path, text(match="'a(?=b)'"))
    assert str(raised.value) == (
        f"{tmp_path / 'device.toml'}: entry 1: field 'match': expected a regular expression, got 'a(?=b)': "
        "invalid perl operator: (?= (the syntax is RE2's)"
    )


def test_an_entry_with_chips_applies_to_these_alone(tmp_path: Path) -> None:
    known = Ledger((replace(entry("eager/*"), chips=("Intel*", "AMD EPYC")), entry("amp-bf16/*")))
    case = "eager/mlp/xla/float32/forward"
    assert len(known.covering(case)) == 1, "where no chip is known"
    for chip, applies in (("Intel(R) Xeon(R)", True), ("AMD EPYC", True), ("AMD EPYC 9004", False), ("", False)):
        here = replace(known, chips={"xla": chip, "cpu": "Intel"})
        assert bool(here.covering(case)) is applies, chip
        assert bool(here.of_any_size().covering(case)) is applies
        assert here.covering("amp-bf16/mlp/xla/float32/forward")
