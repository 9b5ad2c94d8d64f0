"""Techniques of serving: right results pass, wrong ones fail, and runs without evidence are errors."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fault_harness import Bed, built_in, erred, failed, passed, seeded
from technique_harness import StubDevice, agrees, engaged, named, run
from torch import nn

from accelcheck.core.capability import Code
from accelcheck.core.case import Verdict
from accelcheck.core.registry import discover
from accelcheck.selftest import runner
from accelcheck.selftest.faults import serving as faults
from accelcheck.techniques.base import Technique, Unsupported
from accelcheck.techniques.matrix import Matrix
from accelcheck.techniques.serving import decoding, speculative
from accelcheck.techniques.serving.decoding import Serving
from accelcheck.verify.oracle import Store
from accelcheck.workloads.base import Problem
from accelcheck.workloads.decoders import DECODED, SERVED, Decoder, KeyValueCache, Options, Uncached

TECHNIQUES = cast("list[Technique]", discover("accelcheck.techniques.serving", "TECHNIQUES"))
COMPILING = {"decode-static-compiled", "flex-scores", "flex-scores-eager"}
EXACT = [
    (technique.name, name)
    for technique in TECHNIQUES
    if technique.name not in COMPILING and technique.oracle == "float64"
    for name in sorted(technique.workloads)
]


@pytest.mark.parametrize(("name", "served"), EXACT)
def test_serving_equals_whole_passes(name: str, served: str) -> None:
    agrees(named(TECHNIQUES, name), lambda: built_in()[served].problem(1))


def test_a_decoder_without_a_cache_gives_the_logits_of_one_pass() -> None:
    problem = built_in()["speed-decoding"].problem(1)
    whole = Decoder(Options())
    whole.load_state_dict(problem.module.state_dict())
    assert isinstance(problem.module, Uncached)
    assert torch.allclose(problem.module(*problem.inputs), whole(*problem.inputs), atol=1e-5)


def test_techniques_that_are_timed_serve_the_timed_decoder() -> None:
    assert {technique.name for technique in TECHNIQUES if "speed-decoding" in technique.workloads} == DECODED - {
        "eager"
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(COMPILING))
def test_compiled_serving_equals_whole_passes(name: str) -> None:
    technique, place = named(TECHNIQUES, name), StubDevice(features=("host", "inductor"))
    for served in sorted(technique.workloads):
        agrees(technique, lambda served=served: built_in()[served].problem(1), device=place)  # type: ignore[misc]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", ["decode-int8-cache", "decode-float8-cache"])
def test_a_quantized_cache_equals_its_emulation(name: str, tmp_path: Path) -> None:
    technique = named(TECHNIQUES, name)
    passed(Store(tmp_path), technique, seeded("decoder"))
    exact = named(TECHNIQUES, "decode-dynamic")
    problem = built_in()["decoder"].problem(1)
    ran, other = engaged(technique, problem), engaged(exact, built_in()["decoder"].problem(1))
    apart = (ran.result["out"] - other.result["out"]).abs().max()
    assert 1e-3 < apart < 0.5  # a scheme, and no rounding


def test_every_serving_technique_is_named_by_the_decoders() -> None:
    assert {technique.name for technique in TECHNIQUES} < SERVED


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", [fault.name for fault in faults.FAULTS])
def test_a_planted_fault_is_caught(name: str, tmp_path: Path) -> None:
    (row,) = (row for row in runner.rows() if row.plant == name)
    caught = runner.attempt(row, 0, runner.bench(Bed(), Matrix.load(), Store(tmp_path)))
    assert caught.verdict is Verdict.FAIL, caught.reason
    values = {"row", "column", "gain"} & {*caught.views}
    assert values or name == "speculative-draft"  # which the draws alone show


@pytest.mark.slow
@pytest.mark.parametrize("name", [variant.name for variant in faults.VARIANTS])
def test_a_correct_variant_passes(name: str, tmp_path: Path) -> None:
    bench = runner.bench(Bed(), Matrix.load(), Store(tmp_path))
    for row in runner.rows():
        if row.plant == name:
            assert runner.attempt(row, 0, bench).verdict is Verdict.PASS


def test_a_run_without_evidence_is_an_error(tmp_path: Path) -> None:
    def seen(program: Any, log: Any) -> tuple[()]:
        return ()

    silent = Serving("decode-dynamic", "None.", lambda program, tokens: program.module(tokens), seen, "decoder")
    assert "evidence" in erred(Store(tmp_path), silent, seeded("decoder")).why


def test_whole_passes_in_place_of_steps_fail_the_evidence(tmp_path: Path) -> None:
    def whole(program: Any, tokens: torch.Tensor) -> Any:
        cache = KeyValueCache()
        program.extras[decoding.KEPT] = [6, *[1] * 8], cache
        return decoding.fed(program.module, cache, tokens)

    lazy = Serving("decode-dynamic", "None.", whole, decoding.steps, "decoder")
    assert "passes, by their embeddings = 9: observed 1" in failed(Store(tmp_path), lazy, seeded("decoder")).why


def test_a_cache_that_lacks_a_token_fails_the_evidence(tmp_path: Path) -> None:
    def lacking(program: Any, tokens: torch.Tensor) -> Any:
        out = decoding.decoded(KeyValueCache, 1, program, tokens)
        program.extras[decoding.KEPT][1].crop(13)
        return out

    short = Serving("decode-dynamic", "None.", lacking, decoding.steps, "decoder")
    why = failed(Store(tmp_path), short, seeded("decoder")).why
    assert "tokens taken by all passes = 14: observed 13" in why
    assert "keys of block 1, torch.float32 = 14: observed 13" in why


@pytest.mark.parametrize(
    ("name", "served", "claims"),
    [
        ("batch-invariant", "decoder", ["passes, by"]),
        ("lora-unmerged", "decoder-adapters", ["calls of layers"]),
        ("gqa-sdpa", "decoder", ["query heads"]),
        ("speculative-greedy", "decoder-greedy", ["accepted of", "passes of"]),
    ],
)
def test_a_whole_pass_has_no_evidence(name: str, served: str, claims: list[str]) -> None:
    technique: Any = copy.copy(named(TECHNIQUES, name))
    left = {"lora-unmerged": [], "gqa-sdpa": [], "speculative-greedy": Counter(passes=16, tokens=16)}

    def whole(program: Any, *inputs: torch.Tensor) -> Any:
        out = program.module(*inputs)
        program.extras[decoding.KEPT] = left.get(name, out)
        return out

    technique.serve = whole
    lacking = run(technique, built_in()[served].problem(1)).missing()
    assert [claim[: len(words)] for claim, words in zip(lacking, claims, strict=True)] == claims


def test_another_module_is_unsupported() -> None:
    for technique in TECHNIQUES:
        with pytest.raises(Unsupported, match="alone"):
            run(technique, Problem(nn.ReLU(), (torch.ones(2),)))


def test_sequences_without_a_common_beginning_are_unsupported() -> None:
    problem = Problem(Decoder(Options()), (torch.tensor([[1, 2], [3, 4]]),))
    with pytest.raises(Unsupported, match="no common beginning"):
        run(named(TECHNIQUES, "prefix-cache"), problem)


def test_a_decoder_without_a_window_has_no_sliding_cache() -> None:
    with pytest.raises(Unsupported, match="sees all positions"):
        run(named(TECHNIQUES, "decode-sliding"), built_in()["decoder"].problem(1))


def test_shared_key_heads_need_attention_that_sdpa_computes() -> None:
    technique = named(TECHNIQUES, "gqa-sdpa")
    assert technique.accepts(built_in()["decoder"])
    assert "attention" in technique.refusal(built_in()["decoder-scores"])


def test_capability_by_device() -> None:
    place = StubDevice("vendor")
    answers = {technique.name: technique.capability(place).code for technique in TECHNIQUES}
    flex = {"flex-scores", "flex-scores-eager"}
    assert {name for name, code in answers.items() if code is not Code.OK} == flex
    assert {answers[name] for name in flex} == {Code.NO_BACKEND}


def test_a_cropped_cache_forgets_scales_and_positions_too() -> None:
    cache = decoding.QuantizedCache(decoding.int8)
    for at in range(5):
        cache.update(0, torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), torch.tensor([at]))
    cache.length = 5
    cache.crop(3)
    assert [part.shape[-min(part.dim(), 2)] for part in cache.stored[0]] == [3] * 5


@pytest.mark.parametrize(("distance", "least", "most"), [(0.0, 0, 3), (200.0, 200, 200)])
def test_the_chi_square_test_has_the_stated_power(distance: float, least: int, most: int) -> None:
    wanted = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    other = wanted.clone()
    move = (distance / speculative.DRAWS / (1 / wanted[0] + 1 / wanted[1])) ** 0.5
    other[0] += move
    other[1] -= move
    assert float(((other - wanted) ** 2 / wanted).sum()) * speculative.DRAWS == pytest.approx(distance)
    chances = [
        speculative.likelihood(
            torch.multinomial(
                other, speculative.DRAWS, replacement=True, generator=torch.Generator().manual_seed(seed)
            ),
            wanted,
        )
        for seed in range(200)
    ]
    limit = speculative.ALARM if distance else 0.01
    assert least <= sum(chance < limit for chance in chances) <= most + (0 if distance else 4)


def test_rare_tokens_are_counted_together() -> None:
    wanted = torch.tensor([0.5, 0.5 - 2e-5, 1e-5, 1e-5], dtype=torch.float64)
    tokens = torch.tensor([0] * 10_000 + [1] * 9_998 + [2, 3])
    assert speculative.likelihood(tokens, wanted) > 0.9


def test_the_chance_of_a_chi_square_is_that_of_tables() -> None:
    tokens = torch.tensor([0] * 60 + [1] * 40)
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert speculative.likelihood(tokens, even) == pytest.approx(0.0455, abs=1e-4)  # of 4, with 1 degree of freedom
