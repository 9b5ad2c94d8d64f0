"""Shards: each case is in exactly one, the same on every machine, and a run says that it is one."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from plugin_harness import JOURNAL, Suite, only

from accelcheck.core.case import WEIGHTS, Case, Mode, Verdict
from accelcheck.core.journal import Record
from accelcheck.core.selection import Selection
from accelcheck.core.shards import Shard, absent
from accelcheck.plugin.configuration import RunConfiguration
from accelcheck.report import terminal
from accelcheck.report.coverage import Scope
from accelcheck.report.run import load
from accelcheck.techniques.matrix import Matrix

USAGE, NOTHING_RAN = pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED
WORDS = [*only("toy", "toy-too"), "--accel-workload=small", "--accel-workload=later", "--accel-level=3"]
"""12 cases: two techniques, three workloads, two dtypes."""


@pytest.fixture(scope="module")
def whole() -> Matrix:
    return Matrix.load()


def ids(matrix: Matrix, modes: tuple[Mode, ...] = tuple(Mode), **fields: object) -> list[str]:
    selection = Selection(**({"devices": ("cpu",), "level": 4} | fields))  # type: ignore[arg-type]  # of several types
    return [case.id for case in matrix.cases(selection, modes)]


def parts(matrix: Matrix, of: int, modes: tuple[Mode, ...] = tuple(Mode), **fields: object) -> list[list[str]]:
    return [ids(matrix, modes, shard=Shard(number, of), **fields) for number in range(1, of + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, 2, 3, 16])
@pytest.mark.parametrize("level", [1, 4])
def test_every_case_is_in_exactly_one_shard_and_shards_have_the_same_size(whole: Matrix, of: int, level: int) -> None:
    result = parts(whole, of, level=level)
    every = ids(whole, level=level)
    assert Counter(case for part in result for case in part) == Counter(every)
    sizes = [len(part) for part in result]
    assert max(sizes) - min(sizes) <= 1
    order = {case: place for place, case in enumerate(every)}
    assert all([order[case] for case in part] == sorted(order[case] for case in part) for part in result)


@pytest.mark.slow
def test_shards_weigh_the_same_but_for_one_case(whole: Matrix) -> None:
    weights = [sum(WEIGHTS.get(Mode(case.rpartition("/")[2]), 1) for case in part) for part in parts(whole, 7)]
    assert max(weights) - min(weights) <= max(WEIGHTS.values())


@pytest.mark.slow
def test_a_technique_is_spread_over_the_shards(whole: Matrix) -> None:
    by_technique = [Counter(case.partition("/")[0] for case in part) for part in parts(whole, 2)]
    for name, count in Counter(case.partition("/")[0] for case in ids(whole)).items():
        assert abs(by_technique[0][name] - by_technique[1][name]) <= min(count, len(Mode))


@pytest.mark.slow
def test_a_shard_does_not_depend_on_the_modes_that_a_test_collects(whole: Matrix) -> None:
    for modes in ((Mode.SPEED,), (Mode.TRAIN, Mode.FORWARD)):
        for part, some in zip(parts(whole, 3), parts(whole, 3, modes), strict=True):
            assert set(some) == {case for case in part if case.rpartition("/")[2] in set(modes)}


def test_a_shard_does_not_depend_on_the_devices_of_a_machine(whole: Matrix) -> None:
    alone = ids(whole, shard=Shard(2, 3))
    beside = ids(whole, shard=Shard(2, 3), devices=("xla", "cpu"))
    assert [case for case in beside if "/cpu/" in case] == alone
    assert [case.replace("/xla/", "/cpu/") for case in beside if "/xla/" in case] == alone


@pytest.mark.slow
def test_must_pass_cases_of_other_shards_are_not_missing(whole: Matrix) -> None:
    shards = [Scope.of(whole, Selection(("cpu",), level=1, shard=Shard(number, 2))) for number in (1, 2)]
    assert [scope.missing for scope in shards] == [(), ()]
    assert sum(scope.elsewhere for scope in shards) == len(ids(whole, level=1))


def test_whether_a_device_qualifies_is_not_asked_of_one_shard() -> None:
    record = Record(Case("eager", "mlp", "cpu", "float32", Mode.FORWARD, 1), Verdict.PASS, compared=1)

    def said(shard: Shard | None) -> list[str]:
        selection = Selection(("cpu",), shard=shard)
        return terminal._qualified([record], RunConfiguration(selection, {}, autoload=True, folder=Path(), ledgers=()))

    assert said(None)[0].startswith("cpu does not qualify at level 1: 1 of ")
    assert said(Shard(1, 2)) == []


@pytest.mark.slow
def test_cases_by_id_have_shards_too(whole: Matrix) -> None:
    chosen = tuple(ids(whole)[::50])
    result = parts(whole, 4, level=1, cases=chosen)
    assert sorted(case for part in result for case in part) == sorted(chosen)
    assert max(map(len, result)) - min(map(len, result)) <= 1


@pytest.mark.slow
def test_the_shards_of_a_run_add_up_to_it_with_and_without_workers(suite: Suite) -> None:
    every = itertools.product(("toy", "toy-too"), ("tiny", "small", "later"), ("float32", "bfloat16"))
    ran = [suite.run(*WORDS, f"--accel-shard={number}/3", "-n", "1" if number == 2 else "0") for number in (1, 2, 3)]
    assert Counter(case for part in ran for case in part.verdicts) == Counter(
        f"{technique}/{workload}/cpu/{dtype}/forward" for technique, workload, dtype in every
    )
    for number, run in enumerate(ran, 1):
        assert set(run.verdicts.values()) == {"pass"}
        assert run.header["selection"]["shard"] == {"number": number, "of": 3}
        assert run.lines(rf"accelcheck: level 3, shard {number}/3, devices asked for: cpu")
        assert run.lines(rf"accelcheck: level 3, shard {number}/3: 4 cases on cpu \(Toy processor\); .*")
        assert run.lines(f"  other shards: this is shard {number}/3; 8 more cases of the selection are in the others")


@pytest.mark.slow
def test_the_ini_file_takes_a_shard_and_the_next_level_adds_cases_in_all_shards(suite: Suite) -> None:
    suite.ini(accel_shard="1/1")
    ran = suite.run(*only("toy"))
    assert ran.header["selection"]["shard"] == {"number": 1, "of": 1}
    (line,) = ran.lines("  cpu, level 1 of 4: .*")
    assert "; level 2 adds 1 in all shards: pytest " in line


def test_a_run_without_shards_does_not_speak_of_them(suite: Suite) -> None:
    ran = suite.run(*only("toy"))
    assert ran.header["selection"]["shard"] is None
    assert not ran.lines("(accelcheck: |  ).*shard.*")


def test_a_shard_without_a_case_says_so(suite: Suite) -> None:
    ran = suite.run(*WORDS, "--accel-shard=13/13", "-rs")
    assert ran.ret == NOTHING_RAN
    assert "no case of this kind matches the selection, or none is in its shard 13/13" in ran.out


@pytest.mark.parametrize(
    "word", ["0/2", "3/2", "1", "1/0", "-1/2", "1/2/3", "a/b", "1 / 2", "1/" + "9" * 50, "²/³", ""]
)
def test_a_wrong_shard_is_answered_with_the_legal_form(suite: Suite, word: str) -> None:
    ran = suite.run(*only("toy"), f"--accel-shard={word}")
    assert ran.ret == USAGE
    (line,) = [line for line in ran.err.splitlines() if line.startswith("ERROR: accelcheck: ")]
    assert (
        line == f"ERROR: accelcheck: unknown shard {word!r}. Legal values: I/N with 1 <= I <= N <= 999999, such as 1/4."
    )


@pytest.mark.slow
def test_a_run_does_not_go_on_with_the_journal_of_another_shard(suite: Suite) -> None:
    suite.run(*only("toy"), "--accel-shard=1/1")
    refused = suite.inside(
        "--pyargs", "accelcheck.suite", *only("toy"), f"--accel-resume={JOURNAL}", "--accel-shard=1/2"
    )
    assert refused.ret == USAGE
    assert "selection.shard.of was 1, and is 2" in refused.stderr.str()


def selection(number: object, of: object, level: int = 1) -> dict[str, object]:
    return {"devices": ["cpu"], "level": level, "shard": {"number": number, "of": of}}


def test_shards_that_are_missing_are_named() -> None:
    assert absent([selection(1, 2), selection(2, 2), {"shard": None}, {}]) == []
    assert absent([selection(1, 4), selection(3, 4), selection(1, 2, level=2)]) == [
        "incomplete: shards 2, 4 of 4 missing, and with them their cases",
        "incomplete: shard 2 of 2 missing, and with them their cases",
    ]
    (line,) = absent([selection(5, 1000)])
    assert line.startswith("incomplete: shards 1, 2, 3, 4, 6, 7, 8, 9 and 991 more of 1,000 missing")


@pytest.mark.parametrize(
    "shard",
    [
        pytest.param({"number": 3, "of": 2}, id="number above"),
        pytest.param({"number": 1, "of": 10**5000}, id="huge"),
        pytest.param({"number": True, "of": 2}, id="flag"),
        pytest.param({"number": "1", "of": 2}, id="text"),
        pytest.param([1, 2], id="list"),
    ],
)
def test_what_is_no_shard_in_a_strangers_journal_is_ignored(shard: object) -> None:
    assert absent([{"devices": ["cpu"], "shard": shard}]) == []


def test_a_report_of_journals_says_which_shards_are_missing(suite: Suite) -> None:
    suite.run(*WORDS, "--accel-shard=2/3")
    (run,) = load([suite.path / JOURNAL])
    assert run.remarks == ("incomplete: shards 1, 3 of 3 missing, and with them their cases",)
