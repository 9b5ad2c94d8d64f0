"""Attention of decoders by other functions: shared key heads, and score functions of FlexAttention."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from accelcheck.core.capability import Capability
from accelcheck.core.case import Evidence, Mode
from accelcheck.devices.base import Device
from accelcheck.techniques.attention.flex import FlexCompiled, FlexEager
from accelcheck.techniques.base import Technique
from accelcheck.techniques.compilation.compile import INDUCTOR_GRAPH, Compilation, reset_compiler
from accelcheck.techniques.observe import Log
from accelcheck.techniques.serving.decoding import KEPT, Serving
from accelcheck.workloads.base import Program
from accelcheck.workloads.decoders import HEADS, GroupedAttention, visible


class FlexScores(Serving, Compilation):
    """Soft-capping, ALiBi's biases, windows and shared heads, as score and mask functions of FlexAttention."""

    family, source = "attention", FlexEager.source
    level = 2  # each call captures its functions anew
    warmups = 0
    base: type[FlexEager] = FlexEager

    def capability(self, device: Device) -> Capability:
        return self.base().capability(device)

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        reset_compiler()
        super().prepare(program, mode, device)
        compiled = self.base is FlexCompiled
        flex = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
        program.call = partial(self.serve, flex, program)

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        wanted = self.base is FlexCompiled
        yield Evidence(f"inductor graphs ran: {wanted}", ran := log.count(INDUCTOR_GRAPH), engaged=bool(ran) is wanted)
        yield from super().evidence(program, log, mode, device)


def grouped(program: Program, tokens: Tensor) -> Any:
    """Leaves the sharing of key heads to `scaled_dot_product_attention`."""
    kept = program.extras[KEPT] = []
    attend = functional.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Tensor:
        kept.append(f"{q.size(1)} on {k.size(1)}")
        return attend(q, k, *rest, **options)

    for part in attentions(program):
        part.grouped = True
    with mock.patch.object(functional, "scaled_dot_product_attention", counted):
        return program.module(tokens)


def flexed(flex: Any, program: Program, tokens: Tensor) -> Any:
    """Computes attention by `flex_attention`, compiled or not."""
    program.extras[KEPT] = []
    for part in attentions(program):
        part.attend = partial(scored, flex, part, program)  # type: ignore[method-assign]  # on this instance alone
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return program.module(tokens)


def scored(flex: Any, part: GroupedAttention, program: Program, *given: Tensor) -> Tensor:
    """Computes attention of queries, keys and values, at positions of queries and keys, by `flex`."""
    q, k, v, at, held = given
    program.extras[KEPT].append(f"{q.size(1)} on {k.size(1)}")
    cap, window, slopes = part.options.cap, part.options.window, part.slopes.flatten()

    def score(value: Tensor, _: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(value / cap) + slopes[head] * (held[key] - at[query]).to(value.dtype)

    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(window, at[query], held[key])

    blocks = create_block_mask(seen, None, None, q.size(2), k.size(2), device=str(q.device))
    out: Tensor = flex(q, k, v, score_mod=score if cap else None, block_mask=blocks, enable_gqa=True)
    return out


def attentions(program: Program) -> list[GroupedAttention]:
    """Lists the attention layers of a decoder."""
    return [part for part in program.module.modules() if isinstance(part, GroupedAttention)]


def calls(program: Program, log: Log) -> Iterable[Evidence]:
    """Yields evidence that each layer gave the function its own number of key heads, fewer than of queries."""
    wanted = [f"{HEADS} on {part.options.groups}" for part in attentions(program)]
    yield Evidence(f"query heads on key heads: {wanted}", str(kept := program.extras[KEPT]), engaged=kept == wanted)


_PAGE = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html"
_GQA = {"family": "attention", "source": _PAGE, "requires": Serving.requires | {"attention"}}
_PLAIN, _SCORES = "decoder decoder-window", "decoder-scores decoder-window"
_SAME = "soft-capping, ALiBi, windows and shared heads equals attention by definition."

TECHNIQUES: tuple[Technique, ...] = (
    Serving("gqa-sdpa", "Shared key heads equal repeated ones.", grouped, calls, _PLAIN, **_GQA),
    *(
        FlexScores(name, f"{what} {_SAME}", flexed, calls, _SCORES, base=base)
        for name, what, base in (
            ("flex-scores-eager", "FlexAttention with functions for", FlexEager),
            ("flex-scores", "One compiled kernel with", FlexCompiled),
        )
    ),
)
