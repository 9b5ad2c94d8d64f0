"""Claims as data: what is refused of it, and the outcomes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from claims_harness import ENTRY, claim, claims, experiments, given, written

from accelcheck.experiments.claims import catalogue
from accelcheck.experiments.claims.catalogue import ClaimsError, ClaimStatus, Measured, What, judged

# The data

PROMISED = {
    "torchscript-matmul-relu-speed": 1.5,
    "amp-training-speed": 2.5,
    "amp-training-memory": 0.5,
    "flash-attention-speed": 5.0,
    "flash-attention-error": 1e-4,
    "flash-attention-memory": 2.0,
    "tensorrt-speed": 4.2,
    "cupy-matmul-speed": 82.0,
    "non-contiguous-matmul-time": 0.5,
    "non-contiguous-convolution-time": 0.75,
    "non-contiguous-transpose-time": 1.5,
    "inplace-add-memory": 0.5,
    "inplace-relu-memory": 0.5,
    "inplace-matmul-memory": 0.33,
    "inplace-convolution-memory": 0.33,
    "int8-dynamic-speed": 2.5,
    "int8-dynamic-memory": 0.6,
    "int8-static-speed": 3.3,
    "int8-static-memory": 0.65,
    "fp16-speed": 2.0,
    "fp16-memory": 0.5,
    "checkpointing-memory": 0.5,
    "compile-static-speed": 5.32,
    "compile-dynamic-speed": 3.38,
    "compile-static-few-time": 0.0,
    "compile-dynamic-few-time": 0.0,
    "compile-amp-training-speed": 1.8,
    "compile-amp-training-memory": 0.4,
    "xla-matmul-speed": 1.0,
    "liger-loss-memory": 0.6,
    "cut-cross-entropy-memory": 0.96,
    "llm-int8-memory": 0.5,
    "float8-training-speed": 1.34,
}


def test_the_packaged_claims_are_those_that_were_asked_for() -> None:
    assert {item.name: item.figure for item in claims()} == PROMISED
    assert next(item for item in claims() if item.name == "amp-training-speed").most == 3.5


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_each_has_an_experiment_that_measures_it_and_words_for_people(name: str) -> None:
    match = next(item for item in claims() if item.name == name)
    assert match.what in experiments()[match.experiment].gives
    assert match.workload
    assert match.published.endswith(".")
    assert match.source or "without an address" in match.published, "a claim without a source says so"


def test_every_experiment_serves_a_claim() -> None:
    assert {item.experiment for item in claims()} == set(experiments())


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        *[({field: None}, field, "missing") for field in ENTRY if field != "name"],
        ({"name": '""'}, "name", "expected a text"),
        ({"workload": "7"}, "workload", "expected a text, got 7"),
        ({"experiment": '"fp17"'}, "experiment", "Did you mean 'fp16'?"),
        ({"what": '"fun"'}, "what", "expected one of speed-up, extra-time, memory, error, growth"),
        ({"what": '"error"', "least": None, "most": "0.1"}, "what", "experiment fp16 measures memory, speed-up"),
        ({"least": "0.0"}, "least", "from 0.01 to 1e+06"),
        ({"least": "-2.0"}, "least", "got -2.0"),
        ({"least": "nan"}, "least", "got nan"),
        ({"least": "inf"}, "least", "got inf"),
        ({"least": "true"}, "least", "got True"),
        ({"least": '"2x"'}, "least", "got '2x'"),
        ({"most": "1.0"}, "most", "expected no less than 'least', 2, got 1"),
        ({"what": '"memory"', "least": "50.0"}, "least", "from 0.001 to 1 for memory"),
        ({"devices": "[]"}, "devices", "expected a list of cpu, gpu, tpu"),
        ({"devices": '["cuda"]'}, "devices", "got ['cuda']"),
        ({"devices": '"gpu"'}, "devices", "expected a list"),
        ({"source": '"http://example.org"'}, "source", "begins with https://"),
        ({"figure": "2.0"}, "figure", "Legal values: devices, experiment"),
    ],
)
def test_wrong_entries_are_named_in_full(tmp_path: Path, changes: dict[str, str | None], field: str, said: str) -> None:
    path = written(tmp_path / "mine.toml", **changes)
    with pytest.raises(ClaimsError) as refused:
        catalogue.load(path, given())
    text = str(refused.value)
    assert text.startswith(f"{path}: claim 1 (")
    assert f"field {field!r}: " in text
    assert said in text


def test_an_entry_without_a_name_is_known_by_its_number(tmp_path: Path) -> None:
    with pytest.raises(ClaimsError, match="claim 1: field 'name': missing"):
        catalogue.load(written(tmp_path / "mine.toml", name=None), given())


def test_figures_have_the_end_that_their_kind_needs(tmp_path: Path) -> None:
    growing = {"experiment": '"flash-attention"', "what": '"growth"'}
    with pytest.raises(ClaimsError, match="field 'least': a claim of growth has only an upper end"):
        catalogue.load(written(tmp_path / "a.toml", **growing), given())
    with pytest.raises(ClaimsError, match="field 'most': missing"):
        catalogue.load(written(tmp_path / "b.toml", **growing, least=None), given())
    (first,) = catalogue.load(written(tmp_path / "c.toml", **growing, least=None, most="2"), given())
    assert first.figure == 2.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"field 'claim': missing; expected a list of tables, \[\[claim\]\]"),
        ("[[claim]\n", "not TOML"),
        ("claim = []\n", "expected a list of tables"),
        ("claim = [1]\n", "claim 1: field 'claim': expected a table, got 1"),
        ("[[claim]]\n[other]\n", "unknown field 'other'"),
    ],
)
def test_a_file_that_is_wrong_as_a_whole_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ClaimsError, match=said) as refused:
        catalogue.load(path, given())
    assert str(path) in str(refused.value)


def test_an_absent_file_and_a_name_that_is_there_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClaimsError, match="cannot be read"):
        catalogue.load(tmp_path / "absent.toml", given())
    path = written(tmp_path / "mine.toml")
    path.write_text(path.read_text() * 2)
    with pytest.raises(ClaimsError, match=r"claim 2 \(mine\): field 'name': 'mine' is also the name of another claim"):
        catalogue.load(path, given())


@pytest.mark.parametrize(
    ("what", "figure", "low", "high", "expected"),
    [
        (What.SPEED_UP, 1.5, 1.5, 1.9, ClaimStatus.CONFIRMED),
        (What.SPEED_UP, 1.5, 1.49, 1.9, ClaimStatus.UNDECIDED),
        (What.SPEED_UP, 1.5, 1.0, 1.49, ClaimStatus.NOT_CONFIRMED),
        (What.EXTRA_TIME, 0.0, 0.0, 0.1, ClaimStatus.CONFIRMED),
        (What.EXTRA_TIME, 0.0, -0.1, 0.1, ClaimStatus.UNDECIDED),
        (What.EXTRA_TIME, 0.5, -0.1, 0.1, ClaimStatus.NOT_CONFIRMED),
        (What.ERROR, 1e-4, 1e-4, 1e-4, ClaimStatus.CONFIRMED),
        (What.ERROR, 1e-4, 1.1e-4, 1.1e-4, ClaimStatus.NOT_CONFIRMED),
        (What.GROWTH, 2.0, 1.9, 2.1, ClaimStatus.UNDECIDED),
        (What.MEMORY, 0.5, 0.4951, 0.4951, ClaimStatus.CONFIRMED),  # 50 % in whole percents
        (What.MEMORY, 0.5, 0.4949, 0.4949, ClaimStatus.NOT_CONFIRMED),
        (What.SPEED_UP, 1.5, math.nan, 2.0, ClaimStatus.NOT_MEASURABLE),
        (What.SPEED_UP, 1.5, 2.0, math.inf, ClaimStatus.NOT_MEASURABLE),
    ],
)
def test_a_claim_is_confirmed_only_where_the_whole_interval_reaches_it(
    what: What, figure: float, low: float, high: float, expected: ClaimStatus
) -> None:
    assert judged(claim(what, figure), Measured((low + high) / 2, low, high, "")).outcome is expected
