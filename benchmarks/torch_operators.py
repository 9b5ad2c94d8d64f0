"""Stores which of torch's operators are judged: accelcheck/workloads/torch_operators.json.

    python benchmarks/torch_operators.py              # all of this torch; 20 minutes on one core, in 2 GiB
    python benchmarks/torch_operators.py --parts edges strided --operators linalg. fft.
    python benchmarks/torch_operators.py --check      # exit status 1 where the file says something else

Computes the float32 eager reference of each operator in torch's own description (OpInfo). An operator without one is
left out, with the reason; `accelcheck.workloads.torch_operators` makes a workload of each other one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Mode, stable_seed
from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.techniques.eager import Eager
from accelcheck.verify.operators import FACTORISED, facts
from accelcheck.verify.oracle import compute
from accelcheck.verify.oracle_runs import Source
from accelcheck.verify.reference import OracleError
from accelcheck.workloads.base import Program
from accelcheck.workloads.operator_samples import CalledOperator, database, template
from accelcheck.workloads.operator_variants import SCALED
from accelcheck.workloads.torch_operators import ALONE, FILE, PARTS, SAMPLES, SamplePart, alone

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.workloads.base import Workload

LONGEST = 160
"""Characters of a reason that are kept."""


LEFT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            "empty empty_like empty_permuted empty_strided new_empty new_empty_strided resize_ resize_as_".split(),
            "its result is what is in memory",
        ),
        **dict.fromkeys(("linalg.eig", "linalg.eigvals"), "eigenvalues have no order"),
        "nextafter": "its result is a neighbour in the dtype itself, of which FP64 knows nothing",
        "_softmax_backward_data": "its samples are no results of softmax, for which its rounding errors are known",
    }
)
"""Reasons why operators are not judged."""
LEFT_PARTS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        **{("linalg.matrix_rank", part): "rounding decides the rank" for part in ("edges", "resized", "strided")},
        **{("linalg.lstsq", part): "some of what it returns follows from where memory lies" for part in PARTS},
        **{
            ("linalg.lstsq.grad_oriented", part): "rounding decides whether there are residuals"
            for part in PARTS.keys() - ALONE
        },
        ("linalg.pinv.singular", "resized"): "takes minutes for many singular values",
        ("nn.functional.pdist", "hollow"): "its gradient of no points ends the process (torch 2.13, CPU)",
        **{(f"_segment_reduce.{kind}", "hollow"): "it reads beyond its input" for kind in ("lengths", "offsets")},
        **{(f"repeat_interleave{kind}", "wide"): "it repeats by them" for kind in ("", ".self_int", ".Tensor")},
        **{(name, "options"): "bits of its results depend on where memory lies" for name in ("matmul", "__rmatmul__")},
        **{
            (name, "options"): "eager errs more than the rounding that is known explains"
            for name in (
                *("arange", "nanquantile", "native_dropout_backward"),
                *("nn.functional.gelu", "nn.functional.interpolate.nearest", "nn.functional.layer_norm"),
            )
        },
        ("to", "wide"): "floats have no room for such integers, which a cast rounds",
        ("isclose", "options"): "rounding decides whether numbers are close",
        ("special.zeta", "resized"): "takes minutes, for it steps by 1 until an argument is positive",
    }
)
"""Reasons why parts of operators are left out."""
LEFT_VARIANTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "addcmul": {"infinite": "which product comes first decides whether an infinity meets a 0"},
        "histogramdd": {"expanded": "rounding decides the bin of numbers that are alike"},
        "logdet": {"ones": "rounding decides the sign of a determinant"},
        "nan_to_num": {"infinite": "an infinity becomes the largest number of the dtype"},
        "nn.functional.batch_norm": {"infinite": "which product comes first decides whether an infinity meets a 0"},
        "native_group_norm": {"zeros": "how a kernel rounds where a mean cancels is not known"},
        "nn.functional.scaled_dot_product_attention": {
            "infinite": "rounding decides whether an infinite score meets a 0"
        },
        **dict.fromkeys(
            "byte char short int long".split(),
            dict.fromkeys(
                ("nan", "infinite", "huge"), "what an integer becomes that cannot hold a number is not defined"
            ),
        ),
        "polygamma.polygamma_n_4": {"huge": "its results are near the least number of float32"},
        "stft": {"nan": "how a transform errs beside frames of NaN is not known"},
    }
)
"""Reasons why operators lack samples with special values or in a layout."""
ALIKE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("rows-nan", "long-nan"), "nan"),
        **dict.fromkeys(("rows-infinite", "long-infinite"), "infinite"),
        "rows-alike": "expanded",
        "long-zeros": "zeros",
    }
)
"""Variants that are left out for the reason of another one."""
FACTORISED_LEFT = MappingProxyType(dict.fromkeys(("nan", "infinite"), "no factorisation is defined"))
"""Reasons why operators of linear algebra lack such samples."""
INTERPOLATED_LEFT = MappingProxyType({"infinite": "rounding decides whether an infinity meets a weight of 0"})
"""Reasons why interpolations lack such samples."""
APART: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        "cdouble chalf linalg.inv_ex linalg.lu_solve lu_solve nn.functional.avg_pool2d take".split(),
        "torch 2.13 does not compile a sample of it",
    )
)
"""Reasons why operators are in no bundle, which is one graph; value-dependent shapes are another reason."""
LEFT_GRADIENTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            "grid_sampler_2d grid_sampler_3d nn.functional.grid_sample nn.functional.interpolate.bicubic".split(),
            "how the rounded weights of positions err in a sum is not known",
        ),
        "native_group_norm": "torch's forward derivative of its third result is up to 3e-8 where there is none",
        "sgn": "it is a zero without memory, to which torch 2.13 adds no second one",
    }
)
"""Reasons why operators are not differentiated."""


def described(parts: Mapping[str, SamplePart], beginnings: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Describe some operators of this torch for some of `PARTS`: dtypes, gradients, why they are left out."""
    entries = dict[str, dict[str, Any]]()
    for name, info in sorted(database().items()):
        if not name.startswith(beginnings):
            continue
        entry: dict[str, Any] = {"family": family_of(name, info)}
        for word, part in parts.items():
            fits = not part.families or entry["family"] in part.families
            there = [dtype for dtype in part.declared if fits and getattr(torch, dtype) in info.dtypes]
            if there and (reason := LEFT_PARTS.get((name, word))):
                entry[word] = {"left": reason, "dtypes": there}
            elif there and all(getattr(torch, dtype) in info.dtypes for dtype in (part.cases if part.dtypes else ())):
                entry[word] = _described(name, part, part.dtypes or there) | {"dtypes": there}
        entries[name] = entry
    return entries


