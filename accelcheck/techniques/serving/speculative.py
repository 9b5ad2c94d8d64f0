"""Speculative decoding: a draft proposes tokens, and one pass of the target decides how many of them to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.observe import at_least
from accelcheck.techniques.serving.decoding import Serving, fed, only
from accelcheck.workloads.decoders import Cache, Decoder, Greedy, Sampled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accelcheck.devices.base import Device
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

AHEAD = 3
"""Largest number of tokens that the draft proposes at a time."""
DRAWS = 20_000
"""Number of tokens that are drawn for each prompt."""
ALARM = 1e-6
"""Probability that a right sampler fails for a prompt."""
RARE = 5.0
"""Expected count below which tokens are counted together, as Pearson's test needs (Cochran 1954)."""
SOURCE = "https://arxiv.org/abs/2211.17192"
_COUNTS = "speculation"


class Draft(nn.Module):
    """Draft that is the target without its last block, as LayerSkip's: arXiv:2404.16710."""

    def __init__(self, target: Decoder) -> None:
        super().__init__()
        self.target = target

    def forward(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        x = self.target.embedding(tokens)
        for block in self.target.blocks[:-1]:
            x = block(x, positions, cache)
        out: Tensor = self.target.head(self.target.norm(x))
        return out


class SpeculativeGreedy(Serving):
    """Greedy generation, each sequence alone, with as few passes of the target as the draft's guesses allow."""

    family = "speculative"
    source = SOURCE

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        module: Greedy = only(program, Greedy)

        def call(prompts: Tensor) -> dict[str, Tensor]:
            counts = {"proposed": 0, "accepted": 0, "passes": 0, "tokens": 0}
            program.extras[_COUNTS] = counts
            rows = [speculated(module.decoder, prompt, module.count, counts) for prompt in prompts.split(1)]
            tokens, logits = (torch.cat(parts) for parts in zip(*rows, strict=True))
            return {"tokens": tokens, "logits": logits}

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        counts = program.extras[_COUNTS]
        yield at_least("tokens of the draft that were accepted", counts["accepted"])
        told = f"{counts['passes']} for {counts['tokens']}"
        yield Evidence("fewer passes of the target than tokens", told, engaged=0 < counts["passes"] < counts["tokens"])
        yield Evidence("tokens of the draft (any number)", counts["proposed"], engaged=True)


def speculated(target: Decoder, prompt: Tensor, count: int, counts: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Generates `count` tokens after a prompt ``(1, s)``; returns them and the target's logits of each."""
    draft, caches, known = Draft(target), (Cache(), Cache()), prompt
    logits: list[Tensor] = []
    while (missing := count - (known.size(1) - prompt.size(1))) > 0:
        proposed = known
        for _ in range(min(AHEAD, missing - 1)):
            guess = fed(draft, caches[0], proposed)[:, -1].argmax(-1, keepdim=True)
            proposed = torch.cat((proposed, guess), 1)
        ahead = proposed.size(1) - known.size(1)
        chosen = fed(target, caches[1], proposed)[:, -1 - ahead :]
        kept = accepted(proposed[0, known.size(1) :], chosen[0].argmax(-1))
        logits.append(chosen[:, : kept + 1])
        known = torch.cat((known, chosen[:, : kept + 1].argmax(-1)), 1)
        for cache in caches:
            cache.crop(known.size(1) - 1)
        for name, more in (("proposed", ahead), ("accepted", kept), ("passes", 1), ("tokens", kept + 1)):
            counts[name] += more
    return known[:, prompt.size(1) :], torch.cat(logits, 1)


def accepted(proposed: Tensor, chosen: Tensor) -> int:
    """Counts the proposed tokens before the first one that the target would not have chosen."""
    return int((proposed == chosen[: len(proposed)]).long().cumprod(0).sum())


class SpeculativeSampled(Serving):
    """Sampling of the next token from a draft, with acceptance and a second draw, and its distribution by formula.

    The result is the distribution that the rules give, which must equal the target's within rounding. Evidence is
    Pearson's chi-square of `DRAWS` tokens drawn by the same rules, with a false alarm in `ALARM` of prompts. It finds a
    distribution p' where ``DRAWS * sum((p' - p)**2 / p)`` is 200 or more, 0.01 a draw, with a probability of 1 - 1e-6.
    """

    family = "speculative"
    source = SOURCE

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        module: Sampled = only(program, Sampled)

        def call(prompts: Tensor) -> Tensor:
            wanted = fed(module.decoder, Cache(), prompts)[:, -1].softmax(-1)
            guessed = fed(Draft(module.decoder), Cache(), prompts)[:, -1].softmax(-1)
            program.extras[_COUNTS] = wanted, guessed
            kept = chance(wanted, guessed)
            return guessed * kept + (guessed * (1 - kept)).sum(-1, keepdim=True) * rest(wanted, guessed)

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        for row, (wanted, guessed) in enumerate(zip(*program.extras[_COUNTS], strict=True)):
            wanted, guessed = wanted.double().cpu(), guessed.double().cpu()
            tokens, kept = drawn(wanted, guessed, torch.Generator().manual_seed(row))
            share = kept / DRAWS
            yield Evidence(f"part of row {row}'s drafts that is accepted", f"{share:.3f}", engaged=0 < share < 1)
            by_chance = likelihood(torch.bincount(tokens, minlength=len(wanted)), wanted)
            claim = f"chance of a chi-square as large as row {row}'s >= {ALARM:g}"
            yield Evidence(claim, f"{by_chance:.3g}", engaged=by_chance >= ALARM)


def chance(wanted: Tensor, guessed: Tensor) -> Tensor:
    """Computes the probability that each token is accepted if the draft proposes it."""
    return (wanted / guessed).clamp(max=1.0)


def rest(wanted: Tensor, guessed: Tensor) -> Tensor:
    """Computes the distribution of the token that replaces a rejected one."""
    lacking = (wanted - guessed).clamp(min=0.0)
    return lacking / lacking.sum(-1, keepdim=True)


def drawn(wanted: Tensor, guessed: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """Draws `DRAWS` tokens, proposed from `guessed` and decided by `wanted`; returns them and how many were accepted."""
    proposed = torch.multinomial(guessed, DRAWS, replacement=True, generator=generator)
    kept = torch.rand(DRAWS, generator=generator, dtype=torch.float64) < chance(wanted, guessed)[proposed]
    second = torch.multinomial(rest(wanted, guessed), DRAWS, replacement=True, generator=generator)
    return torch.where(kept, proposed, second), int(kept.sum())


def likelihood(counts: Tensor, wanted: Tensor) -> float:
    """Computes the chance of Pearson's chi-square of counts, if their distribution is `wanted`."""
    expected = wanted / wanted.sum() * counts.sum()
    rare = expected < RARE
    observed, expected = (torch.cat((part[~rare], part[rare].sum().view(1))) for part in (counts.double(), expected))
    if expected[-1] < RARE:  # together with the least likely of the others
        least = int(expected[:-1].argmin())
        for part in (observed, expected):
            part[least] += part[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2.0).double(), statistic / 2))


TECHNIQUES: tuple[Technique, ...] = (
    SpeculativeGreedy("speculative-greedy", "Tokens are the target's own, whatever the draft proposes.", "decoder-greedy", dtypes=("float32",)),
    SpeculativeSampled(
        "speculative-sampled", "Tokens have the target's distribution, whatever the draft's is.", "decoder-sampled"
    ),
)
