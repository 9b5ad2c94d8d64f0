"""Speculative decoding: a draft proposes tokens, and one pass of the target decides how many of them to keep."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Evidence
from accelcheck.techniques.base import Technique
from accelcheck.techniques.observe import Log, at_least
from accelcheck.techniques.serving.decoding import KEPT, Serving, fed
from accelcheck.workloads.base import Program
from accelcheck.workloads.decoders import Decoder, Greedy, KeyValueCache

AHEAD, DRAWS, ALARM, RARE = 3, 20_000, 1e-6, 5.0
"""Proposals at a time; draws for a prompt; chance that a right sampler fails; expected count of a cell of the test."""


class Draft(nn.Module):
    """Target without its last block, as in LayerSkip: arXiv:2404.16710."""

    def __init__(self, target: Decoder) -> None:
        super().__init__()
        self.target = target

    def forward(self, tokens: Tensor, positions: Tensor, cache: KeyValueCache) -> Tensor:
        x = self.target.embedding(tokens)
        for block in self.target.layers[:-1]:
            x = block(x, positions, cache)
        out: Tensor = self.target.head(self.target.norm(x))
        return out


def greedy(program: Program, prompts: Tensor) -> dict[str, Tensor]:
    """Generates each sequence alone, with as few passes of the target as the draft's guesses allow."""
    module, count = program.module.get_submodule("decoder"), int(program.module.count)  # type: ignore[arg-type]
    counts = program.extras[KEPT] = Counter[str]()
    rows = [speculated(module, prompt, count, counts) for prompt in prompts.unsqueeze(1)]
    tokens, logits = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return {"tokens": tokens, "logits": logits}


def speculated(target: Any, prompt: Tensor, count: int, counts: Counter[str]) -> tuple[Tensor, Tensor]:
    """Generates `count` tokens after a prompt ``(1, s)``; returns them and the target's logits of each."""
    models, caches, known, logits = (Draft(target), target), (KeyValueCache(), KeyValueCache()), prompt, []
    while (missing := count + prompt.size(1) - known.size(1)) > 0:
        proposed = known
        for _ in range(min(AHEAD, missing - 1)):
            guess = fed(models[0], caches[0], proposed)[:, -1].argmax(-1, keepdim=True)
            proposed = torch.cat((proposed, guess), 1)
        chosen = fed(models[1], caches[1], proposed)[:, known.size(1) - proposed.size(1) - 1 :]
        kept = agreed(proposed[0, known.size(1) :], chosen[0].argmax(-1))
        logits.append(chosen[:, : kept + 1])
        counts.update(proposed=proposed.size(1) - known.size(1), accepted=kept, passes=1, tokens=kept + 1)
        known = torch.cat((known, chosen[:, : kept + 1].argmax(-1)), 1)
        for cache in caches:
            cache.crop(known.size(1) - 1)
    return known[:, prompt.size(1) :], torch.cat(logits, 1)


def agreed(proposed: Tensor, chosen: Tensor) -> int:
    """Counts the proposed tokens before the first one that the target would not have chosen."""
    return int((proposed == chosen[: len(proposed)]).long().cumprod(0).sum())


def saved(program: Program, log: Log) -> Iterable[Evidence]:
    """Yields evidence that tokens of the draft were accepted, and saved passes of the target."""
    counts = program.extras[KEPT]
    yield at_least(f"accepted of {counts['proposed']} tokens of the draft", counts["accepted"])
    saved_passes = 0 < counts["passes"] < counts["tokens"]
    yield Evidence(f"passes of the target for {counts['tokens']} tokens", counts["passes"], engaged=saved_passes)


def sampled(program: Program, tokens: Tensor) -> Tensor:
    """Computes the logits of the distribution that acceptance and the second draw give, which are the target's own."""
    target: Any = program.module
    logits = fed(target, KeyValueCache(), tokens)
    wanted, guessed = (part.float().softmax(-1) for part in (logits, fed(Draft(target), KeyValueCache(), tokens)))
    program.extras[KEPT] = wanted[:, -1].double().cpu(), guessed[:, -1].double().cpu()
    kept = chance(wanted, guessed)
    made = guessed * kept + (guessed * (1 - kept)).sum(-1, keepdim=True) * rest(wanted, guessed)
    return (made.log() + logits.float().logsumexp(-1, keepdim=True)).to(logits.dtype)


def chance(wanted: Tensor, guessed: Tensor) -> Tensor:
    """Computes the probability that a token is accepted if the draft proposes it."""
    return (wanted / guessed).clamp(max=1.0)


def rest(wanted: Tensor, guessed: Tensor) -> Tensor:
    """Computes the distribution of the token that replaces a rejected one."""
    lacking = (wanted - guessed).clamp(min=0.0)
    return lacking / lacking.sum(-1, keepdim=True)


def drawn(wanted: Tensor, guessed: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
    """Draws `DRAWS` tokens, proposed from `guessed` and decided by `wanted`; returns them and the accepted share."""
    proposed, second = (
        torch.multinomial(part, DRAWS, replacement=True, generator=generator)
        for part in (guessed, rest(wanted, guessed))
    )
    kept = torch.rand(DRAWS, generator=generator, dtype=torch.float64) < chance(wanted, guessed)[proposed]
    return torch.where(kept, proposed, second), float(kept.double().mean())


def likelihood(tokens: Tensor, wanted: Tensor) -> float:
    """Computes the chance of Pearson's chi-square of tokens drawn from `wanted`; rare ones are counted together.

    A distribution p' with ``len(tokens) * sum((p' - p)**2 / p) >= 200`` has a chance below `ALARM` in 99.99 % of draws.
    """
    expected = wanted / wanted.sum() * len(tokens)
    cells = torch.where(expected < RARE, int(expected.argmax()), torch.arange(len(wanted)))
    observed, expected = (
        torch.bincount(cells[tokens], minlength=len(wanted)),
        expected.new_zeros(len(wanted)).index_add(0, cells, expected),
    )
    used = expected > 0
    statistic = ((observed - expected)[used].square() / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1) / 2.0, statistic / 2).double())


def right(program: Program, log: Log) -> Iterable[Evidence]:
    """Yields evidence that tokens drawn after each prompt have the target's distribution."""
    for row, (wanted, guessed) in enumerate(zip(*program.extras[KEPT], strict=True)):
        tokens, share = drawn(wanted, guessed, torch.Generator().manual_seed(row))
        yield Evidence(f"share of row {row}'s drafts that is accepted", f"{share:.3f}", engaged=0 < share < 1)
        by_chance = likelihood(tokens, wanted)
        claim = f"chance of a chi-square as large as row {row}'s >= {ALARM:g}"
        yield Evidence(claim, f"{by_chance:.3g}", engaged=by_chance >= ALARM)


_AT = {"family": "speculative", "source": "https://arxiv.org/abs/2211.17192"}
_GREEDY = {"kind": Greedy, "dtypes": ("float32",), **_AT}
_SAMPLED = "Tokens have the target's distribution, whatever the draft's is."

TECHNIQUES: tuple[Technique, ...] = (
    Serving("speculative-greedy", "Tokens are the target's own.", greedy, saved, "decoder-greedy", **_GREEDY),
    Serving("speculative-sampled", _SAMPLED, sampled, right, "decoder", **_AT),
)