def _described(name: str, part: SamplePart, words: Sequence[str]) -> dict[str, Any]:
    if name in LEFT:
        return {"left": LEFT[name]}
    made = template((CalledOperator(name, tuple(words), part.gradients, part.variants, part.cases),), SAMPLES)
    if not made.calls:
        return {"left": ", ".join(sorted(made.left)) or "has no samples of dense tensors"}
    if name in LEFT_GRADIENTS and "float32" in words:
        return {"gradients": False, "left_gradients": LEFT_GRADIENTS[name]}
    return {"gradients": any(call.smooth for call in made.calls)}


_FAMILIES = {
    "linalg": "linalg. svd lu ormqr geqrf cholesky pinverse triangular_solve qr pca_lowrank",
    "spectral": "fft. stft istft signal.",
    "special": "special. polygamma mvlgamma igamma lgamma digamma",
    "masked": "masked",
    "pooling": """nn.functional.adaptive_ nn.functional.avg_pool nn.functional.max_pool nn.functional.max_unpool
        nn.functional.lp_pool nn.functional.fractional""",
    "interpolation": """nn.functional.interpolate nn.functional.upsample nn.functional.grid_sample grid_sampler
        _upsample nn.functional.pad""",
    "index": """index scatter gather take put select argwhere nonzero where searchsorted _unsafe_ unique bincount""",
}
"""Beginnings of the names of a family's operators."""


def family_of(name: str, info: Any) -> str:
    """The family that an operator is judged with."""
    for word, beginnings in _FAMILIES.items():
        if name.startswith(tuple(beginnings.split())):
            return word
    kind = type(info).__name__.removesuffix("Info").removesuffix("Op").removesuffix("Ufunc").lower()
    if kind in {"unary", "binary", "reduction"}:
        return kind
    if name.startswith("nn.functional."):
        return "loss" if "loss" in name or "entropy" in name else "network"
    return "creation" if name.startswith(("new_", "full", "zeros", "ones", "arange", "eye", "lin", "log")) else "shape"


SUSPECTS = (*SCALED, "expanded")
"""Variants that are left out where a message names none, and there is a reference without one of them."""
_VARIANT = re.compile(r"\[\\?'\S+ (\S+) \d+\\?'\]")
"""Pattern of the name of a variant in the path of a result."""


