"""Operators of torch as workloads: ``op-NAME`` of one operator, and ``ops-FAMILY-PART-N``, bundles of a family.

An import of OpInfo takes 3 s: names and dtypes come from a file that ``python benchmarks/torch_operators.py`` writes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelcheck.core.case import Mode
from accelcheck.workloads.operator_samples import FEW, HALF, CalledOperator, make
from accelcheck.workloads.operator_variants import (
    HOLLOW,
    LAYOUTS,
    LONG,
    MIXED,
    OPTIONS,
    RESIZED,
    ROWS,
    SCALED,
    SHIFTED,
    SPECIAL,
    SUBNORMAL,
    WIDE,
    WRITTEN,
)
from accelcheck.workloads.problem import RUNTIMES, TRANSLATORS, Workload

FILE = Path(__file__).with_name("torch_operators.json")
SAMPLES = 10
"""Most samples of an operator alone, drawn from all of them; a third of it for each dtype that is not floating."""
BUNDLE = 24
"""Most operators of a bundle."""
STANDARD = frozenset({"unary", "binary", "reduction", "index", "pooling", "loss"})
"""Families whose bundles compile-static runs a level before the others'."""
UNSTEADY = frozenset({"linalg"})
"""Families with operators that have the trait ``unsteady``."""


@dataclass(frozen=True)
class SamplePart:
    """Samples of operators that make separate workloads.

    Attributes:
        declared: Dtypes that OpInfo declares, at least one of them for an operator.
        dtypes: Dtypes of the samples; empty for all declared ones that the operator has.
        cases: Dtypes of the cases, which all operators have.
        level: Level under eager; one more in half precision.
        compiled: Level of forward mode under compile-static in `STANDARD` families; others and half precision one up.
        families: Families whose operators have it; empty for all.
    """

    declared: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)
    cases: tuple[str, ...] = ("float32",)
    variants: tuple[str, ...] = ()
    level: int = 3
    compiled: int = 3
    gradients: bool = True
    families: frozenset[str] = frozenset()


CHECKED = frozenset({"unary", "binary", "reduction", "shape", "masked", "loss"})
"""Families of operators that refuse inputs which do not fit, where others read or write beyond them."""
PARTS: Mapping[str, SamplePart] = MappingProxyType(
    {
        "floating": SamplePart(("float32", *HALF), level=2),
        "further": SamplePart(("complex64", "int64", "uint8", "bool"), (), level=2),
        "half": SamplePart(HALF, cases=HALF, compiled=4),
        "edges": SamplePart(("float32",), variants=(*SPECIAL, *SCALED), gradients=False),
        "values": SamplePart(("float32",), variants=(*ROWS, *LONG, *SHIFTED, *SUBNORMAL), compiled=4, gradients=False),
        "wide": SamplePart(
            ("int64",), (), variants=tuple(WIDE), level=2, compiled=4, gradients=False, families=CHECKED
        ),
        "hollow": SamplePart(("float32",), variants=tuple(HOLLOW), compiled=4, families=CHECKED),
        "resized": SamplePart(("float32",), variants=tuple(RESIZED), compiled=4),
        "strided": SamplePart(("float32",), variants=tuple(LAYOUTS)),
        "mixed": SamplePart(("float32",), variants=tuple(MIXED), gradients=False),
        "options": SamplePart(("float32", "int64", "bool"), (), variants=(OPTIONS,), compiled=4),
        "written": SamplePart(("float32", "bool"), (), variants=tuple(WRITTEN), level=2, compiled=4, gradients=False),
    }
)
"""Parts of samples, by the name in their workloads."""
ALONE = frozenset({"floating", "further"})
"""Parts with a workload of its own for each operator too."""
COMMON = tuple(
    """add sub mul div.no_rounding_mode pow rsqrt sqrt exp log abs sin tanh sigmoid clamp where lt
    nn.functional.relu nn.functional.leaky_relu nn.functional.silu softmax log_softmax cumsum
    nn.functional.linear matmul bmm addmm einsum nn.functional.pad.constant
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d
    nn.functional.layer_norm nn.functional.rms_norm nn.functional.batch_norm nn.functional.softplus
    nn.functional.max_pool2d nn.functional.adaptive_avg_pool2d nn.functional.interpolate.bilinear
    nn.functional.embedding nn.functional.cross_entropy nn.functional.mse_loss
    sum mean amax argmax var sort topk cat stack split expand permute repeat roll tril
    gather scatter index_select masked_fill""".split()
)
"""Sixty operators of transformers, convolutional networks and their losses: the bundle of level 1."""
EAGER = frozenset({"eager"})
KERNELS = ("eager", "compile-static", "func-vmap-copies", "onnxruntime", "openvino")
"""Techniques with kernels or rules of their own for values, sizes and layouts: others hand operators on."""

TRANSFORMED: Mapping[str, int] = MappingProxyType({"func-jacfwd": 3, "func-vmap-copies": 3})
"""Levels of transforms with a formula of their own for each operator, which take seconds for a bundle."""


