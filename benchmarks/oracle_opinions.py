"""Asks for a second opinion on the FP64 oracle of each operator of torch: baselines/cpu/oracle.json.

    python benchmarks/oracle_opinions.py          # half an hour; prints counts and differences
    python benchmarks/oracle_opinions.py erf sum  # some operators, nothing stored

The oracle runs torch's own FP64 kernels and formulas; an error there makes every verdict wrong. Two independent sources
check it: the NumPy or SciPy reference in torch's description of an operator, and, for derivatives, finite differences
of the FP64 kernel along a random direction, where both one-sided differences agree. Both see the samples of the suite,
special values and other sizes included. The script fails where an operator differs for a reason that `REASONS` lacks.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import SampleInput

from accelcheck.core.case import stable_seed
from accelcheck.devices.torch_names import pytree
from accelcheck.workloads.operator_calls import Hole, SampleCall
from accelcheck.workloads.operator_samples import FEW, CalledOperator, database, template
from accelcheck.workloads.torch_operators import FILE, PARTS, called

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TARGET = Path(__file__).parent.parent / "baselines" / "cpu" / "oracle.json"
PARTS_SEEN = ("floating", "edges", "resized", "strided")
RELATIVE, ABSOLUTE = 1e-7, 1e-10
"""Tolerances of values, by what float32 can show: some references are less exact than FP64's 1e-12."""
LARGEST = 2**13
"""Most elements of a sample's inputs for finite differences."""
STEP = 1e-6
"""Length of a finite difference, as a multiple of a normal direction, which grows with numbers above 1."""

_FINDING = "wrong in FP64 too: docs/findings.md"
_NO_FRACTION = (
    "the largest numbers have no fraction, so that a step moves the result as far; "
    "torch has the derivative of other numbers"
)
_CONVENTION = "torch and NumPy define it differently"
_DUPLICATES = "the sample writes several times to one place: which write wins is undefined"
_MAX_NORM = (
    "rows are scaled to max_norm in place, which torch documents to have no derivative; scale_grad_by_freq scales it"
)
_WINDOW = "the sample asks for a window in float32"
REASONS: dict[str, str] = {
    **dict.fromkeys(("heaviside", "special.airy_ai", "special.bessel_j0", "special.bessel_j1"), _FINDING),
    **dict.fromkeys(("special.bessel_y0", "special.bessel_y1"), _FINDING),
    **dict.fromkeys(("polygamma.polygamma_n_0", "polygamma.polygamma_n_2"), _FINDING),
    "special.polygamma.special_polygamma_n_0": _FINDING,
    **dict.fromkeys(("floor", "round", "round.decimals_3", "round.decimals_neg_3", "trunc"), _NO_FRACTION),
    "frac": f"{_NO_FRACTION}; of infinity torch makes NaN, NumPy 0",
    "fmod": "a step moves divisors near 0 across several jumps",
    **dict.fromkeys(("sgn", "sign"), f"{_CONVENTION}: the sign of NaN is 0"),
    "angle": f"{_CONVENTION}: the angle of -0.0 is 0, not pi",
    "var": f"{_CONVENTION}: the reference divides by N where nothing is said",
    "fft.irfftn": "with infinities the order of additions decides between inf and NaN",
    "native_layer_norm": "with infinities the order of additions decides between inf and NaN",
    **dict.fromkeys(("index_copy", "nn.functional.max_unpool2d", "nn.functional.max_unpool3d"), _DUPLICATES),
    "as_strided_scatter": _FINDING,
    **dict.fromkeys(("nn.functional.embedding", "nn.functional.embedding_bag"), _MAX_NORM),
    **{
        f"signal.windows.{name}": _WINDOW
        for name in "bartlett blackman cosine exponential general_cosine hamming hann nuttall".split()
    },
}
"""Reasons why operators differ."""


