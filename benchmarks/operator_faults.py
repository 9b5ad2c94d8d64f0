"""Plants random faults in single operators, from a seed, and counts those that bundles and families of operators catch.

    python benchmarks/operator_faults.py --count=120 --seed=1        # about 5 s a fault on one core
    python benchmarks/operator_faults.py --json=baselines/cpu/operator_faults.json

Each fault is in one ATen operator that a bundle or family reaches, in eager, and of one kind:

- value: results of a binade are 1/1024 too large
- size: the last element of a row is 0 where the row's length has a given remainder modulo 8, from some length on
- stride: a non-contiguous operand is read as if it were contiguous
- option: an option is ignored: the operator takes the default of its schema
- integer: integers of more than 8 bits saturate at 127

Operator, kind, binade, remainder, length and option are drawn; no workload was written for a fault. A fault is `caught`
where a case fails, and `not reached` where no call met its condition.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import warnings
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcheck.core.case import Case, Evidence, Mode, Verdict
from accelcheck.devices.cpu import Cpu
from accelcheck.devices.torch_names import TorchDispatchMode, pytree
from accelcheck.selftest.runner import bench
from accelcheck.techniques.base import Technique
from accelcheck.techniques.matrix import Matrix
from accelcheck.verify.oracle import Store
from accelcheck.workloads.problem import divided

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from accelcheck.devices.base import Device
    from accelcheck.techniques.observe import Log
    from accelcheck.workloads.base import Program, Workload

KINDS = ("value", "size", "stride", "option", "integer")
LENGTHS = (1, 8, 64, 256, 1024)
MOST_LABELS = 24
"""Calls that are run, per operator and workload."""
NO_FAULTS = frozenset("detach clone alias _to_copy copy_ lift_fresh empty_like empty".split())
"""Operators that accelcheck itself calls around a workload."""


class Reached(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Collects the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.operators: dict[str, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators[str(func)] = func
        return func(*args, **(kwargs or {}))


@dataclass
class Fault:
    """A wrong operator.

    Attributes:
        operator: Overload of the operator.
        kind: One of `KINDS`.
        binade: Binade of the results that are too large.
        rest: Remainder of a row's length modulo 8.
        length: Least length of a row.
        option: Place of the option among the arguments of the schema.
        hits: Calls that met the condition.
    """

    operator: Any
    kind: str
    binade: int
    rest: int
    length: int
    option: int
    hits: int = field(default=0, compare=False)

    def __str__(self) -> str:
        schema = self.operator._schema  # noqa: SLF001
        detail = {
            "value": f"of [2^{self.binade}, 2^{self.binade + 1})",
            "size": f"rows of 8 n + {self.rest}, from {self.length} on",
            "option": schema.arguments[self.option].name if self.kind == "option" else "",
        }.get(self.kind, "")
        return f"{self.operator} {self.kind} {detail}".strip()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the wrong operator."""
        if self.kind == "option":
            return self._without_option(args, kwargs)
        if self.kind == "stride":
            return self.operator(*pytree.tree_map_only(Tensor, self._dense, args), **kwargs)
        out = self.operator(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._changed, out)

    def _without_option(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        argument = self.operator._schema.arguments[self.option]  # noqa: SLF001 - torch has no public name for it
        given = [*args], dict(kwargs)
        value = kwargs.get(argument.name, args[self.option] if self.option < len(args) else argument.default_value)
        if value == argument.default_value:
            return self.operator(*args, **kwargs)
        if argument.name in kwargs:
            given[1][argument.name] = argument.default_value
        else:
            given[0][self.option] = argument.default_value
        try:
            out = self.operator(*given[0], **given[1])
        except RuntimeError:  # the default does not fit these operands
            return self.operator(*args, **kwargs)
        self.hits += 1
        return out

    def _dense(self, value: Tensor) -> Tensor:
        if value.is_contiguous() or value.numel() < 2 or value.layout is not torch.strided:
            return value
        strides = torch.empty(value.shape, device="meta").stride()
        if value.storage_offset() + value.numel() > value.untyped_storage().nbytes() // value.element_size():
            return value  # an expanded one has no such elements
        self.hits += 1
        return value.as_strided(value.shape, strides)

    def _changed(self, out: Tensor) -> Tensor:
        if self.kind == "value" and out.is_floating_point():
            there = (out.abs() >= 2.0**self.binade) & (out.abs() < 2.0 ** (self.binade + 1))
            self.hits += bool(there.any())
            return torch.where(there, out * (1 + 2.0**-10), out) if there.any() else out
        if self.kind == "size" and out.dim() and out.shape[-1] % 8 == self.rest and out.shape[-1] >= self.length:
            self.hits += bool(out.numel())
            changed = out.clone()
            changed[..., -1] = 0
            return changed
        if self.kind == "integer" and out.dtype in {torch.int64, torch.int32, torch.int16}:
            self.hits += bool((out > 127).any())
            return out.clamp(max=127)
        return out


class Faulty(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Runs a wrong operator in place of the right one."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.fault = fault

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is self.fault.operator:
            return self.fault.run(args, kwargs or {})
        return func(*args, **(kwargs or {}))


class WrongOperator(Technique):
    """Eager with a wrong operator."""

    name = "wrong-operator"
    family = "planted"
    promise = "None."
    source = "https://example.invalid"

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def prepare(self, program: Program, mode: Mode, device: Device) -> None:
        module = program.module

        def call(*inputs: Any) -> Any:
            with Faulty(self.fault):
                return module(*inputs)

        program.call = call

    def evidence(self, program: Program, log: Log, mode: Mode, device: Device) -> Iterable[Evidence]:
        yield Evidence("a wrong operator is in place", str(self.fault.operator), engaged=True)


def index(workloads: Mapping[str, Workload]) -> tuple[dict[str, Any], dict[str, dict[str, list[str]]]]:
    """The operators that bundles and families reach, by name, and for each the labels of the calls by workload."""
    operators: dict[str, Any] = {}
    labels: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, workload in workloads.items():
        if not workload.divisible or name.startswith("op-") or "float32" not in workload.dtypes:
            continue
        problem = workload.problem(1)
        module = divided(problem.module)
        for label in module.labels:
            alone = module.without(frozenset(module.labels) - {label})
            with torch.no_grad(), Reached() as reached:
                alone.eval()(*problem.inputs)
            for operator, function in reached.operators.items():
                if function.overloadpacket.__name__ not in NO_FAULTS:
                    operators[operator] = function
                    labels[operator][name].append(label)
    return operators, labels


def drawn(generator: random.Random, operators: Mapping[str, Any]) -> Fault:
    """A fault of an operator, of a kind that it can have."""
    operator = operators[generator.choice(sorted(operators))]
    options = [
        place
        for place, argument in enumerate(operator._schema.arguments)  # noqa: SLF001 - torch has no public name for it
        if argument.has_default_value() and argument.type.kind() in {"FloatType", "IntType", "BoolType", "NumberType"}
    ]
    kind = generator.choice([kind for kind in KINDS if kind != "option" or options])
    return Fault(
        operator,
        kind,
        generator.randrange(-12, 8),
        generator.randrange(8),
        generator.choice(LENGTHS),
        generator.choice(options) if options else -1,
    )


def caught(fault: Fault, labels: Mapping[str, Sequence[str]], matrix: Matrix) -> tuple[str, int, str]:
    """The first case that fails because of a fault, its level and first fault; empty texts where none does."""
    technique = WrongOperator(fault)
    ordered = sorted(labels, key=lambda name: (matrix.workloads[name].levels.get("eager", 2), name))
    for name in ordered:
        workload = matrix.workloads[name]
        every = divided(workload.problem(1).module).labels
        reduced = workload.without(frozenset(every) - frozenset(labels[name][:MOST_LABELS]))
        with tempfile.TemporaryDirectory() as folder:
            reduced_matrix = replace(matrix, techniques={technique.name: technique}, workloads={reduced.name: reduced})
            case = Case(technique.name, reduced.name, "cpu", "float32", Mode.FORWARD, 2)
            record = bench(Cpu(), reduced_matrix, Store(Path(folder))).run(case)
        if record.verdict is Verdict.FAIL:
            return name, workload.levels.get("eager", 2), str(record.faults[0])
    return "", 0, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="number of faults that are drawn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the drawing (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file to store the outcomes in")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    matrix = Matrix.load()
    operators, labels = index(matrix.workloads)
    generator = random.Random(arguments.seed)
    rows = []
    for _ in range(arguments.count):
        fault = drawn(generator, operators)
        case, level, first = caught(fault, labels[str(fault.operator)], matrix)
        outcome = "caught" if case else "missed" if fault.hits else "not reached"
        rows.append({"fault": str(fault), "outcome": outcome, "case": case, "level": level, "first": first})
        print(f"{outcome:11}  {fault}  {case}  {first}"[:200], flush=True)
    counts = {word: sum(row["outcome"] == word for row in rows) for word in ("caught", "missed", "not reached")}
    print(f"{len(operators)} operators are reached; of {len(rows)} faults: {counts}")
    if arguments.json:
        stored = {"seed": arguments.seed, "operators": len(operators), "counts": counts, "faults": rows}
        arguments.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