def referenced(name: str, part: str, entry: dict[str, Any], family: str) -> dict[str, Any]:
    """The entry of a part of an operator, with reasons where it, a variant, or its gradients have no reference."""
    workload = alone(name, part, entry, family)
    for mode, dtype in itertools.product((Mode.FORWARD, Mode.BACKWARD), PARTS[part].cases):
        if mode in workload.modes:
            try:
                reference = compute(Source(workload, Eager(), stable_seed(workload.name), dtype, mode))
            except OracleError as error:
                reason = " ".join(str(error).removeprefix(f"{workload.name} (draw 0): ").split())[:LONGEST]
                refused = entry.get("left_variants", {})
                free = set(PARTS[part].variants) - refused.keys()
                named = match[1] if (match := _VARIANT.search(str(error))) else ""
                for variant in [named] if named else SUSPECTS:
                    if variant in free and len(free) > 1:
                        less = referenced(name, part, entry | {"left_variants": refused | {variant: reason}}, family)
                        if named or ("left" not in less and less["gradients"] == entry["gradients"]):
                            return less
                if mode is Mode.FORWARD:
                    return {"dtypes": entry["dtypes"], "left": reason}
                return entry | {"gradients": False, "left_gradients": reason}
            if mode is Mode.BACKWARD and not any(path.startswith("grad:") for path in reference.budgets):
                return entry | {"gradients": False, "left_gradients": "rounding errors alone decide every gradient"}
    return entry


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Sees the names of the operators that are called, and whether a result has a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen: set[str] = set()
        self.dynamic = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen.add(facts(func).name)
        self.dynamic = self.dynamic or not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(
            func.tags
        )
        return func(*args, **(kwargs or {}))


def unsteady(workload: Workload, entry: dict[str, Any], reason: str) -> bool:
    """Returns True where LAPACK computes, or where bits of a result depend on the inputs' place in memory.

    Args:
        workload: Workload of a part of an operator.
        entry: Entry of that part: gets the reason why the operator is in no bundle.
        reason: Reason known already, or empty.
    """
    program = Program.of(workload.problem(1))
    with _Names() as names:
        first = program.run(Mode.FORWARD)
        if Mode.BACKWARD in workload.modes:
            Program.of(workload.problem(1)).run(Mode.BACKWARD)
    if reason or names.dynamic:
        entry["apart"] = reason or "a shape depends on values"
    if not FACTORISED.isdisjoint(names.seen):
        return True
    kept = []
    for offset in range(1, 9):
        kept.append(torch.empty(offset * 24, dtype=torch.uint8))  # what follows lies elsewhere
        again = Program.of(workload.problem(1)).run(Mode.FORWARD)
        if any(not torch.equal(result.nan_to_num(), again[path].nan_to_num()) for path, result in first.items()):
            return True
    return False


def main() -> int:
    """Describe, compute and write; 1 where a check finds the file stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=[*PARTS], help="others are kept as they are stored"
    )
    parser.add_argument("--operators", nargs="+", default=[""], help="beginnings of names (default: all operators)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(FILE.read_text(encoding="utf-8"))
    chosen = {word: part for word, part in PARTS.items() if word in options.parts}
    entries = known | described(chosen, tuple(options.operators))
    for number, (name, entry) in enumerate(entries.items()):
        if not name.startswith(tuple(options.operators)):
            continue
        kept = {word: part for word, part in known.get(name, {}).items() if word not in options.parts}
        if not ALONE.issubset(options.parts):
            entry["family"] = kept.get("family", entry["family"])
        parts = [part for part in PARTS if part in entry and "left" not in entry[part]]
        differing = {
            part: unsteady(alone(name, part, entry[part], entry["family"]), entry[part], APART.get(name, ""))
            for part in parts
        }
        if any(differing[part] for part in ALONE & differing.keys()):
            entry["family"] = "linalg"  # its bundles, and what stands alone, have the trait `unsteady`
        for part in {"edges", "strided", "values"}.intersection(parts):
            left = dict(FACTORISED_LEFT) if entry["family"] == "linalg" else {}
            left |= {"nan": "a degree that is NaN is not defined"} if "_polynomial_" in name else {}
            left |= INTERPOLATED_LEFT if entry["family"] == "interpolation" and ".pad" not in name else {}
            left |= LEFT_VARIANTS.get(name, {})
            left |= {variant: left[kind] for variant, kind in ALIKE.items() if kind in left}
            left = {variant: reason for variant, reason in left.items() if variant in PARTS[part].variants}
            entry[part] |= {"left_variants": left} if left else {}
        for part in parts:
            entry[part] = referenced(name, part, entry[part], entry["family"])
        both = kept | entry
        entries[name] = {word: both[word] for word in ("family", *PARTS) if word in both}
        if sys.stderr.isatty():
            print(f"{number + 1} of {len(entries)}, {name}", end="\033[K\r", file=sys.stderr, flush=True)
    entries = dict(sorted(entries.items()))
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    judged = sum(any("left" not in entry[part] for part in PARTS if part in entry) for entry in entries.values())
    print(f"torch {torch.__version__}: {judged} of {len(entries)} operators are judged")
    if options.check:
        return int(FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