def alone(name: str, part: str, entry: Mapping[str, Any], family: str) -> Workload:
    """Workload of one operator's part."""
    operator = called(name, part, entry)
    label = f"op-{name}" if part == "floating" else f"op-{name}-{part}"
    summary = f"torch's operator {name}, with its samples of {', '.join(operator.variants or operator.dtypes)}."
    return _workload(label, summary, (operator,), SAMPLES, family, level=4, techniques=_TESTED)


_TESTED = frozenset({"eager", "compile-static"})


def _workload(
    name: str, summary: str, operators: tuple[CalledOperator, ...], most: int, family: str, **options: Any
) -> Workload:
    """Workload of operators of a family and a part, with `most` samples of each."""
    return Workload(
        name,
        summary,
        partial(make, operators=operators, most=most),
        modes=frozenset({Mode.FORWARD, Mode.BACKWARD} if any(o.gradients for o in operators) else {Mode.FORWARD}),
        dtypes=frozenset(operators[0].cases),
        traits=frozenset({"domain", "unsteady"} if family in UNSTEADY else {"domain"}),
        divisible=True,
        given=True,
        **options,
    )


def called(name: str, part: str, entry: Mapping[str, Any]) -> CalledOperator:
    """Operator as called by the workloads of a part, from the stored `entry` of that part."""
    chosen, refused = PARTS[part], entry.get("left_variants", ())
    variants = tuple(variant for variant in chosen.variants if variant not in refused)
    return CalledOperator(name, chosen.dtypes or tuple(entry["dtypes"]), entry["gradients"], variants, chosen.cases)


def bundles(stored: Mapping[str, Mapping[str, Any]]) -> Iterator[Workload]:
    """Yields workloads of up to `BUNDLE` operators of a family: one graph for a compiler instead of one for each."""
    for part in PARTS:
        families: dict[str, list[CalledOperator]] = {}
        for name, entry in stored.items():
            if part in entry and not entry[part].keys() & {"left", "apart"}:
                families.setdefault(entry["family"], []).append(called(name, part, entry[part]))
        for family, members in families.items():
            count = -(-len(members) // BUNDLE)
            for number in range(count):
                operators = tuple(members[number::count])
                kind = family if part == "floating" else f"{family}-{part}"
                names = ", ".join(operator.name for operator in operators)
                summary = f"torch's operators {names}, with a few samples each."
                techniques, levels = frozenset(TRANSLATORS if part in ALONE else KERNELS), _levels(family, part)
                options = {"level": PARTS[part].level, "techniques": techniques, "levels": levels}
                yield _workload(f"ops-{kind}-{number + 1}", summary, operators, FEW, family, **options)


def apart(stored: Mapping[str, Mapping[str, Any]]) -> Iterator[Workload]:
    """Yields bundles, for eager alone, of operators that no graph has: mostly, a shape depends on values."""
    for part in PARTS:
        kept = {name: entry[part] for name, entry in stored.items() if "apart" in entry.get(part, {})}
        operators = tuple(called(name, part, entry) for name, entry in kept.items() if "left" not in entry)
        if not operators:
            continue
        names = ", ".join(operator.name for operator in operators)
        summary = f"torch's operators {names}, which no graph has, with a few samples each."
        options = {"level": PARTS[part].level, "techniques": EAGER}
        yield _workload(f"ops-apart-{part}", summary, operators, FEW, "", **options)


def common(stored: Mapping[str, Mapping[str, Any]]) -> Workload:
    """Bundle of `COMMON`, with one sample of each operator."""
    operators = tuple(called(name, "floating", stored[name]["floating"]) for name in COMMON)
    summary = f"{len(COMMON)} operators of torch that most models are made of, with a sample each."
    levels = {"eager": 1, "compile-static": 2}
    return _workload("ops-common", summary, operators, 1, "", techniques=_TESTED, levels=levels)


def _levels(family: str, part: str) -> Mapping[str, int]:
    """Levels of a bundle. Gradients are compiled at level 4 where they cost minutes and add few kernels."""
    later = int(family not in STANDARD)
    if part == "floating":
        return {**TRANSLATORS, **TRANSFORMED, "compile-static": 2 + later}
    if part in ALONE:
        return {**TRANSLATORS, **TRANSFORMED, "compile-static/backward": 4}
    levels = {"eager": PARTS[part].level, "compile-static": PARTS[part].compiled + later, "compile-static/backward": 4}
    runtimes = RUNTIMES if (family, part) == ("reduction", "edges") else {}  # others take them minutes
    return {**dict.fromkeys(KERNELS, 4), **runtimes, **levels}


def _workloads() -> Iterator[Workload]:
    stored: Mapping[str, Mapping[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    for name, entry in stored.items():
        for part in PARTS:
            if part in ALONE and part in entry and "left" not in entry[part]:
                yield alone(name, part, entry[part], entry["family"])
    yield common(stored)
    yield from bundles(stored)
    yield from apart(stored)


WORKLOADS = tuple(_workloads())