def filled(call: SampleCall, tensors: Sequence[Tensor]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in FP64."""
    leaves = [tensors[leaf.place].clone() if isinstance(leaf, Hole) else leaf for leaf in call.leaves]
    first, args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    return first, args, kwargs


def by_reference(call: SampleCall, tensors: Sequence[Tensor], info: Any) -> str:
    """Compare a call with the reference in NumPy.

    Returns:
        The first difference; empty where they agree, ``-`` where there is no reference, or it takes other arguments.
    """
    reference = getattr(info, "ref", None)
    if reference is None or any(isinstance(leaf, Hole) and leaf.is_complex for leaf in call.leaves):
        return "-"
    first, args, kwargs = filled(call, tensors)
    try:
        sample: Any = SampleInput
        inputs = sample(first, args=args, kwargs=kwargs).numpy()
        with np.errstate(all="ignore"):
            expected = reference(inputs.input, *inputs.args, **inputs.kwargs)
        expected = [torch.as_tensor(np.asarray(leaf)) for leaf in pytree.tree_leaves(expected)]
    except Exception:  # noqa: BLE001 - references take fewer arguments, and raise anything
        return "-"
    got = call(torch.ones(1, dtype=torch.float64), tensors)
    for a, other in zip(got, expected, strict=False):
        if a.shape != other.shape:
            return "-"  # a reference that keeps no dimensions, or other ones
        wide, known = a.double(), other.to(torch.float64) if not other.is_complex() else other
        if known.is_complex():
            return "-"
        if not torch.allclose(wide, known, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True):
            place = tuple(
                int(i) for i in (~torch.isclose(wide, known, RELATIVE, ABSOLUTE, equal_nan=True)).nonzero()[0]
            )
            return f"{call.label}: torch has {float(wide[place])!r}, NumPy {float(known[place])!r} at {list(place)}"
    return ""


def by_differences(call: SampleCall, tensors: Sequence[Tensor], info: Any) -> str:
    """Compare the derivative of a call along a random direction with finite differences.

    Returns:
        The difference; empty where they agree, ``-`` where there is nothing to compare, or a kink.
    """
    places = [leaf.place for leaf in call.leaves if isinstance(leaf, Hole) and tensors[leaf.place].is_floating_point()]
    if not call.smooth or not places or sum(tensors[place].numel() for place in places) > LARGEST:
        return "-"
    # OpInfo's wrapper gives any matrix the structure that the operator assumes.
    whole = replace(call, function=partial(info.gradcheck_wrapper, info.op))
    generator = torch.Generator().manual_seed(stable_seed(call.label))
    point = [tensors[place].clone().requires_grad_() for place in places]
    direction = [
        torch.randn(value.shape, generator=generator, dtype=torch.float64) * value.detach().abs().clamp(min=1.0)
        for value in point
    ]

    def run(values: Sequence[Tensor]) -> list[Tensor]:
        own = list(tensors)
        for place, value in zip(places, values, strict=True):
            own[place] = value
        return [out for out in whole(torch.ones(1, dtype=torch.float64), own) if out.is_floating_point()]

    def moved(by: float) -> float:
        with torch.no_grad():
            outs = run([value + by * step for value, step in zip(point, direction, strict=True)])
        return sum(float((out.double() * weight).sum()) for out, weight in zip(outs, weights, strict=True))

    try:
        outs = run(point)
        if any(out.dtype != torch.float64 for out in outs):
            return "-"  # a cast, whose rounding is larger than the step
        # Outputs without a derivative do not count.
        weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) * out.requires_grad for out in outs]
        roots = [(out, weight) for out, weight in zip(outs, weights, strict=True) if out.requires_grad]
        gradients = torch.autograd.grad(
            [out for out, _ in roots], point, [weight.to(out.dtype) for out, weight in roots], allow_unused=True
        )
        ahead, here, behind = moved(STEP), moved(0.0), moved(-STEP)
    except Exception as error:  # noqa: BLE001 - not what is looked for
        return f"{call.label}: raises {type(error).__name__}: {str(error)[:100]}"
    expected = sum(
        float((gradient * step).sum())
        for gradient, step in zip(gradients, direction, strict=True)
        if gradient is not None
    )
    right, left = (ahead - here) / STEP, (here - behind) / STEP
    scale = 1e-3 * max(abs(right), abs(left), abs(expected)) + 1e-4
    if not abs(right - left) <= scale or math.isnan(expected):
        return "-"
    middle = (right + left) / 2
    return f"{call.label}: derivative {expected:.6g}, difference {middle:.6g}" * (not abs(middle - expected) <= scale)


def opinions(name: str, entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Kind of opinion and what it says, for each sample of an operator."""
    for part in PARTS_SEEN:
        if part not in entry or "left" in entry[part]:
            continue
        operator: CalledOperator = called(name, part, entry[part])._replace(dtypes=PARTS[part].declared[:1])
        made = template((operator,), FEW)
        tensors = [value.double() if value.is_floating_point() else value for value in made.inputs]
        for call in made.calls:
            yield "values", by_reference(call, tensors, database()[name])
            if part in {"floating", "resized"}:
                yield "derivatives", by_differences(call, tensors, database()[name])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", help="names of operators; all unless said")
    given = parser.parse_args(words)
    warnings.simplefilter("ignore")
    stored: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    table: dict[str, dict[str, Any]] = {}
    counts = Counter[str]()
    unexplained = list[str]()
    for name in given.operators or stored:
        row: dict[str, Any] = {}
        for kind, text in opinions(name, stored[name]):
            cell = row.setdefault(kind, {"agree": 0, "differ": []})
            if text:
                cell["differ"] += [text] * (text != "-")
            else:
                cell["agree"] += 1
        for kind, cell in row.items():
            counts[f"{kind}: {'differ' if cell['differ'] else 'agree' if cell['agree'] else 'no opinion'}"] += 1
            for text in cell["differ"]:
                print(f"{name}: {kind}: {text}")
        if any(cell["differ"] for cell in row.values()):
            row["reason"] = REASONS.get(name, "")
            unexplained += [name] * (name not in REASONS)
        table[name] = row
    print("; ".join(f"{key} {count}" for key, count in sorted(counts.items())))
    if not given.operators:
        TARGET.write_text(
            json.dumps({"torch": torch.__version__, "operators": table}, indent=1) + "\n", encoding="utf-8"
        )
    if unexplained:
        print(f"differ for no reason that REASONS has: {', '.join(unexplained)}")
    return bool(unexplained)


if __name__ == "__main__":
    sys.exit(main())
