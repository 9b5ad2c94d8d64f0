"""Attention of decoders by other functions: shared key heads, and score functions of FlexAttention."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from accelcheck.core.case import Evidence, Mode
from accelcheck.techniques.attention.flex import FlexCompiled, FlexEager
from accelcheck.techniques.attention.intercept import count, count_from_zero, intercept
from accelcheck.techniques.compilation.compile import INDUCTOR_GRAPH, graphs, reset_compiler
from accelcheck.techniques.observe import ProfilerLog, at_least, exactly
from accelcheck.techniques.serving.decoding import Serving, only
from accelcheck.workloads.decoders import Attention, Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcheck.core.capability import Capability
    from accelcheck.devices.base import Device
    from accelcheck.techniques.attention.intercept import Call
    from accelcheck.techniques.base import Technique
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program

_HEADS = "key heads"
"""Key in `Program.extras` of the numbers of query heads for each key head, one a call."""


class SharedHeads(Serving):
    """Key heads that `scaled_dot_product_attention` shares among query heads, in place of repeated ones."""

    family = "attention"

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        seen: list[int] = []
        program.extras[_HEADS] = seen
        program.resets.append(seen.clear)
        for part in attentions(program):
            part.grouped = True

        def attend(call: Call) -> Tensor:
            seen.append(call.query.size(1) // call.key.size(1) if call.enable_gqa else 1)
            return torch.nn.functional.scaled_dot_product_attention(**vars(call))

        intercept(program, attend)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        seen: list[int] = program.extras[_HEADS]
        options = attentions(program)[0].options
        claim = f"calls with {options.heads // options.groups} query heads on a key head = {options.blocks}"
        yield Evidence(claim, str(seen), engaged=seen == [options.heads // options.groups] * options.blocks)


def attentions(program: Program) -> list[Attention]:
    """Lists the attention layers of a decoder."""
    return [part for part in only(program, Decoder).modules() if isinstance(part, Attention)]


class FlexScores(Serving):
    """Soft-capping, ALiBi's biases, windows and shared heads, as score and mask functions of FlexAttention."""

    family = "attention"
    source = FlexEager.source
    level = 2
    watch = ProfilerLog
    compiled = False

    def capability(self, device: Device) -> Capability:
        return (FlexCompiled if self.compiled else FlexEager)().capability(device)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        reset_compiler()
        count_from_zero(program)
        flex = torch.compile(flex_attention, dynamic=False) if self.compiled else flex_attention
        for part in attentions(program):
            part.attend = partial(scored, program, flex, part)  # type: ignore[method-assign]  # on this instance alone

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield exactly("calls of flex_attention", program.extras["attention calls"], len(attentions(program)))
        if self.compiled:
            yield at_least("graphs compiled", graphs())
        yield Evidence("inductor graphs called", ran := log.count(INDUCTOR_GRAPH), engaged=bool(ran) is self.compiled)

    def finish(self) -> None:
        reset_compiler()


def scored(
    program: Program, flex: Callable[..., Any], part: Attention, q: Tensor, k: Tensor, v: Tensor, at: Tensor, held: Tensor
) -> Tensor:
    """Computes attention of queries at positions `at` to keys at positions `held` by `flex`."""
    count(program)
    options, slopes = part.options, part.slopes

    def score(value: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        capped = options.cap * torch.tanh(value / options.cap)
        return capped + slopes[head] * (held[key] - at[query]).to(value.dtype)

    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(options.window, at[query], held[key])

    blocks = create_block_mask(seen, None, None, q.size(2), k.size(2), device=str(q.device))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out: Tensor = flex(
            q, k, v, score_mod=score if options.cap else None, block_mask=blocks, enable_gqa=q.size(1) != k.size(1)
        )
    return out


def visible(window: int, query: Tensor, key: Tensor) -> Tensor:
    """Tells whether a query sees a key, by their positions."""
    return (key <= query) & (key > query - window) if window else key <= query


TECHNIQUES: tuple[Technique, ...] = (
    SharedHeads(
        "gqa-sdpa",
        "Attention with fewer key heads than query heads, down to one, equals that with repeated key heads.",
        *("decoder", "decoder-window"),
        source="https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
    ),
    FlexScores(
        "flex-scores-eager",
        "Soft-capping, ALiBi's biases, windows and shared heads as functions of FlexAttention equal attention by definition.",
        *("decoder-scores", "decoder-window"),
    ),
    FlexScores(
        "flex-scores",
        "One compiled kernel computes attention with soft-capping, ALiBi's biases, windows and shared heads.",
        *("decoder-scores", "decoder-window"),
        compiled=True,
        level=3,
    ),
)
