"""Stores which of torch's operators are judged: accelcheck/workloads/torch_operators.json.

    python benchmarks/torch_operators.py              # all of this torch; 2 minutes on one core
    python benchmarks/torch_operators.py --check      # exit status 1 where the file says something else

Goes through torch's own description of its operators (OpInfo) and computes, for each, the reference of eager in float32. An operator
that has none is left out, with the reason. `accelcheck.workloads.torch_operators` makes a workload of each other one.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from accelcheck.core.case import Mode, stable_seed
from accelcheck.devices.torch_names import TorchDispatchMode
from accelcheck.techniques.eager import Eager
from accelcheck.verify.operators import FACTORISED, facts
from accelcheck.verify.oracle import compute
from accelcheck.verify.reference import OracleError
from accelcheck.workloads.base import Program
from accelcheck.workloads.torch_operators import FILE, PARTS, SAMPLES, CalledOperator, alone, database, template

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
"""Why operators are not judged."""
APART: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        "cdouble chalf linalg.inv_ex linalg.lu_solve lu_solve nn.functional.avg_pool2d take".split(),
        "torch 2.13 does not compile a sample of it",
    )
)
"""Why operators are in no bundle, beside those whose results have a shape that depends on values: one graph holds all of it."""
UNKNOWN_GRADIENTS = frozenset(
    "grid_sampler_2d grid_sampler_3d nn.functional.grid_sample nn.functional.interpolate.bicubic".split()
)
"""Operators whose gradients add what rounded weights of positions make of others: how they round is not known."""


def described() -> dict[str, dict[str, Any]]:
    """Describe each operator of this torch, for each of `PARTS`: its dtypes, whether it has gradients, and why it is left out."""
    entries = dict[str, dict[str, Any]]()
    for name, info in sorted(database().items()):
        entry: dict[str, Any] = {"family": family_of(name, info)}
        for part, words in PARTS.items():
            there = [word for word in words if getattr(torch, word) in info.dtypes]
            if there:
                entry[part] = _described(name, there[:1] if part == "floating" else there) | {"dtypes": there}
        entries[name] = entry
    return entries


def _described(name: str, words: Sequence[str]) -> dict[str, Any]:
    if name in LEFT:
        return {"left": LEFT[name]}
    made = template((CalledOperator(name, tuple(words)),), SAMPLES)
    if not made.calls:
        return {"left": ", ".join(sorted(made.left)) or "has no samples of dense tensors"}
    if name in UNKNOWN_GRADIENTS:
        return {"gradients": False, "left_gradients": "how the rounded weights of positions err in a sum is not known"}
    return {"gradients": any(call.smooth for call in made.calls)}


_FAMILIES = {
    "linalg": "linalg. svd lu ormqr geqrf cholesky pinverse triangular_solve qr pca_lowrank",
    "spectral": "fft. stft istft signal.",
    "special": "special. polygamma mvlgamma igamma lgamma digamma",
    "masked": "masked",
    "pooling": """nn.functional.adaptive_ nn.functional.avg_pool nn.functional.max_pool nn.functional.max_unpool
        nn.functional.lp_pool nn.functional.fractional""",
    "interpolation": """nn.functional.interpolate nn.functional.upsample nn.functional.grid_sample grid_sampler _upsample
        nn.functional.pad""",
    "index": """index scatter gather take put select argwhere nonzero where searchsorted _unsafe_ unique bincount""",
}
"""How the names of a family's operators begin."""


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


def referenced(name: str, part: str, entry: dict[str, Any], family: str) -> dict[str, Any]:
    """The entry of a part of an operator, with the reason where it, or its gradients, have no reference."""
    workload = alone(name, part, entry, family)
    for mode in (Mode.FORWARD, Mode.BACKWARD):
        if mode in workload.modes:
            try:
                found = compute(workload, Eager(), stable_seed(workload.name), "float32", mode)
            except OracleError as error:
                reason = " ".join(str(error).removeprefix(f"{workload.name} (draw 0): ").split())[:LONGEST]
                if mode is Mode.FORWARD:
                    return {"dtypes": entry["dtypes"], "left": reason}
                return entry | {"gradients": False, "left_gradients": reason}
            if mode is Mode.BACKWARD and not any(path.startswith("grad:") for path in found.budgets):
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
    """Whether LAPACK computes, or the bits of a result are others with copies of the inputs elsewhere in memory.

    Args:
        workload: Of a part of an operator.
        entry: Of that part: gets the reason why the operator is in no bundle.
        reason: If there is one already.
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    entries = described()
    for number, (name, entry) in enumerate(entries.items()):
        parts = [part for part in PARTS if part in entry and "left" not in entry[part]]
        differing = [
            unsteady(alone(name, part, entry[part], entry["family"]), entry[part], APART.get(name, ""))
            for part in parts
        ]
        if any(differing):
            entry["family"] = "linalg"  # its bundles, and what stands alone, have the trait `unsteady`
        for part in parts:
            entry[part] = referenced(name, part, entry[part], entry["family"])
        if sys.stderr.isatty():
            print(f"{number + 1} of {len(entries)}, {name}", end="\033[K\r", file=sys.stderr, flush=True)
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
